"""How utilisation lies over the ranks, and who stands out. Averages hide the one rank that matters; this keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from wattwatch.collectors.samples import GpuSample
from wattwatch.watcher.detection.baselines.baseline import JobBaseline
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

# Shapes in which one rank stands out.
SINGLE_OUTLIER_PATTERNS: Final = frozenset(
    {UtilizationPattern.ONE_LOW_REST_BUSY, UtilizationPattern.RANK0_LOW_REST_BUSY, UtilizationPattern.ONE_BUSY_REST_LOW}
)


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """The shape with those who make it: the low among busy, or the busy among low."""

    pattern: UtilizationPattern
    outliers: tuple[RankGpu, ...] = ()


def match_pattern(gpus: Sequence[RankGpu]) -> PatternMatch:
    """Shape of all boards with a utilisation reading; UNKNOWN where there is none."""
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
    if len(read) == 2:
        # One of two: the low one stands out, whichever it is.
        return PatternMatch(
            UtilizationPattern.RANK0_LOW_REST_BUSY if low[0].rank == 0 else UtilizationPattern.ONE_LOW_REST_BUSY, low
        )
    if len(low) == 1:
        return PatternMatch(
            UtilizationPattern.RANK0_LOW_REST_BUSY if low[0].rank == 0 else UtilizationPattern.ONE_LOW_REST_BUSY, low
        )
    if len(busy) == 1:
        return PatternMatch(UtilizationPattern.ONE_BUSY_REST_LOW, busy)
    return PatternMatch(UtilizationPattern.TWO_GROUPS, min(low, busy, key=len))


# The numbers of one picture, worked out once: whose boards count, where their floor lies, who is at it.
#
# Three sources tell the floor, nearest first. A board that is low while others spin shows it in the picture itself: on
# every board with both figures a spinning rank draws what an idle one with a context draws, and at most 35 W more. Else
# what was learned of these very boards, else their profile. A board of which neither name nor limit is known has none:
# then watts say nothing here.

# A bare context with the buffers of a collective library takes 0.4 to 1.5 GB: no model is loaded, nothing can be saved.
MAX_BARE_CONTEXT_BYTES: Final = 1.5 * 1024**3
# A floor is learned or shipped from a few boards; single ones lie a little above it.
FLOOR_TOLERANCE: Final = 1.15
MEDIAN_FLOOR_TOLERANCE: Final = 1.03
MAX_FLOOR_SHARE_OF_LIMIT: Final = 0.75
# Spinning against idling with a context in one picture; the share matters on small boards, where 35 W is all there is.
MAX_SPIN_ABOVE_IDLE_WATTS: Final = 35.0
MAX_SPIN_TO_IDLE_RATIO: Final = 1.35
# A low rank above this is between two kernels, not idle: no context of any board seen draws more.
HIGHEST_FLOOR_WATTS: Final = 290.0
HIGHEST_FLOOR_FRACTION: Final = 0.35
# Below this the profile's floor is no witness: there is no room between it and work.
MIN_FLOOR_CONFIDENCE: Final = 0.5
# A kernel that spins polls a few words. Where the memory controllers of busy boards do more, they work, at whatever
# power.
MEMORY_BUSY_PERCENT: Final = 5.0
# How sure a floor is that the picture itself shows: the nearest witness of all.
OBSERVED_FLOOR_CONFIDENCE: Final = 0.9


class StepProgress(StrEnum):
    """What is known of the job's steps, from its own counter or from the person who asks."""

    ADVANCING = "advancing"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class PowerFeatures:
    """The picture with its numbers; `gpus` are those with watts and utilisation that are part of the job."""

    gpus: tuple[RankGpu, ...]
    profile: PowerProfile
    known: bool  # the profile is of this board, or scaled by its limit; else its watts mean nothing
    picture: PatternMatch
    watts: float  # median
    fraction: float | None  # of the limit
    at_floor: bool  # every board draws no more than idle with a context or spinning does, and none moves memory
    certain: float  # 0..1: how far a verdict may rest on the floor
    held: bool | None  # memory of a context on most boards; None: memory cannot be read
    words: str  # the numbers, for `why`
    progress: StepProgress | None  # the asker's word, else what the counter says
    told: bool  # it is the asker's word


