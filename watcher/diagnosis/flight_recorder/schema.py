"""A decoded flight record, in any of PyTorch's formats, to one table that JSON can carry. Every field is checked.

Standard library only: the sandbox worker imports this module. The formats differ as follows:

    1.4        one counter, `seq_id`; no `pg_status`; entries identify their group by number only
    2.1, 2.4   `collective_seq_id` and `p2p_seq_id`, and the group's name; 2.4 adds `pg_status` and the timeout
    2.9, 2.10  the library version, first named `nccl_version`, then `comm_lib_version`
    JSON       no stacks; lists instead of tuples; counts as strings; 0 for an unset time; no `entries` if there are
    none Gloo       `pg_config` has a single key "", which each new group overwrites

A later version with these fields is accepted. Counts: -1 means never and becomes 0; a count that the record lacks is
None. The counts in `pg_status` are of the last operation of any kind, so for a group with sends and receives the
entries decide (seen in records of pipeline-parallel jobs with NCCL 2.27).

Values come from another machine, perhaps from a hostile user: types are compared exactly (True is not an integer),
integers must fit 64 bits, text is reduced to printable characters, and no value is ever repeated in an error message.
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

# Limits against hostile files. Far above what real jobs produce.
MAX_ENTRIES: Final = 200_000  # PyTorch keeps 2,000 by default; some jobs are configured to keep 20,000
MAX_GROUPS: Final = 20_000
MAX_MEMBERS: Final = 1_000_000
MAX_TEXT_CHARACTERS: Final = 4096  # enough for a path; names of groups and operations are far shorter

STATES: Final = ("scheduled", "started", "completed")
POINT_TO_POINT_NAME: Final = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
COALESCED: Final = "coalesced"
SIZE_FIELDS: Final = ("input_sizes", "output_sizes")
DTYPE_FIELDS: Final = ("input_dtypes", "output_dtypes")
COUNT_FIELDS: Final = ("collective_seq_id", "seq_id", "p2p_seq_id", "op_id", "record_id", "pg_id")
TIME_FIELDS: Final = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "timeout_ms")
ENTRY_FIELDS: Final = (
    *COUNT_FIELDS,
    *TIME_FIELDS,
    *SIZE_FIELDS,
    *DTYPE_FIELDS,
    "profiling_name",
    "process_group",
    "state",
    "retired",
    "is_p2p",
    "frames",
)
FRAME_FIELDS: Final = ("name", "filename", "line")
STATUS_COUNT_FIELDS: Final = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")

NONE_TYPE: Final = type(None)
TYPE_NAMES: Final = {
    int: "an integer",
    float: "a float",
    str: "a string",
    bool: "a boolean",
    list: "a list",
    tuple: "a tuple",
    dict: "a dict",
    bytes: "bytes",
    NONE_TYPE: "null",
}

GroupConfig = dict[str, tuple[str, list[int]]]  # name -> description, members
GroupCounts = tuple[int | None, int | None, int | None]  # enqueued, started, completed; None: not in the record
UNKNOWN_COUNTS: Final[GroupCounts] = (None, None, None)


class MalformedRecord(ValueError):
    """The data is not a flight record. The message says which field is wrong, what it is, and what it should be."""


class EntryColumns(NamedTuple):
    """One row per entry, oldest first. `group`, `operation` and `stack` are indices into tables."""

    group: list[int]  # index into ParsedEntries.keys
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
    """A record has thousands of entries, but few distinct operations and stacks: these are stored once, in tables."""

    keys: list[tuple[int, str | None, str]]  # groups that have entries: pg_id, name or None, description
    columns: EntryColumns
    collective: list[int]  # how many collectives the group had launched by then; for sends and receives too
    point_to_point: list[bool]
    counts_match: list[bool]  # the recorder's count of all operations (op_id) equals its count of collectives
    starts_recorded: bool  # the recorder sees starts
    operations: list[list[Any]]  # backend, name, input sizes, output sizes, input types, output types, source, dest.
    frames: list[list[Any]]  # function, file, line
    stacks: list[Sequence[int]]  # indices into `frames`, innermost first


def build_record_table(decoded: Any, max_launches: int = MAX_ENTRIES) -> dict[str, Any]:
    """The table that `loader.build_rank_record` turns into a RankRecord.

    Keeps the newest `max_launches` launches and as many of the oldest pending ones. Raises MalformedRecord.
    """
    if type(decoded) is not dict:
        raise MalformedRecord(
            f"the file contains {type_name(decoded)} instead of a dict with version, pg_config and entries"
        )
    if "version" not in decoded or not ({"entries", "pg_config", "pg_status"} & decoded.keys()):
        raise MalformedRecord(
            "the file lacks the fields of a flight record (version, pg_config, entries) or is from torch 2.2 or older"
        )
    version = printable_text("version", decoded["version"])
    library = printable_text("comm_lib_version", decoded.get("comm_lib_version", decoded.get("nccl_version", "")))
    rows = expect_type("entries", decoded.get("entries", []), list, tuple)
    if len(rows) > MAX_ENTRIES:
        raise MalformedRecord(f"the file has {len(rows):,} entries, more than the limit of {MAX_ENTRIES:,}")
    entries = parse_entries(rows)
    config = _parse_config(decoded.get("pg_config", {}))
    status = _parse_status(decoded.get("pg_status", {}))
    groups = _group_rows(entries, config, status)
    entries = _limit_launches(entries, max_launches)
    return {
        "version": version,
        "library": library,
        "groups": groups,
        "operations": entries.operations,
        "frames": entries.frames,
        "stacks": entries.stacks,
        "columns": entries.columns,
    }


def _limit_launches(entries: ParsedEntries, max_launches: int) -> ParsedEntries:
    """The oldest pending launches are kept too: the first operation that never finished is where the hang began."""
    rows: Sequence[int] = range(len(entries.point_to_point))
    if len(rows) <= max_launches:
        return entries
    pending = [row for row in rows if is_pending(entries, row)]
    return select_rows(entries, sorted({*pending[:max_launches], *rows[-max_launches:]}))


# Entries: checked and converted column by column, which is several times faster than entry by entry.


class _DistinctRows:
    """Distinct values in the order in which they first appeared."""

    def __init__(self) -> None:
        self.indices: dict[Any, int] = {}
        self.rows: list[Any] = []

    def add(self, key: Any, row: Any) -> int:
        self.rows.append(row)
        self.indices[key] = len(self.rows) - 1
        return self.indices[key]


def parse_entries(entries: Sequence[Any]) -> ParsedEntries:
    """The list `entries` of a record, oldest first. Raises MalformedRecord."""
    expect_item_types("entries", entries, dict)
    by_field = _field_columns(entries)

    def column(field: str, *types: type) -> list[Any]:
        values = by_field.get(field) or [None] * len(entries)
        expect_column_types(field, values, *types)
        if int in types:
            expect_64_bits(field, filter(None, values))
        return values

    count_field = "collective_seq_id" if not entries or "collective_seq_id" in entries[0] else "seq_id"
    collective = column(count_field, int)
    operations, operation = _distinct_operations(column)
    named_two_ends = [operations[index][-1] is not None for index in operation]
    is_p2p, p2p_count = column("is_p2p", bool, NONE_TYPE), column("p2p_seq_id", int, NONE_TYPE)
    # Format 1.4 has neither field: there, only the name ("send 0->1") shows what it is, and it shares the counter.
    point_to_point = [by_name if flag is None else flag for flag, by_name in zip(is_p2p, named_two_ends, strict=True)]
    p2p_slot = [n if own is None else own for own, n in zip(p2p_count, collective, strict=True)]
    keys, group = _group_keys(column("pg_id", int), column("process_group", tuple, list, NONE_TYPE))
    state = _check_states(column("state", str))
    started_ns = column("time_discovered_started_ns", int, NONE_TYPE)
    completed_ns = column("time_discovered_completed_ns", int, NONE_TYPE)
    starts_recorded = any(started_ns) or "started" in state
    frames, stacks, stack = _distinct_stacks(column("frames", list, tuple, NONE_TYPE))
    columns = EntryColumns(
        group,
        column("record_id", int),
        [own if p2p else n for own, p2p, n in zip(p2p_slot, point_to_point, collective, strict=True)],
        operation,
        [s != "scheduled" or bool(ns) for s, ns in zip(state, started_ns, strict=True)]
        if starts_recorded
        else [None] * len(state),
        [s == "completed" or bool(ns) for s, ns in zip(state, completed_ns, strict=True)],
        column("retired", bool),
        stack,
        [ns or None for ns in column("time_created_ns", int, NONE_TYPE)],
        column("timeout_ms", int, NONE_TYPE),
    )
    op_id = column("op_id", int, NONE_TYPE)
    counts_match = [op is None or op == n for op, n in zip(op_id, collective, strict=True)]
    result = ParsedEntries(
        keys, columns, collective, point_to_point, counts_match, starts_recorded, operations, frames, stacks
    )
    if any(name == COALESCED for _, name, *_ in operations):
        _copy_batch_state(result)
    # A batch of sends and receives as a whole has no position of its own in the group's order (its parts are listed
    # too), and an operation that does not name its two ends cannot be matched with its peer.
    unplaced = [p2p and not named for p2p, named in zip(point_to_point, named_two_ends, strict=True)]
    return select_rows(result, [i for i, drop in enumerate(unplaced) if not drop]) if any(unplaced) else result


def _field_columns(entries: Sequence[Any]) -> dict[str, list[Any]]:
    """Field -> its value in each entry."""
    fields = [field for field in ENTRY_FIELDS if any(field in entry for entry in (*entries[:1], *entries[-1:]))]
    if len(fields) > 1:
        # Fast path: all entries of a real record have the same fields.
        with suppress(KeyError):
            return dict(zip(fields, map(list, zip(*map(itemgetter(*fields), entries), strict=True)), strict=True))
    return {field: [entry.get(field) for entry in entries] for field in ENTRY_FIELDS}


def _check_states(states: list[str]) -> list[str]:
    unknown = set(states) - set(STATES)
    if unknown:
        at = next(i for i, state in enumerate(states) if state in unknown)
        raise MalformedRecord(f"entries[{at}].state is not one of {', '.join(STATES)}")
    return states


def _group_keys(ids: list[int], groups: list[Any]) -> tuple[list[tuple[int, str | None, str]], list[int]]:
    """Distinct groups of the entries, and the index of each entry's group. Format 1.4 names none."""
    table = _DistinctRows()
    expect_item_types("process_group", flatten(group for group in groups if group is not None), str)

    def key(pg_id: int, group: Any) -> tuple[int, str | None, str]:
        if group is None:
            return pg_id, None, ""
        if len(group) != 2:
            raise MalformedRecord(f"process_group has {len(group)} parts instead of two: a name and a description")
        return pg_id, printable_text("process_group", group[0]), printable_text("process_group", group[1])

    indices = []
    for pg_id, group in zip(ids, groups, strict=True):
        named = (pg_id, None if group is None else tuple(group))
        found = table.indices.get(named)
        indices.append(table.add(named, key(pg_id, group)) if found is None else found)
    return table.rows, indices


