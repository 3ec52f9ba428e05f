"""`nvidia-smi --query-gpu=... --format=csv[,noheader][,nounits]`, and logs that scripts made of it.

Rows without a header get their columns from the caller, from a header further down, from a known layout
(layouts.toml), or from the shape of their values where only one meaning is possible.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.samples import ReadingStatus
from wattwatch.collectors.smi.columns import (
    CUT_OFF,
    DEFAULT_UNITS,
    IDENTITY_FIELDS,
    READING_FIELDS,
    REQUIRED_COLUMNS,
    Column,
    is_timestamp,
    measures_the_same,
    parse_timestamps,
    read_column,
    read_header,
    read_number,
    status_of_text,
    unit_of_cell,
)
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells, is_blank_row
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuRow, ParsedRows
from wattwatch.collectors.smi.snapshots import group_into_snapshots

NO_HEADER: Final = "there is no header"  # how the warning begins
_MAX_LINE_CHARS: Final = 20_000  # all 241 fields of driver 610 take 8,000
# What pdsh and clush ("node1: ") or docker compose ("worker-1  | ") put before each line.
_HOST_PREFIX: Final = re.compile(r"[A-Za-z][\w.\-]*(?:: | +\| )(?=\S)")
_STAMP_PREFIX: Final = re.compile(
    r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) +(?=[^\s,;])"
)
_PROCESS_COLUMNS: Final = frozenset({"pid", "process_name", "used_gpu_memory [MiB]"})
_EACH_GPU: Final = frozenset({"index", "uuid", "pci_bus_id"})
_UNIT_IN_HEADER: Final = re.compile(r"\[(W|%|MiB|MHz)\]$")  # as nvidia-smi prints it
_WATTS_WITHOUT_UNIT: Final = re.compile(r"\d+\.\d\d$")  # always, with nounits too
_MOST_OF_LIMIT: Final = 1.25  # no GPU draws more than this share of its limit; up to 1.12 was seen
MIN_ROWS_TO_INFER: Final = 4  # with fewer rows, all of them are needed to infer what their columns are
_NODE_COLUMNS: Final = frozenset({"node", "host", "hostname", "server", "rack", "pdu", "chassis"})


@dataclass(slots=True)
class _CsvRows:
    """Rows as cells, before they become GPUs. Columns are None for rows of a log without a header: those before any
    header, and those that do not fit the header above them."""

    rows: list[tuple[int, int, tuple[Column, ...] | None, list[str]]] = field(default_factory=list)
    headers: list[tuple[Column, ...]] = field(default_factory=list)
    unreadable: int = 0
    too_long: int = 0


def split_cells(line: str) -> list[str]:
    """Cells of one line, trimmed; comma first, else tab, else semicolon. Quotes as in CSV."""
    mark = next((mark for mark in ",\t;" if mark in line), ",")
    if '"' in line and "\0" not in line:
        try:
            return [cell.strip() for cell in next(csv.reader([line], delimiter=mark, skipinitialspace=True))]
        except (csv.Error, StopIteration):
            pass
    return [cell.strip() for cell in line.split(mark)]


def parse_csv(
    lines: Sequence[str], cut: bool, messages: MessageLog, given: tuple[Column, ...] | None = None
) -> ParsedRows:
    """All GPUs of all samples. `cut`: the last line has no line end. `given`: columns for rows without a header."""
    lines = _with_decimal_points(lines)
    own = MessageLog()
    rows, misfits = _parse_rows(lines, cut, own, given)
    # Of wrapped rows hardly half can be read; of a log, all but a few that are cut or damaged.
    for lost in (0, 1) if misfits and misfits * 4 >= sum(map(bool, lines)) else ():
        again = MessageLog()
        joined, remaining = _parse_rows(_rejoined(lines, lost), cut, again, given)
        if joined.snapshots and remaining <= cut and _count_values(joined) >= _count_values(rows):
            own, rows = again, joined
            break
    messages.add(own)
    return rows


_DECIMAL_COMMA: Final = re.compile(r"(?<=\d),(?=\d)")


def _with_decimal_points(lines: Sequence[str]) -> Sequence[str]:
    """The lines with decimal points in a table that a spreadsheet saved with decimal commas ("0;120,5 W;100 %"). Its
    rows all have the same width; other lines, such as those of a chat around it, do not matter."""
    for mark in ";\t":
        widths = Counter(count for line in lines if (count := line.count(mark)))
        if not widths:
            continue
        ((width, _),) = widths.most_common(1)
        rows = {number: line for number, line in enumerate(lines) if line.count(mark) == width}
        cells = [cell for row in rows.values() if "," in row for cell in row.split(mark) if "," in cell]
        if cells and all(cell.count(",") == 1 and _DECIMAL_COMMA.search(cell) for cell in cells):
            return [_DECIMAL_COMMA.sub(".", line) if n in rows else line for n, line in enumerate(lines)]
    return lines


def _count_values(rows: ParsedRows) -> int:
    names = ("power_watts", "utilization_percent", "memory_used_bytes", "temperature_celsius", "power_limit_watts")
    gpus = (gpu for snapshot in rows.snapshots for gpu in snapshot.gpus)
    return sum(getattr(gpu, name) is not None for gpu in gpus for name in names)


_MIN_WRAP_WIDTH: Final = 40
_MAX_WRAPPED_LINES: Final = 2000  # a person's paste; a log of that length was not copied from a terminal


def _rejoined(lines: Sequence[str], lost: int) -> list[str]:
    """The lines without the breaks that a terminal made at its width; empty if there is no line of that width.

    `lost`: spaces that the copy lost at the end of a line.
    """
    width = max((len(line) for line in lines), default=0)
    if not width >= _MIN_WRAP_WIDTH or len(lines) > _MAX_WRAPPED_LINES:
        return []
    result: list[str] = []
    goes_on = False
    for line in lines:
        if goes_on:
            result[-1] += line
        else:
            result.append(line)
        goes_on = width - lost <= len(line) <= width
    return result if len(result) < len(lines) else []


def _parse_rows(
    lines: Sequence[str], cut: bool, messages: MessageLog, given: tuple[Column, ...] | None = None
) -> tuple[ParsedRows, int]:
    """What was read, and how many rows could not be read or do not fit the header above them."""
    found = _collect(lines, cut, messages, given)
    usable, problem = [], ""
    others = sum(columns is None for _, _, columns, _ in found.rows) if found.headers else 0
    for number, block, columns, cells in _with_columns(found, messages):
        if all(status_of_text(cell) is ReadingStatus.UNSUPPORTED for cell in cells):
            found.unreadable += 1  # not even an index: it cannot be known which GPU this is
        elif reason := _why_not_gpus(columns):
            problem = reason
        else:
            usable.append((number, block, columns, cells))
    if not usable and not problem and not found.unreadable and found.headers:
        problem = _why_not_gpus(found.headers[-1]) or "there are no rows below the header"
    rows, last = _gpu_rows(usable, found)
    snapshots = group_into_snapshots(rows, number_bursts=True)
    misfits = found.unreadable + found.too_long + others
    return ParsedRows(snapshots, (), found.unreadable, problem, last), misfits


def _collect(lines: Sequence[str], cut: bool, messages: MessageLog, given: tuple[Column, ...] | None) -> _CsvRows:
    found = _CsvRows()
    columns, block = given, 0
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue
        if len(line) > _MAX_LINE_CHARS:
            messages.warn(f"line {number + 1} has {len(line)} characters, which is too long for query output")
            found.too_long += 1
            continue
        if any(mark in line for mark in ",;\t") and (host := _HOST_PREFIX.match(line)):
            line = line[host.end() :]
        if stamp := _STAMP_PREFIX.match(line):
            line = _with_stamp_as_cell(stamp["stamp"], line[stamp.end() :])
        cells = split_cells(line)
        # Some scripts end every row with a comma.
        if cells[-1] == "" and len(cells) > 1 and (columns is None or len(cells) == len(columns) + 1):
            cells.pop()
        is_last = cut and number == len(lines) - 1
        if columns and len(cells) == len(columns) > 1 and (columns is given or cells[0] != columns[0].printed):
            if (header := read_header(cells)) is None:
                fits = columns is given or _fits_columns(columns, cells)
                found.rows.append((number, block, columns if fits else None, cells))
                continue
            columns, block = header, block + 1
            found.headers.append(header)
        elif messages.recognize(line, number):
            continue
        elif (header := read_header(cells)) is not None:
            columns, block = header, block + 1
            found.headers.append(header)
        elif columns is None and looks_like_row(cells):
            found.rows.append((number, block, None, cells))
        elif columns is not None and len(cells) == len(columns):
            found.rows.append((number, block, columns, cells))
        elif is_last and columns is not None and (filled := _fill_cut_row(columns, cells, found)) is not None:
            found.rows.append((number, block, columns, filled))
        elif columns is not None and not is_last and len(cells) > 1 and looks_like_row(cells):
            found.rows.append((number, block, None, cells))
        else:
            if columns is not None and (is_last or len(cells) > 1):
                found.unreadable += 1
                messages.warn(f"line {number + 1}: {len(cells)} cells, expected {len(columns)}: {line.strip()!r}")
            elif not line.lstrip().startswith("#"):
                messages.warn(f"line not understood: {line.strip()!r}")
    if cut and found.rows and found.rows[-1][0] == len(lines) - 1:
        _check_cut_row(found)
    return found


def _with_stamp_as_cell(stamp: str, rest: str) -> str:
    """A line with the time that a log collector (`kubectl logs --timestamps`, `docker logs -t`) put before it as a cell
    of its own: above the rows, the name of that column."""
    mark = next((mark for mark in ",\t;" if mark in rest), None)
    if mark is None:
        return f"{stamp} {rest}"
    return f"{stamp if read_header(split_cells(rest)) is None else 'timestamp'}{mark}{rest}"


def _check_cut_row(found: _CsvRows) -> None:
    """If the last cell of an incomplete last line lacks its unit or decimals, the number may be cut too. The row is
    dropped where the log has an earlier one of this GPU."""
    number, block, columns, cells = found.rows[-1]
    above = found.rows[-2][3] if len(found.rows) > 1 else None
    unit = found_unit[1] if columns and (found_unit := _UNIT_IN_HEADER.search(columns[-1].printed)) else ""
    if unit == "W" and not any(map(unit_of_cell, cells)):
        cut_unit = not _WATTS_WITHOUT_UNIT.match(cells[-1])
    elif above is not None:
        cut_unit = len(cells) == len(above) and unit_of_cell(above[-1]) != unit_of_cell(cells[-1])
    else:
        cut_unit = bool(unit) and any(map(unit_of_cell, cells)) and not unit_of_cell(cells[-1])
    if (cut_unit and not cells[-1].startswith("[")) or (above is not None and len(cells) < len(above)):
        found.rows.pop()
        filled = None if columns is None else _fill_cut_row(columns, cells, found)
        if filled is None:
            found.unreadable += 1
        else:
            found.rows.append((number, block, columns, filled))


def _fill_cut_row(columns: tuple[Column, ...], cells: list[str], found: _CsvRows) -> list[str] | None:
    """The row with a mark in place of each value that is cut off; None if it names no GPU, or one read before."""
    whole = cells if unit_of_cell(cells[-1]) else cells[:-1]
    named = [place for place, column in enumerate(columns[: len(whole)]) if column.field in _EACH_GPU]
    earlier = (row[3] for row in found.rows if row[2] is not None and len(row[3]) == len(columns))
    if len(cells) > len(columns) or not named or any(all(row[i] == cells[i] for i in named) for row in earlier):
        return None
    return [*whole, *[CUT_OFF] * (len(columns) - len(whole))]


def _with_columns(found: _CsvRows, messages: MessageLog) -> list[tuple[int, int, tuple[Column, ...], list[str]]]:
    """Rows with their columns: printed, given, from a header further down, or inferred from the shape of the values."""
    bare: dict[int, list[list[str]]] = {}
    for _, _, columns, cells in found.rows:
        if columns is None:
            bare.setdefault(len(cells), []).append(cells)
    inferred: dict[int, tuple[Column, ...]] = {}
    torn: list[str] | None = None
    for width, rows in sorted(bare.items(), key=lambda item: -len(item[1])):
        later = next(
            (header for header in found.headers if len(header) == width and _fits_columns(header, rows[0])), None
        )
        if found.headers and later is None and len(rows) < MIN_ROWS_TO_INFER:
            continue  # broken rows of the log with the header
        if inferred and len(rows) < MIN_ROWS_TO_INFER:
            continue  # broken rows of the log without one
        # The first line of a log may be the end of a line that was cut, and the last one the beginning of one.
        inferred[width] = later or infer_columns(rows[1:-1] if len(rows) >= MIN_ROWS_TO_INFER else rows)
        if later is None and len(rows) >= MIN_ROWS_TO_INFER and _is_torn(rows[0], rows[1]):
            torn = rows[0]
        if later is None and any(column.field for column in inferred[width]):
            names = ", ".join(column.field or "?" for column in inferred[width])
            unknown = "" if all(column.field for column in inferred[width]) else " (? is an unknown column)"
            messages.warn(
                f"{NO_HEADER}, so the columns were inferred from the values: {names}{unknown}; "
                "add a header so that all columns can be read"
            )
    expected = [len(columns) for _, _, columns, _ in found.rows if columns is not None] or list(inferred)
    result = []
    for number, block, columns, cells in found.rows:
        if cells is torn:
            found.unreadable += 1
        elif columns is None and (len(cells) not in inferred or not _fits_columns(inferred[len(cells)], cells)):
            found.unreadable += 1
            wanted = " with values that do not fit the columns"
            if expected and expected[0] != len(cells):
                wanted = f", expected {expected[0]}"
            messages.warn(f"line {number + 1}: {len(cells)} cells{wanted}: {', '.join(cells)!r}")
        else:
            result.append((number, block, columns if columns is not None else inferred[len(cells)], cells))
    return result


def _is_torn(cells: Sequence[str], after: Sequence[str]) -> bool:
    """Whether the first cell of the first row lacks its beginning: a time stamp without the date of the next one."""
    return is_timestamp(after[0]) and (not is_timestamp(cells[0]) or len(after[0]) - len(cells[0]) > 1)


def _fits_columns(columns: Sequence[Column], cells: Sequence[str]) -> bool:
    """Whether no cell has a unit that its column cannot have, and a column of time stamps holds one."""
    return all(
        measures_the_same(cell, column.unit) if column.field != "timestamp" else not _has_unit(cell)
        for column, cell in zip(columns, cells, strict=True)
    )


def _has_unit(cell: str) -> bool:
    return unit_of_cell(cell) in {"W", "%", "MiB", "MHz"}


@lru_cache
def _why_not_gpus(columns: tuple[Column, ...]) -> str:
    """Why rows with these columns are not GPUs; "" if they are. Says what was found and what is needed."""
    fields = {column.field for column in columns} - {""}
    printed = {column.printed for column in columns}
    names = ", ".join(column.printed or "?" for column in columns)
    if printed & _PROCESS_COLUMNS:
        return f"this output lists processes, not GPUs (columns: {names}); required columns: {REQUIRED_COLUMNS}"
    node_level = not fields & IDENTITY_FIELDS and {name.casefold() for name in printed} & _NODE_COLUMNS
    if fields & {"uuid", "pci_bus_id"} or {"index", "name"} <= fields or (fields & READING_FIELDS and not node_level):
        return ""
    if fields & IDENTITY_FIELDS and any(column.printed == column.field for column in columns) and "?" in printed:
        return ""  # inferred: these rows contain nothing but a name or an index
    if printed == {"?"} or not printed - {"?", "timestamp"}:
        return (
            "the rows have no header, and the values alone do not show what each column contains: "
            f"add a header, e.g. {REQUIRED_COLUMNS}"
        )
    return f"these columns contain no values for individual GPUs: {names}; required columns: {REQUIRED_COLUMNS}"


def _gpu_rows(
    usable: Sequence[tuple[int, int, tuple[Column, ...], list[str]]], found: _CsvRows
) -> tuple[list[GpuRow], int]:
    stamps = parse_timestamps([_timestamp(columns, cells) for _, _, columns, cells in usable])
    rows, last = [], -1
    under: tuple[int, tuple[Column, ...]] | None = None
    blocks = 0
    for (number, block, columns, cells), seconds in zip(usable, stamps, strict=True):
        if under is None or block != under[0] or columns is not under[1]:
            under, blocks = (block, columns), blocks + 1
        named: dict[str, tuple[str, str]] = {}
        for column, cell in zip(columns, cells, strict=True):
            if column.field and column.field != "timestamp":
                named.setdefault(column.field, (cell, column.unit))
        if is_blank_row(named) or not any(_is_of_a_gpu(field, *cell) for field, cell in named.items()):
            found.unreadable += 1
            continue
        rows.append(GpuRow(gpu_from_cells(named), seconds, blocks))
        last = number
    return rows, last


def parse_records(documents: Sequence[Any]) -> ParsedRows:
    """Rows as JSON objects whose keys are names of columns: gpustat --json, or a CSV that a script converted."""
    rows: list[GpuRow] = []
    found = [(number, record) for number, each in enumerate(documents) for record in _records(each)]
    stamps = parse_timestamps([_stamp_of_record(record) for _, record in found])
    for (number, record), seconds in zip(found, stamps, strict=True):
        named: dict[str, tuple[str, str]] = {}
        for key, value in record.items():
            column = read_column(str(key))
            if column.field and column.field != "timestamp" and not isinstance(value, (dict, list)):
                named.setdefault(column.field, ("N/A" if value is None else str(value), column.unit))
        if any(_is_of_a_gpu(field, *cell) for field, cell in named.items()):
            rows.append(GpuRow(gpu_from_cells(named), seconds, number))
    return ParsedRows(group_into_snapshots(rows, number_bursts=True), (), 0, "", 0)


def _records(node: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The objects that name a GPU and a reading of it by column, at most three levels down."""
    if isinstance(node, dict):
        fields = {read_column(str(key)).field for key in node}
        if fields & READING_FIELDS and fields & IDENTITY_FIELDS:
            yield node
            return
        node = list(node.values())
    if isinstance(node, list) and depth < 4:
        for each in node:
            yield from _records(each, depth + 1)


