"""A table, as the child sends it -> a `RankRecord`. Equal operations, stacks, groups and numbers become one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from watcher.diagnose.flight.record import Frame, Group, GroupRecord, Launch, Operation, RankRecord

T = TypeVar("T")


class Same:
    """What several records of one reading have in common is kept once: a thousand ranks launch the same."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        self.one = self._kept.setdefault  # atomic: threads share it
        numbers: dict[int | None, int | None] = {}
        self.number: Callable[[int | None, int | None], int | None] = numbers.setdefault


def record_of(table: dict[str, Any], rank: int, source: str, same: Same) -> RankRecord:
    frames = [_one(same, Frame(_one(same, name), _one(same, file), line)) for name, file, line in table["frames"]]
    stacks = [_one(same, tuple(frames[place] for place in stack)) for stack in table["stacks"]]
    operations = [_one(same, _operation(row, same)) for row in table["operations"]]
    groups, records, slots, operation, started, completed, retired, stack, created, timeouts = table["columns"]
    launches: list[list[Launch]] = [[] for _ in table["groups"]]
    rows = zip(
        map(same.number, records, records),
        map(same.number, slots, slots),
        map(operations.__getitem__, operation),
        started,
        completed,
        retired,
        map(stacks.__getitem__, stack),
        created,
        map(same.number, timeouts, timeouts),
        strict=True,
    )
    for place, launch in zip(groups, map(Launch._make, rows), strict=True):
        launches[place].append(launch)
    parts = []
    for (name, description, members, *counts), own in zip(table["groups"], launches, strict=True):
        group = _one(same, Group(name, tuple(members), description))
        enqueued, begun, done, unseen_pairs = counts
        parts.append(GroupRecord(group, enqueued, begun, done, tuple(own), unseen_pairs))
    return RankRecord(rank, source, table["version"], table["library"], tuple(parts))


def _operation(row: list[Any], same: Same) -> Operation:
    backend, name, sizes_in, sizes_out, types_in, types_out, source, destination = row
    return Operation(
        _one(same, backend),
        _one(same, name),
        _one(same, tuple(map(tuple, sizes_in))),
        _one(same, tuple(map(tuple, sizes_out))),
        _one(same, tuple(types_in)),
        _one(same, tuple(types_out)),
        source,
        destination,
    )


def _one(same: Same, value: T) -> T:
    kept: T = same.one((type(value), value), value)
    return kept
