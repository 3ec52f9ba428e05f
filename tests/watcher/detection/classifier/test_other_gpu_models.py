"""The same samples on other GPUs, other numbers of ranks, with noise: the reading is of the kind, not the case."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.watcher.detection.job_samples import job_sample
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, shipped_profiles
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState, Verdict

PAPER: Final = tomllib.loads((Path(__file__).parents[3] / "data/judge/paper_samples.toml").read_text("utf-8"))
NAMES: Final = {
    "b300": "NVIDIA B300 SXM6 AC", "gb300": "NVIDIA GB300", "gb200": "NVIDIA GB200", "b200": "NVIDIA B200",
    "h200": "NVIDIA H200", "h100-pcie": "NVIDIA H100 PCIe", "h20": "NVIDIA H20", "h100": "NVIDIA H100 80GB HBM3",
    "a100-pcie": "NVIDIA A100-PCIE-40GB", "a100": "NVIDIA A100-SXM4-80GB", "v100-pcie": "Tesla V100-PCIE-32GB",
    "v100": "Tesla V100-SXM2-32GB",
    "l40s": "NVIDIA L40S", "a40": "NVIDIA A40", "a6000": "NVIDIA RTX A6000", "3090": "NVIDIA GeForce RTX 3090",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "p40": "Tesla P40", "gb10": "NVIDIA GB10",
    "mi300x": "AMD Instinct MI300X", "mi325x": "AMD Instinct MI325X", "mi355x": "AMD Instinct MI355X",
    "strix-halo": "AMD gfx1151 (Strix Halo APU)",
    "a10": "NVIDIA A10", "k80": "Tesla K80", "t4": "Tesla T4", "generic": "Accelerator X",
}  # fmt: skip
PROFILES: Final = shipped_profiles()
ROOMY: Final = [p for p in PROFILES if p.certain >= 0.5]  # the others spin and work at the same watts
PAPER_FLOOR, PAPER_LIMIT = 190.0, 1100.0
Scale = Callable[[float, PowerProfile], float]


def by_limit(watts: float, board: PowerProfile) -> float:
    """The same share of the limit."""
    return watts * board.limit_watts / PAPER_LIMIT


def by_published_floor(watts: float, board: PowerProfile) -> float:
    """The published floor is this GPU's, the limit its limit."""
    if watts <= PAPER_FLOOR:
        return watts * board.floor_watts / PAPER_FLOOR
    share = (watts - PAPER_FLOOR) / (PAPER_LIMIT - PAPER_FLOOR)
    return board.floor_watts + share * (board.limit_watts - board.floor_watts)


def by_profile_floor(watts: float, board: PowerProfile) -> float:
    """The profile's floor is this GPU's, the limit its limit."""
    measured = PROFILES[0]
    if watts <= measured.floor_watts:
        return watts * board.floor_watts / measured.floor_watts
    share = (watts - measured.floor_watts) / (PAPER_LIMIT - measured.floor_watts)
    return board.floor_watts + share * (board.limit_watts - board.floor_watts)


def judged(name: str, board: PowerProfile, scale: Scale, progress: StepProgress | None = None) -> Verdict:
    row: dict[str, Any] = PAPER[name]
    return classify(
        job_sample(
            [scale(watts, board) for watts in row["watts"]], row["utilization"], nodes=2, name=NAMES[board.name],
            held_bytes=row["held_gigabytes"] * 1e9, limit_watts=board.limit_watts,
        ),
        progress=progress,
    )  # fmt: skip


def test_every_shipped_profile_has_a_gpu_here() -> None:
    assert [p.name for p in PROFILES] == list(NAMES)


@pytest.mark.parametrize(
    ("board", "scale"),
    [
        pytest.param(board, scale, id=f"{board.name}-{scale.__name__}")
        for board in ROOMY
        for scale in (by_limit, by_published_floor, by_profile_floor)
        # Rest takes a larger share there, whatever the limit.
        if scale is not by_limit or board.floor_watts <= 0.28 * board.limit_watts
    ],
)
@pytest.mark.parametrize("name", PAPER)
def test_a_published_sample_scaled_to_a_gpu_keeps_its_state(name: str, board: PowerProfile, scale: Scale) -> None:
    verdict = judged(name, board, scale)
    row: dict[str, Any] = PAPER[name]
    if name == "light healthy training" and board.name != "b300":
        # One job of one GPU, in no published band: between floor and plateau two readings stand.
        unsure = verdict.state is PowerState.COMMUNICATION and verdict.confidence < 0.5
        assert unsure or verdict.state is PowerState.COMPUTE
        assert judged(name, board, scale, StepProgress.ADVANCING).state is PowerState.COMPUTE
        return
    if name == "communication" and board.name != "b300":
        # Measured on one model. The others also compute at that share of their limit, so both are named.
        assert verdict.state is PowerState.COMPUTE
        assert verdict.confidence < 0.7
        assert verdict.alternative is not None
        assert verdict.alternative.state is PowerState.COMMUNICATION
        return
    assert (verdict.state, verdict.pattern) == (row["state"], row["shape"]), verdict.why
    assert [suspect.rank for suspect in verdict.suspects] == row["suspects"]