def _distinct_operations(column: Callable[..., list[Any]]) -> tuple[list[Any], list[int]]:
    """Distinct operations, and the index of each entry's operation."""
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
    indices = []
    for key in zip(*parts, strict=True):
        found = table.indices.get(key)
        indices.append(table.add(key, _parse_operation(*key)) if found is None else found)
    return table.rows, indices


def _parse_operation(
    profiling_name: str, input_sizes: Any, output_sizes: Any, input_types: Any, output_types: Any
) -> list[Any]:
    for field, sizes in zip(SIZE_FIELDS, (input_sizes, output_sizes), strict=True):
        expect_64_bits(field, flatten(sizes))
    backend, colon, name = printable_text("profiling_name", profiling_name).partition(":")
    if not colon:  # usually "nccl:all_reduce"; older records name no backend
        backend, name = "", profiling_name
    types = [[printable_text("dtypes", each) for each in types] for types in (input_types, output_types)]
    ends = POINT_TO_POINT_NAME.fullmatch(name)
    if ends is None:
        return [backend, name, input_sizes, output_sizes, *types, None, None]
    # "send 0->1" names the sender first, "recv 1<-0" the receiver.
    verb, one, _, other = ends.groups()
    source, destination = (int(one), int(other)) if verb == "send" else (int(other), int(one))
    return [backend, verb, input_sizes, output_sizes, *types, source, destination]


