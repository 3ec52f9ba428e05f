"""Witnesses from inside the job: stacks of its Python code, and how its ranks ended. Pure."""

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

# Ranks that wait for others are in one of these; whoever is not, may be whom they wait for.
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
TIED_WEIGHT: Final = 0.35  # as many wait as do not: a line of own code may wait for its GPU, which no frame tells
ALIKE_WEIGHT: Final = 0.3
NO_STACKS_WEIGHT: Final = 0.2  # too little to name anybody alone
ENDING_WEIGHT: Final = 0.8
SILENT_WEIGHT: Final = 0.6
STOPPED_ON_REQUEST_EXIT_CODE: Final = 4  # of `wattwatch-train run`


def stacks_signal(evidence: Evidence) -> Signal | None:
    active = rank_activities(evidence.stacks)
    if not active:
        return None
    groups = group_by_activity(active)
    odd, weight = _outlier_groups(active, groups)
    doing = {each.rank: describe_activity(each) for each in active}
    if not odd:
        same = len(groups) == 1 and len(active) > 2
        words = "; ".join(_describe_group(group) for group in groups[:3])
        saw = frozenset(doing)
        silent = known_ranks(evidence) - saw
        if same and 0 < len(silent) < len(saw):
            doing |= dict.fromkeys(silent, "gave no stacks")
            words = f"{format_ranks(silent)} gave none, {words}"
            return Signal(STACKS, words, silent, NO_STACKS_WEIGHT, None, doing)
        return Signal(STACKS, words, weight=ALIKE_WEIGHT if same else 0.0, doing=doing, all_alike=same, saw=saw)
    named = frozenset(rank for group in odd for rank in group.ranks)
    rest = [group for group in groups if group not in odd]
    words = f"{'; '.join(_describe_group(group) for group in odd[:3])}, beside {_describe_group(rest[0])}"
    causes = {ACTIVITY_CAUSES.get(group.activity) for group in odd}
    return Signal(STACKS, words, named, weight, causes.pop() if len(causes) == 1 else None, doing)


def _outlier_groups(
    active: Sequence[RankActivity], groups: Sequence[ActivityGroup]
) -> tuple[tuple[ActivityGroup, ...], float]:
    busy = tuple(group for group in groups if group.activity not in WAITING_ACTIVITIES)
    number = sum(len(group.ranks) for group in busy)
    if busy and 2 * number <= len(active):
        return busy, STACKS_WEIGHT if 2 * number < len(active) else TIED_WEIGHT
    odd = outliers(groups)
    return odd, STACKS_WEIGHT if len(odd) == 1 else TIED_WEIGHT


def describe_activity(active: RankActivity) -> str:
    return active.words if active.frame is None else f"{active.words}: {format_frame(active.frame)}"


def _describe_group(group: ActivityGroup) -> str:
    where = "" if group.frame is None else f" at {format_frame(group.frame)}"
    who = format_ranks(group.ranks)
    words = group.words if len(group.ranks) == 1 else _pluralize(group.words)
    return f"{who} {words}{where}"


def _pluralize(words: str) -> str:
    first, _, rest = words.partition(" ")
    several = {"is": "are"}.get(first, first.removesuffix("s"))
    return f"{several} {rest.replace('its ', 'their ')}".strip()


def exit_reports_signal(evidence: Evidence) -> Signal | None:
    """Ranks that ended by themselves first; where none did, those that were killed, or hung, and left no word."""
    if not evidence.endings:
        return None
    ended = {ending.rank: ending for ending in evidence.endings}
    world = frozenset(evidence.node_of_rank) | frozenset(ended)
    failed = [
        each for each in ended.values() if each.code not in (0, STOPPED_ON_REQUEST_EXIT_CODE) and not each.follows
    ]
    if failed and 2 * len(failed) <= len(world):
        named = frozenset(each.rank for each in failed)
        kinds = {None if kind is None else kind.cause for kind in map(classify_message, (each.why for each in failed))}
        cause = (kinds.pop() if len(kinds) == 1 else None) or HangCause.RANK
        doing = {each.rank: f"ended with code {each.code}" for each in failed}
        return Signal(EXIT_REPORTS, _describe_exits(failed), named, ENDING_WEIGHT, cause, doing)
    silent = world - frozenset(ended)
    if silent and 2 * len(silent) < len(world):
        words = f"{format_ranks(silent)} left no word of an end, {len(ended)} others did: killed, or still hanging"
        return Signal(EXIT_REPORTS, words, silent, SILENT_WEIGHT, HangCause.RANK, dict.fromkeys(silent, "left no word"))
    return Signal(EXIT_REPORTS, _describe_exits(list(ended.values())))


