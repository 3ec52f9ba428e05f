"""GPUs that draw more than the power floor: work of some kind. "None of the known ranges" is a valid answer.

Power ranges of communication and starvation were measured on one model (B300) and are scaled between floor and limit
for the others: with less confidence there, and only for the utilization pattern they were measured with. Healthy work
spans
0.37 to 1.0 of the power limit and communication 0.27 to 0.53 over all models, so between floor and full compute power
two readings always remain.
"""

from __future__ import annotations

import math
from typing import Final

from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.baselines.baseline import HIGHEST_FLOOR_WATTS, max_spin_watts
from wattwatch.watcher.detection.baselines.profiles import generic_profile, highest_communication_watts
from wattwatch.watcher.detection.classifier.conclusion import make_verdict
from wattwatch.watcher.detection.classifier.features import (
    FLOOR_TOLERANCE,
    MIN_GPUS_TO_COMPARE,
    PowerFeatures,
    StepProgress,
    describe_range,
    is_memory_busy,
    model_without_profile,
    worked_a_moment_ago,
    works_now_and_then,
)
from wattwatch.watcher.detection.model import (
    BUSY_PERCENT,
    IDLE_PERCENT,
    PowerState,
    RankGpu,
    UtilizationPattern,
    Verdict,
    valid_power_watts,
)

# Of the way from floor to full compute power. Jobs that make progress over slow links lie below it (0.26 of the limit).
LIGHT_LOAD_SHARE: Final = 1 / 3
# Healthy steps read 84 to 97 % from GPU to GPU at full compute power; ranks that wait for data read 10 to 100 %.
EVEN_PERCENT: Final = 75.0
EVEN_SPREAD: Final = 15.0
NEAR_PLATEAU: Final = 0.95  # GPUs of one model differ by a few per cent
# A GPU is in the state in which it spends most of its time.
MOSTLY_BUSY_PERCENT: Final = 50.0
# Of the power limit: in this range GPUs of unknown models compute or communicate; above it all that were seen compute.
GENERIC_COMMUNICATION_SHARE: Final = 0.65
GENERIC_COMPUTE_SHARE: Final = 0.75
# The power limit of a model differs by up to a quarter between sites (A100 SXM 400 and 500 W).
LIMIT_MARGIN: Final = 1.25
# An idle GPU with a context draws at least this share of what spinning draws, unless it has lowered its clocks.
CLOCKS_UP_SHARE: Final = 0.5
# Chosen: GPUs of one model that do the same work differ by a few per cent only.
STRAGGLER_POWER_RATIO: Final = 2.0


def classify_active_power(features: PowerFeatures) -> Verdict:
    """The verdict on GPUs of which at least one draws more than the power floor."""
    if not features.profile_known:
        return _classify_unnamed_model(features)
    pattern, watts = features.match.pattern, features.median_watts
    no_gap = not features.floor_known and watts < features.certain_work_watts
    if no_gap and pattern is not UtilizationPattern.ALL_LOW:
        return _no_gap(features)
    if pattern is UtilizationPattern.ALL_BUSY:
        return _evenly_busy(features)
    if pattern is UtilizationPattern.SCATTER:
        return _unevenly_busy(features)
    if pattern is UtilizationPattern.ALL_LOW:
        return _no_kernels(features)
    suspects = features.single_outlier
    if watts >= features.profile.compute_watts:
        why = "Most GPUs draw compute-level power; some are idle at this moment"
        return make_verdict(features, PowerState.COMPUTE, 0.55, why, (PowerState.HANG, 0.3), suspects)
    if _is_alternating(features):
        why = (
            "The working GPUs draw compute-level power while others are idle: there may be two jobs, or pipeline "
            "stages that take turns"
        )
        return make_verdict(features, PowerState.COMPUTE, 0.45, why, (PowerState.HANG, 0.3))
    if _busy_ones_do_more_than_wait(features):
        why = (
            "Some GPUs are idle, and the busy GPUs draw clearly more power than the idle ones, but less "
            "than compute-level power: the busy GPUs are doing light work or moving data"
        )
        return make_verdict(features, PowerState.COMMUNICATION, 0.4, why, (PowerState.HANG, 0.35))
    why = "Some GPUs are idle while others work, and their power matches no known activity"
    return make_verdict(features, PowerState.UNKNOWN, 0.35, why, (PowerState.HANG, 0.3), suspects)


