"""Ranks that do different things: at one slot of one group, or in groups that they entered in different orders.

Members of a group that launched different operations at the same slot are proof of a fault in the program, the only
conclusive finding (arXiv 2608.05944, section 3). The number of ranks decides which side is wrong, never their order:
PyTorch's own analyzer takes whichever file comes first as correct. If no side has a majority, peers vote, and if they
do not help either, all sides are reported as tied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.common.formatting import agree_with_count, format_ranks
from wattwatch.watcher.diagnosis.collectives.conclusion import CollectiveHang
from wattwatch.watcher.diagnosis.collectives.operations import (
    describe_operation,
    has_per_rank_sizes,
    operation_signature,
)
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, RecordedJob, collective_launches
from wattwatch.watcher.diagnosis.collectives.wait_graph import StalledOperation
from wattwatch.watcher.diagnosis.flight_recorder.model import (
    Operation,
    OperationLaunch,
    ProcessGroup,
    position_text,
)
from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict

# A batch of launches. Members may batch different launches, and its name does not show what it contains.
NOT_COMPARED: Final = frozenset({"coalesced"})

# Confidences are chosen, not measured: there are too few public records with a known culprit.
CONFIDENCE_DISAGREEMENT: Final = 0.97
CONFIDENCE_CYCLE: Final = 0.8
CONFIDENCE_PEER_VOTE: Final = 0.7

MAX_SIDES_DESCRIBED: Final = 4
TIED: Final = "no side has a majority, so the records do not show which side is wrong"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first slot of a group at which its members launched different operations and that some are still in."""

    group: ProcessGroup
    slot: int
    sides: tuple[tuple[Operation, tuple[int, ...]], ...]  # an operation, and who launched it; largest side first
    operations_differ: bool  # False: only their sizes or types differ

    @property
    def majority(self) -> tuple[Operation, tuple[int, ...]] | None:
        """The side with more than half of the ranks whose operation is known; None: a tie."""
        known = sum(len(ranks) for _, ranks in self.sides)
        return self.sides[0] if 2 * len(self.sides[0][1]) > known else None

    @property
    def minority(self) -> tuple[int, ...]:
        """All ranks outside the majority; () in a tie."""
        if self.majority is None:
            return ()
        return tuple(sorted(rank for _, ranks in self.sides[1:] for rank in ranks))


def find_disagreements(job: RecordedJob) -> list[Disagreement]:
    """The first disagreement of each group in which ranks wait; the largest group first."""
    # By identity first: a group of a thousand members takes long to hash, and a rank may wait in it often.
    waited_in = {
        group for rank in job.ranks.values() for group in {id(group): group for group, _ in rank.waits}.values()
    }
    found = [
        disagreement
        for group, state in job.groups.items()
        if group in waited_in and (disagreement := _first_disagreement(state)) is not None
    ]
    return sorted(found, key=lambda each: (-len(each.group.members), each.group, each.slot))


def _first_disagreement(state: GroupState) -> Disagreement | None:
    first_operation: dict[int, Operation] = {}
    differing: set[int] = set()
    for record in state.records.values():
        for launch in collective_launches(record):
            operation = launch.operation
            first = first_operation.setdefault(launch.slot, operation)
            # Identity first: the loader makes equal operations one object, and there may be millions.
            if (
                first is not operation
                and operation.name not in NOT_COMPARED
                and operation_signature(first) != operation_signature(operation)
            ):
                differing.add(launch.slot)
    # A difference that all ranks got past is not what they wait for now.
    pending = {launch.slot for record in state.records.values() for launch in record.launches if launch.pending}
    blocking = differing & pending
    return None if not blocking else _disagreement_at(state, min(blocking))


def _disagreement_at(state: GroupState, slot: int) -> Disagreement:
    ranks_of: dict[tuple[object, ...], list[int]] = defaultdict(list)
    operation_of: dict[tuple[object, ...], Operation] = {}
    for rank in sorted(state.records):
        operation = state.operation_at(rank, slot)
        if operation is not None:
            ranks_of[operation_signature(operation)].append(rank)
            operation_of.setdefault(operation_signature(operation), operation)
    sides = sorted(
        ((operation_of[key], tuple(ranks)) for key, ranks in ranks_of.items()),
        key=lambda side: (-len(side[1]), side[1]),
    )
    operations_differ = any(operation.name != sides[0][0].name for operation, _ in sides[1:])
    return Disagreement(state.group, slot, tuple(sides), operations_differ)


