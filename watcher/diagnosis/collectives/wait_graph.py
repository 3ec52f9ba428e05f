"""Which rank waits for which: the walk from the ranks that wait to the ranks that block them.

Each rank waits in its first pending operation. A member that has not launched this operation, or is still in an earlier
one, is awaited. All ranks at the same slot form one node (a stalled operation), so the graph has as many nodes as there
are stalled groups, not as many edges as ranks squared. Following the waits ends in one of these:

- a rank that waits in nothing (silent): it is in its own code, stopped, or looping
- a rank that did not finish what its peers finished
- a rank without a record; that alone proves nothing, as the record may merely be lost
- an operation that all members have joined: not a fault of the program
- a cycle of operations
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from wattwatch.watcher.diagnosis.collectives.operations import is_synchronizing
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, RecordedJob
from wattwatch.watcher.diagnosis.flight_recorder.model import Operation, OperationLaunch, ProcessGroup

# Why a rank is awaited, for people.
NOT_LAUNCHED: Final = "has not launched it"
IN_EARLIER_OPERATION: Final = "is still in an earlier operation"
NO_RECORD: Final = "left no flight record"

MAX_LATE_RANKS_TRIED: Final = 8  # late ranks that are examined one by one; chosen, each costs a new graph
# A record may lag by this many operations: completions are polled now and then, not noticed at once. Chosen.
FEW_OPERATIONS: Final = 2
# A rank that stopped launching is behind by at least this many operations in one of its groups. Healthy peers differ by
# an operation or so, as they stop at different lines of the program. Chosen.
MIN_OPERATIONS_BEHIND: Final = 3


class BlockingReason(StrEnum):
    """Why a rank blocks the others."""

    SILENT = "silent"
    UNFINISHED = "unfinished"


@dataclass(slots=True)
class StalledOperation:
    """One slot of one group, or one pair's send and receive, in which ranks wait."""

    group: ProcessGroup
    slot: int
    operation: Operation
    waiters: list[int] = field(default_factory=list)
    awaited: Mapping[int, str] = field(default_factory=dict)  # rank -> why it is awaited


