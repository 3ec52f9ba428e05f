"""The demo's verdict on the watcher: it may be good only if every fault was named and nothing else was said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattwatch.collectors.simulated.driver import PhaseStarted
from wattwatch.collectors.simulated.scenario import get_scenario
from wattwatch.watcher.demo.receiver import ReceivedAlert
from wattwatch.watcher.demo.score import DemoScore, score_run, second_clear_sample

DEADLOCK, HEALTHY, CHECKPOINT, CRASH = (
    get_scenario("deadlock"),
    get_scenario("healthy"),
    get_scenario("checkpoint"),
    get_scenario("crash"),
)
INJECTED = 1000.4
PHASES = (PhaseStarted("deadlock", 0, INJECTED - 45.0, 0.0), PhaseStarted("deadlock", 1, INJECTED, 0.0))
HUNG = ReceivedAlert(
    status="firing",
    alert="JobHung",
    job="deadlock",
    severity="critical",
    labels={"alertname": "JobHung", "train_job": "deadlock"},
    annotations={"summary": "The job is hung.", "suspects": "rank 3 on deadlock-1 GPU 3"},
    received_seconds=INJECTED + 3.0,
)
STATES = {"deadlock": ["computing", "hung"]}


def score(*notices: ReceivedAlert) -> DemoScore:
    return score_run([DEADLOCK], PHASES, notices, STATES, interval_seconds=1.0, speed=5.0)


def test_the_right_alert_for_the_right_job_and_suspect_passes() -> None:
    result = score(HUNG)
    assert result.good
    (row,) = result.rows
    assert row.late_intervals == pytest.approx(3.0)
    # Samples at 1001 (half before), 1002 and 1003 (all after): received 0.4 s of the scenario after the second.
    assert row.real_milliseconds == pytest.approx(80.0, abs=0.01)


def test_no_alert_is_a_missing_alert() -> None:
    assert score().problems == ("deadlock: JobHung was not sent",)


def test_another_suspect_is_as_bad_as_none() -> None:
    wrong = replace(HUNG, annotations={"suspects": "rank 11 on deadlock-2 GPU 3"})
    assert score(wrong).problems == (
        "deadlock: JobHung does not name rank 3; it names rank 11 on deadlock-2 GPU 3",
        "deadlock: JobHung also names rank 11",
    )
    crowd = replace(HUNG, annotations={"suspects": "rank 3 on deadlock-1 GPU 3, rank 30 on deadlock-1 GPU 4"})
    assert score(crowd).problems == ("deadlock: JobHung also names rank 30",)
    thirty = replace(HUNG, annotations={"suspects": "rank 30"})
    assert "deadlock: JobHung does not name rank 3; it names rank 30" in score(thirty).problems


def test_an_alert_before_its_fault_is_a_false_one() -> None:
    early = replace(HUNG, received_seconds=INJECTED - 2.0)
    before = "deadlock: JobHung was sent before its fault was injected"
    assert score(early).problems == (before, "deadlock: JobHung was not sent")
    assert score(early, HUNG).problems == (before,)


def test_a_warning_that_is_never_raised_is_not_enough() -> None:
    warning = replace(HUNG, severity="warning")
    assert score(warning).problems == ("deadlock: JobHung had severity warning, never critical",)
    assert score(warning, replace(HUNG, received_seconds=INJECTED + 30.0)).good


def test_an_alert_that_is_resolved_while_the_fault_lasts_is_a_problem() -> None:
    over = replace(HUNG, status="resolved", received_seconds=INJECTED + 9.0)
    assert score(HUNG, over).problems == ("deadlock: JobHung was resolved while the fault lasted",)


@pytest.mark.parametrize("job", ["deadlock", "healthy", ""])
def test_any_other_alert_is_a_problem(job: str) -> None:
    extra = replace(HUNG, alert="Straggler", job=job)
    result = score(HUNG, extra)
    assert len(result.problems) == 1
    assert "Straggler was sent, but no such fault was injected" in result.problems[0]


def test_a_checkpoint_must_be_seen_as_one_and_raise_nothing() -> None:
    seen = score_run([CHECKPOINT], (), (), {"checkpoint": ["checkpointing", "computing"]}, 1.0, 5.0)
    assert seen.good
    unseen = score_run([CHECKPOINT], (), (), {"checkpoint": ["computing"]}, 1.0, 5.0)
    assert unseen.problems == ("checkpoint: the job was never checkpointing; its states were: computing",)


def test_a_crash_must_come_with_its_evidence() -> None:
    phases = (PhaseStarted("crash", 1, INJECTED, 0.0),)
    states = {"crash": ["crashed"]}
    bare = replace(HUNG, alert="JobCrashed", job="crash", annotations={"suspects": "rank 5 on crash-2 GPU 1"})
    told = score_run([CRASH], phases, [bare], states, 1.0, 5.0)
    assert told.problems == ("crash: JobCrashed lacks the evidence 'out of memory|oom'",)
    whole = replace(bare, annotations={**bare.annotations, "description": "Out of memory: Killed process 41002"})
    assert score_run([CRASH], phases, [whole], states, 1.0, 5.0).good


def test_a_fault_that_was_not_injected_is_a_problem() -> None:
    result = score_run([DEADLOCK], PHASES[:1], [HUNG], STATES, 1.0, 5.0)
    assert "deadlock: JobHung: its fault was never injected" in result.problems


def test_the_second_clear_sample_lies_two_intervals_after_the_mixed_one() -> None:
    assert second_clear_sample(1000.4, 1.0) == 1003.0
    assert second_clear_sample(1000.0, 1.0) == 1002.0
