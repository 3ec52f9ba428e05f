"""Time stamps of logs -> seconds. Only differences matter: a stamp without a zone is taken as UTC."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

_YEAR_FIRST: Final = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})[ T]+(\d{1,2}):(\d{2})(?::(\d{2})([.,]\d+)?)?")
_YEAR_LAST: Final = re.compile(
    r"(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})[ T,]+(\d{1,2}):(\d{2})(?::(\d{2})([.,]\d+)?)?\s*([AP]M)?"
)
_WORDS: Final = re.compile(
    r"(?:[A-Z][a-z]{2},? +)?(?:(?P<d1>\d{1,2}) (?P<m1>[A-Z][a-z]{2}) (?P<y1>\d{4})"
    r"|(?P<m2>[A-Z][a-z]{2}) +(?P<d2>\d{1,2})) (?P<h>\d{1,2}):(?P<min>\d{2}):(?P<s>\d{2})"
    r"(?P<half> [AP]M)?(?: [A-Z]{2,5})?(?: (?P<y2>\d{4}))?$"
)
_NUMBER: Final = re.compile(r"\d{9,13}(\.\d+)?$")
_MONTH_NAMES: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS: Final = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}


def is_stamp(text: str) -> bool:
    """A date with a time of day; a bare number is none (it may be anything)."""
    text = text.strip()
    return bool(_YEAR_FIRST.match(text) or _YEAR_LAST.match(text) or _WORDS.match(text))


def read_stamps(texts: Sequence[str]) -> list[float | None]:
    """Seconds of each stamp, None where it is none.

    03-11-2026 is 3 November or 11 March: one of the stamps with a number above 12 settles it, else the reading under
    which the log spans less time, else day first.
    """
    day_first = _read_all(texts, day_first=True)
    if not any(_YEAR_LAST.match(text.strip()) for text in texts[:1000]):
        return day_first
    month_first = _read_all(texts, day_first=False)
    unread = day_first.count(None) - month_first.count(None)
    if unread:
        return day_first if unread < 0 else month_first
    return month_first if _span(month_first) < _span(day_first) else day_first


def _span(seconds: Sequence[float | None]) -> float:
    known = [value for value in seconds if value is not None]
    return max(known) - min(known) if known else 0.0


def _read_all(texts: Sequence[str], day_first: bool) -> list[float | None]:
    return [_read(text.strip(), day_first) for text in texts]


def _read(text: str, day_first: bool) -> float | None:
    if match := _YEAR_FIRST.match(text):
        year, month, day, hour, minute, second, fraction = match.groups()
        return _seconds(year, month, day, hour, minute, second, fraction)
    if match := _YEAR_LAST.match(text):
        first, second_part, year, hour, minute, second, fraction, half = match.groups()
        day, month = (first, second_part) if day_first else (second_part, first)
        return _seconds(year, month, day, hour, minute, second, fraction, half)
    if match := _WORDS.match(text):
        month_name, day, year = match["m1"] or match["m2"], match["d1"] or match["d2"], match["y1"] or match["y2"]
        if month_name not in _MONTHS or year is None:
            return None
        month = str(_MONTHS[month_name])
        return _seconds(year, month, day, match["h"], match["min"], match["s"], None, match["half"])
    if _NUMBER.match(text):
        value = float(text)
        return value / 1000.0 if value > 1e11 else value
    return None


def _seconds(
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
