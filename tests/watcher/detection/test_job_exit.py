"""What looks like the end of a job and is none, or another one than it seems."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMPUTE,
    ENDED,
    KILLED,
    SAVE,
    SPIN,
    Activity,
    Job,
    checkpoint,
)
from wattwatch.collectors.samples import HostStatus, KernelEvent, NodeSample, ProcessSample
from wattwatch.watcher.detection.model import AlertName, JobState
from wattwatch.watcher.detection.trackers.processes import ProcessTracker

CRASHED, COMPLETED = AlertName.JOB_CRASHED, AlertName.JOB_COMPLETED
SOURCES = ["heartbeat", "log", None]


class Changed(Job):
    """A job of which each line may be changed before it is read."""

    change: Callable[[NodeSample], NodeSample] | None = None

    def _line(self, place: int, node: str, activity: Activity, ranks: Mapping[int, Activity]) -> NodeSample:
        line = super()._line(place, node, activity, ranks)
        return line if self.change is None else self.change(line)


def playing(progress: str | None = "heartbeat") -> Changed:
    job = Changed(nodes=2, progress=progress)
    job.play(40, COMPUTE)
    return job


@pytest.mark.parametrize("progress", SOURCES)
def test_a_killed_rank_is_a_crash_on_the_second_sample_and_no_hang(progress: str | None) -> None:
    job = playing(progress)
    job.kernel["node-1"] = [KernelEvent("oom", "Out of memory: Killed process 4005 (python3)", 0.5, pid=4005)]
    job.play(90, SPIN, {5: KILLED})
    crash = job.finding(CRASHED)
    assert job.seconds_of(CRASHED)[0] == 1000 + 40 + 2
    assert [str(s) for s in crash.suspects] == (
        ["rank 5 on node-1 GPU 5"] if progress == "heartbeat" else ["node-1 GPU 5"]
    )
    assert any("out of memory" in words.lower() for words in crash.evidence)
    assert job.alerts == {"JobCrashed"}
    assert job.state is JobState.CRASHED


@pytest.mark.parametrize("progress", SOURCES)
def test_all_processes_gone_before_the_last_step_is_a_crash(progress: str | None) -> None:
    job = playing(progress)
    job.play(10, replace(KILLED, phase="train"))
    assert "none is left" in job.finding(CRASHED).evidence[0]


def test_a_process_whose_gpu_query_fails_is_still_alive() -> None:
    """Who holds a GPU is not known while the driver hangs: nobody has left because of that."""
    job = playing("log")
    job.status["node-2"] = (HostStatus.SAMPLER_TIMEOUT, "nvml has not answered for 6 s")
    job.change = lambda line: replace(line, processes=()) if line.node == "node-2" else line
    job.play(60, COMPUTE)
    assert job.alerts == {"ProbeBlind"}


def test_a_zombie_is_gone() -> None:
    job = playing("log")

    def not_reaped(line: NodeSample) -> NodeSample:
        dead = (replace(p, state="Z", gpu_indexes=()) if p.pid == 4005 else p for p in line.processes or ())
        return replace(line, processes=tuple(dead))

    job.change = not_reaped
    job.play(5, SPIN)
    assert [s.gpu for s in job.finding(CRASHED).suspects] == [5]


@pytest.mark.parametrize("progress", SOURCES)
def test_somebody_elses_test_on_a_gpu_comes_and_goes(progress: str | None) -> None:
    job = playing(progress)
    stranger = ProcessSample(999, "python3", "R", 700.0, None, (3,))
    job.play(10, COMPUTE)
    job.change = lambda line: replace(line, processes=(*(line.processes or ()), stranger))
    job.play(40, COMPUTE)
    job.change = None
    job.play(120, COMPUTE)
    assert job.alerts == set()


def test_steps_that_go_on_without_a_rank_end_the_crash() -> None:
    job = playing("log")
    job.play(10, COMPUTE, {15: KILLED})
    assert job.finding(CRASHED)
    job.play(60, COMPUTE, {15: KILLED})
    assert job.findings == ()


def test_a_foreign_job_is_complete_when_its_log_is_at_the_last_step() -> None:
    job = Job(nodes=1, progress="log", step=95, total_steps=100)
    job.play(30, COMPUTE)
    job.play(10, replace(ENDED, phase="train"))
    assert job.alerts == {"JobCompleted"}


def test_a_guessed_step_is_said_to_be_one_in_every_alert_that_rests_on_it() -> None:
    job = Job(nodes=1, progress="log", step=95, total_steps=100)
    job.guessed = True
    job.play(30, COMPUTE)
    job.play(10, replace(ENDED, phase="train"))
    assert re.fullmatch(
        r"last step \d+, guessed from a log of unknown format", job.finding(AlertName.JOB_COMPLETED).evidence[0]
    )
    job = playing("log")
    job.guessed = True
    job.play(30, COMPUTE)
    job.play(10, COMPUTE, {15: KILLED})
    assert any(line.endswith(", guessed from a log of unknown format") for line in job.finding(CRASHED).evidence)
    job = playing("log")
    job.guessed = True
    job.play(60, COMPUTE)
    job.play(120, SPIN)
    assert ", guessed from a log of unknown format); the limit is " in job.finding(AlertName.JOB_HUNG).evidence[0]


def test_a_crash_right_after_a_save_is_no_completion() -> None:
    job = Job(nodes=1, progress="log", step=498, total_steps=3857)
    job.play(14, COMPUTE)
    job.entries = (checkpoint(500, complete=True),)
    job.play(10, replace(ENDED, phase="train"))
    assert job.alerts == {"JobCrashed"}


def test_a_crash_in_the_final_save_is_no_completion() -> None:
    job = Job(nodes=1, step=3850, total_steps=3857)
    job.play(35, COMPUTE)
    job.entries = (checkpoint(3857, complete=False, gigabytes=20),)
    job.play(10, AWAIT_SAVE, {0: SAVE})
    job.play(60, replace(KILLED, phase="save"))
    assert job.alerts == {"JobCrashed"}


def test_a_mark_of_completion_that_is_listed_late_is_no_crash() -> None:
    job = Job(nodes=1, step=3850, total_steps=3857)
    job.play(35, COMPUTE)
    job.entries = (checkpoint(3857, complete=False),)
    job.play(10, AWAIT_SAVE, {0: SAVE})
    job.play(8, replace(KILLED, phase="save"))
    job.entries = (checkpoint(3857, complete=True),)
    job.play(30, replace(KILLED, phase="save"))
    assert job.alerts == {"JobCompleted"}


def test_ranks_that_leave_one_by_one_after_the_last_step_are_no_crash() -> None:
    job = Job(nodes=1, progress="log", step=95, total_steps=100)
    job.play(25, COMPUTE)
    for left in range(1, 8):
        job.play(5, SPIN, dict.fromkeys(range(8 - left, 8), KILLED))
    job.play(10, KILLED)
    assert job.alerts == {"JobCompleted"}


def test_before_any_process_was_seen_nothing_has_ended() -> None:
    job = Job(nodes=2, step=0)
    job.play(60, replace(ENDED, phase="load"))
    assert job.alerts == set()
    assert not ProcessTracker().all_exited


def test_a_strangers_process_on_a_dead_ranks_gpu_is_no_restart() -> None:
    job = playing("log")
    job.play(5, SPIN, {5: KILLED})
    stranger = ProcessSample(99, "jupyter", "S", 2000.0, None, (5,))
    job.change = lambda line: replace(line, processes=(*(line.processes or ()), stranger))
    job.play(120, SPIN, {5: KILLED})
    assert job.finding(CRASHED)
    assert job.alerts == {"JobCrashed"}


@pytest.mark.parametrize("boards", [(5,), tuple(range(8))])
def test_a_monitor_that_holds_the_gpus_all_along_hides_no_crash(boards: tuple[int, ...]) -> None:
    monitor = ProcessSample(99, "dcgm", "S", 20.0, None, boards)
    for dead in ({5: KILLED}, dict.fromkeys(range(16), KILLED)):
        job = Changed(nodes=2, progress="log")
        job.change = lambda line: replace(line, processes=(*(line.processes or ()), monitor))
        job.play(60, COMPUTE)
        job.play(60, SPIN, dead)
        assert job.finding(CRASHED)
        assert job.alerts == {"JobCrashed"}


def test_a_monitor_that_stays_keeps_no_job_from_being_complete() -> None:
    monitor = ProcessSample(99, "dcgm", "S", 20.0, None, tuple(range(8)))
    job = Changed(nodes=1, progress="log", step=95, total_steps=100)
    job.change = lambda line: replace(line, processes=(*(line.processes or ()), monitor))
    job.play(30, COMPUTE)
    job.play(200, replace(ENDED, phase="train"))
    assert job.alerts == {"JobCompleted"}


def test_a_monitor_that_is_restarted_is_no_crash() -> None:
    monitor = ProcessSample(99, "dcgm", "S", 20.0, None, tuple(range(8)))
    job = Changed(nodes=2, progress="log")
    job.change = lambda line: replace(line, processes=(*(line.processes or ()), monitor))
    job.play(60, COMPUTE)
    job.change = None
    job.play(30, COMPUTE)
    job.change = lambda line: replace(line, processes=(*(line.processes or ()), replace(monitor, pid=100)))
    job.play(60, COMPUTE)
    assert job.alerts == set()
