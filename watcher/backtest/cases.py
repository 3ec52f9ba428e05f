"""Labeled data: GPU samples with the state that was reported for them, and logs or recordings with the intervals of
their states.

A case is JSON samples with a label beside them (`reported_state`, `expected_state` or `state`): alone in a file, in a
collection (`samples` of samples), or in a list `cases`. The label of a log or recording is a file beside it: for
run.csv it is run.csv.label.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wattwatch.watcher.common.formatting import describe_invalid_value
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState

SIDECAR_SUFFIX: Final = ".label.json"
LABEL_KEYS: Final = ("reported_state", "expected_state", "state")
SOURCE_KEYS: Final = ("source", "source_url")
UNKNOWN_MODEL: Final = "unknown"
LabelState = Literal[
    "compute", "communication", "starvation", "checkpoint", "hang", "crash", "gpu_fault", "straggler", "throttle",
    "completed", "unreachable", "idle",
]  # fmt: skip
# Every label that a case may have. Some, such as "crash", cannot be seen in a sample, and "unknown" is no state.
KNOWN_STATES: Final = frozenset({*get_args(LabelState), *(state.value for state in PowerState)})
# What the person who reported a state knew about the steps. An idle or faulty GPU has no steps.
REPORTED_PROGRESS: Final = {
    PowerState.HANG: StepProgress.STALLED,
    PowerState.COMPUTE: StepProgress.ADVANCING,
    PowerState.COMMUNICATION: StepProgress.ADVANCING,
    PowerState.STARVATION: StepProgress.ADVANCING,
    PowerState.CHECKPOINT: StepProgress.ADVANCING,
    PowerState.STRAGGLER: StepProgress.ADVANCING,
    PowerState.THROTTLE: StepProgress.ADVANCING,
}


class LabelError(Exception):
    """A file with labeled data cannot be used. One sentence: which one, why, what to do."""


@dataclass(frozen=True, slots=True)
class LabeledCase:
    """One labeled case: samples of a job. `label` is as reported, so it may be a state that samples cannot show."""

    name: str
    label: str
    gpu_model: str
    samples: dict[str, Any]  # as `wattwatch.watcher.recordings.inputs` reads them
    source: str  # where it was reported; the case's own name where that is not said

    @property
    def state(self) -> PowerState | None:
        """The reported state; None if samples cannot show it, or if it is unknown."""
        return next((s for s in PowerState if s.value == self.label and s is not PowerState.UNKNOWN), None)

    @property
    def known_progress(self) -> StepProgress | None:
        return None if self.state is None else REPORTED_PROGRESS.get(self.state)

    @property
    def readable(self) -> bool:
        """Whether some GPU of the last sample has both power and utilization; a verdict needs both."""
        samples = self.samples["samples"]
        gpus = samples[-1].get("gpus", []) if samples else []
        return any(g.get("power_w") is not None and g.get("util_pct") is not None for g in gpus)


class LabeledInterval(BaseModel):
    """The job was in `state` during this time; seconds count from the first sample of the log."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    state: LabelState
    from_seconds: float = Field(default=0.0, ge=0)
    to_seconds: float = Field(default=math.inf, gt=0)

    @model_validator(mode="after")
    def _ends_after_it_began(self) -> Self:
        if self.to_seconds <= self.from_seconds:
            raise ValueError(f"to_seconds {self.to_seconds:g} must be greater than from_seconds {self.from_seconds:g}")
        return self


class SidecarLabel(BaseModel):
    """The label file: {"state"} for the whole log, or {"intervals": [{"state", "from_seconds", "to_seconds"}]}."""

    model_config = ConfigDict(extra="forbid", strict=True)
    state: LabelState | None = None
    intervals: tuple[LabeledInterval, ...] = Field((), strict=False)
    gpu_model: str = UNKNOWN_MODEL
    source: str | None = None  # where it comes from, and under which license
    licence: str | None = None
    notes: str | None = None