def sizes_differ(state: GroupState, slot: int) -> bool:
    """Whether the ranks have different sizes in an operation that permits this (all_to_all)."""
    operations = {state.operation_at(rank, slot) for rank in state.records} - {None}
    return len(operations) > 1 and all(each is not None and has_per_rank_sizes(each) for each in operations)


def conclude_disagreement(disagreements: list[Disagreement], hang: CollectiveHang) -> CollectiveAnalysis:
    """`disagreements`: at least one."""
    # A fault in one group often shows in several: those with a majority decide, ties among them add nothing.
    decided = [each for each in disagreements if each.minority]
    culprits = tuple(sorted({rank for each in decided for rank in each.minority}))
    shown = (decided or disagreements)[0]
    only_sizes = not shown.operations_differ
    sides = [
        f"{format_ranks(ranks)} {agree_with_count('is', len(ranks))} in {describe_operation(operation, only_sizes)}"
        for operation, ranks in shown.sides
    ]
    why = f"at {position_text(shown.group, shown.slot)}, {', '.join(sides[:MAX_SIDES_DESCRIBED])}"
    if len(sides) > MAX_SIDES_DESCRIBED:
        why += f" and {len(sides) - MAX_SIDES_DESCRIBED} more"
    confidence = CONFIDENCE_DISAGREEMENT
    if not culprits:
        culprits = minority_by_peer_groups(shown, hang.job)
        confidence = CONFIDENCE_PEER_VOTE if culprits else CONFIDENCE_DISAGREEMENT
        right = {rank for _, ranks in shown.sides for rank in ranks}.difference(culprits)
        peers_agree = f"other groups of this kind launched the same operation as {format_ranks(right)}"
        why += f"; {peers_agree if culprits else TIED}"
    return hang.conclude(
        DiagnosisVerdict.MISMATCH if only_sizes else DiagnosisVerdict.DESYNC,
        True,
        culprits,
        confidence,
        why,
        [(each.group, each.slot) for each in disagreements],
        tied=() if culprits else tuple(ranks for _, ranks in shown.sides),
    )


def conclude_cycle(cycle: tuple[StalledOperation, ...], hang: CollectiveHang) -> CollectiveAnalysis:
    """Ranks that entered groups in different orders. Their number decides only if all groups have the same members."""
    sides = cycle_sides(cycle)
    common = set.intersection(*(set(each.group.members) for each in cycle))
    voters = sum(len(ranks) for _, ranks in sides)
    culprits: tuple[int, ...] = ()
    if all(set(each.group.members) == common for each in cycle) and 2 * len(sides[0][1]) > voters:
        culprits = tuple(sorted(rank for _, ranks in sides[1:] for rank in ranks))
    described = [
        f"{format_ranks(ranks)} in {describe_operation(each.operation)} at {position_text(each.group, each.slot)}"
        for each, ranks in sides[:MAX_SIDES_DESCRIBED]
    ]
    why = f"ranks wait for each other in a cycle: {', '.join(described)}"
    confidence = CONFIDENCE_CYCLE
    if not culprits:
        culprits = minority_by_launch_counts(cycle, common, hang.job)
        confidence = CONFIDENCE_PEER_VOTE if culprits else CONFIDENCE_CYCLE
        counts_differ = (
            f"before that, {format_ranks(culprits)} launched a different number of operations than the other ranks"
        )
        why += f"; {counts_differ if culprits else TIED}"
    return hang.conclude(
        DiagnosisVerdict.DESYNC,
        # A cycle through a group with guessed members may not exist.
        not any(each.group in hang.job.guessed_groups for each in cycle),
        culprits,
        confidence,
        why,
        [(each.group, each.slot) for each in cycle],
        tied=() if culprits else tied_sides(sides, common),
    )


# The sides of a cycle


def cycle_sides(cycle: tuple[StalledOperation, ...]) -> list[tuple[StalledOperation, tuple[int, ...]]]:
    """Ranks in the same kind of operation of the same kind of group are one side.

    Returns one stalled operation and all ranks of each side, the largest side first.
    """
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    shown: dict[tuple[str, str], StalledOperation] = {}
    for stall in cycle:
        side = (_group_kind(stall.group, cycle), stall.operation.name)
        ranks[side] += stall.waiters
        shown.setdefault(side, stall)
    sides = [(shown[side], tuple(sorted(ranks[side]))) for side in ranks]
    return sorted(sides, key=lambda side: (-len(side[1]), side[1]))


