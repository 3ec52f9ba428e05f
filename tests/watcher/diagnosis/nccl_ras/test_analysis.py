"""What is read from reports of several nodes, and of jobs with several communicators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watcher.diagnosis.nccl_ras.sample_reports import Communicator, read_reports, report, sample
from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.model import RasAnalysis, RasFinding, RasPolls
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls

JOB = range(16)
LATE = {"AllGather": 99}
CROSSED = {"ReduceScatter": 49, "AllReduce": 8}


def suspects(reading: RasAnalysis) -> list[int | None]:
    return [suspect.job_rank for suspect in reading.suspects]


def frozen(*communicators: Communicator) -> RasAnalysis:
    return read_reports(report(*communicators), report(*communicators))


def test_a_rank_with_fewer_launches_is_late() -> None:
    reading = frozen(Communicator(JOB, counts={5: LATE}))
    assert (reading.finding, suspects(reading), reading.confidence) == (RasFinding.BEHIND, [5], 0.6)
    assert (
        "rank 5 (process 4005 on 10.0.0.1, GPU 5) launched 1 AllGather fewer than the 15 furthest ahead" in reading.why
    )


def test_one_report_cannot_tell_a_late_rank_from_skew() -> None:
    reading = read_reports(report(Communicator(JOB, counts={5: LATE})))
    assert (reading.finding, suspects(reading), reading.confidence) == (RasFinding.CANNOT_TELL, [], 0.0)
    assert "standing still looks like the ordinary skew" in reading.why


def test_two_reports_within_a_second_are_as_good_as_one() -> None:
    data = report(Communicator(JOB, counts={5: LATE}))
    assert read_reports(data, data, apart_seconds=0.5).finding is RasFinding.CANNOT_TELL


def test_reports_an_unknown_time_apart_still_count_as_two() -> None:
    data = report(Communicator(JOB, counts={5: LATE}))
    assert read_reports(data, data, apart_seconds=None).finding is RasFinding.BEHIND


def test_half_against_half_is_a_tie() -> None:
    reading = frozen(Communicator(JOB, counts=dict.fromkeys(range(8), LATE)))
    assert (reading.finding, reading.suspects) == (RasFinding.BEHIND, ())
    assert [[suspect.rank for suspect in side] for side in reading.tied] == [list(range(8, 16)), list(range(8))]


def test_crossed_half_against_half_is_a_tie() -> None:
    reading = frozen(Communicator(JOB, counts=dict.fromkeys(range(8), CROSSED)))
    assert (reading.finding, reading.suspects, reading.confidence) == (RasFinding.CROSSED, (), 0.4)
    assert sorted([suspect.rank for suspect in side] for side in reading.tied) == [list(range(8)), list(range(8, 16))]
    assert "no side has a majority" in reading.why


def test_two_ranks_that_went_another_way_are_both_named_and_a_late_one_is_not() -> None:
    reading = frozen(Communicator(JOB, counts={2: CROSSED, 3: CROSSED, 9: LATE}))
    assert (reading.finding, suspects(reading)) == (RasFinding.CROSSED, [2, 3])


def test_counters_that_move_are_progress_whatever_the_skew() -> None:
    before = Communicator(JOB, counts={5: LATE, 3: CROSSED})
    after = replace(before, usual={"AllGather": 140, "ReduceScatter": 70, "AllReduce": 9})
    reading = read_reports(report(before), report(after))
    assert (reading.finding, reading.suspects) == (RasFinding.PROGRESSING, ())


def test_a_rank_that_does_not_answer_while_the_others_move_is_no_hang() -> None:
    before = Communicator(JOB, missing={13: {"unresponsive": True, "considered_dead": False}})
    after = replace(before, usual={"AllGather": 140})
    reading = read_reports(report(before), report(after))
    assert (reading.finding, reading.suspects) == (RasFinding.PROGRESSING, ())
    assert "rank 13 (process 4013 on 10.0.0.2, GPU 5) did not answer RAS" in reading.why


def test_a_dead_rank_outweighs_the_silent_and_the_late() -> None:
    missing = {13: {"unresponsive": True, "considered_dead": True}, 14: {"unresponsive": True}}
    reading = frozen(Communicator(JOB, counts={2: LATE}, missing=missing))
    assert (reading.finding, suspects(reading)) == (RasFinding.DEAD, [13])


def test_an_error_of_another_process_makes_a_witness_not_a_suspect() -> None:
    remote = {rank: {"async_error": 6} for rank in JOB if rank != 13}
    silent = frozen(Communicator(JOB, status=remote, missing={13: {"unresponsive": True}}))
    assert (silent.finding, suspects(silent)) == (RasFinding.UNRESPONSIVE, [13])
    unseen = frozen(Communicator(JOB, status=remote))
    assert (unseen.finding, unseen.suspects) == (RasFinding.FAILED, ())
    assert "who failed is not seen" in unseen.why


def test_an_operation_in_progress_is_no_error() -> None:
    reading = frozen(Communicator(JOB, status={3: {"async_error": 7}}))
    assert reading.finding is RasFinding.MATCHED


def test_an_initialisation_that_failed_names_its_rank() -> None:
    reading = read_reports(report(Communicator(JOB, status={4: {"init_state": 2}})))
    assert (reading.finding, suspects(reading)) == (RasFinding.FAILED, [4])
    assert "system error (network, memory or file) (ncclResult 2)" in reading.why


def test_ranks_that_still_initialise_are_named_where_others_are_done() -> None:
    reading = frozen(Communicator(JOB, status={4: {"init_state": 7}}))
    assert (reading.finding, suspects(reading)) == (RasFinding.INITIALIZING, [4])


def test_a_rank_that_left_alone_is_named() -> None:
    gone = {6: {"unresponsive": False, "considered_dead": False}}
    reading = frozen(Communicator(JOB, missing=gone))
    assert (reading.finding, suspects(reading)) == (RasFinding.LEAVING, [6])
    assert "15 still use it, 1 have left it" in reading.why


def test_a_communicator_that_never_launched_says_nothing() -> None:
    reading = frozen(Communicator(JOB, usual={"AllReduce": 0, "Broadcast": 0}))
    assert reading.finding is RasFinding.CANNOT_TELL
    assert "send and recv, all-to-all and what a CUDA graph captured are not counted" in reading.why


def test_operations_of_later_versions_are_counted() -> None:
    reading = frozen(Communicator(JOB, usual={"AllToAll": 9}, counts={7: {"AllToAll": 8}}))
    assert (reading.finding, suspects(reading)) == (RasFinding.BEHIND, [7])


def test_ranks_of_a_small_communicator_are_told_as_ranks_of_the_job() -> None:
    reading = frozen(Communicator(JOB, usual={"Broadcast": 1}), Communicator([1, 5, 9], counts={9: LATE}))
    (suspect,) = reading.suspects
    assert (suspect.rank, suspect.job_rank, suspect.pid) == (2, 9, 4009)


def test_without_a_communicator_of_the_whole_job_there_is_no_rank_of_the_job() -> None:
    reading = frozen(Communicator([0, 4, 8], counts={8: LATE}), Communicator([1, 5, 9]))
    (suspect,) = reading.suspects
    assert (suspect.rank, suspect.job_rank, suspect.pid) == (2, None, 4008)


def test_two_communicators_of_the_whole_job_in_another_order_leave_it_open() -> None:
    reading = frozen(Communicator(JOB, counts={3: LATE}), Communicator(list(reversed(JOB))))
    assert [suspect.job_rank for suspect in reading.suspects] == [None]


def test_a_rank_that_is_late_because_it_waits_in_another_communicator_is_excused() -> None:
    # Rank 1 never launches in (0, 1); so 0 waits there, is late in (0, 2, 4), and those wait for 0.
    whole = Communicator(range(6), usual={"Broadcast": 1})
    pair = Communicator([0, 1, 5], counts={1: LATE})
    across = Communicator([0, 2, 4], counts={0: LATE})
    reading = frozen(whole, pair, across)
    assert (reading.finding, suspects(reading)) == (RasFinding.BEHIND, [1])
    assert "rank 1 (process 4001" in reading.why


def test_ranks_that_are_each_late_where_the_other_waits_are_a_tie() -> None:
    whole = Communicator(range(4), usual={"Broadcast": 1})
    reading = frozen(whole, Communicator([0, 1, 2], counts={0: LATE}), Communicator([0, 1, 3], counts={1: LATE}))
    assert (reading.finding, reading.suspects) == (RasFinding.BEHIND, ())
    assert [{suspect.job_rank for suspect in side} for side in reading.tied] == [{0, 1}]
    assert "they hold each other up" in reading.why


def test_a_communicator_that_moves_makes_the_job_move_and_the_odd_one_is_still_told() -> None:
    stuck = Communicator(range(8), counts={3: CROSSED})
    moving = Communicator(JOB)
    reading = read_reports(report(stuck, moving), report(stuck, replace(moving, usual={"AllGather": 300})))
    assert reading.finding is RasFinding.PROGRESSING
    assert "yet communicator 0xa0 (8 ranks): frozen over 10 s: rank 3" in reading.why


def test_a_rank_that_one_node_reaches_is_not_missing_because_another_does_not() -> None:
    cut_off = report(Communicator(JOB, missing={13: {"unresponsive": True}}))
    whole = report(Communicator(JOB))
    polls = [
        parse_polls("node-01", [("a1", cut_off), ("a2", cut_off)], 10.0),
        parse_polls("node-02", [("b1", whole), ("b2", whole)], 12.0),
    ]
    reading = analyze_ras(polls)
    assert reading.finding is RasFinding.MATCHED
    assert "frozen over 12 s" in reading.why
    assert analyze_ras(polls[::-1]) == reading


def test_movement_seen_from_one_node_is_movement() -> None:
    early = report(Communicator(JOB))
    late = report(Communicator(JOB, usual={"AllGather": 101}))
    polls = [
        parse_polls("a", [("a1", early), ("a2", early)], 10.0),
        parse_polls("b", [("b1", early), ("b2", late)], 10.0),
    ]
    assert analyze_ras(polls).finding is RasFinding.PROGRESSING


def test_a_node_without_ras_is_noted_beside_the_others() -> None:
    data = sample("matched_but_frozen_poll1.json")
    polls = [parse_polls("a", [("a1", data), ("a2", data)], 10.0), RasPolls("b", (), trouble="nothing listens there")]
    reading = analyze_ras(polls)
    assert (reading.finding, reading.notes) == (RasFinding.MATCHED, ("b: nothing listens there",))


@pytest.mark.parametrize("polls", [[], [RasPolls("a", (), trouble="nothing listens on 127.0.0.1:28028")]])
def test_no_report_is_an_answer(polls: list[RasPolls]) -> None:
    reading = analyze_ras(polls)
    assert (reading.finding, reading.confidence) == (RasFinding.NO_REPORT, 0.0)
    assert ("nothing listens" in reading.why) == bool(polls)


def test_a_communicator_destroyed_between_the_reports_is_progress() -> None:
    both = report(Communicator(range(8)), Communicator(JOB))
    # The second is the one that stays, under its own identity.
    assert read_reports(both, report(Communicator(range(8)))).finding is RasFinding.PROGRESSING


def test_reports_of_two_jobs_that_share_a_port_are_not_compared() -> None:
    theirs = report(Communicator(range(4)), Communicator(range(8), counts={2: CROSSED})).replace(b"0xa0", b"0xb0")
    reading = read_reports(report(Communicator(JOB)), theirs.replace(b"0xa1", b"0xb1"))
    assert (reading.finding, reading.confidence) == (RasFinding.CROSSED, 0.5)
    assert "two jobs share the port; they are not compared" in reading.notes[0]
