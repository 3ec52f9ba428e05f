"""What is concluded from reports of several nodes, and of jobs with several communicators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watcher.diagnosis.nccl_ras.sample_reports import Communicator, analyze_reports, report, sample
from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.model import RasAnalysis, RasFinding, RasPolls
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls

JOB = range(16)
LATE = {"AllGather": 99}
CROSSED = {"ReduceScatter": 49, "AllReduce": 8}


def suspects(analysis: RasAnalysis) -> list[int | None]:
    return [suspect.job_rank for suspect in analysis.suspects]


def without_progress(*communicators: Communicator) -> RasAnalysis:
    return analyze_reports(report(*communicators), report(*communicators))


def test_a_rank_with_fewer_launches_is_late() -> None:
    analysis = without_progress(Communicator(JOB, counts={5: LATE}))
    assert (analysis.finding, suspects(analysis), analysis.confidence) == (RasFinding.BEHIND, [5], 0.6)
    assert (
        "rank 5 (process 4005 on 10.0.0.1, GPU 5) launched 1 fewer AllGather than the 15 ranks furthest ahead"
        in analysis.why
    )


def test_with_one_report_a_late_rank_looks_like_skew() -> None:
    analysis = analyze_reports(report(Communicator(JOB, counts={5: LATE})))
    assert (analysis.finding, suspects(analysis), analysis.confidence) == (RasFinding.CANNOT_TELL, [], 0.0)
    assert "to distinguish a hang from the normal skew" in analysis.why


def test_two_reports_within_a_second_count_as_one() -> None:
    data = report(Communicator(JOB, counts={5: LATE}))
    assert analyze_reports(data, data, interval_seconds=0.5).finding is RasFinding.CANNOT_TELL


def test_reports_with_an_unknown_interval_count_as_two() -> None:
    data = report(Communicator(JOB, counts={5: LATE}))
    assert analyze_reports(data, data, interval_seconds=None).finding is RasFinding.BEHIND


def test_half_against_half_is_a_tie() -> None:
    analysis = without_progress(Communicator(JOB, counts=dict.fromkeys(range(8), LATE)))
    assert (analysis.finding, analysis.suspects) == (RasFinding.BEHIND, ())
    assert [[suspect.rank for suspect in side] for side in analysis.tied] == [list(range(8, 16)), list(range(8))]


def test_crossed_half_against_half_is_a_tie() -> None:
    analysis = without_progress(Communicator(JOB, counts=dict.fromkeys(range(8), CROSSED)))
    assert (analysis.finding, analysis.suspects, analysis.confidence) == (RasFinding.CROSSED, (), 0.4)
    assert sorted([suspect.rank for suspect in side] for side in analysis.tied) == [list(range(8)), list(range(8, 16))]
    assert "no side has a majority" in analysis.why


def test_two_ranks_with_other_collectives_are_named_and_a_late_one_is_not() -> None:
    analysis = without_progress(Communicator(JOB, counts={2: CROSSED, 3: CROSSED, 9: LATE}))
    assert (analysis.finding, suspects(analysis)) == (RasFinding.CROSSED, [2, 3])


def test_moving_counters_are_progress_whatever_the_skew() -> None:
    before = Communicator(JOB, counts={5: LATE, 3: CROSSED})
    after = replace(before, usual={"AllGather": 140, "ReduceScatter": 70, "AllReduce": 9})
    analysis = analyze_reports(report(before), report(after))
    assert (analysis.finding, analysis.suspects) == (RasFinding.PROGRESSING, ())


def test_a_rank_that_does_not_answer_while_the_others_progress_is_not_a_hang() -> None:
    before = Communicator(JOB, missing={13: {"unresponsive": True, "considered_dead": False}})
    after = replace(before, usual={"AllGather": 140})
    analysis = analyze_reports(report(before), report(after))
    assert (analysis.finding, analysis.suspects) == (RasFinding.PROGRESSING, ())
    assert "rank 13 (process 4013 on 10.0.0.2, GPU 5) did not answer RAS" in analysis.why


def test_a_dead_rank_takes_precedence_over_unresponsive_and_late_ranks() -> None:
    missing = {13: {"unresponsive": True, "considered_dead": True}, 14: {"unresponsive": True}}
    analysis = without_progress(Communicator(JOB, counts={2: LATE}, missing=missing))
    assert (analysis.finding, suspects(analysis)) == (RasFinding.DEAD, [13])


def test_a_rank_with_a_remote_error_is_not_a_suspect() -> None:
    remote = {rank: {"async_error": 6} for rank in JOB if rank != 13}
    silent = without_progress(Communicator(JOB, status=remote, missing={13: {"unresponsive": True}}))
    assert (silent.finding, suspects(silent)) == (RasFinding.UNRESPONSIVE, [13])
    unseen = without_progress(Communicator(JOB, status=remote))
    assert (unseen.finding, unseen.suspects) == (RasFinding.FAILED, ())
    assert "RAS does not show which rank failed" in unseen.why


def test_an_operation_in_progress_is_not_an_error() -> None:
    analysis = without_progress(Communicator(JOB, status={3: {"async_error": 7}}))
    assert analysis.finding is RasFinding.MATCHED


def test_a_failed_initialization_names_its_rank() -> None:
    analysis = analyze_reports(report(Communicator(JOB, status={4: {"init_state": 2}})))
    assert (analysis.finding, suspects(analysis)) == (RasFinding.FAILED, [4])
    assert "system error (network, memory or file) (ncclResult 2)" in analysis.why


def test_ranks_that_still_initialize_are_named_if_others_have_finished() -> None:
    analysis = without_progress(Communicator(JOB, status={4: {"init_state": 7}}))
    assert (analysis.finding, suspects(analysis)) == (RasFinding.INITIALIZING, [4])


def test_a_rank_that_left_alone_is_named() -> None:
    gone = {6: {"unresponsive": False, "considered_dead": False}}
    analysis = without_progress(Communicator(JOB, missing=gone))
    assert (analysis.finding, suspects(analysis)) == (RasFinding.LEAVING, [6])
    assert "15 still use it, 1 has left it" in analysis.why


def test_a_communicator_without_launches_shows_nothing() -> None:
    analysis = without_progress(Communicator(JOB, usual={"AllReduce": 0, "Broadcast": 0}))
    assert analysis.finding is RasFinding.CANNOT_TELL
    assert "RAS does not count send, recv, all-to-all or operations captured in CUDA graphs" in analysis.why


def test_operations_of_later_versions_are_counted() -> None:
    analysis = without_progress(Communicator(JOB, usual={"AllToAll": 9}, counts={7: {"AllToAll": 8}}))
    assert (analysis.finding, suspects(analysis)) == (RasFinding.BEHIND, [7])


def test_ranks_of_a_small_communicator_are_mapped_to_ranks_of_the_job() -> None:
    analysis = without_progress(Communicator(JOB, usual={"Broadcast": 1}), Communicator([1, 5, 9], counts={9: LATE}))
    (suspect,) = analysis.suspects
    assert (suspect.rank, suspect.job_rank, suspect.pid) == (2, 9, 4009)


def test_without_a_communicator_of_the_whole_job_ranks_of_the_job_are_unknown() -> None:
    analysis = without_progress(Communicator([0, 4, 8], counts={8: LATE}), Communicator([1, 5, 9]))
    (suspect,) = analysis.suspects
    assert (suspect.rank, suspect.job_rank, suspect.pid) == (2, None, 4008)


def test_contradicting_communicators_of_the_whole_job_leave_ranks_of_the_job_unknown() -> None:
    analysis = without_progress(Communicator(JOB, counts={3: LATE}), Communicator(list(reversed(JOB))))
    assert [suspect.job_rank for suspect in analysis.suspects] == [None]


def test_a_rank_that_is_late_because_it_waits_in_another_communicator_is_excused() -> None:
    # Rank 1 never launches in (0, 1); so 0 waits there, is late in (0, 2, 4), and those wait for 0.
    whole = Communicator(range(6), usual={"Broadcast": 1})
    pair = Communicator([0, 1, 5], counts={1: LATE})
    across = Communicator([0, 2, 4], counts={0: LATE})
    analysis = without_progress(whole, pair, across)
    assert (analysis.finding, suspects(analysis)) == (RasFinding.BEHIND, [1])
    assert "rank 1 (process 4001" in analysis.why


def test_ranks_that_are_each_late_where_the_other_waits_are_a_tie() -> None:
    whole = Communicator(range(4), usual={"Broadcast": 1})
    analysis = without_progress(
        whole, Communicator([0, 1, 2], counts={0: LATE}), Communicator([0, 1, 3], counts={1: LATE})
    )
    assert (analysis.finding, analysis.suspects) == (RasFinding.BEHIND, ())
    assert [{suspect.job_rank for suspect in side} for side in analysis.tied] == [{0, 1}]
    assert "these ranks block each other" in analysis.why


def test_a_job_progresses_if_one_communicator_does_and_a_suspicious_one_is_still_mentioned() -> None:
    stuck = Communicator(range(8), counts={3: CROSSED})
    moving = Communicator(JOB)
    analysis = analyze_reports(report(stuck, moving), report(stuck, replace(moving, usual={"AllGather": 300})))
    assert analysis.finding is RasFinding.PROGRESSING
    assert "however, communicator 0xa0 (8 ranks): no progress over 10 s: rank 3" in analysis.why


def test_a_rank_that_one_node_reaches_is_not_missing() -> None:
    cut_off = report(Communicator(JOB, missing={13: {"unresponsive": True}}))
    whole = report(Communicator(JOB))
    polls = [
        parse_polls("node-01", [("a1", cut_off), ("a2", cut_off)], 10.0),
        parse_polls("node-02", [("b1", whole), ("b2", whole)], 12.0),
    ]
    analysis = analyze_ras(polls)
    assert analysis.finding is RasFinding.MATCHED
    assert "no progress over 12 s" in analysis.why
    assert analyze_ras(polls[::-1]) == analysis


def test_progress_seen_from_one_node_is_progress() -> None:
    early = report(Communicator(JOB))
    late = report(Communicator(JOB, usual={"AllGather": 101}))
    polls = [
        parse_polls("a", [("a1", early), ("a2", early)], 10.0),
        parse_polls("b", [("b1", early), ("b2", late)], 10.0),
    ]
    assert analyze_ras(polls).finding is RasFinding.PROGRESSING


def test_a_node_without_ras_is_mentioned_in_the_notes() -> None:
    data = sample("matched_but_frozen_poll1.json")
    polls = [parse_polls("a", [("a1", data), ("a2", data)], 10.0), RasPolls("b", (), problem="nothing listens there")]
    analysis = analyze_ras(polls)
    assert (analysis.finding, analysis.notes) == (RasFinding.MATCHED, ("b: nothing listens there",))


@pytest.mark.parametrize("polls", [[], [RasPolls("a", (), problem="nothing listens on 127.0.0.1:28028")]])
def test_no_report_gives_an_analysis_too(polls: list[RasPolls]) -> None:
    analysis = analyze_ras(polls)
    assert (analysis.finding, analysis.confidence) == (RasFinding.NO_REPORT, 0.0)
    assert ("nothing listens" in analysis.why) == bool(polls)


def test_a_communicator_destroyed_between_the_reports_is_progress() -> None:
    both = report(Communicator(range(8)), Communicator(JOB))
    # The second is the one that stays, under its own identity.
    assert analyze_reports(both, report(Communicator(range(8)))).finding is RasFinding.PROGRESSING


def test_reports_of_two_jobs_that_share_a_port_are_not_compared() -> None:
    theirs = report(Communicator(range(4)), Communicator(range(8), counts={2: CROSSED})).replace(b"0xa0", b"0xb0")
    analysis = analyze_reports(report(Communicator(JOB)), theirs.replace(b"0xa1", b"0xb1"))
    assert (analysis.finding, analysis.confidence) == (RasFinding.CROSSED, 0.5)
    assert "two jobs share the port), so they were not compared" in analysis.notes[0]