@dataclass(frozen=True, slots=True)
class LabeledSeries:
    """A log or a recording, and what happened in it. In the time between the intervals nothing was wrong."""

    name: str
    path: Path
    intervals: tuple[LabeledInterval, ...]


@dataclass(frozen=True, slots=True)
class LabeledData:
    cases: tuple[LabeledCase, ...]
    series: tuple[LabeledSeries, ...]
    unlabeled: tuple[str, ...]  # files without a label


def read_labeled_data(directory: Path) -> LabeledData:
    """All labeled data below a directory, sorted by name. Raises LabelError."""
    if not directory.is_dir():
        raise LabelError(f"{directory}: not a directory. Name the directory that contains the labeled cases and logs")
    cases: list[LabeledCase] = []
    series: list[LabeledSeries] = []
    unlabeled: list[str] = []
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    described = {
        path.with_name(path.name.removesuffix(SIDECAR_SUFFIX)) for path in paths if path.name.endswith(SIDECAR_SUFFIX)
    }
    for path in paths:
        name = path.relative_to(directory).as_posix()
        if path.name.endswith(SIDECAR_SUFFIX):
            series.append(_series(name.removesuffix(SIDECAR_SUFFIX), path))
        elif path in described:
            continue
        elif path.suffix == ".json" and (found := tuple(_cases(path))):
            cases += found
        else:
            unlabeled.append(name)
    if not cases and not series:
        raise LabelError(
            f"{directory}: it contains no labeled data. Expected JSON samples with a `reported_state`, or a log with a "
            f"label file (for run.csv: run.csv{SIDECAR_SUFFIX})"
        )
    return LabeledData(tuple(cases), tuple(series), tuple(unlabeled))


def _series(name: str, sidecar: Path) -> LabeledSeries:
    path = sidecar.with_name(sidecar.name.removesuffix(SIDECAR_SUFFIX))
    if not path.is_file():
        raise LabelError(
            f"{sidecar}: this is the label of {path.name}, but there is no such file in the same directory"
        )
    try:
        label = SidecarLabel.model_validate_json(sidecar.read_bytes())
        whole = () if label.state is None else (LabeledInterval.model_validate({"state": label.state}),)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise LabelError(f"{sidecar}: {place + ': ' if place else ''}{describe_invalid_value(first)}") from None
    if whole and label.intervals:
        raise LabelError(f'{sidecar}: it contains both "state", for the whole log, and "intervals". Remove one of them')
    if not whole and not label.intervals:
        raise LabelError(
            f'{sidecar}: expected "state", or "intervals": [{{"state", "from_seconds", "to_seconds"}}, ...]'
        )
    return LabeledSeries(name, path, (*whole, *label.intervals))


def _cases(path: Path) -> Iterator[LabeledCase]:
    """The labeled cases of a JSON file; none if it is something else. Raises LabelError."""
    try:
        content: Any = orjson.loads(path.read_bytes())
    except (orjson.JSONDecodeError, OSError):
        return
    rows = content if isinstance(content, list) else [content]
    for row in rows:
        if not isinstance(row, dict):
            continue
        inner = row.get("cases", row.get("samples"))
        nested = [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []
        for i, each in enumerate(nested if any("samples" in n for n in nested) else [row]):
            label: Any = next((each[key] for key in LABEL_KEYS if each.get(key) is not None), None)
            if label is not None and isinstance(each.get("samples"), list):
                name = str(each.get("id") or each.get("name") or (path.stem if each is row else f"{path.stem} {i + 1}"))
                if not isinstance(label, str) or label not in KNOWN_STATES:
                    raise LabelError(
                        f"{path}: case {name}: unknown state {label!r}; known states: {', '.join(sorted(KNOWN_STATES))}"
                    )
                source = next((str(each[key]) for key in SOURCE_KEYS if each.get(key)), name)
                yield LabeledCase(name, label, str(each.get("gpu_model") or UNKNOWN_MODEL), each, source)
