"""A sample snapshot of several jobs, with which the page, the API and the metrics are tested."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.collectors.samples import (
    CheckpointEntry,
    CheckpointSample,
    GpuSample,
    HostStatus,
    HungCall,
    NodeSample,
    PowerSource,
    ProgressSample,
    ReadingStatus,
)
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import (
    AlertName,
    Alternative,
    Finding,
    JobProgress,
    JobSample,
    JobState,
    JobThroughput,
    NodeState,
    PowerState,
    RankGpu,
    Severity,
    Suspect,
    UnseenGpu,
    UtilizationPattern,
    Verdict,
)
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView, JobView, NodeView, Snapshot

NOW: Final = 1_787_220_900.0  # 2026-08-20 10:15:00 UTC
MONOTONIC_NOW: Final = 1000.0
GIB: Final = float(1 << 30)
HOSTILE: Final = "<script>alert(\"x\")</script> & 'q' \\ \n{{7*7}}"


def gpu(index: int, watts: float | None, busy: float | None, node: str = "n", name: str = "NVIDIA B300") -> GpuSample:
    reasons: dict[str, ReadingStatus] = {}
    if watts is None:
        reasons = {"power_watts": ReadingStatus.LOST, "utilization_percent": ReadingStatus.LOST}
    return GpuSample(
        index=index,
        uuid=f"GPU-{node}-{index}",
        pci_bus_id=f"00000000:{index + 16:02X}:00.0",
        name=name,
        power_watts=watts,
        power_source=PowerSource.ENERGY_COUNTER,
        power_limit_watts=1100.0,
        utilization_percent=busy,
        memory_utilization_percent=None if busy is None else busy / 2,
        memory_used_bytes=None if watts is None else 82 * GIB,
        memory_total_bytes=269 * GIB,
        temperature_celsius=None if watts is None else 61.0,
        energy_joules=None if watts is None else 1.5e9 + index,
        reasons=reasons,
    )


def rank_gpus(nodes: Sequence[str], readings: Sequence[tuple[float | None, float | None]]) -> tuple[RankGpu, ...]:
    per_node = len(readings) // len(nodes)
    return tuple(
        RankGpu(nodes[rank // per_node], rank, gpu(rank % per_node, watts, busy, nodes[rank // per_node]))
        for rank, (watts, busy) in enumerate(readings)
    )


def timeline(stretches: Sequence[tuple[JobState, float, float]], end: float = NOW) -> tuple[TimelinePoint, ...]:
    """Segments of (state, seconds, watts), the last one ending now."""
    points = []
    start = end - sum(seconds for _, seconds, _ in stretches)
    for state, seconds, watts in stretches:
        for i in range(int(seconds)):
            wave = 1 + 0.03 * math.sin(start / 7 + i / 3)
            points.append(
                TimelinePoint(
                    start + i, state, 1800 + i, 52_900.0, watts * wave, watts * wave * 0.93, watts * wave * 1.06, 98.0
                )
            )
        start += seconds
    return tuple(points)


def job(
    name: str,
    state: JobState,
    nodes: Sequence[str],
    readings: Sequence[tuple[float | None, float | None]],
    history: Sequence[tuple[JobState, float, float]],
    reason: str,
    verdict: Verdict,
    progress: JobProgress,
    since: float,
    wasted: Mapping[str, float] | None = None,
    findings: tuple[Finding, ...] = (),
    checkpoint_age: float | None = 410.0,
    reported: float | None = None,
) -> JobView:
    entry = CheckpointEntry("step-00001500", 1500, True, 62_000_000_000, checkpoint_age, "COMPLETE.json")
    staged = CheckpointEntry("step-00002000.tmp", 2000, False, 1_000, 3.0, "no COMPLETE.json yet")
    return JobView(
        name=name,
        state=state,
        evaluated_seconds=MONOTONIC_NOW - 0.4,
        state_since_seconds=MONOTONIC_NOW - since,
        state_since_wall_seconds=NOW - since,
        reason=reason,
        sample=JobSample(
            job=name,
            gpus=rank_gpus(nodes, readings) if readings else (),
            nodes=tuple(
                NodeState(
                    n, HostStatus.OK, "", 0.4, True, sequence=90, expected_gpus=len(readings) // len(nodes) or None
                )
                for n in nodes
            ),
            progress=progress,
            checkpoints=(CheckpointSample("/runs/checkpoints", (entry, staged), 1.0),),
            wall_seconds=NOW - 0.4,
        ),
        verdict=verdict,
        throughput=JobThroughput(
            progress.tokens_per_second,
            progress.tokens_per_second if reported is None else reported,
            None if progress.tokens_per_second is None else progress.age_seconds,
            seconds_per_step=progress.seconds_per_step,
            eta_seconds=progress.eta_seconds,
        ),
        findings=findings,
        wasted_gpu_seconds=wasted or {},
        wasted_joules={alert: seconds * 191.0 for alert, seconds in (wasted or {}).items()},
        timeline=timeline(history),
    )


def healthy() -> JobView:
    nodes = ["gpu-01", "gpu-02"]
    readings = [(960.0 + 9 * (rank % 5), 99.0 + rank % 2) for rank in range(16)]
    return job(
        "pretrain-32b",
        JobState.COMPUTING,
        nodes,
        readings,
        [(JobState.COMPUTING, 420, 985.0), (JobState.CHECKPOINTING, 60, 190.0), (JobState.COMPUTING, 120, 985.0)],
        "Step 1,923 was 4.9 s ago, as expected from the job's own 4.9 s per step.",
        Verdict(
            PowerState.COMPUTE, 0.97, UtilizationPattern.ALL_BUSY, "Median 985 W is 0.90 of the limit.", "", (), 0.9
        ),
        JobProgress(
            step=1923,
            slowest_step=1923,
            total_steps=3854,
            loss=1.73,
            tokens_per_second=52_980.0,
            age_seconds=2.1,
            seconds_per_step=4.95,
            eta_seconds=9_556.0,
            sources=(ProgressSample("/runs/a/heartbeat/rank-00000.json", "heartbeat", 1923, 3854),),
        ),
        121.0,
    )


def half_seen() -> JobView:
    """The healthy job when its second node no longer answers."""
    view = healthy()
    seen, lost = view.sample.gpus[:8], view.sample.gpus[8:]
    first, second = view.sample.nodes
    blind = replace(second, status=HostStatus.UNREACHABLE, detail="no line for 12 s", age_seconds=12.0, fresh=False)
    unseen_gpus = tuple(UnseenGpu(g.node, g.rank, g.gpu.index, g.gpu.pci_bus_id, "node does not answer") for g in lost)
    return replace(view, sample=replace(view.sample, gpus=seen, nodes=(first, blind), unseen=unseen_gpus))


def hung() -> JobView:
    nodes = ["gpu-03", "gpu-04"]
    readings: list[tuple[float | None, float | None]] = [(191.0 + rank % 4, 100.0) for rank in range(16)]
    readings[3] = (184.0, 0.0)
    suspect = Suspect("gpu-03", 3, 3)
    return job(
        "finetune-evenfix",
        JobState.HUNG,
        nodes,
        readings,
        [(JobState.COMPUTING, 380, 990.0), (JobState.HUNG, 220, 191.0)],
        "No step for 3 min 40 s where a step usually takes 4.9 s; power fell from 990 W to 191 W while "
        "utilization still reads 100 % on 15 of 16 ranks.",
        Verdict(
            PowerState.HANG,
            0.94,
            UtilizationPattern.ONE_LOW_REST_BUSY,
            "Median 191 W is 0.17 of the limit; rank 3 at 0 %, the other 15 at 100 %.",
            "Dump the flight recorder before anything is killed: py-spy dump on rank 3 first.",
            (suspect,),
            0.17,
            Alternative(PowerState.CHECKPOINT, 0.05),
        ),
        JobProgress(step=3854, slowest_step=3854, total_steps=3854, tokens_per_second=0.0, age_seconds=220.0),
        220.0,
        reported=52_958.0,
        wasted={"JobHung": 3520.0},
        findings=(
            Finding(
                "finetune-evenfix",
                AlertName.JOB_HUNG,
                Severity.CRITICAL,
                "",
                "hung",
                ("x",),
                "y",
                1.0,
                True,
                (suspect,),
                16,
            ),
        ),
    )


def starving() -> JobView:
    readings = [(540.0 + 37 * ((rank * 7) % 5), float((rank * 37) % 100)) for rank in range(8)]
    return job(
        "ablation-loader",
        JobState.STARVING,
        ["gpu-05"],
        readings,
        [(JobState.STARVING, 600, 575.0)],
        "Steps advance at 21,000 tok/s against 52,000 before; utilization scatters from 0 % to 96 % over ranks.",
        Verdict(
            PowerState.STARVATION,
            0.71,
            UtilizationPattern.SCATTER,
            "Median 575 W, utilization spread 96 points.",
            "",
            (),
            0.52,
        ),
        JobProgress(step=812, total_steps=20_000, tokens_per_second=21_040.0, age_seconds=11.0),
        3_700.0,
        {"JobStarving": 9_000.0},
    )


def lost_gpu() -> JobView:
    readings: list[tuple[float | None, float | None]] = [(71.0, 0.0) for _ in range(8)]
    readings[5] = (None, None)
    return job(
        HOSTILE,
        JobState.CRASHED,
        ["gpu-06"],
        readings,
        [(JobState.COMPUTING, 500, 640.0), (JobState.CRASHED, 100, 70.0)],
        "All 8 processes are gone and no checkpoint appeared; GPU 5 of gpu-06 fell off the bus (Xid 79).",
        Verdict(
            PowerState.GPU_FAULT,
            0.99,
            UtilizationPattern.ALL_LOW,
            "GPU 5 is lost.",
            "Drain the node.",
            (Suspect("gpu-06", 5),),
        ),
        JobProgress(step=77, total_steps=None, loss=float("nan"), age_seconds=101.0),
        100.0,
        {"JobCrashed": 800.0},
        checkpoint_age=None,
    )


def unseen() -> JobView:
    return job(
        "eval-nightly",
        JobState.UNKNOWN,
        ["gpu-07"],
        [],
        [],
        "Its only node has not answered for 5 min.",
        Verdict(PowerState.UNKNOWN, 0.0, UtilizationPattern.UNKNOWN, "There is no reading.", ""),
        JobProgress(),
        300.0,
        checkpoint_age=None,
    )


def node(name: str, jobs: tuple[str, ...], **changes: object) -> NodeView:
    link = NodeLink(name, HostStatus.OK, "", 0.4, 1, 0, 900, 0, 0.012)
    sample = NodeSample(name, HostStatus.OK, "", 900, 1e5, NOW, 1e4, "nvml", (gpu(0, 960.0, 99.0, name),))
    return replace(NodeView(name, link, sample, jobs), **changes)  # type: ignore[arg-type]  # fields by name


def nodes() -> dict[str, NodeView]:
    views = [
        node("gpu-01", ("pretrain-32b",)),
        node("gpu-02", ("pretrain-32b",)),
        node("gpu-03", ("finetune-evenfix",)),
        node("gpu-04", ("finetune-evenfix",)),
        node("gpu-05", ("ablation-loader",)),
        node(
            "gpu-06",
            (HOSTILE,),
            sample=NodeSample(
                "gpu-06",
                HostStatus.SAMPLER_TIMEOUT,
                "nvidia-smi has not returned for 48 s",
                90,
                1e5,
                NOW,
                1e4,
                hung_calls=(HungCall("nvidia-smi", 48.0), HungCall("list /mnt/ckpt", 12.0)),
            ),
        ),
        node(
            "gpu-07",
            ("eval-nightly",),
            link=NodeLink(
                "gpu-07", HostStatus.UNREACHABLE, "no TCP connection to 10.0.3.7:22 in 10 s", 301.0, 2, 14, 40
            ),
        ),
        node(
            "gpu-08",
            (),
            link=NodeLink("gpu-08", HostStatus.HOST_KEY_CHANGED, "its host key is not the known one"),
            sample=None,
        ),
    ]
    return {view.node: view for view in views}


def episode(alert: AlertName, severity: Severity, job: str, summary: str, ago: float, **changes: object) -> EpisodeView:
    plain = EpisodeView(
        id=f"{alert.value}-{ago:.0f}",
        job=job,
        alert=alert.value,
        scope="",
        severity=severity,
        confirmed=True,
        summary=summary,
        evidence=("Step 3,854 is 3 min 40 s old; a step usually takes 4.9 s.", "Power 990 W -> 191 W at 10:11:20 UTC."),
        advice="Dump the flight recorder before anything is killed.",
        suspects=(),
        opened_wall_seconds=NOW - ago,
        closed_wall_seconds=None,
        gpu_hours_lost=0.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields by name


def episodes() -> tuple[EpisodeView, ...]:
    return (
        episode(
            AlertName.JOB_HUNG,
            Severity.CRITICAL,
            "finetune-evenfix",
            "Hung at step 3,854: rank 3 waits apart from the other 15.",
            218.0,
            suspects=(Suspect("gpu-03", 3, 3),),
            gpu_hours_lost=0.97,
        ),
        episode(
            AlertName.JOB_STARVING,
            Severity.WARNING,
            "ablation-loader",
            "The data loader cannot keep up: 21,000 tok/s against 52,000.",
            3_600.0,
            gpu_hours_lost=2.5,
            confirmed=False,
        ),
        episode(AlertName.GPU_FAULT, Severity.CRITICAL, HOSTILE, "GPU 5 fell off the bus.", 100.0, scope="gpu-06/5"),
        episode(
            AlertName.JOB_CRASHED,
            Severity.CRITICAL,
            HOSTILE,
            "All processes are gone.",
            98.0,
            suppressed_by="GpuFault gpu-06/5",
        ),
        episode(
            AlertName.NODE_UNREACHABLE,
            Severity.WARNING,
            "eval-nightly",
            "gpu-07 does not answer.",
            300.0,
            scope="gpu-07",
        ),
        episode(
            AlertName.JOB_SLOW,
            Severity.WARNING,
            "pretrain-32b",
            "41,000 tok/s, below the floor of 45,000.",
            5_000.0,
            closed_wall_seconds=NOW - 3_900.0,
        ),
    )


def cluster() -> Snapshot:
    jobs = (healthy(), hung(), starving(), lost_gpu(), unseen())
    return Snapshot(
        tick=412,
        seconds=MONOTONIC_NOW,
        wall_seconds=NOW,
        tick_seconds=0.004,
        late_seconds=0.01,
        jobs={view.name: view for view in jobs},
        nodes=nodes(),
        episodes=episodes(),
        deliveries=DeliveryStats({"ops": 12}, {("ops", "rate_limited"): 2, ("ops", "timeout"): 1}, 1, 4.5),
        blind=False,
        ticks_overrun=1,
        detection_delays_seconds=(1.2, 1.9),
    )


def empty() -> Snapshot:
    return Snapshot(1, MONOTONIC_NOW, NOW, 0.0, 0.0, {}, {}, (), DeliveryStats(), False)


def large(node_count: int, gpus_per_node: int = 8) -> Snapshot:
    """One job over many nodes, for measuring."""
    names = [f"gpu-{i:04}" for i in range(node_count)]
    readings = [(900.0 + rank % 97 + 0.37, float(90 + rank % 11)) for rank in range(node_count * gpus_per_node)]
    view = replace(healthy(), name="large")
    view = replace(view, sample=replace(view.sample, gpus=rank_gpus(names, readings)))
    return replace(cluster(), jobs={"large": view}, nodes={name: node(name, ("large",)) for name in names})