class UnfinishedLaunch(NamedTuple):
    """A rank's pending launch of an operation that other members have finished."""

    group: ProcessGroup
    launch: OperationLaunch
    finished_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Who waits in what. A rank of `unfinished` waits in nothing."""

    stalled: tuple[StalledOperation, ...]
    by_rank: Mapping[int, StalledOperation]  # the operation that each waiting rank is in
    unfinished: Mapping[int, UnfinishedLaunch]  # by rank: its first one
    possibly_late: frozenset[int] = frozenset()  # ranks of `unfinished` whose record may just be a little older


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    """What the waits lead to."""

    blocking: Mapping[int, BlockingReason]
    all_joined: tuple[StalledOperation, ...]  # every member is in it
    cycles: tuple[tuple[StalledOperation, ...], ...]  # these wait for each other, and for nothing else
    unexplained: tuple[StalledOperation, ...]  # only members without a record can be awaited here
    awaited_without_record: tuple[int, ...]  # the single rank without a record that all of `unexplained` wait for


_StallKey = tuple[ProcessGroup, int, tuple[int, int] | None]
_UnfinishedByRank = Mapping[int, list[UnfinishedLaunch]]


def build_wait_graph(job: RecordedJob) -> WaitGraph:
    """The wait graph of a job.

    A rank that is only a few operations behind its peers may just have been late to notice that they finished. If the
    waits lead to a rank beyond doubt once such a rank is excused, it is taken to wait like its peers.
    """
    unfinished = {rank: found for rank in job.ranks if (found := _find_unfinished(job, rank))}
    graph = _build_graph(job, unfinished, {})
    late = sorted(rank for rank, found in unfinished.items() if len(found) <= FEW_OPERATIONS)
    excused: _UnfinishedByRank = {}
    # One at a time, so that one late record does not excuse another rank that is really stuck. With many late ranks, a
    # graph for each would take too long, and they are excused together or not at all.
    for ranks in [[rank] for rank in late] if len(late) <= MAX_LATE_RANKS_TRIED else [late]:
        tried = {**excused, **{rank: unfinished[rank] for rank in ranks}}
        without = _build_graph(job, unfinished, tried)
        outcome = follow_waits(without, job)
        # Excusing a rank must lead to a rank beyond doubt. If it only makes the hang look like a network fault or a
        # deadlock, the late rank is the better explanation.
        if outcome.blocking.keys() - set(late) and not outcome.all_joined and not outcome.cycles:
            excused, graph = tried, without
    return graph


def _build_graph(job: RecordedJob, unfinished: _UnfinishedByRank, excused: _UnfinishedByRank) -> WaitGraph:
    stalled: dict[_StallKey, StalledOperation] = {}
    by_rank: dict[int, StalledOperation] = {}
    first_unfinished = {rank: found[0] for rank, found in unfinished.items() if rank not in excused}
    for rank, state in job.ranks.items():
        ignored = [(group, launch) for group, launch, _ in excused.get(rank, ())]
        wait = state.current_wait_except(ignored)
        if wait is not None and rank not in first_unfinished:
            by_rank[rank] = _add_waiter(stalled, rank, *wait)
    for operation in stalled.values():
        operation.awaited = _awaited_ranks(job, operation)
    # Sorted, so that the result does not depend on the order in which records were read.
    ordered = sorted(stalled.values(), key=lambda each: (each.waiters, each.group, each.slot))
    possibly_late = frozenset(rank for rank in first_unfinished if len(unfinished[rank]) <= FEW_OPERATIONS)
    return WaitGraph(tuple(ordered), by_rank, first_unfinished, possibly_late)


def _add_waiter(
    stalled: dict[_StallKey, StalledOperation], rank: int, group: ProcessGroup, launch: OperationLaunch
) -> StalledOperation:
    operation = launch.operation
    pair = None
    if operation.source is not None and operation.destination is not None:
        pair = (operation.source, operation.destination)
    # Sender and receiver count their operations independently: the pair matches them, the slot does not.
    key = (group, launch.slot if pair is None else -1, pair)
    stall = stalled.setdefault(key, StalledOperation(group, launch.slot, operation))
    stall.waiters.append(rank)
    return stall


def _find_unfinished(job: RecordedJob, rank: int) -> list[UnfinishedLaunch]:
    """The rank's pending launches that another member has finished although no member can before all have joined.

    So the rank did its part and did not notice: its GPU, or the thread that watches for completions, has stopped.
    """
    found: list[UnfinishedLaunch] = []
    # By identity: a group of a thousand members takes long to hash, and a rank may wait in it two thousand times.
    states: dict[int, GroupState | None] = {}
    for group, launch in job.ranks[rank].waits:
        if launch.operation.point_to_point or not is_synchronizing(launch.operation):
            continue
        if id(group) not in states:
            states[id(group)] = _state_if_trusted(job, group, launch)
        state = states[id(group)]
        finished_by = () if state is None else state.finished_by(launch.slot)
        if finished_by and finished_by != (rank,):
            found.append(UnfinishedLaunch(group, launch, tuple(other for other in finished_by if other != rank)))
            if len(found) > FEW_OPERATIONS:
                break  # beyond doubt already; a rank may have thousands of pending launches
    return found


def _state_if_trusted(job: RecordedJob, group: ProcessGroup, launch: OperationLaunch) -> GroupState | None:
    """None: Gloo operations also end when a member is gone, so that others ended one proves nothing."""
    member_may_be_gone = launch.operation.backend == "gloo" and (
        group in job.guessed_groups or job.members_without_record(group)
    )
    return None if member_may_be_gone else job.groups[group]


def _awaited_ranks(job: RecordedJob, stall: StalledOperation) -> dict[int, str]:
    """Members that keep the operation from finishing. Members without a record count only if no other explains it."""
    if stall.operation.point_to_point:
        return _awaited_peers(job, stall)
    state = job.groups[stall.group]
    awaited: dict[int, str] = {}
    for member in stall.group.members:
        if member in stall.waiters or member not in job.ranks:
            continue
        if not state.launched(member, stall.slot):
            awaited[member] = NOT_LAUNCHED
        elif not state.completed(member, stall.slot):
            awaited[member] = IN_EARLIER_OPERATION
    # If a rank with a record explains the wait, blaming one whose file may be lost would only add noise.
    return awaited or dict.fromkeys(job.members_without_record(stall.group), NO_RECORD)


def _awaited_peers(job: RecordedJob, stall: StalledOperation) -> dict[int, str]:
    operation, members = stall.operation, stall.group.members
    if len(stall.waiters) > 1:
        return {}  # sender and receiver are both in it
    ends = [end for end in (operation.source, operation.destination) if end is not None]
    # `end < len(members)`: the members of a Gloo group are sometimes a guess, and a hostile record may name any index.
    peers = [members[end] for end in ends if end < len(members) and members[end] not in stall.waiters]
    awaited: dict[int, str] = {}
    for peer in peers:
        if peer not in job.ranks:
            awaited[peer] = NO_RECORD
        elif not _has_launched_pair(job, peer, stall):
            awaited[peer] = NOT_LAUNCHED
        elif not _is_in_reverse_transfer(job, peer, stall):
            awaited[peer] = IN_EARLIER_OPERATION
    return awaited


def _has_launched_pair(job: RecordedJob, peer: int, stall: StalledOperation) -> bool:
    pair = stall.operation.source, stall.operation.destination
    return any(
        group == stall.group and (launch.operation.source, launch.operation.destination) == pair
        for group, launch in job.ranks[peer].waits
    )


def _is_in_reverse_transfer(job: RecordedJob, peer: int, stall: StalledOperation) -> bool:
    """The peer is in the transfer between the same two ranks that goes in the other direction.

    A batch launches both at once, on each rank in a different order, so neither rank is waiting for the other to
    arrive.
    """
    wait = job.ranks[peer].current_wait
    if wait is None or wait[0] != stall.group:
        return False
    operation, other = stall.operation, wait[1].operation
    return (other.source, other.destination) == (operation.destination, operation.source)


def follow_waits(graph: WaitGraph, job: RecordedJob) -> WaitOutcome:
    """What the waits lead to.

    A rank without a record never counts as blocking: a healthy rank whose record was lost looks the same.
    """
    blocking: dict[int, BlockingReason] = dict.fromkeys(sorted(graph.unfinished), BlockingReason.UNFINISHED)
    waits_without_record: dict[int, list[StalledOperation]] = {}
    all_joined: list[StalledOperation] = []
    for stall in graph.stalled:
        if not stall.awaited:
            all_joined.append(stall)
        for rank, why in stall.awaited.items():
            if why == NO_RECORD:
                waits_without_record.setdefault(rank, []).append(stall)
            elif rank not in graph.by_rank:
                blocking.setdefault(rank, BlockingReason.SILENT)
    unexplained = [stall for stalls in waits_without_record.values() for stall in stalls]
    only_one = len(waits_without_record) == 1 and all(map(_several_ranks_agree, unexplained))
    awaited_without_record = tuple(waits_without_record) if only_one else ()
    return WaitOutcome(
        blocking, tuple(all_joined), _find_cycles(graph, job), tuple(_unique(unexplained)), awaited_without_record
    )


def _several_ranks_agree(stall: StalledOperation) -> bool:
    """Two or more ranks wait for the one that left no record.

    A single waiter proves nothing: of a pair, either may be wrong, and a sender or receiver may itself wait for
    another.
    """
    return not stall.operation.point_to_point and len(stall.waiters) > 1


def _find_cycles(graph: WaitGraph, job: RecordedJob) -> tuple[tuple[StalledOperation, ...], ...]:
    """Stalled operations that wait for each other and for no other rank, in anything that their ranks have pending."""
    following = {id(each): _next_stalls(graph, each.awaited) for each in graph.stalled}
    cycles = []
    for component in strongly_connected_components(graph.stalled, following):
        # A group that may have more members can be waiting for one of these: no cycle is certain.
        if len(component) < 2 or any(each.group in job.possibly_larger_groups for each in component):
            continue
        inside = {rank for each in component for rank in each.waiters}
        if all(set(each.awaited) <= inside for each in component) and not _waits_outside(job, inside):
            cycles.append(tuple(component))
    return tuple(cycles)


def _unique(stalls: Iterable[StalledOperation]) -> list[StalledOperation]:
    return list({id(each): each for each in stalls}.values())


def _next_stalls(graph: WaitGraph, awaited: Iterable[int]) -> list[StalledOperation]:
    return _unique(graph.by_rank[rank] for rank in awaited if rank in graph.by_rank)


def _waits_outside(job: RecordedJob, inside: set[int]) -> bool:
    """Whether ranks of a cycle also wait for a rank outside of it: then that rank may resolve the cycle."""
    for rank in inside:
        for group, launch in job.ranks[rank].waits:
            alone = StalledOperation(group, launch.slot, launch.operation, [rank])
            if set(_awaited_ranks(job, alone)) - inside:
                return True
    return False


def strongly_connected_components(
    nodes: tuple[StalledOperation, ...], following: Mapping[int, list[StalledOperation]]
) -> list[list[StalledOperation]]:
    """Tarjan's algorithm (1972), by `id` of the node. Not recursive: a chain may be as long as there are ranks."""
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
            node, next_child = work.pop()
            key = id(node)
            if key not in index:
                index[key] = low[key] = len(index)
                stack.append(node)
                on_stack.add(key)
            for offset, child in enumerate(following[key][next_child:], start=next_child):
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


