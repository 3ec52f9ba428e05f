"""What is wrong with one communicator, seen once or twice.

First what RAS states (dead, failed), then whether there is progress, then what the counters imply. Confidences are
chosen, not measured: stated facts get about 0.9, conclusions from counters less, lateness alone least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.diagnosis.nccl_ras.communicator_view import (
    CommunicatorView,
    Suspicion,
    build_suspect,
    communicator_name,
    describe_ranks,
    observed_time,
)
from wattwatch.watcher.diagnosis.nccl_ras.counters import analyze_launches
from wattwatch.watcher.diagnosis.nccl_ras.model import (
    LEFT_STATUSES,
    CommunicatorAnalysis,
    RasCommunicator,
    RasDevice,
    RasFinding,
    RasRank,
    RasStatusCount,
    RasSuspect,
)
from wattwatch.watcher.diagnosis.nccl_ras.nccl_results import REMOTE_ERROR, describe_result, is_error

# What ranks with a status do, for one rank and for several.
_STATUS_PHRASES = {
    "ABORT": ("has aborted it", "have aborted it"),
    "FINALIZE": ("is finalizing it", "are finalizing it"),
    "RUNNING": ("still uses it", "still use it"),
    "INIT": ("is still initializing the communicator", "are still initializing the communicator"),
}
_LEFT_PHRASES = ("has left it", "have left it")


def analyze_communicator(view: CommunicatorView, job_ranks: dict[RasDevice, int]) -> CommunicatorAnalysis:
    """What is wrong, which ranks are suspected, with what confidence, and why."""
    now = view.now
    suspicion = (
        _dead(now) or _failed(now) or _moving(view) or _unresponsive(view) or _leaving(view) or _starting(view)
    ) or analyze_launches(view)
    by_rank = {rank.rank: build_suspect(now, rank, job_ranks) for rank in now.ranks}

    def suspects(ranks: Iterable[int]) -> tuple[RasSuspect, ...]:
        return tuple(by_rank.get(rank) or RasSuspect(rank, now.identity, None, None, None) for rank in sorted(ranks))

    return CommunicatorAnalysis(
        identity=now.identity,
        size=now.size,
        finding=suspicion.finding,
        suspects=suspects(suspicion.ranks),
        tied=tuple(suspects(ranks) for ranks in suspicion.tied),
        confidence=suspicion.confidence,
        why=f"{communicator_name(now)}: {suspicion.why}",
        identical_count=now.identical_count,
        waiting=_waiting_devices(now, suspicion),
    )


def _waiting_devices(now: RasCommunicator, suspicion: Suspicion) -> tuple[RasDevice, ...]:
    if suspicion.finding is not RasFinding.BEHIND or not suspicion.ranks:
        return ()
    late = set(suspicion.ranks)
    devices = ((rank.host, rank.pid, rank.gpu) for rank in now.ranks if rank.rank not in late and not rank.missing)
    return tuple((host, pid, gpu) for host, pid, gpu in devices if host is not None and pid is not None)


def _dead(now: RasCommunicator) -> Suspicion | None:
    dead = [rank for rank in now.ranks if rank.dead]
    if not dead:
        return None
    them = "it" if len(dead) == 1 else "them"
    why = f"RAS considers {describe_ranks(dead)} dead: RAS could not reach {them} for 60 s and has stopped trying"
    return Suspicion(RasFinding.DEAD, [rank.rank for rank in dead], why, 0.9)


def _errors(rank: RasRank) -> list[int]:
    return [code for code in (rank.initialization_error, rank.async_error) if is_error(code)]


def _failed(now: RasCommunicator) -> Suspicion | None:
    """A rank that reports a remote error only noticed that another process failed: it is not a suspect."""
    failed = [rank for rank in now.ranks if _errors(rank)]
    if not failed:
        return _failed_without_ranks(now)
    origins = [rank for rank in failed if any(code != REMOTE_ERROR for code in _errors(rank))]
    observers = len(failed) - len(origins)
    observed = (
        f"; {format_count(observers, 'rank')} {'reports' if observers == 1 else 'report'} a "
        f"{describe_result(REMOTE_ERROR)}"
        if observers
        else ""
    )
    if origins:
        codes = sorted({code for rank in origins for code in _errors(rank)} - {REMOTE_ERROR})
        errors = ", ".join(map(describe_result, codes))
        verb = "reports" if len(origins) == 1 else "report"
        why = f"{describe_ranks(origins)} {verb} an NCCL error: {errors}{observed}"
        # An error on most ranks is rarely the fault of each of them: something common failed.
        few = 2 * len(origins) < max(now.size, len(now.ranks))
        return Suspicion(RasFinding.FAILED, [rank.rank for rank in origins], why, 0.85 if few else 0.5)
    lost = [rank for rank in now.ranks if rank.unresponsive]
    if lost:
        why = f"{describe_ranks(lost)} did not answer RAS{observed}"
        return Suspicion(RasFinding.UNRESPONSIVE, [rank.rank for rank in lost], why, 0.85)
    report = "reports" if observers == 1 else "report"
    why = (
        f"{observers} of {now.size} ranks {report} a {describe_result(REMOTE_ERROR)} and reports no other "
        "error, so RAS does not show which rank failed"
    )
    return Suspicion(RasFinding.FAILED, [], why, 0.4)


def _failed_without_ranks(now: RasCommunicator) -> Suspicion | None:
    """Text format: an error without the name of a rank, because too many ranks have it, or in an excerpt."""
    if not any("ERROR" in line.split(",") for line in now.lines):
        return None
    details = "; ".join(line for line in now.lines if "error" in line or " reported " in line)
    why = f"RAS reports an NCCL error on ranks that it does not name{f': {details}' if details else ''}"
    return Suspicion(RasFinding.FAILED, [], why, 0.4)


def _moving(view: CommunicatorView) -> Suspicion | None:
    if view.moved is not True:
        return None
    lost = [rank for rank in view.now.ranks if rank.unresponsive]
    also = f", although {describe_ranks(lost)} did not answer RAS" if lost else ""
    why = f"launches continued between the two reports{also}"
    return Suspicion(RasFinding.PROGRESSING, [], why, 0.9)


def _unresponsive(view: CommunicatorView) -> Suspicion | None:
    now = view.now
    lost = [rank for rank in now.ranks if rank.unresponsive]
    if lost:
        others = "" if view.moved is None else f"; the other ranks made no progress{observed_time(view)}"
        why = f"{describe_ranks(lost)} did not answer RAS (stopped, starved of CPU time, or unreachable){others}"
        confidence = 0.8 if view.moved is False else 0.7
        return Suspicion(RasFinding.UNRESPONSIVE, [rank.rank for rank in lost], why, confidence)
    stated = any("INCOMPLETE" in line.split(",") for line in now.lines)
    unnamed = now.missing_count and not any(rank.missing for rank in now.ranks) and not now.statuses
    if stated or unnamed:
        number = format_count(now.missing_count, "rank") if now.missing_count else "some ranks"
        them = "it" if now.missing_count == 1 else "them"
        why = f"{number} did not answer RAS, and the report does not name {them}"
        return Suspicion(RasFinding.UNRESPONSIVE, [], why, 0.4)
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


def _status_phrase(status: str, ranks: int) -> str:
    singular, plural = _STATUS_PHRASES.get(status, _LEFT_PHRASES)
    return singular if ranks == 1 else plural


def _leaving(view: CommunicatorView) -> Suspicion | None:
    """Some ranks have destroyed the communicator, others have not: the smaller side is suspected."""
    now = view.now
    statuses = _statuses(now)
    left = [status for status in statuses if status.status in (*LEFT_STATUSES, "FINALIZE", "ABORT")]
    if not left and now.state not in ("FINALIZE", "ABORT", "NOCOMM"):
        return None
    if not left:
        return Suspicion(RasFinding.LEAVING, [], f"its ranks {_status_phrase(now.state, now.size)}", 0.3)
    stay = [status for status in statuses if status not in left]
    gone, staying = sum(status.ranks for status in left), sum(status.ranks for status in stay)
    parts = [f"{status.ranks} {_status_phrase(status.status, status.ranks)}" for status in statuses]
    why = f"{'only some of its ranks' if staying else 'its ranks'} are leaving it: {', '.join(parts)}"
    side = [rank for status in (left if gone < staying else stay) for rank in status.named]
    if gone == staying:
        tied = [[rank for status in group for rank in status.named] for group in (left, stay)]
        return Suspicion(RasFinding.LEAVING, [], why, 0.2, tied)
    # A job that ends normally is in this state for a moment, so without a second report the confidence is low.
    return Suspicion(RasFinding.LEAVING, side if staying else [], why, 0.4 if view.moved is False else 0.25)


def _starting(view: CommunicatorView) -> Suspicion | None:
    now = view.now
    starting = [rank for rank in now.ranks if rank.initializing]
    if not starting and now.state != "INIT":
        return None
    unchanged = f", with no change{observed_time(view)}" if view.moved is False else ""
    if not starting or len(starting) == len(now.ranks):
        why = f"its {format_count(now.size, 'rank')} {_status_phrase('INIT', now.size)}{unchanged}"
        return Suspicion(RasFinding.INITIALIZING, [], why, 0.6)
    finished = len(now.ranks) - len(starting)
    phrase, has = _status_phrase("INIT", len(starting)), "has" if finished == 1 else "have"
    why = f"{describe_ranks(starting)} {phrase}; {format_count(finished, 'rank')} {has} finished{unchanged}"
    return Suspicion(RasFinding.INITIALIZING, [rank.rank for rank in starting], why, 0.4)
