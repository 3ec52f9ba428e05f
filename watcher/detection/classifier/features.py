"""The numbers of one job sample that the classifier decides on: pattern of utilization, power, power floor, memory.

A GPU at its power floor does no work, whatever its utilization says: it is idle with a CUDA context, or its NCCL kernel
spins while it waits for another rank. The floor is taken from the nearest of three sources:

1. the sample itself: on every model with both figures known, a spinning GPU draws what an idle one with a context
draws,
   and at most 35 W more; so a GPU that is idle while others are busy shows the floor of all;
2. what was learned about these very GPUs (baselines/);
3. the profile of their model (baselines/profiles.toml).

A GPU of which neither model nor power limit is known has no floor, and its power says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from wattwatch.collectors.samples import GpuSample
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.baselines.baseline import (
    HIGHEST_FLOOR_FRACTION,
    HIGHEST_FLOOR_WATTS,
    OBSERVED_FLOOR_CONFIDENCE,
    JobBaseline,
    max_spin_watts,
)
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, generic_profile, profile_for
from wattwatch.watcher.detection.model import (
    BUSY_PERCENT,
    CONTEXT_BYTES,
    IDLE_PERCENT,
    JobSample,
    RankGpu,
    UtilizationPattern,
    valid_power_watts,
)

# A context with the buffers of NCCL takes 0.4 to 1.5 GB. With no more than that, no model is loaded: nothing can be
# saved.
MAX_BARE_CONTEXT_BYTES: Final = 1.5 * 1024**3
# Floors are learned, or shipped, from a few GPUs; single ones draw a little more.
FLOOR_TOLERANCE: Final = 1.15
MEDIAN_FLOOR_TOLERANCE: Final = 1.03
# With a floor above this share of the limit (a power cap), work draws no more than spinning does.
MAX_FLOOR_SHARE_OF_LIMIT: Final = 0.75
# GPUs that read 100 % without memory or process drew up to 0.41 of their limit (L40S). What draws more, works.
WORK_SHARE_OF_LIMIT: Final = 0.42
SMALL_WORK_SHARE_OF_LIMIT: Final = 0.75  # where idling alone takes up to 0.6 of it
# A profile whose floor is less certain than this is not used: on such models idle and work draw nearly the same.
MIN_FLOOR_CONFIDENCE: Final = 0.5
# With fewer GPUs, a rank missing from a collective cannot be told from rank 0 writing a checkpoint, or from a rank that
# waits for its input.
MIN_GPUS_TO_COMPARE: Final = 3
# A spinning kernel polls a few words of memory. GPUs whose memory controllers do more are working, at whatever power.
MEMORY_BUSY_PERCENT: Final = 5.0
# A reading above 0 % is a kernel that ran. A GPU that gets work now and then reads some per cent, at the power of
# clocks that stay up.
OCCASIONAL_WORK_PERCENT: Final = 1.0
# Steps that changed within this many of their usual intervals count as advancing. Chosen; the detector decides on
# stalls.
ADVANCING_INTERVALS: Final = 3

# Patterns in which exactly one rank stands out.
SINGLE_OUTLIER_PATTERNS: Final = frozenset(
    {UtilizationPattern.ONE_LOW_REST_BUSY, UtilizationPattern.RANK0_LOW_REST_BUSY, UtilizationPattern.ONE_BUSY_REST_LOW}
)


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """The utilization pattern with the GPUs that make it: the low ones among busy ones, or the busy ones among low
    ones."""

    pattern: UtilizationPattern
    outliers: tuple[RankGpu, ...] = ()


def match_pattern(gpus: Sequence[RankGpu]) -> PatternMatch:
    """Pattern of all GPUs with a utilization reading; UNKNOWN where there is none.

    An average over ranks hides the one rank that matters, so none is taken.
    """
    read = [g for g in gpus if g.gpu.utilization_percent is not None]
    if not read:
        return PatternMatch(UtilizationPattern.UNKNOWN)
    low = tuple(g for g in read if (g.gpu.utilization_percent or 0.0) <= IDLE_PERCENT)
    busy = tuple(g for g in read if (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT)
    if len(busy) == len(read):
        return PatternMatch(UtilizationPattern.ALL_BUSY)
    if len(low) == len(read):
        return PatternMatch(UtilizationPattern.ALL_LOW)
    if len(low) + len(busy) < len(read):
        return PatternMatch(UtilizationPattern.SCATTER)
    # Of two GPUs, the low one is the outlier, never the busy one.
    if len(low) == 1:
        rank_0 = low[0].rank == 0
        return PatternMatch(
            UtilizationPattern.RANK0_LOW_REST_BUSY if rank_0 else UtilizationPattern.ONE_LOW_REST_BUSY, low
        )
    if len(busy) == 1:
        return PatternMatch(UtilizationPattern.ONE_BUSY_REST_LOW, busy)
    return PatternMatch(UtilizationPattern.TWO_GROUPS, min(low, busy, key=len))


class StepProgress(StrEnum):
    """What is known of the job's steps, from its own counter or from the user (`--progress`)."""

    ADVANCING = "advancing"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class PowerFeatures:
    """What the classifier decides on. `gpus` are the job's GPUs with both power and utilization."""

    gpus: tuple[RankGpu, ...]
    profile: PowerProfile
    profile_known: bool  # the profile is of this model, or scaled to its limit; otherwise its watts mean nothing
    match: PatternMatch
    median_watts: float
    power_fraction: float | None  # median of power / power limit
    at_floor: bool  # every GPU draws at most what idling with a context or spinning draws, and none moves memory
    plateau_known: bool  # the profile's compute power is the job's own, learned while steps advanced
    floor_confidence: float  # 0..1: how far a verdict may rest on the floor
    has_contexts: bool | None  # some GPU holds the memory of a context; None: memory cannot be read, or is wrong
    memory_read: bool  # the memory of every GPU
    limit_read: bool  # the power limit of some GPU
    observed_floor_watts: float | None  # `observed_floor_watts` of this sample
    description: str  # the numbers, for `Verdict.why`
    progress: StepProgress | None  # as the user reports it, else as the step counter shows it
    progress_is_reported: bool  # the user reports it

    @property
    def single_outlier(self) -> tuple[RankGpu, ...]:
        """The one GPU that stands out; empty where none or several do."""
        return self.match.outliers if self.match.pattern in SINGLE_OUTLIER_PATTERNS else ()

    @property
    def scatter_text(self) -> str:
        """The pattern SCATTER in words: of a single GPU it is the reading between idle and busy."""
        if len(self.gpus) == 1:
            return "Utilization is between idle and busy"
        return "Utilization varies widely between the ranks"

    @property
    def certain_work_watts(self) -> float:
        """Power at which GPUs of this model do nothing but work, even where waiting draws nearly as much."""
        band = self.profile.communication
        if self.floor_known or band is None:
            return self.profile.compute_watts
        return max(self.profile.compute_watts, band.high_watts)

    @property
    def floor_known(self) -> bool:
        """The profile fits this model or limit, and leaves a gap between waiting and work."""
        return self.profile_known and self.profile.certain >= MIN_FLOOR_CONFIDENCE


