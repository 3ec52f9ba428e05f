"""Whatever fault stops a job of any shape: the rank at fault is named, and no healthy one."""

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
COLLECTIVE_FAULTS = (Fault.OTHER_COLLECTIVE, Fault.OTHER_SIZE, Fault.GPU_STOPS, Fault.SKIPS_ONE)
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
        if not (step.operation.point_to_point and fault in COLLECTIVE_FAULTS)
    ]
    at, ahead = draw(st.sampled_from(places)), draw(st.integers(1, 12))
    return simulated_job(tensor, pipeline, data, fault, culprit, at, ahead)


@EVERY
@given(jobs(Fault.HOST_STOPS, Fault.GPU_STOPS), st.booleans(), st.booleans())
def test_a_rank_that_stops_is_named(job: SimulatedJob, only_pending: bool, timing: bool) -> None:
    analysis = analyze_collectives(job.records(only_pending, timing))
    assert analysis.verdict is DiagnosisVerdict.NEVER_ARRIVED, analysis.why
    assert analysis.culprits == (job.culprit,), analysis.why


@EVERY
@given(jobs(Fault.OTHER_COLLECTIVE, Fault.OTHER_SIZE), st.booleans())
def test_a_rank_that_launches_something_else_is_named_or_tied(job: SimulatedJob, only_pending: bool) -> None:
    """In a group of two, the records cannot show which one is wrong."""
    analysis = analyze_collectives(job.records(only_pending))
    assert analysis.conclusive, analysis.why
    assert analysis.verdict in (DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH)
    if analysis.tied:
        assert not analysis.culprits
        assert any(job.culprit in side for side in analysis.tied)
    else:
        assert analysis.culprits == (job.culprit,), analysis.why


@EVERY
@given(jobs(Fault.SKIPS_ONE), st.booleans())
def test_a_rank_that_skips_an_operation_is_named_or_tied(job: SimulatedJob, only_pending: bool) -> None:
    """It differs from the others at a later operation, or it ends early and is missing at the end."""
    analysis = analyze_collectives(job.records(only_pending))
    assert analysis.culprits == (job.culprit,) or any(job.culprit in side for side in analysis.tied), analysis.why


@EVERY
@given(jobs(Fault.DIES), st.booleans())
def test_a_rank_whose_gpu_and_host_stop_together_is_named_if_the_others_went_on(
    job: SimulatedJob, only_pending: bool
) -> None:
    analysis = analyze_collectives(job.records(only_pending))
    assert set(analysis.culprits) <= {job.culprit}, analysis.why


def test_a_rank_that_stops_launching_after_the_operation_that_all_joined() -> None:
    analysis = analyze_collectives(
        simulated_job(4, 1, 4, Fault.DIES, culprit=9, at=3, ahead=12).records(only_pending=True)
    )
    assert analysis.verdict is DiagnosisVerdict.NEVER_ARRIVED
    assert analysis.culprits == (9,)
    assert "rank 9 launched nothing after sequence number" in analysis.why


@EVERY
@given(jobs(Fault.LINK_FAILS), st.booleans())
def test_a_link_that_fails_names_no_rank(job: SimulatedJob, only_pending: bool) -> None:
    analysis = analyze_collectives(job.records(only_pending))
    assert analysis.verdict is DiagnosisVerdict.NO_DESYNC, analysis.why
    assert analysis.culprits == ()


@EVERY
@given(jobs(*Fault), st.data())
def test_a_record_that_is_missing_makes_no_healthy_rank_a_culprit(job: SimulatedJob, data: st.DataObject) -> None:
    records = job.records(data.draw(st.booleans()))
    missing = data.draw(st.sampled_from(range(len(records))))
    analysis = analyze_collectives([record for record in records if record.rank != missing])
    named = set() if job.fault is Fault.LINK_FAILS else {job.culprit}
    assert set(analysis.culprits) <= named, analysis.why


@EVERY
@given(jobs(Fault.HOST_STOPS), st.data())
def test_a_record_that_is_a_little_late_makes_no_healthy_rank_a_culprit(job: SimulatedJob, data: st.DataObject) -> None:
    """The last completion of one healthy rank was not seen yet. If its peers wait for the rank that stopped, only that
    one is named; otherwise the confidence is low."""
    late = data.draw(st.sampled_from([rank for rank in job.ranks if rank.rank != job.culprit]))
    late.seen_done = max(late.seen_done - 1, 0)
    analysis = analyze_collectives(job.records(only_pending=False))
    assert job.culprit in analysis.culprits, analysis.why
    assert analysis.culprits == (job.culprit,) or analysis.confidence < 0.6, analysis.why


@EVERY
@given(jobs(Fault.LINK_FAILS, Fault.SKIPS_ONE), st.integers(1, 4))
def test_a_ring_buffer_too_small_for_the_pending_launches_names_no_healthy_rank(job: SimulatedJob, size: int) -> None:
    analysis = analyze_collectives([shortened(record, size) for record in job.records(only_pending=False)])
    assert set(analysis.culprits) <= {job.culprit}, analysis.why