def _group_kind(group: ProcessGroup, cycle: tuple[StalledOperation, ...]) -> str:
    """Groups with the same description are of one kind if they share no member; otherwise each is its own kind."""
    same_description = [each.group for each in cycle if each.group != group and str(each.group) == str(group)]
    shares_member = any(set(each.members) & set(group.members) for each in same_description)
    return f"{group} {group.name}" if shares_member else str(group)


def tied_sides(sides: list[tuple[StalledOperation, tuple[int, ...]]], common: set[int]) -> tuple[tuple[int, ...], ...]:
    """Only ranks in all of the groups (`common`) can enter them in different orders. If fewer than two sides have such
    a rank, it may be any rank."""
    inside = [both for _, ranks in sides if (both := tuple(rank for rank in ranks if rank in common))]
    return tuple(inside) if len(inside) > 1 else tuple(ranks for _, ranks in sides)


# Breaking a tie by a vote of peers: ranks of one program launch the same operations in corresponding groups. Of two
# tensor-parallel ranks that disagree, the one that does what all other pairs do at that slot is not the one that is
# wrong. This is a vote and not a proof: stages of a pipeline may legitimately differ.

LaunchCounts = tuple[tuple[str, int], ...]  # description of a group -> launches


def minority_by_peer_groups(disagreement: Disagreement, job: RecordedJob) -> tuple[int, ...]:
    """Ranks whose operation no group of the same kind and size has at this slot, while another side's is common there.

    () if that does not decide.
    """
    group = disagreement.group
    seen: Counter[tuple[object, ...]] = Counter()
    for other, state in job.groups.items():
        if other != group and other.description == group.description and len(other.members) == len(group.members):
            operations = (state.operation_at(rank, disagreement.slot) for rank in state.records)
            seen.update({operation_signature(operation) for operation in operations if operation is not None})
    common = [ranks for operation, ranks in disagreement.sides if seen[operation_signature(operation)]]
    if not group.description or len(common) != 1:
        return ()
    return tuple(sorted(rank for _, ranks in disagreement.sides if ranks is not common[0] for rank in ranks))


def minority_by_launch_counts(cycle: Sequence[StalledOperation], common: set[int], job: RecordedJob) -> tuple[int, ...]:
    """Of the ranks at one slot, those that launched more or fewer operations in groups of other kinds before it.

    `common`: ranks that are in all groups of the cycle. () if that does not decide.
    """
    largest = max(cycle, key=lambda each: len(each.waiters))
    kinds = {group.description for group in job.groups} - {largest.group.description}
    # Stages of a pipeline legitimately send and receive different numbers of times, and that is mixed into these
    # counts.
    kinds -= {group.description for group, state in job.groups.items() if not state.counts_usable}
    ranks_by_counts: dict[LaunchCounts, list[int]] = defaultdict(list)
    for rank in largest.waiters:
        ranks_by_counts[_launched_before(largest, rank, kinds, job)].append(rank)
    majority = max(ranks_by_counts.values(), key=len)
    same_kinds = len({tuple(kind for kind, _ in counts) for counts in ranks_by_counts}) == 1
    if 2 * len(majority) <= len(largest.waiters) or not same_kinds:
        return ()
    minority = {rank for ranks in ranks_by_counts.values() if ranks is not majority for rank in ranks}
    # The cycle is between ranks that are in all of its groups. Other ranks that differ have another role; they are not
    # wrong.
    return tuple(sorted(minority)) if minority <= common else ()


def _launched_before(stall: StalledOperation, rank: int, kinds: set[str], job: RecordedJob) -> LaunchCounts:
    """The rank's launches in each other kind of group before its launch of this operation."""
    own = job.groups[stall.group].launch_at(rank, stall.slot)
    counts: dict[str, int] = {}
    for group, state in job.groups.items():
        record = state.records.get(rank)
        if record is None or group.description not in kinds or record.last_enqueued is None:
            continue
        before = record.last_enqueued - sum(_launched_after(launch, own) for launch in record.launches)
        counts[group.description] = counts.get(group.description, 0) + before
    return tuple(sorted(counts.items()))


def _launched_after(launch: OperationLaunch, own: OperationLaunch | None) -> bool:
    return own is not None and launch.record_id > own.record_id
