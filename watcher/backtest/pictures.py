"""Labelled pictures through triage, and once more as if nothing were known of their board."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from collectors.samples import HostStatus
from watcher.backtest.labelled import Case, LabelError
from watcher.judge.classify import ProgressWord
from watcher.judge.verdict import Verdict
from watcher.sources import GpuLog, SourceError, read_source
from watcher.triage import triage_source


class Knowledge(StrEnum):
    """What the judge is told of the steps."""

    NONE = "none"  # one picture, nothing else
    WORD = "word"  # what the reporter knew of them


@dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    verdict: Verdict
    told: bool  # a word on the steps was passed

    @property
    def right(self) -> bool:
        return self.verdict.state is self.case.state


def judge(cases: Iterable[Case], knowledge: Knowledge, *, leave_model_out: bool = False) -> tuple[Judged, ...]:
    """Each case as `wattwatch triage` judges its file.

    `leave_model_out`: without the board's name, so that the profile made from reports of this very model does not
    apply; only what holds for all boards, scaled by the limit, is left. That is all that is fitted to boards.
    """
    return tuple(
        _judged(case, case.word if knowledge is Knowledge.WORD else None, leave_model_out=leave_model_out)
        for case in cases
    )


def _judged(case: Case, word: ProgressWord | None, *, leave_model_out: bool) -> Judged:
    samples = _nameless(case.samples) if leave_model_out else case.samples
    try:
        source = read_source(case.name, orjson.dumps(samples))
    except SourceError as error:
        raise LabelError(f"case {case.name}: {error}") from None
    if not isinstance(source, GpuLog) or len(source.specs) != 1:
        raise LabelError(f"case {case.name}: is not one job's JSON samples")
    if case.readable and source.status is not HostStatus.OK:
        raise LabelError(f"case {case.name}: its samples cannot be read: each reading is a number or null")
    (triage,) = triage_source(case.name, source, word, None)
    return Judged(case, triage.verdict, word is not None)


def _nameless(samples: dict[str, Any]) -> dict[str, Any]:
    rounds = [
        {**each, "gpus": [{k: v for k, v in gpu.items() if k != "name"} for gpu in each.get("gpus", [])]}
        for each in samples["samples"]
    ]
    return {**samples, "gpu_model": None, "samples": rounds}
