"""Boards that draw more than spinning does: work of some kind. In no band is an answer.

Bands are measured on one board (B300) and scaled between floor and limit to the others: said with less confidence
there, and only of the shape that the band was measured with. Healthy work spans 0.37 to 1.0 of the limit and
communication 0.27 to 0.53 over all boards, so between floor and plateau two readings always stand.
"""

from __future__ import annotations

import statistics
from typing import Final

from wattwatch.watcher.detection.baselines.profiles import generic_profile
from wattwatch.watcher.detection.classifier.conclusion import is_floor_known, make_verdict, single_outlier
from wattwatch.watcher.detection.classifier.features import (
    FLOOR_TOLERANCE,
    HIGHEST_FLOOR_WATTS,
    PowerFeatures,
    StepProgress,
    is_memory_busy,
    no_model_loaded,
)
from wattwatch.watcher.detection.model import IDLE_PERCENT, PowerState, UtilizationPattern, Verdict, valid_power_watts

LIGHT_LOAD_SHARE: Final = (
    1 / 3
)  # of the way from floor to plateau: moving jobs over poor links lie here (0.26 of the limit)
# Healthy steps read 84 to 97 % from board to board at the power of work; ranks that wait for data, 10 to 100.
EVEN_PERCENT: Final = 75.0
EVEN_SPREAD: Final = 15.0
NEAR_PLATEAU: Final = 0.95  # boards of one model differ by a few per cent
# A board that is fed now and then reads some per cent, at the watts of clocks that stay up.
OCCASIONAL_WORK_PERCENT: Final = 5.0


def classify_active_power(scene: PowerFeatures) -> Verdict:
    shape = scene.picture.pattern
    if (
        not is_floor_known(scene)
        and shape is not UtilizationPattern.ALL_LOW
        and scene.watts < _certain_work_watts(scene)
    ):
        return _floor_unknown(scene)
    if shape is UtilizationPattern.ALL_BUSY:
        return _evenly_busy(scene)
    if shape is UtilizationPattern.SCATTER:
        return _unevenly_busy(scene)
    if shape is UtilizationPattern.ALL_LOW:
        return _no_kernels(scene)
    if scene.watts >= scene.profile.compute_watts:
        why = "Most boards draw the power of plain compute; some read low at this moment"
        return make_verdict(scene, PowerState.COMPUTE, 0.55, why, (PowerState.HANG, 0.3), single_outlier(scene))
    if _is_alternating(scene):
        why = "The boards that work draw the power of plain compute, others rest: two jobs, or stages that take turns"
        return make_verdict(scene, PowerState.COMPUTE, 0.45, why, (PowerState.HANG, 0.3))
    why = "Some boards are low while others work and draw more than spinning does: in no band"
    return make_verdict(scene, PowerState.UNKNOWN, 0.35, why, (PowerState.HANG, 0.3), single_outlier(scene))


def _certain_work_watts(scene: PowerFeatures) -> float:
    """Watts that no board draws without working: by the profile, or above every floor ever seen."""
    return scene.profile.compute_watts if scene.known else HIGHEST_FLOOR_WATTS


def _floor_unknown(scene: PowerFeatures) -> Verdict:
    """A board without name and limit, or one whose spinning and working draw the same."""
    lack = "spinning and working draw nearly the same on this board" if scene.known else "this board's floor is unknown"
    if scene.progress is StepProgress.ADVANCING:
        state, other = PowerState.COMPUTE, PowerState.COMMUNICATION
        if scene.known:
            state, other = other, state
        return make_verdict(scene, state, 0.5, f"Steps advance; {lack}", (other, 0.3))
    why = f"Boards are busy and {lack}: watts cannot tell work from waiting"
    return make_verdict(scene, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3), single_outlier(scene))


def _evenly_busy(scene: PowerFeatures) -> Verdict:
    profile, watts = scene.profile, scene.watts
    if len(scene.gpus) == 1 and profile.floor_watts < watts < profile.compute_watts:
        why = "One board works below the compute plateau, and no other is in sight for it to wait for: light work"
        sure = 0.6 if scene.progress is StepProgress.ADVANCING else 0.45
        return make_verdict(scene, PowerState.COMPUTE, sure, why, (PowerState.HANG, 0.3))
    if profile.communication is not None and watts in profile.communication:
        whose = f"scaled from {profile.bands_from} to this board" if profile.bands_from else "of this board"
        why = f"All ranks are evenly busy in the band of communication {whose}"
        confidence = 0.75 * profile.bands_certain
        return make_verdict(scene, PowerState.COMMUNICATION, confidence, why, (PowerState.COMPUTE, 0.95 - confidence))
    if watts >= profile.compute_watts:
        return _plain_compute(scene)
    light = any(watts in band for band in profile.light)
    barely = watts < profile.floor_watts + LIGHT_LOAD_SHARE * (profile.compute_watts - profile.floor_watts)
    advancing = scene.progress is StepProgress.ADVANCING
    if advancing and barely and not light:
        why = "Steps advance, and all ranks are evenly busy at little more than what spinning draws"
        return make_verdict(scene, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.35))
    if advancing or light:
        why = "All ranks are evenly busy below the compute plateau, as light healthy training of this board is"
        return make_verdict(scene, PowerState.COMPUTE, 0.7 if advancing else 0.45, why, (PowerState.COMMUNICATION, 0.3))
    if is_memory_busy(scene.gpus) and watts <= profile.floor_watts:
        why = "All boards are busy and move memory, at no more than what spinning draws: light work, or a poor link"
        return make_verdict(scene, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.3))
    if watts <= profile.floor_watts:
        why = "Some boards spin at the floor, some do not"
        return make_verdict(scene, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3))
    if barely:
        why = "All ranks are evenly busy at little more than what spinning draws"
        return make_verdict(scene, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.35))
    why = "All ranks are evenly busy, well above the floor and below the compute plateau"
    # Boards of unknown model may rest at a third of their limit: spinning is not out of the question.
    other = (PowerState.HANG, 0.3) if profile.name == generic_profile().name else (PowerState.COMPUTE, 0.4)
    return make_verdict(scene, PowerState.COMMUNICATION, 0.45, why, other)


