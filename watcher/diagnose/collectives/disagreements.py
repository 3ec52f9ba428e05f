"""Slots at which members of one group launched different things: the conclusive finding (arXiv 2608.05944, section 3).

The number of ranks decides who is wrong, never their order: the official analyser takes whichever file comes first as
the truth. Without a majority both sides are named as tied.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from watcher.diagnose.collectives.operations import same_kind, signature, sizes_are_own
from watcher.diagnose.collectives.standing import GroupStanding, Standings, collectives
from watcher.diagnose.flight.record import Group, Operation

# Several launches in one: members may put different ones together, and the name says nothing of what is in it.
NOT_COMPARED = frozenset({"coalesced"})


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first slot of a group at which its members part and that somebody is still in. Parties by size, then rank."""

    group: Group
    slot: int
    parties: tuple[tuple[Operation, tuple[int, ...]], ...]  # an operation of each, and who launched it
    kinds: bool  # the operations differ; else only their sizes or types

    @property
    def majority(self) -> tuple[Operation, tuple[int, ...]] | None:
        """More than half of those whose operation is known; None: a tie."""
        known = sum(len(ranks) for _, ranks in self.parties)
        return self.parties[0] if 2 * len(self.parties[0][1]) > known else None

    @property
    def odd(self) -> tuple[int, ...]:
        """Those beside the majority; () in a tie."""
        if self.majority is None:
            return ()
        return tuple(sorted(rank for _, ranks in self.parties[1:] for rank in ranks))


def disagreements(standings: Standings) -> list[Disagreement]:
    """The first one of each group in which somebody waits; the largest group first."""
    # By identity first: a group of a thousand members takes long to hash, and a rank may wait in it often.
    waited_in = {
        group for rank in standings.ranks.values() for group in {id(group): group for group, _ in rank.waits}.values()
    }
    found = [
        parting
        for group, standing in standings.groups.items()
        if group in waited_in and (parting := _first(standing)) is not None
    ]
    return sorted(found, key=lambda each: (-len(each.group.members), each.group, each.slot))


def _first(standing: GroupStanding) -> Disagreement | None:
    seen: dict[int, Operation] = {}
    parted: set[int] = set()
    for record in standing.records.values():
        for launch in collectives(record):
            operation = launch.operation
            first = seen.setdefault(launch.slot, operation)
            # Identity first: the reader makes equal operations one object, and there may be millions.
            if (
                first is not operation
                and operation.name not in NOT_COMPARED
                and signature(first) != signature(operation)
            ):
                parted.add(launch.slot)
    # What all finished nevertheless is not what they wait for.
    open_slots = {launch.slot for record in standing.records.values() for launch in record.launches if launch.open}
    held = parted & open_slots
    return None if not held else _at(standing, min(held))


def _at(standing: GroupStanding, slot: int) -> Disagreement:
    ranks_of: dict[tuple[object, ...], list[int]] = defaultdict(list)
    operation_of: dict[tuple[object, ...], Operation] = {}
    for rank in sorted(standing.records):
        operation = standing.operation_at(rank, slot)
        if operation is not None:
            ranks_of[signature(operation)].append(rank)
            operation_of.setdefault(signature(operation), operation)
    parties = sorted(
        ((operation_of[key], tuple(ranks)) for key, ranks in ranks_of.items()),
        key=lambda party: (-len(party[1]), party[1]),
    )
    kinds = any(not same_kind(parties[0][0], operation) for operation, _ in parties[1:])
    return Disagreement(standing.group, slot, tuple(parties), kinds)


def sizes_differ(standing: GroupStanding, slot: int) -> bool:
    """Where sizes are each rank's own, and are not all the same."""
    operations = {standing.operation_at(rank, slot) for rank in standing.records} - {None}
    return len(operations) > 1 and all(each is not None and sizes_are_own(each) for each in operations)
