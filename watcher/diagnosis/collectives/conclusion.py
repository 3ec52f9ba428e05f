"""What all conclusions are drawn from, and how one is put down: with where each group stands and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from wattwatch.watcher.common.formatting import format_ranks
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, RecordedJob
from wattwatch.watcher.diagnosis.collectives.wait_graph import StalledOperation, WaitGraph
from wattwatch.watcher.diagnosis.flight_recorder.model import LaunchFrame, OperationLaunch, ProcessGroup
from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    DiagnosisVerdict,
    GroupMember,
    GroupSlotStatus,
    MemberState,
    WaitEdge,
)
from wattwatch.watcher.diagnosis.stacks.user_code import innermost_user_frame

MAX_GROUPS_SHOWN: Final = 16
MAX_WAITS_SHOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class CollectiveHang:
    standings: RecordedJob
    graph: WaitGraph

    def reading(
        self,
        verdict: DiagnosisVerdict,
        conclusive: bool,
        culprits: tuple[int, ...],
        confidence: float,
        why: str,
        places: Sequence[tuple[ProcessGroup, int]],
        tied: tuple[tuple[int, ...], ...] = (),
    ) -> CollectiveAnalysis:
        """`places`: groups and slots that the conclusion rests on; they are shown first."""
        waited_in = ((each.group, each.slot) for each in self.graph.standstills)
        shown = list(dict.fromkeys([*places, *waited_in]))[:MAX_GROUPS_SHOWN]
        return CollectiveAnalysis(
            verdict,
            conclusive,
            culprits,
            tied,
            confidence,
            why,
            tuple(members_at_slot(self.standings, group, slot) for group, slot in shown),
            wait_edges(self.graph, self.standings),
            tuple(self.standings.ranks[rank].source for rank in sorted(self.standings.ranks)),
        )

    def unknown(self, why: str) -> CollectiveAnalysis:
        return self.reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, [])


def wait_edges(graph: WaitGraph, standings: RecordedJob) -> tuple[WaitEdge, ...]:
    """The first MOST_WAITS. Members may wait at one slot in different operations, so each is told with its own."""
    waits = (
        WaitEdge(rank, awaited, each.group, each.slot, operation, why)
        for each in graph.standstills
        for rank in each.waiters
        for operation in (standings.groups[each.group].operation_at(rank, each.slot) or each.operation,)
        for awaited, why in each.awaited.items()
    )
    return tuple(islice(waits, MAX_WAITS_SHOWN))


# Where each member of a group stands against the slot that the group is stuck at: for people, and for `--json`.


def members_at_slot(standings: RecordedJob, group: ProcessGroup, slot: int) -> GroupSlotStatus:
    """Every known member of the group at the slot, in the order of ranks."""
    standing = standings.groups[group]
    ranks = sorted({*group.members, *standing.records})
    return GroupSlotStatus(group, slot, tuple(_member_at_slot(standings, standing, rank, slot) for rank in ranks))


def _member_at_slot(standings: RecordedJob, standing: GroupState, rank: int, slot: int) -> GroupMember:
    record = standing.records.get(rank)
    if rank not in standings.ranks:
        return GroupMember(rank, MemberState.ABSENT)
    launch = standing.at(rank, slot)
    if launch is not None:
        place = MemberState.WAITING if launch.open else MemberState.AHEAD
    elif standing.completed(rank, slot):
        place = MemberState.AHEAD
    elif standings.ranks[rank].primary is not None:
        place = MemberState.BEHIND
    else:
        place = MemberState.SILENT
    # What it is in instead says more than nothing.
    shown = launch or _launch_it_waits_in(standings, rank)
    return GroupMember(
        rank,
        place,
        None if launch is None else launch.operation,
        None if record is None or not standing.counted else record.last_enqueued,
        None if record is None or not standing.counted else record.last_completed,
        None if shown is None else _user_code_frame(shown),
    )


def _launch_it_waits_in(standings: RecordedJob, rank: int) -> OperationLaunch | None:
    primary = standings.ranks[rank].primary
    return None if primary is None else primary[1]


def _user_code_frame(launch: OperationLaunch) -> LaunchFrame | None:
    """The innermost line of the job's own code; where all is library, the innermost one."""
    return innermost_user_frame(launch.frames) or next(iter(launch.frames), None)


# Where ranks wait, in words. Pure.


def sort_by_waiters(places: Sequence[StalledOperation]) -> list[StalledOperation]:
    """Those in which most wait first."""
    return sorted(places, key=lambda each: (-len(each.waiters), each.group, each.slot))


def with_most_waiters(places: Sequence[StalledOperation]) -> StalledOperation:
    return sort_by_waiters(places)[0]


def describe_wait(place: StalledOperation) -> str:
    """ "ranks 0-2 wait in all_reduce at slot 7 of default_pg"."""
    what = f"{describe_operation(place.operation)} at slot {place.slot:,} of {place.group}"
    return f"{format_ranks(place.waiters)} {'waits' if len(place.waiters) == 1 else 'wait'} in {what}"
