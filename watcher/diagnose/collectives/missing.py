"""Ranks that the others wait for: silent, left behind, no longer launching, or without a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from watcher.diagnose.collectives.case import Case
from watcher.diagnose.collectives.operations import operation_words
from watcher.diagnose.collectives.standing import GroupStanding
from watcher.diagnose.collectives.standstill_words import most_waited_in, waiting_words
from watcher.diagnose.collectives.wait_graph import Ends, Hold
from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict
from watcher.diagnose.flight.record import Group
from watcher.diagnose.words import ranks_in_words

MOST_TOLD: Final = 4  # ranks, each with a sentence
# How sure each is. Stated, not measured.
SURE_SILENT: Final = 0.9
SURE_LEFT_BEHIND: Final = 0.85
SURE_STOPPED: Final = 0.7
SURE_DOUBTED: Final = 0.55  # it may be in a send that is not written down, or have noticed late, or most are silent


def of_holders(ends: Ends, case: Case) -> CollectiveReading:
    culprits = tuple(sorted(ends.holders))
    words, places = [], []
    for rank in culprits:
        told, group, slot = _hold_words(rank, ends.holders[rank], case)
        words.append(told)
        places.append((group, slot))
    why = _first_ranks(words)
    unrecorded = sorted({rank for each in ends.unrecorded for rank in each.awaited} - set(culprits))
    if unrecorded:
        why += f"; {ranks_in_words(unrecorded)} left no record and may hold others up too"
    return case.reading(
        DiagnosisVerdict.NEVER_ARRIVED,
        False,
        culprits,
        min(_sure_of(rank, hold, case) for rank, hold in ends.holders.items()),
        why,
        places,
    )


def _first_ranks(sentences: Sequence[str]) -> str:
    """One a rank: the first of them, and how many more there are."""
    more = f"; and {len(sentences) - MOST_TOLD} more ranks" if len(sentences) > MOST_TOLD else ""
    return "; ".join(sentences[:MOST_TOLD]) + more


def _hold_words(rank: int, hold: Hold, case: Case) -> tuple[str, Group, int]:
    """The sentence of one rank, with the group and slot at which it is missed."""
    if hold is Hold.LEFT_BEHIND:
        group, launch, ahead = case.graph.left_behind[rank]
        what = f"{operation_words(launch.operation)} at slot {launch.slot:,} of {group}"
        late = " (by so little that its record may only be late)" if rank in case.graph.by_a_few else ""
        return f"rank {rank} did not finish {what}, which {ranks_in_words(ahead)} finished{late}", group, launch.slot
    missing = [each for each in case.graph.standstills if rank in each.awaited]
    # Where most wait is where it is missed most plainly.
    place = most_waited_in(missing)
    told = f"{waiting_words(place)}; rank {rank} has not launched it and waits in nothing"
    return told, place.group, place.slot


def _sure_of(rank: int, hold: Hold, case: Case) -> float:
    if rank in case.graph.by_a_few or may_be_paired(rank, hold, case):
        return SURE_DOUBTED
    if hold is Hold.LEFT_BEHIND:
        return SURE_LEFT_BEHIND
    missing = [each for each in case.graph.standstills if rank in each.awaited]
    # A member that is gone ends the operations of others in gloo, and they may have given up for that.
    gone = any(each.operation.backend == "gloo" and case.standings.absent(each.group) for each in missing)
    return SURE_DOUBTED if gone or all(len(each.waiters) < len(each.awaited) for each in missing) else SURE_SILENT


def may_be_paired(rank: int, hold: Hold, case: Case) -> bool:
    return hold is Hold.SILENT and rank in case.standings.unseen_pairs


def of_silent_or_paired(paired: Sequence[int], case: Case) -> CollectiveReading:
    """gloo writes no sends and receives down: of ranks that seem to wait in nothing, some may wait for the others."""
    place = most_waited_in(case.graph.standstills)
    why = (
        f"{waiting_words(place)}; nothing on record shows {ranks_in_words(paired)} waiting, but their recorder leaves "
        "out sends and receives, so it does not tell who holds up whom"
    )
    return case.unknown(why)


def of_laggards(stopped: Mapping[int, tuple[GroupStanding, int]], case: Case) -> CollectiveReading:
    words, places = [], []
    for rank, (standing, count) in sorted(stopped.items()):
        last = standing.records[rank].last_enqueued or 0
        words.append(
            f"rank {rank} launched nothing after slot {last:,} of {standing.group}, its peers {count} operations more"
        )
        places.append((standing.group, last + 1))
    why = f"{waiting_words(most_waited_in(case.graph.standstills))}; {_first_ranks(words)}"
    culprits = tuple(sorted(stopped))
    return case.reading(DiagnosisVerdict.NEVER_ARRIVED, False, culprits, SURE_STOPPED, why, places)


def of_unrecorded(ends: Ends, case: Case) -> CollectiveReading:
    place = most_waited_in(ends.unrecorded)
    who = "it may hold" if len(place.awaited) == 1 else "any of them may hold"
    why = f"{waiting_words(place)}; {ranks_in_words(place.awaited)} left no record, so {who} the others up"
    frontiers = [(place.group, place.slot)]
    reading = case.reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, frontiers)
    return replace(reading, absent=ends.awaited_absent)