def _busy_ones_do_more_than_wait(features: PowerFeatures) -> bool:
    """By the idle GPUs of this very sample, if these have their clocks up: a busy GPU that only waited would draw
    little more than they do, whatever its model."""
    readings = [(g.gpu.utilization_percent or 0.0, valid_power_watts(g.gpu) or 0.0) for g in features.gpus]
    busy = [watts for percent, watts in readings if percent >= BUSY_PERCENT]
    idle = [watts for percent, watts in readings if percent <= IDLE_PERCENT]
    if features.observed_floor_watts is None or not busy or not idle:
        return False
    clocks_up = min(idle) >= CLOCKS_UP_SHARE * features.profile.floor_watts
    return clocks_up and min(busy) > features.observed_floor_watts


def _no_gap(features: PowerFeatures) -> Verdict:
    """A GPU on which spinning and work draw about the same."""
    if _looks_starved(features):
        return _starved_by_pattern(features, 0.4)
    why = (
        "GPUs are busy, but waiting GPUs of this model draw nearly the same power as working ones, so power does not "
        "show whether these GPUs work or wait"
    )
    return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3), features.single_outlier)


def _looks_starved(features: PowerFeatures) -> bool:
    """By utilization alone: it is uneven, and some GPU is idle for more than half of the time."""
    return features.match.pattern is UtilizationPattern.SCATTER and not _is_mostly_busy(features)


def _starved_by_pattern(features: PowerFeatures, confidence: float) -> Verdict:
    why = f"{features.scatter_text}, as in jobs that wait for input; power gives no further evidence"
    return make_verdict(features, PowerState.STARVATION, confidence, why, (PowerState.COMPUTE, 0.3))


# GPUs of which neither the model nor the power limit is known. Their watts belong to no range: 640 W is communication
# on a B300 and full work on an H100 (arXiv 2608.05944, section 3: watts are specific to the hardware, the ordering and
# the pattern over the ranks are not). What remains is how the GPUs of one sample compare with each other, and what
# holds on every model.


def _classify_unnamed_model(features: PowerFeatures) -> Verdict:
    pattern = features.match.pattern
    watts = [valid_power_watts(g.gpu) or 0.0 for g in features.gpus]
    working = min(watts) > HIGHEST_FLOOR_WATTS  # on every model, each of these GPUs does more than wait
    if pattern is UtilizationPattern.ALL_LOW:
        return _no_kernels_on_unnamed_model(features)
    if features.progress is StepProgress.ADVANCING:
        if pattern is UtilizationPattern.SCATTER and not _is_even(features):
            why = f"Steps advance. {features.scatter_text}: the GPUs are probably waiting for input at different times"
            return make_verdict(features, PowerState.STARVATION, 0.5, why, (PowerState.COMPUTE, 0.3))
        why = f"Steps advance; {_without_profile(features)} how hard the GPUs work"
        return make_verdict(features, PowerState.COMPUTE, 0.5, why, (PowerState.COMMUNICATION, 0.3))
    if pattern is UtilizationPattern.ALL_BUSY and (slow := _much_more_power(features)):
        why = (
            f"{len(slow)} of {len(watts)} GPUs {'draws' if len(slow) == 1 else 'draw'} at least "
            f"{STRAGGLER_POWER_RATIO:.0f} times the power of the others at the same utilization: the others are "
            "probably waiting"
        )
        return make_verdict(features, PowerState.STRAGGLER, 0.45, why, (PowerState.HANG, 0.3), slow)
    if min(watts) > highest_communication_watts() and pattern in (
        UtilizationPattern.ALL_BUSY,
        UtilizationPattern.SCATTER,
    ):
        why = (
            f"{_all_gpus(features)} busy and {_draw(features)} more power than communication takes on any GPU model "
            f"with a profile ({highest_communication_watts():.0f} W)"
        )
        return make_verdict(features, PowerState.COMPUTE, 0.6, why, (PowerState.COMMUNICATION, 0.2))
    if working and pattern is UtilizationPattern.SCATTER and not _is_even(features):
        why = (
            f"{features.scatter_text}: the GPUs are probably waiting for input at different times; "
            f"{_without_profile(features)} whether they compute instead"
        )
        return make_verdict(features, PowerState.STARVATION, 0.45, why, (PowerState.COMPUTE, 0.3))
    if working:
        evenly = pattern in (UtilizationPattern.ALL_BUSY, UtilizationPattern.SCATTER)
        busy = f"{_all_gpus(features)} evenly busy" if evenly else "Some GPUs are idle and the others busy"
        why = (
            f"{busy}, and each draws more power than any known GPU model draws while it waits "
            f"({HIGHEST_FLOOR_WATTS:.0f} W); "
            f"{_without_profile(features)} whether they compute or communicate"
        )
        return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.COMPUTE, 0.3))
    why = f"GPUs are busy, but {_without_profile(features)} whether they work or wait"
    return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3), features.single_outlier)


