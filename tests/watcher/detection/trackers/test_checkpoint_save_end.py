"""The moments after a save's files are complete, in which ranks still wait."""

from __future__ import annotations

from dataclasses import replace

from tests.watcher.detection.simulated_seconds import COMPUTE, IN_BARRIER, SPIN, Job, checkpoint
from wattwatch.watcher.detection.model import AlertName


def save(job: Job, seconds: int, after_seconds: int) -> None:
    """Known by its files alone: the job is read from its log."""
    rank_0 = {0: replace(IN_BARRIER, phase="")}
    for second in range(seconds):
        job.entries = (checkpoint(job.step, complete=False, gigabytes=second / 10),)
        job.play(1, SPIN, rank_0)
    job.entries = (checkpoint(job.step, complete=True, gigabytes=seconds / 10),)
    job.play(after_seconds, SPIN, rank_0)


def test_a_long_save_that_has_just_got_complete_is_no_hang() -> None:
    """Longer than three times the slowest one before: its files grew all the time."""
    job = Job(nodes=1, progress="log")
    job.play(60, COMPUTE)
    for _ in range(3):
        save(job, 60, 0)
        job.play(60, COMPUTE)
    save(job, 400, 14)
    job.play(60, COMPUTE)
    assert job.alerts == set()


def test_a_rank_that_never_comes_back_from_a_complete_save_is_a_hang() -> None:
    job = Job(nodes=1, progress="log")
    job.play(60, COMPUTE)
    for _ in range(3):
        save(job, 60, 0)
        job.play(60, COMPUTE)
    save(job, 400, 120)
    assert job.finding(AlertName.JOB_HUNG).confirmed
