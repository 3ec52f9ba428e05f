"""Names of columns, cells and timestamps as any tool printed them -> our fields, numbers in our units, seconds.

Facts are data: tokens.toml (words that stand where a number should) and columns.toml (names of columns in all ages).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import resources
from typing import Final

from wattwatch.collectors.samples import GPU_READINGS, Reading, ReadingStatus

# Columns ------------------------------------------------------------------------------------------------------------

_UNIT_SUFFIX: Final = re.compile(r"\s*[\[(]\s*([^\])]*?)\s*[\])]\s*$")
_TRAILING_UNIT: Final = re.compile(r"\.(mib|mb|w|watts|mw|gb|gib|bytes|b)$")
_SEPARATORS: Final = re.compile(r"[\s._\-]+")
_THROTTLE_COLUMN: Final = re.compile(r"clocks\.(?:event|throttle)\.reasons\.(?!active$|supported$)([a-z.]+)$")
_HEADER_CELL: Final = re.compile(r"[A-Za-z][\w .\-/]*(\s*[\[(][^\])]*[\])])?$")

_NAMES: Final[dict[str, list[str]]] = tomllib.loads((resources.files(__package__) / "columns.toml").read_text("utf-8"))
FIELD_OF_NAME: Final[Mapping[str, str]] = {
    **{_SEPARATORS.sub(".", reading.query): reading.column for reading in GPU_READINGS.values() if reading.query},
    **{name: field for field, names in _NAMES.items() for name in names},
}
_FIELDS: Final = frozenset(FIELD_OF_NAME.values())
DEFAULT_UNITS: Final[Mapping[str, str]] = {
    reading.column: reading.query_unit for reading in GPU_READINGS.values() if reading.query_unit
}
READING_FIELDS: Final = frozenset(
    {"power_draw", "power_average", "power_instant", "utilization", "memory_used", "memory_utilization", "temperature"}
)
"""A table contains GPU readings only if it has one of these columns, or a column that identifies a GPU."""
IDENTITY_FIELDS: Final = frozenset({"index", "uuid", "pci_bus_id", "name"})
REQUIRED_COLUMNS: Final = "timestamp, index, power.draw, utilization.gpu, memory.used, enforced.power.limit"
"""The columns that error messages tell people to query."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the field it fills ("" for one that is not read) and the unit of cells that have none."""

    field: str
    unit: str
    printed: str


def read_column(printed: str) -> Column:
    """`power.draw [W]` -> ("power_draw", "W"). Also `power_draw`, `Power Draw (W)`, `memory_used_mb`."""
    text = printed.strip().strip('"')
    found = _UNIT_SUFFIX.search(text)
    unit = found[1] if found else ""
    name = _SEPARATORS.sub(".", (text[: found.start()] if found else text).casefold()).strip(".")
    if throttle := _THROTTLE_COLUMN.match(name):
        return Column(f"throttle {throttle[1].replace('.', '_')}", unit, text)
    if name.startswith("ecc.errors."):
        return Column(f"ecc {name.removeprefix('ecc.errors.')}", unit, text)
    field = FIELD_OF_NAME.get(name, "")
    if not unit and (trailing := _TRAILING_UNIT.search(name)):
        unit = trailing[1]
    if name.endswith(".ms") and field == "timestamp":
        unit = "ms"
    return Column(field, unit or DEFAULT_UNITS.get(field, ""), text)


def read_header(cells: Sequence[str]) -> tuple[Column, ...] | None:
    """The columns if this line is a header, else None. A header consists of words, at least one of them a column."""
    # An empty cell is allowed: pandas leaves the name of its own index empty.
    if not all(not cell or (len(cell) < 100 and _HEADER_CELL.match(cell)) for cell in cells):
        return None
    columns = tuple(read_column(cell) for cell in cells)
    known = [column for column in columns if column.field]
    if not known or (len(cells) == 1 and known[0].field in {"timestamp"}):
        return None
    return columns


def columns_from_names(names: Sequence[str]) -> tuple[Column, ...]:
    """Columns that the caller names, in nvidia-smi's words or ours."""
    return tuple(
        Column(name, DEFAULT_UNITS.get(name, ""), name) if name in _FIELDS else read_column(name) for name in names
    )


# Cells --------------------------------------------------------------------------------------------------------------


def _load_tokens() -> dict[str, ReadingStatus]:
    table = tomllib.loads((resources.files(__package__) / "tokens.toml").read_text("utf-8"))
    return {token: ReadingStatus(status) for status, tokens in table.items() for token in tokens}


