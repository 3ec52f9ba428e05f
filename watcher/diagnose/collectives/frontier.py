"""Where each member of a group stands against the slot that the group is stuck at: for people, and for `--json`."""

from __future__ import annotations

from watcher.diagnose.collectives.standing import GroupStanding, Standings
from watcher.diagnose.diagnosis import GroupFrontier, Member, Place
from watcher.diagnose.flight.record import Frame, Group, Launch
from watcher.diagnose.traces.own_code import own_frame


def frontier(standings: Standings, group: Group, slot: int) -> GroupFrontier:
    """Every known member of the group at the slot, in the order of ranks."""
    standing = standings.groups[group]
    ranks = sorted({*group.members, *standing.records})
    return GroupFrontier(group, slot, tuple(_member(standings, standing, rank, slot) for rank in ranks))


def _member(standings: Standings, standing: GroupStanding, rank: int, slot: int) -> Member:
    record = standing.records.get(rank)
    if rank not in standings.ranks:
        return Member(rank, Place.ABSENT)
    launch = standing.at(rank, slot)
    if launch is not None:
        place = Place.WAITING if launch.open else Place.AHEAD
    elif standing.completed(rank, slot):
        place = Place.AHEAD
    elif standings.ranks[rank].primary is not None:
        place = Place.BEHIND
    else:
        place = Place.SILENT
    # What it is in instead says more than nothing.
    shown = launch or _elsewhere(standings, rank)
    return Member(
        rank,
        place,
        None if launch is None else launch.operation,
        None if record is None or not standing.counted else record.last_enqueued,
        None if record is None or not standing.counted else record.last_completed,
        None if shown is None else _line_of(shown),
    )


def _elsewhere(standings: Standings, rank: int) -> Launch | None:
    primary = standings.ranks[rank].primary
    return None if primary is None else primary[1]


def _line_of(launch: Launch) -> Frame | None:
    """The innermost line of the job's own code; where all is library, the innermost one."""
    return own_frame(launch.frames) or next(iter(launch.frames), None)