def _describe_exits(endings: Sequence[RankExitReport]) -> str:
    first = min(endings, key=lambda each: each.rank)
    after = "" if first.step is None else f" after step {first.step:,}"
    more = f" ({len(endings) - 1} more)" if len(endings) > 1 else ""
    return f"rank {first.rank} ended with code {first.code}{after}: {first.why}{more}"


# The witness of what ranks printed last: whoever failed by itself, and not for another's end. Pure.

FAILED_WEIGHT: Final = 0.85
SEVERAL_WEIGHT: Final = 0.6
ABORTED_WEIGHT: Final = 0.4  # of two whose sizes differ, either may be wrong
EARLIER_SECONDS: Final = 2.0  # between last words: what clocks of file servers and a long traceback may differ


def logs_signal(evidence: Evidence) -> Signal | None:
    failed = {log.rank: log.failure for log in evidence.logs if log.failure is not None}
    if not failed:
        return None
    own = {rank: failure for rank, failure in failed.items() if not failure.follows}
    if not own:
        return Signal(LOGS, f"{format_ranks(failed)} lost a peer, or gave up on one; none says why")
    if sizes := {rank: failure for rank, failure in own.items() if failure.kind == SIZE_MISMATCH}:
        return _size_mismatch_signal(sizes, evidence.records)
    own = _earliest(own, {log.rank: log.age_seconds for log in evidence.logs})
    doing = {rank: describe_log_error(failure) for rank, failure in own.items()}
    causes = {failure.cause for failure in own.values()}
    told = causes.pop() if len(causes) == 1 else None
    cause = None if told is None else HangCause(told)
    first, *rest = sorted(own)
    words = f"rank {first} {doing[first]}" + (f"; {format_ranks(rest)} failed too" if rest else "")
    if len(own) > 1 and 2 * len(own) > len(known_ranks(evidence) | set(own)):
        return Signal(LOGS, words, cause=cause)  # most ranks alike: none of them is odd
    return Signal(LOGS, words, frozenset(own), SEVERAL_WEIGHT if rest else FAILED_WEIGHT, cause, doing)


def describe_log_error(failure: LogError) -> str:
    """`raised ValueError: shard 7 holds no tokens, at read_shard (train.py:59)`: after "rank 2"."""
    kind = log_error_kind(failure.kind)
    what = f"raised {failure.words}" if kind is None else f"{kind.words}: {failure.words}"
    return what if failure.frame is None else f"{what}, at {format_frame(failure.frame)}"


def _earliest(own: Mapping[int, LogError], ages: Mapping[int, float | None]) -> dict[int, LogError]:
    """Those that fell silent before the others, where that is known of all."""
    known = {rank: age for rank in own if (age := ages.get(rank)) is not None}
    if len(known) < len(own):
        return dict(own)
    oldest = max(known.values())
    return {rank: failure for rank, failure in own.items() if known[rank] >= oldest - EARLIER_SECONDS}


def _size_mismatch_signal(aborted: Mapping[int, LogError], records: Sequence[RankRecord]) -> Signal:
    """gloo ends the rank that receives more than it expects. Whether that one is wrong or the sender, is told by what
    the others launched last: where that is the same on all, it is; where one of them differs, that one is."""
    first = min(aborted)
    said = f"rank {first} {describe_log_error(aborted[first])}"
    last = {r.rank: what for r in records if r.rank not in aborted and (what := _last_launch(r)) is not None}
    counts = Counter(last.values()).most_common()
    odd = [rank for rank, what in last.items() if len(counts) == 2 and what == counts[1][0]]
    doing = {rank: describe_log_error(failure) for rank, failure in aborted.items()}
    named, weight, more = frozenset(aborted), ABORTED_WEIGHT, "it or whoever sent to it is wrong"
    if len(counts) == 1 and len(last) > 1 and len(aborted) == 1:
        weight, more = FAILED_WEIGHT, f"{format_ranks(last)} all launched {counts[0][0]}"
    elif len(odd) == 1 and len(last) > 2:
        more = f"rank {odd[0]} launched {counts[1][0]}, the others {counts[0][0]}"
        named, weight, doing = frozenset(odd), FAILED_WEIGHT, {odd[0]: f"launched {counts[1][0]}"}
    return Signal(LOGS, f"{said}; {more}", named, weight, HangCause.PROGRAM, doing, verdict=DiagnosisVerdict.MISMATCH)


