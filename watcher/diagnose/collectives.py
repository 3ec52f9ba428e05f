"""What a set of flight records says: who holds the job up, in which collective, and how sure that is.

In order: members of a group at one slot in different collectives, or with different sizes (conclusive; the minority is
named, a tie is said as a tie); ranks that never arrived, found by walking who waits for whom to its end; groups entered
in different orders; all in the same operation, so that it is not the program. Pure: neither the order of the records
nor that of the ranks changes the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict, GroupFrontier, Wait
from watcher.diagnose.disagreements import Disagreement, disagreements
from watcher.diagnose.flight.record import Group, RankRecord, Unread
from watcher.diagnose.frontier import frontier
from watcher.diagnose.operations import operation_words
from watcher.diagnose.siblings import odd_among_siblings, odd_by_count
from watcher.diagnose.standing import Standings, standings_of
from watcher.diagnose.wait_graph import Ends, Hold, Standstill, WaitGraph, ends_of, wait_graph
from watcher.diagnose.words import ranks_in_words

# How sure each finding is. Stated, not measured: public records with a known culprit are too few to count on.
SURE_DISAGREEMENT: Final = 0.97
SURE_RING: Final = 0.8
SURE_VOTED: Final = 0.7
SURE_JOINED: Final = 0.75
SURE_OF_HOLD: Final = {Hold.SILENT: 0.9, Hold.LEFT_BEHIND: 0.85, Hold.ABSENT: 0.55}
SURE_TIED: Final = 0.5
AS_MANY: Final = "as many on each side, so the records do not tell which one is wrong"
AS_THE_LIKE_GROUPS: Final = "the other groups of this kind tell who is wrong"
AS_THE_LIKE_RANKS: Final = "what the others launched before tells who is wrong"
MOST_FRONTIERS: Final = 16
MOST_WAITS: Final = 4096


def read_collectives(records: Sequence[RankRecord], unread: Sequence[Unread] = ()) -> CollectiveReading:
    """`records`: one a rank. `unread`: only named in the words."""
    standings = standings_of(records)
    graph = wait_graph(standings)
    if not standings.ranks:
        return _unknown("no flight record could be read" + _unread_words(unread), standings, graph)
    if not graph.standstills and not graph.left_behind:
        return _nobody_waits(standings, graph, unread)
    parted = disagreements(standings)
    if parted:
        return _disagreement(parted, standings, graph)
    ends = ends_of(graph, standings)
    if ends.rings and not _seen(ends):
        return _ring(ends.rings[0], standings, graph)
    if ends.holders:
        return _never_arrived(ends, standings, graph)
    if ends.unrecorded:
        return _no_records(ends, standings, graph)
    return _joined(ends, standings, graph)


def _seen(ends: Ends) -> bool:
    return any(hold is not Hold.ABSENT for hold in ends.holders.values())


def _disagreement(parted: list[Disagreement], standings: Standings, graph: WaitGraph) -> CollectiveReading:
    decided = [each for each in parted if each.odd]
    culprits = tuple(sorted({rank for each in decided for rank in each.odd}))
    shown = (decided or parted)[0]
    sizes = not shown.kinds
    sides = [f"{ranks_in_words(ranks)} in {operation_words(operation, sizes)}" for operation, ranks in shown.parties]
    why = f"slot {shown.slot:,} of {shown.group}: {', '.join(sides[:4])}"
    if len(sides) > 4:
        why += f" and {len(sides) - 4} more"
    sure = SURE_DISAGREEMENT
    if not culprits:
        culprits = odd_among_siblings(shown, standings)
        sure = SURE_VOTED if culprits else SURE_DISAGREEMENT
        why += f"; {AS_THE_LIKE_GROUPS if culprits else AS_MANY}"
    return _reading(
        DiagnosisVerdict.MISMATCH if sizes else DiagnosisVerdict.DESYNC,
        True,
        culprits,
        sure,
        why,
        standings,
        graph,
        [(each.group, each.slot) for each in parted],
        tied=() if culprits else tuple(ranks for _, ranks in shown.parties),
    )


def _ring(ring: tuple[Standstill, ...], standings: Standings, graph: WaitGraph) -> CollectiveReading:
    """Groups entered in different orders. Only where all of them have the same members can their number decide."""
    sides = _sides(ring)
    common = set.intersection(*(set(each.group.members) for each in ring))
    voters = sum(len(ranks) for _, ranks in sides)
    culprits: tuple[int, ...] = ()
    if all(set(each.group.members) == common for each in ring) and 2 * len(sides[0][1]) > voters:
        culprits = tuple(sorted(rank for _, ranks in sides[1:] for rank in ranks))
    words = [
        f"{ranks_in_words(ranks)} in {operation_words(each.operation)} at slot {each.slot:,} of {each.group}"
        for each, ranks in sides[:4]
    ]
    why = f"each waits for the other: {', '.join(words)}"
    sure = SURE_RING
    if not culprits:
        culprits = odd_by_count(ring, common, standings)
        sure = SURE_VOTED if culprits else SURE_RING
        why += f"; {AS_THE_LIKE_RANKS if culprits else AS_MANY}"
    return _reading(
        DiagnosisVerdict.DESYNC,
        not any(each.group in standings.guessed for each in ring),
        culprits,
        sure,
        why,
        standings,
        graph,
        [(each.group, each.slot) for each in ring],
        tied=() if culprits else _tied(sides, common),
    )


def _sides(ring: tuple[Standstill, ...]) -> list[tuple[Standstill, tuple[int, ...]]]:
    """Ranks in the like operation of the like group are one side; the largest first, with one standstill of each."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    shown: dict[tuple[str, str], Standstill] = {}
    for standstill in ring:
        side = (_kind_of(standstill.group, ring), standstill.operation.name)
        ranks[side] += standstill.waiters
        shown.setdefault(side, standstill)
    sides = [(shown[side], tuple(sorted(ranks[side]))) for side in ranks]
    return sorted(sides, key=lambda side: (-len(side[1]), side[1]))


