"""What the launch counters of one communicator imply.

All ranks of a communicator launch the same operations in the same order. So the counters of a rank that is merely late
are nowhere above those of the others. If a rank has launched more operations of one kind than another rank and fewer of
a second kind, the counters are *crossed*: lateness cannot explain that, so it launched a different collective. This
holds even if ranks were queried at different times. It is derived from how NCCL counts and was tested on constructed
samples only, so it is never conclusive by itself; CUDA graphs, whose operations are not counted, could break it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from wattwatch.watcher.common.formatting import format_count, format_ranks
from wattwatch.watcher.diagnosis.nccl_ras.communicator_view import (
    CommunicatorView,
    Suspicion,
    describe_ranks,
    observed_time,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasCommunicator, RasFinding, RasRank

NOT_COUNTED_BY_RAS: Final = "RAS does not count send, recv, all-to-all or operations captured in CUDA graphs"
ONE_REPORT_ONLY: Final = (
    "two reports taken some seconds apart are needed to distinguish a hang from the normal skew between the ranks of a "
    "running job"
)
MAX_SIDES_DESCRIBED: Final = 4


@dataclass(frozen=True, slots=True)
class EqualLaunches:
    """Ranks that launched exactly the same."""

    counts: Mapping[str, int]
    size: int
    ranks: tuple[int, ...]  # fewer than `size` if the text format does not name all of them

    @property
    def total(self) -> int:
        """Launches of all kinds."""
        return sum(self.counts.values())


def group_by_launches(communicator: RasCommunicator) -> tuple[EqualLaunches, ...]:
    """Ranks grouped by what they launched, fewest launches first. () if the report does not contain enough for that."""
    if communicator.counts:
        return _group_from_text(communicator)
    ranks_by_counts: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in communicator.ranks:
        if rank.counts is not None and not rank.missing:
            ranks_by_counts.setdefault(tuple(sorted(rank.counts.items())), []).append(rank.rank)
    return _sorted([EqualLaunches(dict(counts), len(ranks), tuple(ranks)) for counts, ranks in ranks_by_counts.items()])


def _group_from_text(communicator: RasCommunicator) -> tuple[EqualLaunches, ...]:
    """The text lists each kind of operation separately. Ranks that are not named in any smaller group are the rest."""
    rest: dict[str, int] = {}
    size = 0
    for count in communicator.counts:
        if count.operation not in rest:  # the largest group comes first
            rest[count.operation] = count.launched
            size = max(size, sum(other.ranks for other in communicator.counts if other.operation == count.operation))
        elif len(count.named) != count.ranks:
            return ()  # a smaller group without names: a tie, or more ranks than RAS lists
    counts_by_rank: dict[int, dict[str, int]] = {}
    for count in communicator.counts:
        for rank in count.named:
            counts_by_rank.setdefault(rank, dict(rest))[count.operation] = count.launched
    ranks_by_counts: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, counts in counts_by_rank.items():
        ranks_by_counts.setdefault(tuple(sorted(counts.items())), []).append(rank)
    # Ranks without a name are all in the largest group of every kind, so they launched the same.
    groups = [
        EqualLaunches(dict(counts), len(ranks), tuple(sorted(ranks))) for counts, ranks in ranks_by_counts.items()
    ]
    if size > len(counts_by_rank):
        groups.append(EqualLaunches(rest, size - len(counts_by_rank), ()))
    return _sorted(groups)


def _sorted(groups: list[EqualLaunches]) -> tuple[EqualLaunches, ...]:
    return tuple(sorted(groups, key=lambda group: (group.total, sorted(group.counts.items()))))


def launch_differences(group: EqualLaunches, other: EqualLaunches) -> dict[str, int]:
    """How many more operations of each kind `group` has launched than `other`; kinds with equal counts are left out."""
    kinds = [*group.counts, *(kind for kind in other.counts if kind not in group.counts)]
    differences = {kind: group.counts.get(kind, 0) - other.counts.get(kind, 0) for kind in kinds}
    return {kind: difference for kind, difference in differences.items() if difference}


def is_crossed(group: EqualLaunches, other: EqualLaunches) -> bool:
    """Whether each has launched more operations of some kind than the other; see the module's docstring."""
    differences = launch_differences(group, other).values()
    return any(difference > 0 for difference in differences) and any(difference < 0 for difference in differences)


def any_crossed(groups: Sequence[EqualLaunches]) -> bool:
    """`groups`: in order of their totals. If no group is above the next one in any kind, no two are crossed."""
    return any(is_crossed(low, high) for low, high in pairwise(groups))


def majority(groups: Sequence[EqualLaunches]) -> EqualLaunches | None:
    """The group with more than half of the ranks."""
    largest = max(groups, key=lambda group: group.size, default=None)
    return largest if largest and 2 * largest.size > sum(group.size for group in groups) else None


def analyze_launches(view: CommunicatorView) -> Suspicion:
    """What the counters imply, once RAS itself reports nothing wrong."""
    groups = group_by_launches(view.now)
    if not groups:
        return _without_counters(view)
    if any_crossed(groups):
        return _crossed(view, groups)
    if len(groups) > 1:
        return _behind(view, groups)
    return _matched(view, groups[0])