TOKENS: Final[Mapping[str, ReadingStatus]] = _load_tokens()
UNITS: Final[Mapping[str, float]] = {
    "": 1.0,
    "w": 1.0,
    "mw": 1e-3,
    "kw": 1e3,
    "%": 1.0,
    "c": 1.0,
    "°c": 1.0,
    "celsius": 1.0,
    "celsius degree": 1.0,  # xpu-smi
    "mhz": 1.0,
    "ghz": 1e3,
    "b": 1.0,
    "bytes": 1.0,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "kb": 2.0**10,
    "mb": 2.0**20,  # nvidia-smi before R331 printed MB and meant MiB
    "gb": 2.0**30,
    "j": 1.0,
    "mj": 1e-3,
}
_KIND_OF_UNIT: Final = {
    unit: kind
    for kind, units in {
        "power": ("w", "mw", "kw"),
        "share": ("%",),
        "temperature": ("c", "°c"),
        "frequency": ("mhz", "ghz"),
        "amount": ("b", "bytes", "kib", "mib", "gib", "kb", "mb", "gb"),
        "energy": ("j", "mj"),
    }.items()
    for unit in units
}
_NUMBER_WITH_UNIT: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%°]*)$")
_ABSENT_WORDS: Final = re.compile(
    r"not (supported|available|applicable|active)|permission|deprecat|unsupported|secondary"
)
CUT_OFF: Final = "..."
"""Stands for a value of which only the beginning is printed, as nvidia-smi cuts what is wider than its cell."""
CELL_CACHE_SIZE: Final = 1 << 15
"""Large enough to parse each distinct cell only once: a log of one day has 500,000 rows but few distinct cells."""


@lru_cache(CELL_CACHE_SIZE)
def status_of_text(text: str) -> ReadingStatus | None:
    """Why this text is no value, or None where it is no such token (a number, a name, an unknown word)."""
    word = text.strip()
    if word == CUT_OFF:
        return ReadingStatus.UNPARSED
    bracketed = word.startswith("[") and word.endswith("]")
    word = " ".join(word.strip("[]").split()).casefold().rstrip(".")
    if (status := TOKENS.get(word)) is not None:
        return status
    if not bracketed and not word.startswith(("gpu is lost", "gpu requires reset", "err!")):
        return None
    # A bracketed text that is not in the table yet: judged by its own words, else a reading that failed.
    if "lost" in word:
        return ReadingStatus.LOST
    if "reset" in word:
        return ReadingStatus.RESET_REQUIRED
    if _ABSENT_WORDS.search(word):
        return ReadingStatus.UNSUPPORTED
    return ReadingStatus.UNREADABLE


@lru_cache(CELL_CACHE_SIZE)
def read_number(text: str, unit: str = "", lowest: float = 0.0, highest: float = 1e18) -> Reading:
    """The number in a cell, in our unit. `unit`: the unit of a cell that prints none, e.g. from the header.

    A value outside `lowest`..`highest` (our unit) is unreadable. A value that is cut off, an unknown word or an unknown
    unit is unparsed: a driver that fails to read a value says so in words that are known, or in brackets.
    """
    if (status := status_of_text(text)) is not None:
        return Reading(None, status)
    match = _NUMBER_WITH_UNIT.match(text.strip())
    scale = UNITS.get((match[2] or unit).casefold()) if match else None
    if match is None or scale is None:
        return Reading(None, ReadingStatus.UNPARSED)
    value = float(match[1]) * scale
    if lowest <= value <= highest:
        return Reading(value, ReadingStatus.OK)
    return Reading(None, ReadingStatus.UNREADABLE)


def unit_of_cell(text: str) -> str:
    """The unit that a numeric cell prints, "" without one."""
    match = _NUMBER_WITH_UNIT.match(text.strip())
    return match[2] if match else ""


# Timestamps: only differences matter, so one without a time zone is taken as UTC ------------------------------------

_YEAR_FIRST: Final = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})[ T]+(\d{1,2}):(\d{2})(?::(\d{2})([.,]\d+)?)?")
_YEAR_LAST: Final = re.compile(
    r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})[ T,]+(\d{1,2}):(\d{2})(?::(\d{2})([.,]\d+)?)?\s*([AP]M)?"
)
_DATE_IN_WORDS: Final = re.compile(
    r"(?:[A-Z][a-z]{2},? +)?(?:(?P<d1>\d{1,2}) (?P<m1>[A-Z][a-z]{2}) (?P<y1>\d{4})"
    r"|(?P<m2>[A-Z][a-z]{2}) +(?P<d2>\d{1,2})) (?P<h>\d{1,2}):(?P<min>\d{2}):(?P<s>\d{2})"
    r"(?P<half> [AP]M)?(?: [A-Z]{2,5})?(?: (?P<y2>\d{4}))?$"
)
_MAX_DATE_LINE: Final = 120
_EPOCH: Final = re.compile(r"\d{9,13}(\.\d+)?$")
_TIME_OF_DAY: Final = re.compile(r"(\d{1,2}):(\d{2}):(\d{2})([.,]\d+)?$")  # xpu-smi, dmon -o T
_DAY_SECONDS: Final = 86400.0
_MONTH_NAMES: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS: Final = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}


