"""What each rank is doing, from the stack of its main thread: an activity and the line of its own code. Pure.

Ranks in the same activity at the same line form a group; if one group holds more than half of the ranks, the ranks
outside it are outliers.
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
    """A row of activity.toml, where the fields are explained."""

    name: str
    words: str
    frames: re.Pattern[str]
    anywhere: bool
    own: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class RankActivity:
    """What one rank is doing."""

    rank: int
    activity: str  # name of a row of activities.toml, or "own_code"
    words: str  # completes "rank 3 ..."
    frame: StackFrame | None  # innermost line of its own code; None: all frames are of libraries
    source: str


@dataclass(frozen=True, slots=True)
class ActivityGroup:
    """Ranks in the same activity at the same line."""

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
    """None if the dump does not show the main thread."""
    thread = main_thread(stacks)
    if thread is None:
        return None
    own = innermost_user_frame(thread.frames)
    # Innermost first: the frames before `depth` were called from the innermost line of the job's own code.
    depth = thread.frames.index(own) if own is not None else len(thread.frames)
    places = [f"{frame.file}:{frame.function}".replace("\\", "/") for frame in thread.frames]
    for activity in activity_rules():
        if activity.own is not None and (own is None or not activity.own.search(own.function)):
            continue
        # Frames after it show how the job got there, which usually says nothing about what it does now.
        if any(activity.frames.search(place) for place in (places if activity.anywhere else places[:depth])):
            return RankActivity(stacks.rank, activity.name, activity.words, own, stacks.source)
    words = "is executing the job's code" if depth == 0 else "is in a library called by the job's code"
    return RankActivity(stacks.rank, USER_CODE, words, own, stacks.source)


def rank_activities(dumps: Sequence[RankStacks]) -> tuple[RankActivity, ...]:
    """Ordered by rank. Of several dumps of a rank, the first that shows its main thread counts."""
    found: dict[int, RankActivity] = {}
    for stacks in sorted(dumps, key=lambda stacks: (stacks.rank, stacks.source)):
        if stacks.rank not in found and (activity := rank_activity(stacks)) is not None:
            found[stacks.rank] = activity
    return tuple(found.values())


def group_by_activity(active: Sequence[RankActivity]) -> tuple[ActivityGroup, ...]:
    """Largest group first."""
    groups: dict[tuple[str, StackFrame | None], list[RankActivity]] = defaultdict(list)
    for each in active:
        groups[each.activity, each.frame].append(each)
    rows = [
        ActivityGroup(tuple(sorted(each.rank for each in group)), activity, group[0].words, frame)
        for (activity, frame), group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda group: (-len(group.ranks), group.ranks)))


def outliers(groups: Sequence[ActivityGroup]) -> tuple[ActivityGroup, ...]:
    """All groups but the one that holds more than half of the ranks; empty if no group does."""
    total = sum(len(group.ranks) for group in groups)
    if len(groups) < 2 or 2 * len(groups[0].ranks) <= total:
        return ()
    return tuple(groups[1:])


# A rank that finished the operation, or left no record, is at a line that has nothing to do with it.
BLOCKED_AT_LINE: Final = frozenset({MemberState.WAITING, MemberState.BEHIND, MemberState.SILENT})


def add_lines_from_stacks(collectives: CollectiveAnalysis, stacks: Sequence[RankStacks]) -> CollectiveAnalysis:
    """Adds the line of code of each rank where its flight record has none.

    Flight records in JSON, and those of gloo, do not include stacks.
    """
    frames = {
        each.rank: LaunchFrame(each.frame.function, each.frame.file, each.frame.line)
        for each in rank_activities(stacks)
        if each.frame is not None and each.frame.line is not None
    }

    def with_line(member: GroupMember) -> GroupMember:
        frame = frames.get(member.rank) if member.frame is None and member.state in BLOCKED_AT_LINE else None
        return member if frame is None else replace(member, frame=frame)

    groups = tuple(replace(group, members=tuple(map(with_line, group.members))) for group in collectives.groups)
    return replace(collectives, groups=groups)
