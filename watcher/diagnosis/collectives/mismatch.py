"""Slots at which members of one group launched different things: the conclusive finding (arXiv 2608.05944, section 3).

The number of ranks decides who is wrong, never their order: the official analyser takes whichever file comes first as
the truth. Without a majority both sides are named as tied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.common.formatting import format_ranks
from wattwatch.watcher.diagnosis.collectives.conclusion import CollectiveHang
from wattwatch.watcher.diagnosis.collectives.operations import (
    describe_operation,
    has_per_rank_sizes,
    operation_signature,
    same_kind,
)
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, RecordedJob, collective_launches
from wattwatch.watcher.diagnosis.collectives.wait_graph import StalledOperation
from wattwatch.watcher.diagnosis.flight_recorder.model import Operation, OperationLaunch, ProcessGroup
from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict

# Several launches in one: members may put different ones together, and the name says nothing of what is in it.
NOT_COMPARED = frozenset({"coalesced"})


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first slot of a group at which its members part and that somebody is still in. Parties by size, then rank."""

    group: ProcessGroup
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


def find_disagreements(standings: RecordedJob) -> list[Disagreement]:
    """The first one of each group in which somebody waits; the largest group first."""
    # By identity first: a group of a thousand members takes long to hash, and a rank may wait in it often.
    waited_in = {
        group for rank in standings.ranks.values() for group in {id(group): group for group, _ in rank.waits}.values()
    }
    found = [
        parting
        for group, standing in standings.groups.items()
        if group in waited_in and (parting := _first_disagreement(standing)) is not None
    ]
    return sorted(found, key=lambda each: (-len(each.group.members), each.group, each.slot))


def _first_disagreement(standing: GroupState) -> Disagreement | None:
    seen: dict[int, Operation] = {}
    parted: set[int] = set()
    for record in standing.records.values():
        for launch in collective_launches(record):
            operation = launch.operation
            first = seen.setdefault(launch.slot, operation)
            # Identity first: the reader makes equal operations one object, and there may be millions.
            if (
                first is not operation
                and operation.name not in NOT_COMPARED
                and operation_signature(first) != operation_signature(operation)
            ):
                parted.add(launch.slot)
    # What all finished nevertheless is not what they wait for.
    open_slots = {launch.slot for record in standing.records.values() for launch in record.launches if launch.open}
    held = parted & open_slots
    return None if not held else _disagreement_at(standing, min(held))


def _disagreement_at(standing: GroupState, slot: int) -> Disagreement:
    ranks_of: dict[tuple[object, ...], list[int]] = defaultdict(list)
    operation_of: dict[tuple[object, ...], Operation] = {}
    for rank in sorted(standing.records):
        operation = standing.operation_at(rank, slot)
        if operation is not None:
            ranks_of[operation_signature(operation)].append(rank)
            operation_of.setdefault(operation_signature(operation), operation)
    parties = sorted(
        ((operation_of[key], tuple(ranks)) for key, ranks in ranks_of.items()),
        key=lambda party: (-len(party[1]), party[1]),
    )
    kinds = any(not same_kind(parties[0][0], operation) for operation, _ in parties[1:])
    return Disagreement(standing.group, slot, tuple(parties), kinds)


def sizes_differ(standing: GroupState, slot: int) -> bool:
    """Where sizes are each rank's own, and are not all the same."""
    operations = {standing.operation_at(rank, slot) for rank in standing.records} - {None}
    return len(operations) > 1 and all(each is not None and has_per_rank_sizes(each) for each in operations)


# Breaking a tie by what ranks of the like place do: other groups of the same kind, and the others in the same slot.
#
# Ranks of one program launch the like operations in the like groups, whatever their own group is: of two tensor-parallel
# ranks that disagree, the one that does what all other pairs do at that slot is not the one that is wrong. This is a
# vote, not a proof: stages of a pipeline may differ.

LaunchCounts = tuple[tuple[str, int], ...]


def minority_by_peer_groups(parting: Disagreement, standings: RecordedJob) -> tuple[int, ...]:
    """Ranks whose operation no group of the same kind and size has at this slot, while another side's one is usual."""
    group = parting.group
    seen: Counter[tuple[object, ...]] = Counter()
    for other, standing in standings.groups.items():
        if other != group and other.description == group.description and len(other.members) == len(group.members):
            operations = (standing.operation_at(rank, parting.slot) for rank in standing.records)
            seen.update({operation_signature(operation) for operation in operations if operation is not None})
    usual = [ranks for operation, ranks in parting.parties if seen[operation_signature(operation)]]
    if not group.description or len(usual) != 1:
        return ()
    return tuple(sorted(rank for _, ranks in parting.parties if ranks is not usual[0] for rank in ranks))


def minority_by_launch_counts(
    ring: Sequence[StalledOperation], common: set[int], standings: RecordedJob
) -> tuple[int, ...]:
    """Of the ranks in one slot, those that launched more or fewer of the other kinds before they came to it.
    `common`: ranks that are in all groups of the ring."""
    widest = max(ring, key=lambda each: len(each.waiters))
    kinds = {group.description for group in standings.groups} - {widest.group.description}
    # Stages of a pipeline send and receive differently often, and their counts are mixed with those.
    kinds -= {group.description for group, standing in standings.groups.items() if not standing.counted}
    alike: dict[LaunchCounts, list[int]] = defaultdict(list)
    for rank in widest.waiters:
        alike[_launched_before(widest, rank, kinds, standings)].append(rank)
    most = max(alike.values(), key=len)
    if 2 * len(most) <= len(widest.waiters) or len({tuple(kind for kind, _ in counts) for counts in alike}) != 1:
        return ()
    odd = {rank for ranks in alike.values() if ranks is not most for rank in ranks}
    # The ring is between ranks that are in all of its groups: others that differ are of another kind, not wrong.
    return tuple(sorted(odd)) if odd <= common else ()


