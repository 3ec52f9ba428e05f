"""What a set of flight records says: which rank blocks the job, in which collective, and with what confidence.

Questions are asked in this order:

1. Did members of a group launch different operations, or different sizes, at one slot? Conclusive; the minority is
named,
   and a tie is reported as a tie (`mismatch.py`).
2. Did ranks never arrive? Found by following who waits for whom (`wait_graph.py`).
3. Were groups entered in different orders? (`mismatch.py`)
4. Are all ranks in the same operation? Then it is not the program.

A rank without a record is never named for that reason alone: a healthy rank whose file was lost looks the same.

The result depends neither on the order of the records nor on that of the ranks. Tested with real records with known
culprits, also with any one file lost, cut off or empty, and with simulated jobs of many shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.watcher.common.formatting import agree_with_count, format_count, format_ranks
from wattwatch.watcher.diagnosis.collectives.conclusion import (
    CollectiveHang,
    describe_wait,
    sort_by_waiters,
    with_most_waiters,
)
from wattwatch.watcher.diagnosis.collectives.mismatch import (
    conclude_cycle,
    conclude_disagreement,
    find_disagreements,
    sizes_differ,
)
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.collectives.rank_state import GroupState, build_recorded_job
from wattwatch.watcher.diagnosis.collectives.wait_graph import (
    FEW_OPERATIONS,
    BlockingReason,
    WaitOutcome,
    build_wait_graph,
    find_ranks_that_stopped_launching,
    follow_waits,
)
from wattwatch.watcher.diagnosis.flight_recorder.model import (
    ProcessGroup,
    RankRecord,
    UnreadableRecord,
    position_text,
)
from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict

# Confidences are chosen, not measured: there are too few public records with a known culprit.
CONFIDENCE_SILENT: Final = 0.9
CONFIDENCE_UNFINISHED: Final = 0.85
CONFIDENCE_STOPPED_LAUNCHING: Final = 0.7
# The rank may be in a send that is not recorded, its record may be a little older, or most ranks are silent.
CONFIDENCE_DOUBTFUL: Final = 0.55
CONFIDENCE_ALL_JOINED: Final = 0.75
CONFIDENCE_UNEVEN_SIZES: Final = 0.5
CONFIDENCE_NO_WAIT: Final = 0.5

MAX_RANKS_DESCRIBED: Final = 4  # each takes a sentence
MAX_OPERATIONS_DESCRIBED: Final = 3


def analyze_collectives(
    records: Sequence[RankRecord], unreadable: Sequence[UnreadableRecord] = ()
) -> CollectiveAnalysis:
    """Which ranks block the job, in which collective, and why, as far as flight records show it.

    `records`: one per rank, in any order. `unreadable`: only mentioned in the explanation. Always gives an answer; the
    verdict is UNKNOWN if the records do not suffice.
    """
    job = build_recorded_job(records)
    hang = CollectiveHang(job, build_wait_graph(job))
    if not job.ranks:
        return hang.unknown("no flight record could be read" + describe_unreadable(unreadable))
    if not hang.graph.stalled and not hang.graph.unfinished:
        return conclude_no_wait(hang, unreadable)
    if disagreements := find_disagreements(job):
        return conclude_disagreement(disagreements, hang)
    return _analyze_waits(hang)


def _analyze_waits(hang: CollectiveHang) -> CollectiveAnalysis:
    """No member disagrees with another of the same group: what do the waits lead to?"""
    job, outcome = hang.job, follow_waits(hang.graph, hang.job)
    # A record that lost its oldest pending launch makes a later one look like the first. What follows from that may be
    # wrong in any direction, so it is only trusted if a rank is found to block the others all the same.
    overflowed = [rank for rank in job.ranks if job.ranks[rank].ring_overflowed]
    if overflowed and not outcome.blocking and (outcome.cycles or not outcome.unexplained):
        return conclude_ring_overflow(overflowed, hang)
    if outcome.cycles and not outcome.blocking:
        return conclude_cycle(outcome.cycles[0], hang)
    if outcome.blocking:
        # One such rank among ranks with records is what all others wait for, recorded or not. With two, or with a
        # missing record, either may be waiting for the other.
        doubtful = [rank for rank, reason in outcome.blocking.items() if may_be_in_unrecorded_send(rank, reason, hang)]
        if len(doubtful) > 1 or (doubtful and job.ranks_without_record):
            return conclude_silent_or_sending(doubtful, hang)
        return conclude_blocking_ranks(outcome, hang)
    if outcome.unexplained:
        return conclude_missing_records(outcome, hang)
    stopped = find_ranks_that_stopped_launching(job)
    # If most ranks seem to have stopped, it is the others that went ahead.
    if stopped and 2 * len(stopped) < len(job.ranks):
        return conclude_stopped_launching(stopped, hang)
    return conclude_all_joined(outcome, hang) if outcome.all_joined else conclude_undecided(hang)


# Some ranks are missing


def conclude_blocking_ranks(outcome: WaitOutcome, hang: CollectiveHang) -> CollectiveAnalysis:
    """The waits lead to ranks that are silent, or that did not finish what their peers finished."""
    culprits = tuple(sorted(outcome.blocking))
    sentences, positions = [], []
    described_wait = ""
    for rank in culprits:
        sentence, group, slot = _describe_blocking_rank(rank, outcome.blocking[rank], hang)
        wait, _, about_rank = sentence.partition("; ")
        # Several ranks may be awaited in one operation: its waiting ranks are listed once.
        sentences.append(about_rank if about_rank and wait == described_wait else sentence)
        described_wait = wait
        positions.append((group, slot))
    why = _join_limited(sentences)
    without_record = sorted({rank for each in outcome.unexplained for rank in each.awaited} - set(culprits))
    if without_record:
        why += f"; {format_ranks(without_record)} left no flight record and may also block other ranks"
    return hang.conclude(
        DiagnosisVerdict.NEVER_ARRIVED,
        False,
        culprits,
        min(_blocking_confidence(rank, reason, hang) for rank, reason in outcome.blocking.items()),
        why,
        positions,
    )


def _join_limited(sentences: Sequence[str]) -> str:
    """One sentence per rank: the first ones, and how many more ranks there are."""
    rest = len(sentences) - MAX_RANKS_DESCRIBED
    more = f"; and {format_count(rest, 'more rank')}" if rest > 0 else ""
    return "; ".join(sentences[:MAX_RANKS_DESCRIBED]) + more


def _describe_blocking_rank(rank: int, reason: BlockingReason, hang: CollectiveHang) -> tuple[str, ProcessGroup, int]:
    """The sentence for one rank, and the group and slot at which the others wait for it."""
    if reason is BlockingReason.UNFINISHED:
        group, launch, finished_by = hang.graph.unfinished[rank]
        what = f"{describe_operation(launch.operation)} at {position_text(group, launch.slot)}"
        late = ""
        if rank in hang.graph.possibly_late:
            late = (
                f" (rank {rank} is behind by at most {FEW_OPERATIONS} operations: its record may simply be older than "
                "the others)"
            )
        return (
            f"rank {rank} did not finish {what}, but {format_ranks(finished_by)} did{late}",
            group,
            launch.slot,
        )
    awaiting = [each for each in hang.graph.stalled if rank in each.awaited]
    stall = with_most_waiters(awaiting)  # where most ranks wait, it is most evident that this one is missing
    sentence = f"{describe_wait(stall)}; rank {rank} has not launched it and has no pending operation"
    return sentence, stall.group, stall.slot


def _blocking_confidence(rank: int, reason: BlockingReason, hang: CollectiveHang) -> float:
    if rank in hang.graph.possibly_late or may_be_in_unrecorded_send(rank, reason, hang):
        return CONFIDENCE_DOUBTFUL
    if reason is BlockingReason.UNFINISHED:
        return CONFIDENCE_UNFINISHED
    awaiting = [each for each in hang.graph.stalled if rank in each.awaited]
    # In Gloo, a member that is gone ends the operations of the others, and a silent rank may have given up for that.
    member_gone = any(
        each.operation.backend == "gloo" and hang.job.members_without_record(each.group) for each in awaiting
    )
    minority_waits = all(len(each.waiters) < len(each.awaited) for each in awaiting)
    return CONFIDENCE_DOUBTFUL if member_gone or minority_waits else CONFIDENCE_SILENT


def may_be_in_unrecorded_send(rank: int, reason: BlockingReason, hang: CollectiveHang) -> bool:
    """Whether a rank that seems to wait in nothing may wait in a send or receive that Gloo did not record."""
    return reason is BlockingReason.SILENT and rank in hang.job.unrecorded_point_to_point


def conclude_silent_or_sending(ranks: Sequence[int], hang: CollectiveHang) -> CollectiveAnalysis:
    """Of several ranks that seem to wait in nothing, some may wait for the others in sends that Gloo did not record."""
    stall = with_most_waiters(hang.graph.stalled)
    verb = agree_with_count("is", len(ranks))
    return hang.unknown(
        f"{describe_wait(stall)}; {format_ranks(ranks)} {verb} not waiting in any recorded operation, but Gloo does "
        "not record sends and receives, so the records do not show which rank blocks the others"
    )


def conclude_stopped_launching(
    stopped: Mapping[int, tuple[GroupState, int]], hang: CollectiveHang
) -> CollectiveAnalysis:
    """All ranks joined the operation, but some launched nothing after it."""
    sentences, positions = [], []
    for rank, (state, count) in sorted(stopped.items()):
        last = state.records[rank].last_enqueued or 0
        sentences.append(
            f"rank {rank} launched nothing after {position_text(state.group, last)}, while its peers launched {count} "
            "more operations"
        )
        positions.append((state.group, last + 1))
    why = f"{describe_wait(with_most_waiters(hang.graph.stalled))}; {_join_limited(sentences)}"
    culprits = tuple(sorted(stopped))
    return hang.conclude(DiagnosisVerdict.NEVER_ARRIVED, False, culprits, CONFIDENCE_STOPPED_LAUNCHING, why, positions)


def conclude_missing_records(outcome: WaitOutcome, hang: CollectiveHang) -> CollectiveAnalysis:
    """Only ranks without a record can be what the others wait for. None is named; see the module's docstring."""
    stall = with_most_waiters(outcome.unexplained)
    who = "it" if len(stall.awaited) == 1 else "any of them"
    why = f"{describe_wait(stall)}; {format_ranks(stall.awaited)} left no flight record, so {who} may block the others"
    analysis = hang.conclude(DiagnosisVerdict.UNKNOWN, False, (), 0.0, why, [(stall.group, stall.slot)])
    return replace(analysis, absent=outcome.awaited_without_record)


