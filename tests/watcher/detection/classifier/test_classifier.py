"""One sample -> one verdict: the published bands, the shapes, and the samples that must not be forced into one."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.detection.job_samples import job_sample
from wattwatch.collectors.samples import HostStatus, MissingGpu, ReadingStatus
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import JobProgress, JobSample, NodeState, PowerState, UtilizationPattern

PAPER = tomllib.loads((Path(__file__).parents[3] / "data/judge/paper_samples.toml").read_text("utf-8"))
STALLED, ADVANCING = StepProgress.STALLED, StepProgress.ADVANCING


@pytest.mark.parametrize("name", PAPER)
def test_published_samples_get_their_state_shape_and_suspects(name: str) -> None:
    row: dict[str, Any] = PAPER[name]
    verdict = classify(job_sample(row["watts"], row["utilization"], held_bytes=row["held_gigabytes"] * 1e9, nodes=2))
    assert (verdict.state, verdict.pattern) == (row["state"], row["shape"])
    assert [suspect.rank for suspect in verdict.suspects] == row["suspects"]
    assert 0 < verdict.confidence <= 1
    assert "W" in verdict.why
    assert verdict.advice


def test_light_training_is_sure_only_when_steps_advance() -> None:
    row = PAPER["light healthy training"]
    silent = classify(job_sample(row["watts"], row["utilization"]))
    moving = classify(job_sample(row["watts"], row["utilization"]), progress=ADVANCING)
    assert silent.confidence < 0.5 < moving.confidence
    assert moving.state is PowerState.COMPUTE
    assert silent.alternative is not None
    assert silent.alternative.state is PowerState.COMPUTE


@pytest.mark.parametrize(
    ("utilization", "suspects"),
    [([100] * 8, []), ([100, 100, 100, 0, 100, 100, 100, 100], [3]), ([0] * 8, []), ([0] + [100] * 7, [0])],
)
def test_stalled_steps_decide_and_the_pattern_names_the_rank(utilization: list[float], suspects: list[int]) -> None:
    verdict = classify(job_sample([190] * 8, utilization), progress=STALLED)
    assert verdict.state is PowerState.HANG
    assert [s.rank for s in verdict.suspects] == suspects


def test_all_gpus_at_zero_with_memory_held_is_never_a_hang_by_itself() -> None:
    verdict = classify(job_sample([189] * 8, [0] * 8))
    assert verdict.state is PowerState.IDLE
    assert verdict.confidence <= 0.6
    assert verdict.alternative is not None
    assert verdict.alternative.state is PowerState.HANG


def test_full_utilization_without_memory_or_process_is_a_false_reading() -> None:
    verdict = classify(job_sample([139] * 8, [100] * 8, held_bytes=0))
    assert verdict.state is PowerState.IDLE
    assert "the reported utilization is wrong" in verdict.why


def test_zero_power_beside_high_utilization_is_not_readable() -> None:
    verdict = classify(job_sample([0] * 8, [100] * 8))
    assert verdict.state is PowerState.UNKNOWN
    assert "Power cannot be read on 8 of 8 GPUs" in verdict.why


def test_mig_has_no_utilization_of_the_whole_gpu() -> None:
    verdict = classify(job_sample([600] * 8, [None] * 8, mig=True, reasons={"utilization_percent": ReadingStatus.MIG}))
    assert verdict.state is PowerState.UNKNOWN
    assert "MIG" in verdict.why


def test_a_t4_has_no_room_between_spinning_and_work_so_nothing_is_sure() -> None:
    verdict = classify(job_sample([41] * 8, [100] * 8, name="Tesla T4", limit_watts=70))
    assert verdict.confidence <= 0.3


def test_an_unknown_gpu_name_gets_shares_of_its_limit() -> None:
    verdict = classify(job_sample([480] * 8, [99] * 8, name="Accelerator X", limit_watts=600))
    assert verdict.state is PowerState.COMPUTE


def test_two_busy_gpus_with_a_power_ratio_of_two_are_a_straggler() -> None:
    verdict = classify(job_sample([600, 190], [100, 100]))
    assert verdict.state is PowerState.STRAGGLER
    assert [s.rank for s in verdict.suspects] == [0]


def test_heat_is_named_by_the_gpu_itself() -> None:
    slow = frozenset({"hw_thermal_slowdown"})
    verdict = classify(job_sample([620] * 8, [100] * 8, throttle_reasons=slow))
    assert verdict.state is PowerState.THROTTLE
    assert "hw_thermal_slowdown" in verdict.why


def test_a_lost_gpu_comes_before_every_other_reading() -> None:
    lost = {"power_watts": ReadingStatus.LOST, "utilization_percent": ReadingStatus.LOST}
    verdict = classify(job_sample([None] * 8, [None] * 8, reasons=lost))
    assert verdict.state is PowerState.GPU_FAULT
    assert [s.gpu for s in verdict.suspects] == list(range(8))


def test_a_gpu_that_the_tool_could_not_open_is_a_fault_although_no_row_is_left() -> None:
    missing = (MissingGpu(None, "0000:3B:00.0", ReadingStatus.LOST, "Unable to determine the device handle for GPU"),)
    node = NodeState("node-1", HostStatus.OK, "", 0.5, False, missing_gpus=missing)
    assert classify(JobSample("pretrain", (), (node,))).state is PowerState.GPU_FAULT


@pytest.mark.parametrize("status", [s for s in HostStatus if s is not HostStatus.OK])
def test_without_gpus_there_is_no_verdict_but_a_reason(status: HostStatus) -> None:
    verdict = classify(JobSample("pretrain", (), (NodeState("node-1", status, "as seen", 4.0, fresh=False),)))
    assert verdict.state is PowerState.UNKNOWN
    assert "as seen" in verdict.why
    assert verdict.pattern is UtilizationPattern.UNKNOWN


def with_blind_node(sample: JobSample, expected_gpus: int | None) -> JobSample:
    blind = NodeState("node-9", HostStatus.UNREACHABLE, "no line", 9.0, fresh=False, expected_gpus=expected_gpus)
    return replace(sample, nodes=(*sample.nodes, blind))


@pytest.mark.parametrize(
    ("watts", "utilization"),
    [([985] * 4, [99] * 4), ([191] * 4, [100, 100, 100, 100]), ([191] * 4, [100, 0, 100, 100]), ([189] * 4, [0] * 4)],
)
def test_a_verdict_on_a_part_of_the_job_says_so_and_is_less_sure(watts: list[float], utilization: list[float]) -> None:
    """One of two nodes was blind, and the job was "computing, all ranks are busy, 90 % sure"."""
    whole = classify(job_sample(watts, utilization))
    assert "seen" not in whole.why
    for expected, extent in ((4, "Only 4 of 8 GPUs seen. "), (None, "Only GPUs of 1 of 2 nodes seen. ")):
        part = classify(with_blind_node(job_sample(watts, utilization), expected))
        assert part.why.startswith(extent)
        assert (part.state, part.suspects) == (whole.state, whole.suspects)
        # The unseen ones may be the idle or the working ones: whatever is claimed of a part is no more than a guess.
        assert part.confidence == pytest.approx(min(0.55, 0.75 * whole.confidence), abs=0.006)
        if part.alternative is not None and whole.alternative is not None:
            assert part.alternative.confidence == pytest.approx(0.75 * whole.alternative.confidence, abs=0.006)


def test_gpus_that_cannot_be_judged_are_counted() -> None:
    verdict = classify(job_sample([985] * 8, [99] * 6 + [None] * 2))
    assert verdict.why.startswith("Only 6 of 8 GPUs have valid power and utilization. ")
    assert verdict.confidence < classify(job_sample([985] * 8, [99] * 8)).confidence


def test_a_lost_gpu_is_a_fault_however_many_are_seen() -> None:
    missing = (MissingGpu(None, "0000:3B:00.0", ReadingStatus.LOST, "Unable to determine the device handle for GPU"),)
    sample = job_sample([985] * 4, [99] * 4)
    sample = replace(sample, nodes=(replace(sample.nodes[0], missing_gpus=missing),))
    assert classify(with_blind_node(sample, 4)).confidence == classify(sample).confidence


def test_a_job_without_nodes_is_unknown() -> None:
    assert classify(JobSample("pretrain", (), ())).state is PowerState.UNKNOWN


def test_half_the_gpus_without_power_is_no_band() -> None:
    verdict = classify(job_sample([190, None, None, None], [100] * 4))
    assert verdict.state is PowerState.UNKNOWN


def test_a_counter_that_moves_contradicts_no_shape_at_the_floor() -> None:
    moving = JobProgress(step=7, age_seconds=2.0, line_interval_seconds=5.0)
    assert classify(job_sample([190] * 8, [100] * 8, progress=moving)).state is PowerState.HANG


def test_the_same_sample_always_gets_the_same_text() -> None:
    row = PAPER["starvation"]
    assert len({classify(job_sample(row["watts"], row["utilization"])) for _ in range(5)}) == 1
