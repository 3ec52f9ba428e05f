"""A job that its scheduler or somebody ends, as its log says: that is no crash."""

from __future__ import annotations

from tests.watcher.detection.simulated_seconds import COMPUTE, KILLED, SPIN, Job
from wattwatch.collectors.samples import KernelEvent
from wattwatch.watcher.detection.model import AlertName, JobState, Severity

PREEMPTED = "preempted: slurmstepd: error: *** JOB 12 ON n CANCELLED AT 2026-03-05T10:35:06 DUE TO PREEMPTION ***"


def at_work() -> Job:
    job = Job(gpus=4, progress="log", total_steps=3857)
    job.play(60, COMPUTE)
    return job


def test_a_preempted_job_is_reported_as_information_with_its_line_and_step() -> None:
    job = at_work()
    job.stopped = PREEMPTED
    job.play(3, COMPUTE)
    job.play(30, KILLED)
    done = job.finding(AlertName.JOB_COMPLETED)
    assert job.alerts == {"JobCompleted"}
    assert done.severity is Severity.INFO
    assert done.summary == f"pretrain was preempted at step {job.step:,}, before it finished."
    assert any("DUE TO PREEMPTION" in words for words in done.evidence)
    assert job.state is JobState.COMPLETED


def test_ranks_that_leave_one_after_the_other_are_waited_for() -> None:
    job = at_work()
    job.stopped = PREEMPTED
    for left in range(1, 4):
        job.play(10, SPIN, dict.fromkeys(range(left), KILLED))
    job.play(10, KILLED)
    assert AlertName.JOB_CRASHED not in job.alerts
    assert job.state is JobState.COMPLETED


def test_without_the_line_it_is_a_crash() -> None:
    job = at_work()
    job.play(30, KILLED)
    assert "JobCrashed" in job.alerts


def test_what_the_kernel_says_outweighs_the_line() -> None:
    job = at_work()
    job.stopped = PREEMPTED
    killed = KernelEvent("oom", "Out of memory: Killed process 4002 (python3)", 0.5, pid=4002, process="python3")
    job.kernel["node-1"] = [killed]
    job.play(30, KILLED)
    assert "JobCrashed" in job.alerts


def test_a_line_of_the_run_before_excuses_no_crash() -> None:
    job = Job(gpus=4, progress="log", total_steps=3857)
    job.stopped = PREEMPTED
    job.play(60, COMPUTE)
    job.play(30, KILLED)
    assert "JobCrashed" in job.alerts


def test_it_stays_reported_while_the_log_is_unreadable_and_ends_when_the_job_comes_back() -> None:
    job = at_work()
    job.stopped = PREEMPTED
    job.play(2, COMPUTE)
    job.play(30, KILLED)
    job.stopped = None
    job.play(10, KILLED)
    assert job.state is JobState.COMPLETED
    job.first_pid, job.started = 9000, job.now
    job.play(30, COMPUTE)
    assert job.observed[-1].findings == ()