def median_power_fraction(gpus: Sequence[RankGpu]) -> float | None:
    """Median of power / power limit; None where no GPU has both."""
    fractions = [
        watts / g.gpu.power_limit_watts
        for g in gpus
        if (watts := valid_power_watts(g.gpu)) is not None and g.gpu.power_limit_watts
    ]
    return round(statistics.median(fractions), 3) if fractions else None


@dataclass(frozen=True, slots=True)
class ChosenProfile:
    """The profile that a job's GPUs are judged by."""

    profile: PowerProfile
    known: bool  # it is of this model, or scaled to its limit; otherwise its watts mean nothing
    limit_watts: float | None


def choose_profile(
    gpus: Sequence[RankGpu], profile: PowerProfile | None, learned: JobBaseline | None = None
) -> ChosenProfile:
    """`profile` replaces the model's own profile, `learned` replaces both."""
    name = next((g.gpu.name for g in gpus if g.gpu.name), None)
    limits = [g.gpu.power_limit_watts for g in gpus if g.gpu.power_limit_watts]
    limit = statistics.median(limits) if limits else None
    used = profile.scaled(limit) if profile is not None else profile_for(name, limit)
    known = profile is not None or limit is not None or used.name != generic_profile().name
    if learned is not None:
        used, known = learned.profile, known or bool(learned.floor_source)
    return ChosenProfile(used, known, limit)