def _stamp_of_record(record: Mapping[str, Any]) -> str:
    return next((str(value) for key, value in record.items() if read_column(str(key)).field == "timestamp"), "")


_TEXT_SHAPES: Final = {
    "uuid": re.compile(r"((GPU|MIG)-)?[0-9a-zA-Z][0-9a-zA-Z\-]*$"),
    "pci_bus_id": re.compile(r"[0-9A-Fa-f]{2,8}:[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2})?[.:][0-9A-Fa-f]{1,2}$"),
    "index": re.compile(r"(gpu|card|cuda:)?\s*\d{1,5}(\.0)?$", re.IGNORECASE),
    "performance_state": re.compile(r"P\d{1,2}$"),
}


def _is_of_a_gpu(field: str, text: str, unit: str) -> bool:
    """Whether this cell holds what its column may hold. A line of prose with as many commas as a header does not."""
    if status_of_text(text) is not None:
        return True
    if shape := _TEXT_SHAPES.get(field):
        return bool(shape.match(text))
    if field == "name":
        return bool(_NAME.search(text))
    return read_number(text, unit).value is not None


def _timestamp(columns: Sequence[Column], cells: Sequence[str]) -> str:
    for column, cell in zip(columns, cells, strict=True):
        if column.field == "timestamp":
            return cell
    return ""


