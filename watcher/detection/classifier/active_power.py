"""GPUs that draw more than the power floor: work of some kind. "None of the known ranges" is a valid answer.

Power ranges of communication and starvation were measured on one model (B300) and are scaled between floor and limit
for the others: with less confidence there, and only for the utilization pattern they were measured with. Healthy work
spans
0.37 to 1.0 of the power limit and communication 0.27 to 0.53 over all models, so between floor and full compute power
two readings always remain.
"""

from __future__ import annotations

import statistics
from typing import Final

from wattwatch.watcher.detection.baselines.baseline import HIGHEST_FLOOR_WATTS
from wattwatch.watcher.detection.baselines.profiles import generic_profile, highest_communication_watts
from wattwatch.watcher.detection.classifier.conclusion import make_verdict
from wattwatch.watcher.detection.classifier.features import (
    FLOOR_TOLERANCE,
    PowerFeatures,
    StepProgress,
    is_memory_busy,
    model_without_profile,
    no_model_loaded,
)
from wattwatch.watcher.detection.model import (
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
# A GPU that gets work now and then reads some per cent, at the power of clocks that stay up.
OCCASIONAL_WORK_PERCENT: Final = 5.0
# Chosen: GPUs of one model that do the same work differ by a few per cent only.
STRAGGLER_POWER_RATIO: Final = 2.0


def classify_active_power(features: PowerFeatures) -> Verdict:
    """The verdict on GPUs of which at least one draws more than the power floor."""
    if not features.profile_known:
        return _classify_unnamed_model(features)
    pattern, watts = features.match.pattern, features.median_watts
    if (
        not features.floor_known
        and pattern is not UtilizationPattern.ALL_LOW
        and watts < features.profile.compute_watts
    ):
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
    why = "Some GPUs are idle while others work, and their power matches no known activity"
    return make_verdict(features, PowerState.UNKNOWN, 0.35, why, (PowerState.HANG, 0.3), suspects)


def _no_gap(features: PowerFeatures) -> Verdict:
    """A GPU model on which spinning and work draw about the same."""
    problem = "waiting and working draw nearly the same power on this GPU model"
    if features.progress is StepProgress.ADVANCING:
        why = f"Steps advance; {problem}"
        return make_verdict(features, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.3))
    why = f"GPUs are busy, but {problem}, so power does not show whether they work or wait"
    return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3), features.single_outlier)


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
            "All GPUs are busy and draw more power than communication takes on any GPU model with a profile "
            f"({highest_communication_watts():.0f} W)"
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
        busy = "All GPUs are evenly busy" if evenly else "Some GPUs are idle and the others busy"
        why = (
            f"{busy}, and each draws more power than any known GPU model needs to wait ({HIGHEST_FLOOR_WATTS:.0f} W); "
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
    profile, watts = features.profile, features.median_watts
    advancing = features.progress is StepProgress.ADVANCING
    if len(features.gpus) == 1 and profile.floor_watts < watts < profile.compute_watts:
        why = (
            "The only GPU in this sample is busy below compute-level power and has no other GPU to wait for: it is "
            "probably doing light work"
        )
        return make_verdict(features, PowerState.COMPUTE, 0.6 if advancing else 0.45, why, (PowerState.HANG, 0.3))
    if profile.communication is not None and watts in profile.communication:
        source = " on this GPU model"
        if profile.bands_from:
            source = f" (range scaled from {profile.bands_from} to this GPU model)"
        why = f"All GPUs are evenly busy at the power that is typical of communication{source}"
        confidence = 0.75 * profile.bands_certain
        other = (PowerState.COMPUTE, 0.95 - confidence)
        return make_verdict(features, PowerState.COMMUNICATION, confidence, why, other)
    if watts >= profile.compute_watts:
        return _full_compute(features)
    light = any(watts in band for band in profile.light)
    barely = watts < profile.floor_watts + LIGHT_LOAD_SHARE * (profile.compute_watts - profile.floor_watts)
    if advancing and barely and not light:
        why = "Steps advance; all GPUs are evenly busy but draw only slightly more power than GPUs that only wait"
        return make_verdict(features, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.35))
    if advancing or light:
        why = "All GPUs are evenly busy below compute-level power: probably healthy training with a light load"
        confidence = 0.7 if advancing else 0.45
        return make_verdict(features, PowerState.COMPUTE, confidence, why, (PowerState.COMMUNICATION, 0.3))
    if is_memory_busy(features.gpus) and watts <= profile.floor_watts:
        why = (
            "All GPUs are busy and access memory but draw no more power than GPUs that only wait: this may be light "
            "work or a slow network link"
        )
        return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.3))
    if watts <= profile.floor_watts:
        why = "Some GPUs are only waiting (high utilization at low power), and others draw more power"
        return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3))
    if barely:
        why = "All GPUs are evenly busy but draw only slightly more power than GPUs that only wait"
        return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.35))
    why = "All GPUs are evenly busy and draw more power than GPUs that only wait, but less than compute-level power"
    # GPUs of an unknown model may draw a third of their limit when idle, so spinning is not out of the question.
    other = (PowerState.HANG, 0.3) if profile.name == generic_profile().name else (PowerState.COMPUTE, 0.4)
    return make_verdict(features, PowerState.COMMUNICATION, 0.45, why, other)


