"""Silence proves nothing: what was told stays told until somebody sees that it is over."""

from __future__ import annotations

import pytest

from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMPUTE,
    IN_BARRIER,
    PAUSE,
    SAVE,
    SPIN,
    Activity,
    Job,
    checkpoint,
)
from wattwatch.watcher.detection.model import AlertName

HUNG = AlertName.JOB_HUNG
STALLED = AlertName.CHECKPOINT_STALLED
STARVING = AlertName.JOB_STARVING
STARVED = Activity(560, 50, steps=True)


def all_told(job: Job, since: float, alert: AlertName) -> bool:
    """Told at each look since then."""
    looks = [told for told in job.observed if told.now > since]
    return bool(looks) and all(alert in {f.alert for f in told.findings} for told in looks)


@pytest.mark.parametrize("progress", ["log", "heartbeat"])
def test_a_confirmed_hang_stays_reported_while_its_only_node_is_silent(progress: str) -> None:
    job = Job(progress=progress)
    job.play(60, COMPUTE)
    job.play(120, SPIN, {3: IN_BARRIER})
    confirmed = job.seconds_of(HUNG, confirmed=True)[0]
    job.play(60, SPIN, silent=job.nodes)
    job.play(60, SPIN, {3: IN_BARRIER})
    assert all_told(job, confirmed, HUNG)


def test_a_stalled_checkpoint_stays_reported_while_its_node_is_silent() -> None:
    job = Job()
    job.play(60, COMPUTE)
    for second in range(640):
        job.entries = (checkpoint(1010, complete=False, gigabytes=1.0, age_seconds=second),)
        job.play(1, AWAIT_SAVE, {0: SAVE})
    began = job.seconds_of(STALLED)[0]
    job.play(60, AWAIT_SAVE, {0: SAVE}, silent=job.nodes)
    job.play(30, AWAIT_SAVE, {0: SAVE})
    assert all_told(job, began, STALLED)


def test_a_job_that_starves_is_not_reported_to_be_well_because_the_watcher_slept() -> None:
    job = Job()
    job.play(20, COMPUTE)
    job.play(100, STARVED)
    began = job.now
    assert job.finding(STARVING)
    job.skip(60)
    job.play(20, STARVED)
    job.play(60, STARVED, silent=job.nodes)
    job.play(20, STARVED)
    assert all_told(job, began, STARVING)
    job.play(200, COMPUTE)
    assert job.findings == ()


def test_a_pause_before_anything_was_reported_does_not_add_up_over_a_gap() -> None:
    job = Job()
    job.play(20, COMPUTE)
    job.play(20, STARVED)
    job.skip(60)
    job.play(20, STARVED)
    assert STARVING.value not in job.alerts
    job.play(5, PAUSE)