def find_ranks_that_stopped_launching(job: RecordedJob) -> dict[int, tuple[GroupState, int]]:
    """Ranks that launched nothing more while the others went on, although all are stuck in the same operation.

    When a GPU dies, its host often learns of it and stops launching; the hosts of its peers go on until they have to
    wait for their own GPUs. All ranks have then joined the operation that never ends, and only what they launched after
    it distinguishes them.

    Returns, by rank, the group in which it is furthest behind, and by how many operations. Only ranks that are behind
    most of their peers in every group whose members differ, and clearly so in one.
    """
    behind: dict[int, list[tuple[int, GroupState]]] = defaultdict(list)
    not_behind: set[int] = set()
    for group in sorted(job.groups):
        state = job.groups[group]
        launched = {rank: part.last_enqueued for rank, part in state.records.items() if part.last_enqueued is not None}
        # The counts of a group with guessed members may belong to different groups of the same name.
        if len(set(launched.values())) < 2 or group in job.guessed_groups or not _has_pending_collective(state):
            continue
        furthest = max(launched.values())
        most_are_furthest = 2 * sum(count == furthest for count in launched.values()) > len(launched)
        for rank, count in launched.items():
            if count < furthest and (most_are_furthest or len(launched) == 2):
                behind[rank].append((furthest - count, state))
            else:
                not_behind.add(rank)
    clear = {
        rank: max(found, key=lambda each: (each[0], each[1].group))
        for rank, found in behind.items()
        if rank not in not_behind and max(count for count, _ in found) >= MIN_OPERATIONS_BEHIND
    }
    return {rank: (state, count) for rank, (count, state) in clear.items()}


def _has_pending_collective(state: GroupState) -> bool:
    """Without collectives in it, the counts of a group are those of pairs and cannot be compared."""
    return state.counts_usable and any(
        launch.pending and not launch.operation.point_to_point
        for record in state.records.values()
        for launch in record.launches
    )
