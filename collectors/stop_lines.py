"""Whether a log says that its job was stopped from outside: preempted, requeued, out of time, cancelled."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

LONGEST_LINE: Final = 2000
LONGEST_QUOTE: Final = 160


@dataclass(frozen=True, slots=True)
class Stop:
    """One kind of line; see stop_lines.toml."""

    hint: str
    line: re.Pattern[str]
    says: str
    sure: bool


@dataclass(frozen=True, slots=True)
class StopSeen:
    """`words`: what happened and the line that says so; `after`: the text behind that line."""

    words: str
    after: str


@cache
def facts() -> tuple[tuple[Stop, ...], re.Pattern[str]]:
    """The stops in the order of the file, and any failure."""
    table = tomllib.loads(resources.files(__package__).joinpath("stop_lines.toml").read_text("utf-8"))
    stops = tuple(Stop(s["hint"], re.compile(s["line"]), s["says"], s["sure"]) for s in table["stops"])
    return stops, re.compile("|".join(table["failures"]["lines"]))


def read_stop(text: str) -> StopSeen | None:
    """The surest line that says so, the last one of its kind; None where there is none or a failure outweighs it."""
    stops, failure = facts()
    for stop in stops:
        if stop.hint not in text:
            continue
        found = [m for m in re.finditer(r"[^\r\n]+", text) if stop.line.search(m.group()[:LONGEST_LINE])]
        if not found or (not stop.sure and failure.search(text)):
            continue
        quote = found[-1].group().strip()
        words = f"{stop.says}: {quote[-LONGEST_QUOTE:]}"
        return StopSeen(words, text[found[-1].end() :])
    return None
