"""Breaking a tie by what ranks of the like place do: other groups of the same kind, and the others in the same slot.

Ranks of one program launch the like operations in the like groups, whatever their own group is: of two tensor-parallel
ranks that disagree, the one that does what all other pairs do at that slot is not the one that is wrong. This is a
vote, not a proof: stages of a pipeline may differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from watcher.diagnose.collectives.disagreements import Disagreement
from watcher.diagnose.collectives.operations import signature
from watcher.diagnose.collectives.standing import Standings
from watcher.diagnose.collectives.wait_graph import Standstill
from watcher.diagnose.flight.record import Launch

Counts = tuple[tuple[str, int], ...]


def odd_among_siblings(parting: Disagreement, standings: Standings) -> tuple[int, ...]:
    """Ranks whose operation no group of the same kind and size has at this slot, while another side's one is usual."""
    group = parting.group
    seen: Counter[tuple[object, ...]] = Counter()
    for other, standing in standings.groups.items():
        if other != group and other.description == group.description and len(other.members) == len(group.members):
            operations = (standing.operation_at(rank, parting.slot) for rank in standing.records)
            seen.update({signature(operation) for operation in operations if operation is not None})
    usual = [ranks for operation, ranks in parting.parties if seen[signature(operation)]]
    if not group.description or len(usual) != 1:
        return ()
    return tuple(sorted(rank for _, ranks in parting.parties if ranks is not usual[0] for rank in ranks))


def odd_by_count(ring: Sequence[Standstill], common: set[int], standings: Standings) -> tuple[int, ...]:
    """Of the ranks in one slot, those that launched more or fewer of the other kinds before they came to it.
    `common`: ranks that are in all groups of the ring."""
    widest = max(ring, key=lambda each: len(each.waiters))
    kinds = {group.description for group in standings.groups} - {widest.group.description}
    # Stages of a pipeline send and receive differently often, and their counts are mixed with those.
    kinds -= {group.description for group, standing in standings.groups.items() if not standing.counted}
    alike: dict[Counts, list[int]] = defaultdict(list)
    for rank in widest.waiters:
        alike[_launched_before(widest, rank, kinds, standings)].append(rank)
    most = max(alike.values(), key=len)
    if 2 * len(most) <= len(widest.waiters) or len({tuple(kind for kind, _ in counts) for counts in alike}) != 1:
        return ()
    odd = {rank for ranks in alike.values() if ranks is not most for rank in ranks}
    # The ring is between ranks that are in all of its groups: others that differ are of another kind, not wrong.
    return tuple(sorted(odd)) if odd <= common else ()


def _launched_before(standstill: Standstill, rank: int, kinds: set[str], standings: Standings) -> Counts:
    """Launches of each other kind of group before the rank's launch of this one."""
    own = standings.groups[standstill.group].at(rank, standstill.slot)
    counts: dict[str, int] = {}
    for group, standing in standings.groups.items():
        record = standing.records.get(rank)
        if record is None or group.description not in kinds or record.last_enqueued is None:
            continue
        before = record.last_enqueued - sum(_after(launch, own) for launch in record.launches)
        counts[group.description] = counts.get(group.description, 0) + before
    return tuple(sorted(counts.items()))


def _after(launch: Launch, own: Launch | None) -> bool:
    return own is not None and launch.record > own.record
