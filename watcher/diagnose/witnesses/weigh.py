"""Several witnesses -> whom they name together, and how sure. Pure.

The arithmetic: the surest witness that names these ranks gives the odds. Each further source that names them multiplies
the odds by 1 + 2 x its own weight (1 to 3), each that names others, or sees all ranks alike where it would show,
divides them by as much. Sources of one name count once. Stated, not fitted: labelled hangs with several sources are too
few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from watcher.diagnose.diagnosis import CollectiveReading, DiagnosisVerdict
from watcher.diagnose.witnesses.witness import POWER, RECORDS, Witness

LEAST_TO_NAME: Final = 0.3  # a witness weaker than this names nobody alone
MOST_SURE: Final = 0.99
MOST_UNCONCLUSIVE: Final = 0.95
HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class Weighed:
    """`agrees`: of each witness that takes a side, in their order."""

    ranks: frozenset[int]
    confidence: float
    agrees: tuple[tuple[Witness, bool], ...]
    tie_broken: bool = False


def weigh(witnesses: Sequence[Witness], reading: CollectiveReading | None) -> Weighed:
    witnesses = _one_a_source(witnesses)
    if reading is not None and reading.conclusive and reading.culprits:
        return _side(frozenset(reading.culprits), witnesses, reading.confidence, MOST_SURE)
    if reading is not None and reading.tied:
        return _break_tie(witnesses, reading)
    candidates = {w.ranks for w in witnesses if w.ranks and w.weight >= LEAST_TO_NAME}
    sides = [_side(ranks, witnesses, 0.0, MOST_UNCONCLUSIVE) for ranks in candidates]
    if not sides:
        return _nobody(witnesses, reading)
    # The last two only decide where nothing else does, so that the order of witnesses never does.
    return max(sides, key=lambda side: (side.confidence, -len(side.ranks), [-rank for rank in sorted(side.ranks)]))


def _one_a_source(witnesses: Sequence[Witness]) -> list[Witness]:
    surest: dict[str, Witness] = {}
    for witness in witnesses:
        before = surest.get(witness.source)
        if before is None or (bool(witness.ranks), witness.weight) > (bool(before.ranks), before.weight):
            surest[witness.source] = witness
    return list(surest.values())


def _side(ranks: frozenset[int], witnesses: Sequence[Witness], base: float, most: float) -> Weighed:
    """`base`: what the records alone give; 0 lets the surest witness begin."""
    agrees = tuple((w, stand) for w in witnesses if (stand := _stand(w, ranks)) is not None)
    first = None if base else max((w for w, yes in agrees if yes), key=lambda w: w.weight, default=None)
    odds = _odds(base or (first.weight if first is not None else HALF))
    for witness, yes in agrees:
        if witness is first or (base and witness.source == RECORDS):
            continue
        odds *= _factor(witness) if yes else 1 / _factor(witness)
    return Weighed(ranks, min(odds / (1 + odds), most), agrees)


def _stand(witness: Witness, ranks: frozenset[int]) -> bool | None:
    """None: it takes no side. Boards that all read busy are no word against anybody: waiting reads busy too."""
    if witness.denies:
        return False
    if witness.ranks:
        return witness.agrees_on(ranks)
    return False if witness.clears and witness.source != POWER and ranks & witness.saw else None


def _odds(share: float) -> float:
    share = min(max(share, 0.02), 0.98)
    return share / (1 - share)


def _factor(witness: Witness) -> float:
    return 1 + 2 * witness.weight * (1.0 if witness.ranks or witness.denies else HALF)


def _break_tie(witnesses: Sequence[Witness], reading: CollectiveReading) -> Weighed:
    """The records say that one of these sets is wrong, and not which: the other sources may."""
    others = [w for w in witnesses if w.source != RECORDS]
    scores = []
    for tied in map(frozenset, reading.tied):
        score = sum(w.weight for w in others if w.ranks and w.ranks <= tied)
        scores.append((score, tied))
    best, ranks = max(scores, key=lambda each: (each[0], sorted(each[1])))
    if best < LEAST_TO_NAME or [score for score, _ in scores].count(best) > 1:
        return Weighed(frozenset(), reading.confidence, ())
    share = 1 / len(reading.tied)
    named = frozenset(rank for w in others if w.ranks and w.ranks <= ranks for rank in w.ranks)
    side = _side(named, others, share, MOST_UNCONCLUSIVE)
    records = tuple((w, True) for w in witnesses if w.source == RECORDS)
    return Weighed(named, side.confidence, (*records, *side.agrees), tie_broken=True)


def _nobody(witnesses: Sequence[Witness], reading: CollectiveReading | None) -> Weighed:
    """No rank is named. Where all wait in the same operation, sources that see all alike agree with that."""
    if reading is None or reading.verdict is not DiagnosisVerdict.NO_DESYNC:
        clear = max((w.weight for w in witnesses if w.clears), default=0.0)
        sides = tuple((w, not w.denies) for w in witnesses if w.clears or w.denies)
        return Weighed(frozenset(), clear, sides)
    odds = _odds(reading.confidence)
    agrees = []
    for witness in witnesses:
        if witness.source == RECORDS:
            agrees.append((witness, True))
        elif witness.clears or witness.ranks or witness.denies:
            odds *= _factor(witness) if witness.clears else 1 / _factor(witness)
            agrees.append((witness, witness.clears))
    return Weighed(frozenset(), min(odds / (1 + odds), MOST_UNCONCLUSIVE), tuple(agrees))