def _kind_of(group: Group, ring: tuple[Standstill, ...]) -> str:
    """Groups of one description are alike where they share no member; else each is a kind of its own."""
    alike = [each.group for each in ring if each.group != group and str(each.group) == str(group)]
    return f"{group} {group.name}" if any(set(each.members) & set(group.members) for each in alike) else str(group)


def _tied(sides: list[tuple[Standstill, tuple[int, ...]]], common: set[int]) -> tuple[tuple[int, ...], ...]:
    """Those who are in all of the groups disagree; where there is no such rank on two sides, it may be anybody."""
    inside = [both for _, ranks in sides if (both := tuple(rank for rank in ranks if rank in common))]
    return tuple(inside) if len(inside) > 1 else tuple(ranks for _, ranks in sides)


def _never_arrived(ends: Ends, standings: Standings, graph: WaitGraph) -> CollectiveReading:
    culprits = tuple(sorted(ends.holders))
    words, places = [], []
    for rank in culprits:
        told, group, slot = _hold_words(rank, ends.holders[rank], graph)
        words.append(told)
        places.append((group, slot))
    why = "; ".join(words[:4]) + (f"; and {len(words) - 4} more ranks" if len(words) > 4 else "")
    unrecorded = sorted({rank for each in ends.unrecorded for rank in each.awaited} - set(culprits))
    if unrecorded:
        why += f"; {ranks_in_words(unrecorded)} left no record and may hold others up too"
    return _reading(
        DiagnosisVerdict.NEVER_ARRIVED,
        False,
        culprits,
        min(SURE_OF_HOLD[hold] for hold in ends.holders.values()),
        why,
        standings,
        graph,
        places,
    )


