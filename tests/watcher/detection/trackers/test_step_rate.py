"""How long may the counter stand: the job's own pace says it."""

from __future__ import annotations

from tests.watcher.detection.simulated_seconds import AWAIT_SAVE, COMPUTE, EVALUATE, LOAD, SAVE, SPIN, Job
from wattwatch.watcher.detection.model import AlertName

HUNG = AlertName.JOB_HUNG


def late(job: Job) -> float:
    """Seconds from now until a hang with all GPUs spinning is confirmed."""
    began = job.now
    job.play(1000, SPIN)
    confirmed = job.seconds_of(HUNG, confirmed=True)
    return confirmed[0] - began if confirmed else float("inf")


def test_quick_steps_get_the_least_limit() -> None:
    job = Job(nodes=1)
    job.play(60, COMPUTE)
    assert 30 <= late(job) <= 36


def test_a_log_that_speaks_each_minute_gets_six_minutes() -> None:
    job = Job(nodes=1, progress="log")
    job.step_seconds = 60
    job.play(400, COMPUTE)
    assert 300 <= late(job) <= 366


def test_a_save_teaches_nothing_about_steps() -> None:
    job = Job(nodes=1)
    job.play(60, COMPUTE)
    job.play(118, AWAIT_SAVE, {0: SAVE})
    job.play(60, COMPUTE)
    assert late(job) <= 36


def test_an_evaluation_teaches_nothing_about_steps() -> None:
    job = Job(nodes=1)
    job.play(60, COMPUTE)
    job.play(200, EVALUATE)
    job.play(60, COMPUTE)
    assert late(job) <= 36


def test_the_limit_of_the_configuration_wins() -> None:
    job = Job(nodes=1, stall_limit_seconds=100.0)
    job.play(60, COMPUTE)
    assert 99 <= late(job) <= 106


def test_a_counter_that_goes_back_is_a_restart_and_clears_what_was_wrong() -> None:
    job = Job(nodes=1)
    job.play(60, COMPUTE)
    job.play(60, SPIN)
    assert job.finding(HUNG).confirmed
    job.step, job.restart, job.first_pid, job.started = 900, 1, 7000, 2000.0
    job.play(1, LOAD)
    assert job.findings == ()
    job.play(300, LOAD)
    job.play(60, COMPUTE)
    assert job.seconds_of(HUNG)[-1] < 1130


def test_a_source_that_is_lost_is_no_restart() -> None:
    job = Job(nodes=2)
    job.play(60, COMPUTE)
    job.play(30, COMPUTE, silent=["node-2"])
    job.play(30, COMPUTE)
    assert HUNG.value not in job.alerts
    assert late(job) <= 36


def test_a_pause_of_the_watcher_itself_is_no_stall() -> None:
    job = Job(nodes=1)
    job.play(60, COMPUTE)
    job.skip(900)
    job.play(20, COMPUTE)
    assert job.alerts == set()
