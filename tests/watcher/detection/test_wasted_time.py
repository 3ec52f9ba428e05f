"""What trouble costs: GPUs without useful work, their time and what they drew, by the alert that says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watcher.detection.simulated_seconds import COMPUTE, KILLED, Activity, Job
from wattwatch.collectors.samples import GpuSample, HostStatus
from wattwatch.watcher.detection.model import AlertName, Finding, JobSample, NodeState, RankGpu, Severity, Suspect
from wattwatch.watcher.detection.wasted_time import WastedTime, idle_power_watts, job_gpu_count, total_kilowatt_hours


def sample(*watts: float | None, expected: int | None = None) -> JobSample:
    boards = tuple(RankGpu("n1", i, GpuSample(i, power_watts=each)) for i, each in enumerate(watts))
    node = NodeState("n1", HostStatus.OK, "", 0.1, True, expected_gpus=expected or len(watts))
    return JobSample("llama", boards, (node,))


def finding(alert: AlertName, idle: int, *suspects: Suspect) -> Finding:
    return Finding("llama", alert, Severity.CRITICAL, "", "", (), "", 0.0, suspects=suspects, gpus_idle=idle)


HUNG = finding(AlertName.JOB_HUNG, 4)


def test_a_hang_costs_the_time_of_all_gpus_and_what_they_draw() -> None:
    cost = WastedTime()
    for _ in range(3600):
        (told,) = cost.update(sample(190.0, 190.0, 190.0, 30.0), (HUNG,), 1.0)
    assert told.idle_joules == pytest.approx(600.0)
    assert cost.gpu_seconds == {"JobHung": pytest.approx(4 * 3600)}
    assert total_kilowatt_hours(cost.joules) == pytest.approx(0.6)


def test_a_gap_costs_nothing() -> None:
    cost = WastedTime()
    (told,) = cost.update(sample(190.0, 190.0, 190.0, 190.0), (HUNG,), 0.0)
    assert told.idle_joules == 0
    assert (sum(cost.gpu_seconds.values()), sum(cost.joules.values())) == (0, 0)


def test_the_power_of_a_gpu_that_was_not_read_is_not_guessed() -> None:
    assert idle_power_watts(sample(190.0, None, 190.0, None), HUNG, 4) == pytest.approx(380.0)
    assert idle_power_watts(sample(190.0, 190.0, expected=4), HUNG, 4) == pytest.approx(380.0)
    assert idle_power_watts(sample(), HUNG, 4) == 0.0


def test_a_job_at_half_its_step_rate_loses_half_of_what_its_gpus_draw() -> None:
    slow = finding(AlertName.JOB_SLOW, 2)
    assert idle_power_watts(sample(600.0, 600.0, 800.0, 400.0), slow, 2) == pytest.approx(1200.0)


def test_a_broken_gpu_costs_what_it_draws_itself() -> None:
    broken = finding(AlertName.GPU_FAULT, 1, Suspect("n1", 2))
    assert idle_power_watts(sample(600.0, 600.0, 55.0, 600.0), broken, 1) == 55.0
    assert idle_power_watts(sample(600.0, 600.0, None, 600.0), broken, 1) == 0.0


def test_a_gpu_that_two_findings_idle_is_counted_once() -> None:
    cost = WastedTime()
    broken = finding(AlertName.GPU_FAULT, 1, Suspect("n1", 2))
    told = cost.update(sample(190.0, 190.0, 55.0, 190.0), (broken, HUNG), 10.0)
    assert [each.alert for each in told] == [AlertName.GPU_FAULT, AlertName.JOB_HUNG]
    assert cost.gpu_seconds == {"JobHung": 40.0, "GpuFault": 0.0}
    assert sum(cost.joules.values()) == pytest.approx(6250.0)


def test_what_idles_no_gpu_costs_nothing() -> None:
    cost = WastedTime()
    hot = replace(HUNG, alert=AlertName.GPU_THROTTLED, gpus_idle=0)
    assert cost.update(sample(700.0), (hot,), 1.0) == (hot,)
    assert cost.gpu_seconds == {}
    assert job_gpu_count(sample(1.0, expected=8)) == 8


def test_gpus_that_another_job_uses_after_a_crash_are_not_wasted() -> None:
    job = Job(gpus=8)
    job.play(60, COMPUTE)
    job.play(30, KILLED)
    assert job.finding(AlertName.JOB_CRASHED).gpus_idle == 8
    of_others = Activity(700, 98, process=False)
    job.play(5, KILLED, dict.fromkeys(range(6), of_others))
    assert job.finding(AlertName.JOB_CRASHED).gpus_idle == 2