# Rows without a header ----------------------------------------------------------------------------------------------
#
# Bare integers are not interpreted: 64 may be a temperature, a utilization or a fan speed. To read them, name the
# columns.

_UUID: Final = re.compile(r"GPU-[0-9a-zA-Z\-]+$")
_BUS: Final = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
_STATE: Final = re.compile(r"P\d{1,2}$")
_INTEGER: Final = re.compile(r"\d{1,7}$")
_DECIMALS: Final = re.compile(r"\d+\.\d\d$")  # without units, nvidia-smi prints two decimals only for watts
_NAME: Final = re.compile(
    r"(NVIDIA|GeForce|Tesla|Quadro|TITAN|GRID|Orin|Xavier|Thor|Jetson|RTX|GTX|GB?\d{2,3}0?\b|[ABHLVTP]\d{1,3}\b|DGX)",
    re.IGNORECASE,
)
_LAYOUTS: Final = tomllib.loads((resources.files(__package__) / "layouts.toml").read_text("utf-8"))["layout"]
_SHAPES: Final[dict[str, Callable[[str], bool]]] = {
    "absent": lambda _: False,  # only tokens of absence, which fit every column
    "index": lambda cell: bool(_INTEGER.match(cell)) and int(cell) < 64,
    "integer": lambda cell: bool(_INTEGER.match(cell)),
    "uuid": lambda cell: bool(_UUID.match(cell)),
    "name": lambda cell: bool(_NAME.search(cell)) and not _UUID.match(cell),
    "pstate": lambda cell: bool(_STATE.match(cell)),
    "percent": lambda cell: unit_of_cell(cell) == "%",
    "watts": lambda cell: unit_of_cell(cell) == "W",
    "mhz": lambda cell: unit_of_cell(cell) == "MHz",
}