def _distinct_stacks(stacks: list[Any]) -> tuple[list[list[Any]], list[Sequence[int]], list[int]]:
    """Distinct frames, distinct stacks as indices of frames, and the index of each entry's stack.

    PyTorch pickles a frame once and refers to it afterwards, so a stack of the same frame objects need not be parsed
    again.
    """
    frames, distinct = _DistinctRows(), _DistinctRows()
    parsed: dict[tuple[int, ...], int] = {(): distinct.add((), [])}
    indices = []
    for stack in stacks:
        object_ids = tuple(map(id, stack)) if stack else ()
        index = parsed.get(object_ids)
        if index is None:
            frame_indices = tuple([_frame_index(frame, frames) for frame in stack])
            found = distinct.indices.get(frame_indices)
            index = parsed[object_ids] = distinct.add(frame_indices, frame_indices) if found is None else found
        indices.append(index)
    return frames.rows, distinct.rows, indices


_frame_fields: Final = itemgetter(*FRAME_FIELDS)


def _frame_index(frame: Any, frames: _DistinctRows) -> int:
    if type(frame) is not dict:
        raise MalformedRecord("frames contains an item that is not a dict with name, filename and line")
    try:
        function, file, line = _frame_fields(frame)
    except KeyError as error:
        raise MalformedRecord(f"a frame has no {error.args[0]}") from None
    if type(function) is not str or type(file) is not str or type(line) is not int:
        raise MalformedRecord("in a frame, name or filename is not a string, or line is not an integer")

    found = frames.indices.get((function, file, line))
    if found is not None:
        return found
    expect_64_bits("frames.line", (line,))
    row = [printable_text("frames.name", function), printable_text("frames.filename", file), line]
    return frames.add((function, file, line), row)


