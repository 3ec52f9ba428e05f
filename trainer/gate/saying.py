"""How the judges speak: problems, who differs from whom, sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from trainer.gate.verdict import Level, Problem


def fail(text: str) -> Problem:
    return Problem(Level.FAIL, text)


def warn(text: str) -> Problem:
    return Problem(Level.WARN, text)


def differing(
    what: str, values: Iterable[tuple[str, object]], level: Level = Level.FAIL, then: str = ""
) -> list[Problem]:
    """A problem where `values`, pairs of (who, what it says), are not all the same: the odd ones are named.

    `then` says what to do.
    """
    by_value: dict[str, list[str]] = defaultdict(list)
    for who, value in values:
        by_value[shortly(value)].append(who)
    if len(by_value) < 2:
        return []
    groups = sorted(by_value.items(), key=lambda item: -len(item[1]))
    said = "; ".join(f"{value} on {some(who)}" for value, who in groups[:4])
    return [Problem(level, f"{what} differs: {said}{then}")]


def shortly(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    return text[:12] if len(text) == 64 else text  # a hash


def some(names: Iterable[str]) -> str:
    listed = sorted(dict.fromkeys(names))
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def size_in_words(count: float | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
