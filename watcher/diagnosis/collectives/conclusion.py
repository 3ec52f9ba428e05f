"""How a conclusion is recorded: with the state of each member of the groups it rests on, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from wattwatch.watcher.common.formatting import format_ranks
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, RecordedJob
from wattwatch.watcher.diagnosis.collectives.wait_graph import StalledOperation, WaitGraph
from wattwatch.watcher.diagnosis.flight_recorder.model import (
    LaunchFrame,
    OperationLaunch,
    ProcessGroup,
    position_text,
)
from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    DiagnosisVerdict,
    GroupMember,
    GroupSlotStatus,
    MemberState,
    WaitEdge,
)
from wattwatch.watcher.diagnosis.stacks.user_code import innermost_user_frame

# Limits on the size of the output for large jobs; chosen.
MAX_GROUPS_SHOWN: Final = 16
MAX_WAITS_SHOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class CollectiveHang:
    """What every conclusion is drawn from."""

    job: RecordedJob
    graph: WaitGraph

    def conclude(
        self,
        verdict: DiagnosisVerdict,
        conclusive: bool,
        culprits: tuple[int, ...],
        confidence: float,
        why: str,
        positions: Sequence[tuple[ProcessGroup, int]],
        tied: tuple[tuple[int, ...], ...] = (),
    ) -> CollectiveAnalysis:
        """`positions`: groups and slots that the conclusion rests on; these are shown first."""
        # dict.fromkeys: without duplicates and in order, as a set would make the output depend on hash values.
        waited_in = ((each.group, each.slot) for each in self.graph.stalled)
        shown = list(dict.fromkeys([*positions, *waited_in]))[:MAX_GROUPS_SHOWN]
        return CollectiveAnalysis(
            verdict,
            conclusive,
            culprits,
            tied,
            confidence,
            why,
            tuple(members_at_slot(self.job, group, slot) for group, slot in shown),
            wait_edges(self.graph, self.job),
            tuple(self.job.ranks[rank].source for rank in sorted(self.job.ranks)),
        )

    def unknown(self, why: str) -> CollectiveAnalysis:
        """The records do not show who is at fault."""
        return self.conclude(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, [])


def wait_edges(graph: WaitGraph, job: RecordedJob) -> tuple[WaitEdge, ...]:
    """The first MAX_WAITS_SHOWN. Members may wait at one slot in different operations, so each edge has its own."""
    waits = (
        WaitEdge(rank, awaited, stall.group, stall.slot, operation, why)
        for stall in graph.stalled
        for rank in stall.waiters
        for operation in (job.groups[stall.group].operation_at(rank, stall.slot) or stall.operation,)
        for awaited, why in stall.awaited.items()
    )
    return tuple(islice(waits, MAX_WAITS_SHOWN))


def members_at_slot(job: RecordedJob, group: ProcessGroup, slot: int) -> GroupSlotStatus:
    """The state of every known member of the group at the slot, in order of rank."""
    state = job.groups[group]
    ranks = sorted({*group.members, *state.records})
    return GroupSlotStatus(group, slot, tuple(_member_at_slot(job, state, rank, slot) for rank in ranks))


def _member_at_slot(job: RecordedJob, state: GroupState, rank: int, slot: int) -> GroupMember:
    record = state.records.get(rank)
    if rank not in job.ranks:
        return GroupMember(rank, MemberState.ABSENT)
    launch = state.launch_at(rank, slot)
    if launch is not None:
        place = MemberState.WAITING if launch.pending else MemberState.AHEAD
    elif state.completed(rank, slot):
        place = MemberState.AHEAD
    elif job.ranks[rank].current_wait is not None:
        place = MemberState.BEHIND
    else:
        place = MemberState.SILENT
    # For a rank that never launched it, the line that it waits in instead is more useful than no line.
    shown = launch or _launch_it_waits_in(job, rank)
    return GroupMember(
        rank,
        place,
        None if launch is None else launch.operation,
        None if record is None or not state.counts_usable else record.last_enqueued,
        None if record is None or not state.counts_usable else record.last_completed,
        None if shown is None else _user_code_frame(shown),
    )


def _launch_it_waits_in(job: RecordedJob, rank: int) -> OperationLaunch | None:
    wait = job.ranks[rank].current_wait
    return None if wait is None else wait[1]


def _user_code_frame(launch: OperationLaunch) -> LaunchFrame | None:
    """The innermost line of the job's own code; if all lines are of libraries, the innermost one."""
    return innermost_user_frame(launch.frames) or next(iter(launch.frames), None)


def sort_by_waiters(stalls: Sequence[StalledOperation]) -> list[StalledOperation]:
    """Operations in which most ranks wait first."""
    return sorted(stalls, key=lambda each: (-len(each.waiters), each.group, each.slot))


def with_most_waiters(stalls: Sequence[StalledOperation]) -> StalledOperation:
    """The operation in which most ranks wait. `stalls` must not be empty."""
    return sort_by_waiters(stalls)[0]


def describe_wait(stall: StalledOperation) -> str:
    """`ranks 0-2 wait in all_reduce at sequence number 7 of default_pg`"""
    what = f"{describe_operation(stall.operation)} at {position_text(stall.group, stall.slot)}"
    return f"{format_ranks(stall.waiters)} {'waits' if len(stall.waiters) == 1 else 'wait'} in {what}"
