"""Pictures that look like a hang and are none, hangs that look like something else, and GPUs with little room."""

from __future__ import annotations

import pytest

from tests.watcher.detection.job_samples import job_sample
from wattwatch.watcher.detection.baselines.profiles import profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState, Verdict

H100 = "NVIDIA H100 80GB HBM3"
A100_PCIE = "NVIDIA A100-PCIE-40GB"
UNSURE = 0.6


def of_h100(watts: list[float], busy: list[float], progress: StepProgress | None = None) -> Verdict:
    return classify(job_sample(watts, busy, name=H100, limit_watts=700), progress=progress)


def or_else_hang(verdict: Verdict) -> bool:
    """Said so that a missed hang is not hidden."""
    other = verdict.alternative
    return verdict.confidence <= UNSURE and other is not None and other.state is PowerState.HANG


# One rank is low.


def one_low(rank: int, percent: float, progress: StepProgress | None = None) -> Verdict:
    watts, busy = [150.0] * 8, [100.0] * 8
    watts[rank], busy[rank] = 142.0, percent
    return of_h100(watts, busy, progress)


@pytest.mark.parametrize("rank", [3, 7])
def test_a_low_rank_that_copies_saves_whichever_gpu_it_has(rank: int) -> None:
    saves = one_low(rank, 4)
    assert saves.state is PowerState.CHECKPOINT
    assert or_else_hang(saves)
    assert [suspect.rank for suspect in saves.suspects] == [rank]
    stands = one_low(rank, 0)
    assert stands.state is PowerState.HANG
    assert [suspect.rank for suspect in stands.suspects] == [rank]


def test_a_per_cent_is_no_copying_and_makes_no_save_sure() -> None:
    assert one_low(0, 4).confidence > 0.8
    assert or_else_hang(one_low(0, 1))
    assert one_low(3, 1).state is PowerState.HANG


@pytest.mark.parametrize("rank", [0, 3])
def test_a_low_rank_in_a_job_that_advances_saves(rank: int) -> None:
    assert one_low(rank, 0, StepProgress.ADVANCING).state is PowerState.CHECKPOINT
    assert one_low(rank, 0, StepProgress.STALLED).state is PowerState.HANG


@pytest.mark.parametrize("rank", [0, 3])
def test_with_bare_contexts_a_low_rank_saves_nothing(rank: int) -> None:
    watts, busy = [150.0] * 8, [100.0] * 8
    watts[rank], busy[rank] = 142.0, 4.0
    bare = job_sample(watts, busy, name=H100, limit_watts=700, held_bytes=1.1e9)
    assert classify(bare).state is PowerState.HANG
    assert classify(bare, progress=StepProgress.ADVANCING).state is PowerState.COMMUNICATION


@pytest.mark.parametrize("held_bytes", [None, 4e6, 1.1e9, 60e9])
@pytest.mark.parametrize("watts", [70.0, 115.0, 150.0, 240.0, 600.0])
@pytest.mark.parametrize(
    "busy",
    [[0] * 4, [100] * 4, [0, 100, 100, 100], [100, 100, 0, 100], [100, 0, 0, 0], [100, 100, 0, 0], [30, 0, 60, 9]],
)
def test_a_user_who_reports_advancing_steps_never_gets_a_hang_and_one_who_reports_stalled_steps_always_does(
    busy: list[float], watts: float, held_bytes: float | None
) -> None:
    shown = job_sample([watts] * 4, busy, name=H100, limit_watts=700, held_bytes=held_bytes)
    assert classify(shown, progress=StepProgress.ADVANCING).state is not PowerState.HANG
    assert classify(shown, progress=StepProgress.STALLED).state is PowerState.HANG


# All are busy near the floor.


def test_gpus_whose_kernels_end_move_over_a_poor_link() -> None:
    moves = classify(job_sample([82, 70, 76], [97, 99, 98], name=A100_PCIE, limit_watts=250))
    assert moves.state is PowerState.COMMUNICATION
    assert or_else_hang(moves)
    spins = classify(job_sample([82, 70, 76], [97, 100, 98], name=A100_PCIE, limit_watts=250))
    assert spins.state is PowerState.HANG
    # As little as spinning draws: it reads 96 % at times (nccl#2353).
    assert of_h100([121, 125, 122, 124], [96, 96, 97, 96]).state is PowerState.HANG


def test_a_busy_memory_controller_is_work_at_whatever_power() -> None:
    light = job_sample([130] * 4, [100] * 4, name=H100, limit_watts=700, memory_utilization_percent=22)
    still = job_sample([130] * 4, [100] * 4, name=H100, limit_watts=700, memory_utilization_percent=0)
    works = classify(light)
    assert (works.state, works.at_floor) == (PowerState.COMMUNICATION, False)
    assert or_else_hang(works)
    assert classify(still).state is PowerState.HANG


def test_a_gpu_alone_hangs_only_where_memory_is_known_to_be_held() -> None:
    held = classify(job_sample([122], [100], name=H100, limit_watts=700))
    unknown = classify(job_sample([122], [100], name=H100, limit_watts=700, held_bytes=None))
    assert held.state is PowerState.HANG
    assert unknown.state is PowerState.UNKNOWN
    assert or_else_hang(unknown)


# Work that is not all of one kind.


def test_a_gpu_alone_has_nobody_to_wait_for() -> None:
    assert of_h100([190], [98]).state is PowerState.COMPUTE
    assert of_h100([190] * 8, [98] * 8).state is PowerState.COMMUNICATION
    assert or_else_hang(of_h100([190], [98]))
    assert or_else_hang(of_h100([235], [98]))