def extract_features(
    sample: JobSample,
    gpus: tuple[RankGpu, ...],
    profile: PowerProfile | None,
    progress: StepProgress | None,
    learned: JobBaseline | None = None,
) -> PowerFeatures:
    """Features of `sample`. `gpus`: the job's GPUs, of which at least one has power and utilization. `profile` replaces
    the model's own profile, `learned` replaces both."""
    chosen = choose_profile(gpus, profile, learned)
    used, known, limit = chosen.profile, chosen.known, chosen.limit_watts
    powered = [g for g in gpus if valid_power_watts(g.gpu) is not None]
    members = tuple(g for g in powered if g.gpu.utilization_percent is not None)
    watts = [w for g in powered if (w := valid_power_watts(g.gpu)) is not None]
    median = statistics.median(watts)
    fraction = median_power_fraction(members)  # of the GPUs that the verdict describes
    observed_floor = observed_floor_watts(members, used if known else None)
    below_profile_floor = (
        known
        and used.certain >= MIN_FLOOR_CONFIDENCE
        and (limit is None or used.floor_watts <= MAX_FLOOR_SHARE_OF_LIMIT * limit)
        and _is_near_floor(powered, used, watts, median, learned)
    )
    below_observed_floor = observed_floor is not None and max(watts) <= observed_floor
    confidence = used.certain
    if below_observed_floor:
        confidence = OBSERVED_FLOOR_CONFIDENCE
        if below_profile_floor:
            confidence = max(used.certain, OBSERVED_FLOOR_CONFIDENCE)
    return PowerFeatures(
        gpus=members,
        profile=used,
        profile_known=known,
        match=match_pattern(members),
        median_watts=median,
        power_fraction=fraction,
        at_floor=(below_profile_floor or below_observed_floor) and not is_memory_busy(members),
        plateau_known=learned is not None and learned.plateau_watts is not None,
        floor_confidence=confidence,
        has_contexts=holds_contexts(gpus),
        memory_read=all(g.gpu.memory_used_bytes is not None for g in gpus),
        limit_read=limit is not None,
        observed_floor_watts=observed_floor,
        description=_describe(
            members,
            len(sample.gpus) - len(gpus),
            _describe_floor(used, known, learned),
            observed_floor,
            fraction,
        ),
        progress=progress or _progress_from_counter(sample),
        progress_is_reported=progress is not None,
    )


def _is_near_floor(
    members: Sequence[RankGpu],
    profile: PowerProfile,
    watts: Sequence[float],
    median: float,
    learned: JobBaseline | None,
) -> bool:
    """No GPU draws much more than its floor: its own where that was learned, the profile's otherwise."""
    if learned is None or not learned.floors:
        return median <= MEDIAN_FLOOR_TOLERANCE * profile.floor_watts and max(watts) <= (
            FLOOR_TOLERANCE * profile.floor_watts
        )
    ratios = [
        w / learned.floors.get((g.node, g.gpu.key), profile.floor_watts)
        for g in members
        if (w := valid_power_watts(g.gpu)) is not None
    ]
    return statistics.median(ratios) <= MEDIAN_FLOOR_TOLERANCE and max(ratios) <= FLOOR_TOLERANCE


def job_gpus(gpus: tuple[RankGpu, ...]) -> tuple[RankGpu, ...]:
    """Without the GPUs that hold no context while others do: they belong to no rank, and would look like the one rank
    that is idle. Where none holds one, all count."""
    with_context = tuple(g for g in gpus if _has_context(g.gpu) is not False)
    return with_context or gpus


