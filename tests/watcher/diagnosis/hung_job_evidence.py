"""Evidence of small hung jobs: eight ranks on two nodes in one group."""

from __future__ import annotations

from collections.abc import Mapping

from wattwatch.watcher.diagnosis.flight_recorder.model import (
    GroupRecord,
    LaunchFrame,
    Operation,
    OperationLaunch,
    ProcessGroup,
    RankRecord,
)
from wattwatch.watcher.diagnosis.model import (
    LiveEvidence,
    RankProcess,
    RankReadings,
    RankStacks,
    StackFrame,
    ThreadStack,
)

WORLD = 8
GROUP = ProcessGroup("0", tuple(range(WORLD)), "default_pg")
SLOT = 7
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
FRAMES = {
    "collective": (StackFrame("all_reduce", LIBRARY, 3252), StackFrame("train_step", "/job/train.py", 40)),
    "data": (
        StackFrame("_next_data", "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1295),
        StackFrame("main", "/job/train.py", 36),
    ),
    "checkpoint": (
        StackFrame("save", "/opt/venv/lib/python3.11/site-packages/torch/serialization.py", 964),
        StackFrame("save_checkpoint", "/job/save.py", 88),
    ),
    "own": (StackFrame("count_forever", "/job/metrics.py", 12), StackFrame("main", "/job/train.py", 50)),
}


def operation(name: str, size: int = 64) -> Operation:
    return Operation("nccl", name, ((size,),), ((size,),), ("Float",), ("Float",))


def launch(slot: int, name: str, done: bool, size: int = 64) -> OperationLaunch:
    frames = (LaunchFrame("all_reduce", LIBRARY, 3252), LaunchFrame(f"do_{name}", "/job/train.py", 40))
    return OperationLaunch(slot, slot, operation(name, size), None, done, done, frames)


def record(rank: int, at_slot: str | None = "all_reduce", size: int = 64, done: bool = False) -> RankRecord:
    """A rank that came through all slots before SLOT; None: it never launched that one."""
    launches = [launch(slot, "all_reduce", True) for slot in range(SLOT)]
    if at_slot is not None:
        launches.append(launch(SLOT, at_slot, done, size))
    last = launches[-1].slot
    part = GroupRecord(GROUP, last, None, last if done or at_slot is None else SLOT - 1, tuple(launches))
    return RankRecord(rank, f"rank-{rank:05d}.recorder.json", "2.10", "2.27", (part,))


def records(odd: Mapping[int, str | None] | None = None, without: tuple[int, ...] = ()) -> tuple[RankRecord, ...]:
    """All wait in all_reduce at SLOT, but for those of `odd`."""
    odd = odd or {}
    return tuple(record(rank, odd.get(rank, "all_reduce")) for rank in range(WORLD) if rank not in without)


def stacks(odd: Mapping[int, str] | None = None, without: tuple[int, ...] = ()) -> tuple[RankStacks, ...]:
    odd = odd or {}
    return tuple(
        RankStacks(
            rank, f"rank-{rank:05d}.stacks.txt", (ThreadStack("0x1", FRAMES[odd.get(rank, "collective")], True),)
        )
        for rank in range(WORLD)
        if rank not in without
    )


def node_of(rank: int) -> str:
    return f"node-{rank // 4 + 1:02d}"


def processes(odd: Mapping[int, tuple[str | None, str | None]] | None = None) -> tuple[RankProcess, ...]:
    """`odd`: state and wait channel."""
    odd = odd or {}
    rows = []
    for rank in range(WORLD):
        state, channel = odd.get(rank, ("R", None))
        rows.append(RankProcess(rank, node_of(rank), 4000 + rank, state, channel, source=f"{node_of(rank)}.json"))
    return tuple(rows)


def live(low: tuple[int, ...] = (), suspects: tuple[int, ...] | None = None, **changes: object) -> LiveEvidence:
    """Ranks of `low` at 0 %, the rest spins."""
    ranks = tuple(
        RankReadings(
            rank,
            node_of(rank),
            rank % 4,
            190.0 if rank in low else 232.0,
            0.0 if rank in low else 100.0,
            step=1204,
            phase="train",
        )
        for rank in range(WORLD)
    )
    shape = "one_low_rest_busy" if len(low) == 1 else "all_busy"
    fields = {"step": 1204, "ranks": ranks, "suspects": low if suspects is None else suspects, **changes}
    return LiveEvidence("pretrain", 1.8e9, "hung", shape, **fields)  # type: ignore[arg-type]
