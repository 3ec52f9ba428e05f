"""GPUs at the power floor, where no GPU draws more than one that idles with a context or spins; and GPUs without a
context.

Idle with a context, a checkpoint and a deadlock draw the same here. The utilization pattern tells them apart, and what
the one idle rank does: a rank that writes a checkpoint copies tensors off its GPU and reads 3 to 7 % utilization (all
public samples of a rank 0 save on H100), while a rank that is missing from a collective reads 0 % (all public hangs
with one idle rank).

Out of reach: a hang that looks like a save, and all GPUs idle, which start-up, a pause and a dead job share. Only the
step counter decides those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.watcher.detection.baselines.profiles import generic_profile
from wattwatch.watcher.detection.classifier.conclusion import make_verdict
from wattwatch.watcher.detection.classifier.features import (
    FLOOR_TOLERANCE,
    MIN_GPUS_TO_COMPARE,
    PowerFeatures,
    StepProgress,
    no_model_loaded,
    worked_a_moment_ago,
)
from wattwatch.watcher.detection.model import (
    NodeState,
    PowerState,
    RankGpu,
    UtilizationPattern,
    Verdict,
    valid_power_watts,
)

# No context on any GPU, and the host's process list shows none of the job's processes.
NO_PROCESS_CONFIDENCE: Final = 0.95
# No context on any of several GPUs, and the host's processes are unknown: a launch that hangs before CUDA is
# initialized looks the same. The fewer GPUs, the less that says: the job may run on others that are not in the sample
# (two of three public samples of a single such GPU were of hung jobs, and none of seven with more). Chosen below 0.6
# for one, so that the alternative is not overlooked.
NO_CONTEXT_CONFIDENCE: Final = 0.75
FEW_WITHOUT_CONTEXT_CONFIDENCE: Final = 0.65
FEW_GPUS: Final = 3
ONE_WITHOUT_CONTEXT_CONFIDENCE: Final = 0.58
# Memory in use at 0 %: start-up, a server without requests, or a dead job. Half of the public samples were hangs.
IDLE_WITH_MEMORY_CONFIDENCE: Final = 0.55
# Copying off a GPU reads 3 to 7 % in all public samples of a save; below that it may be noise.
COPYING_PERCENT: Final = 3.0
# A save writes no more than the GPUs hold, at 0.5 GB/s at least (62 GB took two minutes on a contended file system,
# arXiv 2608.05944): what takes less than about 15 s is hardly what a single sample shows.
QUICK_SAVE_BYTES: Final = 8e9
LOW_POWER_ADVICE: Final = (
    "Compare the step time with that of earlier runs. If it is longer, check the network, and the GPU's clocks and "
    "power state with nvidia-smi -q -d CLOCK,PERFORMANCE: a GPU that is held at a low clock computes slowly at this "
    "power."
)
# A spinning kernel never ends, so it fills the whole sampling window on at least one rank.
SPINNING_PERCENT: Final = 100.0
# Short kernels draw their power on top of spinning: at least this share of the floor.
SHORT_KERNELS_FLOOR_SHARE: Final = 0.9


def no_process_listed(nodes: Iterable[NodeState]) -> bool:
    """Processes were listed on every node, and the job has none."""
    listed = [node.processes for node in nodes]
    return bool(listed) and all(each is not None and not each for each in listed)


def no_context_verdict(features: PowerFeatures, nodes: Iterable[NodeState]) -> Verdict:
    """No memory in use: nothing runs, whatever utilization says.

    An idle GPU that the query itself wakes up (persistence mode off) reads 100 % with 0 MiB, and so does one after its
    process was killed.
    """
    nodes = tuple(nodes)
    no_process = no_process_listed(nodes)
    nowhere = f"No job has memory allocated on {_any_of(features)}"
    if features.match.pattern is not UtilizationPattern.ALL_LOW:
        if features.median_watts > FLOOR_TOLERANCE * features.profile.floor_watts and features.floor_known:
            why = f"{nowhere}, but power is above that of an idle GPU: the utilization or the memory reading is wrong"
            return make_verdict(features, PowerState.IDLE, 0.5, why, (PowerState.COMPUTE, 0.3))
        why = f"{nowhere}, so the reported utilization is wrong: an idle GPU can report up to 100 %"
        confidence = 0.8 if no_process else 0.75
        if features.profile.name == generic_profile().name:  # whose floor is a guess
            confidence = 0.55
        return make_verdict(features, PowerState.IDLE, confidence, why)
    if no_process:
        why = f"{nowhere}, and no process of the job is running on {_all_nodes(len(nodes))}"
        return make_verdict(features, PowerState.IDLE, NO_PROCESS_CONFIDENCE, why)
    why = f"{nowhere}; a job that hangs before it initializes CUDA looks the same"
    confidence = ONE_WITHOUT_CONTEXT_CONFIDENCE
    if len(features.gpus) > 1:
        confidence = NO_CONTEXT_CONFIDENCE if len(features.gpus) > FEW_GPUS else FEW_WITHOUT_CONTEXT_CONFIDENCE
    return make_verdict(features, PowerState.IDLE, confidence, why, (PowerState.HANG, 0.3))


def _any_of(features: PowerFeatures) -> str:
    """ "any GPU" with the count that this was read of."""
    count = len(features.gpus)
    return "the GPU" if count == 1 else f"any of {count} GPUs"


def _all_nodes(count: int) -> str:
    return "the node" if count == 1 else f"any of its {count} nodes"


def _all_of(features: PowerFeatures) -> str:
    """ "all GPUs" with their count."""
    count = len(features.gpus)
    return {1: "the GPU", 2: "both GPUs"}.get(count, f"all {count} GPUs")


def _others(features: PowerFeatures, noun: str) -> str:
    """All but one, with their count."""
    count = len(features.gpus) - 1
    return f"the other {noun} is" if count == 1 else f"the other {count} {noun}s are"


def stalled_verdict(features: PowerFeatures) -> Verdict | None:
    """Steps have stopped, and that decides: a hang. Power and pattern only say how sure, and which rank."""
    if features.progress is not StepProgress.STALLED:
        return None
    if features.has_contexts is False:
        why = (
            f"Steps have stopped and no job has memory allocated on {_any_of(features)}: the job either hangs before "
            "it initializes CUDA or no longer uses the GPUs"
        )
        return make_verdict(features, PowerState.HANG, 0.55, why, (PowerState.IDLE, 0.4))
    suspects = features.single_outlier
    if features.match.pattern is UtilizationPattern.RANK0_LOW_REST_BUSY and features.at_floor:
        why = (
            "Steps have stopped; rank 0 is idle and the other ranks are only waiting (high utilization at low "
            "power): a checkpoint save is probably stuck or deadlocked"
        )
        return make_verdict(features, PowerState.HANG, 0.75, why, (PowerState.CHECKPOINT, 0.25), suspects)
    confidence = 0.95 if features.at_floor else 0.8
    if features.at_floor:
        drawing = (
            "draws so little power that it is" if len(features.gpus) == 1 else "draw so little power that they are"
        )
        why = f"Steps have stopped, and {_all_of(features)} {drawing} idle or only waiting"
    elif features.profile_known:
        why = "Steps have stopped, although some GPUs draw more power than GPUs that only wait"
    else:
        why = "Steps have stopped; power does not show whether the GPUs work or wait"
    return make_verdict(features, PowerState.HANG, confidence, why, (PowerState.WAITING, 0.1), suspects)


def classify_idle_power(features: PowerFeatures) -> Verdict | None:
    """The verdict on GPUs at the power floor; None where any GPU is above it."""
    if not features.at_floor:
        return None
    pattern, certainty = features.match.pattern, features.floor_confidence
    bare_contexts = no_model_loaded(features.gpus)
    one_low = pattern is UtilizationPattern.ONE_LOW_REST_BUSY
    if one_low and _is_copying(features) and not bare_contexts:
        return _other_rank_saving(features)
    if pattern is UtilizationPattern.RANK0_LOW_REST_BUSY:
        return _rank_0_idle(features)
    suspects = features.single_outlier
    if one_low:
        if len(features.gpus) < MIN_GPUS_TO_COMPARE:
            why = "One of two GPUs is idle and the other is only waiting (high utilization at low power)"
            # A rank that waits for its input looks the same for as long as that takes.
            confidence, other = 0.6 * certainty, (PowerState.STARVATION, 0.4)
            return make_verdict(features, PowerState.HANG, confidence, why, other, suspects)
        why = (
            f"One rank is idle and {_others(features, 'rank')} only waiting (high utilization at low power): the idle "
            "rank is missing from the collective that the others wait for"
        )
        return make_verdict(features, PowerState.HANG, 0.85 * certainty, why, (PowerState.CHECKPOINT, 0.15), suspects)
    if pattern is UtilizationPattern.ALL_BUSY:
        return _all_spinning(features)
    if pattern is UtilizationPattern.ALL_LOW:
        memory = "memory is in use" if features.has_contexts else "memory use is unknown"
        busiest = max(g.gpu.utilization_percent or 0.0 for g in features.gpus)
        idle = f"No kernel ran on {_any_of(features)} in the last sample period"
        if busiest > 0:  # some kernels did run
            share = f"{busiest:.0f} % of the last sample period"
            one = len(features.gpus) == 1
            idle = f"Kernels ran for {share}" if one else f"Kernels ran for at most {share} on {_any_of(features)}"
        why = f"{idle} and {memory}: the job may be starting up, pausing between phases, or no longer launching work"
        return make_verdict(features, PowerState.IDLE, IDLE_WITH_MEMORY_CONFIDENCE, why, (PowerState.HANG, 0.35))
    # Patterns other than rank 0 alone idle never lasted 10 s in 13.9 h of public logs of healthy jobs.
    if pattern is UtilizationPattern.ONE_BUSY_REST_LOW:
        why = (
            f"One GPU is only waiting (high utilization at low power) and {_others(features, 'GPU')} idle: the waiting "
            "GPU is in a collective that the idle GPUs did not enter"
        )
        return make_verdict(features, PowerState.HANG, 0.8 * certainty, why, (PowerState.WAITING, 0.15), suspects)
    if pattern is UtilizationPattern.TWO_GROUPS:
        why = (
            "Some ranks are only waiting (high utilization at low power) and the others are idle: the waiting ranks "
            "are in a collective that the idle ranks did not enter"
        )
        outliers = features.match.outliers
        return make_verdict(features, PowerState.HANG, 0.8 * certainty, why, (PowerState.WAITING, 0.15), outliers)
    if bare_contexts:
        why = "No model is loaded on the GPUs and few kernels run: the GPUs may only serve a desktop or an idle process"
        return make_verdict(features, PowerState.IDLE, 0.5, why, (PowerState.HANG, 0.3))
    why = (
        f"{features.scatter_text}, and power is as low as on GPUs that only wait: the GPUs of this job get work only "
        "now and then"
    )
    return make_verdict(features, PowerState.STARVATION, 0.4, why, (PowerState.HANG, 0.3))


def _is_copying(features: PowerFeatures) -> bool:
    """The one idle rank moves memory: one that is missing from a collective runs nothing at all."""
    idle = features.match.outliers[0].gpu
    return (idle.utilization_percent or 0.0) >= COPYING_PERCENT or (idle.memory_utilization_percent or 0.0) > 0


def _other_rank_saving(features: PowerFeatures) -> Verdict:
    """A rank other than 0 may write: which GPU rank 0 has is inferred from their order, and pipelines save from their
    last stage."""
    why = (
        "One rank shows light activity and the others are only waiting (high utilization at low power): that rank is "
        "probably saving a checkpoint"
    )
    suspects = features.single_outlier
    return make_verdict(features, PowerState.CHECKPOINT, 0.6, why, (PowerState.HANG, 0.35), suspects)


def _rank_0_idle(features: PowerFeatures) -> Verdict:
    """Rank 0 gathers and writes a checkpoint, prepares something alone, or is missing from the collective."""
    certainty = features.floor_confidence
    if no_model_loaded(features.gpus):
        why = (
            "Rank 0 is idle and the other ranks are only waiting; this is not a checkpoint save, because no model is "
            "loaded on the GPUs"
        )
        suspects = features.single_outlier
        return make_verdict(features, PowerState.HANG, 0.6 * certainty, why, (PowerState.WAITING, 0.35), suspects)
    if _saves_quickly(features.gpus) and not _is_copying(features):
        why = (
            "Rank 0 is idle and the other ranks are only waiting (high utilization at low power); a "
            "checkpoint of the data on these GPUs would take only seconds, so a save is unlikely"
        )
        suspects = features.single_outlier
        return make_verdict(features, PowerState.HANG, 0.6 * certainty, why, (PowerState.WAITING, 0.35), suspects)
    few = len(features.gpus) < MIN_GPUS_TO_COMPARE
    if _is_copying(features):
        why = (
            "Rank 0 is nearly idle and the other ranks are only waiting (high utilization at low power): rank 0 is "
            "probably saving a checkpoint"
        )
        confidence, other = (0.6, 0.3) if few else (0.97, 0.1)
    else:
        why = (
            "Rank 0 is idle and the other ranks are only waiting (high utilization at low power): rank 0 may be "
            "saving a checkpoint"
        )
        confidence, other = (0.5, 0.4) if few else (0.6, 0.35)
    return make_verdict(features, PowerState.CHECKPOINT, confidence * certainty, why, (PowerState.HANG, other))


def _saves_quickly(gpus: Sequence[RankGpu]) -> bool:
    """All that these GPUs hold is written in seconds. False where the memory of any cannot be read."""
    used = [g.gpu.memory_used_bytes for g in gpus]
    return None not in used and sum(each or 0.0 for each in used) <= QUICK_SAVE_BYTES


def _all_spinning(features: PowerFeatures) -> Verdict:
    """Light kernels read 100 % near the floor as well; ranks that wait for each other are the more common cause."""
    if _kernels_are_short(features):
        why = (
            f"The utilization of {_all_of(features)} is high but below 100 %, and power is about that of GPUs that "
            "only wait: this may be light work or a slow network link"
        )
        return make_verdict(
            features, PowerState.COMMUNICATION, 0.45, why, (PowerState.HANG, 0.35 * features.floor_confidence)
        )
    if len(features.gpus) > 1:
        why = (
            f"The utilization of {_all_of(features)} is high, but they draw {_no_more(features)} GPUs that only wait: "
            "the ranks are probably waiting for each other"
        )
        confidence = 0.8 * features.floor_confidence
        return make_verdict(features, PowerState.HANG, confidence, why, (PowerState.WAITING, 0.15))
    if features.profile.name == generic_profile().name or not features.has_contexts:
        # A small kernel in a loop on a single GPU (60 of 260 W in a public burn test) waits for nobody, and without a
        # memory reading it is not even known whether a job is on it.
        why = (
            "The GPU is busy at low power, and its memory use or the power range of its model is unknown: it may be "
            "doing light work or waiting"
        )
        return make_verdict(features, PowerState.UNKNOWN, 0.35, why, (PowerState.HANG, 0.35))
    why = (
        f"The GPU is busy but draws {_no_more(features)} a GPU that only waits: it may be waiting for ranks that are "
        "not in this sample"
    )
    return make_verdict(features, PowerState.HANG, 0.7 * features.floor_confidence, why, (PowerState.WAITING, 0.2))


def _no_more(features: PowerFeatures) -> str:
    """How the power compares with the floor, which the GPUs may exceed by some tolerance."""
    most = max((watts for g in features.gpus if (watts := valid_power_watts(g.gpu)) is not None), default=0.0)
    return "no more power than" if most <= features.profile.floor_watts else "about as much power as"


def _kernels_are_short(features: PowerFeatures) -> bool:
    """Jobs that make progress over a slow link read 97 to 99 % on all GPUs and draw a little more than spinning does.
    Of ranks that spin, most read 100 %."""
    if features.median_watts < SHORT_KERNELS_FLOOR_SHARE * features.profile.floor_watts:
        return False
    return all((g.gpu.utilization_percent or 0.0) < SPINNING_PERCENT for g in features.gpus)


def advancing_verdict(features: PowerFeatures) -> Verdict | None:
    """The user reports that steps advance, and the sample looks idle or hung: what the GPUs do then. None where power
    and utilization show work, of which they tell the kind.

    Busy GPUs at the floor wait for each other, idle ones for data or for the one that saves.
    """
    if features.progress is not StepProgress.ADVANCING or not features.progress_is_reported:
        return None
    pattern, gpus = features.match.pattern, features.gpus
    if pattern is UtilizationPattern.ALL_LOW and not features.at_floor and features.has_contexts is not False:
        if features.profile_known and features.median_watts >= features.profile.compute_watts:
            why = "Steps advance at compute-level power; the sample was taken between two kernels"
            return make_verdict(features, PowerState.COMPUTE, 0.5, why, (PowerState.STARVATION, 0.3))
        if worked_a_moment_ago(features):
            return None
    if pattern is UtilizationPattern.ALL_LOW or (pattern is UtilizationPattern.SCATTER and features.at_floor):
        if features.has_contexts is False:
            why = (
                f"Steps advance although no job has memory allocated on {_any_of(features)}: the job computes on other "
                "GPUs or on the CPU, and these GPUs get no work"
            )
            return make_verdict(features, PowerState.STARVATION, 0.4, why, (PowerState.COMPUTE, 0.3))
        why = "Steps advance while the GPUs are mostly idle: the GPUs are waiting for data"
        other = PowerState.COMMUNICATION if len(gpus) > 1 else PowerState.COMPUTE
        return make_verdict(features, PowerState.STARVATION, 0.6, why, (other, 0.2))
    if not features.at_floor:
        return _advancing_above_floor(features)
    one_low = pattern in (UtilizationPattern.ONE_LOW_REST_BUSY, UtilizationPattern.RANK0_LOW_REST_BUSY)
    if one_low and not no_model_loaded(gpus):
        sure = pattern is UtilizationPattern.RANK0_LOW_REST_BUSY and _is_copying(features)
        why = (
            "Steps advance; one rank is idle and the others are only waiting (high utilization at low power): the idle "
            "rank is saving a checkpoint, or waits for its input"
        )
        starving = (PowerState.STARVATION, 0.1 if sure else 0.25)
        confidence = 0.97 * features.floor_confidence if sure else 0.7
        return make_verdict(features, PowerState.CHECKPOINT, confidence, why, starving, features.single_outlier)
    why = (
        "Steps advance although the GPUs draw about as much power as GPUs that only wait: this may be light work, a "
        "slow network link, or GPUs that are held at a low clock"
    )
    if len(gpus) == 1:
        verdict = make_verdict(features, PowerState.COMPUTE, 0.5, why, (PowerState.COMMUNICATION, 0.4))
        return replace(verdict, advice=LOW_POWER_ADVICE)
    return make_verdict(features, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.3))


def _advancing_above_floor(features: PowerFeatures) -> Verdict | None:
    pattern = features.match.pattern
    works = features.profile_known and features.median_watts >= features.certain_work_watts
    in_range = features.floor_known and pattern in (UtilizationPattern.ALL_BUSY, UtilizationPattern.SCATTER)
    if works or (in_range and features.has_contexts is not False):
        return None
    if not features.floor_known:
        why = (
            "Steps advance; waiting GPUs of this model draw nearly the same power as working ones"
            if features.profile_known
            else "Steps advance; the power that this GPU draws while it only waits is unknown"
        )
    else:
        why = "Steps advance; GPUs draw more power than GPUs that only wait, but less than compute-level power"
    if pattern is UtilizationPattern.SCATTER:
        return make_verdict(features, PowerState.STARVATION, 0.5, why, (PowerState.COMPUTE, 0.4))
    if pattern is UtilizationPattern.ALL_BUSY and (len(features.gpus) == 1 or not features.profile_known):
        return make_verdict(features, PowerState.COMPUTE, 0.5, why, (PowerState.COMMUNICATION, 0.3))
    # Some wait while others work: a slow link, stages that take turns, or a rank without input.
    other = PowerState.COMPUTE if pattern is UtilizationPattern.ALL_BUSY else PowerState.STARVATION
    return make_verdict(features, PowerState.COMMUNICATION, 0.5, why, (other, 0.3))