def is_timestamp(text: str) -> bool:
    """A time of day, with a date or without; a bare number is not one (it may be anything)."""
    text = text.strip()
    return bool(
        _YEAR_FIRST.match(text) or _YEAR_LAST.match(text) or _DATE_IN_WORDS.match(text) or _TIME_OF_DAY.match(text)
    )


@lru_cache(CELL_CACHE_SIZE)
def measures_the_same(text: str, unit: str) -> bool:
    """Whether a cell may hold a value of this unit: MiB and GiB measure the same, MiB and W do not. A cell without a
    unit, or in no known one, may."""
    scales = [_KIND_OF_UNIT.get(each.casefold()) for each in (unit_of_cell(text), unit)]
    return None in scales or scales[0] == scales[1]


def find_timestamp(line: str) -> str:
    """The date with a time of day in a line that is not a row of a table, such as `date` or a script prints above it;
    "" if there is none."""
    text = line.strip()
    if not text or text[0] in "|+" or len(text) > _MAX_DATE_LINE:
        return ""
    text = text.rstrip("=-*#])} ")
    if is_timestamp(text):
        return text
    for pattern in (_YEAR_FIRST, _YEAR_LAST, _DATE_IN_WORDS):
        if found := pattern.search(text):
            return found[0]
    return ""


def parse_timestamps(texts: Sequence[str]) -> list[float | None]:
    """Seconds of each timestamp of one log, None where it is none.

    03-11-2026 is 3 November or 11 March. A timestamp with a number above 12 decides for the whole log; without one,
    the order under which the log spans less time is taken, and day first if both span the same. Times without a date
    count from the first midnight.
    """
    # More than a few: the first row of a log may be the end of one that was cut, with half a time stamp.
    some = [text.strip() for text in texts[:1000] if text.strip()]
    if 2 * sum(_TIME_OF_DAY.match(text) is not None for text in some) > len(some):
        return _parse_times_of_day(texts)
    day_first = _parse_all(texts, day_first=True)
    if not any(_YEAR_LAST.match(text.strip()) for text in texts[:1000]):
        return day_first
    month_first = _parse_all(texts, day_first=False)
    unread = day_first.count(None) - month_first.count(None)
    if unread:
        return day_first if unread < 0 else month_first
    return month_first if _span(month_first) < _span(day_first) else day_first


def _parse_times_of_day(texts: Sequence[str]) -> list[float | None]:
    """Seconds since the midnight before the first one; a step back by more than half a day is the next midnight."""
    result: list[float | None] = []
    days, before = 0.0, 0.0
    for text in texts:
        match = _TIME_OF_DAY.match(text.strip())
        if match is None:
            result.append(None)
            continue
        hour, minute, second, fraction = match.groups()
        seconds = int(hour) * 3600 + int(minute) * 60 + int(second) + (float(f"0.{fraction[1:]}") if fraction else 0.0)
        if seconds < before - _DAY_SECONDS / 2:
            days += _DAY_SECONDS
        before = seconds
        result.append(days + seconds)
    return result


def _span(seconds: Sequence[float | None]) -> float:
    known = [value for value in seconds if value is not None]
    return max(known) - min(known) if known else 0.0


def _parse_all(texts: Sequence[str], day_first: bool) -> list[float | None]:
    return [_parse_timestamp(text.strip(), day_first) for text in texts]


def _parse_timestamp(text: str, day_first: bool) -> float | None:
    if match := _YEAR_FIRST.match(text):
        year, month, day, hour, minute, second, fraction = match.groups()
        return _to_seconds(year, month, day, hour, minute, second, fraction)
    if match := _YEAR_LAST.match(text):
        first, second_part, year, hour, minute, second, fraction, half = match.groups()
        day, month = (first, second_part) if day_first else (second_part, first)
        return _to_seconds(year, month, day, hour, minute, second, fraction, half)
    if match := _DATE_IN_WORDS.match(text):
        month_name, day, year = match["m1"] or match["m2"], match["d1"] or match["d2"], match["y1"] or match["y2"]
        if month_name not in _MONTHS or year is None:
            return None
        month = str(_MONTHS[month_name])
        return _to_seconds(year, month, day, match["h"], match["min"], match["s"], None, match["half"])
    if _EPOCH.match(text):
        value = float(text)
        return value / 1000.0 if value > 1e11 else value  # milliseconds: 1e11 s would be the year 5138
    return None


def _to_seconds(
    year: str,
    month: str,
    day: str,
    hour: str,
    minute: str,
    second: str | None,
    fraction: str | None,
    half: str | None = None,
) -> float | None:
    hours = int(hour)
    if half and "P" in half and hours < 12:
        hours += 12
    elif half and "A" in half and hours == 12:
        hours = 0
    try:
        moment = datetime(int(year), int(month), int(day), hours, int(minute), int(second or 0), tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + (float("0." + fraction[1:]) if fraction else 0.0)
