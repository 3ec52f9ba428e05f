"""Ranks that stopped launching while all others went on, although all are stuck in the same operation.

Where a board dies, its host often learns of it and launches nothing more; the hosts of its peers go on until they have
to wait for their boards. All have then joined the operation that never ends, and only what they launched after it tells
them apart. Peers of one program differ by an operation or so, as they stop at different lines.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from watcher.diagnose.collectives.standing import GroupStanding, Standings

CLEARLY_BEHIND: Final = 3  # operations, in one of its groups


def _waited_in(standing: GroupStanding) -> bool:
    """Somebody is in a collective of it: the counts of a group that only sends and receives are those of a pair."""
    return standing.counted and any(
        launch.open and not launch.operation.point_to_point
        for record in standing.records.values()
        for launch in record.launches
    )


def laggards(standings: Standings) -> dict[int, tuple[GroupStanding, int]]:
    """Rank -> the group in which it is furthest behind, and by how many operations. Only ranks that are behind the most
    of their peers in each group whose members differ, and clearly so in one."""
    behind: dict[int, list[tuple[int, GroupStanding]]] = defaultdict(list)
    level: set[int] = set()
    for group in sorted(standings.groups):
        standing = standings.groups[group]
        launched = {r: part.last_enqueued for r, part in standing.records.items() if part.last_enqueued is not None}
        if len(set(launched.values())) < 2 or group in standings.guessed or not _waited_in(standing):
            continue
        furthest = max(launched.values())
        most = 2 * sum(count == furthest for count in launched.values()) > len(launched)
        for rank, count in launched.items():
            if count < furthest and (most or len(launched) == 2):
                behind[rank].append((furthest - count, standing))
            else:
                level.add(rank)
    clear = {
        rank: max(found, key=lambda each: (each[0], each[1].group))
        for rank, found in behind.items()
        if rank not in level and max(count for count, _ in found) >= CLEARLY_BEHIND
    }
    return {rank: (standing, count) for rank, (count, standing) in clear.items()}
