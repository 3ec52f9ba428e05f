"""Ranks of one communicator, sorted by what they have launched: who is behind, who took another way.

All ranks of a communicator launch the same operations in the same order. So the counters of a rank that is merely late
are nowhere above those of the rest. One kind above and another below cannot come from lateness: that rank launched a
different collective. This holds however far apart the ranks were asked; CUDA graphs, which are not counted, could break
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wattwatch.watcher.common.formatting import format_count, format_ranks
from wattwatch.watcher.diagnosis.nccl_ras.communicator_view import (
    CommunicatorView,
    Suspicion,
    describe_ranks,
    frozen_time,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasCommunicator, RasFinding, RasRank


@dataclass(frozen=True, slots=True)
class EqualLaunches:
    """Ranks that launched exactly the same."""

    counts: Mapping[str, int]
    size: int
    ranks: tuple[int, ...]  # those whose number is known; the text form does not name all

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def group_by_launches(communicator: RasCommunicator) -> tuple[EqualLaunches, ...]:
    """Fewest launches first; nothing where the report does not tell enough to sort them."""
    if communicator.counts:
        return _from_text(communicator)
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in communicator.ranks:
        if rank.counts is not None and not rank.missing:
            alike.setdefault(tuple(sorted(rank.counts.items())), []).append(rank.rank)
    return _sorted([EqualLaunches(dict(counts), len(ranks), tuple(ranks)) for counts, ranks in alike.items()])


def _from_text(communicator: RasCommunicator) -> tuple[EqualLaunches, ...]:
    """The text gives each kind apart: those named in none of the smaller groups are the rest."""
    rest: dict[str, int] = {}
    size = 0
    for count in communicator.counts:
        if count.operation not in rest:  # the largest group comes first
            rest[count.operation] = count.launched
            size = max(size, sum(other.ranks for other in communicator.counts if other.operation == count.operation))
        elif len(count.named) != count.ranks:
            return ()  # a group without names: a tie, or more than RAS lists
    ways: dict[int, dict[str, int]] = {}
    for count in communicator.counts:
        for rank in count.named:
            ways.setdefault(rank, dict(rest))[count.operation] = count.launched
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, counts in ways.items():
        alike.setdefault(tuple(sorted(counts.items())), []).append(rank)
    groups = [EqualLaunches(dict(counts), len(ranks), tuple(sorted(ranks))) for counts, ranks in alike.items()]
    if size > len(ways):
        groups.append(EqualLaunches(rest, size - len(ways), ()))
    return _sorted(groups)


def _sorted(groups: list[EqualLaunches]) -> tuple[EqualLaunches, ...]:
    return tuple(sorted(groups, key=lambda group: (group.total, sorted(group.counts.items()))))


def launch_differences(group: EqualLaunches, other: EqualLaunches) -> dict[str, int]:
    """How many more of each kind `group` has launched than `other`; kinds that are equal are left out."""
    kinds = [*group.counts, *(kind for kind in other.counts if kind not in group.counts)]
    gaps = {kind: group.counts.get(kind, 0) - other.counts.get(kind, 0) for kind in kinds}
    return {kind: gap for kind, gap in gaps.items() if gap}


def is_crossed(group: EqualLaunches, other: EqualLaunches) -> bool:
    gaps = launch_differences(group, other).values()
    return any(gap > 0 for gap in gaps) and any(gap < 0 for gap in gaps)


def any_crossed(groups: Sequence[EqualLaunches]) -> bool:
    """In order of their sums: if each is nowhere above the next, none is crossed with any."""
    return any(is_crossed(low, high) for low, high in pairwise(groups))


def majority(groups: Sequence[EqualLaunches]) -> EqualLaunches | None:
    """The group with more than half of the ranks."""
    largest = max(groups, key=lambda group: group.size, default=None)
    return largest if largest and 2 * largest.size > sum(group.size for group in groups) else None


# What the counters of one communicator imply, once RAS itself has nothing to say.

NOT_COUNTED_BY_RAS = "send and recv, all-to-all and what a CUDA graph captured are not counted"
ONE_REPORT_ONLY = (
    "without two reports some seconds apart, standing still looks like the ordinary skew of a job that runs"
)


def analyze_launches(view: CommunicatorView) -> Suspicion:
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
            f"{format_count(count.ranks, 'rank')} {count.launched:,} {count.operation}" for count in view.now.counts
        ]
        why = f"launched: {', '.join(shares)}; RAS does not name who"
        if view.moved is False:
            return Suspicion(RasFinding.BEHIND, [], f"frozen{frozen_time(view)}; {why}", 0.3)
        return Suspicion(RasFinding.CANNOT_TELL, [], f"{why}; {ONE_REPORT_ONLY}", 0.0)
    if any("MISMATCH" in words.split(",") for words in view.now.words):
        return Suspicion(RasFinding.CANNOT_TELL, [], "its ranks differ, the excerpt does not say in what", 0.0)
    why = "RAS reports OK and gives no counters: that holds for jobs that run and for jobs that hang (NVIDIA/nccl#1730)"
    return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)


def _crossed(view: CommunicatorView, groups: Sequence[EqualLaunches]) -> Suspicion:
    frozen = f"frozen{frozen_time(view)}: " if view.moved is False else ""
    caution = "derived from the counters: confirm with the flight recorder"
    if view.moved is None:
        caution = f"{caution}; {ONE_REPORT_ONLY}"
    most = majority(groups)
    odd = [group for group in groups if most is not None and is_crossed(group, most)]
    if most is None or not odd:
        sides = [group for group in groups if any(is_crossed(group, other) for other in groups)]
        shares = "; ".join(_describe_launches(group) for group in sides[:4])
        why = f"{frozen}its ranks launched different collectives, and no side has a majority: {shares}; {caution}"
        return Suspicion(RasFinding.CROSSED, [], why, 0.4, [group.ranks for group in sides])
    ranks = [rank for group in odd for rank in group.ranks]
    told = "; ".join(
        f"{_describe_side(group, view)} launched {_describe_differences(launch_differences(group, most))} than the {most.size} ranks of the majority"
        for group in odd[:4]
    )
    why = f"{frozen}{told}: another collective than theirs ({caution})"
    return Suspicion(RasFinding.CROSSED, ranks, why, 0.75 if view.moved is False else 0.5)


def _behind(view: CommunicatorView, groups: Sequence[EqualLaunches]) -> Suspicion:
    low, high = groups[0], groups[-1]
    total = sum(group.size for group in groups)
    gap = _describe_differences(launch_differences(low, high))
    if view.moved is not False:
        why = f"{low.size} of {total} ranks have launched {gap} than the one furthest ahead; {ONE_REPORT_ONLY}"
        return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)
    if 2 * low.size < total:
        why = f"frozen{frozen_time(view)}: {_describe_side(low, view)} launched {gap} than the {high.size} furthest ahead: late"
        return Suspicion(RasFinding.BEHIND, low.ranks, why, 0.6)
    # RAS names the smaller group, which may be the healthy one that went ahead (NVIDIA/nccl#1911).
    named = sorted(rank for group in groups[1:] for rank in group.ranks)
    told = describe_ranks(_ranks_with_location(named, view)) if named else f"{total - low.size} ranks"
    why = (
        f"frozen{frozen_time(view)}: {told} {'is' if total - low.size == 1 else 'are'} ahead, the other {low.size} of "
        f"{total} launched {gap}; either one of the {low.size} holds the rest up, or those ahead launched what the "
        "others never will"
    )
    return Suspicion(RasFinding.BEHIND, [], why, 0.3, [named, low.ranks])


def _matched(view: CommunicatorView, group: EqualLaunches) -> Suspicion:
    launched = ", ".join(f"{count:,} {kind}" for kind, count in group.counts.items() if count)
    if not launched:
        return Suspicion(
            RasFinding.CANNOT_TELL, [], f"nothing was launched on it that RAS counts; {NOT_COUNTED_BY_RAS}", 0.0
        )
    if view.moved is None:
        return Suspicion(RasFinding.CANNOT_TELL, [], f"all launched the same ({launched}); {ONE_REPORT_ONLY}", 0.0)
    why = (
        f"frozen{frozen_time(view)} with all {group.size} ranks at the same launches ({launched}): no rank stands out, so "
        f"network, GPU or host, or all are busy outside NCCL; RAS calls this OK ({NOT_COUNTED_BY_RAS})"
    )
    return Suspicion(RasFinding.MATCHED, [], why, 0.6)


def _ranks_with_location(ranks: Sequence[int], view: CommunicatorView) -> list[RasRank]:
    known = {rank.rank: rank for rank in view.now.ranks}
    return [known.get(rank) or RasRank(rank, None, None, None) for rank in ranks]


def _describe_side(group: EqualLaunches, view: CommunicatorView) -> str:
    return (
        describe_ranks(_ranks_with_location(group.ranks, view)) if group.ranks else f"{group.size} ranks without names"
    )


def _describe_differences(gaps: dict[str, int]) -> str:
    """1 AllReduce more and 1 ReduceScatter fewer"""
    parts = [f"{gap:,} {kind} more" for kind, gap in gaps.items() if gap > 0]
    parts += [f"{-gap:,} {kind} fewer" for kind, gap in gaps.items() if gap < 0]
    return " and ".join(parts)


def _describe_launches(group: EqualLaunches) -> str:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in group.counts.items() if count)
    return f"{format_ranks(group.ranks) if group.ranks else format_count(group.size, 'rank')} launched {counts}"
