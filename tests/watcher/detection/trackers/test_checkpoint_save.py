"""Checkpoints: a slow save is not a stalled one, and the limit is the job's own."""

from __future__ import annotations

from dataclasses import replace

from tests.watcher.detection.simulated_seconds import AWAIT_SAVE, COMPUTE, KILLED, LOAD, SAVE, SPIN, Job, checkpoint
from wattwatch.watcher.detection.model import AlertName, JobState

STALLED = AlertName.CHECKPOINT_STALLED


def training(**settings: object) -> Job:
    job = Job(**settings)  # type: ignore[arg-type]  # handed through
    job.play(40, COMPUTE)
    return job


def save(job: Job, seconds: int, *, grows: bool = True, step: int = 1010) -> None:
    older = tuple(entry for entry in job.entries if entry.complete)
    for second in range(seconds):
        size = 1.0 + second if grows else 1.0
        job.entries = (*older, checkpoint(step, complete=False, gigabytes=size, age_seconds=0 if grows else second))
        job.play(1, AWAIT_SAVE, {0: SAVE})


def end_save(job: Job, step: int = 1010) -> None:
    older = tuple(entry for entry in job.entries if entry.complete)
    job.entries = (*older, checkpoint(step, complete=True))
    job.play(40, COMPUTE)


def test_files_that_grow_are_a_slow_save_however_long_it_takes() -> None:
    job = training()
    save(job, 900)
    assert job.alerts == set()
    assert job.state is JobState.CHECKPOINTING


def test_files_that_do_not_grow_are_stalled_after_ten_minutes_where_no_save_was_seen_before() -> None:
    job = training()
    save(job, 590, grows=False)
    assert job.alerts == set()
    save(job, 30, grows=False)
    # The same seconds were played twice over, so the age in the listing starts again; the save does not.
    stalled = job.finding(STALLED)
    assert any("nothing written for" in line for line in stalled.evidence)
    assert "JobHung" not in {f.alert.value for f in job.findings}


def test_the_limit_is_learned_from_the_slowest_of_three_saves() -> None:
    job = training()
    for step in (1010, 1020, 1030):
        save(job, 60, step=step)
        end_save(job, step)
    began = job.now
    save(job, 260, grows=False, step=1040)
    first = job.seconds_of(STALLED)[0]
    assert 175 <= first - began <= 190


def test_a_leftover_of_an_earlier_run_is_no_save() -> None:
    job = Job()
    job.entries = (
        checkpoint(900, complete=False, age_seconds=86_400),
        checkpoint(950, complete=True, age_seconds=9000),
    )
    job.play(700, COMPUTE)
    assert job.alerts == set()
    assert job.state is JobState.COMPUTING


def test_a_torn_checkpoint_of_the_run_before_does_not_hide_a_hang() -> None:
    """The job was killed in its save and started again within minutes: the torn directory stays, and nobody writes."""
    job = Job()
    job.entries = (checkpoint(990, complete=False, age_seconds=200),)
    for second in range(120):
        job.entries = (checkpoint(990, complete=False, age_seconds=200 + second),)
        job.play(1, COMPUTE)
    assert job.state is JobState.COMPUTING


def test_the_next_checkpoint_starts_its_own_count() -> None:
    job = training()
    save(job, 50)
    older = (checkpoint(1010, complete=True),)
    job.entries = older
    save(job, 20, step=1020)
    assert job.detector._saves.save is not None
    assert job.alerts == set()


def test_a_save_that_ended_lets_steps_continue_without_a_finding() -> None:
    job = training()
    for step in (1010, 1020, 1030):
        save(job, 120, step=step)
        end_save(job, step)
    assert job.alerts == set()


def test_no_complete_checkpoint_for_twice_the_interval_is_overdue() -> None:
    job = training(checkpoint_every_seconds=600.0)
    job.entries = (checkpoint(1000, complete=True, age_seconds=1100),)
    job.play(5, COMPUTE)
    assert job.alerts == set()
    job.entries = (checkpoint(1000, complete=True, age_seconds=1300),)
    job.play(5, COMPUTE)
    assert job.finding(AlertName.CHECKPOINT_OVERDUE)


def test_the_newest_checkpoint_is_reported_by_its_age_where_names_tell_no_step() -> None:
    job = training(checkpoint_every_seconds=600.0)
    older, newer = checkpoint(0, complete=True, age_seconds=9000), checkpoint(1, complete=True, age_seconds=60)
    job.entries = (replace(older, step=None, name="first"), replace(newer, step=None, name="second"))
    job.play(5, COMPUTE)
    assert job.alerts == set()


def test_a_checkpoint_of_an_earlier_run_that_came_further_is_not_the_newest() -> None:
    job = training(checkpoint_every_seconds=600.0)
    job.entries = (checkpoint(9000, complete=True, age_seconds=90_000), checkpoint(1000, complete=True, age_seconds=60))
    job.play(5, COMPUTE)
    assert job.alerts == set()


def test_a_run_that_starts_from_yesterdays_checkpoint_owes_none_yet() -> None:
    job = Job(checkpoint_every_seconds=600.0)
    job.entries = (checkpoint(1000, complete=True, age_seconds=72_000),)
    job.play(30, LOAD)
    job.play(1100, COMPUTE)
    assert job.alerts == set()
    job.play(200, COMPUTE)
    assert job.finding(AlertName.CHECKPOINT_OVERDUE)


def test_gpus_that_wait_for_a_job_owe_no_checkpoint() -> None:
    job = Job(progress="log", checkpoint_every_seconds=600.0)
    job.entries = (checkpoint(1000, complete=True, age_seconds=72_000),)
    job.play(60, KILLED)
    assert job.alerts == set()


def test_a_checkpoint_is_overdue_also_where_there_never_was_one() -> None:
    job = Job(progress="log", checkpoint_every_seconds=600.0)
    job.play(1100, COMPUTE)
    assert job.alerts == set()
    job.play(200, COMPUTE)
    assert (
        job.finding(AlertName.CHECKPOINT_OVERDUE).evidence[0].startswith("no complete checkpoint of this run was seen")
    )


def test_a_checkpoint_that_may_be_complete_is_not_overdue() -> None:
    job = training(checkpoint_every_seconds=600.0)
    old = checkpoint(1000, complete=True, age_seconds=1300)
    job.entries = (old, checkpoint(2000, complete=None, age_seconds=300))
    job.play(5, COMPUTE)
    assert job.alerts == set()
    job.entries = (old, checkpoint(2000, complete=None, age_seconds=1400))
    job.play(5, COMPUTE)
    assert job.finding(AlertName.CHECKPOINT_OVERDUE)


def test_a_job_that_hangs_owes_no_checkpoint() -> None:
    job = training(checkpoint_every_seconds=600.0)
    job.play(2000, SPIN)
    assert job.alerts == {"JobHung"}
