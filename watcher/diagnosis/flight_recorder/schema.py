"""What a field of a flight record must be, checked whole columns at a time. Standard library only: the child loads it.

Values are another machine's, perhaps a hostile user's: types are compared exactly (True is no number), numbers must fit
64 bits, text is cut down to what can be printed, and no value is ever shown in a message.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

NONE_TYPE: Final = type(None)
MAX_TEXT_CHARACTERS: Final = 4096  # a path; names of groups and operations are far shorter

TYPE_NAMES: Final = {
    int: "a whole number",
    float: "a number with a fraction",
    str: "text",
    bool: "true or false",
    list: "a list",
    tuple: "a tuple",
    dict: "a table",
    bytes: "bytes",
    NONE_TYPE: "nothing",
}


class MalformedRecord(ValueError):
    """What was decoded is no flight record. The message is a sentence: which field, what it is, what it should be."""


def type_name(value: object) -> str:
    return TYPE_NAMES.get(type(value), "something else")


def unexpected_type(field: str, value: object, expected: str) -> MalformedRecord:
    return MalformedRecord(f"{field} is {type_name(value)} where {expected} was expected")


def expect_type(field: str, value: Any, *types: type) -> Any:
    """The value, when its type is exactly one of these."""
    if type(value) not in types:
        raise unexpected_type(field, value, " or ".join(TYPE_NAMES[each] for each in types))
    return value


def expect_column_types(field: str, values: Sequence[object], *types: type) -> None:
    """All values of one field of the entries, in order."""
    if not set(map(type, values)) <= set(types):
        at, value = next((i, value) for i, value in enumerate(values) if type(value) not in types)
        raise unexpected_type(f"entries[{at}].{field}", value, " or ".join(TYPE_NAMES[each] for each in types))


def expect_item_types(field: str, values: Iterable[object], *types: type) -> None:
    """What is inside lists: no place is told."""
    for found in set(map(type, values)) - set(types):
        raise MalformedRecord(
            f"{field} holds {TYPE_NAMES.get(found, 'something else')} where {TYPE_NAMES[types[0]]} was expected"
        )


def expect_64_bits(field: str, values: Iterable[int]) -> None:
    try:
        array("q", values)  # the fastest way to look at many
    except OverflowError:
        raise MalformedRecord(f"{field} holds a number that does not fit 64 bits") from None


def printable_text(field: str, value: Any) -> str:
    """Printable: no line ends, no terminal codes, no half characters."""
    expect_type(field, value, str)
    if len(value) > MAX_TEXT_CHARACTERS:
        raise MalformedRecord(
            f"{field} is a text of {len(value):,} characters where at most {MAX_TEXT_CHARACTERS:,} were expected"
        )
    return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)


def flatten(lists: Iterable[Iterable[Any]]) -> chain[Any]:
    return chain.from_iterable(lists)


# The entries of a decoded flight record -> columns of whole numbers and the tables that they point into. Pure.
#
# Standard library only: the child loads it. A record has thousands of entries and few different operations and stacks, so
# fields are read and checked as columns, and only what differs is looked at by itself.

STATES: Final = ("scheduled", "started", "completed")
POINT_TO_POINT_NAME: Final = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
COALESCED: Final = "coalesced"
SIZE_FIELDS: Final = ("input_sizes", "output_sizes")
DTYPE_FIELDS: Final = ("input_dtypes", "output_dtypes")
COUNT_FIELDS: Final = ("collective_seq_id", "seq_id", "p2p_seq_id", "op_id", "record_id", "pg_id")
TIME_FIELDS: Final = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "timeout_ms")
ENTRY_FIELDS: Final = (
    *COUNT_FIELDS, *TIME_FIELDS, *SIZE_FIELDS, *DTYPE_FIELDS, "profiling_name", "process_group", "state", "retired", "is_p2p", "frames",
)  # fmt: skip
FRAME_FIELDS: Final = ("name", "filename", "line")


class EntryColumns(NamedTuple):
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


class ParsedEntries(NamedTuple):
    """`keys`: (pg_id, group's name or None, description) of each group that has entries."""

    keys: list[tuple[int, str | None, str]]
    columns: EntryColumns
    collective: list[int]  # collectives of the group when this was launched; of send and recv too
    alone: list[bool]  # send and recv
    counted_alike: list[bool]  # the recorder's count of all operations is the count of collectives
    watched: bool  # the recorder sees starts
    operations: list[list[Any]]  # backend, name, sizes in, sizes out, types in, types out, source, destination
    frames: list[list[Any]]  # function, file, line
    stacks: list[Sequence[int]]  # places in `frames`, innermost first


class _DistinctRows:
    """Different values in the order in which they came."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}
        self.rows: list[Any] = []

    def add(self, key: Any, row: Any) -> int:
        self.rows.append(row)
        self.places[key] = len(self.rows) - 1
        return self.places[key]


def parse_entries(entries: Sequence[Any]) -> ParsedEntries:
    """Raises `Malformed`."""
    expect_item_types("entries", entries, dict)
    told = _field_columns(entries)

    def column(field: str, *types: type) -> list[Any]:
        values = told.get(field) or [None] * len(entries)
        expect_column_types(field, values, *types)
        if int in types:
            expect_64_bits(field, filter(None, values))
        return values

    count = "collective_seq_id" if not entries or "collective_seq_id" in entries[0] else "seq_id"
    collective = column(count, int)
    operations, operation = _distinct_operations(column)
    named_two = [operations[place][-1] is not None for place in operation]
    told_alone, pair = column("is_p2p", bool, NONE_TYPE), column("p2p_seq_id", int, NONE_TYPE)
    alone = [two if told is None else told for told, two in zip(told_alone, named_two, strict=True)]
    pair = [n if own is None else own for own, n in zip(pair, collective, strict=True)]
    keys, group = _group_keys(column("pg_id", int), column("process_group", tuple, list, NONE_TYPE))
    state = _check_states(column("state", str))
    seen = column("time_discovered_started_ns", int, NONE_TYPE)
    ended = column("time_discovered_completed_ns", int, NONE_TYPE)
    watched = any(seen) or "started" in state
    frames, stacks, stack = _distinct_stacks(column("frames", list, tuple, NONE_TYPE))
    columns = EntryColumns(
        group,
        column("record_id", int),
        [own if two else n for own, two, n in zip(pair, alone, collective, strict=True)],
        operation,
        [s != "scheduled" or bool(t) for s, t in zip(state, seen, strict=True)] if watched else [None] * len(state),
        [s == "completed" or bool(t) for s, t in zip(state, ended, strict=True)],
        column("retired", bool),
        stack,
        [time or None for time in column("time_created_ns", int, NONE_TYPE)],
        column("timeout_ms", int, NONE_TYPE),
    )
    operation_ids = column("op_id", int, NONE_TYPE)
    alike = [op is None or op == n for op, n in zip(operation_ids, collective, strict=True)]
    result = ParsedEntries(keys, columns, collective, alone, alike, watched, operations, frames, stacks)
    if any(name == COALESCED for _, name, *_ in operations):
        _copy_batch_state(result)
    # A batch of sends and receives has no place of its own in the group's order, nor what does not tell its two ends.
    unplaced = [two and not named for two, named in zip(alone, named_two, strict=True)]
    return select_rows(result, [i for i, out in enumerate(unplaced) if not out]) if any(unplaced) else result


def _field_columns(entries: Sequence[Any]) -> dict[str, list[Any]]:
    """Field -> its value in each entry. All entries of a record have the same fields; if not, it takes longer."""
    fields = [field for field in ENTRY_FIELDS if any(field in entry for entry in (*entries[:1], *entries[-1:]))]
    if len(fields) > 1:
        with suppress(KeyError):
            return dict(zip(fields, map(list, zip(*map(itemgetter(*fields), entries), strict=True)), strict=True))
    return {field: [entry.get(field) for entry in entries] for field in ENTRY_FIELDS}


def _check_states(states: list[str]) -> list[str]:
    unknown = set(states) - set(STATES)
    if unknown:
        at = next(i for i, state in enumerate(states) if state in unknown)
        raise MalformedRecord(f"entries[{at}].state is none of {', '.join(STATES)}")
    return states


def _group_keys(ids: list[int], groups: list[Any]) -> tuple[list[tuple[int, str | None, str]], list[int]]:
    """1.4 has no `process_group`: the name is left open."""
    table = _DistinctRows()
    expect_item_types("process_group", flatten(group for group in groups if group is not None), str)

    def key(place: int, group: Any) -> tuple[int, str | None, str]:
        if group is None:
            return place, None, ""
        if len(group) != 2:
            raise MalformedRecord(f"process_group has {len(group)} parts where a name and a description were expected")
        return place, printable_text("process_group", group[0]), printable_text("process_group", group[1])

    places = []
    for i, group in zip(ids, groups, strict=True):
        named = (i, None if group is None else tuple(group))
        found = table.places.get(named)
        places.append(table.add(named, key(i, group)) if found is None else found)
    return table.rows, places


def _distinct_operations(column: Callable[..., list[Any]]) -> tuple[list[Any], list[int]]:
    """The different operations, and each entry's place among them."""
    parts = [column("profiling_name", str)]
    for field in SIZE_FIELDS:
        values = column(field, list, tuple)
        expect_item_types(field, flatten(values), list, tuple)
        expect_item_types(field, flatten(flatten(values)), int)
        parts.append([tuple(map(tuple, sizes)) for sizes in values])
    for field in DTYPE_FIELDS:
        values = [value or () for value in column(field, list, tuple, NONE_TYPE)]
        expect_item_types(field, flatten(values), str)
        parts.append([tuple(types) for types in values])
    table = _DistinctRows()
    places = []
    for key in zip(*parts, strict=True):
        found = table.places.get(key)
        places.append(table.add(key, _parse_operation(*key)) if found is None else found)
    return table.rows, places


def _parse_operation(told: str, sizes_in: Any, sizes_out: Any, types_in: Any, types_out: Any) -> list[Any]:
    for field, sizes in zip(SIZE_FIELDS, (sizes_in, sizes_out), strict=True):
        expect_64_bits(field, flatten(sizes))
    backend, colon, name = printable_text("profiling_name", told).partition(":")
    if not colon:
        backend, name = "", told
    types = [[printable_text("dtypes", each) for each in types] for types in (types_in, types_out)]
    two = POINT_TO_POINT_NAME.fullmatch(name)
    if two is None:
        return [backend, name, sizes_in, sizes_out, *types, None, None]
    verb, one, _, other = two.groups()
    ends = (int(one), int(other)) if verb == "send" else (int(other), int(one))
    return [backend, verb, sizes_in, sizes_out, *types, *ends]


def _distinct_stacks(stacks: list[Any]) -> tuple[list[list[Any]], list[Sequence[int]], list[int]]:
    """torch writes a frame once and points to it, so stacks of the same objects are looked at once."""
    frames, different = _DistinctRows(), _DistinctRows()
    same: dict[tuple[int, ...], int] = {(): different.add((), [])}
    places = []
    for stack in stacks:
        ids = tuple(map(id, stack)) if stack else ()
        place = same.get(ids)
        if place is None:
            inside = tuple([_frame_index(frame, frames) for frame in stack])
            found = different.places.get(inside)
            place = same[ids] = different.add(inside, inside) if found is None else found
        places.append(place)
    return frames.rows, different.rows, places


_frame_fields: Final = itemgetter(*FRAME_FIELDS)


def _frame_index(frame: Any, frames: _DistinctRows) -> int:
    if type(frame) is not dict:
        raise MalformedRecord("frames holds something other than tables of name, filename and line")
    try:
        function, file, line = _frame_fields(frame)
    except KeyError as error:
        raise MalformedRecord(f"a frame has no {error.args[0]}") from None
    if type(function) is not str or type(file) is not str or type(line) is not int:
        raise MalformedRecord("a frame's name, filename and line are not text, text and a whole number")

    found = frames.places.get((function, file, line))
    if found is not None:
        return found
    expect_64_bits("frames.line", (line,))
    row = [printable_text("frames.name", function), printable_text("frames.filename", file), line]
    return frames.add((function, file, line), row)


def _copy_batch_state(entries: ParsedEntries) -> None:
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


def select_rows(entries: ParsedEntries, rows: list[int]) -> ParsedEntries:
    """These entries alone."""

    def some(values: Any) -> list[Any]:
        return [values[row] for row in rows]

    return entries._replace(
        columns=EntryColumns._make(map(some, entries.columns)),
        collective=some(entries.collective),
        alone=some(entries.alone),
        counted_alike=some(entries.counted_alike),
    )


# A decoded flight record, in any of torch's forms -> one table that JSON can carry. Pure; every field is checked.
#
# Standard library only: the child loads it. What differs between forms, and what is made of it:
#
#     1.4        one count `seq_id`; no `pg_status`; entries tell their group by number only
#     2.1, 2.4   `collective_seq_id` and `p2p_seq_id`, the group's name; 2.4 brings `pg_status` and the timeout
#     2.9, 2.10  the library's version, named `nccl_version` and then `comm_lib_version`
#     JSON       no stacks; lists for tuples; counts as text; 0 for a time that is not set; no `entries` when empty
#     gloo       `pg_config` under "", which each new group overwrites
#
# A later version with these fields is read. Counts: -1 is "never", so 0; what was not told is None. The recorder's own
# counts are of its last operation of any kind, so where send and recv are among them, entries decide.

STATUS_COUNT_FIELDS: Final = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
MAX_ENTRIES: Final = 200_000  # torch keeps 2,000; jobs are seen with 20,000
MAX_GROUPS: Final = 20_000
MAX_MEMBERS: Final = 1_000_000

GroupConfig = dict[str, tuple[str, list[int]]]  # name -> description, members
GroupCounts = tuple[int | None, int | None, int | None]  # enqueued, started, completed; None: -1 in the record
UNKNOWN_COUNTS: Final[GroupCounts] = (None, None, None)


def build_record_table(decoded: Any, keep: int = MAX_ENTRIES) -> dict[str, Any]:
    """The table that `tables.py` makes a record of: with the newest `keep` launches, and the oldest `keep` open ones.
    Raises `Malformed`."""
    if type(decoded) is not dict:
        raise MalformedRecord(
            f"it holds {type_name(decoded)} where a table of version, pg_config and entries was expected"
        )
    if "version" not in decoded or not ({"entries", "pg_config", "pg_status"} & decoded.keys()):
        raise MalformedRecord(
            "it has no version with pg_config or entries: no flight record, or one of torch 2.2 or older"
        )
    version = printable_text("version", decoded["version"])
    library = printable_text("comm_lib_version", decoded.get("comm_lib_version", decoded.get("nccl_version", "")))
    rows = expect_type("entries", decoded.get("entries", []), list, tuple)
    if len(rows) > MAX_ENTRIES:
        raise MalformedRecord(f"it has {len(rows):,} entries where at most {MAX_ENTRIES:,} were expected")
    entries = parse_entries(rows)
    config = _parse_config(decoded.get("pg_config", {}))
    status = _parse_status(decoded.get("pg_status", {}))
    groups = _group_rows(entries, config, status)
    entries = _limit_launches(entries, keep)
    return {
        "version": version,
        "library": library,
        "groups": groups,
        "operations": entries.operations,
        "frames": entries.frames,
        "stacks": entries.stacks,
        "columns": entries.columns,
    }


def _parse_config(told: Any) -> GroupConfig:
    expect_type("pg_config", told, dict)
    expect_item_types("pg_config", told, str)
    if len(told) > MAX_GROUPS:
        raise MalformedRecord(f"pg_config has {len(told):,} groups where at most {MAX_GROUPS:,} were expected")
    found = {}
    for name, row in told.items():
        expect_type("pg_config's group", row, dict)
        members = _parse_members(row.get("ranks", ""))
        found[printable_text("pg_config", name)] = printable_text("pg_config.desc", row.get("desc", "")), members
    return found


def _parse_members(told: Any) -> list[int]:
    """ "[0, 1]" in all forms so far."""
    if type(told) is str:
        try:
            told = json.loads(told) if told.strip() else []
        except ValueError:
            raise MalformedRecord('pg_config.ranks is text, and not like "[0, 1]"') from None
    expect_type("pg_config.ranks", told, list, tuple)
    if len(told) > MAX_MEMBERS:
        raise MalformedRecord(f"pg_config.ranks has {len(told):,} members")
    expect_item_types("pg_config.ranks", told, int)
    expect_64_bits("pg_config.ranks", told)
    return list(told)


def _parse_status(told: Any) -> dict[int, GroupCounts]:
    expect_type("pg_status", told, dict)
    expect_item_types("pg_status", told, str, int)
    found: dict[int, GroupCounts] = {}
    for place, row in told.items():
        expect_type("pg_status's group", row, dict)
        enqueued, started, completed = (_parse_count(field, row.get(field)) for field in STATUS_COUNT_FIELDS)
        found[_parse_integer("pg_status", place)] = enqueued, started, completed
    return found


def _parse_count(field: str, told: Any) -> int | None:
    return None if told is None else _parse_integer(field, expect_type(field, told, int, str, NONE_TYPE))


def _parse_integer(field: str, told: int | str) -> int:
    if type(told) is str:
        if not (len(told) < 20 and told.removeprefix("-").isascii() and told.removeprefix("-").isdigit()):
            raise MalformedRecord(f"{field} is text where a whole number was expected")
        told = int(told)
    expect_64_bits(field, (int(told),))
    return int(told)


def _group_rows(entries: ParsedEntries, config: GroupConfig, status: dict[int, GroupCounts]) -> list[list[Any]]:
    """Rows of name, description, members, three counts, whether sends and receives are not written down. Those with
    entries come first, in the order of `keys`."""
    named = _group_names(entries, config, status)
    watched = entries.watched or any(started not in (None, -1) for _, started, _ in status.values())
    rows: list[list[Any]] = []
    of_group: list[list[int]] = [[] for _ in entries.keys]
    for row, place in enumerate(entries.columns.group):
        of_group[place].append(row)
    for place, (number, _, told) in enumerate(entries.keys):
        name = named[number]
        description, members = config.get(name, ("", []))
        if name not in config and "" in config and len({*status, *named}) == 1:
            members = config[""][1]  # gloo, and no second group has overwritten it
        counts = _counts_from_entries(entries, of_group[place], status.get(number, UNKNOWN_COUNTS), watched)
        rows.append(
            [name, told or description, members, *counts, _has_unrecorded_point_to_point(entries, of_group[place])]
        )
    with_entries = {number for number, _, _ in entries.keys}
    ids = {name: number for number, name in named.items() if number not in with_entries}
    without = [name for name in config if name not in {row[0] for row in rows}]
    for name in sorted(without, key=_name_order):
        if name == "" and (rows or len(status) > 1):
            continue  # gloo: of one of the groups above, or nobody knows of which
        description, members = config[name]
        if name == "":
            name, description = "0", description or "default_pg"
            ids.setdefault("0", next(iter(status), 0))
        counts = _counts_from_status(status.get(ids.get(name, -1), UNKNOWN_COUNTS), watched)
        rows.append([name, description, members, *counts, False])
    return rows


def _name_order(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isascii() and name.isdigit() and len(name) < 20 else (1, 0, name)


def _group_names(entries: ParsedEntries, config: GroupConfig, status: dict[int, GroupCounts]) -> dict[int, str]:
    """The name of each numbered group. Entries tell it; else groups were numbered in the order of their names, which is
    believed where there are as many of each and no entry says otherwise."""
    told = {number: name for number, name, _ in entries.keys if name is not None}
    numbers = sorted({*status, *(number for number, _, _ in entries.keys)})
    names = sorted(config, key=_name_order)
    if len(numbers) == len(names) and all(name.isascii() and name.isdigit() for name in names):
        in_order = dict(zip(numbers, names, strict=True))
        if told.items() <= in_order.items():
            return in_order
    open_names = [name for name in names if name not in told.values() and name]
    open_numbers = [number for number in numbers if number not in told]
    if len(open_names) == len(open_numbers) == 1:
        told[open_numbers[0]] = open_names[0]
    for number, _, _ in entries.keys:
        told.setdefault(number, f"number {number}")
    return told


def _counts_from_status(counts: GroupCounts, watched: bool) -> GroupCounts:
    enqueued, started, completed = (None if count is None else max(count, 0) for count in counts)
    return enqueued, started if watched else None, completed


def _counts_from_entries(entries: ParsedEntries, rows: list[int], told: GroupCounts, watched: bool) -> GroupCounts:
    """Of a group with entries. Each entry, of send and recv too, tells how many collectives its group had by then."""
    columns = entries.columns
    enqueued, started, completed = _counts_from_status(told, watched)
    newest = max((entries.collective[i] for i in rows), default=0)
    if not any(entries.alone[i] or not entries.counted_alike[i] for i in rows):
        return max(newest, enqueued or 0), started, completed
    unfinished = [columns.slot[i] for i in rows if not entries.alone[i] and is_pending(entries, i)]
    waiting = [columns.slot[i] for i in rows if not entries.alone[i] and columns.started[i] is False]
    return newest, min(waiting, default=newest + 1) - 1 if watched else None, min(unfinished, default=newest + 1) - 1


def _has_unrecorded_point_to_point(entries: ParsedEntries, rows: list[int]) -> bool:
    """gloo counts sends and receives with all that it does, and writes down only the collectives."""
    return any(
        not entries.counted_alike[i] and entries.operations[entries.columns.operation[i]][0] == "gloo" for i in rows
    ) and not any(entries.alone[i] for i in rows)


def is_pending(entries: ParsedEntries, row: int) -> bool:
    """As `Launch.open`."""
    columns = entries.columns
    gloo = entries.operations[columns.operation[row]][0] == "gloo"
    return not columns.completed[row] and not (columns.retired[row] and gloo)


def _limit_launches(entries: ParsedEntries, keep: int) -> ParsedEntries:
    total: Sequence[int] = range(len(entries.alone))
    if len(total) <= keep:
        return entries
    unfinished = [row for row in total if is_pending(entries, row)]
    return select_rows(entries, sorted({*unfinished[:keep], *total[-keep:]}))
