"""When the engine evaluates a job, what it reports, and when it reports nothing. The test sets the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample, ReadingStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import AlertName, Finding, JobSpec, JobState, PowerState
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView


class ManualEngineClock(Clock):
    """A clock that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


class FakeNodes:
    """A SampleSource whose nodes send what the test makes them send."""

    def __init__(self, time: ManualEngineClock, names: Iterable[str]) -> None:
        self._time = time
        self._pending: list[NodeSample] = []
        self._sequence = 0
        self.connections = {name: NodeLink(name, HostStatus.OK, "") for name in names}

    def drain(self) -> list[NodeSample]:
        pending, self._pending = self._pending, []
        return pending

    def links(self) -> Mapping[str, NodeLink]:
        return self.connections

    def send(self, *names: str, gpus: tuple[GpuSample, ...] | None = None) -> None:
        self._sequence += 1
        for name in names:
            now = self._time.now
            gpu_samples = working() if gpus is None else gpus
            self._pending.append(
                NodeSample(name, HostStatus.OK, "", self._sequence, now, now, now, "nvml", gpu_samples)
            )

    def cut(self, *names: str) -> None:
        for name in names:
            self.connections[name] = NodeLink(name, HostStatus.UNREACHABLE, "no line for 6 s")

    def mend(self, *names: str) -> None:
        for name in names:
            self.connections[name] = NodeLink(name, HostStatus.OK, "")