def looks_like_row(cells: Sequence[str]) -> bool:
    """Whether this line could be a row of a query: at least one cell must have a shape that only rows have."""
    filled = [cell for cell in cells if cell]
    if len(cells) == 1:
        return bool(filled) and bool(_UUID.match(filled[0]) or _BUS.match(filled[0]))
    return len(filled) * 2 > len(cells) and any(
        is_timestamp(cell)
        or _UUID.match(cell)
        or _BUS.match(cell)
        or status_of_text(cell) is not None
        or _INTEGER.match(cell)
        or unit_of_cell(cell) in {"W", "%", "MiB", "MHz"}
        for cell in filled
    )


def infer_columns(rows: Sequence[Sequence[str]]) -> tuple[Column, ...]:
    """The columns of rows of equal length; an empty field where more than one meaning is possible."""
    for layout in _LAYOUTS:
        if len(layout["columns"]) == len(rows[0]) and all(_fits(row, layout["shapes"]) for row in rows):
            return tuple(_column(name) for name in layout["columns"])
    kinds = [_column_shape([row[place] for row in rows]) for place in range(len(rows[0]))]
    fields = [
        kind if kind in {"timestamp", "uuid", "pci_bus_id", "name", "performance_state"} else "" for kind in kinds
    ]
    _infer_index(rows, kinds, fields)
    _assign_in_order(rows, kinds, fields, "watts", ("power_draw", "power_limit"))
    _assign_in_order(rows, kinds, fields, "percent", ("utilization", "memory_utilization"))
    _assign_memory(rows, kinds, fields)
    if "watts" not in kinds and kinds.count("decimals") == 1:
        fields[kinds.index("decimals")] = "power_draw"
    return tuple(_column(name) for name in fields)


