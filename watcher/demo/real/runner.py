"""The real demo: the paper's deadlock with real ranks under the real watcher, then the same data behind the gate.

    evenness = "off":  train ──► one rank in the barrier of the save, the others in the next step ──► JobHung ──► killed
    evenness = "min":  the gate warns, all ranks stop at the count of the shortest ──► saved ──► JobCompleted

The job and its deadlock are real, and so are SSH, probe, detection and messages. The GPUs are simulated: they follow
the ranks. Which rank waits in which collective is also asked directly, from torch's worker server of each rank, which
answers while the main thread hangs: different collectives at one sequence number of one group are conclusive
(arXiv 2608.05944, section 3).
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
from rich.console import Console
from rich.markup import escape

from wattwatch.collectors.simulated.cluster import SimulatedCluster, describe_busy_machine
from wattwatch.collectors.simulated.real_job import FollowedJob
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service, ServiceStartError
from wattwatch.watcher.demo.configuration import INTERVAL_SECONDS, write_configuration
from wattwatch.watcher.demo.real.job import GateOutput, JobFiles, JobSize, RealJob, blame_machine
from wattwatch.watcher.demo.receiver import DemoReceiver, ReceivedAlert
from wattwatch.watcher.demo.runner import DemoError
from wattwatch.watcher.demo.terminal import SEVERITY_COLORS

QUERY_TIMEOUT_SECONDS: Final = 10.0
TRAINER_FRAME_PATTERN: Final = re.compile(r'File "[^"]*?(trainer/[^"]+)", line (\d+) in (\w+)')


@dataclass(frozen=True, slots=True)
class RankWait:
    """The collective that one rank is in."""

    rank: int
    group: str
    slot: int  # sequence number of the collective in its group, the same for all ranks that agree
    collective: str  # as "gloo:barrier"
    place: str  # innermost frames of the trainer on its stack; "" if there are none

    def __str__(self) -> str:
        return f"rank {self.rank} in {self.collective} (sequence number {self.slot} of group {self.group})"


def query_worker(socket_path: Path, handler: str) -> bytes:
    """The answer of a worker server to one request. Raises httpx.HTTPError or OSError."""
    # The path may be a link to a shorter one: the path of a Unix socket is limited to 107 bytes.
    transport = httpx.HTTPTransport(uds=str(socket_path.resolve()))
    with httpx.Client(transport=transport, timeout=QUERY_TIMEOUT_SECONDS) as client:
        return client.post(f"http://rank/handler/{handler}").raise_for_status().content


def find_current_wait(rank: int, record: Mapping[str, Any], stacks: str) -> RankWait | None:
    """The collective that the rank is in, from its flight record; None if no collective is pending.

    A pending gloo entry keeps the state "scheduled"; only `retired` tells that it has ended.
    """
    for entry in record.get("entries", ()):
        if not entry["retired"] and entry["state"] != "completed":
            group = entry["process_group"][1] or entry["process_group"][0]
            return RankWait(rank, group, entry["collective_seq_id"], entry["profiling_name"], trainer_location(stacks))
    return None


def trainer_location(stacks: str) -> str:
    """The trainer's own frames of the main thread, innermost first. faulthandler prints the main thread last."""
    frames = TRAINER_FRAME_PATTERN.findall(stacks.rpartition("Thread 0x")[2])[:2]
    return " in ".join(f"{function} ({file}:{line})" for file, line, function in frames)


@dataclass(frozen=True, slots=True)
class CollectiveSplit:
    """Ranks that wait in different collectives, at one sequence number of one group."""

    group: str
    slot: int
    ranks: Mapping[str, tuple[int, ...]]  # by collective


def find_split(waits: Sequence[RankWait]) -> CollectiveSplit | None:
    """Different collectives at one sequence number of one group; None if the ranks agree or cannot be compared."""
    slots = {(wait.group, wait.slot) for wait in waits}
    names = sorted({wait.collective for wait in waits})
    if len(slots) != 1 or len(names) < 2:
        return None
    ((group, slot),) = slots
    by_name = {name: tuple(wait.rank for wait in waits if wait.collective == name) for name in names}
    return CollectiveSplit(group, slot, by_name)


# The demo

