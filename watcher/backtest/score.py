"""Verdicts against labels: how many are right, of which kind, how sure, on which boards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from watcher.backtest.pictures import Judged
from watcher.judge.verdict import PowerState

BIN: Final = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    right: int
    of: int

    @property
    def rate(self) -> float | None:
        return self.right / self.of if self.of else None


@dataclass(frozen=True, slots=True)
class Kind:
    """One state: how often it was found, and how often it was said of something else."""

    found: Share
    false: int


@dataclass(frozen=True, slots=True)
class Bin:
    """Verdicts said with a confidence in [low, high)."""

    low: float
    high: float
    confidence: float  # mean of what was said
    right: Share

    @property
    def off(self) -> float:
        return abs(self.confidence - self.right.right / self.right.of)


@dataclass(frozen=True, slots=True)
class Score:
    """All judged cases have a known state."""

    exact: Share
    kinds: Mapping[PowerState, Kind]
    matrix: Mapping[PowerState, Mapping[PowerState, int]]  # label -> said -> how often
    reliability: tuple[Bin, ...]
    models: Mapping[str, Share]
    missed: tuple[Judged, ...]

    @property
    def hangs(self) -> Kind:
        return self.kinds.get(PowerState.HANG, Kind(Share(0, 0), 0))


def score(judged: Sequence[Judged]) -> Score:
    labels = [state for state in PowerState if any(j.case.state is state for j in judged)]
    said = [state for state in PowerState if any(j.verdict.state is state for j in judged)]
    matrix = {
        label: dict(Counter(j.verdict.state for j in judged if j.case.state is label).most_common()) for label in labels
    }
    kinds = {
        state: Kind(
            Share(matrix.get(state, {}).get(state, 0), sum(matrix.get(state, {}).values())),
            sum(row.get(state, 0) for label, row in matrix.items() if label is not state),
        )
        for state in PowerState
        if state in labels or state in said
    }
    return Score(
        exact=share_of(judged),
        kinds=kinds,
        matrix=matrix,
        reliability=reliability_of(judged),
        models=_models(judged),
        missed=tuple(j for j in judged if not j.right),
    )


def share_of(judged: Sequence[Judged]) -> Share:
    return Share(sum(j.right for j in judged), len(judged))


def reliability_of(judged: Sequence[Judged]) -> tuple[Bin, ...]:
    """Of verdicts said with 0.9, nine in ten should be right. `unknown` asserts nothing and is not counted; nor is,
    where the steps are known, a case of which nobody knew any: what it was told is what the other run was told."""
    with_word = any(j.told for j in judged)
    sure = [j for j in judged if j.verdict.state is not PowerState.UNKNOWN and j.told == with_word]
    bins = []
    for number, each in groupby(sorted(sure, key=_bin_of), key=_bin_of):
        rows = list(each)
        mean = sum(j.verdict.confidence for j in rows) / len(rows)
        bins.append(Bin(round(number * BIN, 1), round((number + 1) * BIN, 1), round(mean, 3), share_of(rows)))
    return tuple(bins)


def _bin_of(judged: Judged) -> int:
    return int(round(judged.verdict.confidence, 2) * 100) // round(BIN * 100)


def _models(judged: Sequence[Judged]) -> dict[str, Share]:
    names = sorted({j.case.gpu_model for j in judged})
    return {name: share_of([j for j in judged if j.case.gpu_model == name]) for name in names}
