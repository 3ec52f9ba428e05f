"""Conditions that must persist, states, cost, and streams that make no sense."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.watcher.detection.simulated_seconds import (
    AWAIT_SAVE,
    COMMUNICATE,
    COMPUTE,
    ENDED,
    IN_BARRIER,
    KILLED,
    PAUSE,
    SAVE,
    SPIN,
    Activity,
    Job,
)
from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.model import AlertName, JobState, PowerState

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
    assert finding.seen_seconds == job.now - 10
    assert job.state is JobState.COMPUTING
    assert job.detector.wasted_gpu_seconds["JobStarving"] - cost < 2 * seen.gpus_idle


@pytest.mark.parametrize(("confidence", "after_seconds"), [(0.6, 120), (0.5, 300), (0.45, 300)])
def test_without_a_counter_starvation_that_may_be_an_evaluation_must_last_longer(
    confidence: float, after_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(progress=None)
    job.play(60, COMPUTE)
    monkeypatch.setattr(
        job, "judge", lambda sample: replace(classify(sample), state=PowerState.STARVATION, confidence=confidence)
    )
    began = job.now
    starve(job, 400)
    assert after_seconds <= job.seconds_of(AlertName.JOB_STARVING)[0] - began <= after_seconds + 5


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


def test_throughput_of_a_log_without_it_is_calculated_from_the_tokens_of_a_step() -> None:
    job = training(floor_tokens_per_second=50_000.0, tokens_per_step=200_000)
    job.tokens_per_second = None
    job.play(60, COMPUTE)  # a step takes 5 s
    throughput = job.detector.throughput
    assert throughput.calculated
    assert throughput.tokens_per_second == pytest.approx(40_000.0)
    assert throughput.seconds_per_step == pytest.approx(5.0)
    job.play(60, COMPUTE)
    slow = job.finding(AlertName.JOB_SLOW)
    assert re.match(r"40,000 tokens/s, calculated from the step rate at the last step, \d s ago; ", slow.evidence[0])


def test_the_time_left_is_known_until_a_step_is_late() -> None:
    job = training(total_steps=2000)
    job.play(50, COMPUTE)
    eta = job.detector.throughput.eta_seconds
    assert eta == pytest.approx((2000 - job.step) * job.step_seconds, abs=job.step_seconds)
    job.play(40, SPIN)
    assert job.detector.throughput.eta_seconds is None


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


def test_a_job_that_was_never_seen_is_unknown_since_the_watcher_began_to_watch_it() -> None:
    job = Job(progress=None)
    job.play(30, COMPUTE, silent=job.nodes)
    assert job.state is JobState.UNKNOWN
    assert job.detector.state_since == job.observed[0].now
    assert job.detector.state_began_unseen


def test_a_state_found_at_the_beginning_may_be_older_and_one_that_began_later_is_not() -> None:
    job = training()
    assert (job.state, job.detector.state_began_unseen) == (JobState.COMPUTING, True)
    assert job.detector.state_since == job.observed[0].now
    job.play(120, SPIN, {3: IN_BARRIER})
    assert (job.state, job.detector.state_began_unseen) == (JobState.HUNG, False)


@pytest.mark.parametrize("progress", ["heartbeat", "log"])
def test_throughput_is_0_once_no_step_is_counted_and_the_last_report_keeps_its_age(progress: str) -> None:
    job = Job(progress=progress)
    job.play(120, COMPUTE)
    assert job.detector.throughput.tokens_per_second == 53_000.0
    job.play(15, SPIN)
    assert job.detector.throughput.tokens_per_second == 0.0
    job.play(105, SPIN)
    throughput = job.detector.throughput
    assert (throughput.tokens_per_second, throughput.reported) == (0.0, 53_000.0)
    assert throughput.reported_age_seconds == pytest.approx(120.0, abs=job.step_seconds)


def test_throughput_is_0_after_a_crash() -> None:
    job = training()
    job.play(120, KILLED)
    assert job.state is JobState.CRASHED
    assert job.detector.throughput.tokens_per_second == 0.0


def test_one_long_pause_does_not_keep_the_throughput_of_a_later_hang_alive() -> None:
    job = training()
    job.play(100, SPIN)
    job.play(60, COMPUTE)
    job.play(30, SPIN)
    assert job.detector.throughput.tokens_per_second == 0.0


def test_throughput_is_unknown_where_nobody_knows_when_the_next_step_is_due() -> None:
    job = Job()
    job.since_step = 7200
    job.play(1, SPIN)
    throughput = job.detector.throughput
    assert (throughput.tokens_per_second, throughput.reported) == (None, 53_000.0)
    assert throughput.reported_age_seconds == 7201.0


def test_throughput_is_unknown_while_no_progress_can_be_read() -> None:
    job = training()
    job.play(60, COMPUTE, silent=job.nodes)
    assert job.detector.throughput.tokens_per_second is None


def test_a_slow_job_stays_slow_through_a_save_and_its_rate_has_an_age() -> None:
    job = training(floor_tokens_per_second=50_000.0)
    job.tokens_per_second = 30_000.0
    job.play(120, COMPUTE)
    job.play(100, AWAIT_SAVE, {0: SAVE})
    slow = job.finding(AlertName.JOB_SLOW)
    assert re.search(r"\(last seen \d+ s ago\)", slow.summary)
    assert re.match(r"30,000 tokens/s, reported \d+ s ago; the configured minimum is 50,000 tokens/s", slow.evidence[0])
    job.tokens_per_second = 60_000.0
    job.play(200, COMPUTE)
    assert job.findings == ()


def test_a_job_that_may_be_hung_is_not_computing() -> None:
    """After an interval of 40 s between two steps, the next step is not late for 80 s; the GPUs show it within two."""
    job = training()
    job.play(36, SPIN)
    job.play(60, COMPUTE)
    seen = job.play(30, SPIN, {3: IN_BARRIER})
    suspected = [second for second in seen if any(f.alert is AlertName.JOB_HUNG for f in second.findings)]
    assert suspected
    assert {second.state for second in suspected} <= {JobState.WAITING, JobState.HUNG}
    assert "may be hung" in job.detector.reason or job.state is JobState.HUNG


def test_a_job_whose_gpus_cannot_be_read_says_how_old_its_last_step_is() -> None:
    job = training()
    for node in job.nodes:
        job.status[node] = (HostStatus.DRIVER_DOWN, "NVML: driver/library version mismatch")
    job.play(10, COMPUTE)
    assert job.state is JobState.COMPUTING
    assert re.match(
        r"the last step was counted \d s ago; a step usually takes at most \d+\.\d s; ", job.detector.reason
    )


# States do not flap


def states_of(job: Job, *activities: Activity) -> list[JobState]:
    """The state after each second; no step is counted, so power and utilization decide."""
    return [second.state for activity in activities for second in job.play(1, activity)]


def changes(states: list[JobState]) -> int:
    return sum(before is not after for before, after in pairwise(states))


@pytest.mark.parametrize("edge", range(150, 1000, 25))
def test_steady_power_has_one_state_whatever_side_of_a_threshold_a_sample_is_on(edge: int) -> None:
    chance = random.Random(edge)
    job = Job(progress=None)
    steady = [Activity(chance.gauss(edge, 0.01 * edge), chance.gauss(97, 1)) for _ in range(300)]
    assert changes(states_of(job, *steady)) <= 8


def test_a_sample_that_alone_shows_no_state_is_no_evidence_against_the_one_that_is_known() -> None:
    job = Job(progress=None, name="GPU of an unknown model")
    known = [Activity(700, 99)] * 10
    assert states_of(job, *known)[-1] is not JobState.UNKNOWN
    before = job.state
    for _ in range(200):
        job.play(1, Activity(690, 98))
        job.play(1, Activity(705, 99))
    assert job.state is before


def test_states_that_do_not_last_make_the_next_change_need_more_samples() -> None:
    chance = random.Random(1)
    uneven = [Activity(chance.uniform(150, 1000), chance.uniform(0, 100)) for _ in range(420)]
    assert changes(states_of(Job(progress=None), *uneven)) <= 30


@pytest.mark.parametrize("after", [60, 300])
def test_a_real_change_is_seen_in_two_samples(after: int) -> None:
    job = Job(progress=None)
    states = states_of(job, *[COMPUTE] * after, *[PAUSE] * 60, *[COMPUTE] * 60)
    assert states[after + 1] is not JobState.COMPUTING
    assert states[after + 61] is JobState.COMPUTING
    assert changes(states) == 2


def test_after_a_long_gap_the_first_sample_decides() -> None:
    job = Job(progress=None)
    job.play(60, COMPUTE)
    job.skip(600)
    job.play(1, PAUSE)
    assert job.state is not JobState.COMPUTING


def test_a_job_that_works_again_after_a_hang_is_computing() -> None:
    """At the power that it had before: that of the hang's state is not known from samples."""
    job = training()
    job.play(600, SPIN, {3: IN_BARRIER})
    assert job.state is JobState.HUNG
    assert job.play(12, COMPUTE)[-1].state is JobState.COMPUTING
