"""One job at one moment: the samples of its nodes put side by side, rank by rank. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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


@dataclass(frozen=True, slots=True)
class RankGpu:
    """One board of the job. `rank` is None until a heartbeat's pid, or the order of nodes and boards, tells it."""

    node: str
    rank: int | None
    gpu: GpuSample


@dataclass(frozen=True, slots=True)
class NodeState:
    """What one node of the job contributed. `age_seconds` is the age of its last line on the control host's clock."""

    node: str
    status: HostStatus
    detail: str
    age_seconds: float | None  # None: it has never answered
    fresh: bool  # its GPUs are part of this job sample
    sequence: int | None = None
    reading: int | None = None  # counts the times its boards were read: a repeated answer is the same reading
    expected_gpus: int | None = None  # most ever seen, or as configured
    missing_gpus: tuple[MissingGpu, ...] = ()
    processes: tuple[ProcessSample, ...] | None = None
    kernel_events: tuple[KernelEvent, ...] = ()
    hung_calls: tuple[HungCall, ...] = ()
    filesystems: tuple[FilesystemSample, ...] = ()
    load: HostLoad = HostLoad()
    driver_version: str | None = None
    workers: tuple[WorkerSample, ...] = ()  # children of the job's processes
    step_formats: frozenset[str] = frozenset()  # of this node's logs and heartbeats that tell the job's step


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The job's step counter over all its sources. None everywhere: the job's progress cannot be read."""

    step: int | None = None  # the furthest step any source reports
    slowest_step: int | None = None  # the least step over ranks, where ranks report
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    age_seconds: float | None = None  # since the step last changed, control host's clock
    line_interval_seconds: float | None = None
    restart: int | None = None
    sources: tuple[ProgressSample, ...] = ()

    @property
    def readable(self) -> bool:
        return self.step is not None


@dataclass(frozen=True, slots=True)
class JobSample:
    """Everything known of a job when it is judged. Holds no judgement of its own."""

    job: str
    gpus: tuple[RankGpu, ...]
    nodes: tuple[NodeState, ...]
    progress: JobProgress = JobProgress()
    checkpoints: tuple[CheckpointSample, ...] = ()  # one a directory: the freshest listing of any node
    wall_seconds: float = 0.0  # for people only

    @property
    def expected_gpus(self) -> int | None:
        """Boards the job should have: None when no node has ever told."""
        known = [n.expected_gpus for n in self.nodes if n.expected_gpus is not None]
        return sum(known) if known else None

    @property
    def complete(self) -> bool:
        """All nodes fresh: shapes over ranks mean something only then."""
        return bool(self.nodes) and all(n.fresh for n in self.nodes)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the watcher was told of a job. Paths as configured; everything optional may be learned."""

    name: str
    nodes: tuple[str, ...]
    run_directory: str | None = None
    logs: tuple[str, ...] = ()
    log_pattern: str | None = None
    checkpoint_directory: str | None = None
    processes: str | None = None  # regex on comm
    gpus_per_node: int | None = None
    floor_tokens_per_second: float | None = None
    checkpoint_every_seconds: float | None = None
    stall_limit_seconds: float | None = None
    interval_seconds: float = 1.0


# Why a node's boards cannot be seen, in words; and what is read there all the same.

HEARTBEAT_FORMAT: Final = "heartbeat"  # as ProgressSample.format
HOST_STATUS_TEXT: Final = {
    HostStatus.UNREACHABLE: "it does not answer",
    HostStatus.AUTH_FAILED: "the login is refused",
    HostStatus.HOST_KEY_CHANGED: "the host key is not the known one",
    HostStatus.DRIVER_DOWN: "the driver cannot be asked",
    HostStatus.SAMPLER_TIMEOUT: "the GPU query does not return",
    HostStatus.NO_DEVICES: "the driver sees no board",
    HostStatus.PARSE_ERROR: "the output cannot be read",
}


def unreadable_reason(node: NodeState) -> str:
    """The same words from look to look: a detail that counts seconds is left to the evidence."""
    first, *_ = node.detail.split("; ")
    return (
        first
        if node.status is HostStatus.DRIVER_DOWN and first
        else HOST_STATUS_TEXT.get(node.status, node.status.value)
    )


def unreadable_reason_in_full(node: NodeState) -> str:
    """With the node's own words, once: what is said of a driver names what is missing itself."""
    if node.status is HostStatus.DRIVER_DOWN and node.detail:
        return node.detail
    return (
        f"{HOST_STATUS_TEXT.get(node.status, node.status.value)} ({node.detail})"
        if node.detail
        else unreadable_reason(node)
    )


def readable_progress_text(node: NodeState) -> str:
    """Which steps of the job are read there; "" for none."""
    if not node.step_formats:
        return ""
    return "its heartbeats are read" if HEARTBEAT_FORMAT in node.step_formats else "its log is read"


# What one picture of a job says: a state, a shape, who stands out, how sure, and why. Data only.


class PowerState(StrEnum):
    """What the boards are doing, as far as one picture can tell."""

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
    """How utilisation lies over the ranks."""

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
    """Who stands out; what is not known of it is None."""

    node: str
    gpu: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        parts += [self.node] if self.gpu is None else [f"{self.node} GPU {self.gpu}"]
        return " on ".join(parts)


@dataclass(frozen=True, slots=True)
class Alternative:
    state: PowerState
    confidence: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One picture, judged. `why` carries the numbers that decided; `advice` the next step."""

    state: PowerState
    confidence: float  # 0..1
    shape: UtilizationPattern
    why: str
    advice: str
    suspects: tuple[Suspect, ...] = ()
    power_fraction: float | None = None  # median board power / limit; None where either is unknown
    alternative: Alternative | None = None
    at_floor: bool = False  # no board draws more than idling with a context or spinning does
    settle: str | None = None  # the one observation that decides against the alternative; None: no other reading


# What is wrong with a job, held over time: the input of telling people. Data only.


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


DEFAULT_SEVERITY: Final[dict[AlertName, Severity]] = {
    AlertName.JOB_HUNG: Severity.CRITICAL,
    AlertName.JOB_CRASHED: Severity.CRITICAL,
    AlertName.JOB_STARVING: Severity.WARNING,
    AlertName.JOB_SLOW: Severity.WARNING,
    AlertName.CHECKPOINT_STALLED: Severity.CRITICAL,
    AlertName.CHECKPOINT_OVERDUE: Severity.WARNING,
    AlertName.GPU_FAULT: Severity.CRITICAL,
    AlertName.GPU_THROTTLED: Severity.WARNING,
    AlertName.STRAGGLER: Severity.WARNING,
    AlertName.NODE_UNREACHABLE: Severity.WARNING,
    AlertName.PROBE_BLIND: Severity.WARNING,
    AlertName.JOB_COMPLETED: Severity.INFO,
    AlertName.LOSS_NOT_FINITE: Severity.WARNING,
    AlertName.WATCHER_DEGRADED: Severity.WARNING,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is true of a job now. The detector repeats it each time it looks, for as long as it is true.

    `scope` is what the finding is about within the job ("" the job itself, "node-01", "node-01/GPU-uuid"): together
    with job and alert it is the identity of an episode. `confirmed` is False while only the power and utilisation
    signature says so: such a finding is told as a warning, and raised to its own severity once progress agrees.
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
    gpus_idle: int = 0  # boards that do no useful work because of it: what the cost is counted from
    idle_joules: float = 0.0  # what those boards drew since the look before; nothing is known of a gap: 0

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.job, self.alert.value, self.scope)
