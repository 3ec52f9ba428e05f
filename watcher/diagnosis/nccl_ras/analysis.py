"""RAS reports of one or several nodes: what they say about the job as a whole. Their order does not matter.

What a finding means stands in `model.py`, what RAS cannot see as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from wattwatch.watcher.common.formatting import format_count
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

# Which finding of a communicator decides for the job: first what RAS states and is final, then progress, then what is
# only meaningful if there is none.
_PRECEDENCE: Final = (
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
_CONFIDENCE_CYCLE: Final = 0.3  # ranks that block each other; chosen


def analyze_ras(polls: Sequence[RasPolls]) -> RasAnalysis:
    """Which ranks and why, as far as RAS shows it. `notes` says what could not be read. Raises nothing."""
    polls = sorted(polls, key=lambda poll: poll.node)
    notes = tuple(dict.fromkeys(_notes(polls)))
    reports = [report for poll in polls for report in poll.reports]
    sources = tuple(report.source for report in reports)
    views = build_views(polls)
    if not views:
        finding, why = _nothing_reported(polls)
        return RasAnalysis(finding, (), (), 0.0, why, notes=notes, sources=sources)
    job_ranks = _job_ranks(views, max((report.job_gpus or 0 for report in reports), default=0))
    analyses = sorted((analyze_communicator(view, job_ranks) for view in views), key=_precedence)
    finding = analyses[0].finding
    decisive = [analysis for analysis in analyses if analysis.finding is finding]
    suspects = _distinct_suspects(suspect for analysis in decisive for suspect in analysis.suspects)
    tied = tuple(dict.fromkeys(side for analysis in decisive for side in analysis.tied if side))
    confidence = decisive[0].confidence
    why = decisive[0].why
    # A rank that waits in one communicator is late in all its others for that reason alone: only ranks that wait in
    # none can be the cause.
    if finding is RasFinding.BEHIND and len(decisive) > 1 and suspects:
        suspects, cycle = _exclude_waiting(suspects, decisive)
        if cycle:
            tied, suspects, confidence = (cycle,), (), _CONFIDENCE_CYCLE
            why += (
                "; each rank that is behind in one communicator waits in another one, so these ranks block each other"
            )
        else:
            why = _first_with(suspects, decisive).why
    return RasAnalysis(
        finding=finding,
        suspects=suspects,
        tied=tied,
        confidence=confidence,
        why=f"{why}{_describe_others(analyses, decisive)}",
        communicators=tuple(analyses),
        notes=notes,
        sources=sources,
    )


def _precedence(analysis: CommunicatorAnalysis) -> tuple[int, float, int, str]:
    return (_PRECEDENCE.index(analysis.finding), -analysis.confidence, -analysis.size, analysis.identity)


def _nothing_reported(polls: Sequence[RasPolls]) -> tuple[RasFinding, str]:
    reports = [report for poll in polls for report in poll.reports]
    if any(report.problem is None for report in reports):
        return (
            RasFinding.NO_COMMUNICATORS,
            "RAS answers but reports no communicator: none has been created yet, or all have been destroyed",
        )
    problems = [report.problem for report in reports] + [poll.problem for poll in polls]
    first = next((problem for problem in problems if problem), None)
    return RasFinding.NO_REPORT, f"no RAS report{f': {first}' if first else ''}"


def _notes(polls: Sequence[RasPolls]) -> Iterable[str]:
    for poll in polls:
        if poll.problem:
            yield f"{poll.node}: {poll.problem}"
        for report in poll.reports:
            if report.problem:
                yield f"{report.source}: {report.problem}"
            if report.repaired:
                version = report.nccl_version or "2.28"
                yield f"{report.source}: NCCL {version} omitted commas in its JSON; wattwatch added them"
            if report.timeouts:
                timeouts = format_count(report.timeouts, "timeout")
                yield f"{report.source}: RAS had {timeouts} while it collected this report"
        if len(poll.reports) > 1 and have_no_common_communicator(poll):
            yield (
                f"{poll.node}: the two reports have no communicator in common (all were recreated, or two jobs share "
                "the port), so they were not compared"
            )
        if poll.reports:
            yield from (f"{poll.reports[-1].source}: {remark}" for remark in poll.reports[-1].remarks)


def _job_ranks(views: Sequence[CommunicatorView], job_gpus: int) -> dict[RasDevice, int]:
    """Ranks of the job by device, from communicators that span all devices; {} if such communicators disagree.

    `job_gpus`: how many GPUs RAS says the job has; 0: unknown.
    """
    devices = {
        (rank.host, rank.pid, rank.gpu)
        for view in views
        for rank in view.now.ranks
        if rank.host is not None and rank.pid is not None
    }
    ranks: dict[RasDevice, int] = {}
    contradicted: set[RasDevice] = set()
    for view in views:
        # The text format names only a few ranks, so that there the devices seen do not show the size of the job.
        is_text = bool(view.now.state or view.now.lines)
        if view.now.size < max(len(devices), job_gpus, 2) or (is_text and not job_gpus):
            continue
        for rank in view.now.ranks:
            if rank.host is None or rank.pid is None:
                continue
            device = (rank.host, rank.pid, rank.gpu)
            if ranks.setdefault(device, rank.rank) != rank.rank:
                contradicted.add(device)
    return {} if contradicted else ranks


def _distinct_suspects(suspects: Iterable[RasSuspect]) -> tuple[RasSuspect, ...]:
    """Each device once, as the first communicator names it."""
    found: dict[object, RasSuspect] = {}
    for suspect in suspects:
        found.setdefault(suspect.device or (suspect.communicator, suspect.rank), suspect)
    return tuple(found.values())


def _exclude_waiting(
    suspects: tuple[RasSuspect, ...], decisive: Sequence[CommunicatorAnalysis]
) -> tuple[tuple[RasSuspect, ...], tuple[RasSuspect, ...]]:
    """Suspects that do not wait, ahead of others, in a second communicator. If all do: (), and all as a cycle."""
    waiting = {device for analysis in decisive if analysis.suspects for device in analysis.waiting}
    roots = tuple(suspect for suspect in suspects if suspect.device not in waiting)
    return (roots, ()) if roots else ((), suspects)


def _first_with(suspects: Sequence[RasSuspect], decisive: Sequence[CommunicatorAnalysis]) -> CommunicatorAnalysis:
    return next((analysis for analysis in decisive if set(suspects) & set(analysis.suspects)), decisive[0])


def _describe_others(analyses: Sequence[CommunicatorAnalysis], decisive: Sequence[CommunicatorAnalysis]) -> str:
    """In how many communicators the finding is the same, and what is suspicious in the others although the job runs."""
    same = sum(analysis.identical_count for analysis in decisive) - decisive[0].identical_count
    total = sum(analysis.identical_count for analysis in analyses)
    text = f"; the same applies to {same} more of the {total} communicators" if same else ""
    if decisive[0].finding is RasFinding.PROGRESSING:
        odd = next((a for a in analyses if a.finding in (RasFinding.CROSSED, RasFinding.BEHIND) and a.suspects), None)
        if odd is not None:
            text += f"; however, {odd.why}"
    return text
