"""A table, as the child sends it -> a `RankRecord`. Equal operations, stacks, groups and numbers become one object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from watcher.diagnose.flight.record import Frame, Group, GroupRecord, Launch, Operation, RankRecord

T = TypeVar("T")


class Interner:
    """What several records of one reading have in common is kept once: a thousand ranks launch alike."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        numbers: dict[int | None, int | None] = {}
        self.number: Callable[[int | None, int | None], int | None] = numbers.setdefault  # of millions

    def one(self, value: T) -> T:
        kept: T = self._kept.setdefault((type(value), value), value)  # atomic: threads share it
        return kept


def record_of(table: dict[str, Any], rank: int, source: str, interner: Interner) -> RankRecord:
    frames = [interner.one(Frame(interner.one(name), interner.one(file), line)) for name, file, line in table["frames"]]
    stacks = [interner.one(tuple(frames[place] for place in stack)) for stack in table["stacks"]]
    operations = [interner.one(_operation(row, interner)) for row in table["operations"]]
    groups, records, slots, operation, started, completed, retired, stack, created, timeouts = table["columns"]
    launches: list[list[Launch]] = [[] for _ in table["groups"]]
    rows = zip(
        map(interner.number, records, records),
        map(interner.number, slots, slots),
        map(operations.__getitem__, operation),
        started,
        completed,
        retired,
        map(stacks.__getitem__, stack),
        created,
        map(interner.number, timeouts, timeouts),
        strict=True,
    )
    for place, launch in zip(groups, map(Launch._make, rows), strict=True):
        launches[place].append(launch)
    parts = []
    for (name, description, members, *counts), own in zip(table["groups"], launches, strict=True):
        group = interner.one(Group(name, tuple(members), description))
        enqueued, begun, done, unseen_pairs = counts
        parts.append(GroupRecord(group, enqueued, begun, done, tuple(own), unseen_pairs))
    return RankRecord(rank, source, table["version"], table["library"], tuple(parts))


def _operation(row: list[Any], interner: Interner) -> Operation:
    backend, name, sizes_in, sizes_out, types_in, types_out, source, destination = row
    return Operation(
        interner.one(backend),
        interner.one(name),
        interner.one(tuple(map(tuple, sizes_in))),
        interner.one(tuple(map(tuple, sizes_out))),
        interner.one(tuple(types_in)),
        interner.one(tuple(types_out)),
        source,
        destination,
    )
