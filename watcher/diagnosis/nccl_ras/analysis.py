"""RAS reports of one or several nodes -> what they say of the job as a whole. Pure; their order does not matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wattwatch.watcher.diagnosis.nccl_ras.communicator import analyze_communicator
from wattwatch.watcher.diagnosis.nccl_ras.communicator_view import (
    CommunicatorView,
    build_views,
    have_no_common_communicator,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import (
    CommunicatorAnalysis,
    RasAnalysis,
    RasDevice,
    RasFinding,
    RasPolls,
    RasSuspect,
)

# What counts before what, for the job: stated and final, then "it moves", then what only a job that stands still means.
_PRECEDENCE = (
    RasFinding.DEAD,
    RasFinding.FAILED,
    RasFinding.PROGRESSING,
    RasFinding.UNRESPONSIVE,
    RasFinding.CROSSED,
    RasFinding.BEHIND,
    RasFinding.LEAVING,
    RasFinding.INITIALIZING,
    RasFinding.MATCHED,
    RasFinding.CANNOT_TELL,
)


def analyze_ras(polls: Sequence[RasPolls]) -> RasAnalysis:
    """Who and why as far as RAS can tell; `notes` has what could not be read. Never raises."""
    polls = sorted(polls, key=lambda poll: poll.node)
    notes = tuple(dict.fromkeys(_notes(polls)))
    reports = [report for poll in polls for report in poll.reports]
    sources = tuple(report.source for report in reports)
    views = build_views(polls)
    if not views:
        finding, why = _nothing_reported(polls)
        return RasAnalysis(finding, (), (), 0.0, why, notes=notes, sources=sources)
    job_ranks = _job_ranks(views, max((report.job_gpus or 0 for report in reports), default=0))
    readings = sorted((analyze_communicator(view, job_ranks) for view in views), key=_precedence)
    finding = readings[0].finding
    telling = [reading for reading in readings if reading.finding is finding]
    suspects = _distinct_suspects(suspect for reading in telling for suspect in reading.suspects)
    tied = tuple(dict.fromkeys(side for reading in telling for side in reading.tied if side))
    confidence = telling[0].confidence
    why = telling[0].why
    if finding is RasFinding.BEHIND and len(telling) > 1 and suspects:
        suspects, around = _exclude_waiting(suspects, telling)
        if around:
            tied, suspects, confidence = ((around),), (), 0.3
            why = f"{why}; each rank that is behind in one communicator waits in another: they hold each other up"
        else:
            why = _first_with(suspects, telling).why
    return RasAnalysis(
        finding=finding,
        suspects=suspects,
        tied=tied,
        confidence=confidence,
        why=f"{why}{_describe_others(readings, telling)}",
        communicators=tuple(readings),
        notes=notes,
        sources=sources,
    )


def _precedence(reading: CommunicatorAnalysis) -> tuple[int, float, int, str]:
    return (_PRECEDENCE.index(reading.finding), -reading.confidence, -reading.size, reading.identity)


def _nothing_reported(polls: Sequence[RasPolls]) -> tuple[RasFinding, str]:
    reports = [report for poll in polls for report in poll.reports]
    if any(report.trouble is None for report in reports):
        return (
            RasFinding.NO_COMMUNICATORS,
            "RAS answers and knows no communicator: none is made yet, or all are gone",
        )
    said = [report.trouble for report in reports] + [poll.trouble for poll in polls]
    first = next((words for words in said if words), None)
    return RasFinding.NO_REPORT, f"no report of RAS{f': {first}' if first else ''}"


def _notes(polls: Sequence[RasPolls]) -> Iterable[str]:
    for poll in polls:
        if poll.trouble:
            yield f"{poll.node}: {poll.trouble}"
        for report in poll.reports:
            if report.trouble:
                yield f"{report.source}: {report.trouble}"
            if report.repaired:
                yield f"{report.source}: put in the commas that NCCL {report.nccl_version or '2.28'} leaves out"
            if report.timeouts:
                yield f"{report.source}: RAS itself met {report.timeouts} timeouts while it collected"
        if len(poll.reports) > 1 and have_no_common_communicator(poll):
            yield (
                f"{poll.node}: its two reports have no communicator in common: all were made anew, or two jobs share "
                "the port; they are not compared"
            )
        if poll.reports:
            yield from (f"{poll.reports[-1].source}: {words}" for words in poll.reports[-1].words)


def _job_ranks(views: Sequence[CommunicatorView], job_gpus: int) -> dict[RasDevice, int]:
    """Ranks of the job by device, from communicators that span all that RAS sees; nothing where they disagree."""
    devices = {
        (rank.host, rank.pid, rank.gpu)
        for view in views
        for rank in view.now.ranks
        if rank.host is not None and rank.pid is not None
    }
    ranks: dict[RasDevice, int] = {}
    doubtful: set[RasDevice] = set()
    for view in views:
        is_text = bool(view.now.state or view.now.words)
        if view.now.size < max(len(devices), job_gpus, 2) or (is_text and not job_gpus):
            continue
        for rank in view.now.ranks:
            if rank.host is None or rank.pid is None:
                continue
            device = (rank.host, rank.pid, rank.gpu)
            if ranks.setdefault(device, rank.rank) != rank.rank:
                doubtful.add(device)
    return {} if doubtful else ranks


def _distinct_suspects(suspects: Iterable[RasSuspect]) -> tuple[RasSuspect, ...]:
    """Each device once, by the first communicator that names it."""
    found: dict[object, RasSuspect] = {}
    for suspect in suspects:
        found.setdefault(suspect.device or (suspect.communicator, suspect.rank), suspect)
    return tuple(found.values())


def _exclude_waiting(
    suspects: tuple[RasSuspect, ...], telling: Sequence[CommunicatorAnalysis]
) -> tuple[tuple[RasSuspect, ...], tuple[RasSuspect, ...]]:
    """Those behind in one communicator that do not wait, ahead of others, in a second; or all of them, as a ring."""
    waiting = {device for reading in telling if reading.suspects for device in reading.waiting}
    roots = tuple(suspect for suspect in suspects if suspect.device not in waiting)
    return (roots, ()) if roots else ((), suspects)


def _first_with(suspects: Sequence[RasSuspect], telling: Sequence[CommunicatorAnalysis]) -> CommunicatorAnalysis:
    return next((reading for reading in telling if set(suspects) & set(reading.suspects)), telling[0])


def _describe_others(readings: Sequence[CommunicatorAnalysis], telling: Sequence[CommunicatorAnalysis]) -> str:
    """How many communicators say the same, and what is worse in the rest although the job moves."""
    alike = sum(reading.alike for reading in telling) - telling[0].alike
    total = sum(reading.alike for reading in readings)
    words = f" (so {alike} more of {total} communicators)" if alike else ""
    if telling[0].finding is RasFinding.PROGRESSING:
        odd = next((r for r in readings if r.finding in (RasFinding.CROSSED, RasFinding.BEHIND) and r.suspects), None)
        if odd is not None:
            words += f"; yet {odd.why}"
    return words
