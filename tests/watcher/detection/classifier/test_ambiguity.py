"""Every verdict with an alternative names one check that decides, fit to what the sample lacks."""

from __future__ import annotations

import contextlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watcher.detection.job_samples import B300, job_sample
from tests.watcher.detection.simulated_seconds import SPIN_ROUGHLY, Job
from wattwatch.collectors.samples import CheckpointEntry, CheckpointSample, ProgressSample, ReadingStatus
from wattwatch.watcher.detection.classifier.ambiguity import ambiguity_table
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import AlertName, JobProgress, JobSample, PowerState, Verdict
from wattwatch.watcher.recordings.inputs import InputError, read_input
from wattwatch.watcher.recordings.triage import triage_source

DATA = Path(__file__).parents[3] / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "backtest" / "cases.json").read_text("utf-8"))["cases"]
PAPER: dict[str, dict[str, Any]] = tomllib.loads((DATA / "judge" / "paper_samples.toml").read_text("utf-8"))
LOW, ALL = [0.0] * 8, [100.0] * 8
RANK_0_LOW = [0.0] + [100.0] * 7


def has_its_deciding_check(verdict: Verdict) -> None:
    if verdict.alternative is not None:
        assert verdict.alternative.state is not verdict.state
    if verdict.alternative is not None or verdict.state is PowerState.UNKNOWN:
        assert verdict.deciding_check, verdict
        assert not verdict.deciding_check.endswith(".")
    elif verdict.state is not PowerState.GPU_FAULT:
        assert verdict.deciding_check is None


@pytest.mark.parametrize("word", [None, *StepProgress])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_every_public_case_names_the_check_that_would_decide(case: dict[str, Any], word: StepProgress | None) -> None:
    # Not every reporter told a reading.
    with contextlib.suppress(InputError):
        source = read_input(case["id"], json.dumps(case).encode())
        for triage in triage_source(case["id"], source, word, None):
            has_its_deciding_check(triage.verdict)


@pytest.mark.parametrize("word", [None, *StepProgress])
@pytest.mark.parametrize("row", PAPER.values(), ids=PAPER)
def test_every_published_sample_names_it(row: dict[str, Any], word: StepProgress | None) -> None:
    has_its_deciding_check(classify(job_sample(row["watts"], row["utilization"], nodes=2), progress=word))


READINGS = st.tuples(st.none() | st.floats(0, 1100), st.none() | st.floats(0, 100))


@given(
    st.lists(READINGS, min_size=1, max_size=8),
    st.sampled_from([B300, "Tesla T4", None]),
    st.sampled_from([1100.0, None]),
    st.sampled_from([82e9, 4e6, None]),
    st.none() | st.sampled_from(StepProgress),
    st.booleans(),
)
def test_any_sample_names_it(
    readings: list[tuple[float | None, float | None]],
    name: str | None,
    limit: float | None,
    held: float | None,
    word: StepProgress | None,
    mig: bool,
) -> None:
    watts, busy = zip(*readings, strict=True)
    has_its_deciding_check(
        classify(job_sample(watts, busy, name=name, limit_watts=limit, held_bytes=held, mig=mig), progress=word)
    )


def test_every_pair_has_checks_and_only_known_sources() -> None:
    table = ambiguity_table()
    sources = {check.source for pair in (*table.pairs.values(), table.otherwise) for check in pair} - {None}
    assert sources == set(table.sources)
    assert all(len(pair) == 2 for pair in table.pairs)


def told(sample: JobSample, progress: StepProgress | None = None) -> str:
    return classify(sample, progress=progress).deciding_check or ""


def at_step(step: int, age_seconds: float, data_wait_ms: float | None = None) -> JobProgress:
    source = ProgressSample("/runs/a/heartbeat/rank-0.json", "heartbeat", step, data_wait_ms=data_wait_ms)
    return JobProgress(step=step, age_seconds=age_seconds, sources=(source,))


def test_a_hang_without_a_counter_asks_for_one() -> None:
    said = told(job_sample([190.0] * 8, ALL))
    assert said == (
        "Check whether the step counter is moving (not known here: see the job's log; give "
        "`wattwatch triage` the answer with --progress advancing or --progress stalled)"
    )


def test_a_hang_with_a_counter_says_at_which_step_it_is() -> None:
    assert "(now at step 1,204, last changed 40 s ago)" in told(
        job_sample([190.0] * 8, ALL, progress=at_step(1204, 40.0))
    )


def test_steps_that_the_user_reported_are_not_asked_for_again() -> None:
    said = told(job_sample([190.0] * 8, ALL), StepProgress.STALLED)
    assert "counter" not in said
    assert "stacks" in said


def test_a_save_is_decided_by_its_files() -> None:
    sample = job_sample([190.0] * 8, RANK_0_LOW)
    assert told(sample).startswith("Check whether files in the checkpoint directory grow (not known here: list")
    entry = CheckpointEntry("step-100", 100, None, int(3e9), 12.0, "")
    seen = replace(sample, checkpoints=(CheckpointSample("/ckpt/a", (entry,), 1.0),))
    assert (
        told(seen)
        == "Check whether files in the checkpoint directory grow (newest: step-100, 3.0 GB, last changed 12 s ago)"
    )


def test_starvation_is_decided_by_the_waits_for_data() -> None:
    row = PAPER["starvation"]
    sample = job_sample(row["watts"], row["utilization"], nodes=2)
    assert told(sample).startswith("Check whether ranks wait for data")
    waits = replace(sample, progress=at_step(5, 2.0, data_wait_ms=1300.0))
    assert "ranks report waits of up to 1,300 ms per step" in told(waits)


def test_light_work_is_decided_by_power_over_a_minute_where_steps_are_known() -> None:
    sample = job_sample([640.0] * 8, ALL)
    assert classify(sample).state is PowerState.COMMUNICATION
    assert "Watch power for a minute" in told(sample, StepProgress.ADVANCING)


def test_mig_says_why_power_does_not_decide() -> None:
    sliced = job_sample([400.0] * 8, [None] * 8, mig=True, reasons={"utilization_percent": ReadingStatus.MIG})
    assert classify(sliced).state is PowerState.UNKNOWN
    assert "--progress" in told(sliced)
    assert "nvidia-smi reports power only for the whole GPU" in told(sliced)


def test_an_unknown_state_without_gpus_says_what_to_check() -> None:
    assert "nvidia-smi" in told(job_sample([], []))


def test_a_suspected_hang_without_a_counter_says_what_would_confirm_it() -> None:
    job = Job(progress=None)
    job.play(60, replace(SPIN_ROUGHLY, watts=900, utilization=99))
    job.play(120, SPIN_ROUGHLY)
    hung = [f for look in job.observed for f in look.findings if f.alert is AlertName.JOB_HUNG]
    assert not hung[0].confirmed
    assert any(text.startswith("to confirm: check whether the step counter") for text in hung[0].evidence)
