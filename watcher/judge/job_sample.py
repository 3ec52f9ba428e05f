"""One job at one moment: the samples of its nodes put side by side, rank by rank. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from collectors.samples import (
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
