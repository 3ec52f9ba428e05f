"""A job that is done: the last step, the last checkpoint, the processes leave. No crash on the way."""

from __future__ import annotations

from tests.watcher.judge.scenes import AWAIT_SAVE, COMPUTE, ENDED, IN_BARRIER, KILLED, SAVE, Job, checkpoint
from watcher.judge.finding import AlertName, JobState

GONE = KILLED
COMPLETED = AlertName.JOB_COMPLETED


def at_the_end(*, total: bool = True, progress: str = "heartbeat") -> Job:
    job = Job(gpus=4, step=3850, total_steps=3857 if total else None, progress=progress)
    job.play(40, COMPUTE)
    job.step = 3857
    job.entries = (checkpoint(3000, complete=True, age_seconds=4000),)
    return job


def save(job: Job, seconds: int) -> None:
    for second in range(seconds):
        job.entries = (job.entries[0], checkpoint(3857, complete=False, gigabytes=1.0 + second))
        job.play(1, AWAIT_SAVE, {0: SAVE})
    job.entries = (job.entries[0], checkpoint(3857, complete=True))


def test_last_step_final_checkpoint_processes_leave() -> None:
    job = at_the_end()
    save(job, 24)
    job.play(30, ENDED)
    done = job.finding(COMPLETED)
    assert job.alerts == {"JobCompleted"}
    assert job.state is JobState.COMPLETED
    assert any("step-3857 is complete" in line for line in done.evidence)


def test_ranks_that_leave_one_after_the_other_are_no_crash() -> None:
    job = at_the_end()
    save(job, 10)
    for left in range(1, 4):
        job.play(5, IN_BARRIER, dict.fromkeys(range(left), ENDED))
    job.play(10, ENDED)
    assert job.alerts == {"JobCompleted"}


def test_a_foreign_job_without_a_known_last_step_is_done_when_its_newest_checkpoint_is_of_its_last_step() -> None:
    job = at_the_end(total=False, progress="log")
    save(job, 20)
    job.play(10, GONE)
    assert job.alerts == {"JobCompleted"}


def test_processes_gone_far_from_the_end_and_no_checkpoint_are_a_crash() -> None:
    job = at_the_end(total=False, progress="log")
    job.play(40, GONE)
    assert job.alerts == {"JobCrashed"}


def test_processes_gone_in_the_middle_of_the_last_save_are_a_crash() -> None:
    job = at_the_end(progress="log")
    save(job, 10)
    job.entries = (job.entries[0], checkpoint(3857, complete=False, gigabytes=9.0))
    job.play(120, GONE)
    assert "JobCrashed" in job.alerts
    assert "JobCompleted" not in job.alerts


def test_a_job_that_is_started_anew_is_no_longer_complete() -> None:
    job = at_the_end()
    save(job, 10)
    job.play(10, ENDED)
    job.first_pid, job.started, job.step, job.restart = 9000, 900.0, 0, 1
    job.play(60, COMPUTE)
    assert job.findings == ()
