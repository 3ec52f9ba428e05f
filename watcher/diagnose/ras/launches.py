"""What the counters of one communicator imply, once RAS itself has nothing to say."""

from __future__ import annotations

from collections.abc import Sequence

from watcher.diagnose.ras.counters import Launched, any_crossed, differences, is_crossed, majority, sort_by_launches
from watcher.diagnose.ras.findings import RasFinding
from watcher.diagnose.ras.report import RasRank
from watcher.diagnose.ras.suspicion import Suspicion, placed_in_words, still
from watcher.diagnose.ras.views import CommunicatorView
from watcher.diagnose.words import counted, ranks_in_words

NOT_COUNTED = "send and recv, all-to-all and what a CUDA graph captured are not counted"
ONE_POLL = "without two reports some seconds apart, standing still looks like the ordinary skew of a job that runs"


def read_launches(view: CommunicatorView) -> Suspicion:
    groups = sort_by_launches(view.now)
    if not groups:
        return _without_counters(view)
    if any_crossed(groups):
        return _crossed(view, groups)
    if len(groups) > 1:
        return _behind(view, groups)
    return _matched(view, groups[0])


def _without_counters(view: CommunicatorView) -> Suspicion:
    if view.now.counts:
        shares = [f"{counted(count.ranks, 'rank')} {count.launched:,} {count.operation}" for count in view.now.counts]
        why = f"launched: {', '.join(shares)}; RAS does not name who"
        if view.moved is False:
            return Suspicion(RasFinding.BEHIND, [], f"frozen{still(view)}; {why}", 0.3)
        return Suspicion(RasFinding.CANNOT_TELL, [], f"{why}; {ONE_POLL}", 0.0)
    if any("MISMATCH" in words.split(",") for words in view.now.words):
        return Suspicion(RasFinding.CANNOT_TELL, [], "its ranks differ, the excerpt does not say in what", 0.0)
    why = "RAS reports OK and gives no counters: that holds for jobs that run and for jobs that hang (NVIDIA/nccl#1730)"
    return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)


def _crossed(view: CommunicatorView, groups: Sequence[Launched]) -> Suspicion:
    frozen = f"frozen{still(view)}: " if view.moved is False else ""
    caution = "derived from the counters: confirm with the flight recorder"
    if view.moved is None:
        caution = f"{caution}; {ONE_POLL}"
    most = majority(groups)
    odd = [group for group in groups if most is not None and is_crossed(group, most)]
    if most is None or not odd:
        sides = [group for group in groups if any(is_crossed(group, other) for other in groups)]
        shares = "; ".join(_share(group) for group in sides[:4])
        why = f"{frozen}its ranks launched different collectives, and no side has a majority: {shares}; {caution}"
        return Suspicion(RasFinding.CROSSED, [], why, 0.4, [group.ranks for group in sides])
    ranks = [rank for group in odd for rank in group.ranks]
    told = "; ".join(
        f"{_name(group, view)} launched {_gaps(differences(group, most))} than the {most.size} ranks of the majority"
        for group in odd[:4]
    )
    why = f"{frozen}{told}: another collective than theirs ({caution})"
    return Suspicion(RasFinding.CROSSED, ranks, why, 0.75 if view.moved is False else 0.5)


def _behind(view: CommunicatorView, groups: Sequence[Launched]) -> Suspicion:
    low, high = groups[0], groups[-1]
    total = sum(group.size for group in groups)
    gap = _gaps(differences(low, high))
    if view.moved is not False:
        why = f"{low.size} of {total} ranks have launched {gap} than the one furthest ahead; {ONE_POLL}"
        return Suspicion(RasFinding.CANNOT_TELL, [], why, 0.0)
    if 2 * low.size < total:
        why = f"frozen{still(view)}: {_name(low, view)} launched {gap} than the {high.size} furthest ahead: late"
        return Suspicion(RasFinding.BEHIND, low.ranks, why, 0.6)
    # RAS names the smaller group, which may be the healthy one that went ahead (NVIDIA/nccl#1911).
    named = sorted(rank for group in groups[1:] for rank in group.ranks)
    told = placed_in_words(_placed(named, view)) if named else f"{total - low.size} ranks"
    why = (
        f"frozen{still(view)}: {told} {'is' if total - low.size == 1 else 'are'} ahead, the other {low.size} of "
        f"{total} launched {gap}; either one of the {low.size} holds the rest up, or those ahead launched what the "
        "others never will"
    )
    return Suspicion(RasFinding.BEHIND, [], why, 0.3, [named, low.ranks])


def _matched(view: CommunicatorView, group: Launched) -> Suspicion:
    launched = ", ".join(f"{count:,} {kind}" for kind, count in group.counts.items() if count)
    if not launched:
        return Suspicion(RasFinding.CANNOT_TELL, [], f"nothing was launched on it that RAS counts; {NOT_COUNTED}", 0.0)
    if view.moved is None:
        return Suspicion(RasFinding.CANNOT_TELL, [], f"all launched the same ({launched}); {ONE_POLL}", 0.0)
    why = (
        f"frozen{still(view)} with all {group.size} ranks at the same launches ({launched}): no rank stands out, so "
        f"network, GPU or host, or all are busy outside NCCL; RAS calls this OK ({NOT_COUNTED})"
    )
    return Suspicion(RasFinding.MATCHED, [], why, 0.6)


def _placed(ranks: Sequence[int], view: CommunicatorView) -> list[RasRank]:
    known = {rank.rank: rank for rank in view.now.ranks}
    return [known.get(rank) or RasRank(rank, None, None, None) for rank in ranks]


def _name(group: Launched, view: CommunicatorView) -> str:
    return placed_in_words(_placed(group.ranks, view)) if group.ranks else f"{group.size} ranks without names"


def _gaps(gaps: dict[str, int]) -> str:
    """1 AllReduce more and 1 ReduceScatter fewer"""
    parts = [f"{gap:,} {kind} more" for kind, gap in gaps.items() if gap > 0]
    parts += [f"{-gap:,} {kind} fewer" for kind, gap in gaps.items() if gap < 0]
    return " and ".join(parts)


def _share(group: Launched) -> str:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in group.counts.items() if count)
    return f"{ranks_in_words(group.ranks) if group.ranks else counted(group.size, 'rank')} launched {counts}"