def shortened(record: RankRecord, size: int) -> RankRecord:
    newest = sorted((launch.record_id for part in record.groups for launch in part.launches), reverse=True)[:size]
    parts = [
        replace(part, launches=tuple(launch for launch in part.launches if launch.record_id in newest))
        for part in record.groups
    ]
    return replace(record, groups=tuple(parts))


@EVERY
@given(jobs(*Fault), st.randoms())
def test_the_order_of_records_changes_nothing(job: SimulatedJob, shuffle: random.Random) -> None:
    records = job.records(only_pending=False)
    mixed = [reversed_inside(record) for record in shuffle.sample(records, len(records))]
    assert analyze_collectives(mixed) == analyze_collectives(records)


def reversed_inside(record: RankRecord) -> RankRecord:
    return replace(record, groups=record.groups[::-1])


def test_groups_entered_in_different_orders() -> None:
    """Ranks 0, 1 and 2 reduce over the first group, then the second; rank 3 in the opposite order."""
    first, second = ProcessGroup("1", (0, 1, 2, 3), "PARAMETERS"), ProcessGroup("2", (0, 1, 2, 3), "EXPERTS")
    reduce = collective("all_reduce", 1, 1)
    usual = [Step(first, reduce), Step(second, reduce)]
    ranks = [SimulatedRank(rank, usual if rank < 3 else usual[::-1]) for rank in range(4)]
    job = SimulatedJob(ranks, ahead=1)
    job.run()
    analysis = analyze_collectives(job.records(only_pending=True))
    assert analysis.verdict is DiagnosisVerdict.DESYNC
    assert analysis.culprits == (3,)
    assert "ranks 0-2 in all_reduce at sequence number 1 of PARAMETERS" in analysis.why
    assert "rank 3 in all_reduce at sequence number 1 of EXPERTS" in analysis.why


@EVERY
@given(jobs(Fault.HOST_STOPS))
def test_unknown_members_of_a_group_are_the_ranks_that_used_it(job: SimulatedJob) -> None:
    """As in Gloo records of a job with several groups; without send and recv, which are identified by their members."""
    records = [without_members(record) for record in job.records(only_pending=False)]
    assume(not any(step.operation.point_to_point for rank in job.ranks for step in rank.program))
    assert analyze_collectives(records).culprits == (job.culprit,)


def without_members(record: RankRecord) -> RankRecord:
    parts = tuple(replace(part, group=part.group._replace(members=())) for part in record.groups)
    return replace(record, groups=parts)


def test_a_cycle_with_a_lost_record_names_no_rank() -> None:
    job = simulated_job(2, 1, 2, Fault.SKIPS_ONE, culprit=1, at=5, ahead=10)
    analysis = analyze_collectives([record for record in job.records(only_pending=False) if record.rank])
    assert analysis.verdict is DiagnosisVerdict.UNKNOWN
    assert analysis.culprits == ()
    assert analysis.why.startswith("the ranks wait for each other, and the records do not show where the hang began: ")
    assert analysis.why.endswith("; rank 0 left no flight record")


def test_different_sizes_in_an_operation_that_permits_them_are_reported_without_a_culprit() -> None:
    group = ProcessGroup("0", (0, 1, 2, 3), "default_pg")
    programs = [[Step(group, collective("all_to_all", 2 + (rank == 1), 2))] for rank in range(4)]
    job = SimulatedJob([SimulatedRank(rank, program) for rank, program in enumerate(programs)])
    job.run()
    analysis = analyze_collectives(job.records(only_pending=True))
    assert analysis.verdict is DiagnosisVerdict.NO_DESYNC
    assert analysis.culprits == ()
    assert analysis.confidence == 0.5
    assert (
        "the ranks use different sizes, which is correct only if each pair of ranks agrees on its sizes" in analysis.why
    )


def test_a_difference_that_all_ranks_got_past_is_not_what_they_wait_for() -> None:
    """Ranks 0 and 1 differed in types long ago and went on; now rank 2 is missing."""
    group = ProcessGroup("0", (0, 1, 2, 3), "default_pg")
    reduce = collective("all_reduce", 1, 1)
    usual, other = [Step(group, reduce)] * 6, [Step(group, reduce)] * 6
    job = SimulatedJob([SimulatedRank(rank, list(usual)) for rank in range(4)], Fault.HOST_STOPS, culprit=2, at=4)
    job.run()
    other[1] = Step(group, reduce._replace(input_types=("Half",)))
    job.ranks[0].program = other
    analysis = analyze_collectives(job.records(only_pending=False))
    assert (analysis.verdict, analysis.culprits) == (DiagnosisVerdict.NEVER_ARRIVED, (2,))


def test_two_against_two_is_a_tie() -> None:
    group = ProcessGroup("0", (0, 1, 2, 3), "default_pg")
    one, other = [Step(group, collective("all_reduce", 1, 1))], [Step(group, collective("broadcast", 1, 1))]
    ranks = [SimulatedRank(rank, list(one if rank % 2 else other)) for rank in range(4)]
    job = SimulatedJob(ranks)
    job.run()
    analysis = analyze_collectives(job.records(only_pending=True))
    assert analysis.conclusive
    assert analysis.culprits == ()
    assert analysis.tied == ((0, 2), (1, 3))
    assert "no side has a majority" in analysis.why
