"""One view of each communicator from the reports of all nodes, and how its ranks are named in messages.

Every node's RAS sees the whole job; a node may just see it later, or not reach some of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from wattwatch.watcher.diagnosis.nccl_ras.model import (
    RasCommunicator,
    RasDevice,
    RasFinding,
    RasPolls,
    RasRank,
    RasReport,
    RasSuspect,
)

# Two reports closer together than this do not show whether the job makes progress. Chosen.
MIN_INTERVAL_SECONDS: Final = 2.0
_MAX_RANKS_LISTED: Final = 6  # in a sentence


@dataclass(frozen=True, slots=True)
class CommunicatorView:
    """A communicator as all nodes together see it."""

    now: RasCommunicator
    moved: bool | None  # whether any node saw a change between its last two reports; None: unknown
    interval_seconds: float | None  # the longest time without a change; None: it changed, or unknown


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What may be wrong with one communicator."""

    finding: RasFinding
    ranks: Sequence[int]
    why: str
    confidence: float
    tied: Sequence[Sequence[int]] = ()


def build_views(polls: Sequence[RasPolls]) -> tuple[CommunicatorView, ...]:
    """One view per communicator, largest first. `polls`: one per node, in any order."""
    views: dict[str, list[CommunicatorView]] = {}
    for poll in polls:
        for view in _views_of_node(poll):
            views.setdefault(view.now.identity, []).append(view)
    return tuple(sorted(map(_merge, views.values()), key=lambda view: (-view.now.size, view.now.identity)))


def _views_of_node(poll: RasPolls) -> Iterator[CommunicatorView]:
    if not poll.reports:
        return
    now = poll.reports[-1]
    before = poll.reports[-2] if len(poll.reports) > 1 else None
    earlier = {} if before is None else {entry.identity: entry for entry in before.communicators}
    later = {entry.identity for entry in now.communicators}
    # No communicator in common: the reports are of two jobs, or all were recreated. Counting that as progress would
    # hide a hang of the other job.
    if not earlier.keys() & later:
        earlier, before = {}, None
    for communicator in now.communicators:
        moved = None if before is None else _moved(earlier.get(communicator.identity), communicator, before)
        if moved is False and poll.interval_seconds is not None and poll.interval_seconds < MIN_INTERVAL_SECONDS:
            moved = None
        yield CommunicatorView(communicator, moved, poll.interval_seconds if moved is False else None)
    if _is_complete(now) and not any(entry.missing_count for entry in now.communicators):
        # A communicator that is no longer listed was destroyed, or (text format) its counters have become equal.
        for identity in earlier.keys() - later:
            yield CommunicatorView(earlier[identity], True, None)


def have_no_common_communicator(poll: RasPolls) -> bool:
    """Whether the last two reports cannot be compared.

    Any process on a node that is configured with the same port may answer: with two jobs on a node, the two reports may
    be of different jobs.
    """
    before, now = ([entry.identity for entry in report.communicators] for report in poll.reports[-2:])
    return bool(before) and bool(now) and not set(before) & set(now)


def _is_complete(report: RasReport) -> bool:
    return report.problem is None and not report.timeouts


def _moved(before: RasCommunicator | None, now: RasCommunicator, report: RasReport) -> bool | None:
    """Whether a counter or a status changed. None: the two cannot be compared. `report`: the one of `before`."""
    # Not in the earlier report: it is new, which is progress, unless that report simply did not list everything.
    if before is None:
        return True if _is_complete(report) else None
    # Text format: it has no counters per rank, only these summaries.
    if now.counts or before.counts or now.statuses or before.statuses:
        return (now.counts, now.statuses, now.state) != (before.counts, before.statuses, before.state)
    earlier = {rank.rank: rank for rank in before.ranks if not rank.missing}
    pairs = [(earlier[rank.rank], rank) for rank in now.ranks if not rank.missing and rank.rank in earlier]
    if any(_progress(old) != _progress(new) for old, new in pairs):
        return True
    if any(new.counts is not None for _, new in pairs) or now.state == before.state == "INIT":
        return False
    return None


def _progress(rank: RasRank) -> tuple[object, ...]:
    return (rank.counts, rank.initializing, rank.finalizing, rank.aborted)


def _merge(views: Sequence[CommunicatorView]) -> CommunicatorView:
    """The view with the fewest missing ranks, plus the ranks that only other nodes reached."""
    best = min(views, key=lambda view: (view.now.missing_count, -len(view.now.ranks)))
    if len(views) == 1:
        return best
    ranks = {rank.rank: rank for rank in best.now.ranks}
    found = 0
    for view in views:
        for rank in view.now.ranks:
            known = ranks.get(rank.rank)
            # A network problem between two nodes makes ranks missing in one view only; data from any node proves that
            # the rank answers. That a rank is dead is final, so one node is enough to know it.
            if known is None or (known.missing and not rank.missing):
                found += known is not None
                ranks[rank.rank] = rank
            elif known.missing and rank.dead and not known.dead:
                ranks[rank.rank] = rank
    now = replace(
        best.now,
        ranks=tuple(rank for _, rank in sorted(ranks.items())),
        missing_count=max(0, best.now.missing_count - found),
    )
    moves = {view.moved for view in views}
    # Each node compares its own two reports, at its own times: a change that one of them saw is progress.
    moved = True if True in moves else (False if False in moves else None)
    interval = max((view.interval_seconds for view in views if view.interval_seconds is not None), default=None)
    return CommunicatorView(now, moved, None if moved else interval)


def build_suspect(communicator: RasCommunicator, rank: RasRank, job_ranks: Mapping[RasDevice, int]) -> RasSuspect:
    """`job_ranks`: ranks of the job, where known."""
    job_rank = None if rank.host is None or rank.pid is None else job_ranks.get((rank.host, rank.pid, rank.gpu))
    return RasSuspect(rank.rank, communicator.identity, rank.host, rank.pid, rank.gpu, job_rank)


def communicator_name(communicator: RasCommunicator) -> str:
    """`communicator 0xa0 (8 ranks)`; `3 communicators of 8 ranks` for those that the text format only counts."""
    size = f"{communicator.size} ranks" if communicator.size else "unknown size"
    if communicator.identity.startswith("group "):
        number = communicator.identical_count
        return f"{'a communicator' if number == 1 else f'{number} communicators'} of {size}"
    return f"communicator {communicator.identity.split(' ')[0]} ({size})"


def describe_ranks(ranks: Sequence[RasRank]) -> str:
    """`rank 3 (process 40003 on 10.0.0.11, GPU 3)`: a rank of a communicator is only recognized by where it runs."""
    ordered = sorted(ranks, key=lambda rank: rank.rank)
    listed = ", ".join(_describe_rank(rank) for rank in ordered[:_MAX_RANKS_LISTED])
    more = f" and {len(ordered) - _MAX_RANKS_LISTED} more" if len(ordered) > _MAX_RANKS_LISTED else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed}{more}"


def _describe_rank(rank: RasRank) -> str:
    parts = [] if rank.pid is None else [f"process {rank.pid}"]
    if rank.host is not None:
        parts.append(f"on {rank.host}")
    location = " ".join(parts)
    if rank.gpu is not None:
        location = f"{location}, GPU {rank.gpu}" if location else f"GPU {rank.gpu}"
    return f"{rank.rank} ({location})" if location else str(rank.rank)


def observed_time(view: CommunicatorView) -> str:
    """` over 10 s`, or "" if the time is unknown: how long the communicator did not change."""
    return "" if view.interval_seconds is None else f" over {view.interval_seconds:g} s"
