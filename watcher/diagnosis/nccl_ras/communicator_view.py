"""Reports of several nodes -> one view of each communicator. Every node sees the whole job; some see it later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from wattwatch.watcher.diagnosis.nccl_ras.model import (
    RasCommunicator,
    RasDevice,
    RasFinding,
    RasPolls,
    RasRank,
    RasReport,
    RasSuspect,
)

# Two reports closer than this say nothing of standing still.
MIN_INTERVAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class CommunicatorView:
    now: RasCommunicator
    moved: bool | None  # between the last two reports of any node; None: not known
    apart_seconds: float | None  # the longest time over which it did not move


def build_views(polls: Sequence[RasPolls]) -> tuple[CommunicatorView, ...]:
    """One view for each communicator, largest first."""
    seen: dict[str, list[CommunicatorView]] = {}
    for poll in polls:
        for view in _views_of_node(poll):
            seen.setdefault(view.now.identity, []).append(view)
    return tuple(sorted(map(_merge, seen.values()), key=lambda view: (-view.now.size, view.now.identity)))


def _views_of_node(poll: RasPolls) -> Iterator[CommunicatorView]:
    if not poll.reports:
        return
    now = poll.reports[-1]
    before = poll.reports[-2] if len(poll.reports) > 1 else None
    earlier = {} if before is None else {entry.identity: entry for entry in before.communicators}
    later = {entry.identity for entry in now.communicators}
    if not earlier.keys() & later:
        earlier, before = {}, None
    for communicator in now.communicators:
        moved = None if before is None else _moved(earlier.get(communicator.identity), communicator, before)
        if moved is False and poll.apart_seconds is not None and poll.apart_seconds < MIN_INTERVAL_SECONDS:
            moved = None
        yield CommunicatorView(communicator, moved, poll.apart_seconds if moved is False else None)
    if _is_whole(now) and not any(entry.missing_count for entry in now.communicators):
        # What was there and is gone was destroyed since, or (text form) its counters have become equal.
        for identity in earlier.keys() - later:
            yield CommunicatorView(earlier[identity], True, None)


def have_no_common_communicator(poll: RasPolls) -> bool:
    """Its last two reports have no communicator in common, so nothing can be compared.

    Any process on a node that is told the same port may answer: with two jobs on a node, these may be of either.
    """
    before, now = ([entry.identity for entry in report.communicators] for report in poll.reports[-2:])
    return bool(before) and bool(now) and not set(before) & set(now)


def _is_whole(report: RasReport) -> bool:
    return report.trouble is None and not report.timeouts


def _moved(before: RasCommunicator | None, now: RasCommunicator, report: RasReport) -> bool | None:
    """True: a counter or a status changed. None: the two cannot be compared."""
    if before is None:
        return True if _is_whole(report) else None
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
    """The view that misses fewest ranks, with those that others reached; it moved if anybody saw it move."""
    best = min(views, key=lambda view: (view.now.missing_count, -len(view.now.ranks)))
    if len(views) == 1:
        return best
    ranks = {rank.rank: rank for rank in best.now.ranks}
    found = 0
    for view in views:
        for rank in view.now.ranks:
            known = ranks.get(rank.rank)
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
    moved = True if True in moves else (False if False in moves else None)
    apart = max((view.apart_seconds for view in views if view.apart_seconds is not None), default=None)
    return CommunicatorView(now, moved, None if moved else apart)


# A suspicion against ranks of one communicator, and how ranks are named in words.

_MAX_RANKS_LISTED = 6  # ranks named in a sentence


@dataclass(frozen=True, slots=True)
class Suspicion:
    finding: RasFinding
    ranks: Sequence[int]
    why: str
    confidence: float
    tied: Sequence[Sequence[int]] = ()


def build_suspect(communicator: RasCommunicator, rank: RasRank, job_ranks: Mapping[RasDevice, int]) -> RasSuspect:
    job_rank = None if rank.host is None or rank.pid is None else job_ranks.get((rank.host, rank.pid, rank.gpu))
    return RasSuspect(rank.rank, communicator.identity, rank.host, rank.pid, rank.gpu, job_rank)


def communicator_name(communicator: RasCommunicator) -> str:
    """Short: the first hash; communicators that the text form does not tell apart are counted."""
    size = f"{communicator.size} ranks" if communicator.size else "size not told"
    if communicator.identity.startswith("group "):  # the text form: healthy ones have no names
        return f"{'a communicator' if communicator.alike == 1 else f'{communicator.alike} communicators'} of {size}"
    return f"communicator {communicator.identity.split(' ')[0]} ({size})"


def describe_ranks(ranks: Sequence[RasRank]) -> str:
    """`rank 3 (process 40003 on 10.0.0.11, GPU 3)`: ranks of a communicator are known by where they are."""
    ordered = sorted(ranks, key=lambda rank: rank.rank)
    listed = ", ".join(_describe_rank(rank) for rank in ordered[:_MAX_RANKS_LISTED])
    more = f" and {len(ordered) - _MAX_RANKS_LISTED} more" if len(ordered) > _MAX_RANKS_LISTED else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed}{more}"


def _describe_rank(rank: RasRank) -> str:
    parts = [] if rank.pid is None else [f"process {rank.pid}"]
    if rank.host is not None:
        parts.append(f"on {rank.host}")
    where = " ".join(parts)
    if rank.gpu is not None:
        where = f"{where}, GPU {rank.gpu}" if where else f"GPU {rank.gpu}"
    return f"{rank.rank} ({where})" if where else str(rank.rank)


def frozen_time(view: CommunicatorView) -> str:
    return "" if view.apart_seconds is None else f" over {view.apart_seconds:g} s"
