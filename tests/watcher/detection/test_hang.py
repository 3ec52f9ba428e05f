"""Does the job hang: what suspects, what confirms, and what must stay silent."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMPUTE,
    EVALUATE,
    IN_BARRIER,
    LOAD,
    PAUSE,
    SAVE,
    SPIN,
    SPIN_ROUGHLY,
    Activity,
    Job,
)
from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.detection.model import AlertName, JobState, Severity

HUNG = AlertName.JOB_HUNG


def warmed_up(**settings: object) -> Job:
    job = Job(**settings)  # type: ignore[arg-type]  # handed through
    job.play(40, COMPUTE)
    assert not job.alerts
    assert job.state is JobState.COMPUTING
    return job


def test_an_epoch_end_deadlock_is_suspected_on_the_second_round_and_confirmed_after_the_stall_limit() -> None:
    job = warmed_up(nodes=2)
    began = job.now
    job.play(2, SPIN, {3: IN_BARRIER})
    suspicion = job.finding(HUNG)
    assert job.seconds_of(HUNG) == [began + 2]
    assert (suspicion.confirmed, suspicion.severity) == (False, Severity.WARNING)
    assert [str(s) for s in suspicion.suspects] == ["rank 3 on node-1 GPU 3"]
    assert "rank 3" in suspicion.summary
    job.play(60, SPIN, {3: IN_BARRIER})
    hang = job.finding(HUNG)
    assert (hang.confirmed, hang.severity, job.state) == (True, Severity.CRITICAL, JobState.HUNG)
    assert [s.rank for s in hang.suspects] == [3]
    assert hang.gpus_idle == 16
    first_confirmed = job.seconds_of(HUNG, confirmed=True)[0]
    assert 30 <= first_confirmed - began <= 36
    assert job.alerts == {"JobHung"}


def test_the_suspicion_is_withdrawn_when_steps_move_again() -> None:
    job = warmed_up(nodes=2)
    job.play(10, SPIN, {3: IN_BARRIER})
    assert not job.finding(HUNG).confirmed
    job.play(3, COMPUTE)
    assert job.findings == ()
    job.play(60, COMPUTE)
    assert job.findings == ()


def test_a_confirmed_hang_ends_when_the_job_recovers() -> None:
    job = warmed_up(nodes=2)
    job.play(90, SPIN, {3: IN_BARRIER})
    assert job.finding(HUNG).confirmed
    job.play(10, COMPUTE)
    assert job.findings == ()
    assert job.state is JobState.COMPUTING


def test_all_ranks_hang_at_full_utilization_and_nobody_is_named() -> None:
    job = warmed_up(nodes=2, progress="log")
    job.play(60, SPIN_ROUGHLY)
    hang = job.finding(HUNG)
    assert hang.confirmed
    assert hang.suspects == ()
    assert "none of the 16 ranks differs from the others" in hang.summary


def test_rank_0_alone_at_zero_for_two_minutes_is_a_checkpoint() -> None:
    for progress in ("heartbeat", "log", None):
        job = Job(nodes=2, progress=progress)
        job.play(40, COMPUTE)
        job.play(118, AWAIT_SAVE, {0: SAVE})
        assert job.state is JobState.CHECKPOINTING
        job.play(30, COMPUTE)
        assert job.alerts == set(), progress


@pytest.mark.parametrize("progress", ["heartbeat", "log"])
def test_a_healthy_checkpoint_of_394_seconds_is_silent(progress: str) -> None:
    job = Job(nodes=2, progress=progress)
    job.play(40, COMPUTE)
    job.play(394, AWAIT_SAVE, {0: SAVE})
    job.play(30, COMPUTE)
    assert job.alerts == set()


def test_rank_0_alone_at_zero_for_longer_than_any_save_is_a_hang_that_names_it() -> None:
    job = Job(nodes=2, progress="log")
    job.play(40, COMPUTE)
    job.play(640, AWAIT_SAVE, {0: SAVE})
    assert job.finding(HUNG).confirmed
    assert [s.rank for s in job.finding(HUNG).suspects] == [0]


def test_without_a_counter_or_files_rank_0_alone_is_suspected_after_the_longest_save() -> None:
    job = Job(nodes=2, progress=None)
    job.play(40, COMPUTE)
    job.play(590, AWAIT_SAVE, {0: SAVE})
    assert job.alerts == set()
    job.play(30, AWAIT_SAVE, {0: SAVE})
    assert not job.finding(HUNG).confirmed
    assert [s.rank for s in job.finding(HUNG).suspects] == [0]


@pytest.mark.parametrize("progress", ["heartbeat", "log"])
def test_the_time_that_a_save_took_is_no_stall_when_it_is_over(progress: str) -> None:
    """Between the end of a save and the next counted step all ranks may spin for a while."""
    job = warmed_up(nodes=2, progress=progress)
    job.play(118, AWAIT_SAVE, {0: SAVE})
    job.play(12, SPIN)
    job.play(60, COMPUTE)
    assert job.alerts == set()


def test_a_hang_after_a_save_is_found_by_the_counter() -> None:
    job = warmed_up(nodes=2)
    job.play(118, AWAIT_SAVE, {0: SAVE})
    job.play(40, SPIN)
    assert job.finding(HUNG).confirmed


def test_a_long_evaluation_at_full_power_may_pause_for_a_moment() -> None:
    job = warmed_up(progress="log")
    for _ in range(4):
        job.play(100, Activity(985, 99))
        job.play(2, PAUSE)
    job.play(60, COMPUTE)
    assert job.alerts == set()


@pytest.mark.parametrize("progress", ["log", "heartbeat"])
def test_stalled_steps_of_gpus_that_cannot_be_read_are_a_suspicion_that_says_since_when(progress: str) -> None:
    job = warmed_up(nodes=2, progress=progress)
    for node in job.nodes:
        job.status[node] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not answered")
    job.play(60, SPIN)
    said = job.finding(HUNG)
    assert (said.confirmed, said.suspects) == (False, ())
    assert "power and utilization of 16 GPUs have not been read for 60 s: whether the GPUs work now is unknown" in (
        said.evidence
    )
    assert "the GPUs of the job cannot be read, so the rank is unknown" in said.summary


def test_a_signature_that_was_seen_before_the_gpus_became_unreadable_is_not_said_to_be_there_now() -> None:
    job = warmed_up(nodes=2)
    job.play(10, SPIN, {3: IN_BARRIER})
    seen = job.finding(HUNG).evidence[0]
    for node in job.nodes:
        job.status[node] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not answered")
    job.play(50, SPIN, {3: IN_BARRIER})
    evidence = job.finding(HUNG).evidence
    assert seen not in evidence
    assert f"when they were last read: {seen}" in evidence
    assert any("have not been read for 50 s" in fact for fact in evidence)


def test_gpus_that_cannot_be_read_and_steps_that_are_unknown_leave_the_job_unknown() -> None:
    job = warmed_up(nodes=2, progress=None)
    for node in job.nodes:
        job.status[node] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not answered")
    job.play(60, SPIN)
    assert job.state is JobState.UNKNOWN
    assert "JobHung" not in job.alerts


def test_a_confirmed_hang_is_not_closed_by_a_sample_that_flickers() -> None:
    job = warmed_up(nodes=2)
    job.play(60, SPIN)
    began = len(job.seconds_of(HUNG, confirmed=True))
    job.play(3, Activity(985, 99))
    job.play(20, SPIN)
    assert len(job.seconds_of(HUNG, confirmed=True)) == began + 23


def test_an_evaluation_is_quiet() -> None:
    job = warmed_up()
    job.play(600, EVALUATE)
    assert job.alerts == set()


def test_start_up_and_the_first_compiled_step_are_quiet() -> None:
    job = Job(step=0)
    job.play(120, LOAD)
    assert job.state is JobState.STARTING
    job.play(900, PAUSE)
    assert job.alerts == set()


def test_all_gpus_at_zero_without_a_readable_counter_are_quiet_for_25_minutes() -> None:
    job = Job(progress=None)
    job.play(40, COMPUTE)
    job.play(1500, PAUSE)
    assert job.alerts == set()


def test_without_a_readable_counter_the_signature_must_last() -> None:
    job = Job(nodes=2, progress=None)
    job.play(40, COMPUTE)
    job.play(30, SPIN, {3: IN_BARRIER})
    assert job.alerts == set()
    job.play(60, SPIN, {3: IN_BARRIER})
    assert not job.finding(HUNG).confirmed
    job.play(300, SPIN, {3: IN_BARRIER})
    assert job.finding(HUNG).confirmed
    job.play(5, COMPUTE)
    assert job.findings == ()


def test_a_gap_starts_the_count_of_rounds_anew() -> None:
    job = warmed_up(nodes=2)
    job.play(1, SPIN, {3: IN_BARRIER})
    job.skip(30)
    job.play(1, SPIN, {3: IN_BARRIER})
    assert job.findings == ()
    job.play(1, SPIN, {3: IN_BARRIER})
    assert not job.finding(HUNG).confirmed


def test_a_reading_that_is_repeated_is_not_a_second_sample() -> None:
    job = warmed_up(nodes=2)
    job.play(1, SPIN, {3: IN_BARRIER})
    job.play(4, SPIN, {3: IN_BARRIER}, repeat_gpus=True)
    assert job.findings == ()
    job.play(1, SPIN, {3: IN_BARRIER})
    assert not job.finding(HUNG).confirmed


def test_an_incomplete_sample_suspects_no_rank() -> None:
    job = warmed_up(nodes=2)
    silent = ["node-2"]
    job.play(3, COMPUTE, silent=silent)
    job.play(8, SPIN, {3: IN_BARRIER}, silent=silent)
    assert job.seconds_of(HUNG) == []


def test_a_suspicion_stays_while_a_node_is_unreachable() -> None:
    job = warmed_up(nodes=2)
    job.play(5, SPIN, {3: IN_BARRIER})
    job.play(8, SPIN, {3: IN_BARRIER}, silent=["node-2"])
    assert [s.rank for s in job.finding(HUNG).suspects] == [3]


def test_an_unreadable_counter_is_not_stalled() -> None:
    """The log lies on the node that went silent: nothing is known of the steps, so nothing is said of them."""
    job = warmed_up(nodes=2, progress="log")
    job.play(600, COMPUTE, silent=["node-1"])
    assert job.seconds_of(HUNG) == []


@pytest.mark.parametrize("doing", [PAUSE, SPIN])
def test_a_confirmed_hang_stays_while_its_counter_is_unreadable(doing: Activity) -> None:
    job = warmed_up(nodes=2, progress="log")
    job.play(640, doing)
    assert job.finding(HUNG).confirmed
    job.play(20, doing, silent=["node-1"])
    assert job.finding(HUNG).confirmed
    job.play(10, COMPUTE)
    assert job.seconds_of(HUNG)[-1] <= job.now - 5


def test_an_unreachable_cluster_is_no_hang() -> None:
    job = warmed_up(nodes=2)
    job.play(600, COMPUTE, silent=job.nodes)
    assert job.seconds_of(HUNG) == []
    job.play(30, COMPUTE)
    assert job.seconds_of(HUNG) == []


def test_two_nodes_in_different_phases_are_one_suspicion_without_a_name() -> None:
    job = warmed_up(nodes=2)
    waiting = dict.fromkeys(range(8, 16), IN_BARRIER)
    job.play(60, SPIN, waiting)
    assert job.finding(HUNG).confirmed


def test_a_watcher_that_comes_late_confirms_a_hang_by_the_age_of_the_log() -> None:
    job = Job(nodes=2, progress="log")
    job.since_step = 700
    job.play(5, SPIN, {3: IN_BARRIER})
    assert job.finding(HUNG).confirmed
    assert [s.rank for s in job.finding(HUNG).suspects] == [3]


def test_an_old_log_of_a_job_that_ended_is_no_hang() -> None:
    job = Job(nodes=1, progress="log")
    job.since_step = 200_000
    job.play(60, Activity(139, 0, held_bytes=8e6, process=False))
    assert job.alerts == set()


def test_a_long_step_at_full_power_is_no_hang_at_once() -> None:
    job = warmed_up()
    job.play(200, Activity(985, 99))
    assert job.seconds_of(HUNG) == []


def test_a_counter_that_stalls_at_full_power_is_a_hang_in_the_end() -> None:
    job = warmed_up()
    job.play(620, Activity(985, 99))
    assert job.finding(HUNG).confirmed


def test_a_gpu_that_the_job_does_not_use_is_not_to_blame() -> None:
    free = Activity(139, 0, held_bytes=8e6, process=False)
    job = Job(progress="log")
    job.play(40, COMPUTE, {7: free})
    job.play(60, SPIN, {7: free})
    hang = job.finding(HUNG)
    assert hang.confirmed
    assert hang.suspects == ()


def test_a_job_that_is_started_again_gets_the_time_of_a_first_step() -> None:
    """New processes load for minutes while the log still shows the last step of the run before."""
    job = warmed_up(nodes=2, progress="log")
    job.play(60, SPIN, {3: IN_BARRIER})
    assert job.finding(HUNG).confirmed
    job.first_pid, job.started = 9000, 900.0
    job.play(300, PAUSE)
    assert job.findings == ()
    job.play(60, COMPUTE)
    assert job.findings == ()
    job.play(60, SPIN, {3: IN_BARRIER})
    assert job.finding(HUNG).confirmed


def test_loading_that_never_ends_is_a_hang_after_half_an_hour() -> None:
    job = Job(step=0)
    job.play(1750, LOAD)
    assert job.alerts == set()
    job.play(100, LOAD)
    assert job.finding(HUNG).confirmed


def test_ranks_that_spin_while_they_find_each_other_at_a_restart_are_no_hang() -> None:
    job = warmed_up(nodes=2, progress="log")
    job.first_pid, job.started = 9000, 900.0
    job.play(120, SPIN)
    assert job.alerts == set()


def test_a_hang_in_containers_where_the_driver_names_no_process_is_confirmed() -> None:
    job = Job(nodes=1, progress="log")
    job.play(60, replace(COMPUTE, process=False))
    job.play(60, replace(SPIN, process=False), {3: replace(IN_BARRIER, process=False)})
    assert job.finding(HUNG).confirmed
    assert [s.rank for s in job.finding(HUNG).suspects] == [3]


def test_a_hang_that_is_kept_while_the_counter_cannot_be_read_says_how_old_its_numbers_are() -> None:
    job = Job(nodes=2)
    job.play(40, COMPUTE)
    job.play(60, SPIN)
    assert job.finding(HUNG).confirmed
    job.play(100, SPIN, silent=job.nodes)
    kept = job.finding(HUNG)
    assert kept.confirmed
    assert re.fullmatch(
        r"the hang was last confirmed (9\d|100) s ago; the job's progress cannot be read now", kept.evidence[-1]
    )
    assert sum("the hang was last confirmed" in line for line in kept.evidence) == 1
