"""What is learned of GPUs, when, and what teaches nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.watcher.detection.learning_job import EMPTY, FIRST_KERNEL, START_UP, LearningJob, working_job
from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    BARE,
    COMMUNICATE,
    COMPUTE,
    EVALUATE,
    KILLED,
    PAUSE,
    SAVE,
    SPIN,
    Activity,
    checkpoint,
)
from wattwatch.collectors.samples import HostStatus, ProcessSample
from wattwatch.watcher.detection.baselines.baseline import BaselineKind, LearningPhase
from wattwatch.watcher.detection.model import AlertName

STARVE = Activity(575, 60, steps=True)
STARVE_LESS = Activity(575, 20, steps=True)
MONITOR = ProcessSample(77, "dcgmproftester", "R", 400.0, None, (0,))


# What is learned


def test_an_empty_gpu_teaches_its_idle_floor_once_it_has_cooled() -> None:
    job = LearningJob()
    job.play(30, EMPTY)
    assert job.watts(BaselineKind.IDLE) is None
    job.play(40, EMPTY)
    value = job.known(BaselineKind.IDLE)
    assert value is not None
    assert (value.watts, value.samples, value.phase) == (139, 30, LearningPhase.EMPTY)
    assert value.name == "NVIDIA B300 SXM6 AC"


def test_a_start_up_teaches_the_floor_with_a_context_at_the_first_kernel() -> None:
    job = LearningJob()
    job.play(90, EMPTY)
    job.play(60, START_UP)
    assert job.watts(BaselineKind.CONTEXT) is None
    job.play(1, FIRST_KERNEL)
    value = job.known(BaselineKind.CONTEXT)
    assert value is not None
    assert (value.watts, value.phase, value.job) == (186, LearningPhase.START_UP, "pretrain")
    assert value.samples == 55


def test_steps_that_advance_teach_the_plateau_of_their_job() -> None:
    job = working_job()
    value = job.known(BaselineKind.PLATEAU)
    assert value is not None
    assert (value.watts, value.phase, value.limit_watts) == (985, LearningPhase.ADVANCING, 1100)
    assert value.samples >= 30
    assert job.knowledge.get(("node-1", "GPU-0-0"), BaselineKind.PLATEAU, "another job") is None


def test_a_log_alone_tells_steps_as_well() -> None:
    assert working_job(progress="log").watts(BaselineKind.PLATEAU) == 985


def test_two_minutes_are_the_least_for_a_plateau() -> None:
    job = LearningJob()
    job.play(110, COMPUTE)
    assert job.watts(BaselineKind.PLATEAU) is None


def test_a_watcher_that_came_late_learns_the_floor_between_steps() -> None:
    """A step of 20 s whose last ten rest: no start-up was seen."""
    job = LearningJob()
    job.step_seconds = 20
    for _ in range(30):
        job.play(10, COMPUTE)
        job.play(10, replace(PAUSE, steps=True, phase="train"))
    value = job.known(BaselineKind.CONTEXT)
    assert value is not None
    assert (value.watts, value.phase) == (189, LearningPhase.BETWEEN_STEPS)


def test_each_gpu_has_its_own_floor() -> None:
    job = LearningJob(step=0)
    warm = {3: replace(START_UP, watts=203.0)}
    job.play(90, EMPTY)
    job.play(60, START_UP, warm)
    job.play(10, FIRST_KERNEL)
    first, fourth = job.known(BaselineKind.CONTEXT), job.known(BaselineKind.CONTEXT, 3)
    assert first is not None
    assert fourth is not None
    assert (first.watts, fourth.watts) == (186, 203)


# What teaches nothing


def test_a_hang_at_the_floor_for_three_hours_teaches_nothing() -> None:
    job = LearningJob(gpus=2)
    job.play(600, COMPUTE)
    plateau = job.known(BaselineKind.PLATEAU)
    job.play(3 * 3600, PAUSE)
    assert job.seconds_of(AlertName.JOB_HUNG, confirmed=True)
    assert job.watts(BaselineKind.CONTEXT) is None
    assert job.known(BaselineKind.PLATEAU) == plateau
    # It comes back by itself, which proves no rest of three hours.
    job.play(600, COMPUTE)
    assert job.watts(BaselineKind.CONTEXT) is None
    assert job.known(BaselineKind.PLATEAU) == plateau


@pytest.mark.parametrize("progress", ["heartbeat", "log", None])
@pytest.mark.parametrize("doing", [SPIN, PAUSE], ids=["spin", "rest"])
def test_a_watcher_that_comes_late_to_a_hang_learns_nothing(doing: Activity, progress: str | None) -> None:
    job = LearningJob(progress=progress, gpus=2)
    job.play(2400, doing)
    assert job.knowledge.values() == ()


def test_a_start_up_that_never_gets_to_work_teaches_no_floor() -> None:
    job = LearningJob(step=0, gpus=2)
    job.play(90, EMPTY)
    job.play(3600, START_UP)
    job.play(60, KILLED)
    assert job.watts(BaselineKind.CONTEXT) is None


def test_a_starving_job_sets_no_plateau_and_lowers_none() -> None:
    starving = dict.fromkeys((1, 2, 5), STARVE_LESS)
    late = LearningJob()
    late.play(900, STARVE, starving)
    assert late.watts(BaselineKind.PLATEAU) is None
    job = working_job()
    job.play(900, STARVE, starving)
    assert job.watts(BaselineKind.PLATEAU) == 985


def test_a_job_that_waits_for_its_links_sets_no_plateau_on_a_gpu_whose_bands_are_measured() -> None:
    late = LearningJob()
    late.play(900, COMMUNICATE)
    assert late.watts(BaselineKind.PLATEAU) is None
    job = working_job()
    job.play(900, COMMUNICATE)
    assert job.watts(BaselineKind.PLATEAU) == 985


def test_a_plateau_only_rises_within_a_run() -> None:
    job = working_job()
    job.play(600, replace(COMPUTE, watts=800))
    assert job.watts(BaselineKind.PLATEAU) == 985
    job.play(600, replace(COMPUTE, watts=1040))
    assert job.watts(BaselineKind.PLATEAU) == 1040


def test_checkpoint_pauses_teach_no_floor() -> None:
    """By sample, by files, by heartbeat, and by all ranks at once with nobody to say so."""
    job = LearningJob(progress="log")
    for _ in range(8):
        job.play(60, COMPUTE)
        job.play(40, AWAIT_SAVE, {0: SAVE})
        job.play(60, COMPUTE)
        job.play(40, PAUSE)  # five to eight times as long as a step takes
        job.play(60, COMPUTE)
        for second in range(30):
            job.entries = (checkpoint(job.step, complete=False, gigabytes=second),)
            job.play(1, PAUSE)
        job.entries = (checkpoint(job.step, complete=True),)
        job.play(60, COMPUTE)
        job.play(60, EVALUATE)
    assert job.watts(BaselineKind.CONTEXT) is None
    assert job.watts(BaselineKind.PLATEAU) == 985


def test_power_that_scatters_is_no_floor() -> None:
    job = LearningJob(step=0)
    job.play(90, EMPTY)
    for second in range(60):
        job.play(1, replace(START_UP, watts=186 + 40.0 * (second % 2)))
    job.play(10, FIRST_KERNEL)
    assert job.watts(BaselineKind.CONTEXT) is None
    assert "not steady" in job.learner.rejected[("node-1", "GPU-0-0"), BaselineKind.CONTEXT]


def test_nonsense_is_refused_with_its_reason() -> None:
    hot = LearningJob(step=0)
    hot.play(90, replace(EMPTY, watts=600))
    hot.play(60, replace(START_UP, watts=700))
    hot.play(200, COMPUTE)
    assert (hot.watts(BaselineKind.IDLE), hot.watts(BaselineKind.CONTEXT), hot.watts(BaselineKind.PLATEAU)) == (
        None,
        None,
        985,
    )
    assert "implausible as this GPU's idle power" in hot.learner.rejected[("node-1", "GPU-0-0"), BaselineKind.IDLE]
    light = LearningJob(step=0)
    light.play(300, replace(COMPUTE, watts=270))
    assert light.watts(BaselineKind.PLATEAU) is None
    assert "too low for compute" in light.learner.rejected[("node-1", "GPU-0-0"), BaselineKind.PLATEAU]


def test_gpus_at_low_clocks_do_not_show_what_spinning_draws() -> None:
    assert LearningJob().learner.rejected == {}
    job = LearningJob(step=0)
    job.play(90, EMPTY)
    job.play(60, replace(START_UP, watts=40.0))
    job.play(10, FIRST_KERNEL)
    assert job.watts(BaselineKind.CONTEXT) is None  # 139 W with nobody on it, 40 W with a context: never


def test_a_repeated_answer_is_one_sample() -> None:
    job = LearningJob(step=0)
    job.play(90, EMPTY)
    job.play(1, START_UP)
    job.play(100, START_UP, repeat_gpus=True)
    job.play(10, FIRST_KERNEL)
    assert job.watts(BaselineKind.CONTEXT) is None


def test_a_context_that_is_held_by_somebody_is_no_empty_gpu() -> None:
    job = LearningJob()
    job.play(300, replace(EMPTY, process=True))
    assert job.watts(BaselineKind.IDLE) is None


def test_memory_that_cannot_be_read_teaches_nothing_at_rest() -> None:
    job = LearningJob()
    job.play(300, replace(EMPTY, held_bytes=None))
    assert job.knowledge.values() == ()


# What is learned anew


def test_another_limit_drops_the_plateau_and_it_is_learned_anew() -> None:
    job = working_job()
    job.limit = 800
    job.play(1, replace(COMPUTE, watts=700))
    assert job.watts(BaselineKind.PLATEAU) is None
    assert job.watts(BaselineKind.CONTEXT) == 186
    job.play(200, replace(COMPUTE, watts=700))
    value = job.known(BaselineKind.PLATEAU)
    assert value is not None
    assert (value.watts, value.limit_watts) == (700, 800)


@pytest.mark.parametrize(
    ("limit", "watts", "step_seconds"), [(800, 760, 6), (400, 395, 11), (300, 298, 15), (200, 199, 25)]
)
def test_another_limit_in_mid_run_is_no_hang_and_nothing_is_slow(limit: float, watts: float, step_seconds: int) -> None:
    """The cap is set by somebody: work goes on at its power, and steps take longer."""
    job = working_job()
    job.play(400, COMPUTE)
    job.limit, job.step_seconds = limit, step_seconds
    job.play(900, replace(COMPUTE, watts=watts, throttle=frozenset({"sw_power_cap"})))
    assert job.alerts == set()
    assert job.observed[-1].verdict.state != "hang"
    job.limit, job.step_seconds = None, 5
    job.play(300, COMPUTE)
    assert job.alerts == set()
    assert job.watts(BaselineKind.PLATEAU) == 985


def test_a_driver_that_was_loaded_anew_drops_all() -> None:
    job = LearningJob(step=0)
    job.energy = 1e9
    job.play(90, EMPTY)
    assert job.watts(BaselineKind.IDLE) == 139
    job.energy = 5e3
    job.play(5, EMPTY)
    assert job.watts(BaselineKind.IDLE) is None
    job.play(90, replace(EMPTY, watts=160))
    assert job.watts(BaselineKind.IDLE) == 160


def test_another_driver_version_drops_all_and_makes_no_verdict() -> None:
    job = LearningJob(step=0)
    job.driver = "580.95.05"
    job.play(90, EMPTY)
    assert job.watts(BaselineKind.IDLE) == 139
    job.driver = None  # it cannot be read for a while
    job.play(10, EMPTY)
    job.driver = "580.95.05"
    job.play(10, EMPTY)
    assert job.watts(BaselineKind.IDLE) == 139
    job.driver = "590.44.01"
    job.play(5, EMPTY)
    assert job.watts(BaselineKind.IDLE) is None
    assert job.alerts == set()
    job.play(90, replace(EMPTY, watts=160))
    assert job.watts(BaselineKind.IDLE) == 160


def test_a_version_that_is_first_reported_later_drops_nothing() -> None:
    job = working_job()
    before = job.knowledge.values()
    job.driver = "580.95.05"
    job.play(10, COMPUTE)
    assert set(before) <= set(job.knowledge.values())


def test_what_is_learned_carries_the_driver_it_was_learned_under() -> None:
    job = LearningJob()
    job.driver = "580.95.05"
    job.play(40, EMPTY)
    job.play(40, START_UP)
    job.play(10, FIRST_KERNEL)
    job.play(60, COMPUTE)
    values = job.knowledge.values()
    assert values
    assert {value.driver for value in values} == {"580.95.05"}


def test_a_driver_that_cannot_be_asked_drops_what_is_known_of_its_node() -> None:
    job = working_job()
    job.status = {"node-1": (HostStatus.DRIVER_DOWN, "Driver/library version mismatch")}
    job.play(10, COMPUTE)
    assert job.knowledge.values() == ()


def test_another_gpu_in_the_slot_has_nothing_of_the_old_one() -> None:
    job = working_job()
    other = working_job(name="NVIDIA H100 80GB HBM3", knowledge=job.knowledge)
    value = other.known(BaselineKind.CONTEXT)
    assert value is None or value.name == "NVIDIA H100 80GB HBM3"


def test_a_stranger_on_the_node_drops_the_plateau_and_no_verdict_comes_of_it() -> None:
    job = working_job()
    job.strangers = (MONITOR,)
    job.play(5, COMPUTE)
    assert job.watts(BaselineKind.PLATEAU) is None
    assert job.known(BaselineKind.CONTEXT) is None  # it sits on this GPU
    assert job.known(BaselineKind.CONTEXT, 1) is not None
    assert job.watts(BaselineKind.IDLE) == 139
    job.play(200, COMPUTE)
    assert job.watts(BaselineKind.PLATEAU) == 985  # with it there, who may stay for ever
    assert job.alerts == set()


def test_another_run_may_work_at_less() -> None:
    job = working_job()
    job.play(60, KILLED)
    job.step, job.first_pid = 0, 6000
    job.play(60, START_UP)
    job.play(5, FIRST_KERNEL)
    job.play(200, replace(COMPUTE, watts=800))
    assert job.watts(BaselineKind.PLATEAU) == 800


def test_bare_memory_is_less_than_a_context() -> None:
    assert BARE < 300 * 1024**2
