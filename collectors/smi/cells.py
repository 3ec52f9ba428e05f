"""One cell of any tool's output -> a number in our unit, or None with the reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Final

from collectors.samples import Reading, Reason


def _load(name: str) -> dict[str, dict[str, str]]:
    return tomllib.loads((resources.files(__package__) / name).read_text("utf-8"))


TOKENS: Final[Mapping[str, Reason]] = {
    token: Reason(reason) for reason, words in _load("tokens.toml").items() for token in words
}
UNITS: Final[Mapping[str, float]] = {
    "": 1.0,
    "w": 1.0,
    "mw": 1e-3,
    "kw": 1e3,
    "%": 1.0,
    "c": 1.0,
    "°c": 1.0,
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
_NUMBER: Final = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%°]*)$")
_ABSENT_WORDS: Final = re.compile(
    r"not (supported|available|applicable|active)|permission|deprecat|unsupported|secondary"
)


# A log of a day has half a million rows, and few different cells.
KEPT_CELLS: Final = 1 << 15


@lru_cache(KEPT_CELLS)
def reason_of_text(text: str) -> Reason | None:
    """The reason that this text states, or None where it is no token (a number, a name, a word we do not know)."""
    word = text.strip()
    bracketed = word.startswith("[") and word.endswith("]")
    word = " ".join(word.strip("[]").split()).casefold().rstrip(".")
    if (reason := TOKENS.get(word)) is not None:
        return reason
    if not bracketed and not word.startswith(("gpu is lost", "gpu requires reset", "err!")):
        return None
    # A bracketed text that nobody has listed yet: its own words, else a reading that failed.
    if "lost" in word:
        return Reason.LOST
    if "reset" in word:
        return Reason.RESET_REQUIRED
    if _ABSENT_WORDS.search(word):
        return Reason.UNSUPPORTED
    return Reason.UNREADABLE


@lru_cache(KEPT_CELLS)
def read_number(text: str, unit: str = "", bottom: float = 0.0, top: float = 1e18) -> Reading:
    """The number of a cell in our unit. `unit`: what counts where the cell names none, e.g. from the header.

    A value outside `bottom`..`top` (our unit), a word, or a unit that we do not know is unreadable.
    """
    if (reason := reason_of_text(text)) is not None:
        return Reading(None, reason)
    match = _NUMBER.match(text.strip())
    scale = UNITS.get((match[2] or unit).casefold()) if match else None
    if match is None or scale is None:
        return Reading(None, Reason.UNREADABLE)
    value = float(match[1]) * scale
    return Reading(value, Reason.OK) if bottom <= value <= top else Reading(None, Reason.UNREADABLE)


def unit_of(text: str) -> str:
    """The unit that a numeric cell carries, "" without one."""
    match = _NUMBER.match(text.strip())
    return match[2] if match else ""
