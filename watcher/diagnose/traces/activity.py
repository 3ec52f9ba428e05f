"""What each rank is doing, from its main thread: an activity in plain words and the line of its own code. Pure.

Ranks that stand at the same line of their own code in the same activity are one group; where more than half of the
ranks are in one group, the others stand out.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Final

from watcher.diagnose.evidence import RankStacks, StackFrame, ThreadStack
from watcher.diagnose.traces.stacks import main_thread

LIBRARY: Final = re.compile(
    r"(^|/)(site-packages|dist-packages)/|(^|/)lib/(python3|python3\.\d+)/|<|\.so(\.\d+)*$"
    r"|(^|/)torch/(distributed|nn|autograd|utils|optim|multiprocessing|cuda|_\w+|serialization|functional|amp)\b"
)
STANDARD: Final = re.compile(r"(^|/)lib/python3[^/]*/(?!(site|dist)-packages/)|<")
OWN_CODE: Final = "own_code"


@dataclass(frozen=True, slots=True)
class Activity:
    name: str
    words: str
    frames: re.Pattern[str]
    anywhere: bool
    own: re.Pattern[str] | None = None  # function of the user's own line, where that must fit too


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one rank is. `frame` is the innermost line of its own code; None where all of it is libraries."""

    rank: int
    activity: str  # name of a row of activities.toml, or "own_code"
    words: str
    frame: StackFrame | None
    source: str


@dataclass(frozen=True, slots=True)
class StandingGroup:
    """Ranks at one line in one activity."""

    ranks: tuple[int, ...]
    activity: str
    words: str
    frame: StackFrame | None


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("activities.toml").read_text("utf-8"))


@cache
def activities() -> tuple[Activity, ...]:
    return tuple(
        Activity(
            row["name"],
            row["words"],
            re.compile("|".join(row["frames"])),
            row.get("anywhere", False),
            re.compile(row["own"]) if "own" in row else None,
        )
        for row in _table()["activity"]
    )


@cache
def libraries() -> frozenset[str]:
    """First part of a path below site-packages, or of one that a tool has shortened."""
    return frozenset(_table()["libraries"])


def is_library(file: str) -> bool:
    path = file.replace("\\", "/")
    return LIBRARY.search(path) is not None or _short_name_of_library(path)


def _short_name_of_library(path: str) -> bool:
    """py-spy cuts what is on sys.path: "threading.py", "transformers/trainer.py"."""
    if path.startswith("/"):
        return False
    first, *rest = PurePosixPath(path).parts or ("",)
    name = first.removesuffix(".py")
    return (bool(rest) and first in libraries()) or (name in sys.stdlib_module_names and name != "test")


def own_frames(thread: ThreadStack) -> tuple[StackFrame, ...]:
    """The user's frames, innermost first. Where all are below site-packages, those of packages that are not known: a
    trainer that was installed."""
    own = tuple(frame for frame in thread.frames if not is_library(frame.file))
    return own or tuple(frame for frame in thread.frames if not STANDARD.search(frame.file) and not _known(frame.file))


def _known(file: str) -> bool:
    package = re.split(r"(?:site|dist)-packages/", file.replace("\\", "/"))[-1].partition("/")[0]
    return package in libraries() or _short_name_of_library(file) or ".so" in file


def own_frame(thread: ThreadStack) -> StackFrame | None:
    """The innermost line of the user's code."""
    return next(iter(own_frames(thread)), None)


def standing_of(stacks: RankStacks) -> Standing | None:
    """None where the dump does not show the main thread."""
    thread = main_thread(stacks)
    if thread is None:
        return None
    own = own_frame(thread)
    depth = thread.frames.index(own) if own is not None else len(thread.frames)
    places = [f"{frame.file}:{frame.function}".replace("\\", "/") for frame in thread.frames]
    for activity in activities():
        if activity.own is not None and (own is None or not activity.own.search(own.function)):
            continue
        if any(activity.frames.search(place) for place in (places if activity.anywhere else places[:depth])):
            return Standing(stacks.rank, activity.name, activity.words, own, stacks.source)
    words = "is in its own code" if depth == 0 else "is in a library, called from its own code"
    return Standing(stacks.rank, OWN_CODE, words, own, stacks.source)


def standings(dumps: Sequence[RankStacks]) -> tuple[Standing, ...]:
    """In the order of ranks; of several dumps of a rank the first that shows its main thread."""
    found: dict[int, Standing] = {}
    for stacks in sorted(dumps, key=lambda stacks: (stacks.rank, stacks.source)):
        if stacks.rank not in found and (standing := standing_of(stacks)) is not None:
            found[stacks.rank] = standing
    return tuple(found.values())


def grouped(stands: Sequence[Standing]) -> tuple[StandingGroup, ...]:
    """The largest first."""
    groups: dict[tuple[str, StackFrame | None], list[Standing]] = defaultdict(list)
    for stand in stands:
        groups[stand.activity, stand.frame].append(stand)
    rows = [
        StandingGroup(tuple(sorted(stand.rank for stand in group)), activity, group[0].words, frame)
        for (activity, frame), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda group: (-len(group.ranks), group.ranks)))


def outliers(groups: Sequence[StandingGroup]) -> tuple[StandingGroup, ...]:
    """The groups beside the one that holds more than half of the ranks; () where none does: nobody is odd."""
    total = sum(len(group.ranks) for group in groups)
    if len(groups) < 2 or 2 * len(groups[0].ranks) <= total:
        return ()
    return tuple(groups[1:])
