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

from wattwatch.watcher.common.formatting import format_ranks
from wattwatch.watcher.diagnosis.collectives.conclusion import (
    CollectiveHang,
    describe_wait,
    sort_by_waiters,
    with_most_waiters,
)
from wattwatch.watcher.diagnosis.collectives.mismatch import (
    conclude_cycle,
    conclude_disagreement,
    find_disagreements,
    sizes_differ,
)
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, build_recorded_job
from wattwatch.watcher.diagnosis.collectives.wait_graph import (
    BlockingReason,
    WaitOutcome,
    build_wait_graph,
    find_ranks_that_stopped_launching,
    follow_waits,
)
from wattwatch.watcher.diagnosis.flight_recorder.model import ProcessGroup, RankRecord, UnreadableRecord
from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict


def analyze_collectives(records: Sequence[RankRecord], unread: Sequence[UnreadableRecord] = ()) -> CollectiveAnalysis:
    """`records`: one a rank. `unread`: only named in the words."""
    standings = build_recorded_job(records)
    case = CollectiveHang(standings, build_wait_graph(standings))
    if not standings.ranks:
        return case.unknown("no flight record could be read" + describe_unreadable(unread))
    if not case.graph.standstills and not case.graph.left_behind:
        return conclude_no_wait(case, unread)
    if parted := find_disagreements(standings):
        return conclude_disagreement(parted, case)
    return _analyze_waits(case)


def _analyze_waits(case: CollectiveHang) -> CollectiveAnalysis:
    """Nobody disagrees with a member of the same group: where the waiting leads to."""
    standings, ends = case.standings, follow_waits(case.graph, case.standings)
    overflown = [rank for rank in standings.ranks if standings.ranks[rank].overflown]
    if overflown and not ends.holders and (ends.rings or not ends.unrecorded):
        return conclude_ring_overflow(overflown, case)
    if ends.rings and not ends.holders:
        return conclude_cycle(ends.rings[0], case)
    if ends.holders:
        paired = [rank for rank, hold in ends.holders.items() if may_be_in_unrecorded_send(rank, hold, case)]
        if len(paired) > 1 or (paired and standings.unrecorded):
            return conclude_silent_or_sending(paired, case)
        return conclude_blocking_ranks(ends, case)
    if ends.unrecorded:
        return conclude_missing_records(ends, case)
    stopped = find_ranks_that_stopped_launching(standings)
    if stopped and 2 * len(stopped) < len(standings.ranks):
        return conclude_stopped_launching(stopped, case)
    return conclude_all_joined(ends, case) if ends.joined else conclude_undecided(case)


# Ranks that the others wait for: silent, left behind, no longer launching, or without a record.

MAX_RANKS_DESCRIBED: Final = 4  # ranks, each with a sentence
# How sure each is. Stated, not measured.
CONFIDENCE_SILENT: Final = 0.9
CONFIDENCE_DID_NOT_FINISH: Final = 0.85
CONFIDENCE_STOPPED_LAUNCHING: Final = 0.7
CONFIDENCE_DOUBTFUL: Final = (
    0.55  # it may be in a send that is not written down, or have noticed late, or most are silent
)


def conclude_blocking_ranks(ends: WaitOutcome, case: CollectiveHang) -> CollectiveAnalysis:
    culprits = tuple(sorted(ends.holders))
    words, places = [], []
    for rank in culprits:
        told, group, slot = _describe_blocking_rank(rank, ends.holders[rank], case)
        words.append(told)
        places.append((group, slot))
    why = _join_limited(words)
    unrecorded = sorted({rank for each in ends.unrecorded for rank in each.awaited} - set(culprits))
    if unrecorded:
        why += f"; {format_ranks(unrecorded)} left no record and may hold others up too"
    return case.reading(
        DiagnosisVerdict.NEVER_ARRIVED,
        False,
        culprits,
        min(_blocking_confidence(rank, hold, case) for rank, hold in ends.holders.items()),
        why,
        places,
    )