def _full_compute(features: PowerFeatures) -> Verdict:
    """At or above full compute power. That was measured for this model; the range of communication is only scaled."""
    band = features.profile.communication
    confidence = 0.9 if features.profile_known else 0.6
    if band is not None and features.median_watts < band.low_watts:
        why = "All GPUs are busy and draw power at the lower end of the compute range"
        other = (PowerState.COMMUNICATION, 0.25)
        return make_verdict(features, PowerState.COMPUTE, min(confidence, 0.7), why, other)
    return make_verdict(features, PowerState.COMPUTE, confidence, "All GPUs are busy and draw compute-level power")


def _unevenly_busy(features: PowerFeatures) -> Verdict:
    profile, watts = features.profile, features.median_watts
    if watts >= NEAR_PLATEAU * profile.compute_watts and _is_even(features):
        why = "All GPUs are busy and draw compute-level power"
        confidence = 0.9 if features.profile_known else 0.6
        return make_verdict(features, PowerState.COMPUTE, confidence, why, (PowerState.STARVATION, 0.1))
    # A rank that runs nothing beside others that do may be the one they wait for.
    any_idle = min(g.gpu.utilization_percent or 0.0 for g in features.gpus) <= IDLE_PERCENT
    other = (PowerState.HANG if any_idle else PowerState.COMPUTE, 0.25)
    if profile.starvation is not None and watts in profile.starvation:
        why = f"{features.scatter_text}, and power is typical of GPUs that are waiting for input"
        confidence = max(0.5, 0.75 * profile.bands_certain)
        return make_verdict(features, PowerState.STARVATION, confidence, why, other)
    if watts >= profile.compute_watts:
        why = "GPUs draw compute-level power; utilization is lower on some ranks"
        return make_verdict(features, PowerState.COMPUTE, 0.65, why, (PowerState.STARVATION, 0.25))
    if _is_alternating(features):
        # In a starving job no GPU draws full compute power; here those that have work do.
        why = "The working GPUs draw compute-level power while others are idle: pipeline stages may be taking turns"
        return make_verdict(features, PowerState.COMPUTE, 0.45, why, (PowerState.STARVATION, 0.35))
    why = f"{features.scatter_text}, and power is medium: the GPUs are probably waiting for input"
    any_at_floor = any(
        (g.gpu.utilization_percent or 0.0) <= IDLE_PERCENT
        and (valid_power_watts(g.gpu) or 0.0) <= FLOOR_TOLERANCE * profile.floor_watts
        for g in features.gpus
    )
    return make_verdict(features, PowerState.STARVATION, 0.5 if any_at_floor else 0.55, why, other)


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
    if features.median_watts >= features.profile.compute_watts:
        why = (
            "Utilization is near 0 % although GPUs draw compute-level power: the sample was probably taken between "
            "two kernels"
        )
        return make_verdict(features, PowerState.UNKNOWN, 0.3, why, (PowerState.COMPUTE, 0.3))
    above_floor = features.floor_known and features.median_watts > FLOOR_TOLERANCE * features.profile.floor_watts
    if above_floor and features.has_contexts and not no_model_loaded(features.gpus):
        if statistics.median(g.gpu.utilization_percent or 0.0 for g in features.gpus) >= OCCASIONAL_WORK_PERCENT:
            why = (
                "GPUs run kernels only now and then but draw more power than idle GPUs: they are probably waiting "
                "for input"
            )
            return make_verdict(features, PowerState.STARVATION, 0.45, why, (PowerState.HANG, 0.3))
        if len(features.gpus) > 1:
            why = "No kernel is running, but GPUs draw more power than idle GPUs: they probably worked a moment ago"
            return make_verdict(features, PowerState.CHECKPOINT, 0.6, why, (PowerState.HANG, 0.25))
    why = (
        "No kernel is running, but GPU clocks are probably still high: the job may be starting up or pausing between "
        "phases"
    )
    return make_verdict(features, PowerState.IDLE, 0.45, why, (PowerState.HANG, 0.3))
