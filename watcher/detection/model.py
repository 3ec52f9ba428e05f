"""The data of detection: a job's samples, the verdict on them, the findings that follow. No logic beyond small lookups.

JobSample (what the nodes sent, side by side) -> Verdict (what the GPUs are doing in this one sample) -> Finding (what
has been wrong for long enough to report) and JobState. Everything here is frozen, with units in the names. GPUs may be
read without a rank and ranks without a GPU; whatever was not read is None, never 0.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from wattwatch.collectors.samples import (
    CheckpointSample,
    FilesystemSample,
    GpuSample,
    HostLoad,
    HostStatus,
    HungCall,
    KernelEvent,
    MissingGpu,
    ProcessSample,
    ProgressSample,
    WorkerSample,
)
from wattwatch.collectors.ssh.model import UnreachableCause
from wattwatch.watcher.common.formatting import format_count

HEARTBEAT_FORMAT: Final = "heartbeat"  # `ProgressSample.format` of a heartbeat file; every other value is a log

# NCCL kernels that wait for a peer spin, and the driver reports 90 to 100 % utilization for them (96 % in
# NVIDIA/nccl#2353), so "busy" cannot mean exactly 100. A rank that waits on the CPU, say in a barrier, reads 0 to 5 %.
BUSY_PERCENT: Final = 90.0
IDLE_PERCENT: Final = 10.0
# A CUDA context takes some hundred MiB. The driver alone shows 0 to 20 MiB, a display or a daemon a little more.
CONTEXT_BYTES: Final = 300 * 1024**2
# A rank that reports a shorter wait per step gets its data in time. Chosen, not measured.
MIN_DATA_WAIT_MS: Final = 100.0
# Two observations further apart than this have a gap between them: nothing is known about the time in between.
MAX_GAP_INTERVALS: Final = 3.5

PCI_ID: Final = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})(?:\.[0-9a-f])?"
)


def valid_power_watts(gpu: GpuSample) -> float | None:
    """Power that can be trusted. 0 W beside high utilization is a failed sensor: several drivers report it for power
    readings that they do not support."""
    if gpu.power_watts is not None and gpu.power_watts <= 0 and (gpu.utilization_percent or 0) > IDLE_PERCENT:
        return None
    return gpu.power_watts


@lru_cache(maxsize=65_536)
def normalized_pci_id(bus_id: str) -> str:
    """PCI bus id as domain (4 digits), bus and device in lower case.

    nvidia-smi prints 00000000:9B:00.0, the kernel log 0000:9b:00 for the same GPU. Text that is no PCI id comes back in
    lower case.
    """
    match = PCI_ID.fullmatch(bus_id.strip().lower())
    return (
        bus_id.lower() if match is None else f"{int(match['domain'] or '0', 16):04x}:{match['bus']}:{match['device']}"
    )


# What the watcher knows of a job when it evaluates it.


@dataclass(frozen=True, slots=True)
class RankGpu:
    """One GPU of the job. `rank` is None unless a heartbeat names it or the order of nodes and GPUs is certain."""

    node: str
    rank: int | None
    gpu: GpuSample


@dataclass(frozen=True, slots=True)
class UnseenGpu:
    """A GPU of the job of which this sample has no reading: it is lost, or its node cannot be read. `rank` and `index`
    (the driver's) are those it had when it was last read, or None; `reason` is a clause."""

    node: str
    rank: int | None
    index: int | None
    pci_bus_id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class NodeState:
    """What one node contributes to a job sample. `age_seconds`: age of its last line on the control host's clock."""

    node: str
    status: HostStatus
    detail: str
    age_seconds: float | None  # None: the node has never answered
    fresh: bool  # its GPUs are part of this job sample
    sequence: int | None = None
    reading: int | None = None  # number of GPU queries so far; a repeated answer does not count again
    expected_gpus: int | None = None  # the most ever seen, or the configured number
    missing_gpus: tuple[MissingGpu, ...] = ()
    processes: tuple[ProcessSample, ...] | None = None  # None: unknown; empty only where it is known that there is none
    exited_processes: frozenset[tuple[int, float]] = frozenset()  # (pid, start) that the node proves to be gone
    unlisted_processes: frozenset[tuple[int, float]] = frozenset()  # (pid, start) that exist, though nothing lists them
    kernel_log_error: str = ""  # why the kernel log cannot be read; "" where it can
    kernel_events: tuple[KernelEvent, ...] = ()
    hung_calls: tuple[HungCall, ...] = ()
    filesystems: tuple[FilesystemSample, ...] = ()
    load: HostLoad = HostLoad()
    driver_version: str | None = None
    workers: tuple[WorkerSample, ...] = ()  # child processes of the job's ranks, most often data loader workers
    step_formats: frozenset[str] = frozenset()  # formats of the logs and heartbeats on this node that show the step
    cause: UnreachableCause | None = None  # of UNREACHABLE; None: unknown

    @property
    def unreadable_reason(self) -> str:
        """Why the node's GPUs cannot be read. Constant over time: a detail that counts seconds belongs in evidence."""
        if self.status is HostStatus.UNREACHABLE:
            return NEVER_ANSWERED_TEXT if self._never_answered else f"node {self.unreachable_text}"
        first, *_ = self.detail.split("; ")
        if self.status is HostStatus.DRIVER_DOWN and first:
            return first
        return HOST_STATUS_TEXT.get(self.status, self.status.value)

    @property
    def unreadable_reason_in_full(self) -> str:
        """With the node's own detail, or that alone where it names the problem itself: a driver error, a hung query."""
        if self.status in (HostStatus.DRIVER_DOWN, HostStatus.SAMPLER_TIMEOUT) and self.detail:
            return self.detail
        if not self.detail:
            return self.unreadable_reason
        return f"{self.unreadable_reason} ({self.detail})"

    @property
    def _never_answered(self) -> bool:
        return self.age_seconds is None and self.cause in (None, UnreachableCause.SILENT, UnreachableCause.NOT_TRIED)

    @property
    def unreachable_text(self) -> str:
        """What an unreachable node does, as the predicate of a sentence: a node that refuses has answered."""
        return UNREACHABLE_TEXT[self.cause or UnreachableCause.SILENT]

    @property
    def progress_text(self) -> str:
        """Which of the job's progress sources are still readable on this node; "" for none."""
        if not self.step_formats:
            return ""
        source = "heartbeats are" if HEARTBEAT_FORMAT in self.step_formats else "log is"
        return f"the job's {source} still readable"


NEVER_ANSWERED_TEXT: Final = "no answer yet"  # it may not even have been asked: logins are limited in number
UNREACHABLE_TEXT: Final = {
    UnreachableCause.SILENT: "does not answer",
    UnreachableCause.ROUTE: "cannot be reached: the network reports no route to it",
    UnreachableCause.REFUSED: "is up but refuses SSH connections",
    UnreachableCause.NAME: "cannot be reached: its host name does not resolve",
    UnreachableCause.HANDSHAKE: "answers, but ends each SSH connection before the login",
    UnreachableCause.SESSION: "accepts the SSH login, but sends no data",
    UnreachableCause.GATEWAY: "cannot be reached through its SSH gateway",
    UnreachableCause.CONFIGURATION: "cannot be reached: its SSH configuration on the watcher's host is wrong",
    UnreachableCause.NOT_TRIED: "has not been connected to yet",
}
HOST_STATUS_TEXT: Final = {
    HostStatus.AUTH_FAILED: "SSH login refused",
    HostStatus.HOST_KEY_CHANGED: "SSH host key does not match the known one",
    HostStatus.DRIVER_DOWN: "NVIDIA driver does not respond",
    HostStatus.SAMPLER_TIMEOUT: "GPU query does not finish",
    HostStatus.NO_DEVICES: "NVIDIA driver finds no GPU",
    HostStatus.PARSE_ERROR: "GPU query output cannot be parsed",
}


MAX_REASONS: Final = 2


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The job's step counter over all its sources. All None: no source can be read."""

    step: int | None = None  # the highest step any source reports
    slowest_step: int | None = None  # the lowest step over ranks, where ranks report
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None  # as the job last reported it, however long ago: see JobThroughput
    age_seconds: float | None = None  # since the step last changed, on the control host's clock
    line_interval_seconds: float | None = None
    restart: int | None = None
    sources: tuple[ProgressSample, ...] = ()
    epoch: int | None = None  # of the source that is furthest, as are the next values
    epochs: int | None = None
    epoch_step: int | None = None
    epoch_steps: int | None = None
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    eta_seconds: float | None = None
    guessed: bool = False  # the trainer is unknown: the step is a number in the log that grows steadily

    @property
    def readable(self) -> bool:
        return self.step is not None

    @property
    def guess_note(self) -> str:
        """To follow a step in a sentence where the step is only a guess."""
        return ", guessed from a log of unknown format" if self.guessed else ""

    @property
    def unreadable_reason(self) -> str:
        """Why the files that were read show no step, the newest first; "" if one does, or if there is no file."""
        if self.readable:
            return ""
        newest = sorted(self.sources, key=lambda source: source.age_seconds or 0.0)
        return "; ".join(f"{source.source}: {source.why}" for source in newest[:MAX_REASONS])


@dataclass(frozen=True, slots=True)
class JobThroughput:
    """Tokens per second of the whole job. The last report of a job that has stopped says nothing about now."""

    tokens_per_second: float | None = None  # now: 0 while the next step is late, None where it is unknown
    reported: float | None = None  # as the job last reported it; None: never, or its progress cannot be read
    reported_age_seconds: float | None = None  # since the step it belongs to
    calculated: bool = False  # from the step rate and the configured tokens_per_step, not reported by the job
    seconds_per_step: float | None = None  # measured, else as the log prints it
    eta_seconds: float | None = None  # until the last planned step; None if unknown or while the next step is late

    @property
    def is_current(self) -> bool:
        """The last report still holds: no step is late."""
        return self.reported is not None and self.tokens_per_second == self.reported


@dataclass(frozen=True, slots=True)
class JobSample:
    """All that is known of a job at one moment. Contains no verdict."""

    job: str
    gpus: tuple[RankGpu, ...]
    nodes: tuple[NodeState, ...]
    progress: JobProgress = JobProgress()
    checkpoints: tuple[CheckpointSample, ...] = ()  # one per directory: the freshest listing of any node
    wall_seconds: float = 0.0  # Unix time, for display only
    unseen: tuple[UnseenGpu, ...] = ()  # the job's other GPUs, as far as they are known
    ranks_known: bool = True  # False: one host of a job that may have more, so GPU 0 need not be rank 0

    @property
    def expected_gpus(self) -> int | None:
        """Number of GPUs the job should have; None when no node has ever reported any."""
        known = [n.expected_gpus for n in self.nodes if n.expected_gpus is not None]
        return sum(known) if known else None

    @property
    def gpu_count(self) -> int:
        """Number of GPUs the job should have, or the number that was read where that is unknown."""
        return self.expected_gpus or len(self.gpus)

    @property
    def seen_share(self) -> float:
        """Share (0..1) of the job's GPUs that this sample shows; 1 where nothing says that there are more. A node that
        has never named its GPUs counts as having as many as the others on average."""
        if len(self.gpus) == self.expected_gpus and all(node.fresh and not node.missing_gpus for node in self.nodes):
            return 1.0  # as nearly always: a job may have thousands of GPUs
        seen = Counter(ranked.node for ranked in self.gpus)
        known = 0
        unknown_nodes = 0
        for node in self.nodes:
            lost = len(node.missing_gpus) if node.fresh else 0
            expected = max(node.expected_gpus or 0, seen[node.node] + lost)
            known += expected
            unknown_nodes += not expected
        if not known:
            return 0.0 if unknown_nodes else 1.0
        total = known + unknown_nodes * known / (len(self.nodes) - unknown_nodes)
        return min(1.0, len(self.gpus) / total)

    @property
    def extent(self) -> str:
        """How much of the job this sample shows: "4 of 8 GPUs seen"; "" where it shows all of it, or nothing."""
        share = self.seen_share
        if not self.gpus or share >= 1.0:
            return ""
        with_gpus = {ranked.node for ranked in self.gpus}
        unknown = [node.node for node in self.nodes if node.node not in with_gpus and not node.expected_gpus]
        if unknown:
            return f"GPUs of {len(with_gpus)} of {format_count(len(self.nodes), 'node')} seen"
        return f"{len(self.gpus)} of {format_count(round(len(self.gpus) / share), 'GPU')} seen"

    def missing_suspect(self, node: str, missing: MissingGpu) -> Suspect:
        """A missing GPU with the index and rank that it had when it was last read."""
        for each in self.unseen:
            if each.node != node:
                continue
            same_place = missing.pci_bus_id is not None and each.pci_bus_id == missing.pci_bus_id
            if same_place or (missing.index is not None and each.index == missing.index):
                return Suspect(node, each.index, each.rank)
        return Suspect(node, missing.index)

    @property
    def complete(self) -> bool:
        """All nodes are fresh. A pattern over ranks means something only then."""
        return bool(self.nodes) and all(n.fresh for n in self.nodes)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The configuration of one job. Paths as configured; whatever is None is learned or not used."""

    name: str
    nodes: tuple[str, ...]
    run_directory: str | None = None
    logs: tuple[str, ...] = ()
    log_pattern: str | None = None
    checkpoint_directory: str | None = None
    processes: str | None = None  # regular expression on the process name (comm)
    gpus_per_node: int | None = None
    floor_tokens_per_second: float | None = None
    checkpoint_every_seconds: float | None = None
    stall_limit_seconds: float | None = None
    interval_seconds: float = 1.0
    interval_assumed: bool = False  # of a log without time stamps: no duration in it is known
    tokens_per_step: int | None = None

    @property
    def has_progress_source(self) -> bool:
        """A run directory or a log is configured, so a step counter is expected."""
        return self.run_directory is not None or bool(self.logs)


# What one sample says.


class PowerState(StrEnum):
    """What the GPUs are doing, as far as one sample shows."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    STARVATION = "starvation"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    IDLE = "idle"
    GPU_FAULT = "gpu_fault"
    STRAGGLER = "straggler"
    THROTTLE = "throttle"
    WAITING = "waiting"
    UNKNOWN = "unknown"


class UtilizationPattern(StrEnum):
    """How utilization is distributed over the ranks."""

    ALL_BUSY = "all_busy"
    ONE_LOW_REST_BUSY = "one_low_rest_busy"
    RANK0_LOW_REST_BUSY = "rank0_low_rest_busy"
    TWO_GROUPS = "two_groups"
    ONE_BUSY_REST_LOW = "one_busy_rest_low"
    ALL_LOW = "all_low"
    SCATTER = "scatter"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A node, GPU or rank that stands out. `gpu` is the driver's index; what is unknown is None."""

    node: str
    gpu: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        parts += [self.node] if self.gpu is None else [f"{self.node} GPU {self.gpu}"]
        return " on ".join(parts)


@dataclass(frozen=True, slots=True)
class Alternative:
    """The second most likely state, with its own confidence (0..1)."""

    state: PowerState
    confidence: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The classification of one sample. `why` holds the numbers that decided, `advice` the next step."""

    state: PowerState
    confidence: float  # 0..1: how often a verdict on such grounds is right
    pattern: UtilizationPattern
    why: str
    advice: str
    suspects: tuple[Suspect, ...] = ()
    power_fraction: float | None = None  # median of power / power limit; None where either is unknown
    alternative: Alternative | None = None
    at_floor: bool = False  # no GPU draws more than one that is idle with a context, or spins in a collective
    deciding_check: str | None = None  # the one check that tells state and alternative apart; None: no alternative

    def __post_init__(self) -> None:
        other = self.alternative
        if other is not None and other.confidence > self.confidence:
            # Whatever lowers the confidence of the state lowers that of its alternative: it stays the less likely one.
            object.__setattr__(self, "alternative", Alternative(other.state, self.confidence))


# What is wrong with a job.


class JobState(StrEnum):
    STARTING = "starting"
    COMPUTING = "computing"
    COMMUNICATING = "communicating"
    STARVING = "starving"
    CHECKPOINTING = "checkpointing"
    WAITING = "waiting"
    IDLE = "idle"
    HUNG = "hung"
    CRASHED = "crashed"
    COMPLETED = "completed"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class AlertName(StrEnum):
    """The alert kinds. Each has its row in alerts.toml: severity, persistence, advice, inhibition."""

    JOB_HUNG = "JobHung"
    JOB_CRASHED = "JobCrashed"
    JOB_STARVING = "JobStarving"
    JOB_SLOW = "JobSlow"
    CHECKPOINT_STALLED = "CheckpointStalled"
    CHECKPOINT_OVERDUE = "CheckpointOverdue"
    GPU_FAULT = "GpuFault"
    GPU_THROTTLED = "GpuThrottled"
    STRAGGLER = "Straggler"
    NODE_UNREACHABLE = "NodeUnreachable"
    PROBE_BLIND = "ProbeBlind"
    JOB_COMPLETED = "JobCompleted"
    LOSS_NOT_FINITE = "LossNotFinite"
    WATCHER_DEGRADED = "WatcherDegraded"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a job now. The detector repeats it at each evaluation for as long as it is true.

    `scope` is what it concerns within the job: "" for the job itself, "node-01", "node-01/GPU-uuid". Job, alert and
    scope together identify an alert episode. `confirmed` is False while only power and utilization say so: such a
    finding is a warning at most, and rises to its own severity once the step counter agrees.

    Findings are stored with open episodes (SQLite): field names are part of that format.
    """

    job: str
    alert: AlertName
    severity: Severity
    scope: str
    summary: str  # the verdict in one sentence
    evidence: tuple[str, ...]  # each with its numbers
    advice: str
    since_seconds: float  # detector clock: when the condition began, not when it was confirmed
    confirmed: bool = True
    suspects: tuple[Suspect, ...] = ()
    gpus_idle: int = 0  # GPUs that do no useful work because of it: GPU-hours lost are counted from this
    idle_joules: float = 0.0  # energy those GPUs used since the previous observation; 0 over a gap
    seen_seconds: float | None = None  # detector clock: when the condition was last true; None: it is true now
    # What is behind it, as fixed texts without numbers. Another one later in the same episode is news for receivers.
    causes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.job, self.alert.value, self.scope)