def _column(name: str) -> Column:
    field = "" if name.startswith("-") else name
    return Column(field, DEFAULT_UNITS.get(field, ""), field or "?")


def _fits(row: Sequence[str], shapes: Sequence[str]) -> bool:
    return all(
        status_of_text(cell) is not None or _SHAPES[shape](cell) for cell, shape in zip(row, shapes, strict=True)
    )


def _column_shape(cells: Sequence[str]) -> str:
    """The shape that all present cells of a column share; "" if they differ or all are absent."""
    kinds = {_cell_shape(cell) for cell in cells if status_of_text(cell) is None}
    if kinds == {"integer", "decimals"}:
        kinds = {"number"}
    return kinds.pop() if len(kinds) == 1 else ""


def _cell_shape(cell: str) -> str:
    if is_timestamp(cell):
        return "timestamp"
    if _UUID.match(cell):
        return "uuid"
    if _BUS.match(cell):
        return "pci_bus_id"
    if _STATE.match(cell):
        return "performance_state"
    if _INTEGER.match(cell):
        return "integer"
    if _DECIMALS.match(cell):
        return "decimals"
    by_unit = {"W": "watts", "%": "percent", "MiB": "memory", "MHz": "mhz"}
    if unit := by_unit.get(unit_of_cell(cell)):
        return unit
    return "name" if _NAME.search(cell) else ""