def median_power_fraction(gpus: Sequence[RankGpu]) -> float | None:
    """Median of power / limit over the boards that tell both."""
    shares = [
        w / g.gpu.power_limit_watts
        for g in gpus
        if (w := valid_power_watts(g.gpu)) is not None and g.gpu.power_limit_watts
    ]
    return round(statistics.median(shares), 3) if shares else None


def extract_features(
    sample: JobSample,
    gpus: tuple[RankGpu, ...],
    profile: PowerProfile | None,
    progress: StepProgress | None,
    learned: JobBaseline | None = None,
) -> PowerFeatures:
    """`gpus`: those of the sample with watts and utilisation; at least one."""
    members = job_gpus(gpus)
    name = next((g.gpu.name for g in members if g.gpu.name), None)
    limits = [g.gpu.power_limit_watts for g in members if g.gpu.power_limit_watts]
    limit = statistics.median(limits) if limits else None
    board = profile.scaled(limit) if profile is not None else profile_for(name, limit)
    known = profile is not None or limit is not None or board.name != generic_profile().name
    if learned is not None:
        board, known = learned.profile, known or bool(learned.floor_words)
    watts = [w for g in members if (w := valid_power_watts(g.gpu)) is not None]
    median = statistics.median(watts)
    fraction = median_power_fraction(members)
    shown = observed_floor_watts(members, board.floor_watts if known else None)
    by_profile = (
        known
        and board.certain >= MIN_FLOOR_CONFIDENCE
        # A cap that leaves no room above the floor: work draws no more than spinning there.
        and (limit is None or board.floor_watts <= MAX_FLOOR_SHARE_OF_LIMIT * limit)
        and _near_floor(members, board, watts, median, learned)
    )
    by_picture = shown is not None and max(watts) <= shown
    certain = (
        max(board.certain, OBSERVED_FLOOR_CONFIDENCE)
        if by_picture and by_profile
        else OBSERVED_FLOOR_CONFIDENCE
        if by_picture
        else board.certain
    )
    memory = [g.gpu.memory_used_bytes for g in members if g.gpu.memory_used_bytes is not None]
    return PowerFeatures(
        gpus=members,
        profile=board,
        known=known,
        picture=match_pattern(members),
        watts=median,
        fraction=fraction,
        at_floor=(by_profile or by_picture) and not is_memory_busy(members),
        certain=certain,
        held=None if not memory else sum(m >= CONTEXT_BYTES for m in memory) > len(memory) / 2,
        words=_describe(members, len(gpus) - len(members), _describe_floor(board, known, learned), shown, fraction),
        progress=progress or _progress_from_counter(sample),
        told=progress is not None,
    )


def _near_floor(
    members: Sequence[RankGpu], board: PowerProfile, watts: Sequence[float], median: float, learned: JobBaseline | None
) -> bool:
    """Every board draws about its floor at most: its own where that was learned, else the profile's."""
    if learned is None or not learned.floors:
        return (
            median <= MEDIAN_FLOOR_TOLERANCE * board.floor_watts and max(watts) <= FLOOR_TOLERANCE * board.floor_watts
        )
    floors = learned.floors
    shares = [
        w / floors.get((g.node, g.gpu.key), board.floor_watts)
        for g in members
        if (w := valid_power_watts(g.gpu)) is not None
    ]
    return statistics.median(shares) <= MEDIAN_FLOOR_TOLERANCE and max(shares) <= FLOOR_TOLERANCE


def job_gpus(gpus: tuple[RankGpu, ...]) -> tuple[RankGpu, ...]:
    """Without the boards that hold no context while others do: they are no ranks of the job, and would look like the
    one rank that is low. Where most boards hold none and the rest is low, the node is as good as empty: all count."""
    held = tuple(g for g in gpus if _has_context(g.gpu) is not False)
    if not held or (2 * len(held) < len(gpus) and not any(_busy(g.gpu) for g in held)):
        return gpus
    return held


