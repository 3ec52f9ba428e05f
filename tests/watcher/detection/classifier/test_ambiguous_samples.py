"""Pictures that look like a hang and are none, hangs that look like something else, and GPUs with little room."""

from __future__ import annotations

from dataclasses import replace

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
        verdict = classify(job_sample(watts, [49, 49, 0], name="NVIDIA TITAN RTX", limit_watts=280))
        assert or_else_hang(verdict) or (verdict.state is PowerState.HANG and verdict.confidence <= UNSURE)


@pytest.mark.parametrize("limit_watts", [280, 400, 700])
def test_a_busy_rank_whose_kernels_draw_no_power_waits_for_an_idle_one(limit_watts: float) -> None:
    """Half of the time at 100 % would be half of the way to full power; kernels that spin add next to nothing."""
    rest = 0.22 * limit_watts

    def of(watts: list[float], busy: list[float]) -> Verdict:
        return classify(job_sample(watts, busy, name="Accelerator X", limit_watts=limit_watts))

    stands = of([0.6 * limit_watts, rest + 8, rest], [49, 49, 0])
    assert stands.state is PowerState.HANG
    assert stands.confidence <= UNSURE
    assert [suspect.rank for suspect in stands.suspects] == [2]
    assert stands.alternative is not None
    assert stands.alternative.state is PowerState.STARVATION
    sample = job_sample([0.6 * limit_watts, rest + 8, rest], [49, 49, 0], name="Accelerator X", limit_watts=limit_watts)
    assert classify(sample, progress=StepProgress.ADVANCING).state is PowerState.STARVATION
    # All kernels compute, or several GPUs are idle: as in a job that waits for its input, or starts.
    assert of([0.6 * limit_watts, 0.55 * limit_watts, rest], [49, 49, 0]).state is not PowerState.HANG
    assert of([0.6 * limit_watts, rest + 8, rest, rest], [49, 49, 0, 0]).state is not PowerState.HANG


# GPUs that are not the job's, readings that contradict each other.


def test_a_single_gpu_in_use_among_empty_ones_is_a_job() -> None:
    """wenet-e2e/wenet#1709: "No GPU holds a context" beside one that holds 3,476 MiB."""
    name = "Tesla P100-PCIE-16GB"
    sample = job_sample([32, 27, 26, 26], [4, 0, 0, 0], name=name, limit_watts=250, held_bytes=10e6)
    used = replace(sample.gpus[0], gpu=replace(sample.gpus[0].gpu, memory_used_bytes=3.6e9))
    sample = replace(sample, gpus=(used, *sample.gpus[1:]))
    silent = classify(sample)
    assert silent.state is PowerState.IDLE
    assert "memory is in use" in silent.why
    assert "3 GPUs without allocated memory" in silent.why
    assert classify(sample, progress=StepProgress.ADVANCING).state is PowerState.STARVATION


@pytest.mark.parametrize("memory", [0.0, None])
def test_power_of_work_is_not_idle_because_memory_reads_0(memory: float | None) -> None:
    works = classify(job_sample([611, 618], [50, 52], name="NVIDIA GB200", limit_watts=1000, held_bytes=memory))
    assert works.state is PowerState.COMPUTE
    assert ("memory reading of 2 GPUs is wrong" in works.why) == (memory is not None)


def test_power_below_that_of_work_without_memory_is_a_false_reading() -> None:
    """L40S, 100 % and 0 MiB at 128-145 W (nvidia_gpu_exporter)."""
    ghost = classify(job_sample([128, 145], [100, 100], name="NVIDIA L40S", limit_watts=350, held_bytes=0))
    assert ghost.state is PowerState.IDLE


def test_a_gpu_at_full_power_waits_for_no_input() -> None:
    """Oneflow-Inc/libai#527: one GPU trains at 243 of 250 W, another holds memory and is hardly used."""
    verdict = classify(job_sample([243, 44], [98, 22], name=A100_PCIE, limit_watts=250))
    assert verdict.state is PowerState.COMPUTE
    assert verdict.confidence < UNSURE
    assert classify(job_sample([120, 64], [58, 22], name=A100_PCIE, limit_watts=250)).state is PowerState.STARVATION


def test_a_gpu_that_is_left_out_turns_no_working_one_into_starvation() -> None:
    def of(percent: float) -> PowerState:
        sample = job_sample([58, 140], [0, percent], name="NVIDIA A100-SXM4-80GB", limit_watts=400)
        empty = replace(sample.gpus[0], gpu=replace(sample.gpus[0].gpu, memory_used_bytes=10e6))
        return classify(replace(sample, gpus=(empty, sample.gpus[1]))).state

    assert of(70) is PowerState.COMPUTE
    assert of(20) is PowerState.STARVATION  # most of the time it has nothing to do


