"""Judges the labeled cases as `wattwatch triage` does, and scores the verdicts: how many are right, in which states, on
which GPU models, how well the confidence fits, and how much rests on a single GPU model or source."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, Final

import orjson

from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.backtest.cases import LabeledCase, LabelError
from wattwatch.watcher.detection.baselines.profiles import profile_for, published_measurements
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

    @property
    def is_claim(self) -> bool:
        return self.verdict.confidence >= CLAIM_CONFIDENCE and self.verdict.state is not PowerState.UNKNOWN


class LeftOut(StrEnum):
    """What a case is judged without. The shipped profiles come from such reports, so a case may be judged with a
    profile that was made from it."""

    NOTHING = "nothing"
    MODEL = "model"  # the profile of its GPU model: only the rules that hold for all GPUs apply
    SOURCE = "source"  # the profile of its GPU model, if the case's source is one of those that it was made from


def judge_cases(
    cases: Iterable[LabeledCase], knowledge: ProgressKnowledge, left_out: LeftOut = LeftOut.NOTHING
) -> tuple[JudgedCase, ...]:
    """Judges each case as `wattwatch triage` judges its file, without what is left out."""
    return tuple(
        _judge_case(case, case.known_progress if knowledge is ProgressKnowledge.WORD else None, left_out)
        for case in cases
    )


def _judge_case(case: LabeledCase, progress: StepProgress | None, left_out: LeftOut) -> JudgedCase:
    without_profile = left_out is LeftOut.MODEL or (left_out is LeftOut.SOURCE and _is_source_of_its_profile(case))
    samples = _without_board_names(case.samples) if without_profile else case.samples
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


REPOSITORY_PATTERN: Final = re.compile(r"github\.com/([\w.-]+/[\w.-]+)")


def source_key(source: str) -> str:
    """What counts as one source: a repository, with all its threads and files; otherwise the text itself."""
    repository = REPOSITORY_PATTERN.search(source)
    return source if repository is None else repository[1].lower()


def _is_source_of_its_profile(case: LabeledCase) -> bool:
    """The profile of the case's GPU model rests on the case's source, by its measurements or by its own words."""
    profile = profile_for(case.gpu_model, None)
    key = source_key(case.source)
    measured = {source_key(each.source) for each in published_measurements() if each.profile == profile.name}
    _, is_repository, name = key.rpartition("/")
    return key in measured or (bool(is_repository) and name in profile.source.lower())


# Verdicts compared with labels

# From this confidence on a verdict is a claim, and below it a doubt.
CLAIM_CONFIDENCE: Final = 0.6
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
class SourceScore:
    """The cases by the source that reported them: one source may have many that are alike."""

    sources: int
    mean_rate: float | None  # of the sources' own rates: each source counts once
    largest: str
    without_largest: Ratio


@dataclass(frozen=True, slots=True)
class CaseScore:
    """The score of cases whose state is known."""

    exact: Ratio
    claims: Ratio  # of the verdicts with a confidence of CLAIM_CONFIDENCE or more
    by_source: SourceScore
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
        claims=correct_ratio([j for j in judged if j.is_claim]),
        by_source=_by_source(judged),
        kinds=kinds,
        matrix=matrix,
        reliability=reliability(judged),
        models=_models(judged),
        missed=tuple(j for j in judged if not j.right),
    )


def correct_ratio(judged: Sequence[JudgedCase]) -> Ratio:
    return Ratio(sum(j.right for j in judged), len(judged))


def _by_source(judged: Sequence[JudgedCase]) -> SourceScore:
    sources: dict[str, list[JudgedCase]] = {}
    for each in judged:
        sources.setdefault(source_key(each.case.source), []).append(each)
    if not sources:
        return SourceScore(0, None, "", Ratio(0, 0))
    rates = [rate for rows in sources.values() if (rate := correct_ratio(rows).rate) is not None]
    largest = max(sources, key=lambda key: (len(sources[key]), key))
    others = [each for key, rows in sources.items() if key != largest for each in rows]
    return SourceScore(len(sources), round(statistics.mean(rates), 3), largest, correct_ratio(others))


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
