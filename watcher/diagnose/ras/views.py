"""Reports of several nodes -> one view of each communicator. Every node sees the whole job; some see it later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from watcher.diagnose.ras.report import RasCommunicator, RasPolls, RasRank, RasReport

# Two reports closer than this say nothing of standing still.
SHORTEST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class CommunicatorView:
    now: RasCommunicator
    moved: bool | None  # between the last two reports of any node; None: not known
    apart_seconds: float | None  # the longest time over which it did not move


def views_of(polls: Sequence[RasPolls]) -> tuple[CommunicatorView, ...]:
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
        if moved is False and poll.apart_seconds is not None and poll.apart_seconds < SHORTEST_SECONDS:
            moved = None
        yield CommunicatorView(communicator, moved, poll.apart_seconds if moved is False else None)
    if _is_whole(now) and not any(entry.missing_count for entry in now.communicators):
        # What was there and is gone was destroyed since, or (text form) its counters have become equal.
        for identity in earlier.keys() - later:
            yield CommunicatorView(earlier[identity], True, None)


def share_nothing(poll: RasPolls) -> bool:
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