def holds_contexts(gpus: Sequence[RankGpu]) -> bool | None:
    """Whether any GPU holds the memory of a context; None where none is known to, and one cannot be read or is read
    wrong: it may be the one that does."""
    held = [_has_context(g.gpu) for g in gpus]
    if any(held):
        return True
    return None if None in held or not held else False


def _has_context(gpu: GpuSample) -> bool | None:
    """None: the memory cannot be read; or 0 is read (some drivers of systems with shared memory do) while power proves
    that a job works there, or cannot be read."""
    if gpu.memory_used_bytes is None:
        return None
    return None if _is_empty(gpu) and _may_work(gpu) else not _is_empty(gpu)


def _is_empty(gpu: GpuSample) -> bool:
    """The memory reading shows no context."""
    return gpu.memory_used_bytes is not None and gpu.memory_used_bytes < CONTEXT_BYTES


def _may_work(gpu: GpuSample) -> bool:
    """Nothing that was read says otherwise: kernels run, at power that an idle GPU of this model does not draw."""
    watts, limit = valid_power_watts(gpu), gpu.power_limit_watts
    if gpu.utilization_percent is not None and not _is_active(gpu):
        return False
    if watts is None:
        return gpu.utilization_percent is not None
    profile = profile_for(gpu.name, limit or None)
    if not limit and profile.name == generic_profile().name:
        return watts > HIGHEST_FLOOR_WATTS
    if profile.certain < MIN_FLOOR_CONFIDENCE:
        return watts >= SMALL_WORK_SHARE_OF_LIMIT * profile.limit_watts
    return watts >= min(profile.compute_watts, WORK_SHARE_OF_LIMIT * profile.limit_watts)


def no_model_loaded(gpus: Sequence[RankGpu]) -> bool:
    """No GPU holds more than a bare context. False where the memory of any cannot be read."""
    used = [g.gpu.memory_used_bytes for g in gpus]
    return all(each is not None and each <= MAX_BARE_CONTEXT_BYTES for each in used)


def _is_active(gpu: GpuSample) -> bool:
    return (gpu.utilization_percent or 0.0) > IDLE_PERCENT


def is_memory_busy(gpus: Sequence[RankGpu]) -> bool:
    """Most active GPUs read and write memory. False where no reading exists."""
    readings = [g.gpu.memory_utilization_percent for g in gpus if _is_active(g.gpu)]
    return 2 * sum(each is not None and each >= MEMORY_BUSY_PERCENT for each in readings) > len(readings)


def works_now_and_then(features: PowerFeatures) -> bool:
    """Utilization is near 0 % above the power of idle GPUs, some per cent are read, and a model is loaded."""
    return _rests_above_floor(features) and _median_percent(features) >= OCCASIONAL_WORK_PERCENT


def worked_a_moment_ago(features: PowerFeatures) -> bool:
    """No kernel ran on most of several GPUs, but their power, an average over a second or clocks that are still up, is
    above that of idle ones."""
    idle_now = len(features.gpus) > 1 and _median_percent(features) < OCCASIONAL_WORK_PERCENT
    return idle_now and _rests_above_floor(features)


def _rests_above_floor(features: PowerFeatures) -> bool:
    above = features.floor_known and features.median_watts > FLOOR_TOLERANCE * features.profile.floor_watts
    return above and bool(features.has_contexts) and not no_model_loaded(features.gpus)


def _median_percent(features: PowerFeatures) -> float:
    return statistics.median(g.gpu.utilization_percent or 0.0 for g in features.gpus)