def _without_profile(features: PowerFeatures) -> str:
    model = model_without_profile(features.gpus)
    return f"without {'the GPU model' if model is None else f'a profile for {model}'}, power does not show"


def _much_more_power(features: PowerFeatures) -> list[RankGpu]:
    """The few GPUs that draw at least STRAGGLER_POWER_RATIO times the power of all others, which may be waiting."""
    watts = {id(g): valid_power_watts(g.gpu) or 0.0 for g in features.gpus}
    most = max(watts.values())
    high = [g for g in features.gpus if watts[id(g)] * STRAGGLER_POWER_RATIO > most]
    low = [w for w in watts.values() if w * STRAGGLER_POWER_RATIO <= most]
    if not low or len(high) > len(low) or max(low) > HIGHEST_FLOOR_WATTS:
        return []
    return high if min(watts[id(g)] for g in high) >= STRAGGLER_POWER_RATIO * max(low) else []


def _no_kernels_on_unnamed_model(features: PowerFeatures) -> Verdict:
    if features.median_watts > HIGHEST_FLOOR_WATTS:
        why = (
            "Utilization is near 0 % although GPUs draw more power than any known GPU model draws when it is idle "
            f"({HIGHEST_FLOOR_WATTS:.0f} W): the sample was probably taken between two kernels"
        )
        return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.COMPUTE, 0.3))
    why = (
        f"No kernel is running, and {_without_profile(features)} whether the GPUs worked a moment ago: the job may be "
        "starting up, pausing between phases, or no longer launching work"
    )
    return make_verdict(features, PowerState.IDLE, 0.45, why, (PowerState.HANG, 0.3))


def _evenly_busy(features: PowerFeatures) -> Verdict:
    """All GPUs are busy. With more power the verdict moves from waiting over communication to compute, never back."""
    profile, watts = features.profile, features.median_watts
    advancing = features.progress is StepProgress.ADVANCING
    own_band = None if profile.bands_from else profile.communication
    if len(features.gpus) == 1 and profile.floor_watts < watts < profile.compute_watts:
        why = (
            "The only GPU in this sample is busy below compute-level power and has no other GPU to wait for: it is "
            "probably doing light work"
        )
        other = (PowerState.HANG, 0.3 * profile.certain)
        return make_verdict(features, PowerState.COMPUTE, 0.6 if advancing else 0.45, why, other)
    if watts >= profile.compute_watts:
        return _full_compute(features)
    if own_band is not None and watts in own_band:
        claim = "the power that is typical of communication on this GPU model"
        why = _busy_and_draw(features, claim, own_band.low_watts, own_band.high_watts)
        return make_verdict(features, PowerState.COMMUNICATION, 0.75, why, (PowerState.COMPUTE, 0.2))
    light = any(watts in band for band in profile.light)
    barely_watts = profile.floor_watts + LIGHT_LOAD_SHARE * (profile.compute_watts - profile.floor_watts)
    barely = watts < barely_watts
    if advancing and barely and not light:
        claim = "only slightly more power than GPUs that only wait"
        busy = _busy_and_draw(features, claim, profile.floor_watts, barely_watts, start=False)
        why = f"Steps advance; {busy}"
        return make_verdict(features, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.35))
    if advancing:
        busy = _busy_and_draw(features, "less than compute-level power", 0.0, profile.compute_watts)
        why = f"{busy}: probably healthy training with a light load"
        return make_verdict(features, PowerState.COMPUTE, 0.7, why, (PowerState.COMMUNICATION, 0.3))
    if watts <= profile.floor_watts and is_memory_busy(features.gpus):
        why = (
            f"{_all_gpus(features)} busy and {'accesses' if len(features.gpus) == 1 else 'access'} memory but "
            f"{_draw(features)} no more power than GPUs that only wait: this may be light work or a slow network link"
        )
        return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.3))
    if watts <= profile.floor_watts:
        why = "Some GPUs are only waiting (high utilization at low power), and others draw more power"
        return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3))
    if barely and not light:
        claim = "only slightly more power than GPUs that only wait"
        why = _busy_and_draw(features, claim, profile.floor_watts, barely_watts)
        other = (PowerState.HANG, 0.35 * profile.certain)
        return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, other)
    claim = "more power than GPUs that only wait, but less than compute-level power"
    why = _busy_and_draw(features, claim, profile.floor_watts, profile.compute_watts)
    if profile.name == generic_profile().name:
        # GPUs of an unknown model may draw a third of their limit when idle, so spinning is not out of the question.
        return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.3 * profile.certain))
    if own_band is not None or features.plateau_known:
        # Even more power than this is communication on this model; or this job draws more when it computes.
        return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, (PowerState.COMPUTE, 0.4))
    # Light healthy work was seen here on every model that many jobs were measured on (H100, B200).
    return make_verdict(features, PowerState.COMPUTE, 0.5 if light else 0.45, why, (PowerState.COMMUNICATION, 0.4))