def _join_limited(sentences: Sequence[str]) -> str:
    """One a rank: the first of them, and how many more there are."""
    more = f"; and {len(sentences) - MAX_RANKS_DESCRIBED} more ranks" if len(sentences) > MAX_RANKS_DESCRIBED else ""
    return "; ".join(sentences[:MAX_RANKS_DESCRIBED]) + more


def _describe_blocking_rank(rank: int, hold: BlockingReason, case: CollectiveHang) -> tuple[str, ProcessGroup, int]:
    """The sentence of one rank, with the group and slot at which it is missed."""
    if hold is BlockingReason.LEFT_BEHIND:
        group, launch, ahead = case.graph.left_behind[rank]
        what = f"{describe_operation(launch.operation)} at slot {launch.slot:,} of {group}"
        late = " (by so little that its record may only be late)" if rank in case.graph.by_a_few else ""
        return f"rank {rank} did not finish {what}, which {format_ranks(ahead)} finished{late}", group, launch.slot
    missing = [each for each in case.graph.standstills if rank in each.awaited]
    # Where most wait is where it is missed most plainly.
    place = with_most_waiters(missing)
    told = f"{describe_wait(place)}; rank {rank} has not launched it and waits in nothing"
    return told, place.group, place.slot


def _blocking_confidence(rank: int, hold: BlockingReason, case: CollectiveHang) -> float:
    if rank in case.graph.by_a_few or may_be_in_unrecorded_send(rank, hold, case):
        return CONFIDENCE_DOUBTFUL
    if hold is BlockingReason.LEFT_BEHIND:
        return CONFIDENCE_DID_NOT_FINISH
    missing = [each for each in case.graph.standstills if rank in each.awaited]
    # A member that is gone ends the operations of others in gloo, and they may have given up for that.
    gone = any(each.operation.backend == "gloo" and case.standings.absent(each.group) for each in missing)
    return (
        CONFIDENCE_DOUBTFUL
        if gone or all(len(each.waiters) < len(each.awaited) for each in missing)
        else CONFIDENCE_SILENT
    )


def may_be_in_unrecorded_send(rank: int, hold: BlockingReason, case: CollectiveHang) -> bool:
    return hold is BlockingReason.SILENT and rank in case.standings.unrecorded_point_to_point


def conclude_silent_or_sending(paired: Sequence[int], case: CollectiveHang) -> CollectiveAnalysis:
    """gloo writes no sends and receives down: of ranks that seem to wait in nothing, some may wait for the others."""
    place = with_most_waiters(case.graph.standstills)
    why = (
        f"{describe_wait(place)}; nothing on record shows {format_ranks(paired)} waiting, but their recorder leaves "
        "out sends and receives, so it does not tell who holds up whom"
    )
    return case.unknown(why)


def conclude_stopped_launching(
    stopped: Mapping[int, tuple[GroupState, int]], case: CollectiveHang
) -> CollectiveAnalysis:
    words, places = [], []
    for rank, (standing, count) in sorted(stopped.items()):
        last = standing.records[rank].last_enqueued or 0
        words.append(
            f"rank {rank} launched nothing after slot {last:,} of {standing.group}, its peers {count} operations more"
        )
        places.append((standing.group, last + 1))
    why = f"{describe_wait(with_most_waiters(case.graph.standstills))}; {_join_limited(words)}"
    culprits = tuple(sorted(stopped))
    return case.reading(DiagnosisVerdict.NEVER_ARRIVED, False, culprits, CONFIDENCE_STOPPED_LAUNCHING, why, places)


def conclude_missing_records(ends: WaitOutcome, case: CollectiveHang) -> CollectiveAnalysis:
    place = with_most_waiters(ends.unrecorded)
    who = "it may hold" if len(place.awaited) == 1 else "any of them may hold"
    why = f"{describe_wait(place)}; {format_ranks(place.awaited)} left no record, so {who} the others up"
    frontiers = [(place.group, place.slot)]
    reading = case.reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, frontiers)
    return replace(reading, absent=ends.awaited_absent)


