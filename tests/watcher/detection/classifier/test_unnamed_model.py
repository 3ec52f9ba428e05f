"""GPUs whose model and power limit the input does not name, as in the query of arXiv 2608.05944, section 3.

Its watts belong to no range: what is judged is the pattern, how the GPUs of the sample compare, and what holds on every
GPU model.
"""

from __future__ import annotations

import random
import re

import pytest

from tests.watcher.detection.job_samples import job_sample
from wattwatch.watcher.detection.baselines.baseline import HIGHEST_FLOOR_WATTS
from wattwatch.watcher.detection.baselines.profiles import highest_communication_watts, shipped_profiles
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState, Verdict

SCATTERED = [15.0, 40.0, 15.0, 85.0, 100.0, 85.0, 85.0, 60.0]


def unnamed(watts: list[float], busy: list[float], progress: StepProgress | None = None) -> Verdict:
    return classify(job_sample(watts, busy, name=None, limit_watts=None), progress=progress)


@pytest.mark.parametrize("watts", [320.0, 540.0, 640.0, 800.0])
@pytest.mark.parametrize("percent", [100.0, 88.0])
def test_evenly_busy_gpus_of_an_unknown_model_belong_to_no_power_range(watts: float, percent: float) -> None:
    verdict = unnamed([watts + i for i in range(8)], [percent + i % 2 for i in range(8)])
    assert verdict.state is PowerState.UNKNOWN
    assert verdict.alternative is not None
    assert verdict.alternative.state is PowerState.COMPUTE
    assert "--board" in verdict.advice
    assert "columns name and power.limit" in verdict.advice
    assert "columns name and power.limit" in (verdict.deciding_check or "")


def test_no_known_gpu_model_communicates_at_the_power_of_the_papers_compute() -> None:
    assert 690 < highest_communication_watts() < 940
    verdict = unnamed([960.0 + i for i in range(16)], [100.0] * 16)
    assert (verdict.state, verdict.confidence) == (PowerState.COMPUTE, 0.6)


def test_a_scattered_utilization_points_to_the_input_whatever_the_watts() -> None:
    verdict = unnamed([560.0 + 5 * i for i in range(8)], SCATTERED)
    assert verdict.state is PowerState.STARVATION
    assert verdict.confidence < 0.5
    assert verdict.alternative is not None
    assert verdict.alternative.state is PowerState.COMPUTE
    assert "columns name and power.limit" in (verdict.deciding_check or "")


def test_gpus_below_the_highest_known_floor_may_wait() -> None:
    verdict = unnamed([190.0] * 8, [100.0] * 8)
    assert verdict.state is PowerState.UNKNOWN
    assert verdict.alternative is not None
    assert verdict.alternative.state is PowerState.HANG
    assert "--board" in verdict.advice


def test_idle_gpus_of_the_sample_show_the_floor_of_the_others() -> None:
    verdict = unnamed([190.0] * 8, [100.0] * 3 + [0.0] + [100.0] * 4)
    assert verdict.state is PowerState.HANG
    assert [suspect.rank for suspect in verdict.suspects] == [3]


def test_one_gpu_at_twice_the_power_of_the_other_busy_ones_is_a_straggler() -> None:
    verdict = unnamed([190.0] * 3 + [620.0] + [190.0] * 4, [100.0] * 8)
    assert verdict.state is PowerState.STRAGGLER
    assert [suspect.gpu for suspect in verdict.suspects] == [3]
    # The same ratio among GPUs that all work shows no waiting.
    assert unnamed([400.0] * 3 + [840.0] + [400.0] * 4, [100.0] * 8).state is PowerState.UNKNOWN


def test_a_gpu_without_kernels_is_not_at_compute_power() -> None:
    """A B200 idles at 192 W (NVIDIA/TensorRT-LLM#10278): full work on a smaller model."""
    verdict = unnamed([192.0, 196.0], [0.0, 0.0])
    assert verdict.state is PowerState.IDLE
    assert "compute" not in verdict.why
    assert unnamed([500.0] * 2, [0.0] * 2).state is PowerState.UNKNOWN


def test_a_hang_by_stalled_steps_claims_nothing_about_power() -> None:
    verdict = unnamed([190.0] * 8, [100.0] * 8, StepProgress.STALLED)
    assert verdict.state is PowerState.HANG
    assert "more power than GPUs that only wait" not in verdict.why


def test_a_model_without_a_profile_is_not_said_to_be_unnamed() -> None:
    sample = job_sample([60.0], [99.0], name="Some New GPU", limit_watts=None)
    verdict = classify(sample)
    assert verdict.state is PowerState.UNKNOWN
    assert "there is no power profile for Some New GPU" in verdict.why
    assert "names neither" not in f"{verdict.why} {verdict.advice} {verdict.deciding_check}"
    assert "wattwatch calibrate" in verdict.advice
    assert "--board" not in verdict.advice


def test_without_a_model_nothing_is_claimed_that_needs_one() -> None:
    """For random samples: no communication; compute only above every model's communication, or where steps advance."""
    random_numbers = random.Random(5)
    named = re.compile("|".join(rf"\b{profile.name}\b" for profile in shipped_profiles()))
    for _ in range(2000):
        count = random_numbers.randint(1, 16)
        center = random_numbers.uniform(20, 1100)
        watts = [center * random_numbers.uniform(0.9, 1.1) for _ in range(count)]
        busy = [random_numbers.choice((0.0, 4.0, 50.0, 95.0, 100.0, 100.0, 100.0)) for _ in range(count)]
        verdict = unnamed(watts, busy)
        assert verdict.state is not PowerState.COMMUNICATION
        if verdict.state is PowerState.COMPUTE:
            assert min(watts) > highest_communication_watts()
        if verdict.state is PowerState.STARVATION and min(watts) <= HIGHEST_FLOOR_WATTS:
            assert "idle GPUs in this sample" in verdict.why
        assert not named.search(verdict.why)
        advancing = unnamed(watts, busy, StepProgress.ADVANCING)
        assert advancing.state not in (PowerState.HANG, PowerState.UNKNOWN) or max(busy) <= 10
