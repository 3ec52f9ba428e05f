"""A job that is done: the last step, the last checkpoint, the processes leave. No crash on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMPUTE,
    ENDED,
    IN_BARRIER,
    KILLED,
    PAUSE,
    SAVE,
    SPIN,
    Activity,
    Job,
    checkpoint,
)
from wattwatch.collectors.samples import KernelEvent, NodeSample, ProcessSample
from wattwatch.watcher.detection.model import AlertName, JobState, Severity

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


def leaving_one_by_one(seconds_between: int) -> Job:
    job = Job(progress="log", step=95, total_steps=100)
    job.play(25, COMPUTE)
    for left in range(1, 8):
        job.play(seconds_between, SPIN, dict.fromkeys(range(8 - left, 8), KILLED))
    job.play(20, KILLED)
    return job


def test_ranks_that_leave_within_minutes_after_the_last_step_are_no_crash() -> None:
    assert leaving_one_by_one(30).alerts == {"JobCompleted"}


@pytest.mark.parametrize("ranks", [{0: PAUSE}, dict.fromkeys(range(8), PAUSE)])
def test_a_long_save_or_upload_after_the_last_step_is_no_hang(ranks: dict[int, Activity]) -> None:
    job = Job(progress="log", step=95, total_steps=100)
    job.play(25, COMPUTE)
    job.play(90, SPIN, ranks)
    job.play(20, KILLED)
    assert job.seconds_of(AlertName.JOB_HUNG, confirmed=True) == []
    assert [finding.alert for finding in job.findings] == [COMPLETED]


def test_steps_counted_from_zero_end_one_before_the_total() -> None:
    job = Job(progress="log", step=95, total_steps=101)
    job.play(25, COMPUTE)
    job.play(20, SPIN, {0: PAUSE})
    job.entries = (checkpoint(100, complete=True),)
    job.play(60, KILLED)
    assert job.alerts == {"JobCompleted"}


def test_a_kill_at_the_step_of_the_newest_checkpoint_is_a_crash() -> None:
    job = Job(progress="log", step=1000, total_steps=None)
    job.play(40, COMPUTE)
    job.entries = (checkpoint(job.step, complete=True),)
    job.kernel["node-1"] = [KernelEvent("oom", "Out of memory: Killed process 4005 (python3)", 1.0, pid=4005)]
    job.play(60, KILLED)
    assert job.alerts == {"JobCrashed"}


def test_without_a_counter_everybody_leaves_after_a_checkpoint_is_complete() -> None:
    job = Job(progress=None)
    job.play(300, COMPUTE)
    job.entries = (checkpoint(500, complete=True),)
    job.play(5, COMPUTE)
    job.play(60, KILLED)
    assert job.alerts == {"JobCompleted"}
    old = Job(progress=None)
    old.entries = (checkpoint(500, complete=True, age_seconds=400.0),)
    old.play(300, COMPUTE)
    old.play(60, KILLED)
    assert old.alerts == {"JobCrashed"}


class Unlisted(Job):
    """The fallback probe lists no processes."""

    def _line(self, place: int, node: str, activity: Activity, ranks: Mapping[int, Activity]) -> NodeSample:
        return replace(super()._line(place, node, activity, ranks), processes=None)


def test_where_no_process_can_be_listed_the_memory_of_all_gpus_tells_the_end() -> None:
    for total in (100, None):
        job = Unlisted(progress="log", step=95, total_steps=total)
        job.play(40, COMPUTE)
        job.entries = (checkpoint(job.step, complete=True),)
        job.play(300, replace(ENDED, phase="train"))
        assert job.alerts == {"JobCompleted"}, total
        job.step = 0
        job.play(100, COMPUTE)
        assert job.findings == ()
    job = Unlisted(progress="log")
    job.play(40, COMPUTE)
    job.play(300, KILLED)
    assert job.alerts == {"JobCrashed"}
    job.play(100, COMPUTE)
    assert job.findings == ()


def test_memory_that_is_kept_is_no_end_where_no_process_can_be_listed() -> None:
    job = Unlisted(nodes=2, progress="log")
    job.play(40, COMPUTE)
    job.play(100, PAUSE, dict.fromkeys(range(8), KILLED))
    assert job.alerts == {"JobHung"}


@pytest.mark.parametrize("progress", ["log", "heartbeat", None])
def test_a_small_test_on_waiting_gpus_is_no_crash(progress: str | None) -> None:
    job = Before(progress=progress)
    idle = replace(KILLED, phase="load")
    job.play(60, idle)
    job.visitor = ProcessSample(99, "nccl-tests", "R", 500.0, None, tuple(range(8)))
    job.play(60, replace(COMPUTE, held_bytes=9e7, process=False, steps=False))
    job.visitor = None
    job.play(60, idle)
    assert job.alerts == set()


def test_a_large_process_that_leaves_before_the_first_step_is_reported_as_a_doubt() -> None:
    job = Before(progress="log")
    job.visitor = ProcessSample(99, "python3", "R", 500.0, None, tuple(range(8)))
    job.play(60, replace(COMPUTE, process=False, steps=False))
    job.visitor = None
    job.play(60, KILLED)
    (crash,) = job.findings
    assert (crash.alert, crash.confirmed, crash.severity) == (AlertName.JOB_CRASHED, False, Severity.WARNING)


class Before(Job):
    """No file of the job is there yet."""

    visitor: ProcessSample | None = None

    def _line(self, place: int, node: str, activity: Activity, ranks: Mapping[int, Activity]) -> NodeSample:
        line = super()._line(place, node, activity, ranks)
        return replace(line, progress=(), processes=() if self.visitor is None else (self.visitor,))
