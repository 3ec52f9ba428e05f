"""The paper's deadlock for real, under the real watcher, and the same data once more behind the gate and evenfix.

    evenness = "off":  train ──► one rank in the save's barrier, the others in the next step ──► JobHung ──► killed
    evenness = "min":  gate warns, all stop at the shortest rank's count ──► saved ──► JobCompleted

The job and its deadlock are real, so are SSH, probe, judgement and messages. Boards are not: they follow the ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import orjson

from collectors.simulated.cluster import SimulatedCluster
from collectors.simulated.follow import FollowedJob
from watcher.config import load_config
from watcher.demo.configuration import write_configuration
from watcher.demo.play import DemoError
from watcher.demo.real.data import JobFiles, Shape
from watcher.demo.real.job import Gate, RealJob
from watcher.demo.real.recorder import Parting, Wait, ask, parting_of, wait_of
from watcher.demo.receiver import Notice, Receiver
from watcher.serve.service import CannotServe, Service

NAME: Final = "epoch-end-deadlock"
NODES: Final = ("epoch-1", "epoch-2")
LOOK_SECONDS: Final = 0.1
START_SECONDS: Final = 90.0  # until all ranks train; more where more ranks share the cores
PART_SECONDS: Final = 120.0  # of training, until the ranks part or are done
TOLD_SECONDS: Final = 60.0  # from what happened to what is said of it
SETTLE_SECONDS: Final = 5.0  # after the end, for what should not be said


class Screen(Protocol):
    """Where the story is shown while it happens; `seconds` since its beginning."""

    def line(self, seconds: float, text: str, style: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, in the order in which it did."""

    seconds: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class HangCost:
    """What the hang cost here."""

    gpus: int
    hung_seconds: float  # from the last step to the end of the job
    told_after_seconds: float  # from the last step to the first JobHung


@dataclass(slots=True)
class RealOutcome:
    """What was found; `problems`: expectations that failed, each with what was expected."""

    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    waits: tuple[Wait, ...] = ()
    parting: Parting | None = None
    gate: Gate | None = None
    blocks: tuple[int, ...] = ()
    cost: HangCost | None = None
    notices: tuple[Notice, ...] = ()
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.problems


class ExpectationFailed(Exception):
    """The story cannot go on; the text says what was expected."""


def play_for_real(shape: Shape, listen: str, screen: Screen) -> RealOutcome:
    """Raises DemoError where the demo itself could not be played."""
    with tempfile.TemporaryDirectory(prefix="wattwatch-real-") as directory:
        files = JobFiles(Path(directory))
        followed = FollowedJob(NAME, str(files.current), NODES[: shape.nodes], shape.ranks_per_node)
        with SimulatedCluster((), followed=(followed,)) as cluster:
            receiver = Receiver(cluster.clock)
            try:
                with RealJob(NAME, shape, files, cluster.nodes) as job:
                    configuration = write_configuration(cluster, receiver.address, listen)
                    service = Service(load_config(configuration), cluster.clock)
                    story = Story(job, service, receiver, screen)
                    try:
                        service.start()
                    except CannotServe as error:
                        raise DemoError(str(error)) from None
                    try:
                        story.tell()
                    finally:
                        service.stop()
            finally:
                receiver.stop()
        return story.outcome


