"""Judges the labeled cases as `wattwatch triage` does, and scores the verdicts: how many are right, in which states, on
which GPU models, and how well the confidence fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, Final

import orjson

from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.backtest.cases import LabeledCase, LabelError
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState, Verdict
from wattwatch.watcher.recordings.inputs import GpuLog, InputError, read_input
from wattwatch.watcher.recordings.triage import triage_source


class ProgressKnowledge(StrEnum):
    """What the classifier is told about the steps. The values are serialized."""

    NONE = "none"  # nothing
    WORD = "word"  # what the reporter knew


@dataclass(frozen=True, slots=True)
class JudgedCase:
    case: LabeledCase
    verdict: Verdict
    with_progress: bool  # the progress of the steps was known and given

    @property
    def right(self) -> bool:
        return self.verdict.state is self.case.state


def judge_cases(
    cases: Iterable[LabeledCase], knowledge: ProgressKnowledge, *, leave_model_out: bool = False
) -> tuple[JudgedCase, ...]:
    """Judges each case as `wattwatch triage` judges its file.

    `leave_model_out`: without the name of the GPU. The shipped profiles come from such reports, so a case would be
    judged with a profile made from it; without the name, only the rules that hold for all GPUs apply.
    """
    return tuple(
        _judge_case(
            case, case.known_progress if knowledge is ProgressKnowledge.WORD else None, leave_model_out=leave_model_out
        )
        for case in cases
    )


def _judge_case(case: LabeledCase, progress: StepProgress | None, *, leave_model_out: bool) -> JudgedCase:
    samples = _without_board_names(case.samples) if leave_model_out else case.samples
    try:
        source = read_input(case.name, orjson.dumps(samples))
    except InputError as error:
        raise LabelError(f"case {case.name}: {error}") from None
    if not isinstance(source, GpuLog) or len(source.specs) != 1:
        raise LabelError(f"case {case.name}: expected JSON samples of exactly one job")
    if case.readable and source.status is not HostStatus.OK:
        raise LabelError(f"case {case.name}: its samples cannot be parsed: every reading must be a number or null")
    (triage,) = triage_source(case.name, source, progress, None)
    return JudgedCase(case, triage.verdict, progress is not None)


def _without_board_names(samples: dict[str, Any]) -> dict[str, Any]:
    rounds = [
        {**each, "gpus": [{k: v for k, v in gpu.items() if k != "name"} for gpu in each.get("gpus", [])]}
        for each in samples["samples"]
    ]
    return {**samples, "gpu_model": None, "samples": rounds}


# Verdicts compared with labels

BIN_WIDTH: Final = 0.1


@dataclass(frozen=True, slots=True)
class Ratio:
    right: int
    of: int

    @property
    def rate(self) -> float | None:
        return self.right / self.of if self.of else None


@dataclass(frozen=True, slots=True)
class StateScore:
    """One state: how often it was recognized, and how often it was a wrong verdict."""

    found: Ratio
    false: int


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """Verdicts with a confidence in [low, high)."""

    low: float
    high: float
    confidence: float  # mean of the verdicts
    right: Ratio

    @property
    def off(self) -> float:
        return abs(self.confidence - self.right.right / self.right.of)


@dataclass(frozen=True, slots=True)
class CaseScore:
    """The score of cases whose state is known."""

    exact: Ratio
    kinds: Mapping[PowerState, StateScore]
    matrix: Mapping[PowerState, Mapping[PowerState, int]]  # label -> verdict -> how often
    reliability: tuple[ConfidenceBin, ...]
    models: Mapping[str, Ratio]
    missed: tuple[JudgedCase, ...]

    @property
    def hangs(self) -> StateScore:
        return self.kinds.get(PowerState.HANG, StateScore(Ratio(0, 0), 0))


def score_cases(judged: Sequence[JudgedCase]) -> CaseScore:
    labels = [state for state in PowerState if any(j.case.state is state for j in judged)]
    verdicts = [state for state in PowerState if any(j.verdict.state is state for j in judged)]
    matrix = {
        label: dict(Counter(j.verdict.state for j in judged if j.case.state is label).most_common()) for label in labels
    }
    kinds = {
        state: StateScore(
            Ratio(matrix.get(state, {}).get(state, 0), sum(matrix.get(state, {}).values())),
            sum(row.get(state, 0) for label, row in matrix.items() if label is not state),
        )
        for state in PowerState
        if state in labels or state in verdicts
    }
    return CaseScore(
        exact=correct_ratio(judged),
        kinds=kinds,
        matrix=matrix,
        reliability=reliability(judged),
        models=_models(judged),
        missed=tuple(j for j in judged if not j.right),
    )


def correct_ratio(judged: Sequence[JudgedCase]) -> Ratio:
    return Ratio(sum(j.right for j in judged), len(judged))


def reliability(judged: Sequence[JudgedCase]) -> tuple[ConfidenceBin, ...]:
    """How well the confidence fits: of verdicts with 0.9, nine in ten should be right.

    "unknown" claims nothing and is not counted. If the progress was given, cases for which nobody knew it are not
    counted either: they are judged the same with and without.
    """
    with_progress_known = any(j.with_progress for j in judged)
    claims = [j for j in judged if j.verdict.state is not PowerState.UNKNOWN and j.with_progress == with_progress_known]
    bins = []
    for number, each in groupby(sorted(claims, key=_bin_of), key=_bin_of):
        rows = list(each)
        mean = sum(j.verdict.confidence for j in rows) / len(rows)
        bins.append(
            ConfidenceBin(
                round(number * BIN_WIDTH, 1), round((number + 1) * BIN_WIDTH, 1), round(mean, 3), correct_ratio(rows)
            )
        )
    return tuple(bins)


def _bin_of(judged: JudgedCase) -> int:
    return int(round(judged.verdict.confidence, 2) * 100) // round(BIN_WIDTH * 100)


def _models(judged: Sequence[JudgedCase]) -> dict[str, Ratio]:
    names = sorted({j.case.gpu_model for j in judged})
    return {name: correct_ratio([j for j in judged if j.case.gpu_model == name]) for name in names}
