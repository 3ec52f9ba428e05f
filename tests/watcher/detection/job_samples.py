"""One sample of a job, for `classify`: a GPU each rank, from lists of watts and utilization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wattwatch.collectors.samples import GpuSample, HostStatus, ReadingStatus
from wattwatch.watcher.detection.model import JobProgress, JobSample, NodeState, RankGpu

B300 = "NVIDIA B300 SXM6 AC"
NOT_TOLD: dict[str, ReadingStatus] = {}


def job_sample(
    watts: Sequence[float | None],
    utilization: Sequence[float | None],
    *,
    held_bytes: float | None = 82e9,
    name: str | None = B300,
    limit_watts: float | None = 1100.0,
    nodes: int = 1,
    status: HostStatus = HostStatus.OK,
    progress: JobProgress = JobProgress(),
    **fields: object,
) -> JobSample:
    """`fields`: anything else of GpuSample, the same on every GPU."""
    each = len(watts) // nodes
    gpus = tuple(
        RankGpu(
            f"node-{rank // each + 1}",
            rank,
            replace(
                GpuSample(
                    index=rank % each,
                    name=name,
                    power_watts=power,
                    power_limit_watts=limit_watts,
                    utilization_percent=busy,
                    memory_used_bytes=held_bytes,
                ),
                **fields,  # type: ignore[arg-type]  # names and types are GpuSample's; a wrong one fails at once
            ),
        )
        for rank, (power, busy) in enumerate(zip(watts, utilization, strict=True))
    )
    states = tuple(NodeState(f"node-{i + 1}", status, "", 0.5, True, i, i, each) for i in range(nodes))
    return JobSample("pretrain", gpus, states, progress)