def _plain_compute(scene: PowerFeatures) -> Verdict:
    """At or above the plateau. Below the band of communication the plateau was seen, but the band is only scaled."""
    band = scene.profile.communication
    confidence = 0.9 if scene.known else 0.6
    if band is not None and scene.watts < band.low_watts:
        why = "All ranks are busy at the lower end of plain compute"
        return make_verdict(scene, PowerState.COMPUTE, min(confidence, 0.7), why, (PowerState.COMMUNICATION, 0.25))
    return make_verdict(scene, PowerState.COMPUTE, confidence, "All ranks are busy at the power of plain compute")


def _unevenly_busy(scene: PowerFeatures) -> Verdict:
    profile, watts = scene.profile, scene.watts
    if watts >= NEAR_PLATEAU * profile.compute_watts and _is_even(scene):
        why = "All ranks are about evenly busy at the power of plain compute"
        return make_verdict(scene, PowerState.COMPUTE, 0.9 if scene.known else 0.6, why, (PowerState.STARVATION, 0.1))
    # A rank that runs nothing beside others that do may be the one that holds them up.
    is_late = min(g.gpu.utilization_percent or 0.0 for g in scene.gpus) <= IDLE_PERCENT
    other = (PowerState.HANG if is_late else PowerState.COMPUTE, 0.25)
    if profile.starvation is not None and watts in profile.starvation:
        why = (
            "Utilisation scatters over the ranks in the band of starvation: the bottleneck lies upstream of the boards"
        )
        confidence = 0.75 * profile.bands_certain
        return make_verdict(scene, PowerState.STARVATION, max(0.5, confidence), why, other)
    if watts >= profile.compute_watts:
        why = "Power of plain compute; utilisation dips on some ranks"
        return make_verdict(scene, PowerState.COMPUTE, 0.65, why, (PowerState.STARVATION, 0.25))
    if _is_alternating(scene):
        # Boards that starve are fed by nobody; here those that have work draw all that work draws.
        why = "The boards that work draw the power of plain compute, others rest: they take turns, as pipelines do"
        return make_verdict(scene, PowerState.COMPUTE, 0.45, why, (PowerState.STARVATION, 0.35))
    why = "Utilisation scatters over the ranks at middling power: the bottleneck lies upstream of the boards"
    waits = any(
        (g.gpu.utilization_percent or 0.0) <= IDLE_PERCENT
        and (valid_power_watts(g.gpu) or 0.0) <= FLOOR_TOLERANCE * profile.floor_watts
        for g in scene.gpus
    )
    return make_verdict(scene, PowerState.STARVATION, 0.5 if waits else 0.55, why, other)


def _is_alternating(scene: PowerFeatures) -> bool:
    """Some rest, and those that work draw all that work draws: nobody who waits for them would let them."""
    working = [valid_power_watts(g.gpu) or 0.0 for g in scene.gpus if (g.gpu.utilization_percent or 0.0) > IDLE_PERCENT]
    return 0 < len(working) < len(scene.gpus) and min(working) >= scene.profile.compute_watts


def _is_even(scene: PowerFeatures) -> bool:
    busy = [g.gpu.utilization_percent or 0.0 for g in scene.gpus]
    return min(busy) >= EVEN_PERCENT and max(busy) - min(busy) <= EVEN_SPREAD


def _no_kernels(scene: PowerFeatures) -> Verdict:
    """0 % says that no kernel runs; clocks that are still up, or a mean over the last second, explain the watts."""
    if scene.watts >= scene.profile.compute_watts:
        why = "Utilisation reads low at the power of plain compute: a moment between two kernels"
        return make_verdict(scene, PowerState.UNKNOWN, 0.3, why, (PowerState.COMPUTE, 0.3))
    worked = is_floor_known(scene) and scene.watts > FLOOR_TOLERANCE * scene.profile.floor_watts
    if worked and scene.held and not no_model_loaded(scene.gpus):
        if statistics.median(g.gpu.utilization_percent or 0.0 for g in scene.gpus) >= OCCASIONAL_WORK_PERCENT:
            why = "Boards run a kernel now and then and draw more than at rest: they wait for data"
            return make_verdict(scene, PowerState.STARVATION, 0.45, why, (PowerState.HANG, 0.3))
        if len(scene.gpus) > 1:
            why = "No kernel runs, but the boards draw more than at rest: they worked a moment ago, and pause"
            return make_verdict(scene, PowerState.CHECKPOINT, 0.6, why, (PowerState.HANG, 0.25))
    why = "No kernel runs although clocks are up: start-up, or a pause between phases"
    return make_verdict(scene, PowerState.IDLE, 0.45, why, (PowerState.HANG, 0.3))
