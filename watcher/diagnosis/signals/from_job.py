"""Signals from inside the job: Python stacks, exit reports, logs and NCCL RAS. Pure.

The flight records are not among them: `collectives/` analyzes those, and `diagnose.py` adds the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.watcher.common.formatting import format_count, format_ranks
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.flight_recorder.model import RankRecord
from wattwatch.watcher.diagnosis.model import (
    DiagnosisVerdict,
    Evidence,
    HangCause,
    LogError,
    RankExitReport,
    job_world_size,
    known_ranks,
    nodes_by_rank,
    nodes_by_rank_if_complete,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasAnalysis, RasFinding, RasPolls, RasSuspect
from wattwatch.watcher.diagnosis.signals.signal import EXIT_REPORTS, LOGS, NCCL_RAS, STACKS, Signal
from wattwatch.watcher.diagnosis.stacks.activity import (
    USER_CODE,
    ActivityGroup,
    RankActivity,
    group_by_activity,
    outliers,
    rank_activities,
)
from wattwatch.watcher.diagnosis.stacks.log_errors import SIZE_MISMATCH, classify_message, log_error_kind
from wattwatch.watcher.diagnosis.stacks.python_stacks import format_frame

# All weights here are chosen, not fitted (see combine.py).

# Stacks

# A rank that waits for other ranks is in one of these activities; a rank in any other may be the one they wait for.
WAITING_ACTIVITIES: Final = frozenset(
    {"collective", "gpu_wait", "backward", "process_group_end", "process_group_start"}
)
ACTIVITY_CAUSES: Final = {
    "data": HangCause.DATA,
    "checkpoint": HangCause.STORAGE,
    "file": HangCause.STORAGE,
    "compile": HangCause.RANK,
    "tokenize": HangCause.DATA,
    "subprocess": HangCause.RANK,
    "network_read": HangCause.RANK,
    "lock": HangCause.RANK,
    USER_CODE: HangCause.RANK,
}
STACKS_WEIGHT: Final = 0.6
# No clear majority: a line of the job's own code may also be waiting for its GPU, which a Python frame does not show.
TIED_WEIGHT: Final = 0.35
ALIKE_WEIGHT: Final = 0.3
NO_STACKS_WEIGHT: Final = 0.2  # a rank that gave no stacks: supports other sources, names nobody alone


def stacks_signal(evidence: Evidence) -> Signal | None:
    """Names the ranks that do something else than most; None without stacks that show a main thread."""
    active = rank_activities(evidence.stacks)
    if not active:
        return None
    groups = group_by_activity(active)
    odd, weight = _outlier_groups(active, groups)
    rank_text = {each.rank: describe_activity(each) for each in active}
    if odd:
        named = frozenset(rank for group in odd for rank in group.ranks)
        rest = [group for group in groups if group not in odd]
        text = f"{'; '.join(_describe_group(group) for group in odd[:3])}, while {_describe_group(rest[0])}"
        causes = {ACTIVITY_CAUSES.get(group.activity) for group in odd}
        return Signal(STACKS, text, named, weight, causes.pop() if len(causes) == 1 else None, rank_text)
    alike = len(groups) == 1 and len(active) > 2
    text = "; ".join(_describe_group(group) for group in groups[:3])
    observed = frozenset(rank_text)
    silent = known_ranks(evidence) - observed
    if alike and 0 < len(silent) < len(observed):
        rank_text |= dict.fromkeys(silent, "returned no stacks")
        return Signal(
            STACKS, f"{format_ranks(silent)} returned no stacks; {text}", silent, NO_STACKS_WEIGHT, None, rank_text
        )
    return Signal(
        STACKS,
        text,
        weight=ALIKE_WEIGHT if alike else 0.0,
        rank_text=rank_text,
        all_alike=alike,
        observed_ranks=observed,
    )


def _outlier_groups(
    active: Sequence[RankActivity], groups: Sequence[ActivityGroup]
) -> tuple[tuple[ActivityGroup, ...], float]:
    """The groups that most likely block the others, and the weight of that."""
    not_waiting = tuple(group for group in groups if group.activity not in WAITING_ACTIVITIES)
    number = sum(len(group.ranks) for group in not_waiting)
    if not_waiting and 2 * number <= len(active):
        return not_waiting, STACKS_WEIGHT if 2 * number < len(active) else TIED_WEIGHT
    odd = outliers(groups)
    return odd, STACKS_WEIGHT if len(odd) == 1 else TIED_WEIGHT


def describe_activity(active: RankActivity) -> str:
    """Completes "rank 3 ...": `waits for data at load_batch (train.py:43)`."""
    return active.words if active.frame is None else f"{active.words} at {format_frame(active.frame)}"


def _describe_group(group: ActivityGroup) -> str:
    where = "" if group.frame is None else f" at {format_frame(group.frame)}"
    words = group.words if len(group.ranks) == 1 else _pluralize(group.words)
    return f"{format_ranks(group.ranks)} {words}{where}"


def _pluralize(words: str) -> str:
    """The words of activity.toml for several ranks: `waits for its GPU` -> `wait for their GPU`."""
    first, _, rest = words.partition(" ")
    verb = {"is": "are"}.get(first, first.removesuffix("s"))
    return f"{verb} {rest.replace('its ', 'their ')}".strip()


# Exit reports

EXITED_FIRST_WEIGHT: Final = 0.8
NO_REPORT_WEIGHT: Final = 0.6
STOPPED_ON_REQUEST_EXIT_CODE: Final = 4  # `wattwatch-train run` exits with it after SIGTERM or a stop file


def exit_reports_signal(evidence: Evidence) -> Signal | None:
    """Names the ranks that failed by themselves; if none did, the ranks without a report: killed, or still hanging."""
    if not evidence.exit_reports:
        return None
    exited = {report.rank: report for report in evidence.exit_reports}
    world = frozenset(evidence.node_of_rank) | frozenset(exited)
    failed = [
        report
        for report in exited.values()
        if report.code not in (0, STOPPED_ON_REQUEST_EXIT_CODE) and not report.is_consequence
    ]
    if failed and 2 * len(failed) <= len(world):
        named = frozenset(report.rank for report in failed)
        kinds = [classify_message(report.why) for report in failed]
        causes = {None if kind is None else kind.cause for kind in kinds}
        cause = (causes.pop() if len(causes) == 1 else None) or HangCause.RANK
        rank_text = {report.rank: f"exited with code {report.code}" for report in failed}
        return Signal(EXIT_REPORTS, _describe_exits(failed), named, EXITED_FIRST_WEIGHT, cause, rank_text)
    silent = world - frozenset(exited)
    if silent and 2 * len(silent) < len(world):
        others = format_count(len(exited), "other rank")
        text = (
            f"{format_ranks(silent)} left no exit report and may have been killed or may still hang; {others} left one"
        )
        rank_text = dict.fromkeys(silent, "left no exit report")
        return Signal(EXIT_REPORTS, text, silent, NO_REPORT_WEIGHT, HangCause.RANK, rank_text)
    return Signal(EXIT_REPORTS, _describe_exits(list(exited.values())))


def _describe_exits(reports: Sequence[RankExitReport]) -> str:
    first = min(reports, key=lambda each: each.rank)
    after = "" if first.step is None else f" after step {first.step:,}"
    more = f" (and {format_count(len(reports) - 1, 'more rank')})" if len(reports) > 1 else ""
    return f"rank {first.rank} exited with code {first.code}{after}: {first.why}{more}"


# Logs

FAILED_WEIGHT: Final = 0.85
SEVERAL_FAILED_WEIGHT: Final = 0.6
RECEIVER_WEIGHT: Final = 0.4  # sizes differ between two ranks: either the receiver or the sender is wrong
# Last writes closer together than this count as simultaneous: clocks of file servers differ, and a long traceback
# takes time to write. Chosen, not measured.
SIMULTANEOUS_SECONDS: Final = 2.0


def logs_signal(evidence: Evidence) -> Signal | None:
    """Names the ranks whose logs end with an error of their own, not with the loss of another rank."""
    errors = {log.rank: log.failure for log in evidence.logs if log.failure is not None}
    if not errors:
        return None
    own = {rank: error for rank, error in errors.items() if not error.is_consequence}
    if not own:
        text = (
            f"{format_ranks(errors)} lost contact with another rank or timed out waiting for it; no log "
            "shows the first error"
        )
        return Signal(LOGS, text)
    if sizes := {rank: error for rank, error in own.items() if error.kind == SIZE_MISMATCH}:
        return _size_mismatch_signal(sizes, evidence.records)
    own = _earliest(own, {log.rank: log.age_seconds for log in evidence.logs})
    rank_text = {rank: describe_log_error(error) for rank, error in own.items()}
    causes = {error.cause for error in own.values()}
    common = causes.pop() if len(causes) == 1 else None
    cause = None if common is None else HangCause(common)
    first, *rest = sorted(own)
    text = f"rank {first} {rank_text[first]}" + (f"; {format_ranks(rest)} failed too" if rest else "")
    if len(own) > 1 and 2 * len(own) > len(known_ranks(evidence) | set(own)):
        return Signal(LOGS, text, cause=cause)  # most ranks failed alike, so none of them is the odd one
    return Signal(LOGS, text, frozenset(own), SEVERAL_FAILED_WEIGHT if rest else FAILED_WEIGHT, cause, rank_text)


def describe_log_error(error: LogError) -> str:
    """Completes "rank 2 ...": `raised ValueError: shard 7 holds no tokens, at read_shard (train.py:59)`."""
    kind = log_error_kind(error.kind)
    what = f"raised {error.message}" if kind is None else f"{kind.words}: {error.message}"
    return what if error.frame is None else f"{what}, at {format_frame(error.frame)}"


def _earliest(own: Mapping[int, LogError], ages: Mapping[int, float | None]) -> dict[int, LogError]:
    """The ranks whose logs went silent before the others; all of them if the age of any log is unknown."""
    known = {rank: age for rank in own if (age := ages.get(rank)) is not None}
    if len(known) < len(own):
        return dict(own)
    oldest = max(known.values())
    return {rank: error for rank, error in own.items() if known[rank] >= oldest - SIMULTANEOUS_SECONDS}


def _size_mismatch_signal(aborted: Mapping[int, LogError], records: Sequence[RankRecord]) -> Signal:
    """gloo aborts the rank that receives more data than it expects, which is not always the rank that is wrong.

    What the other ranks launched last decides: if they all launched the same, the aborted rank is wrong; if exactly one
    of them differs, that one sent the wrong size.
    """
    first = min(aborted)
    last = {r.rank: what for r in records if r.rank not in aborted and (what := _last_launch(r)) is not None}
    counts = Counter(last.values()).most_common()
    odd = [rank for rank, what in last.items() if len(counts) == 2 and what == counts[1][0]]
    rank_text = {rank: describe_log_error(error) for rank, error in aborted.items()}
    named, weight = frozenset(aborted), RECEIVER_WEIGHT
    more = f"the wrong size is that of rank {first} or of the rank that sent the data"
    if len(counts) == 1 and len(last) > 1 and len(aborted) == 1:
        weight, more = FAILED_WEIGHT, f"{format_ranks(last)} all launched {counts[0][0]}"
    elif len(odd) == 1 and len(last) > 2:
        more = f"rank {odd[0]} launched {counts[1][0]}; the other ranks launched {counts[0][0]}"
        named, weight, rank_text = frozenset(odd), FAILED_WEIGHT, {odd[0]: f"launched {counts[1][0]}"}
    text = f"rank {first} {describe_log_error(aborted[first])}; {more}"
    return Signal(LOGS, text, named, weight, HangCause.PROGRAM, rank_text, verdict=DiagnosisVerdict.MISMATCH)


def _last_launch(record: RankRecord) -> str | None:
    launches = [part.launches[-1] for part in record.groups if part.launches]
    last = max(launches, key=lambda launch: launch.record_id, default=None)
    return None if last is None else describe_operation(last.operation, sizes=True)


# NCCL RAS

RAS_VERDICTS: Final = {
    RasFinding.CROSSED: DiagnosisVerdict.DESYNC,
    RasFinding.BEHIND: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.LEAVING: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.DEAD: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.UNRESPONSIVE: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.MATCHED: DiagnosisVerdict.NO_DESYNC,
}
RAS_CAUSES: Final = {
    RasFinding.CROSSED: HangCause.PROGRAM,
    RasFinding.DEAD: HangCause.RANK,
    RasFinding.UNRESPONSIVE: HangCause.RANK,
    RasFinding.LEAVING: HangCause.RANK,
    RasFinding.MATCHED: HangCause.NETWORK,
}
RAS_RANK_TEXT: Final = {
    RasFinding.CROSSED: "launched different collectives than the other ranks",
    RasFinding.BEHIND: "launched fewer collectives than the other ranks",
    RasFinding.DEAD: "was declared dead by NCCL: its process or its node is gone",
    RasFinding.UNRESPONSIVE: "does not answer NCCL RAS",
    RasFinding.LEAVING: "left the communicator, but the other ranks did not",
    RasFinding.FAILED: "reports an NCCL error",
}


def ras_signal(ras: RasAnalysis, evidence: Evidence) -> Signal:
    """The finding of RAS, with its suspects as ranks of the job."""
    finding = ras.finding
    if finding is RasFinding.PROGRESSING:
        return Signal(NCCL_RAS, ras.why, weight=ras.confidence, shows_progress=True)
    ranks = {rank for suspect in ras.suspects if (rank := ras_suspect_job_rank(suspect, ras, evidence)) is not None}
    all_alike = finding is RasFinding.MATCHED
    return Signal(
        NCCL_RAS,
        ras.why,
        frozenset(ranks),
        ras.confidence,
        RAS_CAUSES.get(finding),
        dict.fromkeys(ranks, RAS_RANK_TEXT.get(finding, "")),
        all_alike=all_alike,
        observed_ranks=known_ranks(evidence) if all_alike else frozenset(),
    )


def ras_suspect_job_rank(suspect: RasSuspect, ras: RasAnalysis, evidence: Evidence) -> int | None:
    """The suspect's rank in the job; None: unknown.

    RAS numbers ranks within a communicator. The rank in the job follows from the process id, from the GPU, or from a
    communicator that spans the whole job.
    """
    if suspect.job_rank is not None:
        return suspect.job_rank
    if suspect.pid is not None:
        by_pid = {process.rank for process in evidence.processes if process.pid == suspect.pid} - {None}
        if len(by_pid) == 1:
            return by_pid.pop()
    by_gpu = [
        each.rank
        for each in evidence.live_ranks
        if suspect.gpu is not None and (each.node, each.gpu) == (suspect.host, suspect.gpu)
    ]
    if len(by_gpu) == 1:
        return by_gpu[0]
    world = len(known_ranks(evidence))
    size = next((each.size for each in ras.communicators if each.identity == suspect.communicator), 0)
    largest = max((each.size for each in ras.communicators), default=0)
    return suspect.rank if size == (world or largest) else None


def ras_suspect_hosts(ras: RasAnalysis, evidence: Evidence) -> dict[int, str]:
    """By rank of the job, the host that RAS reports for its suspects, where no other source names a node."""
    known = nodes_by_rank(evidence)
    return {
        rank: suspect.host
        for suspect in ras.suspects
        if suspect.host is not None
        and (rank := ras_suspect_job_rank(suspect, ras, evidence)) is not None
        and rank not in known
    }


# The RAS port answers for whichever job holds it, and people mix up files: a report may belong to another job. Hosts
# are counted and not compared by name, because RAS reports the address of NCCL's own network interface, which no other
# source may know.


def drop_foreign_ras_reports(evidence: Evidence) -> Evidence:
    """Removes RAS reports of other jobs, and says in `missing` which ones and why."""
    judged = [(polls, foreign_ras_reason(polls, evidence)) for polls in evidence.ras]
    foreign = {report.source for polls, why in judged if why is not None for report in polls.reports}
    notes = []
    for polls, why in judged:
        if why is not None:
            sources = ", ".join(dict.fromkeys(report.source for report in polls.reports if report.source))
            notes.append(
                f"{sources or polls.node}: this NCCL RAS report was ignored because it is from another job: {why}"
            )
    return replace(
        evidence,
        ras=tuple(polls for polls, why in judged if why is None),
        sources=tuple(source for source in evidence.sources if source not in foreign),
        missing=(*evidence.missing, *notes),
    )


def foreign_ras_reason(polls: RasPolls, evidence: Evidence) -> str | None:
    """Why these reports cannot be of this job; None: they may be."""
    world = job_world_size(evidence)
    communicators = [each for report in polls.reports for each in report.communicators]
    largest = max((each.size for each in communicators), default=0)
    if world is not None and largest > world:
        return (
            f"it has a communicator of {format_count(largest, 'rank')}, but this job has {format_count(world, 'rank')}"
        )
    nodes = set(nodes_by_rank_if_complete(evidence).values())
    hosts = {rank.host for each in communicators for rank in each.ranks if rank.host}
    if nodes and len(hosts) > len(nodes):
        runs_on = format_count(len(nodes), "node")
        return f"its ranks are on {format_count(len(hosts), 'host')}, but this job runs on {runs_on}"
    return None
