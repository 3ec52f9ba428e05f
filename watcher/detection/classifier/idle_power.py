"""Boards that draw no more than idling with a context or spinning does, and boards that hold no context at all.

Idle with a context, a checkpoint and a deadlock draw the same here. Shape separates them, and what the low rank does:
a rank that saves copies its tensors off the board, which shows as a few per cent (3 to 7 % in all public windows of a
rank-0 save on H100), while one that is not in the collective shows 0 (all public hangs of that shape).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from wattwatch.watcher.detection.baselines.profiles import generic_profile
from wattwatch.watcher.detection.classifier.conclusion import make_verdict, single_outlier
from wattwatch.watcher.detection.classifier.features import PowerFeatures, StepProgress, no_model_loaded
from wattwatch.watcher.detection.model import NodeState, PowerState, UtilizationPattern, Verdict

# Nothing on the boards, and the host's processes were listed and are none of the job's.
NO_PROCESS_CONFIDENCE: Final = 0.95
# Nothing on the boards, and nobody says what runs on the host: a launch that stands before it reaches the boards looks
# the same. Of ten such public pictures two were that.
NO_CONTEXT_CONFIDENCE: Final = 0.58
# Memory held at 0 %: start-up, a server without requests, or a job that is dead. In public pictures half and half.
IDLE_WITH_MEMORY_CONFIDENCE: Final = 0.55
# A rank that stays out of a collective can only be told from rank 0's part in a save if there are others to see.
MIN_GPUS_TO_COMPARE: Final = 3
# A rank that writes copies its tensors off the board: 3 to 7 % in all public windows of a save. Less is also noise.
COPYING_PERCENT: Final = 3.0
# A kernel that spins never leaves the board: it reads the whole window, on one rank at least.
SPINNING_PERCENT: Final = 100.0
# What such kernels draw comes on top of spinning: the upper end of what the floor allows.
SHORT_KERNELS_FLOOR_SHARE: Final = 0.9


def no_process_listed(nodes: Iterable[NodeState]) -> bool:
    """Processes were listed on every node, and there is none."""
    listed = [node.processes for node in nodes]
    return bool(listed) and all(each is not None and not each for each in listed)


def no_context_verdict(scene: PowerFeatures, nodes: Iterable[NodeState]) -> Verdict:
    """No memory held: nothing runs, whatever utilisation says. An idle board that is woken by the query itself reads
    100 % with 0 MiB (persistence off), and so does one left behind by a kill."""
    if scene.progress is StepProgress.STALLED:
        why = "Steps stand and no board holds a context: the job stands before it reaches the boards, or has left them"
        return make_verdict(scene, PowerState.HANG, 0.55, why, (PowerState.IDLE, 0.4))
    empty = no_process_listed(nodes)
    if scene.picture.pattern is not UtilizationPattern.ALL_LOW:
        why = "No board holds a context; utilisation without memory or process is a ghost"
        return make_verdict(scene, PowerState.IDLE, 0.8 if empty else 0.75, why)
    if empty:
        return make_verdict(
            scene, PowerState.IDLE, NO_PROCESS_CONFIDENCE, "No board holds a context and no process runs"
        )
    why = "No board holds a context; a job that stands before it reaches the boards looks the same"
    return make_verdict(scene, PowerState.IDLE, NO_CONTEXT_CONFIDENCE, why, (PowerState.HANG, 0.3))


def stalled_verdict(scene: PowerFeatures) -> Verdict | None:
    """The steps stand: that decides. Power and shape only say how sure, and who."""
    if scene.progress is not StepProgress.STALLED:
        return None
    who = single_outlier(scene)
    if scene.picture.pattern is UtilizationPattern.RANK0_LOW_REST_BUSY and scene.at_floor:
        why = "Steps stand and rank 0 alone is low at the power floor: a save that does not end, or a deadlock in it"
        return make_verdict(scene, PowerState.HANG, 0.75, why, (PowerState.CHECKPOINT, 0.25), who)
    confidence = 0.95 if scene.at_floor else 0.8
    why = "Steps stand at the power floor" if scene.at_floor else "Steps stand although power is above the floor"
    return make_verdict(scene, PowerState.HANG, confidence, why, (PowerState.WAITING, 0.1), who)


def classify_idle_power(scene: PowerFeatures) -> Verdict | None:
    if not scene.at_floor:
        return None
    shape, sure = scene.picture.pattern, scene.certain
    # A step counted some seconds ago does not outweigh what is seen now; somebody who says that they advance does.
    told = scene.told and scene.progress is StepProgress.ADVANCING
    nothing_to_save = no_model_loaded(scene.gpus)
    if shape is UtilizationPattern.ONE_LOW_REST_BUSY and (told or _is_copying(scene)) and not nothing_to_save:
        return _other_rank_saving(scene, told=told)
    if told and (shape is not UtilizationPattern.RANK0_LOW_REST_BUSY or nothing_to_save):
        return _advancing_at_idle_power(scene)
    if shape is UtilizationPattern.RANK0_LOW_REST_BUSY:
        return _rank_0_idle(scene)
    if shape is UtilizationPattern.ONE_LOW_REST_BUSY:
        if len(scene.gpus) < MIN_GPUS_TO_COMPARE:
            why = "One of two boards is low and the other spins at the power floor"
            return make_verdict(
                scene, PowerState.HANG, 0.5 * sure, why, (PowerState.CHECKPOINT, 0.4), single_outlier(scene)
            )
        why = "One rank is low and all others spin at the power floor: it is not in the collective that they wait in"
        return make_verdict(
            scene, PowerState.HANG, 0.85 * sure, why, (PowerState.CHECKPOINT, 0.15), single_outlier(scene)
        )
    if shape is UtilizationPattern.ALL_BUSY:
        return _all_spinning(scene)
    if shape is UtilizationPattern.ALL_LOW:
        held = "memory is held" if scene.held else "memory is unknown"
        why = f"No board works and {held}: start-up, a pause between phases, or processes that no longer feed them"
        return make_verdict(scene, PowerState.IDLE, IDLE_WITH_MEMORY_CONFIDENCE, why, (PowerState.HANG, 0.35))
    # Shapes other than rank 0 alone never lasted 10 s in 13.9 h of healthy public logs.
    if shape is UtilizationPattern.ONE_BUSY_REST_LOW:
        why = "One board spins at the power floor, the rest is low: it waits in a collective that the others are not in"
        return make_verdict(scene, PowerState.HANG, 0.8 * sure, why, (PowerState.WAITING, 0.15), single_outlier(scene))
    if shape is UtilizationPattern.TWO_GROUPS:
        why = "Two groups at the power floor: some ranks spin in a collective that the others are not in"
        return make_verdict(scene, PowerState.HANG, 0.8 * sure, why, (PowerState.WAITING, 0.15), scene.picture.outliers)
    if no_model_loaded(scene.gpus):
        why = "No model is loaded on the boards, and few kernels run: a desktop, or a context that waits"
        return make_verdict(scene, PowerState.IDLE, 0.5, why, (PowerState.HANG, 0.3))
    why = "Utilisation scatters near the power floor: boards are fed now and then"
    return make_verdict(scene, PowerState.STARVATION, 0.45, why, (PowerState.HANG, 0.3))


def _is_copying(scene: PowerFeatures) -> bool:
    """The one low rank moves something: one that is not in the collective runs nothing at all."""
    low = scene.picture.outliers[0].gpu
    return (low.utilization_percent or 0.0) >= COPYING_PERCENT or (low.memory_utilization_percent or 0.0) > 0


def _other_rank_saving(scene: PowerFeatures, *, told: bool) -> Verdict:
    """Which board rank 0 has is guessed from their order; and others write too, as the last stage of a pipeline."""
    if told:
        why = "Steps advance; one rank is low and the rest waits for it at the power floor: it gathers and writes"
        return make_verdict(scene, PowerState.CHECKPOINT, 0.7, why, (PowerState.STARVATION, 0.2), single_outlier(scene))
    why = "One rank is low and moves a little, the rest spins at the power floor: it gathers and writes"
    return make_verdict(scene, PowerState.CHECKPOINT, 0.6, why, (PowerState.HANG, 0.35), single_outlier(scene))


def _rank_0_idle(scene: PowerFeatures) -> Verdict:
    """Rank 0 gathers and writes, or prepares something alone, or is not in the collective."""
    sure = scene.certain
    if no_model_loaded(scene.gpus):
        why = "Rank 0 alone is low and the rest spins, with bare contexts on the boards: no model is there to be saved"
        return make_verdict(scene, PowerState.HANG, 0.5 * sure, why, (PowerState.WAITING, 0.4), single_outlier(scene))
    few = len(scene.gpus) < MIN_GPUS_TO_COMPARE
    if _is_copying(scene):
        why = "Rank 0 alone is low and moves a little, the rest spins at the power floor: rank 0 gathers and writes"
        confidence, other = (0.6, 0.3) if few else (0.97, 0.1)
    else:
        why = "Rank 0 alone is low and the rest spins at the power floor: rank 0 gathers and writes"
        confidence, other = (0.5, 0.4) if few else (0.6, 0.35)
    return make_verdict(scene, PowerState.CHECKPOINT, confidence * sure, why, (PowerState.HANG, other))


def _all_spinning(scene: PowerFeatures) -> Verdict:
    """Light kernels read 100 % near the floor too; ranks that wait for each other are the commoner cause."""
    if _kernels_are_short(scene):
        why = "All boards read busy near what spinning draws, but their kernels end: light work, or a poor link"
        return make_verdict(scene, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.4))
    if len(scene.gpus) > 1:
        why = "All boards read busy and none draws more than spinning does"
        return make_verdict(scene, PowerState.HANG, 0.8 * scene.certain, why, (PowerState.WAITING, 0.15))
    if scene.profile.name == generic_profile().name or not scene.held:
        # A small kernel in a loop on a single board (60 of 260 W in a public burn test) has nobody to wait for, and
        # where memory cannot be read nobody knows whether a job is on it.
        why = "One board reads busy near what spinning draws; its floor or its memory is unknown: light work, or a wait"
        return make_verdict(scene, PowerState.UNKNOWN, 0.35, why, (PowerState.HANG, 0.35))
    why = "The board reads busy and draws no more than spinning does; the ranks that it may wait for are not in sight"
    return make_verdict(scene, PowerState.HANG, 0.55 * scene.certain, why, (PowerState.WAITING, 0.3))


def _kernels_are_short(scene: PowerFeatures) -> bool:
    """Jobs that move over a poor link read 97 to 99 % on all boards and draw a little more than spinning does; of ranks
    that spin most read all of the window."""
    if scene.watts < SHORT_KERNELS_FLOOR_SHARE * scene.profile.floor_watts:
        return False
    return all((g.gpu.utilization_percent or 0.0) < SPINNING_PERCENT for g in scene.gpus)


def _advancing_at_idle_power(scene: PowerFeatures) -> Verdict:
    """Steps advance at the floor: busy boards wait for each other, boards that rest wait for data."""
    if scene.picture.pattern in (UtilizationPattern.ALL_LOW, UtilizationPattern.SCATTER):
        why = "Steps advance while the boards rest most of the time near the power floor: they wait for data"
        return make_verdict(scene, PowerState.STARVATION, 0.6, why, (PowerState.COMMUNICATION, 0.2))
    why = "Steps advance although power is near the floor: light work, or a poor link"
    return make_verdict(scene, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.3))
