"""Where ranks wait, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from watcher.diagnose.collectives.operations import operation_words
from watcher.diagnose.collectives.wait_graph import Standstill
from watcher.diagnose.words import ranks_in_words


def by_waiters(places: Sequence[Standstill]) -> list[Standstill]:
    """Those in which most wait first."""
    return sorted(places, key=lambda each: (-len(each.waiters), each.group, each.slot))


def most_waited_in(places: Sequence[Standstill]) -> Standstill:
    return by_waiters(places)[0]


def waiting_words(place: Standstill) -> str:
    """ "ranks 0-2 wait in all_reduce at slot 7 of default_pg"."""
    what = f"{operation_words(place.operation)} at slot {place.slot:,} of {place.group}"
    return f"{ranks_in_words(place.waiters)} {'waits' if len(place.waiters) == 1 else 'wait'} in {what}"
