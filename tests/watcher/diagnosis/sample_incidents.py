"""Incidents of any size, for testing the report and for viewing it."""

from __future__ import annotations

import math

from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.diagnosis.flight_recorder.model import LaunchFrame, Operation, ProcessGroup, UnreadableRecord
from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    Culprit,
    Diagnosis,
    DiagnosisVerdict,
    GroupMember,
    GroupSlotStatus,
    HangCause,
    LiveEvidence,
    MemberState,
    NodeFault,
    RankReadings,
    RankStacks,
    SignalSummary,
    StackFrame,
    ThreadStack,
    WaitEdge,
)
from wattwatch.watcher.diagnosis.report.page import EvidenceFile, IncidentReport

NOW = 1_787_220_900.0  # 2026-08-20 10:15:00 UTC
REDUCE = Operation("nccl", "all_reduce", ((1025,),), ((1025,),), ("Float",), ("Float",))
BARRIER = Operation("nccl", "barrier")
SAVE = LaunchFrame("save_checkpoint", "/opt/job/train.py", 88)
STEP = LaunchFrame("train_step", "/opt/job/train.py", 141)


def timeline(end: float = NOW, step: int = 3854) -> tuple[TimelinePoint, ...]:
    """Eight minutes of work with a save in it, then a hang."""
    points = []
    for second in range(-760, 1):
        at = end + second
        state, watts = JobState.COMPUTING, 985.0
        if -470 < second < -425:
            state, watts = JobState.CHECKPOINTING, 240.0
        if second > -250:
            state, watts = JobState.HUNG, 191.0
        if -250 < second < -215:
            state = JobState.WAITING
        steps = step + min(0, (second + 250) // 5)
        wave = 1 + 0.02 * math.sin(second / 3)
        points.append(
            TimelinePoint(at, state, steps, None, watts * wave, watts * wave * 0.92, watts * wave * 1.05, 98.0)
        )
    return tuple(points)


def stacks(rank: int, barrier: bool) -> RankStacks:
    last = StackFrame(
        "barrier" if barrier else "all_reduce", "/opt/venv/lib/torch/distributed/distributed_c10d.py", 4512
    )
    own = (
        (StackFrame("save_checkpoint", "/opt/job/train.py", 88), StackFrame("end_of_epoch", "/opt/job/train.py", 201))
        if barrier
        else (
            StackFrame("clip_gradients", "/opt/job/train.py", 133),
            StackFrame("train_step", "/opt/job/train.py", 141),
        )
    )
    frames = (
        StackFrame("wrapper", "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83),
        StackFrame(last.function, "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 4512),
        *own,
        StackFrame("main", "/opt/job/train.py", 260),
        StackFrame("<module>", "/opt/job/train.py", 274),
    )
    return RankStacks(rank, f"rank-{rank:05}.stacks.txt", (ThreadStack("MainThread", frames, main=True),))


def incident(world: int = 16, culprit: int = 3, per_node: int = 8) -> IncidentReport:
    group = ProcessGroup("0", tuple(range(world)), "default_pg")
    others = [rank for rank in range(world) if rank != culprit]
    members = tuple(
        GroupMember(rank, MemberState.BEHIND, BARRIER, 5, 4, SAVE)
        if rank == culprit
        else GroupMember(rank, MemberState.WAITING, REDUCE, 41, 40, STEP)
        for rank in range(world)
    )
    collectives = CollectiveAnalysis(
        verdict=DiagnosisVerdict.DESYNC,
        conclusive=True,
        culprits=(culprit,),
        tied=(),
        confidence=0.98,
        why="",
        groups=(GroupSlotStatus(group, 41, members),),
        waits=tuple(
            WaitEdge(rank, culprit, group, 41, REDUCE, "is in barrier, sequence number 41 of the same group")
            for rank in others
        ),
    )
    node = f"node-{culprit // per_node + 1:02}"
    diagnosis = Diagnosis(
        verdict=DiagnosisVerdict.DESYNC,
        conclusive=True,
        cause=HangCause.PROGRAM,
        culprits=(
            Culprit(
                culprit, node, culprit % per_node, "in barrier at sequence number 41 (save_checkpoint, train.py:88)"
            ),
        ),
        confidence=0.97,
        step=3854,
        summary=f"Rank {culprit} on {node} is in the save's barrier, {world - 1} ranks reduce gradients of step 3,854.",
        why=f"At sequence number 41 of default_pg {world - 1} of {world} launched all_reduce of [1025] Float from "
        f"train_step (train.py:141); rank {culprit} launched barrier from save_checkpoint (train.py:88). Its GPU is at "
        "0 % and 184 W, the others are at 100 % and 191 W.",
        advice="Its shard ended one block before the others': set `drop_last` or pad the shards, and end the job; the "
        "newest complete checkpoint is step-00003500.",
        signals=(
            SignalSummary(
                "flight recorder", True, f"{world - 1} ranks at sequence number 41 agree, rank {culprit} differs"
            ),
            SignalSummary(
                "power and utilisation", True, f"rank {culprit} alone at 0 %, all others at 100 % and at the floor"
            ),
            SignalSummary("stacks", True, f"rank {culprit} is in save_checkpoint, {world - 1} in clip_gradients"),
            SignalSummary("NCCL RAS", False, "all ranks answer, and no communicator counts a difference"),
        ),
        collectives=collectives,
        evidence=("rank-00003.recorder",),
        missing=("node-02: py-spy is not installed", "rank 9: worker socket did not answer in 3 s"),
        unreadable=(UnreadableRecord("rank-00011.recorder", 11, "cut off after 4,096 bytes", incomplete=True),),
        stacks=(stacks(culprit, barrier=True),),
    )
    live = LiveEvidence(
        job="finetune-evenfix",
        wall_seconds=NOW - 190,
        state="hung",
        shape="one_low_rest_busy",
        step=3854,
        ranks=tuple(
            RankReadings(
                rank=rank,
                node=f"node-{rank // per_node + 1:02}",
                gpu=rank % per_node,
                power_watts=None if rank == culprit + 6 else 184.0 if rank == culprit else 189.0 + rank * 7 % 5,
                utilization_percent=0.0 if rank == culprit else 100.0,
            )
            for rank in range(world)
        ),
        suspects=(culprit,),
        at_floor=True,
        faults=(NodeFault("throttle", "node-02", "GPU 5 is throttled: sw_thermal_slowdown, 1,410 MHz, 87 °C", 13, 5),),
    )
    return IncidentReport(
        job="finetune-evenfix",
        diagnosis=diagnosis,
        live=live,
        alert="JobHung",
        summary="No step for 3 min 40 s (usually 4.9 s), and the GPUs draw 191 W at 100 % utilization.",
        facts=(
            "Last step 3,854, 3 min 40 s ago; a step usually takes 4.9 s.",
            "Power fell from 985 W to 191 W at 10:10:50 UTC.",
        ),
        opened_wall_seconds=NOW - 215,
        diagnosed_wall_seconds=NOW - 188,
        timeline=timeline(),
        stacks=tuple(stacks(rank, barrier=rank == culprit) for rank in range(min(world, 64))),
        files=tuple(
            EvidenceFile(
                f"rank-{rank:05}.recorder", 48_123 + rank, f"{rank * 7919 + 13:064x}", f"node-{rank // 8 + 1:02}"
            )
            for rank in range(world)
        ),
        directory="/var/lib/wattwatch/incidents/20260820T101125Z-finetune-evenfix-JobHung.capture",
        gpu_hours_lost=0.98 * world / 16,
        kilowatt_hours_lost=0.19 * world / 16,
    )