def _infer_index(rows: Sequence[Sequence[str]], kinds: Sequence[str], fields: list[str]) -> None:
    """The first column, or the one after the timestamp, is the index if it holds small numbers from 0, or stands next
    to a name."""
    place = 1 if kinds and kinds[0] == "timestamp" else 0
    if place >= len(kinds) or kinds[place] != "integer":
        return
    values = {int(row[place]) for row in rows if _INTEGER.match(row[place])}
    beside_identity = any(kind in {"name", "uuid", "pci_bus_id"} for kind in kinds[place + 1 : place + 2])
    if max(values) < 64 and (beside_identity or (0 in values and max(values) < 2 * len(values) + 8)):
        fields[place] = "index"


def _assign_in_order(
    rows: Sequence[Sequence[str]], kinds: Sequence[str], fields: list[str], kind: str, names: Sequence[str]
) -> None:
    """Draw comes before limit and GPU utilization before memory utilization in every query seen so far.

    A lone percentage next to the performance state is a fan speed, not a utilization.
    """
    places = [place for place, found in enumerate(kinds) if found == kind]
    state = kinds.index("performance_state") if "performance_state" in kinds else -2
    if kind == "percent" and len(places) == 1 and abs(state - places[0]) == 1:
        return
    if kind == "percent" and len(places) > 1 and places[1] != places[0] + 1:
        places = places[:1]
    if kind == "watts" and len(places) == 2:
        first, second = ({row[place] for row in rows} for place in places)
        limit_first = len(first) == 1 < len(second) or (
            len(first) == len(second) == 1 and _are_whole(first) and not _are_whole(second)
        )
        if limit_first or _is_always_more(rows, places[0], places[1], _MOST_OF_LIMIT):
            # Of two, the limit is the constant one, the one in whole watts, or the one that the other cannot exceed.
            places.reverse()
    for place, name in zip(places, names, strict=False):
        fields[place] = name


def _are_whole(cells: Iterable[str]) -> bool:
    return all((value := read_number(cell).value) is not None and value.is_integer() for cell in cells)


def _is_always_more(rows: Sequence[Sequence[str]], one: int, other: int, factor: float) -> bool:
    """Whether one column holds more than `factor` times the other in each row that has both."""
    pairs = [(read_number(row[one]).value, read_number(row[other]).value) for row in rows]
    read = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return bool(read) and all(mine > factor * theirs for mine, theirs in read)


def _assign_memory(rows: Sequence[Sequence[str]], kinds: Sequence[str], fields: list[str]) -> None:
    """A single amount is memory used. Of two, the constant one is the total if the other one varies."""
    places = [place for place, kind in enumerate(kinds) if kind == "memory"]
    if len(places) == 1:
        fields[places[0]] = "memory_used"
    if len(places) != 2:
        return
    first, second = ({row[place] for row in rows} for place in places)
    if len(first) > 1 and len(second) == 1:
        fields[places[0]], fields[places[1]] = "memory_used", "memory_total"
    elif len(second) > 1 and len(first) == 1:
        fields[places[0]], fields[places[1]] = "memory_total", "memory_used"
