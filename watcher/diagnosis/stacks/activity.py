"""What each rank is doing, from its main thread: an activity in plain words and the line of its own code. Pure.

Ranks that stand at the same line of their own code in the same activity are one group; where more than half of the
ranks are in one group, the others stand out.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Final

from wattwatch.watcher.diagnosis.flight_recorder.model import LaunchFrame
from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, GroupMember, MemberState, RankStacks, StackFrame
from wattwatch.watcher.diagnosis.stacks.python_stacks import main_thread
from wattwatch.watcher.diagnosis.stacks.user_code import innermost_user_frame

USER_CODE: Final = "own_code"


@dataclass(frozen=True, slots=True)
class ActivityRule:
    name: str
    words: str
    frames: re.Pattern[str]
    anywhere: bool
    own: re.Pattern[str] | None = None  # function of the user's own line, where that must fit too


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Where one rank is. `frame` is the innermost line of its own code; None where all of it is libraries."""

    rank: int
    activity: str  # name of a row of activities.toml, or "own_code"
    words: str
    frame: StackFrame | None
    source: str


@dataclass(frozen=True, slots=True)
class ActivityGroup:
    """Ranks at one line in one activity."""

    ranks: tuple[int, ...]
    activity: str
    words: str
    frame: StackFrame | None


@cache
def activity_rules() -> tuple[ActivityRule, ...]:
    rows = tomllib.loads(resources.files(__package__).joinpath("activity.toml").read_text("utf-8"))["activity"]
    return tuple(
        ActivityRule(
            row["name"],
            row["words"],
            re.compile("|".join(row["frames"])),
            row.get("anywhere", False),
            re.compile(row["own"]) if "own" in row else None,
        )
        for row in rows
    )


def rank_activity(stacks: RankStacks) -> RankActivity | None:
    """None where the dump does not show the main thread."""
    thread = main_thread(stacks)
    if thread is None:
        return None
    own = innermost_user_frame(thread.frames)
    depth = thread.frames.index(own) if own is not None else len(thread.frames)
    places = [f"{frame.file}:{frame.function}".replace("\\", "/") for frame in thread.frames]
    for activity in activity_rules():
        if activity.own is not None and (own is None or not activity.own.search(own.function)):
            continue
        if any(activity.frames.search(place) for place in (places if activity.anywhere else places[:depth])):
            return RankActivity(stacks.rank, activity.name, activity.words, own, stacks.source)
    words = "is in its own code" if depth == 0 else "is in a library, called from its own code"
    return RankActivity(stacks.rank, USER_CODE, words, own, stacks.source)


def rank_activities(dumps: Sequence[RankStacks]) -> tuple[RankActivity, ...]:
    """In the order of ranks; of several dumps of a rank the first that shows its main thread."""
    found: dict[int, RankActivity] = {}
    for stacks in sorted(dumps, key=lambda stacks: (stacks.rank, stacks.source)):
        if stacks.rank not in found and (activity := rank_activity(stacks)) is not None:
            found[stacks.rank] = activity
    return tuple(found.values())


def group_by_activity(active: Sequence[RankActivity]) -> tuple[ActivityGroup, ...]:
    """The largest first."""
    groups: dict[tuple[str, StackFrame | None], list[RankActivity]] = defaultdict(list)
    for each in active:
        groups[each.activity, each.frame].append(each)
    rows = [
        ActivityGroup(tuple(sorted(each.rank for each in group)), activity, group[0].words, frame)
        for (activity, frame), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda group: (-len(group.ranks), group.ranks)))


def outliers(groups: Sequence[ActivityGroup]) -> tuple[ActivityGroup, ...]:
    """The groups beside the one that holds more than half of the ranks; () where none does: nobody is odd."""
    total = sum(len(group.ranks) for group in groups)
    if len(groups) < 2 or 2 * len(groups[0].ranks) <= total:
        return ()
    return tuple(groups[1:])


# The line of code at which a rank stands, for records that have none: JSON, and gloo, carry no stacks. Pure.

# Of who has finished or left no record, the line where it stands is not that of the collective.
BLOCKED_AT_LINE: Final = frozenset({MemberState.WAITING, MemberState.BEHIND, MemberState.SILENT})


def add_lines_from_stacks(reading: CollectiveAnalysis, stacks: Sequence[RankStacks]) -> CollectiveAnalysis:
    """The same, with the innermost line of a rank's own code where its record tells none."""
    frames = {
        each.rank: LaunchFrame(each.frame.function, each.frame.file, each.frame.line)
        for each in rank_activities(stacks)
        if each.frame is not None and each.frame.line is not None
    }

    def told(member: GroupMember) -> GroupMember:
        frame = frames.get(member.rank) if member.frame is None and member.place in BLOCKED_AT_LINE else None
        return member if frame is None else replace(member, frame=frame)

    groups = tuple(replace(group, members=tuple(map(told, group.members))) for group in reading.groups)
    return replace(reading, groups=groups)
