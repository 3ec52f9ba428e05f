"""Whatever stops a job of whatever shape: the rank that did it is named, and no healthy one."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.watcher.diagnosis.collectives.simulated_job import (
    Fault,
    SimulatedJob,
    SimulatedRank,
    Step,
    collective,
    groups_of,
    program_of,
    simulated_job,
)
from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.flight_recorder.model import ProcessGroup, RankRecord
from wattwatch.watcher.diagnosis.model import DiagnosisVerdict

SHAPES = [(1, 1, 4), (2, 1, 2), (2, 2, 2), (4, 1, 4), (2, 4, 2), (1, 4, 2), (4, 2, 2), (1, 1, 16), (3, 3, 1)]
OF_COLLECTIVES = (Fault.OTHER_COLLECTIVE, Fault.OTHER_SIZE, Fault.BOARD_STOPS, Fault.SKIPS_ONE)
EVERY = settings(max_examples=150, deadline=None)


@st.composite
def jobs(draw: st.DrawFn, *faults: Fault) -> SimulatedJob:
    tensor, pipeline, data = draw(st.sampled_from(SHAPES))
    fault = draw(st.sampled_from(faults))
    culprit = draw(st.integers(0, tensor * pipeline * data - 1))
    program = program_of(culprit, groups_of(tensor, pipeline, data), steps=4)
    places = [
        place
        for place, step in enumerate(program[:-2])
        if not (step.operation.point_to_point and fault in OF_COLLECTIVES)
    ]
    at, ahead = draw(st.sampled_from(places)), draw(st.integers(1, 12))
    return simulated_job(tensor, pipeline, data, fault, culprit, at, ahead)


@EVERY
@given(jobs(Fault.HOST_STOPS, Fault.BOARD_STOPS), st.booleans(), st.booleans())
def test_who_stops_is_named(job: SimulatedJob, only_open: bool, timing: bool) -> None:
    reading = analyze_collectives(job.records(only_open, timing))
    assert reading.verdict is DiagnosisVerdict.NEVER_ARRIVED, reading.why
    assert reading.culprits == (job.culprit,), reading.why


@EVERY
@given(jobs(Fault.OTHER_COLLECTIVE, Fault.OTHER_SIZE), st.booleans())
def test_who_does_something_else_is_named_or_tied(job: SimulatedJob, only_open: bool) -> None:
    """In a group of two the records cannot tell which one is wrong."""
    reading = analyze_collectives(job.records(only_open))
    assert reading.conclusive, reading.why
    assert reading.verdict in (DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH)
    if reading.tied:
        assert not reading.culprits
        assert any(job.culprit in side for side in reading.tied)
    else:
        assert reading.culprits == (job.culprit,), reading.why


@EVERY
@given(jobs(Fault.SKIPS_ONE), st.booleans())
def test_who_skips_one_is_named_or_tied(job: SimulatedJob, only_open: bool) -> None:
    """It parts from the others at the next operation that differs, or is done too early and missed at the end."""
    reading = analyze_collectives(job.records(only_open))
    assert reading.culprits == (job.culprit,) or any(job.culprit in side for side in reading.tied), reading.why


@EVERY
@given(jobs(Fault.DIES), st.booleans())
def test_whose_board_and_host_stop_together_is_named_where_the_others_went_on(
    job: SimulatedJob, only_open: bool
) -> None:
    reading = analyze_collectives(job.records(only_open))
    assert set(reading.culprits) <= {job.culprit}, reading.why


def test_who_launches_nothing_more_in_what_all_have_joined() -> None:
    reading = analyze_collectives(simulated_job(4, 1, 4, Fault.DIES, culprit=9, at=3, ahead=12).records(only_open=True))
    assert reading.verdict is DiagnosisVerdict.NEVER_ARRIVED
    assert reading.culprits == (9,)
    assert "rank 9 launched nothing after slot" in reading.why


@EVERY
@given(jobs(Fault.LINK_FAILS), st.booleans())
def test_a_link_that_fails_names_no_rank(job: SimulatedJob, only_open: bool) -> None:
    reading = analyze_collectives(job.records(only_open))
    assert reading.verdict is DiagnosisVerdict.NO_DESYNC, reading.why
    assert reading.culprits == ()


@EVERY
@given(jobs(*Fault), st.data())
def test_a_record_that_is_missing_makes_no_healthy_rank_a_culprit(job: SimulatedJob, data: st.DataObject) -> None:
    records = job.records(data.draw(st.booleans()))
    missing = data.draw(st.sampled_from(range(len(records))))
    reading = analyze_collectives([record for record in records if record.rank != missing])
    named = set() if job.fault is Fault.LINK_FAILS else {job.culprit}
    assert set(reading.culprits) <= named, reading.why


@EVERY
@given(jobs(Fault.HOST_STOPS), st.data())
def test_a_record_that_is_a_little_late_makes_no_healthy_rank_a_culprit(job: SimulatedJob, data: st.DataObject) -> None:
    """The last completion of one healthy rank was not seen yet. Where its peers wait for the one that stopped, that is
    all that it is; else it is said to be in doubt."""
    late = data.draw(st.sampled_from([rank for rank in job.ranks if rank.rank != job.culprit]))
    late.seen_done = max(late.seen_done - 1, 0)
    reading = analyze_collectives(job.records(only_open=False))
    assert job.culprit in reading.culprits, reading.why
    assert reading.culprits == (job.culprit,) or reading.confidence < 0.6, reading.why


@EVERY
@given(jobs(Fault.LINK_FAILS, Fault.SKIPS_ONE), st.integers(1, 4))
def test_a_ring_too_short_for_what_is_open_names_nobody(job: SimulatedJob, size: int) -> None:
    reading = analyze_collectives([shortened(record, size) for record in job.records(only_open=False)])
    assert set(reading.culprits) <= {job.culprit}, reading.why


def shortened(record: RankRecord, size: int) -> RankRecord:
    newest = sorted((launch.record for part in record.groups for launch in part.launches), reverse=True)[:size]
    parts = [
        replace(part, launches=tuple(launch for launch in part.launches if launch.record in newest))
        for part in record.groups
    ]
    return replace(record, groups=tuple(parts))


@EVERY
@given(jobs(*Fault), st.randoms())
def test_the_order_of_records_changes_nothing(job: SimulatedJob, shuffle: random.Random) -> None:
    records = job.records(only_open=False)
    mixed = [reversed_inside(record) for record in shuffle.sample(records, len(records))]
    assert analyze_collectives(mixed) == analyze_collectives(records)


def reversed_inside(record: RankRecord) -> RankRecord:
    return replace(record, groups=record.groups[::-1])


def test_groups_entered_in_different_orders() -> None:
    """Ranks 0, 1 and 2 reduce over the first group, then the second; rank 3 the other way round."""
    first, second = ProcessGroup("1", (0, 1, 2, 3), "PARAMETERS"), ProcessGroup("2", (0, 1, 2, 3), "EXPERTS")
    reduce = collective("all_reduce", 1, 1)
    usual = [Step(first, reduce), Step(second, reduce)]
    ranks = [SimulatedRank(rank, usual if rank < 3 else usual[::-1]) for rank in range(4)]
    job = SimulatedJob(ranks, ahead=1)
    job.run()
    reading = analyze_collectives(job.records(only_open=True))
    assert reading.verdict is DiagnosisVerdict.DESYNC
    assert reading.culprits == (3,)
    assert "ranks 0-2 in all_reduce at slot 1 of PARAMETERS" in reading.why
    assert "rank 3 in all_reduce at slot 1 of EXPERTS" in reading.why


@EVERY
@given(jobs(Fault.HOST_STOPS))
def test_members_that_are_not_told_are_those_who_are_heard(job: SimulatedJob) -> None:
    """As gloo's records of a job with several groups; without send and recv, whose places need them."""
    records = [without_members(record) for record in job.records(only_open=False)]
    assume(not any(step.operation.point_to_point for rank in job.ranks for step in rank.program))
    assert analyze_collectives(records).culprits == (job.culprit,)