def test_gpus_without_utilization_still_have_power() -> None:
    def of(watts: list[float], progress: StepProgress | None = None) -> PowerState:
        return classify(job_sample(watts, [None] * 4, name=H100, limit_watts=700), progress=progress).state

    assert of([610, 600, 620, 615]) is PowerState.COMPUTE
    assert of([610, 600, 620, 120]) is PowerState.UNKNOWN
    assert of([120, 118, 122, 121]) is PowerState.UNKNOWN
    assert of([120, 118, 122, 121], StepProgress.ADVANCING) is PowerState.COMPUTE
    one_unread = classify(job_sample([610, 600, 620, 615], [100, 99, None, 100], name=H100, limit_watts=700))
    assert one_unread.state is PowerState.COMPUTE
    assert one_unread.confidence < UNSURE


def test_gpus_without_power_still_have_utilization() -> None:
    def of(busy: list[float]) -> PowerState:
        return classify(job_sample([None] * 4, busy, name=H100, limit_watts=700)).state

    assert of([0, 0, 0, 0]) is PowerState.IDLE
    assert of([20, 0, 90, 45]) is PowerState.STARVATION
    assert of([100, 100, 100, 100]) is PowerState.UNKNOWN
    assert of([0, 100, 100, 100]) is PowerState.UNKNOWN


# One GPU, and rank 0.


@pytest.mark.parametrize(
    ("name", "limit_watts", "watts"),
    [
        (H100, 700, 121),
        ("NVIDIA B200", 1000, 195),
        ("NVIDIA A100-SXM4-40GB", 400, 77),
        ("Tesla V100-PCIE-32GB", 250, 46),
    ],
)
def test_a_gpu_alone_at_the_floor_at_full_utilization_is_the_published_signature(
    name: str, limit_watts: float, watts: float
) -> None:
    verdict = classify(job_sample([watts], [100], name=name, limit_watts=limit_watts))
    assert verdict.state is PowerState.HANG
    assert verdict.confidence > 0.5


def test_a_rank_0_that_holds_little_is_hardly_saving() -> None:
    """A save of what these GPUs hold takes seconds; a hang lasts until somebody ends it."""

    def of(held_bytes: float | None) -> PowerState:
        sample = job_sample([70, 77], [0, 100], name="NVIDIA A100-SXM4-40GB", limit_watts=400, held_bytes=held_bytes)
        return classify(sample).state

    assert of(2.8e9) is PowerState.HANG
    assert of(38e9) is PowerState.CHECKPOINT
    assert of(None) is PowerState.CHECKPOINT


# Power that was published for a model, and the profile that rests on it.


@pytest.mark.parametrize(
    ("name", "limit_watts", "watts", "percent", "states"),
    [
        ("NVIDIA B200", 1000, 137, 0, {PowerState.IDLE}),
        ("NVIDIA B200", 1000, 274, 98, {PowerState.COMPUTE}),
        ("NVIDIA B200", 1000, 294, 98, {PowerState.COMPUTE}),
        ("NVIDIA GB200", 1200, 984, 98, {PowerState.COMPUTE}),
        (H100, 700, 100, 100, {PowerState.HANG}),
        (H100, 700, 202, 98, {PowerState.COMPUTE}),
        (H100, 700, 317, 98, {PowerState.COMPUTE}),
        ("NVIDIA H200", 700, 298, 98, {PowerState.COMPUTE}),
        ("NVIDIA GB10", None, 22, 96, {PowerState.HANG}),
        ("NVIDIA GB10", None, 13, 96, {PowerState.HANG}),
        ("NVIDIA GB10", None, 45, 96, {PowerState.COMPUTE, PowerState.COMMUNICATION}),
        ("NVIDIA GB10", None, 90, 96, {PowerState.COMPUTE}),
        ("Tesla V100-PCIE-32GB", 250, 44, 100, {PowerState.HANG}),
        ("NVIDIA L40S", 350, 99, 0, {PowerState.IDLE}),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 600, 120, 100, {PowerState.HANG}),
        ("AMD Instinct MI300X", 750, 191, 0, {PowerState.IDLE}),
        ("AMD Instinct MI325X", 1000, 430, 100, {PowerState.COMPUTE}),
        ("AMD Instinct MI355X", 1400, 238, 0, {PowerState.IDLE}),
        ("AMD Instinct MI355X", 1400, 600, 97, {PowerState.COMPUTE}),
        ("AMD gfx1151 (Strix Halo APU)", None, 54, 100, {PowerState.UNKNOWN}),
    ],
)
def test_published_power_gets_the_state_that_was_published_or_none(
    name: str, limit_watts: float | None, watts: float, percent: float, states: set[PowerState]
) -> None:
    verdict = classify(job_sample([watts] * 4, [percent] * 4, name=name, limit_watts=limit_watts))
    assert verdict.state in states, verdict.why


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