def _without_counters(view: CommunicatorView) -> Suspicion:
    if view.now.counts:
        shares = [
            f"{format_count(count.ranks, 'rank')} launched {count.launched:,} {count.operation}"
            for count in view.now.counts
        ]
        why = f"{', '.join(shares)}; RAS does not name these ranks"
        if view.moved is False:
            return Suspicion(RasFinding.BEHIND, [], f"{_no_progress(view)}; {why}", 0.3)
        return Suspicion(RasFinding.CANNOT_TELL, [], f"{why}; {ONE_REPORT_ONLY}", 0.0)
    if any("MISMATCH" in line.split(",") for line in view.now.lines):
        why = "its ranks have different launch counts, but the excerpt does not say for which operation"
        return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)
    why = "RAS reports OK and gives no counters; this happens for running jobs and for hung jobs (NVIDIA/nccl#1730)"
    return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)


def _no_progress(view: CommunicatorView) -> str:
    return f"no progress{observed_time(view)}"


def _crossed(view: CommunicatorView, groups: Sequence[EqualLaunches]) -> Suspicion:
    prefix = f"{_no_progress(view)}: " if view.moved is False else ""
    caution = "derived from counters; confirm this with flight records"
    if view.moved is None:
        caution = f"{caution}; {ONE_REPORT_ONLY}"
    # Only a rank that is crossed with the majority is accused. One that is merely late against it is not.
    most = majority(groups)
    odd = [group for group in groups if most is not None and is_crossed(group, most)]
    if most is None or not odd:
        sides = [group for group in groups if any(is_crossed(group, other) for other in groups)]
        shares = "; ".join(_describe_launches(group) for group in sides[:MAX_SIDES_DESCRIBED])
        why = f"{prefix}its ranks launched different collectives, and no side has a majority: {shares}; {caution}"
        return Suspicion(RasFinding.CROSSED, [], why, 0.4, [group.ranks for group in sides])
    ranks = [rank for group in odd for rank in group.ranks]
    described = "; ".join(
        f"{_describe_side(group, view)} launched {_describe_differences(launch_differences(group, most))} than the "
        f"majority of {most.size} ranks"
        for group in odd[:MAX_SIDES_DESCRIBED]
    )
    why = f"{prefix}{described}, so the ranks launched different collectives ({caution})"
    return Suspicion(RasFinding.CROSSED, ranks, why, 0.75 if view.moved is False else 0.5)


def _behind(view: CommunicatorView, groups: Sequence[EqualLaunches]) -> Suspicion:
    low, high = groups[0], groups[-1]
    total = sum(group.size for group in groups)
    gap = _describe_differences(launch_differences(low, high))
    if view.moved is not False:
        why = f"{low.size} of {total} ranks launched {gap} than the ranks furthest ahead; {ONE_REPORT_ONLY}"
        return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)
    # A minority that launched fewer operations is late; a majority may just be waiting where it should.
    if 2 * low.size < total:
        ahead = f"the {format_count(high.size, 'rank')} furthest ahead"
        why = f"{_no_progress(view)}: {_describe_side(low, view)} launched {gap} than {ahead}"
        return Suspicion(RasFinding.BEHIND, low.ranks, why, 0.6)
    # RAS names the smaller group, which may be the healthy one that went ahead (NVIDIA/nccl#1911).
    named = sorted(rank for group in groups[1:] for rank in group.ranks)
    ahead = describe_ranks(_ranks_with_location(named, view)) if named else f"{total - low.size} ranks"
    why = (
        f"{_no_progress(view)}: {ahead} {'is' if total - low.size == 1 else 'are'} ahead, and the other {low.size} of "
        f"{total} ranks launched {gap}; either one of the ranks behind blocks the job, or the ranks ahead launched an "
        "operation that the other ranks will never launch"
    )
    return Suspicion(RasFinding.BEHIND, [], why, 0.3, [named, low.ranks])


def _matched(view: CommunicatorView, group: EqualLaunches) -> Suspicion:
    launched = ", ".join(f"{count:,} {kind}" for kind, count in group.counts.items() if count)
    if not launched:
        why = f"its ranks launched no operation that RAS counts ({NOT_COUNTED_BY_RAS})"
        return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)
    if view.moved is None:
        why = f"all {group.size} ranks launched the same operations ({launched}); {ONE_REPORT_ONLY}"
        return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)
    why = (
        f"{_no_progress(view)}, and all {group.size} ranks launched the same operations ({launched}), so "
        "the network, a GPU or a host is at fault, or the ranks are busy outside NCCL. RAS reports OK in "
        f"this case ({NOT_COUNTED_BY_RAS})"
    )
    return Suspicion(RasFinding.MATCHED, [], why, 0.6)


def _ranks_with_location(ranks: Sequence[int], view: CommunicatorView) -> list[RasRank]:
    known = {rank.rank: rank for rank in view.now.ranks}
    return [known.get(rank) or RasRank(rank, None, None, None) for rank in ranks]


def _describe_side(group: EqualLaunches, view: CommunicatorView) -> str:
    if not group.ranks:
        return f"{format_count(group.size, 'rank')} that RAS does not name"
    return describe_ranks(_ranks_with_location(group.ranks, view))


def _describe_differences(differences: dict[str, int]) -> str:
    """`1 more AllReduce and 1 fewer ReduceScatter`"""
    parts = [f"{difference:,} more {kind}" for kind, difference in differences.items() if difference > 0]
    parts += [f"{-difference:,} fewer {kind}" for kind, difference in differences.items() if difference < 0]
    return " and ".join(parts)


def _describe_launches(group: EqualLaunches) -> str:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in group.counts.items() if count)
    return f"{format_ranks(group.ranks) if group.ranks else format_count(group.size, 'rank')} launched {counts}"
