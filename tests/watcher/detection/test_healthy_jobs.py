"""Healthy work of many kinds, by chance: nothing may be said of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.watcher.detection.learning_job import LearningJob
from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMMUNICATE,
    COMPUTE,
    EVALUATE,
    LOAD,
    SAVE,
    SPIN,
    Activity,
    Job,
)
from wattwatch.watcher.detection.baselines.baseline import BaselineKind


def a_healthy_hour(chance: random.Random, kind: type[Job] = Job) -> Job:
    """Start-up, steps, saves, evaluations, a slow link, a line lost here and there, a restart."""
    job = kind(
        nodes=chance.choice((1, 2)), gpus=chance.choice((2, 8)), progress=chance.choice(("heartbeat", "log")), step=0,
        total_steps=None,
    )  # fmt: skip
    job.step_seconds = chance.choice((1, 5, 20, 55))
    steady = replace(COMPUTE, watts=chance.uniform(720, 1040), utilization=chance.uniform(91, 100))
    job.play(chance.randint(20, 300), LOAD)
    for _ in range(chance.randint(5, 9)):
        for _ in range(chance.randint(10, 40)):
            dip = {chance.randrange(job.gpus): Activity(chance.uniform(300, 900), chance.uniform(0, 100), steps=True)}
            job.play(chance.randint(1, 9), steady, dip if chance.random() < 0.3 else None)
            if job.nodes[1:] and chance.random() < 0.1:
                job.play(chance.randint(1, 4), steady, silent=job.nodes[1:])
            if chance.random() < 0.02:
                job.skip(chance.uniform(1, 60))
        pause = chance.random()
        if pause < 0.6:
            job.play(chance.randint(5, 110), AWAIT_SAVE, {0: SAVE})
            job.play(chance.randint(0, 9), SPIN)
        elif pause < 0.8:
            job.play(chance.randint(5, 300), EVALUATE if job.progress == "heartbeat" else steady)
        else:
            job.play(chance.randint(60, 200), COMMUNICATE)
    return job


@pytest.mark.parametrize("seed", range(12))
def test_an_hour_of_healthy_work_raises_nothing(seed: int) -> None:
    job = a_healthy_hour(random.Random(seed))
    assert job.alerts == set(), {f.alert: (f.summary, f.evidence) for t in job.observed for f in t.findings}


@pytest.mark.parametrize("seed", range(100, 106))
def test_nor_does_it_once_its_gpus_are_learned(seed: int) -> None:
    job = a_healthy_hour(random.Random(seed), LearningJob)
    assert isinstance(job, LearningJob)
    assert job.watts(BaselineKind.PLATEAU) is not None
    assert job.alerts == set(), {f.alert: (f.summary, f.evidence) for t in job.observed for f in t.findings}