def test_light_work_on_eight_gpus_is_compute_or_else_communication() -> None:
    """Serving a small batch over eight H100s averages 202 to 247 W (ml-energy/leaderboard, 888 configurations)."""
    for watts in (212, 235, 247):
        verdict = of_h100([watts] * 8, [98] * 8)
        assert verdict.state is PowerState.COMPUTE
        assert verdict.confidence <= UNSURE
        assert verdict.alternative is not None
        assert verdict.alternative.state is PowerState.COMMUNICATION


@pytest.mark.parametrize(
    ("watts", "busy"),
    [
        ([650] * 4 + [118] * 4, [100] * 4 + [0] * 4),
        ([650] * 2 + [118] * 6, [100] * 2 + [0] * 6),
        ([420, 118, 117, 118], [97, 0, 0, 0]),
        ([610, 190, 590, 180], [100, 0, 100, 0]),
    ],
    ids=["two jobs", "two boards work", "one serves", "pipeline"],
)
def test_gpus_that_work_beside_gpus_that_rest_are_no_hang(watts: list[float], busy: list[float]) -> None:
    verdict = of_h100(watts, busy)
    assert verdict.state is PowerState.COMPUTE
    assert or_else_hang(verdict)


def test_scatter_with_a_gpu_that_runs_nothing_may_be_a_hang() -> None:
    for scale in (0.9, 1.0, 1.15, 1.4):
        watts = [scale * each for each in (166, 83, 71)]
        assert or_else_hang(classify(job_sample(watts, [49, 49, 0], name="NVIDIA TITAN RTX", limit_watts=280)))


def test_a_desktop_is_idle() -> None:
    desktop = job_sample([18], [12], name="NVIDIA GeForce RTX 3060", limit_watts=170, held_bytes=0.9e9)
    assert classify(desktop).state is PowerState.IDLE


# GPUs of which little of the limit is left between rest and work.


@pytest.mark.parametrize(
    ("name", "limit_watts", "rest", "spin", "work"),
    [
        ("NVIDIA L4", 72, 29, 32, 68),
        ("NVIDIA A10", 150, 57, 62, 140),
        ("NVIDIA T1000", 50, 20, 22, 48),
        ("NVIDIA RTX A2000", 70, 24, 30, 66),
    ],
)
def test_small_gpus_are_not_judged_by_power_that_says_nothing(
    name: str, limit_watts: float, rest: float, spin: float, work: float
) -> None:
    def of(watts: list[float], busy: list[float]) -> Verdict:
        return classify(job_sample(watts, busy, name=name, limit_watts=limit_watts))

    assert of([rest, rest], [0, 0]).state is PowerState.IDLE
    stands = of([spin] * 4, [100] * 4)
    assert stands.state is PowerState.UNKNOWN
    assert or_else_hang(stands)
    assert of([work] * 4, [100] * 4).state is PowerState.COMPUTE
    # The sample shows the floor itself.
    assert of([spin, spin, rest, spin], [100, 100, 0, 100]).state is PowerState.HANG


def test_a_small_limit_leaves_no_room_and_a_larger_one_does() -> None:
    assert profile_for(None, 72).certain < 0.5 <= profile_for(None, 165).certain


def test_gpus_whose_memory_keeps_its_clock_rest_far_above_idle() -> None:
    def of(watts: float, percent: float) -> PowerState:
        name = "NVIDIA GeForce RTX 3090"
        return classify(job_sample([watts] * 4, [percent] * 4, name=name, limit_watts=350)).state

    assert of(105, 0) is PowerState.IDLE
    assert of(23, 0) is PowerState.IDLE
    assert of(115, 100) is PowerState.HANG
    assert of(320, 98) is PowerState.COMPUTE


def test_hung_l40s_gpus_at_94_to_97_watts_are_found() -> None:
    stands = job_sample([97, 94, 95, 96], [100] * 4, name="NVIDIA L40S", limit_watts=350, held_bytes=2.7e9)
    assert classify(stands).state is PowerState.HANG


@pytest.mark.parametrize(
    ("name", "limit_watts", "rest", "spin", "light"),
    [
        ("NVIDIA H100 PCIe", 350, 90, 104, 160),
        ("NVIDIA H100 NVL", 400, 97, 112, 170),
        ("NVIDIA A40", 300, 81, 92, 135),
        ("NVIDIA RTX A6000", 300, 83, 92, 140),
        ("NVIDIA H20", 500, 112, 135, 200),
        ("NVIDIA A100 80G...", 300, 61, 72, 110),
        ("NVIDIA A100-PCI...", 250, 38, 60, 110),
    ],
)
def test_gpus_of_less_power_have_floors_of_their_own(
    name: str, limit_watts: float, rest: float, spin: float, light: float
) -> None:
    def of(watts: float, percent: float) -> PowerState:
        return classify(job_sample([watts] * 4, [percent] * 4, name=name, limit_watts=limit_watts)).state

    assert of(rest, 0) is PowerState.IDLE
    assert of(spin, 100) is PowerState.HANG
    assert of(light, 100) in (PowerState.COMPUTE, PowerState.COMMUNICATION)


def test_what_lies_above_a_guessed_floor_may_yet_be_spinning() -> None:
    verdict = classify(job_sample([104] * 4, [100] * 4, name="Accelerator X", limit_watts=320))
    assert verdict.state is PowerState.COMMUNICATION
    assert or_else_hang(verdict)
