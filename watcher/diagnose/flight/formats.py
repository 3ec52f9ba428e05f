"""A decoded flight record, in any of torch's forms -> one table that JSON can carry. Pure; every field is checked.

Standard library only: the child loads it. What differs between forms, and what is made of it:

    1.4        one count `seq_id`; no `pg_status`; entries tell their group by number only
    2.1, 2.4   `collective_seq_id` and `p2p_seq_id`, the group's name; 2.4 brings `pg_status` and the timeout
    2.9, 2.10  the library's version, named `nccl_version` and then `comm_lib_version`
    JSON       no stacks; lists for tuples; counts as text; 0 for a time that is not set; no `entries` when empty
    gloo       `pg_config` under "", which each new group overwrites

A later version with these fields is read. Counts: -1 is "never", so 0; what was not told is None. The recorder's own
counts are of its last operation of any kind, so where send and recv are among them, entries decide.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from watcher.diagnose.flight.entries import Entries, kept, read_entries
from watcher.diagnose.flight.shapes import NOTHING, Malformed, expect, expect_all, expect_range, kind, text

COUNTS: Final = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
MOST_ENTRIES: Final = 200_000  # torch keeps 2,000; jobs are seen with 20,000
MOST_GROUPS: Final = 20_000
MOST_MEMBERS: Final = 1_000_000

Config = dict[str, tuple[str, list[int]]]  # name -> description, members
Counts = tuple[int | None, int | None, int | None]  # enqueued, started, completed; None: -1 in the record
NOT_TOLD: Final[Counts] = (None, None, None)


def table_of(decoded: Any, keep: int = MOST_ENTRIES) -> dict[str, Any]:
    """The table that `tables.py` makes a record of: with the newest `keep` launches, and the oldest `keep` open ones.
    Raises `Malformed`."""
    if type(decoded) is not dict:
        raise Malformed(f"it holds {kind(decoded)} where a table of version, pg_config and entries was expected")
    if "version" not in decoded or not ({"entries", "pg_config", "pg_status"} & decoded.keys()):
        raise Malformed("it has no version with pg_config or entries: no flight record, or one of torch 2.2 or older")
    version = text("version", decoded["version"])
    library = text("comm_lib_version", decoded.get("comm_lib_version", decoded.get("nccl_version", "")))
    rows = expect("entries", decoded.get("entries", []), list, tuple)
    if len(rows) > MOST_ENTRIES:
        raise Malformed(f"it has {len(rows):,} entries where at most {MOST_ENTRIES:,} were expected")
    entries = read_entries(rows)
    config = _config(decoded.get("pg_config", {}))
    status = _status(decoded.get("pg_status", {}))
    groups = _groups(entries, config, status)
    entries = _thinned(entries, keep)
    return {
        "version": version,
        "library": library,
        "groups": groups,
        "operations": entries.operations,
        "frames": entries.frames,
        "stacks": entries.stacks,
        "columns": entries.columns,
    }


def _config(told: Any) -> Config:
    expect("pg_config", told, dict)
    expect_all("pg_config", told, str)
    if len(told) > MOST_GROUPS:
        raise Malformed(f"pg_config has {len(told):,} groups where at most {MOST_GROUPS:,} were expected")
    found = {}
    for name, row in told.items():
        expect("pg_config's group", row, dict)
        members = _members(row.get("ranks", ""))
        found[text("pg_config", name)] = text("pg_config.desc", row.get("desc", "")), members
    return found


def _members(told: Any) -> list[int]:
    """ "[0, 1]" in all forms so far."""
    if type(told) is str:
        try:
            told = json.loads(told) if told.strip() else []
        except ValueError:
            raise Malformed('pg_config.ranks is text, and not like "[0, 1]"') from None
    expect("pg_config.ranks", told, list, tuple)
    if len(told) > MOST_MEMBERS:
        raise Malformed(f"pg_config.ranks has {len(told):,} members")
    expect_all("pg_config.ranks", told, int)
    expect_range("pg_config.ranks", told)
    return list(told)


def _status(told: Any) -> dict[int, Counts]:
    expect("pg_status", told, dict)
    expect_all("pg_status", told, str, int)
    found: dict[int, Counts] = {}
    for place, row in told.items():
        expect("pg_status's group", row, dict)
        enqueued, started, completed = (_count(field, row.get(field)) for field in COUNTS)
        found[_whole("pg_status", place)] = enqueued, started, completed
    return found


def _count(field: str, told: Any) -> int | None:
    return None if told is None else _whole(field, expect(field, told, int, str, NOTHING))


def _whole(field: str, told: int | str) -> int:
    if type(told) is str:
        if not (len(told) < 20 and told.removeprefix("-").isascii() and told.removeprefix("-").isdigit()):
            raise Malformed(f"{field} is text where a whole number was expected")
        told = int(told)
    expect_range(field, (int(told),))
    return int(told)


def _groups(entries: Entries, config: Config, status: dict[int, Counts]) -> list[list[Any]]:
    """Rows of name, description, members, three counts, whether sends and receives are not written down. Those with
    entries come first, in the order of `keys`."""
    named = _named(entries, config, status)
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
        counts = _counts(entries, of_group[place], status.get(number, NOT_TOLD), watched)
        rows.append([name, told or description, members, *counts, _unseen_pairs(entries, of_group[place])])
    with_entries = {number for number, _, _ in entries.keys}
    ids = {name: number for number, name in named.items() if number not in with_entries}
    without = [name for name in config if name not in {row[0] for row in rows}]
    for name in sorted(without, key=_in_order):
        if name == "" and (rows or len(status) > 1):
            continue  # gloo: of one of the groups above, or nobody knows of which
        description, members = config[name]
        if name == "":
            name, description = "0", description or "default_pg"
            ids.setdefault("0", next(iter(status), 0))
        counts = _from_status(status.get(ids.get(name, -1), NOT_TOLD), watched)
        rows.append([name, description, members, *counts, False])
    return rows


def _in_order(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isascii() and name.isdigit() and len(name) < 20 else (1, 0, name)


def _named(entries: Entries, config: Config, status: dict[int, Counts]) -> dict[int, str]:
    """The name of each numbered group. Entries tell it; else groups were numbered in the order of their names, which is
    believed where there are as many of each and no entry says otherwise."""
    told = {number: name for number, name, _ in entries.keys if name is not None}
    numbers = sorted({*status, *(number for number, _, _ in entries.keys)})
    names = sorted(config, key=_in_order)
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


def _from_status(counts: Counts, watched: bool) -> Counts:
    enqueued, started, completed = (None if count is None else max(count, 0) for count in counts)
    return enqueued, started if watched else None, completed


def _counts(entries: Entries, rows: list[int], told: Counts, watched: bool) -> Counts:
    """Of a group with entries. Each entry, of send and recv too, tells how many collectives its group had by then."""
    columns = entries.columns
    enqueued, started, completed = _from_status(told, watched)
    newest = max((entries.collective[i] for i in rows), default=0)
    if not any(entries.alone[i] or not entries.counted_alike[i] for i in rows):
        return max(newest, enqueued or 0), started, completed
    unfinished = [columns.slot[i] for i in rows if not entries.alone[i] and is_open(entries, i)]
    waiting = [columns.slot[i] for i in rows if not entries.alone[i] and columns.started[i] is False]
    return newest, min(waiting, default=newest + 1) - 1 if watched else None, min(unfinished, default=newest + 1) - 1


def _unseen_pairs(entries: Entries, rows: list[int]) -> bool:
    """gloo counts sends and receives with all that it does, and writes down only the collectives."""
    return any(
        not entries.counted_alike[i] and entries.operations[entries.columns.operation[i]][0] == "gloo" for i in rows
    ) and not any(entries.alone[i] for i in rows)


def is_open(entries: Entries, row: int) -> bool:
    """As `Launch.open`."""
    columns = entries.columns
    gloo = entries.operations[columns.operation[row]][0] == "gloo"
    return not columns.completed[row] and not (columns.retired[row] and gloo)


def _thinned(entries: Entries, keep: int) -> Entries:
    total: Sequence[int] = range(len(entries.alone))
    if len(total) <= keep:
        return entries
    unfinished = [row for row in total if is_open(entries, row)]
    return kept(entries, sorted({*unfinished[:keep], *total[-keep:]}))
