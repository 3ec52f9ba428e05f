"""`nvidia-smi --query-gpu=... --format=csv[,noheader][,nounits]` and logs made of it, by whatever hand."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from collectors.samples import Reason
from collectors.smi.board import read_board, says_nothing
from collectors.smi.cells import reason_of_text, unit_of
from collectors.smi.columns import IDENTITY, NEEDED, READINGS, Column, read_header
from collectors.smi.grouping import Row, group_rows
from collectors.smi.headerless import infer_columns, is_row
from collectors.smi.messages import Said
from collectors.smi.report import Rows
from collectors.smi.stamps import read_stamps

_LONGEST_LINE: Final = 20_000  # all 241 fields of driver 610 take 8,000
_HOST: Final = re.compile(r"[A-Za-z][\w.\-]*: (?=\S)")  # what pdsh and clush put before each line
_PROCESS_COLUMNS: Final = frozenset({"pid", "process_name", "used_gpu_memory [MiB]"})
_NODE_COLUMNS: Final = frozenset({"node", "host", "hostname", "server", "rack", "pdu", "chassis"})


@dataclass(slots=True)
class _Found:
    """Rows as cells, before they are boards. `columns` is None for rows that came before any header."""

    rows: list[tuple[int, int, tuple[Column, ...] | None, list[str]]] = field(default_factory=list)
    headers: list[tuple[Column, ...]] = field(default_factory=list)
    unreadable: int = 0


def split_cells(line: str) -> list[str]:
    """Cells of one line, trimmed; comma first, else tab, else semicolon. Quotes as in CSV."""
    mark = next((mark for mark in ",\t;" if mark in line), ",")
    if '"' in line and "\0" not in line:
        try:
            return [cell.strip() for cell in next(csv.reader([line], delimiter=mark, skipinitialspace=True))]
        except (csv.Error, StopIteration):
            pass
    return [cell.strip() for cell in line.split(mark)]


def read_csv(lines: Sequence[str], cut: bool, said: Said, told: tuple[Column, ...] | None = None) -> Rows:
    """All boards of all samples. `cut`: the last line has no end. `told`: columns for rows without a header."""
    found = _collect(lines, cut, said, told)
    usable, trouble = [], ""
    for number, block, columns, cells in _with_columns(found, said):
        if all(reason_of_text(cell) is Reason.UNSUPPORTED for cell in cells):
            found.unreadable += 1  # not even an index: nobody knows which board this is
        elif trouble_of := _trouble(columns):
            trouble = trouble_of
        else:
            usable.append((number, block, columns, cells))
    if not usable and not trouble and not found.unreadable and found.headers:
        trouble = _trouble(found.headers[-1]) or "a header and no rows below it"
    rows, last = _boards(usable, found)
    snapshots = group_rows(rows, number_bursts=True)
    return Rows(snapshots, (), found.unreadable, trouble, last)


def _collect(lines: Sequence[str], cut: bool, said: Said, told: tuple[Column, ...] | None) -> _Found:
    found = _Found()
    columns, block = told, 0
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue
        if len(line) > _LONGEST_LINE:
            said.warn(f"line {number + 1} has {len(line)} characters: no query prints that")
            continue
        if "," in line and (host := _HOST.match(line)):
            line = line[host.end() :]
        cells = split_cells(line)
        if cells[-1] == "" and len(cells) > 1 and (columns is None or len(cells) == len(columns) + 1):
            cells.pop()
        is_last = cut and number == len(lines) - 1
        if columns and len(cells) == len(columns) > 1 and (columns is told or cells[0] != columns[0].printed):
            if (header := read_header(cells)) is None:
                found.rows.append((number, block, columns, cells))
                continue
            columns, block = header, block + 1
            found.headers.append(header)
        elif said.listen(line, number):
            continue
        elif (header := read_header(cells)) is not None:
            columns, block = header, block + 1
            found.headers.append(header)
        elif columns is None and is_row(cells):
            found.rows.append((number, block, None, cells))
        elif columns is not None and len(cells) == len(columns):
            found.rows.append((number, block, columns, cells))
        else:
            if columns is not None and (is_last or is_row(cells) or len(cells) > 1):
                found.unreadable += 1
                said.warn(f"line {number + 1}: {len(cells)} cells where {len(columns)} belong: {line.strip()!r}")
            elif not line.lstrip().startswith("#"):
                said.warn(f"not understood: {line.strip()!r}")
    if cut and found.rows and found.rows[-1][0] == len(lines) - 1:
        _drop_cut_row(found)
    return found


def _drop_cut_row(found: _Found) -> None:
    """The last line has no end: if its last cell lost the unit that the cell above has, the number is cut as well."""
    last = found.rows[-1]
    above = found.rows[-2] if len(found.rows) > 1 else None
    cut_within = above is not None and len(last[3]) < len(above[3])
    cut_unit = above is not None and len(last[3]) == len(above[3]) and unit_of(above[3][-1]) != unit_of(last[3][-1])
    if cut_within or (cut_unit and not last[3][-1].startswith("[")):
        found.rows.pop()
        found.unreadable += 1


def _with_columns(found: _Found, said: Said) -> list[tuple[int, int, tuple[Column, ...], list[str]]]:
    """Rows with their columns: printed, told, taken from a header further down, or inferred from the shape of cells."""
    bare = [row for row in found.rows if row[2] is None]
    inferred: tuple[Column, ...] = ()
    if bare:
        width = Counter(len(cells) for _, _, _, cells in bare).most_common(1)[0][0]
        later = next((header for header in found.headers if len(header) == width), None)
        inferred = later or infer_columns([cells for _, _, _, cells in bare if len(cells) == width])
        if later is None and any(column.field for column in inferred):
            names = ", ".join(column.field or "?" for column in inferred)
            said.warn(
                f"no header: columns inferred by the shape of their cells as {names}; tell the columns to read all"
            )
    result = []
    for number, block, columns, cells in found.rows:
        if columns is None and len(cells) != len(inferred):
            found.unreadable += 1
            said.warn(f"line {number + 1}: {len(cells)} cells where {len(inferred)} belong: {', '.join(cells)!r}")
        else:
            result.append((number, block, columns if columns is not None else inferred, cells))
    return result


@lru_cache
def _trouble(columns: tuple[Column, ...]) -> str:
    """Why rows of these columns are no boards; "" if they are. Names what was found and what is needed."""
    fields = {column.field for column in columns} - {""}
    printed = {column.printed for column in columns}
    names = ", ".join(column.printed or "?" for column in columns)
    if printed & _PROCESS_COLUMNS:
        return f"this is a list of processes, not of GPUs (columns: {names}); needed: {NEEDED}"
    node_level = not fields & IDENTITY and {name.casefold() for name in printed} & _NODE_COLUMNS
    if fields & {"uuid", "pci_bus_id"} or {"index", "name"} <= fields or (fields & READINGS and not node_level):
        return ""
    if fields & IDENTITY and any(column.printed == column.field for column in columns) and "?" in printed:
        return ""  # inferred: a name or an index alone is all that these rows say
    if printed == {"?"} or not printed - {"?", "timestamp"}:
        return f"rows without a header whose columns cannot be told from their shape: tell the columns, e.g. {NEEDED}"
    return f"no GPU readings in these columns: {names}; needed: {NEEDED}"


def _boards(usable: Sequence[tuple[int, int, tuple[Column, ...], list[str]]], found: _Found) -> tuple[list[Row], int]:
    stamps = read_stamps([_stamp(columns, cells) for _, _, columns, cells in usable])
    rows, last = [], -1
    for (number, block, columns, cells), seconds in zip(usable, stamps, strict=True):
        named: dict[str, tuple[str, str]] = {}
        for column, cell in zip(columns, cells, strict=True):
            if column.field and column.field != "timestamp":
                named.setdefault(column.field, (cell, column.unit))
        if says_nothing(named):
            found.unreadable += 1
            continue
        rows.append(Row(read_board(named), seconds, block))
        last = number
    return rows, last


def _stamp(columns: Sequence[Column], cells: Sequence[str]) -> str:
    for column, cell in zip(columns, cells, strict=True):
        if column.field == "timestamp":
            return cell
    return ""