def _copy_batch_state(entries: ParsedEntries) -> None:
    """NCCL tracks a batch only as a whole, in an entry named "coalesced"; the launches inside it stay "scheduled"
    forever. They have the batch's sequence number, so here they take over its state."""
    columns = entries.columns
    names = [entries.operations[index][1] for index in columns.operation]
    keys = list(zip(columns.group, entries.point_to_point, columns.slot, strict=True))
    batches = {keys[i]: i for i, name in enumerate(names) if name == COALESCED}
    for i, key in enumerate(keys):
        batch = batches.get(key)
        if batch is not None:
            columns.started[i] = columns.started[batch]
            columns.completed[i] = columns.completed[batch]
            columns.retired[i] = columns.retired[batch]


def select_rows(entries: ParsedEntries, rows: list[int]) -> ParsedEntries:
    """The same entries, reduced to these rows."""

    def select(values: Any) -> list[Any]:
        return [values[row] for row in rows]

    return entries._replace(
        columns=EntryColumns._make(map(select, entries.columns)),
        collective=select(entries.collective),
        point_to_point=select(entries.point_to_point),
        counts_match=select(entries.counts_match),
    )


def is_pending(entries: ParsedEntries, row: int) -> bool:
    """Same rule as `OperationLaunch.pending`."""
    columns = entries.columns
    gloo = entries.operations[columns.operation[row]][0] == "gloo"
    return not columns.completed[row] and not (columns.retired[row] and gloo)


# Groups: names, members and counts from pg_config, pg_status and the entries.


def _parse_config(config: Any) -> GroupConfig:
    expect_type("pg_config", config, dict)
    expect_item_types("pg_config", config, str)
    if len(config) > MAX_GROUPS:
        raise MalformedRecord(f"pg_config has {len(config):,} groups, more than the limit of {MAX_GROUPS:,}")
    parsed = {}
    for name, row in config.items():
        expect_type("pg_config's group", row, dict)
        members = _parse_members(row.get("ranks", ""))
        parsed[printable_text("pg_config", name)] = printable_text("pg_config.desc", row.get("desc", "")), members
    return parsed


def _parse_members(ranks: Any) -> list[int]:
    """All formats so far write the string "[0, 1]"; a list is accepted as well."""
    if type(ranks) is str:
        try:
            ranks = json.loads(ranks) if ranks.strip() else []
        except ValueError:
            raise MalformedRecord('pg_config.ranks is a string that is not a list of ranks such as "[0, 1]"') from None
    expect_type("pg_config.ranks", ranks, list, tuple)
    if len(ranks) > MAX_MEMBERS:
        raise MalformedRecord(f"pg_config.ranks has {len(ranks):,} members, more than the limit of {MAX_MEMBERS:,}")
    expect_item_types("pg_config.ranks", ranks, int)
    expect_64_bits("pg_config.ranks", ranks)
    return list(ranks)


