"""When the engine judges a job, what it tells then, and when it keeps silent. Time is what the test says it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample, ReadingStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import AlertName, Finding, JobSpec, JobState, PowerState
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView


class ManualEngineClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


class FakeNodes:
    """A NodeSource whose nodes say what they are told to say."""

    def __init__(self, time: ManualEngineClock, names: Iterable[str]) -> None:
        self._time = time
        self._said: list[NodeSample] = []
        self._sequence = 0
        self.standing = {name: NodeLink(name, HostStatus.OK, "") for name in names}

    def drain(self) -> list[NodeSample]:
        said, self._said = self._said, []
        return said

    def links(self) -> Mapping[str, NodeLink]:
        return self.standing

    def say(self, *names: str, gpus: tuple[GpuSample, ...] | None = None) -> None:
        self._sequence += 1
        for name in names:
            now = self._time.now
            boards = working() if gpus is None else gpus
            self._said.append(NodeSample(name, HostStatus.OK, "", self._sequence, now, now, now, "nvml", boards))

    def cut(self, *names: str) -> None:
        for name in names:
            self.standing[name] = NodeLink(name, HostStatus.UNREACHABLE, "no line for 6 s")

    def mend(self, *names: str) -> None:
        for name in names:
            self.standing[name] = NodeLink(name, HostStatus.OK, "")


class RecordingSink:
    """A Telling that keeps what it was told."""

    def __init__(self) -> None:
        self.looks: list[tuple[tuple[Finding, ...], frozenset[str]]] = []

    def observe(
        self,
        findings: Sequence[Finding],
        judged_jobs: frozenset[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, RecoveryEvidence],
    ) -> None:
        assert witnesses.keys() == judged_jobs - {""}
        self.looks.append((tuple(findings), judged_jobs))

    def episodes(self) -> tuple[EpisodeView, ...]:
        return ()

    def stats(self) -> DeliveryStats:
        return DeliveryStats()

    @property
    def judged(self) -> list[frozenset[str]]:
        return [jobs - {""} for _, jobs in self.looks]


class World:
    """An engine, its nodes, whom it tells, and the time."""

    def __init__(self, *specs: JobSpec, nodes: Sequence[str] | None = None) -> None:
        self.time = ManualEngineClock()
        names = list(dict.fromkeys(node for spec in specs for node in spec.nodes)) if nodes is None else nodes
        self.nodes = FakeNodes(self.time, names)
        self.told = RecordingSink()
        self.engine = Engine(specs, self.nodes, self.told, self.time)

    def at(self, seconds: float, *names: str, gpus: tuple[GpuSample, ...] | None = None) -> list[str]:
        """At this second of the test these nodes speak and the engine looks: the jobs that were judged then."""
        self.time.now = 100.0 + seconds
        self.nodes.say(*names, gpus=gpus)
        before = len(self.told.looks)
        self.engine.tick()
        return sorted(job for jobs in self.told.judged[before:] for job in jobs)


def working(watts: float | None = 985.0) -> tuple[GpuSample, ...]:
    board = GpuSample(
        index=0, name="NVIDIA B300 SXM6 AC", power_watts=watts, power_limit_watts=1100.0, utilization_percent=100.0,
        memory_used_bytes=8e10, memory_total_bytes=2.8e11,
    )  # fmt: skip
    return tuple(replace(board, index=index) for index in range(8))


def lost() -> tuple[GpuSample, ...]:
    first, *rest = working()
    return (replace(first, power_watts=None, reasons={"power_watts": ReadingStatus.LOST}), *rest)


PAIR = JobSpec("pair", ("a", "b"))
SINGLE = JobSpec("single", ("c",))
LARGE = JobSpec("large", tuple(f"n{i}" for i in range(8)))


# When


def test_a_job_is_judged_as_soon_as_its_round_is_in() -> None:
    world = World(PAIR, SINGLE)
    world.at(0.0)
    assert world.at(0.9, "a") == []
    assert world.at(0.91) == []
    assert world.at(0.92, "b") == ["pair"]
    assert world.at(0.93, "c") == ["single"]


def test_stragglers_are_waited_for_a_quarter_of_an_interval() -> None:
    world = World(PAIR)
    world.at(0.0)
    assert world.at(1.0, "a") == []
    assert world.at(1.24) == []
    assert world.at(1.25) == ["pair"]
    assert world.at(1.3, "b") == []  # late: the start of another round, in which the other is waited for
    assert world.at(1.55) == ["pair"]


def test_a_node_that_is_known_to_be_silent_is_not_waited_for() -> None:
    world = World(PAIR)
    world.at(0.0)
    world.nodes.cut("b")
    assert world.at(1.0, "a") == ["pair"]


def test_a_silent_job_is_looked_at_once_an_interval() -> None:
    world = World(JobSpec("slow", ("a",), interval_seconds=2.0))
    assert world.at(0.0) == ["slow"]
    assert world.at(1.9) == []
    assert world.at(2.0) == ["slow"]
    assert world.at(2.25) == []
    assert world.at(4.0) == ["slow"]


def test_nothing_due_costs_nothing_and_publishes_nothing() -> None:
    world = World(PAIR)
    world.at(0.0)
    snapshot, looks = world.engine.snapshot, len(world.told.looks)
    world.at(0.1)
    assert world.engine.snapshot is snapshot
    assert len(world.told.looks) == looks


# What


def test_only_jobs_that_were_judged_are_spoken_of() -> None:
    world = World(PAIR, SINGLE)
    world.at(0.0, "a", "b", "c", gpus=lost())
    assert {finding.job for finding in world.told.looks[-1][0]} == {"pair", "single"}
    world.at(0.5, "c", gpus=lost())
    findings, judged = world.told.looks[-1]
    assert judged == {"", "single"}
    assert {finding.job for finding in findings} == {"single"}


def test_two_jobs_on_one_node_both_hear_it() -> None:
    world = World(JobSpec("one", ("a",)), JobSpec("two", ("a", "b")))
    world.at(0.0)
    assert world.at(1.0, "a", "b") == ["one", "two"]
    assert world.engine.snapshot.nodes["a"].jobs == ("one", "two")
    assert {name: len(view.sample.gpus) for name, view in world.engine.snapshot.jobs.items()} == {"one": 8, "two": 16}


def test_a_node_that_nobody_asked_for_changes_nothing() -> None:
    world = World(SINGLE)
    world.at(0.0)
    assert world.at(0.5, "stranger") == []
    assert "stranger" not in world.engine.snapshot.nodes


def test_the_view_tells_state_verdict_boards_and_history() -> None:
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


# Blind is not broken


def play(world: World, start: int, end: int, *names: str) -> set[str]:
    return {job for second in range(start, end) for job in world.at(float(second), *names)}


def test_a_blind_watcher_judges_no_job_out_of_sight_and_says_one_thing() -> None:
    world = World(LARGE, SINGLE)
    everybody = [*LARGE.nodes, "c"]
    play(world, 0, 5, *everybody)
    world.nodes.cut(*LARGE.nodes)
    seen = len(world.told.looks)
    assert play(world, 5, 60, "c") == {SINGLE.name}  # all of its nodes answer: it goes on being watched
    alerts = {finding.alert for findings, _ in world.told.looks[seen:] for finding in findings}
    assert alerts == {AlertName.WATCHER_DEGRADED}
    assert all(jobs <= {"", SINGLE.name} for _, jobs in world.told.looks[seen:])
    assert world.engine.snapshot.blind


def test_when_sight_comes_back_the_jobs_are_judged_again_after_a_pause() -> None:
    world = World(LARGE)
    play(world, 0, 5, *LARGE.nodes)
    world.nodes.cut(*LARGE.nodes)
    play(world, 5, 30)
    world.nodes.mend(*LARGE.nodes)
    looks = len(world.told.looks)
    assert play(world, 30, 33, *LARGE.nodes) == set()
    assert len(world.told.looks) == looks  # not even that all is well
    assert play(world, 33, 40, *LARGE.nodes) == {"large"}
    assert world.told.looks[-1][0] == ()
    assert not world.engine.snapshot.blind
    assert world.engine.snapshot.jobs["large"].state is JobState.COMPUTING


def test_a_starved_watcher_settles_before_it_judges() -> None:
    world = World(SINGLE)
    play(world, 0, 5, "c")
    assert world.at(60.0) == []  # stopped for a while: what it knows is old, and that is nobody's fault
    assert world.at(61.0, "c") == []
    assert world.at(63.5, "c") == ["single"]
    assert world.told.looks[-1][0] == ()
    assert world.engine.snapshot.ticks_overrun == 1


def test_a_bug_that_one_job_meets_hides_no_other() -> None:
    world = World(PAIR, SINGLE)
    world.at(0.0, "a", "b", "c")
    bad = replace(working()[0], power_watts="985 W")  # type: ignore[arg-type]  # what no reader gives: a bug of ours
    world.time.now += 1
    world.nodes.say("a", "b", gpus=(bad,))
    with pytest.raises(TypeError):
        world.at(1.0, "c")
    assert world.told.judged[-1] == {"single"}
    seen = {name: view.sample.wall_seconds for name, view in world.engine.snapshot.jobs.items()}
    assert seen["single"] > seen["pair"]
    assert world.at(1.1) == []  # not tried again and again with the same
    assert world.at(2.0, "a", "b", "c") == ["pair", "single"]