JOB_NAME: Final = "epoch-end-deadlock"
NODE_NAMES: Final = ("epoch-1", "epoch-2")
POLL_SECONDS: Final = 0.1
# The timeouts only end a demo that is stuck. Chosen generously: the whole demo takes 100 s on two idle cores, and took
# 200 s on two that other programs kept busy.
START_TIMEOUT_SECONDS: Final = 300.0  # until all ranks train; more if more ranks share the cores
TRAINING_TIMEOUT_SECONDS: Final = 600.0  # of training, until the ranks deadlock or are done
ALERT_TIMEOUT_SECONDS: Final = 180.0  # from an event to the alert about it
CONCLUSIVE: Final = "(conclusive)"  # how the diagnosis in a message ends if it is a proof


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """Something that happened. The fields are keys of the JSON output."""

    seconds: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class HangCost:
    """What the hang cost here. The fields are keys of the JSON output."""

    gpus: int
    hung_seconds: float  # from the last step to the end of the job
    told_after_seconds: float  # from the last step to the first JobHung


@dataclass(slots=True)
class RealDemoOutcome:
    """Everything that happened. `problems`: the expectations that failed."""

    events: list[DemoEvent] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    waits: tuple[RankWait, ...] = ()
    split: CollectiveSplit | None = None
    gate: GateOutput | None = None
    blocks: tuple[int, ...] = ()
    cost: HangCost | None = None
    notices: tuple[ReceivedAlert, ...] = ()
    seconds: float = 0.0
    too_slow: str = ""  # what was late, and how busy this machine is; "" if nothing was

    @property
    def good(self) -> bool:
        return not self.problems


class ExpectationFailed(Exception):
    """The demo cannot continue; the message says what was expected."""


def run_real_demo(shape: JobSize, listen: str, screen: RealTerminalScreen) -> RealDemoOutcome:
    """Runs the real demo. Raises DemoError if it could not be run at all."""
    with tempfile.TemporaryDirectory(prefix="wattwatch-real-") as directory:
        files = JobFiles(Path(directory))
        followed = FollowedJob(JOB_NAME, str(files.current), NODE_NAMES[: shape.nodes], shape.ranks_per_node)
        with SimulatedCluster((), followed=(followed,)) as cluster:
            receiver = DemoReceiver(cluster.clock)
            try:
                with RealJob(JOB_NAME, shape, files, cluster.nodes) as job:
                    configuration = write_configuration(cluster, receiver.address, listen)
                    service = Service(load_config(configuration), cluster.clock)
                    run = RealDemoRun(job, service, receiver, screen)
                    try:
                        service.start()
                    except ServiceStartError as error:
                        raise DemoError(str(error)) from None
                    try:
                        run.play()
                    finally:
                        service.stop()
            finally:
                receiver.stop()
        run.outcome.too_slow = describe_lateness(cluster.latest_seconds, run.latest_seconds)
        return run.outcome


def describe_lateness(simulation_seconds: float, watcher_seconds: float) -> str:
    """What was late by more than an interval, and how busy this machine is; "" if nothing was late."""
    parts = [
        f"{who} up to {seconds:.1f} s late"
        for who, seconds in (("the simulated GPUs were", simulation_seconds), ("the watcher was", watcher_seconds))
        if seconds > INTERVAL_SECONDS
    ]
    return " and ".join(parts) + (f" ({busy})" if parts and (busy := describe_busy_machine()) else "")


