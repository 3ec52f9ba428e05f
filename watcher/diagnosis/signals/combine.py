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

from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict
from wattwatch.watcher.diagnosis.signals.signal import FLIGHT_RECORDER, POWER, Signal

MIN_WEIGHT_TO_NAME: Final = 0.3  # a witness weaker than this names nobody alone
MAX_CONFIDENCE: Final = 0.99
MAX_INCONCLUSIVE_CONFIDENCE: Final = 0.95
HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class CombinedSignals:
    """`agrees`: of each witness that takes a side, in their order."""

    ranks: frozenset[int]
    confidence: float
    agrees: tuple[tuple[Signal, bool], ...]
    tie_broken: bool = False


def combine_signals(witnesses: Sequence[Signal], reading: CollectiveAnalysis | None) -> CombinedSignals:
    witnesses = _strongest_per_source(witnesses)
    if reading is not None and reading.conclusive and reading.culprits:
        return _evaluate_candidate(frozenset(reading.culprits), witnesses, reading.confidence, MAX_CONFIDENCE)
    if reading is not None and reading.tied:
        return _break_tie(witnesses, reading)
    candidates = {w.ranks for w in witnesses if w.ranks and w.weight >= MIN_WEIGHT_TO_NAME}
    sides = [_evaluate_candidate(ranks, witnesses, 0.0, MAX_INCONCLUSIVE_CONFIDENCE) for ranks in candidates]
    if not sides:
        return _no_candidate(witnesses, reading)
    # The last two only decide where nothing else does, so that the order of witnesses never does.
    return max(sides, key=lambda side: (side.confidence, -len(side.ranks), [-rank for rank in sorted(side.ranks)]))


def _strongest_per_source(witnesses: Sequence[Signal]) -> list[Signal]:
    surest: dict[str, Signal] = {}
    for witness in witnesses:
        before = surest.get(witness.source)
        if before is None or (bool(witness.ranks), witness.weight) > (bool(before.ranks), before.weight):
            surest[witness.source] = witness
    return list(surest.values())


def _evaluate_candidate(
    ranks: frozenset[int], witnesses: Sequence[Signal], base: float, most: float
) -> CombinedSignals:
    """`base`: what the records alone give; 0 lets the surest witness begin."""
    agrees = tuple((w, stand) for w in witnesses if (stand := _agrees(w, ranks)) is not None)
    first = None if base else max((w for w, yes in agrees if yes), key=lambda w: w.weight, default=None)
    odds = _odds(base or (first.weight if first is not None else HALF))
    for witness, yes in agrees:
        if witness is first or (base and witness.source == FLIGHT_RECORDER):
            continue
        odds *= _odds_factor(witness) if yes else 1 / _odds_factor(witness)
    return CombinedSignals(ranks, min(odds / (1 + odds), most), agrees)


def _agrees(witness: Signal, ranks: frozenset[int]) -> bool | None:
    """None: it takes no side. Boards that all read busy are no word against anybody: waiting reads busy too."""
    if witness.shows_progress:
        return False
    if witness.ranks:
        return witness.agrees_with(ranks)
    return False if witness.all_alike and witness.source != POWER and ranks & witness.saw else None


def _odds(share: float) -> float:
    share = min(max(share, 0.02), 0.98)
    return share / (1 - share)


def _odds_factor(witness: Signal) -> float:
    return 1 + 2 * witness.weight * (1.0 if witness.ranks or witness.shows_progress else HALF)


def _break_tie(witnesses: Sequence[Signal], reading: CollectiveAnalysis) -> CombinedSignals:
    """The records say that one of these sets is wrong, and not which: the other sources may."""
    others = [w for w in witnesses if w.source != FLIGHT_RECORDER]
    scores = []
    for tied in map(frozenset, reading.tied):
        score = sum(w.weight for w in others if w.ranks and w.ranks <= tied)
        scores.append((score, tied))
    best, ranks = max(scores, key=lambda each: (each[0], sorted(each[1])))
    if best < MIN_WEIGHT_TO_NAME or [score for score, _ in scores].count(best) > 1:
        return CombinedSignals(frozenset(), reading.confidence, ())
    share = 1 / len(reading.tied)
    named = frozenset(rank for w in others if w.ranks and w.ranks <= ranks for rank in w.ranks)
    side = _evaluate_candidate(named, others, share, MAX_INCONCLUSIVE_CONFIDENCE)
    records = tuple((w, True) for w in witnesses if w.source == FLIGHT_RECORDER)
    return CombinedSignals(named, side.confidence, (*records, *side.agrees), tie_broken=True)


def _no_candidate(witnesses: Sequence[Signal], reading: CollectiveAnalysis | None) -> CombinedSignals:
    """No rank is named. Where all wait in the same operation, sources that see all alike agree with that."""
    if reading is None or reading.verdict is not DiagnosisVerdict.NO_DESYNC:
        clear = max((w.weight for w in witnesses if w.all_alike), default=0.0)
        sides = tuple((w, not w.shows_progress) for w in witnesses if w.all_alike or w.shows_progress)
        return CombinedSignals(frozenset(), clear, sides)
    odds = _odds(reading.confidence)
    agrees = []
    for witness in witnesses:
        if witness.source == FLIGHT_RECORDER:
            agrees.append((witness, True))
        elif witness.all_alike or witness.ranks or witness.shows_progress:
            odds *= _odds_factor(witness) if witness.all_alike else 1 / _odds_factor(witness)
            agrees.append((witness, witness.all_alike))
    return CombinedSignals(frozenset(), min(odds / (1 + odds), MAX_INCONCLUSIVE_CONFIDENCE), tuple(agrees))
