"""Conditions that must persist, states, cost, and streams that make no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import COMMUNICATE, COMPUTE, ENDED, IN_BARRIER, SPIN, Activity, Job
from wattwatch.watcher.detection.model import AlertName, JobState

SCATTERED = (100, 31, 88, 27, 64, 100, 92, 45)


def starving(second: int, watts: float = 575) -> dict[int, Activity]:
    """Utilisation scatters, over the ranks and over time."""
    return {rank: Activity(watts, SCATTERED[(rank + second) % 8]) for rank in range(8)}


def starve(job: Job, seconds: int) -> None:
    for second in range(seconds):
        job.play(1, replace(COMPUTE, steps=True), starving(second))


def training(**settings: object) -> Job:
    job = Job(**settings)  # type: ignore[arg-type]  # handed through
    job.play(40, COMPUTE)
    return job


def test_starvation_that_persists_is_reported_with_the_step_rate_that_is_lost() -> None:
    job = training()
    job.step_seconds = 12
    starve(job, 100)
    finding = job.finding(AlertName.JOB_STARVING)
    assert job.alerts == {"JobStarving"}
    assert job.state is JobState.STARVING
    assert any("below the best step rate of this job" in line for line in finding.evidence)
    assert job.detector.wasted_gpu_seconds["JobStarving"] > 0


def test_starvation_that_is_over_is_told_as_over_while_its_alert_stays_open() -> None:
    job = training()
    job.step_seconds = 12
    starve(job, 100)
    seen = job.finding(AlertName.JOB_STARVING)
    cost = job.detector.wasted_gpu_seconds["JobStarving"]
    job.step_seconds = 5
    job.play(10, COMPUTE)
    finding = job.finding(AlertName.JOB_STARVING)
    assert finding.summary == seen.summary.removesuffix(".") + " (last seen 10 s ago)."
    assert finding.evidence == seen.evidence, "not the numbers of a job that computes"
    assert job.state is JobState.COMPUTING
    assert job.detector.wasted_gpu_seconds["JobStarving"] - cost < 2 * seen.gpus_idle


def test_scatter_for_a_few_seconds_is_nothing() -> None:
    job = training()
    for _ in range(20):
        starve(job, 2)
        job.play(8, COMPUTE)
    assert job.alerts == set()


def test_one_busy_moment_is_no_cure() -> None:
    job = training()
    for _ in range(12):
        starve(job, 9)
        job.play(1, COMPUTE)
    assert "JobStarving" in {f.alert.value for f in job.findings}


def test_communication_is_a_state_and_no_alarm() -> None:
    job = training(progress="log")
    job.step_seconds = 8
    job.play(120, COMMUNICATE)
    assert job.state is JobState.COMMUNICATING
    assert job.alerts == set()


def test_a_loss_that_is_not_finite_is_reported() -> None:
    job = training()
    job.loss = float("nan")
    job.play(5, COMPUTE)
    assert job.finding(AlertName.LOSS_NOT_FINITE)


def test_throughput_below_the_configured_floor_is_slow() -> None:
    job = training(floor_tokens_per_second=50_000.0)
    job.tokens_per_second = 30_000.0
    job.play(120, COMPUTE)
    slow = job.finding(AlertName.JOB_SLOW)
    assert "30,000 tokens" in slow.summary


def test_heat_that_persists_is_reported_with_the_gpus() -> None:
    job = training()
    hot = Activity(620, 99, steps=True, throttle=frozenset({"hw_thermal_slowdown"}))
    job.play(90, COMPUTE, {4: hot})
    assert [s.gpu for s in job.finding(AlertName.GPU_THROTTLED).suspects] == [4]


def test_a_node_without_a_job_is_idle() -> None:
    job = Job(progress=None)
    job.play(30, ENDED)
    assert job.state is JobState.IDLE
    assert job.alerts == set()


def test_cost_is_counted_only_while_it_is_seen() -> None:
    job = training()
    job.play(60, SPIN, {3: IN_BARRIER})
    before = job.detector.wasted_gpu_seconds["JobHung"]
    job.skip(3600)
    job.play(2, SPIN, {3: IN_BARRIER})
    assert job.detector.wasted_gpu_seconds["JobHung"] - before <= 3 * 8


def test_a_restart_forgets_what_was_wrong() -> None:
    job = training()
    job.play(60, SPIN, {3: IN_BARRIER})
    assert job.state is JobState.HUNG
    job.first_pid, job.started, job.step, job.restart = 9000, 900.0, 900, 1
    job.play(3, COMPUTE)
    assert job.findings == ()


@pytest.mark.parametrize("progress", ["heartbeat", "log", None])
def test_an_hour_of_healthy_training_is_silent(progress: str | None) -> None:
    job = Job(nodes=2, progress=progress)
    job.play(1200, COMPUTE)
    assert job.alerts == set()
    assert job.state is JobState.COMPUTING


def test_the_same_seconds_get_the_same_text() -> None:
    def story() -> list[object]:
        job = training(nodes=2)
        job.play(50, SPIN, {3: IN_BARRIER})
        return [(told.findings, told.state) for told in job.observed]

    assert story() == story()