def observed_floor_watts(gpus: Sequence[RankGpu], profile: PowerProfile | None = None) -> float | None:
    """The most a spinning GPU may draw, judged by the idle GPUs of the same sample; None without idle and busy ones.

    `profile`: of the model, where it is known. On models whose idle power is a large share of the limit (T4, K80) an
    idle GPU may draw more than any other model's floor; then only a busy GPU that draws hardly more than it counts as
    spinning.
    """
    idle: list[float] = []
    any_busy = high_floor = False
    for each in gpus:
        watts, percent = valid_power_watts(each.gpu), each.gpu.utilization_percent
        limit = each.gpu.power_limit_watts or (None if profile is None else profile.limit_watts)
        if watts is None or percent is None:
            continue
        any_busy = any_busy or percent >= BUSY_PERCENT
        if percent <= IDLE_PERCENT and watts > 0:
            if watts > (HIGHEST_FLOOR_WATTS if limit is None else HIGHEST_FLOOR_FRACTION * limit):
                if profile is None or watts > MEDIAN_FLOOR_TOLERANCE * profile.floor_watts:
                    return None  # low utilization, but between two kernels rather than idle
                high_floor = True
            idle.append(watts)
    if not idle or not any_busy:
        return None
    median = statistics.median(idle)
    return FLOOR_TOLERANCE * median if high_floor else max_spin_watts(median)


def model_without_profile(gpus: Sequence[RankGpu]) -> str | None:
    """The GPU model, of GPUs that name one but no power limit; None if they name none."""
    return next((g.gpu.name for g in gpus if g.gpu.name), None)


def _unknown_floor_text(gpus: Sequence[RankGpu]) -> str:
    model = model_without_profile(gpus)
    reason = (
        "the input names neither the GPU model nor its power limit"
        if model is None
        else f"there is no power profile for {model} and the input does not name its power limit"
    )
    return f"the power of GPUs that only wait is unknown, because {reason}"


def _describe_floor(profile: PowerProfile, known: bool, learned: JobBaseline | None) -> list[str]:
    if not known:
        return []
    parts = [f"GPUs that only wait draw up to {profile.floor_watts:.0f} W according to profile {profile.name}"]
    if learned is not None and learned.floor_source:
        parts = [learned.floor_source]
    if learned is not None and learned.plateau_watts is not None:
        parts.append(f"compute power {learned.plateau_watts:.0f} W, learned while steps advanced")
    return parts


def _describe(
    gpus: Sequence[RankGpu],
    left_out: int,
    floors: list[str],
    observed_floor: float | None,
    fraction: float | None,
) -> str:
    watts = [w for g in gpus if (w := valid_power_watts(g.gpu)) is not None]
    utilization = [g.gpu.utilization_percent for g in gpus if g.gpu.utilization_percent is not None]
    share = "" if fraction is None else f", {fraction * 100:.0f} % of {'its' if len(gpus) == 1 else 'the'} power limit"
    median = "" if min(watts) == max(watts) else f", median {statistics.median(watts):.0f} W"
    if observed_floor is not None:
        estimated = f"up to {observed_floor:.0f} W estimated from the idle GPUs in this sample"
        known = f"{floors[0]}, or" if floors else "GPUs that only wait draw"
        floors = [f"{known} {estimated}", *floors[1:]]
    text = (
        f"{format_count(len(gpus), 'GPU')} at {describe_range(watts)} W{median}{share}; "
        f"{'; '.join(floors) or _unknown_floor_text(gpus)}; utilization {describe_range(utilization)} %"
    )
    misread = sum(_may_work(g.gpu) and _is_empty(g.gpu) for g in gpus)
    if misread:
        what = f"the memory reading of {format_count(misread, 'GPU')}"
        text += f"; {what} is wrong, because an idle GPU does not draw that much power"
    return text if not left_out else f"{text}; ignored: {format_count(left_out, 'GPU')} without allocated memory"


def describe_range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"


def _progress_from_counter(sample: JobSample) -> StepProgress | None:
    """ADVANCING where the step changed recently, None otherwise: how long is too long is the detector's decision."""
    progress = sample.progress
    if progress.step is None or progress.age_seconds is None or progress.line_interval_seconds is None:
        return None
    recent = progress.age_seconds <= ADVANCING_INTERVALS * progress.line_interval_seconds
    return StepProgress.ADVANCING if recent else None