def _last_launch(record: RankRecord) -> str | None:
    launches = [part.launches[-1] for part in record.groups if part.launches]
    last = max(launches, key=lambda launch: launch.record_id, default=None)
    return None if last is None else describe_operation(last.operation, sizes=True)


# What NCCL's RAS says, in ranks of the job. Pure.

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
    RasFinding.CROSSED: "launched other collectives than the rest",
    RasFinding.BEHIND: "launched fewer collectives than the rest",
    RasFinding.DEAD: "was given up by NCCL: its process is gone or its node is",
    RasFinding.UNRESPONSIVE: "does not answer NCCL RAS",
    RasFinding.LEAVING: "left the communicator, others did not",
    RasFinding.FAILED: "holds an error of NCCL",
}


def ras_signal(reading: RasAnalysis, evidence: Evidence) -> Signal:
    ranks = {
        rank for suspect in reading.suspects if (rank := ras_suspect_job_rank(suspect, reading, evidence)) is not None
    }
    finding = reading.finding
    doing = dict.fromkeys(ranks, RAS_RANK_TEXT.get(finding, ""))
    all_alike = finding is RasFinding.MATCHED
    cause, saw = RAS_CAUSES.get(finding), known_ranks(evidence) if all_alike else frozenset[int]()
    if finding is RasFinding.PROGRESSING:
        return Signal(NCCL_RAS, reading.why, weight=reading.confidence, shows_progress=True)
    return Signal(NCCL_RAS, reading.why, frozenset(ranks), reading.confidence, cause, doing, all_alike, saw=saw)


def ras_suspect_job_rank(suspect: RasSuspect, reading: RasAnalysis, evidence: Evidence) -> int | None:
    """RAS counts ranks within a communicator: the process, the board, or a communicator as large as the job tell."""
    if suspect.job_rank is not None:
        return suspect.job_rank
    if suspect.pid is not None:
        found = {process.rank for process in evidence.processes if process.pid == suspect.pid} - {None}
        if len(found) == 1:
            return found.pop()
    seen = evidence.live_ranks
    board = [
        each.rank for each in seen if suspect.gpu is not None and (each.node, each.gpu) == (suspect.host, suspect.gpu)
    ]
    if len(board) == 1:
        return board[0]
    world = len(known_ranks(evidence))
    size = next((each.size for each in reading.communicators if each.identity == suspect.communicator), 0)
    largest = max((each.size for each in reading.communicators), default=0)
    return suspect.rank if size == (world or largest) else None


def ras_suspect_hosts(reading: RasAnalysis, evidence: Evidence) -> dict[int, str]:
    """Where RAS says that its suspects are, of those that nothing else places."""
    placed = nodes_by_rank(evidence)
    return {
        rank: suspect.host
        for suspect in reading.suspects
        if suspect.host is not None
        and (rank := ras_suspect_job_rank(suspect, reading, evidence)) is not None
        and rank not in placed
    }


# Whether NCCL RAS speaks of this job: its port answers for whichever job holds it, and files get mixed up. Pure.
#
# Hosts are counted, not compared: RAS gives the address of NCCL's own interface, which may be none that others use.


def drop_foreign_ras_reports(evidence: Evidence) -> Evidence:
    """Without reports of another job; `missing` says which and why."""
    judged = [(polls, foreign_ras_reason(polls, evidence)) for polls in evidence.ras]
    foreign = {report.source for polls, why in judged if why is not None for report in polls.reports}
    told = []
    for polls, why in judged:
        if why is not None:
            sources = ", ".join(dict.fromkeys(report.source for report in polls.reports if report.source))
            told.append(f"{sources or polls.node}: NCCL RAS of another job, not used: {why}")
    return replace(
        evidence,
        ras=tuple(polls for polls, why in judged if why is None),
        sources=tuple(source for source in evidence.sources if source not in foreign),
        missing=(*evidence.missing, *told),
    )


def foreign_ras_reason(polls: RasPolls, evidence: Evidence) -> str | None:
    """Why it cannot be this job; None where nothing speaks against it."""
    world = job_world_size(evidence)
    communicators = [each for report in polls.reports for each in report.communicators]
    largest = max((each.size for each in communicators), default=0)
    if world is not None and largest > world:
        return f"it has a communicator of {format_count(largest, 'rank')}, where this job has {world:,}"
    nodes = nodes_by_rank_if_complete(evidence)
    hosts = {rank.host for each in communicators for rank in each.ranks if rank.host}
    if nodes and len(hosts) > len(set(nodes.values())):
        return f"its ranks are on {format_count(len(hosts), 'host')}, those of this job on {len(set(nodes.values())):,}"
    return None