class Story:
    """The order of events, and what is expected of each."""

    def __init__(self, job: RealJob, service: Service, receiver: Receiver, screen: Screen) -> None:
        self.outcome = RealOutcome()
        self._job = job
        self._service = service
        self._receiver = receiver
        self._screen = screen
        self._began = time.monotonic()
        self._shown = 0
        self._parted_at = 0.0

    def tell(self) -> None:
        try:
            self._prepare()
            self._deadlock()
            self._fixed()
        except ExpectationFailed as failure:
            self.outcome.problems.append(str(failure))
        self.outcome.notices = self._receiver.notices()
        self.outcome.seconds = self._now()

    def _prepare(self) -> None:
        self._note("watching", f"live page while it runs: {self._service.address}/")
        blocks = self.outcome.blocks = self._job.prepare()
        steps = [count // self._job.shape.accumulation for count in blocks]
        shortest = min(range(len(steps)), key=steps.__getitem__)
        self._note(
            "packed",
            f"blocks of each rank: {', '.join(map(str, blocks))}; at {self._job.shape.accumulation} a step rank "
            f"{shortest} has {steps[shortest]} steps, the others {sorted(steps)[1]} or more",
        )
        if steps.count(steps[shortest]) > 1:
            raise ExpectationFailed(f"expected one rank with the fewest steps, packed were {steps}")

    @property
    def _shortest(self) -> int:
        return min(range(len(self.outcome.blocks)), key=self.outcome.blocks.__getitem__)

    # The failure

    def _deadlock(self) -> None:
        self._start('evenness = "off"', self._job.pass_gate("off"))
        self._until(self._parted, PART_SECONDS, f"rank {self._shortest} in the save's barrier and the others in a step")
        self._parted_at = self._now()
        steps = sorted({beat.step for beat in self._job.beats()})
        self._note("parted", f"heartbeats: rank {self._shortest} in barrier, the others in train; steps {steps}")
        hung = self._until_told("JobHung", TOLD_SECONDS)
        told_at = self._now()
        self._expect_suspect(hung)
        self._ask_recorders()
        if hung.severity != "critical":
            confirmed = self._until_told("JobHung", TOLD_SECONDS, severity="critical")
            self._expect_suspect(confirmed)
        self._until(self._diagnosed, TOLD_SECONDS, f"a message that says who holds {NAME} up")
        pids = self._job.end()
        ended_at = self._now()
        self._note("killed", f"the ranks, by pid: {', '.join(map(str, pids))}")
        self.outcome.cost = HangCost(
            self._job.shape.world, ended_at - self._parted_at, max(0.0, told_at - self._parted_at)
        )

    def _parted(self) -> bool:
        phases = {beat.rank: beat.phase for beat in self._job.beats()}
        others = [phase for rank, phase in phases.items() if rank != self._shortest]
        return (
            len(phases) == self._job.shape.world
            and phases[self._shortest] == "barrier"
            and all(phase == "train" for phase in others)
        )

    def _expect_suspect(self, notice: Notice) -> None:
        named = notice.annotations.get("suspects", "")
        if f"rank {self._shortest}" not in named or named.count("rank ") != 1:
            self.outcome.problems.append(
                f"expected JobHung to name rank {self._shortest} alone, it names {named or 'nobody'}"
            )

    def _ask_recorders(self) -> None:
        waits = [wait for rank in range(self._job.shape.world) if (wait := self._wait_of(rank)) is not None]
        self.outcome.waits = tuple(waits)
        parting = self.outcome.parting = parting_of(waits)
        if parting is None or len(waits) != self._job.shape.world:
            raise ExpectationFailed(
                f"expected different collectives at one slot of one group on {self._job.shape.world} ranks, "
                f"the flight recorders say {waits}"
            )
        self._note("recorded", f"flight recorders, group {parting.group}, collective {parting.slot:,}:")
        for collective, ranks in parting.ranks.items():
            place = next(wait.place for wait in waits if wait.rank == ranks[0])
            self._note("recorded", f"  {collective:<16} {in_words(ranks)}" + (f"   {place}" if place else ""))
        alone = [ranks for collective, ranks in parting.ranks.items() if "barrier" in collective]
        if alone != [(self._shortest,)]:
            self.outcome.problems.append(
                f"expected rank {self._shortest} alone in a barrier, the flight recorders say {dict(parting.ranks)}"
            )

    def _wait_of(self, rank: int) -> Wait | None:
        try:
            record: Mapping[str, Any] = orjson.loads(ask(self._job.socket_of(rank), "fr_trace_json"))
            stacks = ask(self._job.socket_of(rank), "dump_traceback").decode("utf-8", "replace")
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise ExpectationFailed(f"expected an answer at rank {rank}'s worker socket: {error}") from None
        return wait_of(rank, record, stacks)

    # The remedy

    def _fixed(self) -> None:
        gate = self.outcome.gate = self._job.pass_gate("min")
        for line in gate.lines:
            self._note("gate", line)
        fewest, most = min(self.outcome.blocks), max(self.outcome.blocks)
        if (gate.level, gate.spread, gate.shortest_blocks) != ("WARN", most - fewest, fewest):
            self.outcome.problems.append(
                f"expected the gate to warn of a spread of {most - fewest} and to record a minimum of {fewest}, "
                f"found {gate.level}, {gate.spread} and {gate.shortest_blocks}"
            )
        self._start('evenness = "min"', gate)
        self._until(lambda: None not in self._job.exit_codes(), PART_SECONDS, "the run with evenness = min to end")
        codes = self._job.exit_codes()
        if any(codes):
            raise ExpectationFailed(f"expected exit code 0 of both launchers, found {codes}: {self._job.last_words()}")
        checkpoint = self._job.checkpoint()
        if not checkpoint:
            raise ExpectationFailed("expected a complete checkpoint at the end of the epoch, there is none")
        self._note("completed", f"all ranks ended with exit code 0; checkpoint {checkpoint} is complete")
        self._until_told("JobCompleted", TOLD_SECONDS)

    # What both need

    def _start(self, how: str, gate: Gate) -> None:
        self._job.start(gate)
        self._note("started", f"torchrun on {' and '.join(NODES)}, {self._job.shape.world} ranks, {how}")
        self._until(
            lambda: len(beats := self._job.beats()) == self._job.shape.world and all(b.phase != "load" for b in beats),
            START_SECONDS + 10 * self._job.shape.world,
            "all ranks to train",
        )
        self._note("training", "all ranks train")

    def _until(self, true: Callable[[], bool], seconds: float, expected: str) -> None:
        """Look on until it is true. Raises ExpectationFailed after so many seconds, or when the job ends before."""
        deadline = self._now() + seconds
        while not true():
            self._look()
            if self._now() > deadline:
                raise ExpectationFailed(f"expected {expected} within {seconds:.0f} s")
            if any(self._job.exit_codes()):
                raise ExpectationFailed(f"expected {expected}, but the job ended: {self._job.last_words()}")
            time.sleep(LOOK_SECONDS)
        self._look()

    def _until_told(self, alert: str, seconds: float, severity: str = "") -> Notice:
        found: list[Notice] = []

        def told() -> bool:
            found[:] = [
                notice
                for notice in self._receiver.notices()
                if (notice.alert, notice.job, notice.status) == (alert, NAME, "firing")
                and severity in ("", notice.severity)
            ]
            return bool(found)

        self._until(told, seconds, f"{severity} {alert} of {NAME}".strip())
        return found[-1]

    def _diagnosed(self) -> bool:
        """Told in a message, and shown."""
        return any(event.kind == "diagnosed" for event in self.outcome.events)

    def _look(self) -> None:
        """Show what the watcher has said since."""
        notices = self._receiver.notices()
        for notice in notices[self._shown :]:
            severity = f" {notice.severity}" if notice.status == "firing" else ""
            summary = notice.annotations.get("summary", "")
            self._note("told", f"{notice.status}{severity} {notice.alert}: {summary}", notice.severity)
            diagnosis = notice.annotations.get("diagnosis", "")
            if diagnosis and not self._diagnosed():
                self._note("diagnosed", f"diagnosis: {diagnosis}", notice.severity)
        self._shown = len(notices)

    def _note(self, kind: str, text: str, style: str = "") -> None:
        self.outcome.events.append(Event(round(self._now(), 1), kind, text))
        self._screen.line(self._now(), text, style)

    def _now(self) -> float:
        return time.monotonic() - self._began


def in_words(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