def _has_context(gpu: GpuSample) -> bool | None:
    return None if gpu.memory_used_bytes is None else gpu.memory_used_bytes >= CONTEXT_BYTES


def no_model_loaded(gpus: Sequence[RankGpu]) -> bool:
    """Whether no board holds more than a context: memory is known on all of them, and no model is loaded."""
    held = [g.gpu.memory_used_bytes for g in gpus]
    return all(each is not None and each <= MAX_BARE_CONTEXT_BYTES for each in held)


def _busy(gpu: GpuSample) -> bool:
    return (gpu.utilization_percent or 0.0) > IDLE_PERCENT


def is_memory_busy(gpus: Sequence[RankGpu]) -> bool:
    """Whether most busy boards read and write memory; False where none tells."""
    told = [g.gpu.memory_utilization_percent for g in gpus if _busy(g.gpu)]
    return 2 * sum(each is not None and each >= MEMORY_BUSY_PERCENT for each in told) > len(told)


def observed_floor_watts(gpus: Sequence[RankGpu], floor_watts: float | None = None) -> float | None:
    """The most that a spinning board may draw, by what the low boards of the same picture draw; None without any.

    `floor_watts`: of the profile. Where resting draws a large share of the limit (T4, K80), a low board that draws no
    more than it is at rest all the same; but then only a busy board that draws hardly more spins.
    """
    low: list[float] = []
    spinning = high = False
    for each in gpus:
        watts, percent, limit = valid_power_watts(each.gpu), each.gpu.utilization_percent, each.gpu.power_limit_watts
        if watts is None or percent is None:
            continue
        spinning = spinning or percent >= BUSY_PERCENT
        if percent <= IDLE_PERCENT and watts > 0:
            if watts > (HIGHEST_FLOOR_WATTS if limit is None else HIGHEST_FLOOR_FRACTION * limit):
                if floor_watts is None or watts > MEDIAN_FLOOR_TOLERANCE * floor_watts:
                    return None
                high = True
            low.append(watts)
    if not low or not spinning:
        return None
    idle = statistics.median(low)
    return FLOOR_TOLERANCE * idle if high else min(idle + MAX_SPIN_ABOVE_IDLE_WATTS, MAX_SPIN_TO_IDLE_RATIO * idle)


def _describe_floor(board: PowerProfile, known: bool, learned: JobBaseline | None) -> list[str]:
    if not known:
        return []
    words = [f"floor {board.floor_watts:.0f} W by profile {board.name}"]
    if learned is not None and learned.floor_words:
        words = [learned.floor_words]
    if learned is not None and learned.plateau_watts is not None:
        words.append(f"plateau {learned.plateau_watts:.0f} W learned from its steps")
    return words


def _describe(
    gpus: Sequence[RankGpu], left_out: int, floors: list[str], shown: float | None, fraction: float | None
) -> str:
    watts = [w for g in gpus if (w := valid_power_watts(g.gpu)) is not None]
    busy = [g.gpu.utilization_percent for g in gpus if g.gpu.utilization_percent is not None]
    share = "" if fraction is None else f", {fraction:.2f} of the limit"
    if shown is not None:
        floors = [*floors, f"{shown:.0f} W by the low boards here"]
    words = (
        f"{len(gpus)} board{'s' if len(gpus) > 1 else ''} at {_range(watts)} W (median {statistics.median(watts):.0f} W"
        f"{share}; {', '.join(floors) or 'no floor known: neither name nor limit'}), utilisation {_range(busy)} %"
    )
    return words if not left_out else f"{words}; {left_out} without a context left out"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low}-{high}"


def _progress_from_counter(sample: JobSample) -> StepProgress | None:
    """Steps that moved within three of their usual intervals are advancing; how long is too long is the detector's."""
    progress = sample.progress
    if progress.step is None or progress.age_seconds is None or progress.line_interval_seconds is None:
        return None
    return StepProgress.ADVANCING if progress.age_seconds <= 3 * progress.line_interval_seconds else None
