"""Who cannot go on before whom: the walk from the ranks that wait to those that hold everybody up.

Each rank waits in its first open operation; whoever has not launched it, or is still in an earlier one, is awaited.
Ranks in the same slot form one standstill, so the graph has as many nodes as there are groups stuck, not ranks squared.
It ends in a rank that waits in nothing (silent), a rank that did not finish what its peers finished (left behind), a
rank without a record (which says nothing of it: its record may only be lost), a standstill that everybody has joined
(so it is not the program), or a ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from watcher.diagnose.collectives.operations import synchronising
from watcher.diagnose.collectives.standing import GroupStanding, Standings
from watcher.diagnose.flight.record import Group, Launch, Operation


class Hold(StrEnum):
    """Why a rank holds the others up."""

    SILENT = "silent"
    LEFT_BEHIND = "left_behind"


NOT_LAUNCHED = "has not launched it"
EARLIER = "is still in an earlier operation"
NO_RECORD = "left no record"
MOST_TRIED: Final = 8  # late ranks that are looked at one by one
A_FEW: Final = 2  # operations that a record may be late with: completions are looked for now and then, not at once


@dataclass(slots=True)
class Standstill:
    """One slot of one group (or one pair's send and recv) in which ranks wait, and for whom."""

    group: Group
    slot: int
    operation: Operation
    waiters: list[int] = field(default_factory=list)
    awaited: Mapping[int, str] = field(default_factory=dict)  # rank -> why


@dataclass(frozen=True, slots=True)
class WaitGraph:
    standstills: tuple[Standstill, ...]
    of_rank: Mapping[int, Standstill]
    left_behind: Mapping[int, tuple[Group, Launch, tuple[int, ...]]]  # rank -> its launch, and who finished it
    by_a_few: frozenset[int] = frozenset()  # of those, who may only have noticed late


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the waiting leads to."""

    holders: Mapping[int, Hold]
    joined: tuple[Standstill, ...]  # everybody is in it
    rings: tuple[tuple[Standstill, ...], ...]  # each waits for one that waits for it
    unrecorded: tuple[Standstill, ...]  # nobody with a record explains these: members left none
    awaited_absent: tuple[int, ...]  # the one without a record for whom all of these wait


Key = tuple[Group, int, tuple[int, int] | None]
Behind = Mapping[int, list[tuple[Group, Launch, tuple[int, ...]]]]


def wait_graph(standings: Standings) -> WaitGraph:
    """A rank that is behind its peers by a few operations may only have been late to notice that they ended: where the
    waiting leads to somebody who is not in doubt without it, it is taken to wait with its peers."""
    behind = {rank: found for rank in standings.ranks if (found := _left_behind(standings, rank))}
    graph = _graph(standings, behind, {})
    late = sorted(rank for rank, found in behind.items() if len(found) <= A_FEW)
    excused: Behind = {}
    for ranks in [[rank] for rank in late] if len(late) <= MOST_TRIED else [late]:
        tried = {**excused, **{rank: behind[rank] for rank in ranks}}
        without = _graph(standings, behind, tried)
        ends = ends_of(without, standings)
        if ends.holders.keys() - set(late) and not ends.joined and not ends.rings:
            excused, graph = tried, without
    return graph


def _graph(standings: Standings, behind: Behind, excused: Behind) -> WaitGraph:
    standstills: dict[Key, Standstill] = {}
    of_rank: dict[int, Standstill] = {}
    held = {rank: found[0] for rank, found in behind.items() if rank not in excused}
    for rank, standing in standings.ranks.items():
        passed = [(group, launch) for group, launch, _ in excused.get(rank, ())]
        waits_in = standing.first_but(passed)
        if waits_in is not None and rank not in held:
            of_rank[rank] = _join(standstills, rank, *waits_in)
    for standstill in standstills.values():
        standstill.awaited = _awaited(standings, standstill)
    ordered = sorted(standstills.values(), key=lambda each: (each.waiters, each.group, each.slot))
    return WaitGraph(tuple(ordered), of_rank, held, frozenset(r for r in held if len(behind[r]) <= A_FEW))


def _join(standstills: dict[Key, Standstill], rank: int, group: Group, launch: Launch) -> Standstill:
    operation = launch.operation
    pair = None
    if operation.source is not None and operation.destination is not None:
        pair = (operation.source, operation.destination)
    # Send and recv of one pair meet whatever their own counts say.
    key = (group, launch.slot if pair is None else -1, pair)
    standstill = standstills.setdefault(key, Standstill(group, launch.slot, operation))
    standstill.waiters.append(rank)
    return standstill


def _left_behind(standings: Standings, rank: int) -> list[tuple[Group, Launch, tuple[int, ...]]]:
    """Its open launches that another member has finished although nobody can before all came: its part was done, and
    this rank did not notice. Its board, or the thread that follows it, stopped."""
    found: list[tuple[Group, Launch, tuple[int, ...]]] = []
    # By identity: a group of a thousand members takes long to hash, and a rank may wait in it two thousand times.
    known: dict[int, GroupStanding | None] = {}
    for group, launch in standings.ranks[rank].waits:
        if launch.operation.point_to_point or not synchronising(launch.operation):
            continue
        if id(group) not in known:
            known[id(group)] = _followed(standings, group, launch)
        standing = known[id(group)]
        finished = () if standing is None else standing.finished_by(launch.slot)
        if finished and finished != (rank,):
            found.append((group, launch, tuple(member for member in finished if member != rank)))
            if len(found) > A_FEW:
                break
    return found


def _followed(standings: Standings, group: Group, launch: Launch) -> GroupStanding | None:
    """None: operations of gloo also end where a member is gone, so that others finished one says nothing."""
    gone = launch.operation.backend == "gloo" and (group in standings.guessed or standings.absent(group))
    return None if gone else standings.groups[group]


def _awaited(standings: Standings, standstill: Standstill) -> dict[int, str]:
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
            awaited[member] = EARLIER
    return awaited or dict.fromkeys(standings.absent(standstill.group), NO_RECORD)


def _awaited_peer(standings: Standings, standstill: Standstill) -> dict[int, str]:
    operation, members = standstill.operation, standstill.group.members
    if len(standstill.waiters) > 1:
        return {}  # sender and receiver are both in it
    places = [place for place in (operation.source, operation.destination) if place is not None]
    peers = [members[p] for p in places if p < len(members) and members[p] not in standstill.waiters]
    awaited: dict[int, str] = {}
    for peer in peers:
        if peer not in standings.ranks:
            awaited[peer] = NO_RECORD
        elif not _has(standings, peer, standstill):
            awaited[peer] = NOT_LAUNCHED
        elif not _exchanges(standings, peer, standstill):
            awaited[peer] = EARLIER
    return awaited


def _has(standings: Standings, peer: int, standstill: Standstill) -> bool:
    pair = standstill.operation.source, standstill.operation.destination
    return any(
        group == standstill.group and (launch.operation.source, launch.operation.destination) == pair
        for group, launch in standings.ranks[peer].waits
    )


def _exchanges(standings: Standings, peer: int, standstill: Standstill) -> bool:
    """The peer is in the send or receive of the same two ranks that goes the other way. A batch launches both at once,
    each rank in an order of its own, so neither waits for the other to come."""
    primary = standings.ranks[peer].primary
    if primary is None or primary[0] != standstill.group:
        return False
    operation, other = standstill.operation, primary[1].operation
    return (other.source, other.destination) == (operation.destination, operation.source)


def ends_of(graph: WaitGraph, standings: Standings) -> Ends:
    """Where the waiting leads to. Who left no record is never a holder: a healthy rank whose record was lost looks the
    same."""
    holders: dict[int, Hold] = dict.fromkeys(sorted(graph.left_behind), Hold.LEFT_BEHIND)
    absent: dict[int, list[Standstill]] = {}
    joined: list[Standstill] = []
    for standstill in graph.standstills:
        if not standstill.awaited:
            joined.append(standstill)
        for rank, why in standstill.awaited.items():
            if why == NO_RECORD:
                absent.setdefault(rank, []).append(standstill)
            elif rank not in graph.of_rank:
                holders.setdefault(rank, Hold.SILENT)
    unrecorded = [each for waiting in absent.values() for each in waiting]
    alone = tuple(absent) if len(absent) == 1 and all(map(_agree_on_absence, unrecorded)) else ()
    return Ends(holders, tuple(joined), _rings(graph, standings), tuple(_unique(unrecorded)), alone)


def _agree_on_absence(standstill: Standstill) -> bool:
    """Two ranks or more wait for the one that left no record. A single one proves nothing: of a pair either may be
    the one that is wrong, and a sender or receiver may itself wait for somebody else."""
    return not standstill.operation.point_to_point and len(standstill.waiters) > 1


def _rings(graph: WaitGraph, standings: Standings) -> tuple[tuple[Standstill, ...], ...]:
    """Standstills that wait for each other, and for nobody outside, also by what else their ranks have open."""
    following = {id(each): _next(graph, each.awaited) for each in graph.standstills}
    rings = []
    for ring in components(graph.standstills, following):
        if len(ring) < 2 or any(each.group in standings.uncertain for each in ring):
            continue
        inside = {rank for each in ring for rank in each.waiters}
        if all(set(each.awaited) <= inside for each in ring) and not _other_ways_out(standings, inside):
            rings.append(tuple(ring))
    return tuple(rings)


def _unique(standstills: Iterable[Standstill]) -> list[Standstill]:
    return list({id(each): each for each in standstills}.values())


def _next(graph: WaitGraph, awaited: Iterable[int]) -> list[Standstill]:
    return _unique(graph.of_rank[rank] for rank in awaited if rank in graph.of_rank)


def _other_ways_out(standings: Standings, inside: set[int]) -> bool:
    """Whether ranks of a ring also wait for somebody outside of it: a receive that was only posted early is no wait."""
    for rank in inside:
        for group, launch in standings.ranks[rank].waits:
            posted = Standstill(group, launch.slot, launch.operation, [rank])
            if set(_awaited(standings, posted)) - inside:
                return True
    return False


def components(nodes: tuple[Standstill, ...], following: Mapping[int, list[Standstill]]) -> list[list[Standstill]]:
    """Strongly connected components (Tarjan 1972), without recursion: chains may be as long as there are ranks."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[Standstill] = []
    on_stack: set[int] = set()
    found: list[list[Standstill]] = []
    for root in nodes:
        if id(root) in index:
            continue
        work: list[tuple[Standstill, int]] = [(root, 0)]
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
                    component: list[Standstill] = []
                    while not component or component[-1] is not node:
                        component.append(stack.pop())
                        on_stack.discard(id(component[-1]))
                    found.append(component)
    return found
