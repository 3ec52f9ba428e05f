"""Who cannot go on before whom: the walk from the ranks that wait to those that hold everybody up.

Each rank waits in its first open operation; whoever has not launched it, or is still in an earlier one, is awaited.
Ranks in the same slot form one standstill, so the graph has as many nodes as there are groups stuck, not ranks squared.
It ends in a rank that waits in nothing (silent), a rank that did not finish what its peers finished (left behind), a
rank without a record (which says nothing of it: its record may only be lost), a standstill that everybody has joined
(so it is not the program), or a ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.watcher.diagnosis.collectives.operations import synchronising
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, RecordedJob
from wattwatch.watcher.diagnosis.flight_recorder.model import Operation, OperationLaunch, ProcessGroup


class BlockingReason(StrEnum):
    """Why a rank holds the others up."""

    SILENT = "silent"
    LEFT_BEHIND = "left_behind"


NOT_LAUNCHED = "has not launched it"
IN_EARLIER_OPERATION = "is still in an earlier operation"
NO_RECORD = "left no record"
MAX_LATE_RANKS_TRIED: Final = 8  # late ranks that are looked at one by one
FEW_OPERATIONS: Final = (
    2  # operations that a record may be late with: completions are looked for now and then, not at once
)


@dataclass(slots=True)
class StalledOperation:
    """One slot of one group (or one pair's send and recv) in which ranks wait, and for whom."""

    group: ProcessGroup
    slot: int
    operation: Operation
    waiters: list[int] = field(default_factory=list)
    awaited: Mapping[int, str] = field(default_factory=dict)  # rank -> why


@dataclass(frozen=True, slots=True)
class WaitGraph:
    standstills: tuple[StalledOperation, ...]
    of_rank: Mapping[int, StalledOperation]
    left_behind: Mapping[
        int, tuple[ProcessGroup, OperationLaunch, tuple[int, ...]]
    ]  # rank -> its launch, and who finished it
    by_a_few: frozenset[int] = frozenset()  # of those, who may only have noticed late


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    """Where the waiting leads to."""

    holders: Mapping[int, BlockingReason]
    joined: tuple[StalledOperation, ...]  # everybody is in it
    rings: tuple[tuple[StalledOperation, ...], ...]  # each waits for one that waits for it
    unrecorded: tuple[StalledOperation, ...]  # nobody with a record explains these: members left none
    awaited_absent: tuple[int, ...]  # the one without a record for whom all of these wait


StallKey = tuple[ProcessGroup, int, tuple[int, int] | None]
UnfinishedLaunches = Mapping[int, list[tuple[ProcessGroup, OperationLaunch, tuple[int, ...]]]]


def build_wait_graph(standings: RecordedJob) -> WaitGraph:
    """A rank that is behind its peers by a few operations may only have been late to notice that they ended: where the
    waiting leads to somebody who is not in doubt without it, it is taken to wait with its peers."""
    behind = {rank: found for rank in standings.ranks if (found := _finished_by_others(standings, rank))}
    graph = _build_graph(standings, behind, {})
    late = sorted(rank for rank, found in behind.items() if len(found) <= FEW_OPERATIONS)
    excused: UnfinishedLaunches = {}
    for ranks in [[rank] for rank in late] if len(late) <= MAX_LATE_RANKS_TRIED else [late]:
        tried = {**excused, **{rank: behind[rank] for rank in ranks}}
        without = _build_graph(standings, behind, tried)
        ends = follow_waits(without, standings)
        if ends.holders.keys() - set(late) and not ends.joined and not ends.rings:
            excused, graph = tried, without
    return graph


def _build_graph(standings: RecordedJob, behind: UnfinishedLaunches, excused: UnfinishedLaunches) -> WaitGraph:
    standstills: dict[StallKey, StalledOperation] = {}
    of_rank: dict[int, StalledOperation] = {}
    held = {rank: found[0] for rank, found in behind.items() if rank not in excused}
    for rank, standing in standings.ranks.items():
        passed = [(group, launch) for group, launch, _ in excused.get(rank, ())]
        waits_in = standing.first_but(passed)
        if waits_in is not None and rank not in held:
            of_rank[rank] = _add_waiter(standstills, rank, *waits_in)
    for standstill in standstills.values():
        standstill.awaited = _awaited_ranks(standings, standstill)
    ordered = sorted(standstills.values(), key=lambda each: (each.waiters, each.group, each.slot))
    return WaitGraph(tuple(ordered), of_rank, held, frozenset(r for r in held if len(behind[r]) <= FEW_OPERATIONS))


def _add_waiter(
    standstills: dict[StallKey, StalledOperation], rank: int, group: ProcessGroup, launch: OperationLaunch
) -> StalledOperation:
    operation = launch.operation
    pair = None
    if operation.source is not None and operation.destination is not None:
        pair = (operation.source, operation.destination)
    # Send and recv of one pair meet whatever their own counts say.
    key = (group, launch.slot if pair is None else -1, pair)
    standstill = standstills.setdefault(key, StalledOperation(group, launch.slot, operation))
    standstill.waiters.append(rank)
    return standstill


def _finished_by_others(
    standings: RecordedJob, rank: int
) -> list[tuple[ProcessGroup, OperationLaunch, tuple[int, ...]]]:
    """Its open launches that another member has finished although nobody can before all came: its part was done, and
    this rank did not notice. Its board, or the thread that follows it, stopped."""
    found: list[tuple[ProcessGroup, OperationLaunch, tuple[int, ...]]] = []
    # By identity: a group of a thousand members takes long to hash, and a rank may wait in it two thousand times.
    known: dict[int, GroupState | None] = {}
    for group, launch in standings.ranks[rank].waits:
        if launch.operation.point_to_point or not synchronising(launch.operation):
            continue
        if id(group) not in known:
            known[id(group)] = _state_if_trusted(standings, group, launch)
        standing = known[id(group)]
        finished = () if standing is None else standing.finished_by(launch.slot)
        if finished and finished != (rank,):
            found.append((group, launch, tuple(member for member in finished if member != rank)))
            if len(found) > FEW_OPERATIONS:
                break
    return found


def _state_if_trusted(standings: RecordedJob, group: ProcessGroup, launch: OperationLaunch) -> GroupState | None:
    """None: operations of gloo also end where a member is gone, so that others finished one says nothing."""
    gone = launch.operation.backend == "gloo" and (group in standings.guessed or standings.absent(group))
    return None if gone else standings.groups[group]


def _awaited_ranks(standings: RecordedJob, standstill: StalledOperation) -> dict[int, str]:
    """Members that keep it from going on. Those without a record count only where nobody else explains it."""
    if standstill.operation.point_to_point:
        return _awaited_peer(standings, standstill)
    standing = standings.groups[standstill.group]
    awaited: dict[int, str] = {}
    for member in standstill.group.members:
        if member in standstill.waiters or member not in standings.ranks:
            continue
        if not standing.launched(member, standstill.slot):
            awaited[member] = NOT_LAUNCHED
        elif not standing.completed(member, standstill.slot):
            awaited[member] = IN_EARLIER_OPERATION
    return awaited or dict.fromkeys(standings.absent(standstill.group), NO_RECORD)


def _awaited_peer(standings: RecordedJob, standstill: StalledOperation) -> dict[int, str]:
    operation, members = standstill.operation, standstill.group.members
    if len(standstill.waiters) > 1:
        return {}  # sender and receiver are both in it
    places = [place for place in (operation.source, operation.destination) if place is not None]
    peers = [members[p] for p in places if p < len(members) and members[p] not in standstill.waiters]
    awaited: dict[int, str] = {}
    for peer in peers:
        if peer not in standings.ranks:
            awaited[peer] = NO_RECORD
        elif not _has_launched_pair(standings, peer, standstill):
            awaited[peer] = NOT_LAUNCHED
        elif not _is_in_reverse_transfer(standings, peer, standstill):
            awaited[peer] = IN_EARLIER_OPERATION
    return awaited


def _has_launched_pair(standings: RecordedJob, peer: int, standstill: StalledOperation) -> bool:
    pair = standstill.operation.source, standstill.operation.destination
    return any(
        group == standstill.group and (launch.operation.source, launch.operation.destination) == pair
        for group, launch in standings.ranks[peer].waits
    )


def _is_in_reverse_transfer(standings: RecordedJob, peer: int, standstill: StalledOperation) -> bool:
    """The peer is in the send or receive of the same two ranks that goes the other way. A batch launches both at once,
    each rank in an order of its own, so neither waits for the other to come."""
    primary = standings.ranks[peer].primary
    if primary is None or primary[0] != standstill.group:
        return False
    operation, other = standstill.operation, primary[1].operation
    return (other.source, other.destination) == (operation.destination, operation.source)


def follow_waits(graph: WaitGraph, standings: RecordedJob) -> WaitOutcome:
    """Where the waiting leads to. Who left no record is never a holder: a healthy rank whose record was lost looks the
    same."""
    holders: dict[int, BlockingReason] = dict.fromkeys(sorted(graph.left_behind), BlockingReason.LEFT_BEHIND)
    absent: dict[int, list[StalledOperation]] = {}
    joined: list[StalledOperation] = []
    for standstill in graph.standstills:
        if not standstill.awaited:
            joined.append(standstill)
        for rank, why in standstill.awaited.items():
            if why == NO_RECORD:
                absent.setdefault(rank, []).append(standstill)
            elif rank not in graph.of_rank:
                holders.setdefault(rank, BlockingReason.SILENT)
    unrecorded = [each for waiting in absent.values() for each in waiting]
    alone = tuple(absent) if len(absent) == 1 and all(map(_agree_on_absence, unrecorded)) else ()
    return WaitOutcome(holders, tuple(joined), _find_cycles(graph, standings), tuple(_unique(unrecorded)), alone)


def _agree_on_absence(standstill: StalledOperation) -> bool:
    """Two ranks or more wait for the one that left no record. A single one proves nothing: of a pair either may be
    the one that is wrong, and a sender or receiver may itself wait for somebody else."""
    return not standstill.operation.point_to_point and len(standstill.waiters) > 1


def _find_cycles(graph: WaitGraph, standings: RecordedJob) -> tuple[tuple[StalledOperation, ...], ...]:
    """Standstills that wait for each other, and for nobody outside, also by what else their ranks have open."""
    following = {id(each): _next_stalls(graph, each.awaited) for each in graph.standstills}
    rings = []
    for ring in strongly_connected_components(graph.standstills, following):
        if len(ring) < 2 or any(each.group in standings.uncertain for each in ring):
            continue
        inside = {rank for each in ring for rank in each.waiters}
        if all(set(each.awaited) <= inside for each in ring) and not _waits_outside(standings, inside):
            rings.append(tuple(ring))
    return tuple(rings)


def _unique(standstills: Iterable[StalledOperation]) -> list[StalledOperation]:
    return list({id(each): each for each in standstills}.values())


def _next_stalls(graph: WaitGraph, awaited: Iterable[int]) -> list[StalledOperation]:
    return _unique(graph.of_rank[rank] for rank in awaited if rank in graph.of_rank)


def _waits_outside(standings: RecordedJob, inside: set[int]) -> bool:
    """Whether ranks of a ring also wait for somebody outside of it: a receive that was only posted early is no wait."""
    for rank in inside:
        for group, launch in standings.ranks[rank].waits:
            posted = StalledOperation(group, launch.slot, launch.operation, [rank])
            if set(_awaited_ranks(standings, posted)) - inside:
                return True
    return False


def strongly_connected_components(
    nodes: tuple[StalledOperation, ...], following: Mapping[int, list[StalledOperation]]
) -> list[list[StalledOperation]]:
    """Strongly connected components (Tarjan 1972), without recursion: chains may be as long as there are ranks."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[StalledOperation] = []
    on_stack: set[int] = set()
    found: list[list[StalledOperation]] = []
    for root in nodes:
        if id(root) in index:
            continue
        work: list[tuple[StalledOperation, int]] = [(root, 0)]
        while work:
            node, place = work.pop()
            key = id(node)
            if key not in index:
                index[key] = low[key] = len(index)
                stack.append(node)
                on_stack.add(key)
            for offset, child in enumerate(following[key][place:], start=place):
                if id(child) not in index:
                    work += [(node, offset), (child, 0)]
                    break
                if id(child) in on_stack:
                    low[key] = min(low[key], low[id(child)])
            else:
                if low[key] == index[key]:
                    component: list[StalledOperation] = []
                    while not component or component[-1] is not node:
                        component.append(stack.pop())
                        on_stack.discard(id(component[-1]))
                    found.append(component)
    return found


# Ranks that stopped launching while all others went on, although all are stuck in the same operation.
#
# Where a board dies, its host often learns of it and launches nothing more; the hosts of its peers go on until they have
# to wait for their boards. All have then joined the operation that never ends, and only what they launched after it tells
# them apart. Peers of one program differ by an operation or so, as they stop at different lines.

MIN_OPERATIONS_BEHIND: Final = 3  # operations, in one of its groups


def _has_pending_collective(standing: GroupState) -> bool:
    """Somebody is in a collective of it: the counts of a group that only sends and receives are those of a pair."""
    return standing.counted and any(
        launch.open and not launch.operation.point_to_point
        for record in standing.records.values()
        for launch in record.launches
    )


def find_ranks_that_stopped_launching(standings: RecordedJob) -> dict[int, tuple[GroupState, int]]:
    """Rank -> the group in which it is furthest behind, and by how many operations. Only ranks that are behind the most
    of their peers in each group whose members differ, and clearly so in one."""
    behind: dict[int, list[tuple[int, GroupState]]] = defaultdict(list)
    level: set[int] = set()
    for group in sorted(standings.groups):
        standing = standings.groups[group]
        launched = {r: part.last_enqueued for r, part in standing.records.items() if part.last_enqueued is not None}
        if len(set(launched.values())) < 2 or group in standings.guessed or not _has_pending_collective(standing):
            continue
        furthest = max(launched.values())
        most = 2 * sum(count == furthest for count in launched.values()) > len(launched)
        for rank, count in launched.items():
            if count < furthest and (most or len(launched) == 2):
                behind[rank].append((furthest - count, standing))
            else:
                level.add(rank)
    clear = {
        rank: max(found, key=lambda each: (each[0], each[1].group))
        for rank, found in behind.items()
        if rank not in level and max(count for count, _ in found) >= MIN_OPERATIONS_BEHIND
    }
    return {rank: (standing, count) for rank, (count, standing) in clear.items()}
