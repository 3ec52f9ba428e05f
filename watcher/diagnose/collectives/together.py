"""Where the records name nobody: all in the same operation, nobody in any, or not enough on record to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from watcher.diagnose.collectives.case import Case
from watcher.diagnose.collectives.disagreements import sizes_differ
from watcher.diagnose.collectives.operations import operation_words
from watcher.diagnose.collectives.standstill_words import by_waiters, most_waited_in, waiting_words
from watcher.diagnose.collectives.wait_graph import Ends
from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict
from watcher.diagnose.flight.record import Unread
from watcher.diagnose.words import ranks_in_words

# How sure each is. Stated, not measured.
SURE_JOINED: Final = 0.75
SURE_UNEVEN: Final = 0.5
SURE_NOBODY: Final = 0.5


def of_joined(ends: Ends, case: Case) -> CollectiveReading:
    place = most_waited_in(ends.joined)
    rest = set(case.standings.groups[place.group].records) - set(place.waiters)
    if rest and not place.operation.point_to_point:
        why = f"{waiting_words(place)}, which {ranks_in_words(rest)} finished or gave up"
        return case.unknown(why)
    if place.group in case.standings.guessed and len(place.waiters) == 1:
        why = f"{waiting_words(place)}, and no record tells who else is in it"
        return case.unknown(why)
    uneven = sizes_differ(case.standings.groups[place.group], place.slot)
    what = f"{operation_words(place.operation, sizes=not uneven)} at slot {place.slot:,} of {place.group}"
    more = f" ({len(ends.joined) - 1} more such groups)" if len(ends.joined) > 1 else ""
    why = f"all {len(place.waiters)} members wait in the same {what}{more}"
    agreed = "the sizes differ, which is right only if they match in pairs" if uneven else "the program agrees"
    so = f"so the network, a GPU or its driver holds it up{', or those sizes' if uneven else ''}"
    return case.reading(
        DiagnosisVerdict.NO_DESYNC,
        False,
        (),
        SURE_UNEVEN if uneven else SURE_JOINED,
        f"{why}: {agreed}, {so}",
        [(each.group, each.slot) for each in ends.joined],
    )


def of_nobody(case: Case, unread: Sequence[Unread]) -> CollectiveReading:
    launches = sum(len(part.launches) for group in case.standings.groups.values() for part in group.records.values())
    if not launches:
        why = (
            "the records hold no launches: the recorder is off (TORCH_FR_BUFFER_SIZE=2000 turns it on), or there were "
            "none but sends and receives of gloo, which it leaves out"
        )
        return case.unknown(why + unread_words(unread))
    known, gone = len(case.standings.ranks), case.standings.unrecorded
    if gone:
        why = f"no rank of {known} with a record waits in a collective; {ranks_in_words(gone)} left none"
        return case.unknown(why + unread_words(unread))
    why = f"no rank of {known} waits in a collective: every launch on record is finished"
    return case.reading(DiagnosisVerdict.NO_DESYNC, False, (), SURE_NOBODY, why, [])


def of_no_end(case: Case) -> CollectiveReading:
    places = by_waiters(case.graph.standstills)
    words = "; ".join(waiting_words(each) for each in places[:3])
    words += f"; and {len(places) - 3} more such places" if len(places) > 3 else ""
    words += f"; {ranks_in_words(case.standings.unrecorded)} left no record" if case.standings.unrecorded else ""
    return case.unknown(f"all wait for one another, and the records do not tell who began: {words}")


def of_overflown(ranks: Sequence[int], case: Case) -> CollectiveReading:
    where = waiting_words(most_waited_in(case.graph.standstills))
    why = f"{ranks_in_words(ranks)} launched more than the record holds, so what they wait in is not in it"
    return case.unknown(f"{where}; {why} (TORCH_FR_BUFFER_SIZE sets how much)")


def unread_words(unread: Sequence[Unread]) -> str:
    if not unread:
        return ""
    return f"; {len(unread)} could not be used, the first: {unread[0].source}: {unread[0].why}"
