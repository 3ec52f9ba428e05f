"""What a line at the end of a rank's log means, from failures.toml. Pure."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from watcher.diagnose.diagnosis import Cause

RAISED: Final = "raised"  # a Python exception that no row fits
SIZES: Final = "sizes"


@dataclass(frozen=True, slots=True)
class FailureKind:
    """`cause` None: the words do not tell. `follows`: another rank's end may be the reason."""

    name: str
    words: str  # after "rank 3"
    cause: Cause | None
    follows: bool
    texts: re.Pattern[str]


@cache
def failure_kinds() -> tuple[FailureKind, ...]:
    rows = tomllib.loads(resources.files(__package__).joinpath("failures.toml").read_text("utf-8"))["failure"]
    return tuple(
        FailureKind(
            row["name"],
            row["words"],
            Cause(row["cause"]) if "cause" in row else None,
            row.get("follows", False),
            re.compile("|".join(row["texts"])),
        )
        for row in rows
    )


def kind_named(name: str) -> FailureKind | None:
    return next((kind for kind in failure_kinds() if kind.name == name), None)


def kind_of_words(words: str) -> FailureKind | None:
    """Of a message of one or more lines."""
    return next((kind for kind in failure_kinds() if kind.texts.search(words)), None)
