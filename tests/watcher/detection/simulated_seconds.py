"""Simulates the seconds of a job, node by node, through assembler, classifier and detector, as the engine does.

Eight B300 GPUs per node, a step every five seconds, one line per node and second. What each rank does is an Activity;
what was found at each second is kept in `observed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wattwatch.collectors.samples import (
    CheckpointEntry,
    CheckpointSample,
    GpuSample,
    HostStatus,
    KernelEvent,
    NodeSample,
    ProcessSample,
    ProgressSample,
    ReadingStatus,
)
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import AlertName, Finding, JobSample, JobSpec, JobState, Verdict

RUN_DIRECTORY = "/runs/a"
CHECKPOINTS = "/ckpt/a"
LOG = "/runs/a/train.log"
STEP_SECONDS = 5
HELD = 82e9
BARE = 8e6


@dataclass(frozen=True)
class Activity:
    """What one rank does, as its GPU, heartbeat and process list show it."""

    watts: float | None
    utilization: float | None
    steps: bool = False
    phase: str = "train"
    held_bytes: float | None = HELD
    process: bool = True
    throttle: frozenset[str] | None = None
    reasons: Mapping[str, ReadingStatus] = field(default_factory=dict)


COMPUTE = Activity(985, 99, steps=True)
COMMUNICATE = Activity(640, 99, steps=True)
SPIN = Activity(191, 100)
SPIN_ROUGHLY = Activity(194, 97)
IN_BARRIER = Activity(186, 0, phase="barrier")
AWAIT_SAVE = Activity(191, 100, phase="barrier")
SAVE = Activity(189, 0, phase="save")
LOAD = Activity(189, 0, phase="load")
EVALUATE = Activity(189, 0, phase="eval")
PAUSE = Activity(189, 0)
ENDED = Activity(139, 0, phase="done", held_bytes=BARE, process=False)
KILLED = Activity(139, 0, held_bytes=BARE, process=False)
LOST = Activity(
    None, None, held_bytes=None, reasons={"power_watts": ReadingStatus.LOST, "utilization_percent": ReadingStatus.LOST}
)


@dataclass(frozen=True)
class ObservedSecond:
    now: float
    findings: tuple[Finding, ...]
    state: JobState
    verdict: Verdict


class Job:
    """One job on its nodes; `play` lets seconds pass, one look each."""

    def __init__(
        self,
        nodes: int = 1,
        gpus: int = 8,
        progress: str | None = "heartbeat",
        step: int = 1000,
        total_steps: int | None = 3857,
        name: str = "NVIDIA B300 SXM6 AC",
        **settings: object,
    ) -> None:
        self.nodes = [f"node-{i + 1}" for i in range(nodes)]
        self.gpus, self.board, self.progress = gpus, name, progress
        self.spec = replace(
            JobSpec(
                name="pretrain",
                nodes=tuple(self.nodes),
                run_directory=RUN_DIRECTORY if progress == "heartbeat" else None,
                logs=(LOG,) if progress == "log" else (),
                checkpoint_directory=CHECKPOINTS,
            ),
            **settings,  # type: ignore[arg-type]  # names and types are JobSpec's; a wrong one fails at once
        )
        self.step, self.total_steps = step, total_steps
        self.restart = 0
        self.loss: float = 2.5
        self.stopped: str | None = None  # what its log says of a stop from outside
        self.guessed = False  # its log is of an unknown format
        self.tokens_per_second: float | None = 53_000.0
        self.step_seconds = STEP_SECONDS
        self.now, self.since_step, self.sequence = 1000.0, 0, 0
        self.first_pid, self.started = 4000, 500.0
        self.stale_seconds = dict.fromkeys(self.nodes, 0.0)  # since its GPUs were asked
        self.kernel: dict[str, list[KernelEvent]] = {}
        self.entries: tuple[CheckpointEntry, ...] = ()
        self.status: dict[str, tuple[HostStatus, str]] = {}
        self.links: dict[str, NodeLink] = {n: NodeLink(n, HostStatus.OK, "", 0.0) for n in self.nodes}
        self.assembler, self.detector = JobAssembler(self.spec), JobDetector(self.spec)
        self.observed: list[ObservedSecond] = []
        self.change_line: Callable[[NodeSample], NodeSample] = lambda line: line  # what the node really sends
        self.sample: JobSample | None = None

    def play(
        self,
        seconds: int,
        activity: Activity,
        ranks: Mapping[int, Activity] | None = None,
        *,
        silent: Sequence[str] = (),
        repeat_gpus: bool = False,
        slow: Sequence[str] = (),
    ) -> list[ObservedSecond]:
        """`ranks`: who does something else; `silent`: nodes that send no line; `repeat_gpus`: the GPUs were not
        asked again, the answer of the second before stands in the line; `slow`: on these nodes alone."""
        slow = self.nodes if repeat_gpus else slow
        start = len(self.observed)
        for _ in range(seconds):
            self._second(activity, ranks or {}, silent, slow)
        return self.observed[start:]

    def skip(self, seconds: float) -> None:
        """The watcher itself does not look."""
        self.now += seconds

    def _second(
        self, activity: Activity, ranks: Mapping[int, Activity], silent: Sequence[str], slow: Sequence[str]
    ) -> None:
        self.now += 1.0
        self.sequence += 1
        self.since_step = self.since_step + 1
        if activity.steps and self.since_step >= self.step_seconds:
            self.step, self.since_step = self.step + 1, 0
        self.stale_seconds = {node: self.stale_seconds[node] + 1.0 if node in slow else 0.0 for node in self.nodes}
        for place, node in enumerate(self.nodes):
            if node not in silent:
                self.assembler.add(self.change_line(self._line(place, node, activity, ranks)))
        sample = self.assembler.assemble(self.links, self.now, 1.7e9 + self.now)
        verdict = self.judge(sample)
        findings = self.detector.observe(verdict, sample, self.now)
        self.sample = sample
        self.observed.append(ObservedSecond(self.now, findings, self.detector.state, verdict))

    def judge(self, sample: JobSample) -> Verdict:
        return classify(sample)

    def _line(self, place: int, node: str, activity: Activity, ranks: Mapping[int, Activity]) -> NodeSample:
        mine = [(place * self.gpus + i, i) for i in range(self.gpus)]
        doing = {rank: ranks.get(rank, activity) for rank, _ in mine}
        status, detail = self.status.get(node, (HostStatus.OK, ""))
        events, self.kernel[node] = tuple(self.kernel.get(node, ())), []
        return NodeSample(
            node=node,
            status=status,
            detail=detail,
            sequence=self.sequence,
            node_seconds=self.now,
            wall_seconds=1.7e9 + self.now,
            received_seconds=self.now,
            gpus=tuple(self._gpu(place, i, doing[rank]) for rank, i in mine) if status is HostStatus.OK else None,
            gpus_age_seconds=self.stale_seconds[node],
            processes=tuple(
                ProcessSample(
                    self.first_pid + rank,
                    "python3",
                    "R",
                    self.started,
                    None,
                    (i,),
                    rank if self.progress == "heartbeat" else None,
                )
                for rank, i in mine
                if doing[rank].process
            ),
            progress=self._progress(place, doing),
            checkpoints=(CheckpointSample(CHECKPOINTS, self.entries, 0.5),),
            kernel_events=events,
        )

    def _gpu(self, place: int, i: int, doing: Activity) -> GpuSample:
        limit = 1100.0 if "B300" in self.board else 70.0 if "T4" in self.board else 700.0
        return GpuSample(
            index=i,
            uuid=f"GPU-{place}-{i}",
            pci_bus_id=pci(i),
            name=self.board,
            power_watts=doing.watts,
            power_limit_watts=limit,
            utilization_percent=doing.utilization,
            memory_used_bytes=doing.held_bytes,
            memory_total_bytes=275e9,
            throttle_reasons=doing.throttle,
            reasons=doing.reasons,
        )

    def _progress(self, place: int, doing: Mapping[int, Activity]) -> tuple[ProgressSample, ...]:
        common = {"total_steps": self.total_steps, "loss": self.loss, "tokens_per_second": self.tokens_per_second}
        if self.progress == "heartbeat":
            return tuple(
                ProgressSample(
                    f"{RUN_DIRECTORY}/rank_{rank}.json",
                    "heartbeat",
                    self.step,
                    age_seconds=float(self.since_step),
                    rank=rank,
                    pid=self.first_pid + rank,
                    restart=self.restart,
                    phase=act.phase,
                    **common,  # type: ignore[arg-type]  # the three fields above, as ProgressSample types them
                )
                for rank, act in doing.items()
            )
        if self.progress == "log" and place == 0:
            said = ProgressSample(
                LOG,
                "torchtitan",
                self.step,
                age_seconds=float(self.since_step),
                line_interval_seconds=float(self.step_seconds),
                stopped=self.stopped,
                guessed=self.guessed,
                **common,  # type: ignore[arg-type]  # the three fields above, as ProgressSample types them
            )
            return (said,)
        return ()

    # What was said.

    def seconds_of(self, alert: AlertName, *, confirmed: bool | None = None) -> list[float]:
        """When it was said."""
        return [
            second.now
            for second in self.observed
            for finding in second.findings
            if finding.alert is alert and confirmed in (None, finding.confirmed)
        ]

    @property
    def alerts(self) -> set[str]:
        """Everything that was ever said."""
        return {finding.alert.value for second in self.observed for finding in second.findings}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is said now."""
        return self.observed[-1].findings

    def finding(self, alert: AlertName) -> Finding:
        (found,) = [finding for finding in self.findings if finding.alert is alert]
        return found

    @property
    def state(self) -> JobState:
        return self.observed[-1].state


def pci(i: int) -> str:
    return f"00000000:{0x1A + i:02X}:00.0"


def xid(code: int, i: int, age_seconds: float = 1.0) -> KernelEvent:
    bus = f"0000:{0x1A + i:02x}:00"
    return KernelEvent("xid", f"NVRM: Xid (PCI:{bus}): {code}, GPU has fallen off the bus", age_seconds, code, bus)


def checkpoint(
    step: int, *, complete: bool | None, gigabytes: float = 62.0, age_seconds: float = 0.0
) -> CheckpointEntry:
    return CheckpointEntry(f"step-{step}", step, complete, int(gigabytes * 1e9), age_seconds, "")