# No rank stands out


def conclude_all_joined(outcome: WaitOutcome, hang: CollectiveHang) -> CollectiveAnalysis:
    """All members of a group are in the same operation."""
    job, stall = hang.job, with_most_waiters(outcome.all_joined)
    # Members that are past an operation that others are in: with a synchronizing one that is impossible, so these gave
    # up (Gloo times out), or the operation lets some finish early. Neither shows who is at fault.
    others = set(job.groups[stall.group].records) - set(stall.waiters)
    if others and not stall.operation.point_to_point:
        return hang.unknown(f"{describe_wait(stall)}; {format_ranks(others)} finished this operation or gave up on it")
    if stall.group in job.guessed_groups and len(stall.waiters) == 1:
        return hang.unknown(f"{describe_wait(stall)}, and no record shows which other ranks are in this group")
    uneven = sizes_differ(job.groups[stall.group], stall.slot)
    what = f"{describe_operation(stall.operation, sizes=not uneven)} at {position_text(stall.group, stall.slot)}"
    more_groups = len(outcome.all_joined) - 1
    more = f" ({format_count(more_groups, 'more group')} like this)" if more_groups else ""
    ranks = "both ranks" if len(stall.waiters) == 2 else f"all {len(stall.waiters)} ranks"
    why = f"{ranks} of the group wait in the same {what}{more}"
    if uneven:
        why += (
            "; the ranks use different sizes, which is correct only if each pair of ranks agrees on its sizes; the "
            "cause is the network, a GPU or its driver, or a mismatch of these sizes"
        )
    else:
        why += f"; {ranks} agree, so the cause is the network, a GPU or its driver, not the program"
    return hang.conclude(
        DiagnosisVerdict.NO_DESYNC,
        False,
        (),
        CONFIDENCE_UNEVEN_SIZES if uneven else CONFIDENCE_ALL_JOINED,
        why,
        [(each.group, each.slot) for each in outcome.all_joined],
    )


