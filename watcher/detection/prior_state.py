"""What the watcher had learned about a recording's jobs before its first line, stored as records at its head.

Versioned separately from the recording: one without prior state, or with another version of it, is replayed without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from wattwatch.watcher.detection.baselines.baseline import Baseline, BaselineKind, is_valid_baseline
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.detection.trackers.observation import JobHistory

PRIOR_STATE_VERSION: Final = 1
PRIOR_STATE_KEY: Final = "known"
MAX_VALUES_PER_RECORD: Final = 1000  # a line of a recording stays under a megabyte


@dataclass(frozen=True, slots=True)
class PriorState:
    """Baselines of GPUs, and what was learned about jobs, by name. Field names are part of the recording format."""

    boards: tuple[Baseline, ...] = ()
    habits: Mapping[str, JobHistory] = field(default_factory=dict)


def restrict_to_jobs(known: PriorState, specs: Sequence[JobSpec]) -> PriorState:
    """Only what concerns these jobs and the GPUs of their nodes."""
    nodes = {node for spec in specs for node in spec.nodes}
    jobs = {spec.name for spec in specs}
    boards = tuple(
        value
        for value in known.boards
        if value.node in nodes and (value.kind is not BaselineKind.PLATEAU or value.job in jobs)
    )
    return PriorState(boards, {job: habits for job, habits in known.habits.items() if job in jobs})


BASELINES_ADAPTER: Final = TypeAdapter(tuple[Baseline, ...])
HISTORIES_ADAPTER: Final = TypeAdapter(dict[str, JobHistory])


def prior_state_to_records(known: PriorState) -> Iterator[dict[str, Any]]:
    """Usually one record; several for thousands of GPUs."""
    habits: Any = orjson.loads(HISTORIES_ADAPTER.dump_json(dict(known.habits)))
    for part in _parts(known.boards):
        yield {
            PRIOR_STATE_KEY: {
                "version": PRIOR_STATE_VERSION,
                "boards": orjson.loads(BASELINES_ADAPTER.dump_json(part)),
                "habits": habits,
            }
        }
        habits = {}


def _parts(values: tuple[Baseline, ...]) -> Iterator[tuple[Baseline, ...]]:
    for start in range(0, max(1, len(values)), MAX_VALUES_PER_RECORD):
        yield values[start : start + MAX_VALUES_PER_RECORD]


def prior_state_from_records(records: Iterable[Mapping[str, Any]]) -> PriorState | None:
    """None where there is no prior state of this version. Invalid values are left out, and are learned again."""
    boards: list[Baseline] = []
    habits: dict[str, JobHistory] = {}
    found = False
    for record in records:
        known = record.get(PRIOR_STATE_KEY)
        if not isinstance(known, dict) or known.get("version") != PRIOR_STATE_VERSION:
            continue
        try:
            values = BASELINES_ADAPTER.validate_python(known.get("boards", ()))
            habits |= HISTORIES_ADAPTER.validate_python(known.get("habits", {}))
        except ValidationError:
            continue
        found = True
        boards += [value for value in values if is_valid_baseline(value)]
    return PriorState(tuple(boards), habits) if found else None