def _full_compute(features: PowerFeatures) -> Verdict:
    """At or above full compute power. That was measured for this model; the range of communication is only scaled from
    another, so within and below it communication remains possible."""
    profile, watts, band = features.profile, features.median_watts, features.profile.communication
    is_generic = profile.name == generic_profile().name
    confidence, doubtful_watts = 0.9, 0.0
    if not features.plateau_known:  # otherwise it was measured on this very job
        if is_generic:
            confidence, doubtful_watts = 0.85, GENERIC_COMPUTE_SHARE * profile.limit_watts
        elif band is not None and profile.bands_from:
            doubtful_watts = band.high_watts
        if not features.limit_read:
            doubtful_watts = LIMIT_MARGIN * max(doubtful_watts, profile.compute_watts)
    if watts >= doubtful_watts:
        why = _busy_and_draw(features, "compute-level power", profile.compute_watts)
        other = None if features.match.pattern is UtilizationPattern.ALL_BUSY else (PowerState.STARVATION, 0.1)
        low = [w for g in features.gpus if (w := valid_power_watts(g.gpu)) is not None and w < profile.compute_watts]
        if low:
            few = f"{len(low)} of {format_count(len(features.gpus), 'GPU')} {'draws' if len(low) == 1 else 'draw'}"
            why = f"{_all_gpus(features)} busy, most at compute-level power, but {few} less ({describe_range(low)} W)"
            if min(low) <= profile.floor_watts:
                why += ", no more than a GPU that only waits: work may be distributed unevenly"
                confidence, other = min(confidence, 0.65), (PowerState.COMMUNICATION, 0.2)
        return make_verdict(features, PowerState.COMPUTE, confidence, why, other)
    claim = "power in the lower part of the compute range"
    why = _busy_and_draw(features, claim, profile.compute_watts, doubtful_watts)
    sure = watts >= GENERIC_COMMUNICATION_SHARE * profile.limit_watts if is_generic else features.limit_read
    even = features.match.pattern is UtilizationPattern.ALL_BUSY and len(features.gpus) > 1
    other = (PowerState.COMMUNICATION if even else PowerState.STARVATION, 0.25 if sure else 0.3)
    return make_verdict(features, PowerState.COMPUTE, 0.65 if sure else 0.55, why, other)


def _all_gpus(features: PowerFeatures, start: bool = True) -> str:
    """The subject and "is" or "are", at the start of a sentence or not."""
    count = len(features.gpus)
    text = {1: "The GPU is", 2: "Both GPUs are"}.get(count, f"All {count} GPUs are")
    return text if start else text[:1].lower() + text[1:]


