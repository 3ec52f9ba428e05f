"""What all conclusions are drawn from, and how one is put down: with where each group stands and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from watcher.diagnose.collectives.frontier import frontier
from watcher.diagnose.collectives.standing import Standings
from watcher.diagnose.collectives.wait_graph import WaitGraph
from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict, Wait
from watcher.diagnose.flight.record import Group

MOST_FRONTIERS: Final = 16
MOST_WAITS: Final = 4096


@dataclass(frozen=True, slots=True)
class Case:
    standings: Standings
    graph: WaitGraph

    def reading(
        self,
        verdict: DiagnosisVerdict,
        conclusive: bool,
        culprits: tuple[int, ...],
        confidence: float,
        why: str,
        places: Sequence[tuple[Group, int]],
        tied: tuple[tuple[int, ...], ...] = (),
    ) -> CollectiveReading:
        """`places`: groups and slots that the conclusion rests on; they are shown first."""
        waited_in = ((each.group, each.slot) for each in self.graph.standstills)
        shown = list(dict.fromkeys([*places, *waited_in]))[:MOST_FRONTIERS]
        return CollectiveReading(
            verdict,
            conclusive,
            culprits,
            tied,
            confidence,
            why,
            tuple(frontier(self.standings, group, slot) for group, slot in shown),
            waits_in(self.graph, self.standings),
            tuple(self.standings.ranks[rank].source for rank in sorted(self.standings.ranks)),
        )

    def unknown(self, why: str) -> CollectiveReading:
        return self.reading(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, [])


def waits_in(graph: WaitGraph, standings: Standings) -> tuple[Wait, ...]:
    """The first MOST_WAITS. Members may wait at one slot in different operations, so each is told with its own."""
    waits = (
        Wait(rank, awaited, each.group, each.slot, operation, why)
        for each in graph.standstills
        for rank in each.waiters
        for operation in (standings.groups[each.group].operation_at(rank, each.slot) or each.operation,)
        for awaited, why in each.awaited.items()
    )
    return tuple(islice(waits, MOST_WAITS))
