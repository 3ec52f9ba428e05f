"""Ranks that do different things: at one slot of one group, or groups entered in different orders. Conclusive."""

from __future__ import annotations

from typing import Final

from watcher.diagnose.collectives.case import Case
from watcher.diagnose.collectives.disagreements import Disagreement
from watcher.diagnose.collectives.operations import operation_words
from watcher.diagnose.collectives.ring_sides import sides_of, tied_of
from watcher.diagnose.collectives.siblings import odd_among_siblings, odd_by_count
from watcher.diagnose.collectives.wait_graph import Standstill
from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict
from watcher.diagnose.words import ranks_in_words

# How sure each is. Stated, not measured: public records with a known culprit are too few to count on.
SURE_DISAGREEMENT: Final = 0.97
SURE_RING: Final = 0.8
SURE_VOTED: Final = 0.7
AS_MANY: Final = "as many on each side, so the records do not tell which one is wrong"
AS_THE_LIKE_GROUPS: Final = "the other groups of this kind tell who is wrong"
AS_THE_LIKE_RANKS: Final = "what the others launched before tells who is wrong"


def of_disagreement(parted: list[Disagreement], case: Case) -> CollectiveReading:
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
        culprits = odd_among_siblings(shown, case.standings)
        sure = SURE_VOTED if culprits else SURE_DISAGREEMENT
        why += f"; {AS_THE_LIKE_GROUPS if culprits else AS_MANY}"
    return case.reading(
        DiagnosisVerdict.MISMATCH if sizes else DiagnosisVerdict.DESYNC,
        True,
        culprits,
        sure,
        why,
        [(each.group, each.slot) for each in parted],
        tied=() if culprits else tuple(ranks for _, ranks in shown.parties),
    )


def of_ring(ring: tuple[Standstill, ...], case: Case) -> CollectiveReading:
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
        culprits = odd_by_count(ring, common, case.standings)
        sure = SURE_VOTED if culprits else SURE_RING
        why += f"; {AS_THE_LIKE_RANKS if culprits else AS_MANY}"
    return case.reading(
        DiagnosisVerdict.DESYNC,
        not any(each.group in case.standings.guessed for each in ring),
        culprits,
        sure,
        why,
        [(each.group, each.slot) for each in ring],
        tied=() if culprits else tied_of(sides, common),
    )
