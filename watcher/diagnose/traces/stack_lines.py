"""The line of code at which a rank stands, for records that have none: JSON, and gloo, carry no stacks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from watcher.diagnose.diagnosis import CollectiveReading, Member, Place
from watcher.diagnose.evidence import RankStacks
from watcher.diagnose.flight.record import Frame
from watcher.diagnose.traces.activity import rank_activities

# Of who has finished or left no record, the line where it stands is not that of the collective.
STANDS_THERE: Final = frozenset({Place.WAITING, Place.BEHIND, Place.SILENT})


def with_lines(reading: CollectiveReading, stacks: Sequence[RankStacks]) -> CollectiveReading:
    """The same, with the innermost line of a rank's own code where its record tells none."""
    frames = {
        each.rank: Frame(each.frame.function, each.frame.file, each.frame.line)
        for each in rank_activities(stacks)
        if each.frame is not None and each.frame.line is not None
    }

    def told(member: Member) -> Member:
        frame = frames.get(member.rank) if member.frame is None and member.place in STANDS_THERE else None
        return member if frame is None else replace(member, frame=frame)

    groups = tuple(replace(group, members=tuple(map(told, group.members))) for group in reading.groups)
    return replace(reading, groups=groups)