class RecordingSink:
    """A FindingSink that records what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Finding, ...], frozenset[str]]] = []

    def observe(
        self,
        findings: Sequence[Finding],
        evaluated_jobs: frozenset[str],
        now: float,
        wall: float,
        recoveries: Mapping[str, RecoveryEvidence],
    ) -> None:
        assert recoveries.keys() == evaluated_jobs - {""}
        self.calls.append((tuple(findings), evaluated_jobs))

    def episodes(self) -> tuple[EpisodeView, ...]:
        return ()

    def stats(self) -> DeliveryStats:
        return DeliveryStats()

    @property
    def evaluated(self) -> list[frozenset[str]]:
        return [jobs - {""} for _, jobs in self.calls]


class World:
    """An engine, its nodes, its sink, and the time."""

    def __init__(self, *specs: JobSpec, nodes: Sequence[str] | None = None) -> None:
        self.time = ManualEngineClock()
        names = list(dict.fromkeys(node for spec in specs for node in spec.nodes)) if nodes is None else nodes
        self.nodes = FakeNodes(self.time, names)
        self.sink = RecordingSink()
        self.engine = Engine(specs, self.nodes, self.sink, self.time)

    def at(self, seconds: float, *names: str, gpus: tuple[GpuSample, ...] | None = None) -> list[str]:
        """At this second the given nodes send a sample and the engine ticks. Returns the jobs evaluated then."""
        self.time.now = 100.0 + seconds
        self.nodes.send(*names, gpus=gpus)
        before = len(self.sink.calls)
        self.engine.tick()
        return sorted(job for jobs in self.sink.evaluated[before:] for job in jobs)


def working(watts: float | None = 985.0) -> tuple[GpuSample, ...]:
    first_gpu = GpuSample(
        index=0, name="NVIDIA B300 SXM6 AC", power_watts=watts, power_limit_watts=1100.0, utilization_percent=100.0,
        memory_used_bytes=8e10, memory_total_bytes=2.8e11,
    )  # fmt: skip
    return tuple(replace(first_gpu, index=index) for index in range(8))


def lost() -> tuple[GpuSample, ...]:
    first, *rest = working()
    return (replace(first, power_watts=None, reasons={"power_watts": ReadingStatus.LOST}), *rest)


PAIR = JobSpec("pair", ("a", "b"))
SINGLE = JobSpec("single", ("c",))
LARGE = JobSpec("large", tuple(f"n{i}" for i in range(8)))


# When


def test_a_job_is_evaluated_as_soon_as_its_round_is_complete() -> None:
    world = World(PAIR, SINGLE)
    world.at(0.0)
    assert world.at(0.9, "a") == []
    assert world.at(0.91) == []
    assert world.at(0.92, "b") == ["pair"]
    assert world.at(0.93, "c") == ["single"]


def test_a_round_waits_a_quarter_of_an_interval_for_late_nodes() -> None:
    world = World(PAIR)
    world.at(0.0)
    assert world.at(1.0, "a") == []
    assert world.at(1.24) == []
    assert world.at(1.25) == ["pair"]
    assert world.at(1.3, "b") == []  # late: it starts the next round, which waits for the other node
    assert world.at(1.55) == ["pair"]


def test_a_round_does_not_wait_for_a_node_that_does_not_answer() -> None:
    world = World(PAIR)
    world.at(0.0)
    world.nodes.cut("b")
    assert world.at(1.0, "a") == ["pair"]


def test_a_job_without_samples_is_evaluated_once_an_interval() -> None:
    world = World(JobSpec("slow", ("a",), interval_seconds=2.0))
    assert world.at(0.0) == ["slow"]
    assert world.at(1.9) == []
    assert world.at(2.0) == ["slow"]
    assert world.at(2.25) == []
    assert world.at(4.0) == ["slow"]


def test_a_tick_without_a_due_job_publishes_nothing() -> None:
    world = World(PAIR)
    world.at(0.0)
    snapshot, calls = world.engine.snapshot, len(world.sink.calls)
    world.at(0.1)
    assert world.engine.snapshot is snapshot
    assert len(world.sink.calls) == calls


# What


def test_only_evaluated_jobs_are_reported() -> None:
    world = World(PAIR, SINGLE)
    world.at(0.0, "a", "b", "c", gpus=lost())
    assert {finding.job for finding in world.sink.calls[-1][0]} == {"pair", "single"}
    world.at(0.5, "c", gpus=lost())
    findings, evaluated = world.sink.calls[-1]
    assert evaluated == {"", "single"}
    assert {finding.job for finding in findings} == {"single"}


def test_two_jobs_on_one_node_both_get_its_samples() -> None:
    world = World(JobSpec("one", ("a",)), JobSpec("two", ("a", "b")))
    world.at(0.0)
    assert world.at(1.0, "a", "b") == ["one", "two"]
    assert world.engine.snapshot.nodes["a"].jobs == ("one", "two")
    assert {name: len(view.sample.gpus) for name, view in world.engine.snapshot.jobs.items()} == {"one": 8, "two": 16}


def test_a_node_of_no_job_changes_nothing() -> None:
    world = World(SINGLE)
    world.at(0.0)
    assert world.at(0.5, "stranger") == []
    assert "stranger" not in world.engine.snapshot.nodes


def test_the_view_has_state_verdict_gpus_and_history() -> None:
    world = World(PAIR)
    for second in range(4):
        world.at(float(second), "a", "b")
    view = world.engine.snapshot.jobs["pair"]
    assert view.state is JobState.COMPUTING
    assert view.verdict.state is PowerState.COMPUTE
    assert len(view.sample.gpus) == 16
    assert [point.power_watts_median for point in view.timeline] == [985.0] * 4
    assert view.state_since_wall_seconds <= world.time.wall()
    assert view.reason
    assert not world.engine.snapshot.blind


def test_the_delay_of_a_finding_is_counted_once_from_its_beginning() -> None:
    world = World(SINGLE)
    world.at(0.0, "c")
    counts = [len(world.engine.snapshot.detection_delays_seconds)]
    for second in range(1, 23):
        world.at(float(second), "c", gpus=lost() if second in (1, 2, 20, 21) else None)
        counts.append(len(world.engine.snapshot.detection_delays_seconds))
    assert [second for second, count in enumerate(counts) if count] == [1, 20]


# If most nodes are lost, the watcher's network has failed


def play(world: World, start: int, end: int, *names: str) -> set[str]:
    return {job for second in range(start, end) for job in world.at(float(second), *names)}


def test_after_a_network_loss_only_jobs_whose_nodes_all_answer_are_evaluated_and_one_alert_is_reported() -> None:
    world = World(LARGE, SINGLE)
    all_nodes = [*LARGE.nodes, "c"]
    play(world, 0, 5, *all_nodes)
    world.nodes.cut(*LARGE.nodes)
    seen = len(world.sink.calls)
    assert play(world, 5, 60, "c") == {SINGLE.name}  # all of its nodes answer, so it is still evaluated
    alerts = {finding.alert for findings, _ in world.sink.calls[seen:] for finding in findings}
    assert alerts == {AlertName.WATCHER_DEGRADED}
    assert all(jobs <= {"", SINGLE.name} for _, jobs in world.sink.calls[seen:])
    assert world.engine.snapshot.blind


def test_after_the_network_returns_jobs_are_evaluated_again_after_a_pause() -> None:
    world = World(LARGE)
    play(world, 0, 5, *LARGE.nodes)
    world.nodes.cut(*LARGE.nodes)
    play(world, 5, 30)
    world.nodes.mend(*LARGE.nodes)
    calls = len(world.sink.calls)
    assert play(world, 30, 33, *LARGE.nodes) == set()
    assert len(world.sink.calls) == calls  # not even that there is no problem
    assert play(world, 33, 40, *LARGE.nodes) == {"large"}
    assert world.sink.calls[-1][0] == ()
    assert not world.engine.snapshot.blind
    assert world.engine.snapshot.jobs["large"].state is JobState.COMPUTING


def test_a_stalled_watcher_pauses_before_it_evaluates() -> None:
    world = World(SINGLE)
    play(world, 0, 5, "c")
    assert world.at(60.0) == []  # the process was stopped: its samples are old, which is no problem of the job
    assert world.at(61.0, "c") == []
    assert world.at(63.5, "c") == ["single"]
    assert world.sink.calls[-1][0] == ()
    assert world.engine.snapshot.ticks_overrun == 1


def test_an_error_in_one_job_does_not_stop_the_evaluation_of_others() -> None:
    world = World(PAIR, SINGLE)
    world.at(0.0, "a", "b", "c")
    bad = replace(working()[0], power_watts="985 W")  # type: ignore[arg-type]  # no collector returns this: simulates a bug
    world.time.now += 1
    world.nodes.send("a", "b", gpus=(bad,))
    with pytest.raises(TypeError):
        world.at(1.0, "c")
    assert world.sink.evaluated[-1] == {"single"}
    seen = {name: view.sample.wall_seconds for name, view in world.engine.snapshot.jobs.items()}
    assert seen["single"] > seen["pair"]
    assert world.at(1.1) == []  # not retried with the same samples
    assert world.at(2.0, "a", "b", "c") == ["pair", "single"]


def test_a_job_that_was_never_seen_is_unknown_since_its_first_evaluation() -> None:
    world = World(SINGLE)
    world.nodes.cut("c")
    for second in range(20):
        world.at(float(second))
    view = world.engine.snapshot.jobs["single"]
    assert view.state is JobState.UNKNOWN
    assert world.time.wall() - view.state_since_wall_seconds == 19.0
    assert view.evaluated_seconds - view.state_since_seconds == 19.0
    assert view.state_began_unseen
