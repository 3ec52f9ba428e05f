"""Pictures of healthy jobs that look like trouble: doubted, told softly, or demanded for longer the next time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import (
    COMPUTE,
    ENDED,
    IN_BARRIER,
    KILLED,
    LOAD,
    PAUSE,
    SPIN,
    Activity,
    Job,
    checkpoint,
)
from wattwatch.watcher.detection.model import AlertName, Severity

HUNG = AlertName.JOB_HUNG
STARVING = AlertName.JOB_STARVING
H100 = "NVIDIA H100 80GB HBM3"


def stretches(seconds: list[float]) -> int:
    """How often something began to be told."""
    return sum(1 for i, at in enumerate(seconds) if i == 0 or at - seconds[i - 1] > 1.5)


# All ranks at rest.


@pytest.mark.parametrize(("progress", "step_seconds"), [("log", 1), ("log", 5), ("heartbeat", 5)])
def test_all_ranks_at_rest_for_90_seconds_is_a_suspicion_at_most(progress: str, step_seconds: int) -> None:
    """A save by all ranks, an evaluation, the start of an epoch."""
    job = Job(nodes=2, progress=progress)
    job.step_seconds = step_seconds
    job.play(60, COMPUTE)
    job.play(90, PAUSE)
    job.play(60, COMPUTE)
    assert job.seconds_of(HUNG, confirmed=True) == []
    assert job.findings == ()


def test_all_ranks_at_rest_is_suspected_after_the_stall_limit_and_a_hang_after_that_of_a_save() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    began = job.now
    job.play(40, PAUSE)
    soft = job.finding(HUNG)
    assert (soft.confirmed, soft.severity) == (False, Severity.WARNING)
    job.play(600, PAUSE)
    assert 600 <= job.seconds_of(HUNG, confirmed=True)[0] - began <= 610


def test_a_job_that_rests_at_each_epoch_is_doubted_once() -> None:
    job = Job(progress="log")
    job.step_seconds = 1
    for _ in range(8):
        job.play(120, COMPUTE)
        job.play(45, PAUSE)
    job.play(60, COMPUTE)
    assert job.seconds_of(HUNG, confirmed=True) == []
    assert stretches(job.seconds_of(HUNG)) == 1


def test_a_stall_of_all_ranks_that_ended_by_itself_does_not_multiply_the_time_until_the_next_is_reported() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    job.play(500, PAUSE)
    job.play(60, COMPUTE)
    began = job.now
    job.play(800, PAUSE)
    assert job.seconds_of(HUNG, confirmed=True)[0] - began <= 760  # and not 1,500


def test_a_rest_that_is_longer_than_any_save_is_a_habit_once_it_came_three_times() -> None:
    job = Job(progress="log")
    told = []
    for _ in range(4):
        job.play(60, COMPUTE)
        began = job.now
        job.play(700, PAUSE)
        told.append(any(at > began for at in job.seconds_of(HUNG, confirmed=True)))
    assert told == [True, True, True, False]


def test_without_a_counter_a_stall_that_ended_by_itself_delays_the_next_report_by_a_minute_at_most() -> None:
    job = Job(progress=None)
    job.play(60, COMPUTE)
    job.play(200, SPIN, {3: PAUSE})
    job.play(60, COMPUTE)
    began = job.now
    job.play(400, SPIN, {3: PAUSE})
    assert next(at for at in job.seconds_of(HUNG) if at > began) - began <= 265
    assert job.finding(HUNG).confirmed


def test_a_configured_stall_limit_decides_when_it_is_reported() -> None:
    job = Job(progress="log", stall_limit_seconds=60.0)
    job.play(60, COMPUTE)
    job.play(80, PAUSE)
    assert job.finding(HUNG).confirmed


@pytest.mark.parametrize("mark", [False, None])
def test_a_save_by_all_ranks_whose_files_grow_is_no_hang_with_and_without_a_mark(mark: bool | None) -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    for second in range(200):
        job.entries = (checkpoint(1010, complete=mark, gigabytes=1 + second),)
        job.play(1, PAUSE)
    job.entries = (checkpoint(1010, complete=True, gigabytes=201),)
    job.play(60, COMPUTE)
    assert job.alerts == set()


def test_the_upload_after_the_last_step_is_no_hang() -> None:
    job = Job(progress="log", step=95, total_steps=100)
    job.play(25, COMPUTE)
    job.play(90, SPIN, {1: PAUSE})
    job.play(40, ENDED)
    assert job.seconds_of(HUNG, confirmed=True) == []


# Signatures that healthy work shows.


def test_all_busy_near_the_floor_between_two_steps_is_suspected_less_and_less() -> None:
    """A slow link: each step of 30 s ends in 4 s of waiting for each other."""
    job = Job(progress="log")
    job.step_seconds = 30
    for _ in range(40):
        job.play(24, replace(COMPUTE, steps=False))
        job.play(4, SPIN)
        job.since_step = 30
        job.play(2, COMPUTE)
    assert stretches(job.seconds_of(HUNG)) <= 2
    assert job.seconds_of(HUNG, confirmed=True) == []


def test_a_light_job_that_draws_what_spinning_draws_is_suspected_once_or_twice_in_20_minutes() -> None:
    job = Job(progress="log", name=H100)
    job.play(20, Activity(220, 97, steps=True))
    job.play(1200, Activity(158, 97, steps=True))
    assert stretches(job.seconds_of(HUNG)) <= 2
    assert job.seconds_of(HUNG, confirmed=True) == []


def test_what_healthy_work_observations_like_delays_no_suspicion_of_another_shape() -> None:
    job = Job(progress="log")
    job.step_seconds = 30
    for _ in range(6):
        job.play(24, replace(COMPUTE, steps=False))
        job.play(4, SPIN)
        job.since_step = 30
        job.play(2, COMPUTE)
    began = job.now
    job.play(10, SPIN, {3: IN_BARRIER})
    assert next(at for at in job.seconds_of(HUNG) if at > began) <= began + 3


# The first step.


@pytest.mark.parametrize("progress", ["heartbeat", "log"])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("rank_3", [SPIN, IN_BARRIER])
def test_ranks_that_wait_for_each_other_before_the_first_step_are_no_hang(
    progress: str, restarted: bool, rank_3: Activity
) -> None:
    """A slow machine: GPUs work for a moment, then all wait for the rank that still loads, compiles or tokenizes."""
    job = Job(progress=progress, step=0)
    if restarted:
        job.play(60, COMPUTE)
        job.play(5, KILLED)
        job.first_pid, job.started, job.restart, job.step, job.since_step = 7000, 1070.0, 1, 0, 0
    began = job.now
    job.play(30, LOAD)
    job.play(5, replace(COMPUTE, steps=False))
    job.play(200, SPIN, {3: rank_3})
    job.play(60, COMPUTE)
    assert [at for at in job.seconds_of(HUNG) if at > began] == []
    began = job.now
    job.play(40, SPIN, {3: IN_BARRIER})  # and teaches no patience for what comes after it
    assert next(at for at in job.seconds_of(HUNG) if at > began) <= began + 3
    assert job.finding(HUNG).confirmed


def test_a_deadlock_before_the_first_step_is_suspected_after_five_minutes() -> None:
    job = Job(step=0)
    job.play(30, LOAD)
    job.play(5, replace(COMPUTE, steps=False))
    began = job.now
    job.play(1860, SPIN, {3: replace(SPIN, utilization=0, phase="train")})
    assert 300 <= job.seconds_of(HUNG)[0] - began <= 305
    suspected = next(f for o in job.observed for f in o.findings if f.alert is HUNG)
    assert "and the limit is 1800 s" in suspected.evidence[1]
    assert 1790 <= job.seconds_of(HUNG, confirmed=True)[0] - began <= 1810


# Phases.


def test_one_rank_that_says_it_evaluates_while_the_rest_spins_is_no_evaluation() -> None:
    job = Job(nodes=2)
    job.play(60, COMPUTE)
    job.play(60, SPIN, {3: replace(PAUSE, phase="eval")})
    assert job.finding(HUNG).confirmed
    assert [s.rank for s in job.finding(HUNG).suspects] == [3]


def test_a_rank_that_never_gets_loaded_is_named_after_the_time_of_a_first_step() -> None:
    job = Job(nodes=2)
    job.play(60, COMPUTE)
    job.play(3, KILLED)
    job.first_pid, job.started, job.step, job.restart = 6000, 1100.0, 990, 1
    job.play(30, LOAD)
    job.play(1900, replace(SPIN, phase="barrier"), {3: LOAD})
    assert job.finding(HUNG).confirmed
    assert [s.rank for s in job.finding(HUNG).suspects] == [3]


# Starvation.


def fed_unevenly(job: Job, watts: float, seconds: int) -> None:
    chance = random.Random(1)
    for _ in range(seconds):
        job.play(1, Activity(watts, chance.choice((15, 25, 35, 45)), steps=True))


@pytest.mark.parametrize(("board", "watts"), [(H100, 240.0), ("NVIDIA B300 SXM6 AC", 405.0)])
def test_a_small_model_at_its_own_step_rate_starves_unconfirmed_at_most(board: str, watts: float) -> None:
    job = Job(progress="log", name=board)
    fed_unevenly(job, watts, 300)
    assert job.seconds_of(STARVING, confirmed=True) == []
    assert job.finding(STARVING).gpus_idle == 0


def test_an_unreadable_counter_proves_no_starvation() -> None:
    job = Job(progress="log")
    fed_unevenly(job, 405.0, 100)
    job.play(10, COMPUTE, silent=job.nodes)
    fed_unevenly(job, 405.0, 60)
    assert job.seconds_of(STARVING, confirmed=True) == []


def test_fast_steps_seen_one_observation_late_are_no_loss_of_step_rate() -> None:
    job = Job(progress="log")
    for second in range(200):
        job.step = 1000 + int(second / 1.3)
        job.since_step = 0
        job.play(1, Activity(405, (50, 70, 85)[second % 3]))
    assert job.detector._step_rate.lost_share < 0.1
    assert job.seconds_of(STARVING, confirmed=True) == []


def test_starvation_that_costs_steps_is_confirmed() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    job.step_seconds = 8
    fed_unevenly(job, 560.0, 120)
    assert job.finding(STARVING).confirmed


def test_scatter_at_the_floor_with_a_stalled_counter_is_a_hang_after_the_ordinary_limit() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    job.play(45, Activity(190, 50))
    assert job.finding(HUNG).confirmed
    assert job.alerts == {"JobHung"}


def test_starvation_that_was_proved_once_stays_proved_while_it_is_reported() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    job.step_seconds = 8
    fed_unevenly(job, 560.0, 120)
    began = job.now
    job.step_seconds = 5
    fed_unevenly(job, 560.0, 60)
    assert len(job.seconds_of(STARVING, confirmed=True)) >= 60
    assert [at for at in job.seconds_of(STARVING, confirmed=False) if at > began] == []


# Where no counter can tell.


def test_two_groups_at_the_floor_without_a_counter_are_suspected_after_five_minutes() -> None:
    job = Job(progress=None)
    job.play(60, COMPUTE)
    job.play(280, SPIN, {2: PAUSE, 5: PAUSE})
    assert job.alerts == set()
    job.play(40, SPIN, {2: PAUSE, 5: PAUSE})
    assert not job.finding(HUNG).confirmed


def test_rank_0_alone_low_without_a_counter_is_suspected_after_ten_minutes_and_a_hang_after_thirty() -> None:
    job = Job(progress=None)
    job.play(60, COMPUTE)
    began = job.now
    job.play(1850, SPIN, {0: PAUSE})
    assert 600 <= job.seconds_of(HUNG)[0] - began <= 610
    assert 1800 <= job.seconds_of(HUNG, confirmed=True)[0] - began <= 1810


def test_memory_given_back_tells_no_crash_where_neither_processes_nor_a_counter_can_be_read() -> None:
    """A recording of GPUs alone: a run ends."""
    job = Job(progress=None)
    line = job._line
    job._line = lambda *a: replace(line(*a), processes=None)  # type: ignore[method-assign]  # a node without a list
    job.play(60, COMPUTE)
    job.play(60, KILLED)
    assert job.alerts == set()


def test_gpus_whose_kernels_end_are_no_proved_hang_where_no_counter_tells() -> None:
    """A poor link from some moment on: 97 % at the upper end of what spinning draws."""
    job = Job(progress=None)
    job.play(60, COMPUTE)
    job.play(900, Activity(225, 97))
    assert job.seconds_of(HUNG, confirmed=True) == []
    spins = Job(progress=None)
    spins.play(60, COMPUTE)
    spins.play(900, Activity(225, 100))
    assert spins.seconds_of(HUNG, confirmed=True) != []


def test_a_low_rank_that_seems_to_copy_is_a_proved_hang_after_three_times_what_a_save_may_take() -> None:
    job = Job(progress=None)
    job.play(60, COMPUTE)
    began = job.now
    job.play(2000, SPIN, {3: replace(IN_BARRIER, utilization=4)})
    (first, *_) = job.seconds_of(HUNG, confirmed=True)
    assert 1800 <= first - began <= 1830
    assert [suspect.rank for suspect in job.finding(HUNG).suspects] == [3]
