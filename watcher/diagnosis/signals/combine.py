"""All signals together: which ranks are to blame, and how likely. Pure.

The strongest signal that names a set of ranks sets the odds for that set. Every further source that names the same
ranks multiplies the odds by 1 + 2 x its own weight (a factor of 1 to 3). A source that names other ranks, or that would
show a difference between the ranks and shows none, divides them by the same factor. Each source counts once.

The factors are chosen, not fitted: there are too few labeled hangs with more than one source of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict
from wattwatch.watcher.diagnosis.signals.signal import FLIGHT_RECORDER, POWER, Signal

# All four are chosen, not measured.
MIN_WEIGHT_TO_NAME: Final = 0.3  # a signal weaker than this only supports others: it names no rank alone
MAX_CONFIDENCE: Final = 0.99
MAX_INCONCLUSIVE_CONFIDENCE: Final = 0.95  # without proof from the flight records
HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class CombinedSignals:
    ranks: frozenset[int]
    confidence: float  # 0..1
    agrees: tuple[tuple[Signal, bool], ...]  # each signal that supports (True) or contradicts (False) the ranks
    tie_broken: bool = False  # the flight records were tied, and the other sources decided


def combine_signals(signals: Sequence[Signal], collectives: CollectiveAnalysis | None) -> CombinedSignals:
    signals = _strongest_per_source(signals)
    if collectives is not None and collectives.conclusive and collectives.culprits:
        return _evaluate_candidate(frozenset(collectives.culprits), signals, collectives.confidence, MAX_CONFIDENCE)
    if collectives is not None and collectives.tied:
        return _break_tie(signals, collectives)
    candidates = {signal.ranks for signal in signals if signal.ranks and signal.weight >= MIN_WEIGHT_TO_NAME}
    evaluated = [_evaluate_candidate(ranks, signals, 0.0, MAX_INCONCLUSIVE_CONFIDENCE) for ranks in candidates]
    if not evaluated:
        return _no_candidate(signals, collectives)
    # At equal confidence prefer fewer ranks, then lower rank numbers: the order of the signals must not matter.
    return max(evaluated, key=lambda each: (each.confidence, -len(each.ranks), [-rank for rank in sorted(each.ranks)]))


def _strongest_per_source(signals: Sequence[Signal]) -> list[Signal]:
    strongest: dict[str, Signal] = {}
    for signal in signals:
        before = strongest.get(signal.source)
        if before is None or (bool(signal.ranks), signal.weight) > (bool(before.ranks), before.weight):
            strongest[signal.source] = signal
    return list(strongest.values())


def _evaluate_candidate(
    ranks: frozenset[int], signals: Sequence[Signal], base: float, ceiling: float
) -> CombinedSignals:
    """`base`: confidence from the flight records alone; 0: the strongest signal that agrees sets the odds instead."""
    agrees = tuple((signal, opinion) for signal in signals if (opinion := _agrees(signal, ranks)) is not None)
    first = None if base else max((s for s, yes in agrees if yes), key=lambda s: s.weight, default=None)
    odds = _odds(base or (first.weight if first is not None else HALF))
    for signal, yes in agrees:
        if signal is first or (base and signal.source == FLIGHT_RECORDER):
            continue  # already in the starting odds
        odds *= _odds_factor(signal) if yes else 1 / _odds_factor(signal)
    return CombinedSignals(ranks, min(odds / (1 + odds), ceiling), agrees)


def _agrees(signal: Signal, ranks: frozenset[int]) -> bool | None:
    """None: the signal neither supports nor contradicts that these ranks are to blame."""
    if signal.shows_progress:
        return False
    if signal.ranks:
        return signal.agrees_with(ranks)
    # GPUs that are all busy contradict nothing: a rank that waits in a collective reads 100 % as well.
    return False if signal.all_alike and signal.source != POWER and ranks & signal.observed_ranks else None


def _odds(probability: float) -> float:
    probability = min(max(probability, 0.02), 0.98)  # keeps the odds finite
    return probability / (1 - probability)


def _odds_factor(signal: Signal) -> float:
    return 1 + 2 * signal.weight * (1.0 if signal.ranks or signal.shows_progress else HALF)


def _break_tie(signals: Sequence[Signal], collectives: CollectiveAnalysis) -> CombinedSignals:
    """The records prove that one of the tied sets of ranks is wrong, but not which one; other sources may know."""
    others = [signal for signal in signals if signal.source != FLIGHT_RECORDER]
    scores = [
        (sum(s.weight for s in others if s.ranks and s.ranks <= tied), tied)
        for tied in map(frozenset, collectives.tied)
    ]
    best, ranks = max(scores, key=lambda each: (each[0], sorted(each[1])))
    if best < MIN_WEIGHT_TO_NAME or [score for score, _ in scores].count(best) > 1:
        return CombinedSignals(frozenset(), collectives.confidence, ())
    named = frozenset(rank for s in others if s.ranks and s.ranks <= ranks for rank in s.ranks)
    evaluated = _evaluate_candidate(named, others, 1 / len(collectives.tied), MAX_INCONCLUSIVE_CONFIDENCE)
    records = tuple((signal, True) for signal in signals if signal.source == FLIGHT_RECORDER)
    return CombinedSignals(named, evaluated.confidence, (*records, *evaluated.agrees), tie_broken=True)


def _no_candidate(signals: Sequence[Signal], collectives: CollectiveAnalysis | None) -> CombinedSignals:
    """No rank is named. If all ranks wait in the same operation, sources that see all ranks alike support that."""
    if collectives is None or collectives.verdict is not DiagnosisVerdict.NO_DESYNC:
        confidence = max((signal.weight for signal in signals if signal.all_alike), default=0.0)
        agrees = [(s, not s.shows_progress) for s in signals if s.all_alike or s.shows_progress]
        return CombinedSignals(frozenset(), confidence, tuple(agrees))
    odds = _odds(collectives.confidence)
    agrees = []
    for signal in signals:
        if signal.source == FLIGHT_RECORDER:
            agrees.append((signal, True))
        elif signal.all_alike or signal.ranks or signal.shows_progress:
            odds *= _odds_factor(signal) if signal.all_alike else 1 / _odds_factor(signal)
            agrees.append((signal, signal.all_alike))
    return CombinedSignals(frozenset(), min(odds / (1 + odds), MAX_INCONCLUSIVE_CONFIDENCE), tuple(agrees))