def _parse_status(status: Any) -> dict[int, GroupCounts]:
    expect_type("pg_status", status, dict)
    expect_item_types("pg_status", status, str, int)
    parsed: dict[int, GroupCounts] = {}
    for pg_id, row in status.items():
        expect_type("pg_status's group", row, dict)
        enqueued, started, completed = (_parse_count(field, row.get(field)) for field in STATUS_COUNT_FIELDS)
        parsed[_parse_integer("pg_status", pg_id)] = enqueued, started, completed
    return parsed


def _parse_count(field: str, value: Any) -> int | None:
    return None if value is None else _parse_integer(field, expect_type(field, value, int, str, NONE_TYPE))


def _parse_integer(field: str, value: int | str) -> int:
    if type(value) is str:
        digits = value.removeprefix("-")
        if not (len(value) < 20 and digits.isascii() and digits.isdigit()):
            raise MalformedRecord(f"{field} is a string instead of an integer")
        value = int(value)
    expect_64_bits(field, (int(value),))
    return int(value)


def _group_rows(entries: ParsedEntries, config: GroupConfig, status: dict[int, GroupCounts]) -> list[list[Any]]:
    """One row per group: name, description, members, three counts, whether sends and receives are unrecorded.

    Groups with entries come first, in the order of `entries.keys`.
    """
    names = _group_names(entries, config, status)
    starts_recorded = entries.starts_recorded or any(started not in (None, -1) for _, started, _ in status.values())
    rows: list[list[Any]] = []
    entries_of_group: list[list[int]] = [[] for _ in entries.keys]
    for row, key in enumerate(entries.columns.group):
        entries_of_group[key].append(row)
    for key, (pg_id, _, entry_description) in enumerate(entries.keys):
        name = names[pg_id]
        description, members = config.get(name, ("", []))
        # Gloo's single pg_config row describes whichever group was created last: it is used only if there is one group.
        if name not in config and "" in config and len({*status, *names}) == 1:
            members = config[""][1]
        counts = _counts_from_entries(
            entries, entries_of_group[key], status.get(pg_id, UNKNOWN_COUNTS), starts_recorded
        )
        unrecorded = _has_unrecorded_point_to_point(entries, entries_of_group[key])
        rows.append([name, entry_description or description, members, *counts, unrecorded])
    ids_with_entries = {pg_id for pg_id, _, _ in entries.keys}
    ids = {name: pg_id for pg_id, name in names.items() if pg_id not in ids_with_entries}
    without_entries = [name for name in config if name not in {row[0] for row in rows}]
    for name in sorted(without_entries, key=_name_order):
        if name == "" and (rows or len(status) > 1):
            continue  # Gloo: the row belongs to one of the groups above, or to an unknown one
        description, members = config[name]
        if name == "":
            name, description = "0", description or "default_pg"
            ids.setdefault("0", next(iter(status), 0))
        counts = _counts_from_status(status.get(ids.get(name, -1), UNKNOWN_COUNTS), starts_recorded)
        rows.append([name, description, members, *counts, False])
    return rows