# Where the records name nobody: all in the same operation, nobody in any, or not enough on record to tell.

# How sure each is. Stated, not measured.
CONFIDENCE_ALL_JOINED: Final = 0.75
CONFIDENCE_UNEVEN_SIZES: Final = 0.5
CONFIDENCE_NO_WAIT: Final = 0.5


def conclude_all_joined(ends: WaitOutcome, case: CollectiveHang) -> CollectiveAnalysis:
    place = with_most_waiters(ends.joined)
    rest = set(case.standings.groups[place.group].records) - set(place.waiters)
    if rest and not place.operation.point_to_point:
        why = f"{describe_wait(place)}, which {format_ranks(rest)} finished or gave up"
        return case.unknown(why)
    if place.group in case.standings.guessed and len(place.waiters) == 1:
        why = f"{describe_wait(place)}, and no record tells who else is in it"
        return case.unknown(why)
    uneven = sizes_differ(case.standings.groups[place.group], place.slot)
    what = f"{describe_operation(place.operation, sizes=not uneven)} at slot {place.slot:,} of {place.group}"
    more = f" ({len(ends.joined) - 1} more such groups)" if len(ends.joined) > 1 else ""
    why = f"all {len(place.waiters)} members wait in the same {what}{more}"
    agreed = "the sizes differ, which is right only if they match in pairs" if uneven else "the program agrees"
    so = f"so the network, a GPU or its driver holds it up{', or those sizes' if uneven else ''}"
    return case.reading(
        DiagnosisVerdict.NO_DESYNC,
        False,
        (),
        CONFIDENCE_UNEVEN_SIZES if uneven else CONFIDENCE_ALL_JOINED,
        f"{why}: {agreed}, {so}",
        [(each.group, each.slot) for each in ends.joined],
    )


def conclude_no_wait(case: CollectiveHang, unread: Sequence[UnreadableRecord]) -> CollectiveAnalysis:
    launches = sum(len(part.launches) for group in case.standings.groups.values() for part in group.records.values())
    if not launches:
        why = (
            "the records hold no launches: the recorder is off (TORCH_FR_BUFFER_SIZE=2000 turns it on), or there were "
            "none but sends and receives of gloo, which it leaves out"
        )
        return case.unknown(why + describe_unreadable(unread))
    known, gone = len(case.standings.ranks), case.standings.unrecorded
    if gone:
        why = f"no rank of {known} with a record waits in a collective; {format_ranks(gone)} left none"
        return case.unknown(why + describe_unreadable(unread))
    why = f"no rank of {known} waits in a collective: every launch on record is finished"
    return case.reading(DiagnosisVerdict.NO_DESYNC, False, (), CONFIDENCE_NO_WAIT, why, [])


def conclude_undecided(case: CollectiveHang) -> CollectiveAnalysis:
    places = sort_by_waiters(case.graph.standstills)
    words = "; ".join(describe_wait(each) for each in places[:3])
    words += f"; and {len(places) - 3} more such places" if len(places) > 3 else ""
    words += f"; {format_ranks(case.standings.unrecorded)} left no record" if case.standings.unrecorded else ""
    return case.unknown(f"all wait for one another, and the records do not tell who began: {words}")


def conclude_ring_overflow(ranks: Sequence[int], case: CollectiveHang) -> CollectiveAnalysis:
    where = describe_wait(with_most_waiters(case.graph.standstills))
    why = f"{format_ranks(ranks)} launched more than the record holds, so what they wait in is not in it"
    return case.unknown(f"{where}; {why} (TORCH_FR_BUFFER_SIZE sets how much)")


def describe_unreadable(unread: Sequence[UnreadableRecord]) -> str:
    if not unread:
        return ""
    return f"; {len(unread)} could not be used, the first: {unread[0].source}: {unread[0].why}"
