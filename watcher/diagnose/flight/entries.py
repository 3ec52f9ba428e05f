"""The entries of a decoded flight record -> columns of whole numbers and the tables that they point into. Pure.

Standard library only: the child loads it. A record has thousands of entries and few different operations and stacks, so
fields are read and checked as columns, and only what differs is looked at by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final, NamedTuple

from watcher.diagnose.flight.shapes import (
    NOTHING,
    Malformed,
    expect_all,
    expect_column,
    expect_range,
    flat,
    text,
)

STATES: Final = ("scheduled", "started", "completed")
BETWEEN_TWO: Final = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
COALESCED: Final = "coalesced"
SIZES: Final = ("input_sizes", "output_sizes")
TYPES: Final = ("input_dtypes", "output_dtypes")
COUNTS: Final = ("collective_seq_id", "seq_id", "p2p_seq_id", "op_id", "record_id", "pg_id")
TIMES: Final = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "timeout_ms")
FIELDS: Final = (
    *COUNTS, *TIMES, *SIZES, *TYPES, "profiling_name", "process_group", "state", "retired", "is_p2p", "frames",
)  # fmt: skip
FRAME: Final = ("name", "filename", "line")


class Columns(NamedTuple):
    """One row an entry, oldest first. `group`, `operation` and `stack` are places in tables."""

    group: list[int]  # in `keys`
    record: list[int]
    slot: list[int]
    operation: list[int]
    started: list[bool | None]
    completed: list[bool]
    retired: list[bool]
    stack: list[int]
    created_ns: list[int | None]
    timeout_ms: list[int | None]


class Entries(NamedTuple):
    """`keys`: (pg_id, group's name or None, description) of each group that has entries."""

    keys: list[tuple[int, str | None, str]]
    columns: Columns
    collective: list[int]  # collectives of the group when this was launched; of send and recv too
    alone: list[bool]  # send and recv
    counted_alike: list[bool]  # the recorder's count of all operations is the count of collectives
    watched: bool  # the recorder sees starts
    operations: list[list[Any]]  # backend, name, sizes in, sizes out, types in, types out, source, destination
    frames: list[list[Any]]  # function, file, line
    stacks: list[Sequence[int]]  # places in `frames`, innermost first


class _Table:
    """Different values in the order in which they came."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}
        self.rows: list[Any] = []

    def add(self, key: Any, row: Any) -> int:
        self.rows.append(row)
        self.places[key] = len(self.rows) - 1
        return self.places[key]


def read_entries(entries: Sequence[Any]) -> Entries:
    """Raises `Malformed`."""
    expect_all("entries", entries, dict)
    told = _told(entries)

    def column(field: str, *types: type) -> list[Any]:
        values = told.get(field) or [None] * len(entries)
        expect_column(field, values, *types)
        if int in types:
            expect_range(field, filter(None, values))
        return values

    count = "collective_seq_id" if not entries or "collective_seq_id" in entries[0] else "seq_id"
    collective = column(count, int)
    operations, operation = _operations(column)
    named_two = [operations[place][-1] is not None for place in operation]
    told_alone, pair = column("is_p2p", bool, NOTHING), column("p2p_seq_id", int, NOTHING)
    alone = [two if told is None else told for told, two in zip(told_alone, named_two, strict=True)]
    pair = [n if own is None else own for own, n in zip(pair, collective, strict=True)]
    keys, group = _keys(column("pg_id", int), column("process_group", tuple, list, NOTHING))
    state = _states(column("state", str))
    seen = column("time_discovered_started_ns", int, NOTHING)
    ended = column("time_discovered_completed_ns", int, NOTHING)
    watched = any(seen) or "started" in state
    frames, stacks, stack = _stacks(column("frames", list, tuple, NOTHING))
    columns = Columns(
        group,
        column("record_id", int),
        [own if two else n for own, two, n in zip(pair, alone, collective, strict=True)],
        operation,
        [s != "scheduled" or bool(t) for s, t in zip(state, seen, strict=True)] if watched else [None] * len(state),
        [s == "completed" or bool(t) for s, t in zip(state, ended, strict=True)],
        column("retired", bool),
        stack,
        [time or None for time in column("time_created_ns", int, NOTHING)],
        column("timeout_ms", int, NOTHING),
    )
    operation_ids = column("op_id", int, NOTHING)
    alike = [op is None or op == n for op, n in zip(operation_ids, collective, strict=True)]
    result = Entries(keys, columns, collective, alone, alike, watched, operations, frames, stacks)
    if any(name == COALESCED for _, name, *_ in operations):
        _share_state_of_batches(result)
    # A batch of sends and receives has no place of its own in the group's order, nor what does not tell its two ends.
    unplaced = [two and not named for two, named in zip(alone, named_two, strict=True)]
    return kept(result, [i for i, out in enumerate(unplaced) if not out]) if any(unplaced) else result


def _told(entries: Sequence[Any]) -> dict[str, list[Any]]:
    """Field -> its value in each entry. All entries of a record have the same fields; if not, it takes longer."""
    fields = [field for field in FIELDS if any(field in entry for entry in (*entries[:1], *entries[-1:]))]
    if len(fields) > 1:
        with suppress(KeyError):
            return dict(zip(fields, map(list, zip(*map(itemgetter(*fields), entries), strict=True)), strict=True))
    return {field: [entry.get(field) for entry in entries] for field in FIELDS}


def _states(states: list[str]) -> list[str]:
    unknown = set(states) - set(STATES)
    if unknown:
        at = next(i for i, state in enumerate(states) if state in unknown)
        raise Malformed(f"entries[{at}].state is none of {', '.join(STATES)}")
    return states


def _keys(ids: list[int], groups: list[Any]) -> tuple[list[tuple[int, str | None, str]], list[int]]:
    """1.4 has no `process_group`: the name is left open."""
    table = _Table()
    expect_all("process_group", flat(group for group in groups if group is not None), str)

    def key(place: int, group: Any) -> tuple[int, str | None, str]:
        if group is None:
            return place, None, ""
        if len(group) != 2:
            raise Malformed(f"process_group has {len(group)} parts where a name and a description were expected")
        return place, text("process_group", group[0]), text("process_group", group[1])

    places = []
    for i, group in zip(ids, groups, strict=True):
        named = (i, None if group is None else tuple(group))
        found = table.places.get(named)
        places.append(table.add(named, key(i, group)) if found is None else found)
    return table.rows, places


def _operations(column: Callable[..., list[Any]]) -> tuple[list[Any], list[int]]:
    """The different operations, and each entry's place among them."""
    parts = [column("profiling_name", str)]
    for field in SIZES:
        values = column(field, list, tuple)
        expect_all(field, flat(values), list, tuple)
        expect_all(field, flat(flat(values)), int)
        parts.append([tuple(map(tuple, sizes)) for sizes in values])
    for field in TYPES:
        values = [value or () for value in column(field, list, tuple, NOTHING)]
        expect_all(field, flat(values), str)
        parts.append([tuple(types) for types in values])
    table = _Table()
    places = []
    for key in zip(*parts, strict=True):
        found = table.places.get(key)
        places.append(table.add(key, _operation(*key)) if found is None else found)
    return table.rows, places


def _operation(told: str, sizes_in: Any, sizes_out: Any, types_in: Any, types_out: Any) -> list[Any]:
    for field, sizes in zip(SIZES, (sizes_in, sizes_out), strict=True):
        expect_range(field, flat(sizes))
    backend, colon, name = text("profiling_name", told).partition(":")
    if not colon:
        backend, name = "", told
    types = [[text("dtypes", each) for each in types] for types in (types_in, types_out)]
    two = BETWEEN_TWO.fullmatch(name)
    if two is None:
        return [backend, name, sizes_in, sizes_out, *types, None, None]
    verb, one, _, other = two.groups()
    ends = (int(one), int(other)) if verb == "send" else (int(other), int(one))
    return [backend, verb, sizes_in, sizes_out, *types, *ends]


def _stacks(stacks: list[Any]) -> tuple[list[list[Any]], list[Sequence[int]], list[int]]:
    """torch writes a frame once and points to it, so stacks of the same objects are looked at once."""
    frames, different = _Table(), _Table()
    same: dict[tuple[int, ...], int] = {(): different.add((), [])}
    places = []
    for stack in stacks:
        ids = tuple(map(id, stack)) if stack else ()
        place = same.get(ids)
        if place is None:
            inside = tuple([_frame(frame, frames) for frame in stack])
            found = different.places.get(inside)
            place = same[ids] = different.add(inside, inside) if found is None else found
        places.append(place)
    return frames.rows, different.rows, places


_parts: Final = itemgetter(*FRAME)


def _frame(frame: Any, frames: _Table) -> int:
    if type(frame) is not dict:
        raise Malformed("frames holds something other than tables of name, filename and line")
    try:
        function, file, line = _parts(frame)
    except KeyError as error:
        raise Malformed(f"a frame has no {error.args[0]}") from None
    if type(function) is not str or type(file) is not str or type(line) is not int:
        raise Malformed("a frame's name, filename and line are not text, text and a whole number")

    found = frames.places.get((function, file, line))
    if found is not None:
        return found
    expect_range("frames.line", (line,))
    row = [text("frames.name", function), text("frames.filename", file), line]
    return frames.add((function, file, line), row)


def _share_state_of_batches(entries: Entries) -> None:
    """NCCL watches a batch as one, under the name "coalesced"; the launches inside it stay "scheduled" for ever. They
    share the batch's count, and here take its state."""
    columns = entries.columns
    names = [entries.operations[place][1] for place in columns.operation]
    keys = list(zip(columns.group, entries.alone, columns.slot, strict=True))
    batches = {keys[i]: i for i, name in enumerate(names) if name == COALESCED}
    for i, key in enumerate(keys):
        batch = batches.get(key)
        if batch is not None:
            columns.started[i] = columns.started[batch]
            columns.completed[i] = columns.completed[batch]
            columns.retired[i] = columns.retired[batch]


def kept(entries: Entries, rows: list[int]) -> Entries:
    """These entries alone."""

    def some(values: Any) -> list[Any]:
        return [values[row] for row in rows]

    return entries._replace(
        columns=Columns._make(map(some, entries.columns)),
        collective=some(entries.collective),
        alone=some(entries.alone),
        counted_alike=some(entries.counted_alike),
    )