def _busy_and_draw(
    features: PowerFeatures, claim: str, low_watts: float, high_watts: float = math.inf, *, start: bool = True
) -> str:
    """That the GPUs are busy and draw `claim`, which is from `low_watts` to `high_watts`. The median decides the
    verdict, so the GPUs that do draw it are counted. `start`: of a sentence."""
    drawn = _drawn_watts(features)
    inside = sum(low_watts <= watts <= high_watts for watts in drawn)
    if inside == len(features.gpus):
        return f"{_all_gpus(features, start)} busy and {_draw(features)} {claim}"
    if not inside:
        return f"{_all_gpus(features, start)} busy and {_draw(features)} {claim} at the median"
    return f"{_all_gpus(features, start)} busy, and {inside} of them {'draws' if inside == 1 else 'draw'} {claim}"


def _drawn_watts(features: PowerFeatures) -> list[float]:
    return [watts for g in features.gpus if (watts := valid_power_watts(g.gpu)) is not None]


def _draw(features: PowerFeatures) -> str:
    return "draws" if len(features.gpus) == 1 else "draw"


def _unevenly_busy(features: PowerFeatures) -> Verdict:
    profile, watts = features.profile, features.median_watts
    is_known_model = profile.name != generic_profile().name
    if watts >= NEAR_PLATEAU * profile.compute_watts and _is_even(features):
        return _full_compute(features)
    waiting = _ranks_that_only_wait(features)
    if waiting and features.progress is not StepProgress.ADVANCING:
        why = (
            f"{len(waiting)} of {format_count(len(features.gpus), 'GPU')} ran kernels part of the time "
            "but drew no more power than waiting GPUs, and one GPU ran no kernel: the others may be "
            "waiting in a collective that this GPU did not enter, or for this GPU to get its input"
        )
        idle = [g for g in features.gpus if (g.gpu.utilization_percent or 0.0) <= IDLE_PERCENT]
        return make_verdict(features, PowerState.HANG, 0.4, why, (PowerState.STARVATION, 0.4), idle)
    # A rank that runs nothing beside others that do may be the one they wait for.
    any_idle = min(g.gpu.utilization_percent or 0.0 for g in features.gpus) <= IDLE_PERCENT
    other = (PowerState.HANG if any_idle else PowerState.COMPUTE, 0.25)
    band = profile.starvation
    doubtful = watts < profile.compute_watts or (band is not None and watts in band)
    if doubtful and _is_any_at_full_power(features):
        why = (
            "Some GPUs draw the power of full work while others have little to do: there may be two jobs, or ranks "
            "with unequal work"
        )
        return make_verdict(features, PowerState.COMPUTE, 0.45, why, (PowerState.STARVATION, 0.35))
    if band is not None and watts in band and not (profile.bands_from and _is_mostly_busy(features)):
        why = f"{features.scatter_text}, and power is typical of GPUs that are waiting for input"
        confidence = max(0.5, 0.75 * profile.bands_certain) if is_known_model else 0.45
        return make_verdict(features, PowerState.STARVATION, confidence, why, other)
    if watts >= profile.compute_watts and (band is None or watts > band.high_watts or _is_mostly_busy(features)):
        drawn = _drawn_watts(features)
        inside = sum(each >= profile.compute_watts for each in drawn)
        extent = format_count(len(drawn), "GPU") if inside == len(drawn) else f"{inside} of {len(drawn)} GPUs"
        draw = "draws" if inside == 1 else "draw"
        why = f"{extent} {draw} compute-level power; utilization is lower on some ranks"
        if len(features.gpus) == 1:
            why = "The GPU draws compute-level power and is idle part of the time"
        confidence = 0.65 if is_known_model and features.limit_read else 0.45
        return make_verdict(features, PowerState.COMPUTE, confidence, why, (PowerState.STARVATION, 0.25))
    if _is_alternating(features):
        # In a starving job no GPU draws full compute power; here those that have work do.
        why = "The working GPUs draw compute-level power while others are idle: pipeline stages may be taking turns"
        return make_verdict(features, PowerState.COMPUTE, 0.45, why, (PowerState.STARVATION, 0.35))
    if _is_mostly_busy(features):
        why = f"{_all_gpus(features)} busy most of the time, at medium power: light work with pauses"
        return make_verdict(features, PowerState.COMPUTE, 0.45, why, (PowerState.STARVATION, 0.4))
    why = f"{features.scatter_text}, and power is medium: the GPUs are probably waiting for input"
    return make_verdict(features, PowerState.STARVATION, 0.5 if is_known_model else 0.45, why, other)


