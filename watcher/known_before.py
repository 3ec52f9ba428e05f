"""What the watcher had learned of a recording's jobs before its first line, as records at its head.

Versioned apart from the recording: one that lacks it, or holds one of another version, is judged without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from watcher.judge.habits import Habits
from watcher.judge.job_sample import JobSpec
from watcher.judge.learned import Kind, Learned, is_sound

VERSION: Final = 1
KEY: Final = "known"
VALUES_A_RECORD: Final = 1000  # a line of a recording stays under a megabyte


@dataclass(frozen=True, slots=True)
class KnownBefore:
    """Values of boards, and the habits of jobs by name."""

    boards: tuple[Learned, ...] = ()
    habits: Mapping[str, Habits] = field(default_factory=dict)


def of_jobs(known: KnownBefore, specs: Sequence[JobSpec]) -> KnownBefore:
    """What is of these jobs and of the boards of their nodes."""
    nodes = {node for spec in specs for node in spec.nodes}
    jobs = {spec.name for spec in specs}
    boards = tuple(
        value for value in known.boards if value.node in nodes and (value.kind is not Kind.PLATEAU or value.job in jobs)
    )
    return KnownBefore(boards, {job: habits for job, habits in known.habits.items() if job in jobs})


VALUES: Final = TypeAdapter(tuple[Learned, ...])
HABITS: Final = TypeAdapter(dict[str, Habits])


def to_records(known: KnownBefore) -> Iterator[dict[str, Any]]:
    """One record, most often; of thousands of boards several."""
    habits: Any = orjson.loads(HABITS.dump_json(dict(known.habits)))
    for part in _parts(known.boards):
        yield {KEY: {"version": VERSION, "boards": orjson.loads(VALUES.dump_json(part)), "habits": habits}}
        habits = {}


def _parts(values: tuple[Learned, ...]) -> Iterator[tuple[Learned, ...]]:
    for start in range(0, max(1, len(values)), VALUES_A_RECORD):
        yield values[start : start + VALUES_A_RECORD]


def from_records(records: Iterable[Mapping[str, Any]]) -> KnownBefore | None:
    """None where there is none of this version. What makes no sense is left out: it is learned anew."""
    boards: list[Learned] = []
    habits: dict[str, Habits] = {}
    found = False
    for record in records:
        known = record.get(KEY)
        if not isinstance(known, dict) or known.get("version") != VERSION:
            continue
        try:
            values = VALUES.validate_python(known.get("boards", ()))
            habits |= HABITS.validate_python(known.get("habits", {}))
        except ValidationError:
            continue
        found = True
        boards += [value for value in values if is_sound(value)]
    return KnownBefore(tuple(boards), habits) if found else None
