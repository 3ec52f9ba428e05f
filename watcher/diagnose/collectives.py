"""What a set of flight records says: who holds the job up, in which collective, and how sure that is.

In order: members of a group at one slot in different collectives, or with different sizes (conclusive; the minority is
named, a tie is said as a tie); ranks that never arrived, found by walking who waits for whom to its end; groups entered
in different orders; all in the same operation, so that it is not the program. Pure: neither the order of the records
nor that of the ranks changes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict, GroupFrontier, Wait
from watcher.diagnose.disagreements import Disagreement, disagreements, sizes_differ
from watcher.diagnose.flight.record import Group, RankRecord, Unread
from watcher.diagnose.frontier import frontier
from watcher.diagnose.laggards import laggards
from watcher.diagnose.operations import operation_words
from watcher.diagnose.ring_sides import sides_of, tied_of
from watcher.diagnose.siblings import odd_among_siblings, odd_by_count
from watcher.diagnose.standing import GroupStanding, Standings, standings_of
from watcher.diagnose.standstill_words import most_waited_in, waiting_words
from watcher.diagnose.wait_graph import Ends, Hold, Standstill, WaitGraph, ends_of, wait_graph
from watcher.diagnose.words import ranks_in_words

# How sure each finding is. Stated, not measured: public records with a known culprit are too few to count on.
SURE_DISAGREEMENT: Final = 0.97
SURE_RING: Final = 0.8
SURE_VOTED: Final = 0.7
SURE_JOINED: Final = 0.75
SURE_SILENT: Final = 0.9
SURE_LEFT_BEHIND: Final = 0.85
SURE_DOUBTED: Final = 0.55  # it may be in a send that is not written down, or have noticed late, or most are silent
SURE_STOPPED: Final = 0.7
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
    overflown = [rank for rank in standings.ranks if standings.ranks[rank].overflown]
    if overflown and not ends.holders and (ends.rings or not ends.unrecorded):
        return _overflown(overflown, standings, graph)
    if ends.rings and not ends.holders:
        return _ring(ends.rings[0], standings, graph)
    if ends.holders:
        paired = [rank for rank, hold in ends.holders.items() if _may_be_paired(rank, hold, standings)]
        if len(paired) > 1 or (paired and standings.unrecorded):
            return _silent_or_paired(paired, standings, graph)
        return _never_arrived(ends, standings, graph)
    if ends.unrecorded:
        return _no_records(ends, standings, graph)
    stopped = laggards(standings)
    if ends.joined and stopped and 2 * len(stopped) < len(standings.ranks):
        return _stopped_launching(stopped, standings, graph)
    return _joined(ends, standings, graph) if ends.joined else _no_end(standings, graph)


def _overflown(ranks: Sequence[int], standings: Standings, graph: WaitGraph) -> CollectiveReading:
    where = waiting_words(most_waited_in(graph.standstills))
    why = f"{ranks_in_words(ranks)} launched more than the record holds, so what they wait in is not in it"
    return _unknown(f"{where}; {why} (TORCH_FR_BUFFER_SIZE sets how much)", standings, graph)


def _may_be_paired(rank: int, hold: Hold, standings: Standings) -> bool:
    return hold is Hold.SILENT and rank in standings.unseen_pairs


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
    sides = sides_of(ring)
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
        tied=() if culprits else tied_of(sides, common),
    )


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
        min(_sure_of(rank, hold, standings, graph) for rank, hold in ends.holders.items()),
        why,
        standings,
        graph,
        places,
    )


def _sure_of(rank: int, hold: Hold, standings: Standings, graph: WaitGraph) -> float:
    if rank in graph.by_a_few or _may_be_paired(rank, hold, standings):
        return SURE_DOUBTED
    if hold is Hold.LEFT_BEHIND:
        return SURE_LEFT_BEHIND
    missing = [each for each in graph.standstills if rank in each.awaited]
    # A member that is gone ends the operations of others in gloo, and they may have given up for that.
    gone = any(each.operation.backend == "gloo" and standings.absent(each.group) for each in missing)
    return SURE_DOUBTED if gone or all(len(each.waiters) < len(each.awaited) for each in missing) else SURE_SILENT


def _silent_or_paired(paired: Sequence[int], standings: Standings, graph: WaitGraph) -> CollectiveReading:
    """gloo writes no sends and receives down: of ranks that seem to wait in nothing, some may wait for the others."""
    place = most_waited_in(graph.standstills)
    why = (
        f"{waiting_words(place)}; nothing on record shows {ranks_in_words(paired)} waiting, but their recorder leaves "
        "out sends and receives, so it does not tell who holds up whom"
    )
    return _unknown(why, standings, graph)


def _no_end(standings: Standings, graph: WaitGraph) -> CollectiveReading:
    places = sorted(graph.standstills, key=lambda each: (-len(each.waiters), each.group, each.slot))
    words = "; ".join(waiting_words(each) for each in places[:3])
    words += f"; and {len(places) - 3} more such places" if len(places) > 3 else ""
    words += f"; {ranks_in_words(standings.unrecorded)} left no record" if standings.unrecorded else ""
    return _unknown(f"all wait for one another, and the records do not tell who began: {words}", standings, graph)


def _stopped_launching(
    stopped: Mapping[int, tuple[GroupStanding, int]], standings: Standings, graph: WaitGraph
) -> CollectiveReading:
    words, places = [], []
    for rank, (standing, count) in sorted(stopped.items()):
        last = standing.records[rank].last_enqueued or 0
        words.append(
            f"rank {rank} launched nothing after slot {last:,} of {standing.group}, its peers {count} operations more"
        )
        places.append((standing.group, last + 1))
    why = f"{waiting_words(most_waited_in(graph.standstills))}, which all have joined; {'; '.join(words[:4])}"
    why += f"; and {len(words) - 4} more ranks" if len(words) > 4 else ""
    culprits = tuple(sorted(stopped))
    return _reading(DiagnosisVerdict.NEVER_ARRIVED, False, culprits, SURE_STOPPED, why, standings, graph, places)


def _hold_words(rank: int, hold: Hold, graph: WaitGraph) -> tuple[str, Group, int]:
    """The sentence of one rank, with the group and slot at which it is missed."""
    if hold is Hold.LEFT_BEHIND:
        group, launch, ahead = graph.left_behind[rank]
        what = f"{operation_words(launch.operation)} at slot {launch.slot:,} of {group}"
        late = " (by so little that its record may only be late)" if rank in graph.by_a_few else ""
        return f"rank {rank} did not finish {what}, which {ranks_in_words(ahead)} finished{late}", group, launch.slot
    missing = [each for each in graph.standstills if rank in each.awaited]
    # Where most wait is where it is missed most plainly.
    place = most_waited_in(missing)
    told = f"{waiting_words(place)}; rank {rank} has not launched it and waits in nothing"
    return told, place.group, place.slot


def _no_records(ends: Ends, standings: Standings, graph: WaitGraph) -> CollectiveReading:
    place = most_waited_in(ends.unrecorded)
    who = "it may hold" if len(place.awaited) == 1 else "any of them may hold"
    why = f"{waiting_words(place)}; {ranks_in_words(place.awaited)} left no record, so {who} the others up"
    frontiers = [(place.group, place.slot)]
    reading = _reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, standings, graph, frontiers)
    return replace(reading, absent=ends.awaited_absent)


def _joined(ends: Ends, standings: Standings, graph: WaitGraph) -> CollectiveReading:
    place = most_waited_in(ends.joined)
    rest = set(standings.groups[place.group].records) - set(place.waiters)
    if rest and not place.operation.point_to_point:
        why = f"{waiting_words(place)}, which {ranks_in_words(rest)} finished or gave up"
        return _unknown(why, standings, graph)
    if place.group in standings.guessed and len(place.waiters) == 1:
        why = f"{waiting_words(place)}, and no record tells who else is in it"
        return _unknown(why, standings, graph)
    what = f"{operation_words(place.operation, sizes=True)} at slot {place.slot:,} of {place.group}"
    more = f" ({len(ends.joined) - 1} more such groups)" if len(ends.joined) > 1 else ""
    why = f"all {len(place.waiters)} members wait in the same {what}{more}"
    uneven = sizes_differ(standings.groups[place.group], place.slot)
    agreed = "the sizes differ, which is right only if they match in pairs" if uneven else "the program agrees"
    so = f"so the network, a board or its driver holds it up{', or those sizes' if uneven else ''}"
    return _reading(
        DiagnosisVerdict.NO_DESYNC,
        False,
        (),
        SURE_TIED if uneven else SURE_JOINED,
        f"{why}: {agreed}, {so}",
        standings,
        graph,
        [(each.group, each.slot) for each in ends.joined],
    )


def _nobody_waits(standings: Standings, graph: WaitGraph, unread: Sequence[Unread]) -> CollectiveReading:
    launches = sum(len(part.launches) for group in standings.groups.values() for part in group.records.values())
    if not launches:
        why = (
            "the records hold no launches: the recorder is off (TORCH_FR_BUFFER_SIZE=2000 turns it on), or there were "
            "none but sends and receives of gloo, which it leaves out"
        )
        return _unknown(why + _unread_words(unread), standings, graph)
    gone = standings.unrecorded
    if gone:
        why = f"no rank of {len(standings.ranks)} with a record waits in a collective; {ranks_in_words(gone)} left none"
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