class RealDemoRun:
    """The sequence of events, and what is expected of each."""

    def __init__(self, job: RealJob, service: Service, receiver: DemoReceiver, screen: RealTerminalScreen) -> None:
        self.outcome = RealDemoOutcome()
        self._job = job
        self._service = service
        self._receiver = receiver
        self._screen = screen
        self._began = time.monotonic()
        self._shown = 0
        self._shown_diagnosis = ""
        self._deadlocked_at = 0.0
        # Number of alerts that were received before the deadlock, before the job was killed, and before it was started
        # again; None: that did not happen.
        self._before_deadlock: int | None = None
        self._before_end: int | None = None
        self._before_remedy: int | None = None
        self.latest_seconds = 0.0  # largest delay of the watcher

    def play(self) -> None:
        try:
            self._prepare()
            self._deadlock()
            self._fixed()
        except ExpectationFailed as failure:
            self.outcome.problems.append(str(failure))
        self.outcome.notices = self._receiver.notices()
        self.outcome.problems += self._false_alerts()
        self.outcome.seconds = self._now()

    def _prepare(self) -> None:
        self._note("watching", f"live page while it runs: {self._service.address}/")
        blocks = self.outcome.blocks = self._job.prepare()
        steps = [count // self._job.shape.accumulation for count in blocks]
        shortest = min(range(len(steps)), key=steps.__getitem__)
        self._note(
            "packed",
            f"blocks of each rank: {', '.join(map(str, blocks))}. With {self._job.shape.accumulation} blocks per step, "
            f"rank {shortest} has {steps[shortest]} steps, and every other rank has {sorted(steps)[1]} or more",
        )
        if steps.count(steps[shortest]) > 1:
            raise ExpectationFailed(f"expected one rank with the fewest steps, but the steps of the ranks are {steps}")

    @property
    def _shortest(self) -> int:
        return min(range(len(self.outcome.blocks)), key=self.outcome.blocks.__getitem__)

    # The failure

    def _deadlock(self) -> None:
        self._start('evenness = "off"', self._job.pass_gate("off"))
        self._wait_until(
            self._is_deadlocked,
            TRAINING_TIMEOUT_SECONDS,
            f"rank {self._shortest} to be in the barrier of the checkpoint, and all other ranks in a training step",
        )
        self._deadlocked_at, self._before_deadlock = self._now(), len(self._receiver.notices())
        steps = sorted({heartbeat.step for heartbeat in self._job.heartbeats()})
        self._note(
            "parted",
            f"heartbeats: rank {self._shortest} waits in the barrier before the save, and all other ranks are in a "
            f"training step (last step reported: {' or '.join(map(str, steps))})",
        )
        self._wait_for_suspect()
        detected_at = self._now()
        self._query_flight_recorders()
        self._wait_for_suspect(severity="critical")
        self._wait_until(
            self._proven, ALERT_TIMEOUT_SECONDS, f"an alert with a conclusive diagnosis of the job {JOB_NAME}"
        )
        self._before_end = len(self._receiver.notices())
        pids = self._job.end()
        ended_at = self._now()
        self._note("killed", f"killed the processes of the ranks: {', '.join(map(str, pids))}")
        self.outcome.cost = HangCost(
            self._job.shape.world, ended_at - self._deadlocked_at, max(0.0, detected_at - self._deadlocked_at)
        )

    def _is_deadlocked(self) -> bool:
        phases = {heartbeat.rank: heartbeat.phase for heartbeat in self._job.heartbeats()}
        others = [phase for rank, phase in phases.items() if rank != self._shortest]
        return (
            len(phases) == self._job.shape.world
            and phases[self._shortest] == "barrier"
            and all(phase == "train" for phase in others)
        )

    def _wait_for_suspect(self, severity: str = "") -> None:
        """Waits for a JobHung that names the shortest rank and no other.

        A message from before the deadlock, or one that was resolved, is not about it; and one without suspects is not
        the last word.
        """

        def named() -> set[str]:
            received = self._open_alerts("JobHung", self._before_deadlock or 0)
            notices = [each for each in received if severity in ("", each.severity)]
            return {each.annotations.get("suspects", "") for each in notices} - {""}

        expected = f"a {severity} JobHung alert".replace("  ", " ") + f" that names rank {self._shortest}"
        self._wait_until(lambda: bool(named()), ALERT_TIMEOUT_SECONDS, expected)
        for suspects in named():
            if f"rank {self._shortest}" not in suspects or suspects.count("rank ") != 1:
                self.outcome.problems.append(
                    f"expected JobHung to name only rank {self._shortest}; it names {suspects}"
                )

    def _query_flight_recorders(self) -> None:
        waits = [wait for rank in range(self._job.shape.world) if (wait := self._wait_of(rank)) is not None]
        self.outcome.waits = tuple(waits)
        split = self.outcome.split = find_split(waits)
        if split is None or len(waits) != self._job.shape.world:
            raise ExpectationFailed(
                f"expected {self._job.shape.world} ranks with different collectives at the same sequence number of one "
                f"group, but the flight recorders show: {'; '.join(map(str, waits)) or 'no collective'}"
            )
        self._note("recorded", f"flight recorders: group {split.group}, sequence number {split.slot:,}:")
        for collective, ranks in split.ranks.items():
            place = next(wait.place for wait in waits if wait.rank == ranks[0])
            self._note("recorded", f"  {collective:<16} {name_ranks(ranks)}" + (f"   {place}" if place else ""))
        alone = [ranks for collective, ranks in split.ranks.items() if "barrier" in collective]
        if alone != [(self._shortest,)]:
            self.outcome.problems.append(
                f"expected only rank {self._shortest} in a barrier, but the flight recorders show: "
                + "; ".join(f"{name_ranks(ranks)} in {collective}" for collective, ranks in split.ranks.items())
            )

    def _wait_of(self, rank: int) -> RankWait | None:
        try:
            record: Mapping[str, Any] = orjson.loads(query_worker(self._job.socket_of(rank), "fr_trace_json"))
            stacks = query_worker(self._job.socket_of(rank), "dump_traceback").decode("utf-8", "replace")
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise ExpectationFailed(f"rank {rank}'s worker socket did not answer: {error}") from None
        return find_current_wait(rank, record, stacks)

    # The remedy

    def _fixed(self) -> None:
        gate = self.outcome.gate = self._job.pass_gate("min")
        for line in gate.lines:
            self._note("gate", line)
        fewest, most = min(self.outcome.blocks), max(self.outcome.blocks)
        if (gate.level, gate.spread, gate.shortest_blocks) != ("WARN", most - fewest, fewest):
            self.outcome.problems.append(
                f"expected the result WARN from the gate, with a spread of {most - fewest} and a minimum of "
                f"{fewest} blocks, but it was {gate.level}, with a spread of {gate.spread} and a minimum of "
                f"{gate.shortest_blocks}"
            )
        self._before_remedy = len(self._receiver.notices())
        self._start('evenness = "min"', gate)
        self._wait_until(
            lambda: None not in self._job.exit_codes(), TRAINING_TIMEOUT_SECONDS, 'the run with evenness = "min" to end'
        )
        codes = self._job.exit_codes()
        if any(codes):
            raise ExpectationFailed(
                f"expected exit code 0 from both launchers, but got {codes}: {self._job.last_output()}"
            )
        checkpoint = self._job.checkpoint()
        if not checkpoint:
            raise ExpectationFailed("expected a complete checkpoint at the end of the epoch, but there is none")
        self._note("completed", f"all ranks ended with exit code 0; checkpoint {checkpoint} is complete")
        self._wait_for_alert("JobCompleted")

    # What both need

    def _start(self, how: str, gate: GateOutput) -> None:
        self._job.start(gate)
        self._note("started", f"torchrun on {' and '.join(NODE_NAMES)}, {self._job.shape.world} ranks, {how}")
        self._wait_until(
            self._all_ranks_train,
            START_TIMEOUT_SECONDS + 10 * self._job.shape.world,
            "all ranks to train",
        )
        self._note("training", "all ranks train")

    def _all_ranks_train(self) -> bool:
        heartbeats = self._job.heartbeats()
        return len(heartbeats) == self._job.shape.world and all(each.phase != "load" for each in heartbeats)

    def _wait_until(self, true: Callable[[], bool], seconds: float, expected: str) -> None:
        """Waits for a condition. Raises ExpectationFailed after so many seconds, or if the job ends before."""
        deadline = self._now() + seconds
        while not true():
            self._show_new_alerts()
            if self._now() > deadline:
                raise ExpectationFailed(f"expected {expected} within {seconds:.0f} s.{blame_machine()}")
            if any(self._job.exit_codes()):
                raise ExpectationFailed(f"expected {expected}, but the job ended: {self._job.last_output()}")
            time.sleep(POLL_SECONDS)
        self._show_new_alerts()

    def _wait_for_alert(self, alert: str) -> None:
        self._wait_until(lambda: bool(self._open_alerts(alert)), ALERT_TIMEOUT_SECONDS, f"{alert} of {JOB_NAME}")

    def _false_alerts(self) -> list[str]:
        """The messages about a hang or a crash that were received when there was none."""
        notices = self._receiver.notices()
        count = len(notices)
        true_from = {"JobHung": self._before_deadlock, "JobCrashed": self._before_end}
        true_until = {"JobHung": self._before_remedy}
        return [
            f"{notice.alert} was sent although nothing was wrong: {notice.annotations.get('summary', '')}"
            for number, notice in enumerate(notices)
            if notice.status == "firing" and notice.alert in true_from
            if not or_all(true_from[notice.alert], count) <= number < or_all(true_until.get(notice.alert), count)
        ]

    def _open_alerts(self, alert: str, first: int = 0) -> list[ReceivedAlert]:
        """The messages about the open episode of an alert, from number `first`, oldest first; empty if it is closed."""
        found: list[ReceivedAlert] = []
        for notice in self._receiver.notices()[first:]:
            if (notice.alert, notice.job) == (alert, JOB_NAME):
                found = [*found, notice] if notice.status == "firing" else []
        return found

    def _proven(self) -> bool:
        """Whether a message about the open hang carries a conclusive diagnosis. A suspicion is diagnosed too, and again
        once the hang is confirmed if the first diagnosis proved nothing."""
        return any(
            notice.annotations.get("diagnosis", "").endswith(CONCLUSIVE) for notice in self._open_alerts("JobHung")
        )

    def _show_new_alerts(self) -> None:
        """Shows the alerts that were received since the last call."""
        self.latest_seconds = max(self.latest_seconds, self._service.snapshot.late_seconds)
        notices = self._receiver.notices()
        for notice in notices[self._shown :]:
            severity = f" {notice.severity}" if notice.status == "firing" else ""
            summary = notice.annotations.get("summary", "")
            self._note("told", f"{notice.status}{severity} {notice.alert}: {summary}", notice.severity)
            diagnosis = notice.annotations.get("diagnosis", "")
            if diagnosis and diagnosis != self._shown_diagnosis:
                self._shown_diagnosis = diagnosis
                self._note("diagnosed", f"diagnosis: {diagnosis}", notice.severity)
        self._shown = len(notices)

    def _note(self, kind: str, text: str, style: str = "") -> None:
        self.outcome.events.append(DemoEvent(round(self._now(), 1), kind, text))
        self._screen.line(self._now(), text, style)

    def _now(self) -> float:
        return time.monotonic() - self._began


def or_all(number: int | None, count: int) -> int:
    return count if number is None else number


def name_ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# The output: terminal and JSON, and what the hang cost, here and at the size of the paper

# arXiv 2608.05944, sections 5 and 6. That 130 is the hang and an epoch to be trained again is our reading: 48 + 84.
PAPER_GPUS: Final = 16
PAPER_HANG_HOURS: Final = 3.0
PAPER_EPOCH_GPU_HOURS: Final = 84.0
PAPER_COST_GPU_HOURS: Final = 130.0
REAL_AND_SIMULATED: Final = (
    "Real: the data, the ranks, their deadlock, SSH, the watcher, and its messages. Simulated: the second host, "
    "and the GPUs. The simulated power follows the heartbeats of the ranks, with the watts from the paper "
    "(arXiv 2608.05944)."
)


class RealTerminalScreen:
    """Prints the events as they happen."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, seconds: float, text: str, style: str = "") -> None:
        color = SEVERITY_COLORS.get(style)
        words = escape(text)
        self._console.print(f"{seconds:6.1f} s  " + (f"[{color}]{words}[/]" if color else words))

    def sum_up(self, outcome: RealDemoOutcome) -> None:
        self._console.print(f"\n{REAL_AND_SIMULATED}", style="dim")
        for problem in outcome.problems:
            self._console.print(f"[red]✗ {escape(problem)}[/]")
        if outcome.good:
            self._console.print(
                "[bold green]✓ The deadlock was detected and proven, and evenness = min prevented it.[/]"
            )
        if outcome.cost is not None:
            self._console.print(real_cost_line(outcome.cost))
        if outcome.too_slow:
            self._console.print(f"[yellow]This machine was too slow: {escape(outcome.too_slow)}.[/]")


def real_cost_line(cost: HangCost) -> str:
    here = cost.gpus * cost.hung_seconds / 3600
    hang = PAPER_GPUS * PAPER_HANG_HOURS
    detected = PAPER_GPUS * cost.told_after_seconds / 3600
    return (
        f"Cost: here, {cost.gpus} GPUs hung for {cost.hung_seconds:.0f} s, which is {here:.3f} GPU-hours. In "
        f"the paper, {PAPER_GPUS} GPUs hung for {PAPER_HANG_HOURS:.0f} h, which is {hang:.0f} GPU-hours. The epoch "
        f"that was not saved cost another {PAPER_EPOCH_GPU_HOURS:.0f}, so one deadlock cost "
        f"about {PAPER_COST_GPU_HOURS:.0f} GPU-hours. If the hang in the paper had been detected after "
        f"{cost.told_after_seconds:.0f} s, as it was here, the hang would have cost {detected:.2f} GPU-hours."
    )


def real_demo_summary(outcome: RealDemoOutcome) -> dict[str, Any]:
    """The outcome as a JSON object."""
    cost = outcome.cost
    return {
        "ok": outcome.good,
        "problems": list(outcome.problems),
        "too_slow": outcome.too_slow or None,
        "seconds": round(outcome.seconds, 1),
        "events": [asdict(event) for event in outcome.events],
        "blocks": list(outcome.blocks),
        "waits": [asdict(wait) for wait in outcome.waits],
        "gate": None if outcome.gate is None else asdict(outcome.gate),
        "notices": [
            {
                "status": notice.status,
                "alert": notice.alert,
                "severity": notice.severity,
                "suspects": notice.annotations.get("suspects", ""),
                "summary": notice.annotations.get("summary", ""),
            }
            for notice in outcome.notices
        ],
        "cost": None if cost is None else asdict(cost) | {"gpu_hours": cost.gpus * cost.hung_seconds / 3600},
    }
