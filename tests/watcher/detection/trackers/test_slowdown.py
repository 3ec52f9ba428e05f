"""A job that is slower than it was itself: said after minutes, by its own pace; healthy variation is no news."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from tests.watcher.detection.simulated_seconds import COMMUNICATE, COMPUTE, Activity, Job, xid
from wattwatch.watcher.detection.model import AlertName, Severity

SLOW = AlertName.JOB_SLOW


def paced(job: Job, step_seconds: int, seconds: int) -> None:
    job.step_seconds = step_seconds
    job.play(seconds, COMPUTE if step_seconds <= 5 else COMMUNICATE)


def test_steps_that_take_half_as_long_again_are_reported_after_five_minutes() -> None:
    job = Job()
    paced(job, 4, 600)
    injected = job.now
    paced(job, 6, 500)
    (first, *_) = job.seconds_of(SLOW)
    assert 300 <= first - injected <= 420
    said = job.finding(SLOW)
    assert said.severity is Severity.WARNING
    assert said.summary == "pretrain is 33% slower than before."
    assert said.evidence[0] == "a step takes 6.00 s; in this run it usually takes 4.00 s"
    assert said.suspects == ()


def test_it_stays_reported_however_long_it_lasts_and_is_over_when_the_step_rate_is_back() -> None:
    job = Job()
    paced(job, 4, 600)
    paced(job, 6, 3600)
    assert SLOW in {finding.alert for finding in job.findings}
    paced(job, 4, 200)
    assert job.findings == ()


def test_noisy_steps_are_not_slow_ones() -> None:
    job, chance = Job(), random.Random(3)
    for _ in range(500):
        paced(job, chance.choice((3, 4, 5, 6)), 6)
    assert job.alerts == set()


def test_a_slow_minute_is_not_reported() -> None:
    job = Job()
    paced(job, 4, 600)
    paced(job, 6, 120)
    paced(job, 4, 600)
    assert job.alerts == set()


def test_a_restart_forgets_the_step_rate_of_the_run_before() -> None:
    """Another model may be slower by right."""
    job = Job()
    paced(job, 2, 600)
    job.restart, job.step, job.first_pid = 1, 900, 7000
    paced(job, 5, 900)
    assert job.alerts == set()


def test_a_drift_that_adds_up_is_reported() -> None:
    job = Job()
    for step_seconds in (10, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14):
        job.step_seconds = step_seconds
        job.play(400, COMPUTE)
    assert SLOW in {finding.alert for finding in job.findings}


def test_a_gpu_that_wears_is_a_warning_and_a_broken_one_is_critical() -> None:
    job = Job()
    job.play(30, COMPUTE)
    job.kernel["node-1"] = [replace(xid(63, 2), text="NVRM: Xid (PCI:0000:1c:00): 63, row remapped")]
    job.play(3, COMPUTE)
    worn = job.finding(AlertName.GPU_FAULT)
    assert (worn.severity, worn.suspects[0].gpu, worn.gpus_idle) == (Severity.WARNING, 2, 0)
    job.kernel["node-1"] = [xid(79, 2)]
    job.play(3, COMPUTE)
    assert job.finding(AlertName.GPU_FAULT).severity is Severity.CRITICAL


def test_the_few_that_are_busy_in_a_job_that_starves_are_no_measure_for_one_of_them() -> None:
    """Each look another one or two of eight read 90 % and more, and one of them always draws more than the rest."""
    job, chance = Job(), random.Random(5)
    paced(job, 4, 600)
    job.step_seconds = 8
    for _ in range(900):
        busy = [float(chance.randint(5, 70)) for _ in range(8)]
        busy[3] = 95.0
        busy[chance.randrange(4, 8)] = 92.0
        ranks = {rank: Activity(1000 if rank == 3 else 400, busy[rank], steps=True) for rank in range(8)}
        job.play(1, ranks[0], ranks)
    assert AlertName.STRAGGLER not in job.alerts
    assert SLOW in job.alerts or AlertName.JOB_STARVING in job.alerts


def test_a_slow_job_that_cannot_be_read_any_more_is_slow_as_of_then_and_costs_nothing() -> None:
    job = Job()
    paced(job, 4, 600)
    paced(job, 6, 600)
    assert job.finding(SLOW).gpus_idle > 0
    job.play(300, COMMUNICATE, silent=job.nodes)
    slow = job.finding(SLOW)
    assert slow.gpus_idle == 0
    assert any(
        re.fullmatch(r"the step time was measured 3\d\d s ago; the step counter cannot be read now", line)
        for line in slow.evidence
    )