def without_members(record: RankRecord) -> RankRecord:
    parts = tuple(replace(part, group=part.group._replace(members=())) for part in record.groups)
    return replace(record, groups=parts)


def test_a_circle_that_a_lost_record_leaves_open_names_nobody() -> None:
    job = simulated_job(2, 1, 2, Fault.SKIPS_ONE, culprit=1, at=5, ahead=10)
    reading = analyze_collectives([record for record in job.records(only_open=False) if record.rank])
    assert reading.verdict is DiagnosisVerdict.UNKNOWN
    assert reading.culprits == ()
    assert reading.why.startswith("all wait for one another, and the records do not tell who began: ")
    assert reading.why.endswith("; rank 0 left no record")


def test_sizes_that_an_operation_allows_to_differ_are_said_and_named_for_nobody() -> None:
    group = ProcessGroup("0", (0, 1, 2, 3), "default_pg")
    programs = [[Step(group, collective("all_to_all", 2 + (rank == 1), 2))] for rank in range(4)]
    job = SimulatedJob([SimulatedRank(rank, program) for rank, program in enumerate(programs)])
    job.run()
    reading = analyze_collectives(job.records(only_open=True))
    assert reading.verdict is DiagnosisVerdict.NO_DESYNC
    assert reading.culprits == ()
    assert reading.confidence == 0.5
    assert "the sizes differ, which is right only if they match in pairs" in reading.why


def test_what_all_finished_is_not_what_they_wait_for() -> None:
    """Ranks 0 and 1 parted in types long ago, and went on: now rank 2 is missing."""
    group = ProcessGroup("0", (0, 1, 2, 3), "default_pg")
    reduce = collective("all_reduce", 1, 1)
    usual, other = [Step(group, reduce)] * 6, [Step(group, reduce)] * 6
    job = SimulatedJob([SimulatedRank(rank, list(usual)) for rank in range(4)], Fault.HOST_STOPS, culprit=2, at=4)
    job.run()
    other[1] = Step(group, reduce._replace(input_types=("Half",)))
    job.ranks[0].program = other
    reading = analyze_collectives(job.records(only_open=False))
    assert (reading.verdict, reading.culprits) == (DiagnosisVerdict.NEVER_ARRIVED, (2,))


def test_two_against_two_is_a_tie() -> None:
    group = ProcessGroup("0", (0, 1, 2, 3), "default_pg")
    one, other = [Step(group, collective("all_reduce", 1, 1))], [Step(group, collective("broadcast", 1, 1))]
    ranks = [SimulatedRank(rank, list(one if rank % 2 else other)) for rank in range(4)]
    job = SimulatedJob(ranks)
    job.run()
    reading = analyze_collectives(job.records(only_open=True))
    assert reading.conclusive
    assert reading.culprits == ()
    assert reading.tied == ((0, 2), (1, 3))
    assert "as many on each side" in reading.why
