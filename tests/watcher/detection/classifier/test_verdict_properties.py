"""What holds for every sample, whatever the GPU model: what the user reports is obeyed, the alternative is never the
surer one, and less information or a GPU that is not seen never makes a verdict surer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.watcher.detection.classifier.test_other_gpu_models import NAMES
from tests.watcher.detection.job_samples import job_sample
from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, profile_for, shipped_profiles
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import JobSample, NodeState, PowerState, RankGpu, Verdict

ADVANCING, STALLED = StepProgress.ADVANCING, StepProgress.STALLED
# Below this nothing is claimed: a verdict is a doubt, and names its alternative.
CLAIM: Final = 0.6
RULED_OUT_WHILE_ADVANCING: Final = frozenset({PowerState.HANG, PowerState.IDLE, PowerState.UNKNOWN})
HEALTHY: Final = frozenset(
    {PowerState.COMPUTE, PowerState.COMMUNICATION, PowerState.STARVATION, PowerState.CHECKPOINT, PowerState.STRAGGLER}
)
HIGHEST_LIMIT_WATTS: Final = 1400.0  # of all GPU models
WITHOUT_LIMIT: Final = frozenset({"gb10", "strix-halo"})  # models that report no power limit
PERCENTS: Final = (0.0, 1.0, 3.0, 5.0, 9.0, 11.0, 30.0, 49.0, 50.0, 60.0, 80.0, 89.0, 90.0, 96.0, 99.0, 100.0)
HELD_BYTES: Final = (0.9e9, 3e9, 40e9)
EMPTY_BYTES: Final = 4e6


@dataclass(frozen=True, slots=True)
class Reading:
    watts: float
    percent: float
    held_bytes: float


@st.composite
def samples(draw: st.DrawFn, *, models: tuple[PowerProfile, ...] = shipped_profiles()) -> JobSample:
    """One to nine GPUs of one model, at any power between idle and the limit: alike, or each on its own."""
    model = draw(st.sampled_from(models))
    # The limit of a model differs between sites. Where waiting already takes most of it, no one lowers it further.
    shares = (0.8, 1.0, 1.0, 1.25) if model.certain >= 0.5 else (0.8, 1.0)
    limit = min(HIGHEST_LIMIT_WATTS, model.limit_watts * draw(st.sampled_from(shares)))
    profile = profile_for(NAMES[model.name], limit)
    edges = [0.8 * profile.idle_watts, profile.floor_watts, profile.compute_watts, 1.02 * limit]
    reported_limit = None if model.name in WITHOUT_LIMIT else limit
    watts = st.one_of(*(st.floats(low, high) for low, high in itertools.pairwise(edges) if low < high))
    in_use = st.builds(Reading, watts, st.sampled_from(PERCENTS), st.sampled_from(HELD_BYTES))
    # Memory that reads 0 beside the power of work is a contradiction, and a wrong reading removed is no loss.
    empty = st.builds(Reading, st.floats(edges[0], edges[1]), st.sampled_from(PERCENTS), st.just(EMPTY_BYTES))
    reading = st.one_of(in_use, in_use, empty)
    count = draw(st.sampled_from((1, 2, 3, 4, 8, 9)))
    usual = draw(reading)
    readings = [draw(st.one_of(st.just(usual), reading)) if count < 8 else usual for _ in range(count)]
    if count >= 8:
        readings[draw(st.integers(0, count - 1))] = draw(reading)
    return of(NAMES[model.name], reported_limit, readings)


def of(name: str, limit_watts: float | None, readings: list[Reading]) -> JobSample:
    sample = job_sample([r.watts for r in readings], [r.percent for r in readings], name=name, limit_watts=limit_watts)
    gpus = [change(each, memory_used_bytes=r.held_bytes) for each, r in zip(sample.gpus, readings, strict=True)]
    return replace(sample, gpus=tuple(gpus))


def change(ranked: RankGpu, **fields: object) -> RankGpu:
    return replace(ranked, gpu=replace(ranked.gpu, **fields))  # type: ignore[arg-type]


def without(sample: JobSample, field: str, which: int | None = None) -> JobSample:
    """Without one reading, of one GPU or of all."""
    gpus = (change(g, **{field: None}) if which in (None, i) else g for i, g in enumerate(sample.gpus))
    return replace(sample, gpus=tuple(gpus))


def ordered(verdict: Verdict) -> bool:
    return verdict.alternative is None or verdict.alternative.confidence <= verdict.confidence


# What the user reports.


@settings(max_examples=300)
@given(samples(), st.sampled_from((None, "power_watts", "utilization_percent", "memory_used_bytes", "name")))
def test_with_steps_that_advance_nothing_is_idle_unknown_or_hung_not_even_as_the_alternative(
    sample: JobSample, missing: str | None
) -> None:
    verdict = classify(sample if missing is None else without(sample, missing), progress=ADVANCING)
    assert verdict.state not in RULED_OUT_WHILE_ADVANCING, verdict.why
    assert verdict.alternative is None or verdict.alternative.state not in RULED_OUT_WHILE_ADVANCING, verdict.why


@given(samples(), st.sampled_from((None, "power_watts", "utilization_percent", "memory_used_bytes", "name")))
def test_with_steps_that_stand_still_nothing_is_healthy(sample: JobSample, missing: str | None) -> None:
    verdict = classify(sample if missing is None else without(sample, missing), progress=STALLED)
    assert verdict.state is PowerState.HANG, verdict.why
    assert verdict.state not in HEALTHY


# Confidence.


@given(samples(), st.none() | st.sampled_from(StepProgress))
def test_the_alternative_is_never_surer_than_the_verdict(sample: JobSample, progress: StepProgress | None) -> None:
    verdict = classify(sample, progress=progress)
    assert ordered(verdict)
    assert ordered(replace(verdict, confidence=0.1))


REMOVALS: Final[dict[str, Callable[[JobSample, int], JobSample]]] = {
    "the model": lambda sample, _: without(sample, "name"),
    "the limit": lambda sample, _: without(sample, "power_limit_watts"),
    "model and limit": lambda sample, _: without(without(sample, "name"), "power_limit_watts"),
    "memory": lambda sample, _: without(sample, "memory_used_bytes"),
    "memory of one": lambda sample, which: without(sample, "memory_used_bytes", which),
    "utilization": lambda sample, _: without(sample, "utilization_percent"),
    "utilization of one": lambda sample, which: without(sample, "utilization_percent", which),
    "power": lambda sample, _: without(sample, "power_watts"),
    "power of one": lambda sample, which: without(sample, "power_watts", which),
    "one GPU": lambda sample, which: replace(
        sample, gpus=tuple(g for i, g in enumerate(sample.gpus) if i != which % len(sample.gpus))
    ),
}


@settings(max_examples=300)
@given(samples(), st.sampled_from(sorted(REMOVALS)), st.integers(0, 8))
def test_less_information_never_makes_a_claim_or_makes_one_surer(sample: JobSample, what: str, which: int) -> None:
    """A claim without the reading is at most as sure as the verdict with it, and a doubt never becomes a claim. The one
    exception is a reading that contradicts the others, such as a busy memory controller: it is not removed here."""
    more, less = classify(sample), classify(REMOVALS[what](sample, which % len(sample.gpus)))
    assert less.confidence <= more.confidence or less.confidence < CLAIM, (more, less)


@given(samples(), st.none() | st.integers(1, 8), st.none() | st.sampled_from(StepProgress))
def test_a_node_that_is_not_seen_never_makes_a_verdict_surer(
    sample: JobSample, expected_gpus: int | None, progress: StepProgress | None
) -> None:
    unseen = NodeState("node-9", HostStatus.UNREACHABLE, "", None, fresh=False, expected_gpus=expected_gpus)
    seen = classify(sample, progress=progress)
    partly = classify(replace(sample, nodes=(*sample.nodes, unseen)), progress=progress)
    assert partly.state is seen.state
    assert partly.confidence <= seen.confidence
    assert ordered(partly)


# Power.

# From a hang to plain work. More power on the same GPUs, all evenly busy, leads this way only.
TOWARDS_WORK: Final = (PowerState.HANG, PowerState.UNKNOWN, PowerState.COMMUNICATION, PowerState.COMPUTE)


@given(
    st.sampled_from(shipped_profiles()),
    st.sampled_from((0.8, 1.0, 1.25)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((92.0, 97.0, 100.0)),
    st.sampled_from((None, 40e9)),
    st.booleans(),
)
def test_more_power_on_evenly_busy_gpus_never_moves_a_verdict_towards_a_hang(
    model: PowerProfile, share: float, count: int, percent: float, held_bytes: float | None, named: bool
) -> None:
    limit = model.limit_watts * share
    name = NAMES[model.name] if named else None
    before, hang_before = -1, 1.0
    for step in range(5, 103):
        sample = job_sample(
            [limit * step / 100] * count, [percent] * count, name=name, limit_watts=limit, held_bytes=held_bytes
        )
        verdict = classify(sample)
        place = TOWARDS_WORK.index(verdict.state)
        assert place >= before, (step, verdict)
        hang = max(
            verdict.confidence if verdict.state is PowerState.HANG else 0.0,
            verdict.alternative.confidence
            if verdict.alternative is not None and verdict.alternative.state is PowerState.HANG
            else 0.0,
        )
        assert hang <= hang_before, (step, verdict)
        before, hang_before = place, hang


@given(st.sampled_from(shipped_profiles()), st.sampled_from((1, 8)), st.sampled_from((92.0, 100.0)))
def test_with_more_power_evenly_busy_gpus_are_not_less_surely_computing(
    model: PowerProfile, count: int, percent: float
) -> None:
    """An H100 at 0.42 of its limit was compute with 0.70, and at 0.60 communication with 0.45 or compute with 0.50."""
    before = 0.0
    for step in range(5, 103):
        watts = model.limit_watts * step / 100
        sample = job_sample([watts] * count, [percent] * count, name=NAMES[model.name], limit_watts=model.limit_watts)
        verdict = classify(sample)
        if verdict.state is PowerState.COMPUTE:
            assert verdict.confidence >= before, (step, verdict)
            before = verdict.confidence