def _ranks_that_only_wait(features: PowerFeatures) -> list[RankGpu]:
    """GPUs that are busy part of the time, with kernels that only spin, beside a single idle one whose clocks are up:
    while they run, they add no more to its power than spinning does. Kernels that compute add much more. With several
    idle ones it may be a start-up, and with two GPUs one that has its input and one that waits for it."""
    readings = [(g, g.gpu.utilization_percent or 0.0, valid_power_watts(g.gpu) or 0.0) for g in features.gpus]
    idle = [watts for _, percent, watts in readings if percent <= IDLE_PERCENT]
    if len(readings) < MIN_GPUS_TO_COMPARE or len(idle) != 1:
        return []
    rest = idle[0]
    if rest < CLOCKS_UP_SHARE * features.profile.floor_watts or rest > FLOOR_TOLERANCE * features.profile.floor_watts:
        return []
    spin = max_spin_watts(rest) - rest
    return [g for g, percent, watts in readings if percent > IDLE_PERCENT and watts - rest <= spin * percent / 100.0]


def _is_any_at_full_power(features: PowerFeatures) -> bool:
    """A GPU that waits for its input part of the time does not draw full power on average."""
    full_watts = GENERIC_COMPUTE_SHARE * features.profile.limit_watts
    return features.floor_known and any(
        (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT and (valid_power_watts(g.gpu) or 0.0) >= full_watts
        for g in features.gpus
    )


def _is_mostly_busy(features: PowerFeatures) -> bool:
    """Every GPU is busy for more than half of the time."""
    return min(g.gpu.utilization_percent or 0.0 for g in features.gpus) >= MOSTLY_BUSY_PERCENT


def _is_alternating(features: PowerFeatures) -> bool:
    """Some GPUs are idle and all others draw full compute power: ranks that waited for the idle ones would not."""
    working = [
        valid_power_watts(g.gpu) or 0.0 for g in features.gpus if (g.gpu.utilization_percent or 0.0) > IDLE_PERCENT
    ]
    return 0 < len(working) < len(features.gpus) and min(working) >= features.profile.compute_watts


def _is_even(features: PowerFeatures) -> bool:
    utilization = [g.gpu.utilization_percent or 0.0 for g in features.gpus]
    return min(utilization) >= EVEN_PERCENT and max(utilization) - min(utilization) <= EVEN_SPREAD


def _no_kernels(features: PowerFeatures) -> Verdict:
    """0 % says that no kernel runs. Clocks that are still up, or a power average over the last second, explain the
    power."""
    if features.median_watts >= (features.profile.compute_watts if features.profile_known else HIGHEST_FLOOR_WATTS):
        why = (
            "Utilization is near 0 % although GPUs draw compute-level power: the sample was probably taken between "
            "two kernels"
        )
        return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.COMPUTE, 0.3))
    if worked_a_moment_ago(features):
        why = "No kernel is running, but GPUs draw more power than idle GPUs: they probably worked a moment ago"
        # GPUs of an unknown model may draw a third of their limit when idle; and a bare context saves nothing.
        is_generic = features.profile.name == generic_profile().name
        sure = not is_generic and features.memory_read and features.limit_read
        return make_verdict(features, PowerState.CHECKPOINT, 0.6 if sure else 0.45, why, (PowerState.HANG, 0.25))
    if works_now_and_then(features):
        why = (
            "GPUs run kernels only now and then but draw more power than idle GPUs: they are probably waiting for input"
        )
        return make_verdict(features, PowerState.STARVATION, 0.45, why, (PowerState.HANG, 0.3))
    why = (
        "No kernel is running, but GPU clocks are probably still high: the job may be starting up or pausing between "
        "phases"
    )
    return make_verdict(features, PowerState.IDLE, 0.45, why, (PowerState.HANG, 0.3))
