"""The job's own pace, learned from its counter; and from when on it stands too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import COMPUTE, IN_BARRIER, SPIN, Activity, Job
from wattwatch.collectors.samples import HostStatus, ReadingStatus
from wattwatch.watcher.detection.model import AlertName

HUNG = AlertName.JOB_HUNG
AT_WORK_WITHOUT_STEPS = Activity(985, 99)


def hang_seconds(job: Job, seconds: int) -> float:
    """How long after the last step the hang was confirmed."""
    stood = job.now - job.since_step
    job.play(seconds, SPIN)
    return job.seconds_of(HUNG, confirmed=True)[0] - stood


def seconds_until_confirmed(job: Job) -> float:
    """How long after the last step the next hang is confirmed."""
    last_step, began = job.now - job.since_step, job.now
    job.play(300, SPIN)
    return next(at for at in job.seconds_of(HUNG, confirmed=True) if at > began) - last_step


@pytest.mark.parametrize(
    ("step_seconds", "limit"),
    [(1, 30), (5, 30), (10, 60), (50, 300), (400, 900)],
)
def test_the_limit_is_six_usual_intervals_within_a_floor_and_a_ceiling(step_seconds: int, limit: int) -> None:
    job = Job(progress="log")
    job.step_seconds = step_seconds
    job.play(step_seconds * 5 + 20, COMPUTE)
    assert limit < hang_seconds(job, limit + 40) <= limit + 5


def test_a_watcher_that_slept_learns_no_slow_step() -> None:
    job = Job()
    job.play(40, COMPUTE)
    for _ in range(4):
        job.skip(600)
        job.step += 100
        job.play(20, COMPUTE)
    assert hang_seconds(job, 80) <= 40


def test_a_source_that_disappears_and_comes_back_is_neither_a_hang_nor_a_restart() -> None:
    job = Job(nodes=2, progress="log")
    job.play(40, COMPUTE)
    job.status["node-1"] = (HostStatus.OK, "")
    job.progress = None
    job.play(200, COMPUTE)
    job.progress = "log"
    job.play(40, COMPUTE)
    assert job.alerts == set()
    assert hang_seconds(job, 80) <= 40


def test_a_step_that_goes_back_is_a_restart_and_the_first_step_after_it_has_time() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    job.step = 500
    job.play(300, AT_WORK_WITHOUT_STEPS)
    assert job.alerts == set()


def test_a_slower_job_gets_a_longer_limit_once_it_is_seen_to_be_slower() -> None:
    job = Job()
    job.play(60, COMPUTE)
    job.step_seconds = 20
    job.play(200, COMPUTE)
    assert job.alerts == set()
    assert hang_seconds(job, 200) > 100


@pytest.mark.parametrize("progress", ["heartbeat", "log"])
@pytest.mark.parametrize("step_seconds", [1, 5])
@pytest.mark.parametrize("rank_3", [SPIN, IN_BARRIER])
def test_a_hang_that_ended_by_itself_does_not_delay_the_next_one(
    progress: str, step_seconds: int, rank_3: Activity
) -> None:
    job = Job(progress=progress)
    job.step_seconds = step_seconds
    job.play(60, COMPUTE)
    for _ in range(2):
        job.play(76, SPIN, {3: rank_3})
        assert job.finding(HUNG).confirmed
        job.play(60, COMPUTE)
        assert job.findings == ()
    began = job.now
    job.play(36, SPIN, {3: rank_3})
    said = [at - began for at in job.seconds_of(HUNG) if at > began]
    assert said[0] <= 3.0  # suspected at once, too
    assert job.finding(HUNG).confirmed


def test_a_pause_that_comes_again_and_again_is_a_habit_of_the_job() -> None:
    """An evaluation that nothing announces. It may last half as long again, not six times as long."""
    job = Job(progress="log")
    job.step_seconds = 1
    for _ in range(4):
        job.play(60, COMPUTE)
        job.play(76, SPIN)
    confirmed = job.seconds_of(HUNG, confirmed=True)
    assert [sum(60 + 136 * n < at - 1000 <= 136 * (n + 1) for at in confirmed) > 0 for n in range(4)] == [
        True, True, True, False,
    ]  # fmt: skip
    job.play(60, COMPUTE)
    assert 114 <= seconds_until_confirmed(job) <= 118


def test_a_job_that_becomes_much_slower_gets_its_new_limit_after_three_steps() -> None:
    job = Job()
    job.step_seconds = 1
    job.play(60, COMPUTE)
    job.step_seconds = 40
    light = replace(COMPUTE, watts=191)  # at the power of waiting
    job.play(40 * 3 + 5, light)
    assert job.seconds_of(HUNG, confirmed=True) != []
    began = job.now
    job.play(400, light)
    assert [at for at in job.seconds_of(HUNG, confirmed=True) if at > began] == []
    assert 240 <= seconds_until_confirmed(job) <= 245


def test_a_log_line_each_tenth_step_is_no_loss_of_step_rate() -> None:
    job = Job(progress="log")
    for _ in range(12):
        job.play(49, AT_WORK_WITHOUT_STEPS)
        job.step += 10
        job.since_step = 0
        job.play(1, AT_WORK_WITHOUT_STEPS)
    assert job.detector._step_rate.lost_share < 0.05


def test_gpus_whose_power_or_utilization_say_nothing_have_the_time_of_an_evaluation() -> None:
    """A T4 has no room between rest and work; a sliced GPU tells no utilization."""
    sliced = Activity(900, None, steps=True, reasons={"utilization_percent": ReadingStatus.MIG})
    for name, works in (("Tesla T4", Activity(45, 100, steps=True)), ("NVIDIA B300 SXM6 AC", sliced)):
        job = Job(progress="log", name=name)
        job.play(60, works)
        job.play(100, replace(works, steps=False))
        job.play(120, works)  # until the long pause is no recent step any more
        assert job.alerts == set(), name
        job = Job(progress="log", name=name)
        job.play(60, works)
        job.play(700, replace(works, steps=False))
        assert job.finding(HUNG).confirmed, name