def _launched_before(standstill: StalledOperation, rank: int, kinds: set[str], standings: RecordedJob) -> LaunchCounts:
    """Launches of each other kind of group before the rank's launch of this one."""
    own = standings.groups[standstill.group].at(rank, standstill.slot)
    counts: dict[str, int] = {}
    for group, standing in standings.groups.items():
        record = standing.records.get(rank)
        if record is None or group.description not in kinds or record.last_enqueued is None:
            continue
        before = record.last_enqueued - sum(_launched_after(launch, own) for launch in record.launches)
        counts[group.description] = counts.get(group.description, 0) + before
    return tuple(sorted(counts.items()))


def _launched_after(launch: OperationLaunch, own: OperationLaunch | None) -> bool:
    return own is not None and launch.record > own.record


# Who stands against whom where ranks wait for one another in groups that they entered in different orders. Pure.


def cycle_sides(ring: tuple[StalledOperation, ...]) -> list[tuple[StalledOperation, tuple[int, ...]]]:
    """Ranks in the like operation of the like group are one side; the largest first, with one standstill of each."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    shown: dict[tuple[str, str], StalledOperation] = {}
    for standstill in ring:
        side = (_group_kind(standstill.group, ring), standstill.operation.name)
        ranks[side] += standstill.waiters
        shown.setdefault(side, standstill)
    sides = [(shown[side], tuple(sorted(ranks[side]))) for side in ranks]
    return sorted(sides, key=lambda side: (-len(side[1]), side[1]))


def _group_kind(group: ProcessGroup, ring: tuple[StalledOperation, ...]) -> str:
    """Groups of one description are alike where they share no member; else each is a kind of its own."""
    alike = [each.group for each in ring if each.group != group and str(each.group) == str(group)]
    return f"{group} {group.name}" if any(set(each.members) & set(group.members) for each in alike) else str(group)


def tied_sides(sides: list[tuple[StalledOperation, tuple[int, ...]]], common: set[int]) -> tuple[tuple[int, ...], ...]:
    """Those who are in all of the groups disagree; where there is no such rank on two sides, it may be anybody."""
    inside = [both for _, ranks in sides if (both := tuple(rank for rank in ranks if rank in common))]
    return tuple(inside) if len(inside) > 1 else tuple(ranks for _, ranks in sides)


# Ranks that do different things: at one slot of one group, or groups entered in different orders. Conclusive.

# How sure each is. Stated, not measured: public records with a known culprit are too few to count on.
CONFIDENCE_DISAGREEMENT: Final = 0.97
CONFIDENCE_CYCLE: Final = 0.8
CONFIDENCE_PEER_VOTE: Final = 0.7
TIED: Final = "as many on each side, so the records do not tell which one is wrong"
DECIDED_BY_PEER_GROUPS: Final = "the other groups of this kind tell who is wrong"
DECIDED_BY_LAUNCH_COUNTS: Final = "what the others launched before tells who is wrong"


def conclude_disagreement(parted: list[Disagreement], case: CollectiveHang) -> CollectiveAnalysis:
    decided = [each for each in parted if each.odd]
    culprits = tuple(sorted({rank for each in decided for rank in each.odd}))
    shown = (decided or parted)[0]
    sizes = not shown.kinds
    sides = [f"{format_ranks(ranks)} in {describe_operation(operation, sizes)}" for operation, ranks in shown.parties]
    why = f"slot {shown.slot:,} of {shown.group}: {', '.join(sides[:4])}"
    if len(sides) > 4:
        why += f" and {len(sides) - 4} more"
    sure = CONFIDENCE_DISAGREEMENT
    if not culprits:
        culprits = minority_by_peer_groups(shown, case.standings)
        sure = CONFIDENCE_PEER_VOTE if culprits else CONFIDENCE_DISAGREEMENT
        why += f"; {DECIDED_BY_PEER_GROUPS if culprits else TIED}"
    return case.reading(
        DiagnosisVerdict.MISMATCH if sizes else DiagnosisVerdict.DESYNC,
        True,
        culprits,
        sure,
        why,
        [(each.group, each.slot) for each in parted],
        tied=() if culprits else tuple(ranks for _, ranks in shown.parties),
    )


def conclude_cycle(ring: tuple[StalledOperation, ...], case: CollectiveHang) -> CollectiveAnalysis:
    """Groups entered in different orders. Only where all of them have the same members can their number decide."""
    sides = cycle_sides(ring)
    common = set.intersection(*(set(each.group.members) for each in ring))
    voters = sum(len(ranks) for _, ranks in sides)
    culprits: tuple[int, ...] = ()
    if all(set(each.group.members) == common for each in ring) and 2 * len(sides[0][1]) > voters:
        culprits = tuple(sorted(rank for _, ranks in sides[1:] for rank in ranks))
    words = [
        f"{format_ranks(ranks)} in {describe_operation(each.operation)} at slot {each.slot:,} of {each.group}"
        for each, ranks in sides[:4]
    ]
    why = f"each waits for the other: {', '.join(words)}"
    sure = CONFIDENCE_CYCLE
    if not culprits:
        culprits = minority_by_launch_counts(ring, common, case.standings)
        sure = CONFIDENCE_PEER_VOTE if culprits else CONFIDENCE_CYCLE
        why += f"; {DECIDED_BY_LAUNCH_COUNTS if culprits else TIED}"
    return case.reading(
        DiagnosisVerdict.DESYNC,
        not any(each.group in case.standings.guessed for each in ring),
        culprits,
        sure,
        why,
        [(each.group, each.slot) for each in ring],
        tied=() if culprits else tied_sides(sides, common),
    )
