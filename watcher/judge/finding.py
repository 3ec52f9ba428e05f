"""What is wrong with a job, held over time: the input of telling people. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from watcher.judge.verdict import Suspect


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
