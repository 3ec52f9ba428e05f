"""A job that is started again: what the run before left behind is no word about the new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import COMPUTE, ENDED, KILLED, LOAD, LOG, SPIN, Activity, Job
from wattwatch.collectors.samples import NodeSample, ProgressSample

SOURCES = ["heartbeat", "log"]


class Rolling(Job):
    """Each run writes a log of its own; those of earlier runs stay beside it."""

    def __init__(self, **settings: object) -> None:
        self.log = LOG
        self.left: dict[str, tuple[int, float]] = {}
        super().__init__(progress="log", logs=("/runs/a/*.log",), **settings)  # type: ignore[arg-type]  # handed on

    def _progress(self, place: int, doing: Mapping[int, Activity]) -> tuple[ProgressSample, ...]:
        now = [replace(said, source=self.log) for said in super()._progress(place, doing)]
        old = [
            replace(said, source=source, step=step, age_seconds=self.now - at)
            for said in now
            for source, (step, at) in self.left.items()
        ]
        return (*now, *old)

    def roll(self, log: str, back: int) -> None:
        self.left[self.log] = (self.step, self.now - self.since_step)
        self.log, self.step, self.since_step = log, self.step - back, 0


class Shrinking(Job):
    """From a moment on node-2 is no longer part of the job: its files stay as they were."""

    left: tuple[int, int, float] | None = None

    def _line(self, place: int, node: str, activity: Activity, ranks: Mapping[int, Activity]) -> NodeSample:
        if self.left is None or node != "node-2":
            return super()._line(place, node, activity, ranks)
        line = super()._line(place, node, ENDED, {})
        step, restart, at = self.left
        old = (replace(s, step=step, restart=restart, age_seconds=self.now - at, phase="train") for s in line.progress)
        return replace(line, progress=tuple(old))


def start_again(job: Job, *, back: int = 3) -> None:
    job.first_pid, job.started, job.restart = job.first_pid + 2000, job.started + 600.0, job.restart + 1
    job.step, job.since_step = job.step - back, 0


@pytest.mark.parametrize("progress", SOURCES)
def test_a_restart_while_nothing_was_observed_is_no_crash(progress: str) -> None:
    job = Job(nodes=2, progress=progress)
    job.play(60, COMPUTE)
    job.play(30, COMPUTE, silent=job.nodes)
    start_again(job)
    job.play(60, COMPUTE)
    assert job.alerts == set()


@pytest.mark.parametrize("progress", SOURCES)
def test_a_restart_on_one_node_forgets_who_left_on_the_others(progress: str) -> None:
    job = Job(nodes=2, progress=progress)
    job.play(60, COMPUTE)
    job.play(3, KILLED)
    start_again(job)
    job.play(60, LOAD, dict.fromkeys(range(8, 16), KILLED))
    assert job.findings == ()


@pytest.mark.parametrize("seconds", [100, 300])
@pytest.mark.parametrize("progress", SOURCES)
def test_the_old_step_that_stalls_while_the_new_run_loads_is_no_hang(progress: str, seconds: int) -> None:
    job = Job(progress=progress)
    job.play(60, COMPUTE)
    job.play(5, KILLED)
    start_again(job, back=0)
    job.play(seconds, replace(LOAD, phase="train"))
    job.step -= 4
    job.play(200, COMPUTE)
    assert job.alerts == {"JobCrashed"}
    assert job.findings == ()


@pytest.mark.parametrize("back", [200, 900])
def test_a_new_log_some_steps_back_beside_the_old_one_is_followed(back: int) -> None:
    job = Rolling()
    job.play(120, COMPUTE)
    job.play(3, KILLED)
    job.roll("/runs/a/train-2.log", back)
    start_again(job, back=0)
    job.play(60, LOAD)
    job.play(1000, COMPUTE)
    assert job.alerts == {"JobCrashed"}
    assert job.findings == ()
    assert job.sample is not None
    assert job.sample.progress.step == job.step


def test_the_next_job_on_the_nodes_of_a_complete_one_does_not_hang() -> None:
    job = Rolling(step=90, total_steps=100)
    job.play(50, COMPUTE)
    job.play(60, ENDED)
    assert job.alerts == {"JobCompleted"}
    job.roll("/runs/a/train-2.log", 100)
    start_again(job, back=0)
    job.play(60, LOAD)
    job.play(400, COMPUTE)
    assert job.alerts == {"JobCompleted"}
    assert job.findings == ()


def test_a_hang_after_the_restart_with_a_new_log_is_seen_in_time() -> None:
    job = Rolling()
    job.play(120, COMPUTE)
    job.play(3, KILLED)
    job.roll("/runs/a/train-2.log", 200)
    start_again(job, back=0)
    job.play(60, LOAD)
    job.play(300, COMPUTE)
    job.play(60, SPIN)
    assert [finding.alert.value for finding in job.findings] == ["JobHung"]
    assert job.findings[0].confirmed


@pytest.mark.parametrize("restart", [1, 3])
def test_a_relaunch_by_hand_whose_restart_counter_is_smaller_is_followed(restart: int) -> None:
    job = Shrinking(nodes=2)
    job.restart = restart
    job.play(60, COMPUTE)
    job.play(5, KILLED)
    job.left = (job.step, restart, job.now)
    start_again(job, back=0)
    job.step, job.restart = 950, 0
    job.play(20, LOAD)
    job.play(600, COMPUTE)
    assert job.sample is not None
    assert job.sample.progress.step == job.step
    assert job.findings == ()