def _hold_words(rank: int, hold: Hold, graph: WaitGraph) -> tuple[str, Group, int]:
    """The sentence of one rank, with the group and slot at which it is missed."""
    if hold is Hold.LEFT_BEHIND:
        group, launch, ahead = graph.left_behind[rank]
        what = f"{operation_words(launch.operation)} at slot {launch.slot:,} of {group}"
        return f"rank {rank} did not finish {what}, which {ranks_in_words(ahead)} finished", group, launch.slot
    missing = [each for each in graph.standstills if rank in each.awaited]
    # Where most wait is where it is missed most plainly.
    place = min(missing, key=lambda each: (-len(each.waiters), each.group, each.slot))
    what = f"{operation_words(place.operation)} at slot {place.slot:,} of {place.group}"
    waiters = f"{ranks_in_words(place.waiters)} {'waits' if len(place.waiters) == 1 else 'wait'} in {what}"
    if hold is Hold.ABSENT:
        return f"{waiters}, and only rank {rank} is missing there: it left no record", place.group, place.slot
    return f"{waiters}; rank {rank} has not launched it and waits in nothing", place.group, place.slot


def _no_records(ends: Ends, standings: Standings, graph: WaitGraph) -> CollectiveReading:
    place = min(ends.unrecorded, key=lambda each: (-len(each.waiters), each.group, each.slot))
    why = (
        f"{ranks_in_words(place.waiters)} {'waits' if len(place.waiters) == 1 else 'wait'} in "
        f"{operation_words(place.operation)} at slot {place.slot:,} of {place.group}; {ranks_in_words(place.awaited)} "
        "left no record, so any of them may hold the others up"
    )
    frontiers = [(place.group, place.slot)]
    return _reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, standings, graph, frontiers)


def _joined(ends: Ends, standings: Standings, graph: WaitGraph) -> CollectiveReading:
    place = min(ends.joined, key=lambda each: (-len(each.waiters), each.group, each.slot))
    what = f"{operation_words(place.operation, sizes=True)} at slot {place.slot:,} of {place.group}"
    others = len(ends.joined) - 1
    why = f"all {len(place.waiters)} members wait in the same {what}"
    why += f" ({others} more such groups)" if others else ""
    return _reading(
        DiagnosisVerdict.NO_DESYNC,
        False,
        (),
        SURE_JOINED,
        f"{why}: the program agrees, so the network, a board or its driver holds it up",
        standings,
        graph,
        [(each.group, each.slot) for each in ends.joined],
    )


def _nobody_waits(standings: Standings, graph: WaitGraph, unread: Sequence[Unread]) -> CollectiveReading:
    launches = sum(len(part.launches) for group in standings.groups.values() for part in group.records.values())
    if not launches:
        why = "the records hold no launches: the recorder is off (TORCH_FR_BUFFER_SIZE=2000 turns it on)"
        return _unknown(why + _unread_words(unread), standings, graph)
    why = f"no rank of {len(standings.ranks)} waits in a collective: every launch on record is finished"
    return _reading(DiagnosisVerdict.NO_DESYNC, False, (), SURE_TIED, why, standings, graph, [])


def _unknown(why: str, standings: Standings, graph: WaitGraph) -> CollectiveReading:
    return _reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, standings, graph, [])


def _unread_words(unread: Sequence[Unread]) -> str:
    if not unread:
        return ""
    return f"; {len(unread)} could not be used, the first: {unread[0].source}: {unread[0].why}"


def _reading(
    verdict: DiagnosisVerdict,
    conclusive: bool,
    culprits: tuple[int, ...],
    confidence: float,
    why: str,
    standings: Standings,
    graph: WaitGraph,
    places: Sequence[tuple[Group, int]],
    tied: tuple[tuple[int, ...], ...] = (),
) -> CollectiveReading:
    unique = list(dict.fromkeys([*places, *((each.group, each.slot) for each in graph.standstills)]))
    frontiers: list[GroupFrontier] = [frontier(standings, group, slot) for group, slot in unique[:MOST_FRONTIERS]]
    return CollectiveReading(
        verdict,
        conclusive,
        culprits,
        tied,
        confidence,
        why,
        tuple(frontiers),
        _waits(graph),
        tuple(standings.ranks[rank].source for rank in sorted(standings.ranks)),
    )


def _waits(graph: WaitGraph) -> tuple[Wait, ...]:
    waits = (
        Wait(rank, awaited, each.group, each.slot, each.operation, why)
        for each in graph.standstills
        for rank in each.waiters
        for awaited, why in each.awaited.items()
    )
    return tuple(wait for wait, _ in zip(waits, range(MOST_WAITS), strict=False))
