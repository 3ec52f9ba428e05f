"""Numbers as people read them. What is not known is a dash."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

UNKNOWN: Final = "–"
MINUTE: Final = 60.0
HOUR: Final = 3600.0
DAY: Final = 86_400.0


def duration(seconds: float | None) -> str:
    """1.4 s, 48 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    if seconds is None or seconds != seconds or seconds == float("inf"):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest:02} s" if minutes < 10 else f"{minutes} min"
    if whole < DAY:
        hours, rest = divmod(whole, 3600)
        return f"{hours} h {rest // 60:02} min"
    days, rest = divmod(whole, 86_400)
    return f"{days} d {rest // 3600} h"


def count(value: float | None) -> str:
    """30,849."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """97 %, of 0..1."""
    return UNKNOWN if value is None else f"{value:.0%}".replace("%", " %")


def size(value: float | None) -> str:
    """62 GB."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def clock_time(wall_seconds: float) -> str:
    """2026-08-20 10:15:00 UTC."""
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
