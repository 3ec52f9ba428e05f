"""What earlier saves teach, what the run before left behind, and saves that no GPU waits for."""

from __future__ import annotations

import pytest

from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMPUTE,
    IN_BARRIER,
    KILLED,
    LOAD,
    PAUSE,
    SAVE,
    SPIN,
    Job,
    checkpoint,
)
from wattwatch.watcher.detection.model import AlertName, Severity

STALLED = AlertName.CHECKPOINT_STALLED
HUNG = AlertName.JOB_HUNG


def torn_and_restarted() -> Job:
    """Killed in its save, and started again; the torn checkpoint stays. `age` counts on by itself below."""
    job = Job()
    job.play(60, COMPUTE)
    for second in range(10):
        job.entries = (checkpoint(1010, complete=False, gigabytes=10 + second),)
        job.play(1, AWAIT_SAVE, {0: SAVE})
    job.play(5, KILLED)
    job.first_pid, job.started, job.step, job.restart = 6000, 1100.0, 1000, 1
    job.play(30, LOAD)
    return job


def with_torn(job: Job, seconds: int) -> None:
    for second in range(seconds):
        job.entries = (checkpoint(1010, complete=False, gigabytes=19, age_seconds=35.0 + second),)
        job.play(1, COMPUTE)


def test_a_torn_checkpoint_is_no_save_of_the_run_that_follows() -> None:
    job = torn_and_restarted()
    with_torn(job, 1500)
    assert STALLED.value not in job.alerts


def test_a_torn_checkpoint_does_not_hide_a_deadlock_of_the_run_that_follows() -> None:
    job = torn_and_restarted()
    with_torn(job, 60)
    job.play(40, SPIN, {3: IN_BARRIER})
    assert job.finding(HUNG).confirmed


@pytest.mark.parametrize("progress", ["log", "heartbeat", None])
def test_a_flicker_of_rank_0_does_not_teach_that_saves_are_short(progress: str | None) -> None:
    job = Job(nodes=2, progress=progress)
    job.play(60, COMPUTE)
    job.play(1, SPIN, {0: PAUSE})
    job.play(60, COMPUTE)
    job.play(394, SPIN, {0: PAUSE})
    job.play(60, COMPUTE)
    assert job.alerts == set()


def test_a_hang_in_a_save_does_not_teach_that_saves_are_long() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    job.play(1200, SPIN, {0: PAUSE})
    job.play(5, KILLED)
    job.first_pid, job.started, job.step = 6000, 1100.0, 990
    job.play(100, COMPUTE)
    began = job.now
    job.play(700, SPIN, {0: PAUSE})
    confirmed = [at for at in job.seconds_of(HUNG, confirmed=True) if at > began]
    assert 600 <= confirmed[0] - began <= 640


def test_a_stalled_save_that_ended_all_the_same_does_not_delay_the_report_of_the_next() -> None:
    job = Job()
    for _ in range(3):
        job.play(60, COMPUTE)
        job.play(40, AWAIT_SAVE, {0: SAVE})
    job.play(60, COMPUTE)
    for _ in range(2):
        began = job.now
        job.play(500, AWAIT_SAVE, {0: SAVE})
        said = [at - began for at in job.seconds_of(STALLED) if at > began]
        assert 120 <= said[0] <= 130
        job.play(60, COMPUTE)


def test_an_upload_in_bursts_under_which_steps_go_on_is_never_stalled() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    for second in range(900):
        if second % 45 == 0:
            job.entries = (checkpoint(1010, complete=False, gigabytes=1 + second),)
        job.play(1, COMPUTE)
    job.entries = (checkpoint(1010, complete=True, gigabytes=901),)
    job.play(60, COMPUTE)
    assert job.alerts == set()


def test_an_upload_that_gets_stuck_while_steps_go_on_is_a_warning_and_costs_no_gpu() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    for second in range(800):
        job.entries = (checkpoint(1010, complete=False, gigabytes=min(1 + second, 30)),)
        job.play(1, COMPUTE)
    stalled = job.finding(STALLED)
    assert (stalled.confirmed, stalled.severity, stalled.gpus_idle) == (False, Severity.WARNING, 0)


def test_a_deadlock_under_an_upload_in_the_background_is_suspected_on_the_second_round() -> None:
    job = Job(progress="log")
    job.play(60, COMPUTE)
    for second in range(60):
        job.entries = (checkpoint(1010, complete=False, gigabytes=1 + second),)
        job.play(1, COMPUTE)
    began = job.now
    for second in range(40):
        job.entries = (checkpoint(1010, complete=False, gigabytes=61 + second),)
        job.play(1, SPIN, {3: IN_BARRIER})
    assert job.seconds_of(HUNG)[0] <= began + 3
    assert job.finding(HUNG).confirmed
