"""One communicator, seen at one or two moments -> what is the matter with it. Pure.

What RAS states comes first (dead, failed), then whether it moves, then what its counters imply. The confidences are
judgement, not measurement: stated facts near 0.9, what is derived from counters less, what lateness suggests least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wattwatch.watcher.diagnosis.nccl_ras.communicator_view import (
    CommunicatorView,
    Suspicion,
    build_suspect,
    communicator_name,
    describe_ranks,
    frozen_time,
)
from wattwatch.watcher.diagnosis.nccl_ras.counters import analyze_launches
from wattwatch.watcher.diagnosis.nccl_ras.model import (
    CommunicatorAnalysis,
    RasCommunicator,
    RasDevice,
    RasFinding,
    RasRank,
    RasStatusCount,
    RasSuspect,
)
from wattwatch.watcher.diagnosis.nccl_ras.nccl_results import REMOTE_ERROR, describe_result, is_error
from wattwatch.watcher.diagnosis.nccl_ras.parse_text import LEFT_STATUSES


def analyze_communicator(view: CommunicatorView, job_ranks: dict[RasDevice, int]) -> CommunicatorAnalysis:
    """What is the matter with it, who, how sure, and why in words."""
    now = view.now
    suspicion = (
        _dead(now) or _failed(now) or _moving(view) or _unresponsive(view) or _leaving(view) or _starting(view)
    ) or analyze_launches(view)
    named = {rank.rank: build_suspect(now, rank, job_ranks) for rank in now.ranks}

    def suspects(ranks: Iterable[int]) -> tuple[RasSuspect, ...]:
        return tuple(named.get(rank) or RasSuspect(rank, now.identity, None, None, None) for rank in sorted(ranks))

    return CommunicatorAnalysis(
        identity=now.identity,
        size=now.size,
        finding=suspicion.finding,
        suspects=suspects(suspicion.ranks),
        tied=tuple(suspects(ranks) for ranks in suspicion.tied),
        confidence=suspicion.confidence,
        why=f"{communicator_name(now)}: {suspicion.why}",
        alike=now.alike,
        waiting=_waiting(now, suspicion),
    )


def _waiting(now: RasCommunicator, suspicion: Suspicion) -> tuple[RasDevice, ...]:
    if suspicion.finding is not RasFinding.BEHIND or not suspicion.ranks:
        return ()
    late = set(suspicion.ranks)
    places = ((rank.host, rank.pid, rank.gpu) for rank in now.ranks if rank.rank not in late and not rank.missing)
    return tuple((host, pid, gpu) for host, pid, gpu in places if host is not None and pid is not None)


def _dead(now: RasCommunicator) -> Suspicion | None:
    dead = [rank for rank in now.ranks if rank.dead]
    if not dead:
        return None
    why = f"RAS considers {describe_ranks(dead)} dead: unreachable for 60 s, and given up for good"
    return Suspicion(RasFinding.DEAD, [rank.rank for rank in dead], why, 0.9)


def _errors(rank: RasRank) -> list[int]:
    return [code for code in (rank.initialization_error, rank.async_error) if is_error(code)]


def _failed(now: RasCommunicator) -> Suspicion | None:
    """Ranks that report an error of another process are witnesses, not suspects."""
    failed = [rank for rank in now.ranks if _errors(rank)]
    if not failed:
        return _failed_without_ranks(now)
    origins = [rank for rank in failed if any(code != REMOTE_ERROR for code in _errors(rank))]
    witnesses = len(failed) - len(origins)
    saw = f"; {witnesses} report an {describe_result(REMOTE_ERROR)}" if witnesses else ""
    if origins:
        kinds = sorted({code for rank in origins for code in _errors(rank)} - {REMOTE_ERROR})
        what = ", ".join(map(describe_result, kinds))
        why = f"{describe_ranks(origins)} {'holds' if len(origins) == 1 else 'hold'} an NCCL error: {what}{saw}"
        few = 2 * len(origins) < max(now.size, len(now.ranks))
        return Suspicion(RasFinding.FAILED, [rank.rank for rank in origins], why, 0.85 if few else 0.5)
    lost = [rank for rank in now.ranks if rank.unresponsive]
    if lost:
        why = f"{describe_ranks(lost)} did not answer RAS{saw}"
        return Suspicion(RasFinding.UNRESPONSIVE, [rank.rank for rank in lost], why, 0.85)
    why = f"{witnesses} of {now.size} ranks report an {describe_result(REMOTE_ERROR)} and none its own: who failed is not seen"
    return Suspicion(RasFinding.FAILED, [], why, 0.4)


def _failed_without_ranks(now: RasCommunicator) -> Suspicion | None:
    """Text form: an error that it states without naming a rank, because too many have it, or in an excerpt."""
    if not any("ERROR" in words.split(",") for words in now.words):
        return None
    said = "; ".join(words for words in now.words if "error" in words or " reported " in words)
    why = f"RAS reports an NCCL error on ranks that it does not name{f': {said}' if said else ''}"
    return Suspicion(RasFinding.FAILED, [], why, 0.4)


def _moving(view: CommunicatorView) -> Suspicion | None:
    if view.moved is not True:
        return None
    lost = [rank for rank in view.now.ranks if rank.unresponsive]
    also = f", though {describe_ranks(lost)} did not answer RAS" if lost else ""
    return Suspicion(RasFinding.PROGRESSING, [], f"launches went on between the two reports{also}", 0.9)


def _unresponsive(view: CommunicatorView) -> Suspicion | None:
    now = view.now
    lost = [rank for rank in now.ranks if rank.unresponsive]
    if lost:
        why = (
            f"{describe_ranks(lost)} did not answer RAS: stopped, starved of processor time, or out of reach"
            f"{'' if view.moved is None else '; the others stand still' + frozen_time(view)}"
        )
        confidence = 0.8 if view.moved is False else 0.7
        return Suspicion(RasFinding.UNRESPONSIVE, [rank.rank for rank in lost], why, confidence)
    stated = any("INCOMPLETE" in words.split(",") for words in now.words)
    unnamed = now.missing_count and not any(rank.missing for rank in now.ranks) and not now.statuses
    if stated or unnamed:
        many = f"{now.missing_count} ranks" if now.missing_count else "ranks"
        return Suspicion(RasFinding.UNRESPONSIVE, [], f"{many} did not answer RAS, which names none", 0.4)
    return None


def _statuses(now: RasCommunicator) -> Sequence[RasStatusCount]:
    if now.statuses:
        return now.statuses
    by_status: dict[str, list[int]] = {}
    for rank in now.ranks:
        if not rank.unresponsive:
            by_status.setdefault(_status(rank), []).append(rank.rank)
    return [RasStatusCount(status, len(ranks), tuple(ranks)) for status, ranks in by_status.items()]


def _status(rank: RasRank) -> str:
    if rank.missing:
        return "NOCOMM"
    if rank.aborted:
        return "ABORT"
    if rank.finalizing:
        return "FINALIZE"
    return "INIT" if rank.initializing else "RUNNING"


_STATUS_PHRASES = {
    "ABORT": "aborted it",
    "FINALIZE": "finalise it",
    "RUNNING": "still use it",
    "INIT": "still initialise it",
}


def _leaving(view: CommunicatorView) -> Suspicion | None:
    """Torn down by some and not by others: the smaller side is the odd one."""
    now = view.now
    statuses = _statuses(now)
    left = [status for status in statuses if status.status in (*LEFT_STATUSES, "FINALIZE", "ABORT")]
    if not left and now.state not in ("FINALIZE", "ABORT", "NOCOMM"):
        return None
    if not left:
        return Suspicion(RasFinding.LEAVING, [], f"its ranks {_STATUS_PHRASES.get(now.state, 'have left it')}", 0.3)
    stay = [status for status in statuses if status not in left]
    gone, staying = sum(status.ranks for status in left), sum(status.ranks for status in stay)
    parts = [f"{status.ranks} {_STATUS_PHRASES.get(status.status, 'have left it')}" for status in statuses]
    why = f"its ranks are leaving it{' unevenly' if staying else ''}: {', '.join(parts)}"
    side = [rank for status in (left if gone < staying else stay) for rank in status.named]
    if gone == staying:
        tied = [[rank for status in group for rank in status.named] for group in (left, stay)]
        return Suspicion(RasFinding.LEAVING, [], why, 0.2, tied)
    # A job that ends passes through this for a moment.
    return Suspicion(RasFinding.LEAVING, side if staying else [], why, 0.4 if view.moved is False else 0.25)


def _starting(view: CommunicatorView) -> Suspicion | None:
    now = view.now
    starting = [rank for rank in now.ranks if rank.initializing]
    if not starting and now.state != "INIT":
        return None
    after = f", and nothing changed{frozen_time(view)}" if view.moved is False else ""
    if not starting or len(starting) == len(now.ranks):
        return Suspicion(RasFinding.INITIALIZING, [], f"its {now.size} ranks are still initialising it{after}", 0.6)
    why = f"{describe_ranks(starting)} still initialise it, {len(now.ranks) - len(starting)} have finished{after}"
    return Suspicion(RasFinding.INITIALIZING, [rank.rank for rank in starting], why, 0.4)