def conclude_no_wait(hang: CollectiveHang, unreadable: Sequence[UnreadableRecord]) -> CollectiveAnalysis:
    """No rank waits in a collective."""
    job = hang.job
    launches = sum(len(part.launches) for group in job.groups.values() for part in group.records.values())
    if not launches:
        why = (
            "the records contain no launches: either the flight recorder is off (TORCH_FR_BUFFER_SIZE=2000 turns it "
            "on), or the job used only sends and receives of Gloo, which are not recorded"
        )
        return hang.unknown(why + describe_unreadable(unreadable))
    number = len(job.ranks)
    if missing := job.ranks_without_record:
        why = "the only rank with a flight record is not waiting in a collective"
        if number > 1:
            why = f"none of the {number} ranks with a flight record is waiting in a collective"
        why += f"; {format_ranks(missing)} left no flight record"
        return hang.unknown(why + describe_unreadable(unreadable))
    why = "the only rank is not waiting in a collective: every recorded launch is finished"
    if number > 1:
        why = f"none of the {number} ranks is waiting in a collective: every recorded launch is finished"
    return hang.conclude(DiagnosisVerdict.NO_DESYNC, False, (), CONFIDENCE_NO_WAIT, why, [])


def conclude_undecided(hang: CollectiveHang) -> CollectiveAnalysis:
    """The waits lead nowhere."""
    stalls = sort_by_waiters(hang.graph.stalled)
    described = [describe_wait(each) for each in stalls[:MAX_OPERATIONS_DESCRIBED]]
    if len(stalls) > MAX_OPERATIONS_DESCRIBED:
        described.append(f"and {format_count(len(stalls) - MAX_OPERATIONS_DESCRIBED, 'more operation')} like these")
    if hang.job.ranks_without_record:
        described.append(f"{format_ranks(hang.job.ranks_without_record)} left no flight record")
    return hang.unknown(
        f"the ranks wait for each other, and the records do not show where the hang began: {'; '.join(described)}"
    )


def conclude_ring_overflow(ranks: Sequence[int], hang: CollectiveHang) -> CollectiveAnalysis:
    """The ring buffer of these ranks was too small to still contain the operation that they wait in."""
    wait = describe_wait(with_most_waiters(hang.graph.stalled))
    return hang.unknown(
        f"{wait}; {format_ranks(ranks)} launched more operations than a flight record holds, so the oldest unfinished "
        "operation is no longer recorded; set TORCH_FR_BUFFER_SIZE to a higher value"
    )


def describe_unreadable(unreadable: Sequence[UnreadableRecord]) -> str:
    """`; 2 records could not be used, for example _dump_3: the file is empty`; "" if there are none."""
    if not unreadable:
        return ""
    first = f"{unreadable[0].source}: {unreadable[0].why}"
    if len(unreadable) == 1:
        return f"; 1 record could not be used: {first}"
    return f"; {len(unreadable):,} records could not be used, for example {first}"