@pytest.mark.parametrize("scale", [by_published_floor, by_profile_floor], ids=lambda scale: scale.__name__)
@pytest.mark.parametrize("board", [p for p in PROFILES if p not in ROOMY], ids=lambda board: board.name)
@pytest.mark.parametrize("name", PAPER)
def test_a_gpu_without_room_between_rest_and_work_says_so_and_nothing_false(
    name: str, board: PowerProfile, scale: Scale
) -> None:
    verdict = judged(name, board, scale)
    if verdict.state is PowerState.UNKNOWN:
        assert min(PAPER[name]["utilization"]) >= 90
        assert verdict.alternative is not None
        assert verdict.alternative.state is PowerState.HANG
    else:
        assert verdict.state == PAPER[name]["state"]


# Rank counts and noise.


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("board", ROOMY, ids=lambda board: board.name)
def test_one_rank_low_among_any_number_at_the_floor_is_a_hang_and_named(board: PowerProfile, seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice((3, 4, 8, 16, 32))
    culprit = chance.randrange(1, ranks)
    idle = chance.uniform(board.idle_watts, 0.85 * board.floor_watts)
    watts = [idle + chance.uniform(0, min(30.0, 0.3 * idle)) * (rank != culprit) for rank in range(ranks)]
    busy = [0.0 if rank == culprit else float(chance.choice((100, 99, 97, 94))) for rank in range(ranks)]
    verdict = classify(job_sample(watts, busy, name=NAMES[board.name], limit_watts=board.limit_watts))
    assert verdict.state is PowerState.HANG, verdict.why
    assert [suspect.rank for suspect in verdict.suspects] == [culprit]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("board", ROOMY, ids=lambda board: board.name)
def test_plain_work_is_never_a_hang_whatever_the_noise(board: PowerProfile, seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice((1, 2, 4, 8, 16))
    level = chance.uniform(0.43, 0.98) * board.limit_watts
    watts = [level * chance.uniform(0.95, 1.02) for _ in range(ranks)]
    busy = [float(chance.randint(84, 100)) for _ in range(ranks)]
    verdict = classify(job_sample(watts, busy, name=NAMES[board.name], limit_watts=board.limit_watts))
    assert verdict.state in (PowerState.COMPUTE, PowerState.COMMUNICATION, PowerState.STARVATION), verdict.why


# A rank 0 that is low.


def rank_0_low(percent: float, held_bytes: float, ranks: int = 8) -> Verdict:
    watts = [141.0] + [150.0] * (ranks - 1)
    busy = [percent] + [100.0] * (ranks - 1)
    return classify(job_sample(watts, busy, name=NAMES["h100"], limit_watts=700, held_bytes=held_bytes))


def test_a_rank_0_that_moves_a_little_is_surely_saving_and_one_at_zero_is_not() -> None:
    moving, still = rank_0_low(5, 41e9), rank_0_low(0, 41e9)
    assert moving.state is still.state is PowerState.CHECKPOINT
    assert moving.confidence >= 0.8
    assert still.confidence <= 0.6
    assert still.alternative is not None
    assert still.alternative.state is PowerState.HANG


def test_of_two_gpus_rank_0_low_is_hardly_more_a_save_than_a_hang() -> None:
    assert rank_0_low(0, 41e9, ranks=2).confidence <= 0.5


def test_with_bare_contexts_nothing_can_be_saved() -> None:
    verdict = rank_0_low(0, 1.1e9)
    assert verdict.state is PowerState.HANG
    assert verdict.alternative is not None
    assert verdict.alternative.state is PowerState.WAITING
    assert [suspect.rank for suspect in verdict.suspects] == [0]


# GPUs that rest.


def test_all_at_zero_right_after_work_is_a_pause_and_a_single_gpu_is_just_idle() -> None:
    pause = classify(job_sample([91.0, 84.0], [0, 0], name="Accelerator X", limit_watts=250))
    alone = classify(job_sample([91.0], [0], name="Accelerator X", limit_watts=250))
    assert (pause.state, alone.state) == (PowerState.CHECKPOINT, PowerState.IDLE)


def test_a_gpu_that_is_fed_now_and_then_at_the_power_of_work_waits_for_data() -> None:
    verdict = classify(job_sample([107.0], [9], name="NVIDIA A40", limit_watts=300))
    assert verdict.state is PowerState.STARVATION


def test_gpus_that_take_turns_at_the_power_of_work_compute() -> None:
    verdict = classify(job_sample([67.0, 147.0], [0, 34], name=NAMES["a100-pcie"], limit_watts=250))
    assert verdict.state is PowerState.COMPUTE
    assert verdict.confidence < 0.5


def test_an_empty_host_is_surely_idle_only_if_its_processes_were_listed() -> None:
    seen = job_sample([70.0] * 8, [0] * 8, name=NAMES["h100"], limit_watts=700, held_bytes=4e6)
    unlisted = classify(seen)
    assert unlisted.confidence <= 0.75
    assert unlisted.alternative is not None
    assert unlisted.alternative.state is PowerState.HANG
    nodes = tuple(replace(node, processes=()) for node in seen.nodes)
    assert classify(replace(seen, nodes=nodes)).confidence >= 0.9
    # A single GPU says less: the job may run on others that are not in the sample.
    alone = classify(job_sample([70.0], [0], name=NAMES["h100"], limit_watts=700, held_bytes=4e6))
    assert alone.confidence < 0.6
    assert alone.alternative is not None
    assert alone.alternative.state is PowerState.HANG


# One GPU.


def test_a_busy_gpu_alone_near_a_guessed_floor_is_not_called_a_hang() -> None:
    assert classify(job_sample([60.0], [100], name="Accelerator X", limit_watts=260)).state is PowerState.UNKNOWN
    assert classify(job_sample([60.0] * 2, [100] * 2, name="Accelerator X", limit_watts=260)).state is PowerState.HANG