def _name_order(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isascii() and name.isdigit() and len(name) < 20 else (1, 0, name)


def _group_names(entries: ParsedEntries, config: GroupConfig, status: dict[int, GroupCounts]) -> dict[int, str]:
    """The name of each group by its pg_id, the number that each process assigns for itself.

    Entries contain both. Groups without entries are matched by order, since numbers are assigned in the order of names;
    that is done only if there are as many numbers as names and no entry contradicts it.
    """
    known = {pg_id: name for pg_id, name, _ in entries.keys if name is not None}
    ids = sorted({*status, *(pg_id for pg_id, _, _ in entries.keys)})
    names = sorted(config, key=_name_order)
    if len(ids) == len(names) and all(name.isascii() and name.isdigit() for name in names):
        by_order = dict(zip(ids, names, strict=True))
        if known.items() <= by_order.items():
            return by_order
    unmatched_names = [name for name in names if name not in known.values() and name]
    unmatched_ids = [pg_id for pg_id in ids if pg_id not in known]
    if len(unmatched_names) == len(unmatched_ids) == 1:
        known[unmatched_ids[0]] = unmatched_names[0]
    # Better an invented name than a group without one: members of the group on other ranks get the same.
    for pg_id, _, _ in entries.keys:
        known.setdefault(pg_id, f"number {pg_id}")
    return known


def _counts_from_status(counts: GroupCounts, starts_recorded: bool) -> GroupCounts:
    enqueued, started, completed = (None if count is None else max(count, 0) for count in counts)
    return enqueued, started if starts_recorded else None, completed


def _counts_from_entries(
    entries: ParsedEntries, rows: list[int], status_counts: GroupCounts, starts_recorded: bool
) -> GroupCounts:
    """Counts of a group with entries. Each entry, sends and receives included, says how many collectives its group had
    launched by then."""
    columns = entries.columns
    enqueued, started, completed = _counts_from_status(status_counts, starts_recorded)
    newest = max((entries.collective[i] for i in rows), default=0)
    if not any(entries.point_to_point[i] or not entries.counts_match[i] for i in rows):
        return max(newest, enqueued or 0), started, completed
    # pg_status mixes collectives with sends and receives here: derive the counts from the oldest unfinished entries.
    pending = [columns.slot[i] for i in rows if not entries.point_to_point[i] and is_pending(entries, i)]
    not_started = [columns.slot[i] for i in rows if not entries.point_to_point[i] and columns.started[i] is False]
    last_started = min(not_started, default=newest + 1) - 1 if starts_recorded else None
    return newest, last_started, min(pending, default=newest + 1) - 1


def _has_unrecorded_point_to_point(entries: ParsedEntries, rows: list[int]) -> bool:
    """Gloo counts sends and receives together with all other operations, but records only the collectives."""
    return any(
        not entries.counts_match[i] and entries.operations[entries.columns.operation[i]][0] == "gloo" for i in rows
    ) and not any(entries.point_to_point[i] for i in rows)


# Checks of single fields.


def type_name(value: object) -> str:
    """`a list`: for messages."""
    return TYPE_NAMES.get(type(value), "something else")


def unexpected_type(field: str, value: object, expected: str) -> MalformedRecord:
    """The error for a field of the wrong type."""
    return MalformedRecord(f"{field} is {type_name(value)} instead of {expected}")


def expect_type(field: str, value: Any, *types: type) -> Any:
    """The value, if its type is exactly one of these. Raises MalformedRecord."""
    if type(value) not in types:
        raise unexpected_type(field, value, " or ".join(TYPE_NAMES[each] for each in types))
    return value


def expect_column_types(field: str, values: Sequence[object], *types: type) -> None:
    """Check one field of all entries. The error names the first entry that is wrong."""
    if not set(map(type, values)) <= set(types):
        at, value = next((i, value) for i, value in enumerate(values) if type(value) not in types)
        raise unexpected_type(f"entries[{at}].{field}", value, " or ".join(TYPE_NAMES[each] for each in types))


def expect_item_types(field: str, values: Iterable[object], *types: type) -> None:
    """Check the items of lists. The error does not say which item."""
    for found in set(map(type, values)) - set(types):
        name = TYPE_NAMES.get(found, "something else")
        raise MalformedRecord(f"{field} contains {name} instead of {TYPE_NAMES[types[0]]}")


def expect_64_bits(field: str, values: Iterable[int]) -> None:
    """Check that all integers fit 64 bits."""
    try:
        array("q", values)  # the fastest check of many values
    except OverflowError:
        raise MalformedRecord(f"{field} contains a number that does not fit into 64 bits") from None


def printable_text(field: str, value: Any) -> str:
    """A string without line breaks, terminal control codes and unpaired surrogates: each becomes "?"."""
    expect_type(field, value, str)
    if len(value) > MAX_TEXT_CHARACTERS:
        raise MalformedRecord(
            f"{field} is a string of {len(value):,} characters, more than the limit of {MAX_TEXT_CHARACTERS:,}"
        )
    return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)


def flatten(lists: Iterable[Iterable[Any]]) -> chain[Any]:
    """One level of nesting less."""
    return chain.from_iterable(lists)
