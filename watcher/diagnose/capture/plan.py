"""What is asked of which node when a job hangs. Data, and how it follows from what the watcher knows of the job. Pure.

A plan rests on what was seen before: which ranks and processes are on which node, and whether the job saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from collectors.samples import HostStatus
from watcher.diagnose.ras.client import RAS_PORT
from watcher.judge.job_sample import JobSample, JobSpec, NodeState

PROCESSES_MOST: Final = 64  # of a node
MIB: Final = 2**20
ASKABLE: Final = frozenset({HostStatus.OK, HostStatus.SAMPLER_TIMEOUT, HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES})
"""The node answers, whatever its boards do."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """As configured for a job."""

    recorder_files: str | None = None  # TORCH_FR_DUMP_TEMP_FILE: prefix of dumps, the rank follows
    recorder_pipe: str | None = None  # TORCH_NCCL_DEBUG_INFO_PIPE_FILE: prefix of FIFOs that ask for a dump
    ras_port: int = RAS_PORT


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node. `unreachable`: why it cannot be asked; None: it can."""

    node: str
    ranks: tuple[int, ...] = ()  # known to be there; heartbeats on the node tell more
    processes: tuple[tuple[int | None, int], ...] = ()  # rank and pid
    unreachable: str | None = None
    ras: bool = False
    stands_in_for: tuple[int, ...] = ()  # ranks of nodes that cannot be asked: a shared directory has their last words


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """One capture. The limits hold for a rank's file, for a node, and in all."""

    job: str
    nodes: tuple[NodePlan, ...]
    run_directory: str | None = None
    settings: CaptureSettings = CaptureSettings()
    saving: bool = False  # then no FIFO is touched: a dump may wait behind the save
    py_spy: bool = True  # where it is installed, and for ranks that gave no stacks themselves
    deadline_seconds: float = 10.0
    rank_bytes: int = 16 * MIB
    node_bytes: int = 128 * MIB
    total_bytes: int = 512 * MIB


def plan_of(spec: JobSpec, sample: JobSample, settings: CaptureSettings) -> CapturePlan:
    phases = {source.phase for source in sample.progress.sources}
    reachable = [node.node for node in sample.nodes if node.status in ASKABLE]
    # Any process answers for the whole job, and asks all others for it: a second node only in case the first has none.
    asked = {*reachable[:1], *reachable[-1:]}
    plans = [_node_plan(node, sample, node.node in asked) for node in sample.nodes]
    lost = tuple(sorted(rank for plan in plans if plan.unreachable is not None for rank in plan.ranks))
    return CapturePlan(
        job=spec.name,
        nodes=tuple(replace(plan, stands_in_for=lost) if plan.node in reachable[:1] else plan for plan in plans),
        run_directory=spec.run_directory,
        settings=settings,
        saving="save" in phases,
    )


def _node_plan(node: NodeState, sample: JobSample, ras: bool) -> NodePlan:
    rank_of_board = {
        board.gpu.index: board.rank for board in sample.gpus if board.node == node.node and board.rank is not None
    }
    processes: list[tuple[int | None, int]] = []
    for process in node.processes or ():
        rank = process.rank
        if rank is None and len(process.gpu_indexes) == 1:
            rank = rank_of_board.get(process.gpu_indexes[0])
        processes.append((rank, process.pid))
    ranks = {*rank_of_board.values(), *(rank for rank, _ in processes if rank is not None)}
    return NodePlan(
        node.node,
        tuple(sorted(ranks)),
        tuple(processes[:PROCESSES_MOST]),
        None if node.status in ASKABLE else node.detail or str(node.status),
        ras,
    )
