"""What a set of flight records says: who holds the job up, in which collective, and how sure that is.

In order: members of a group at one slot in different collectives, or with different sizes (conclusive; the minority is
named, a tie is said as a tie); ranks that never arrived, found by walking who waits for whom to its end; groups entered
in different orders; all in the same operation, so that it is not the program. Pure: neither the order of the records
nor that of the ranks changes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from watcher.diagnose.collectives.case import Case
from watcher.diagnose.collectives.disagreements import disagreements
from watcher.diagnose.collectives.laggards import laggards
from watcher.diagnose.collectives.missing import (
    may_be_paired,
    of_holders,
    of_laggards,
    of_silent_or_paired,
    of_unrecorded,
)
from watcher.diagnose.collectives.parted import of_disagreement, of_ring
from watcher.diagnose.collectives.standing import standings_of
from watcher.diagnose.collectives.together import of_joined, of_no_end, of_nobody, of_overflown, unread_words
from watcher.diagnose.collectives.wait_graph import ends_of, wait_graph
from watcher.diagnose.diagnosis import CollectiveReading
from watcher.diagnose.flight.record import RankRecord, Unread


def read_collectives(records: Sequence[RankRecord], unread: Sequence[Unread] = ()) -> CollectiveReading:
    """`records`: one a rank. `unread`: only named in the words."""
    standings = standings_of(records)
    case = Case(standings, wait_graph(standings))
    if not standings.ranks:
        return case.unknown("no flight record could be read" + unread_words(unread))
    if not case.graph.standstills and not case.graph.left_behind:
        return of_nobody(case, unread)
    if parted := disagreements(standings):
        return of_disagreement(parted, case)
    return _of_waiting(case)


def _of_waiting(case: Case) -> CollectiveReading:
    """Nobody disagrees with a member of the same group: where the waiting leads to."""
    standings, ends = case.standings, ends_of(case.graph, case.standings)
    overflown = [rank for rank in standings.ranks if standings.ranks[rank].overflown]
    if overflown and not ends.holders and (ends.rings or not ends.unrecorded):
        return of_overflown(overflown, case)
    if ends.rings and not ends.holders:
        return of_ring(ends.rings[0], case)
    if ends.holders:
        paired = [rank for rank, hold in ends.holders.items() if may_be_paired(rank, hold, case)]
        if len(paired) > 1 or (paired and standings.unrecorded):
            return of_silent_or_paired(paired, case)
        return of_holders(ends, case)
    if ends.unrecorded:
        return of_unrecorded(ends, case)
    stopped = laggards(standings)
    if stopped and 2 * len(stopped) < len(standings.ranks):
        return of_laggards(stopped, case)
    return of_joined(ends, case) if ends.joined else of_no_end(case)
