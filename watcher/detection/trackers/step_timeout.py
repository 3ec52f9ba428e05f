"""How long the step counter may stay unchanged, given what the job is doing.

Two limits, since some samples look the same in a hang and in a healthy pause: after the first a hang is suspected,
after the second it counts as confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.detection.baselines.baseline import HIGHEST_FLOOR_FRACTION
from wattwatch.watcher.detection.model import PowerState, UtilizationPattern
from wattwatch.watcher.detection.trackers.checkpoint_save import DEFAULT_SAVE_LIMIT_SECONDS, CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

# While GPUs work at full power, an unchanged counter may be a long evaluation or a log that is flushed late.
WORKING_FACTOR: Final = 3.0
MIN_WORKING_SECONDS: Final = 600.0
EVALUATION_SECONDS: Final = 1800.0
# The first step may compile.
FIRST_STEP_SECONDS: Final = 1800.0
# Rank 0 may tokenize before the first step while the others wait in a barrier: over 30 min in LlamaFactory#2424 and
# nanotron#204. DLRover allows as long for a first step.
TOKENIZING_SECONDS: Final = 7200.0
# All ranks idle may be a save by all of them, or the start of an epoch: this many times the longest that ended by
# itself. Chosen: enough for the next one of its kind, and a stall of minutes does not delay the next report by many.
REST_FACTOR: Final = 1.5
WORKING_STATES: Final = frozenset(
    {PowerState.COMPUTE, PowerState.COMMUNICATION, PowerState.STARVATION, PowerState.THROTTLE}
)
INCONCLUSIVE_STATES: Final = frozenset({PowerState.UNKNOWN, PowerState.GPU_FAULT})
EVALUATION_PHASE: Final = "eval"
LOAD_PHASE: Final = "load"


@dataclass(frozen=True, slots=True)
class StepTimeout:
    """Seconds without a step until a hang is suspected, and until it is confirmed."""

    suspect_seconds: float
    confirm_seconds: float


def step_timeout(
    observation: Observation,
    step_rate: StepRateTracker,
    saves: CheckpointSaveTracker,
    *,
    first_step: bool,
    longest_rest_seconds: float,
    few_processes_compute: bool,
) -> StepTimeout:
    """The timeout for this observation. `first_step`: none was observed yet; `longest_rest_seconds`: the longest time
    all ranks were idle before a step ended it; `few_processes_compute`: few of the job's processes use a CPU core."""
    limit = step_rate.stall_limit_seconds(observation)
    pattern = observation.verdict.pattern
    if first_step:
        limit = max(limit, FIRST_STEP_SECONDS)
    if is_evaluating(observation):
        return _fixed(max(limit, EVALUATION_SECONDS))
    few_prepare_data = pattern is UtilizationPattern.ALL_LOW and few_processes_compute
    if first_step and (pattern is UtilizationPattern.RANK0_LOW_REST_BUSY or few_prepare_data):
        return _fixed(max(limit, TOKENIZING_SECONDS))
    if LOAD_PHASE in observation.phases:
        return _fixed(max(limit, FIRST_STEP_SECONDS))
    if may_be_working(observation):
        return _fixed(max(WORKING_FACTOR * limit, MIN_WORKING_SECONDS))
    if _is_at_last_step(observation):
        return _fixed(max(limit, DEFAULT_SAVE_LIMIT_SECONDS))  # the final save and its upload: no more steps will come
    if pattern is UtilizationPattern.ALL_LOW:
        suspect = max(limit, min(EVALUATION_SECONDS, REST_FACTOR * longest_rest_seconds))
        if observation.spec.stall_limit_seconds is not None:
            return _fixed(suspect)  # whoever configures a limit knows how long this job's pauses are
        return StepTimeout(suspect, max(suspect, saves.save_limit_seconds))
    if observation.verdict.state is PowerState.UNKNOWN and not observation.verdict.at_floor:
        return StepTimeout(limit, max(limit, MIN_WORKING_SECONDS))
    return _fixed(limit)


def _fixed(seconds: float) -> StepTimeout:
    return StepTimeout(seconds, seconds)


def _is_at_last_step(observation: Observation) -> bool:
    progress = observation.sample.progress
    total = progress.total_steps
    return progress.step is not None and total is not None and progress.step >= total - 1


def may_be_working(observation: Observation) -> bool:
    """The GPUs work, or draw so much that they may. Where the floor or utilization is unknown, power above every floor
    seen is no sign of a hang."""
    verdict = observation.verdict
    if verdict.at_floor or verdict.pattern is UtilizationPattern.ALL_LOW:
        return False
    if verdict.state in WORKING_STATES:
        return True
    if verdict.state not in INCONCLUSIVE_STATES:
        return False
    if verdict.power_fraction is not None:
        return verdict.power_fraction > HIGHEST_FLOOR_FRACTION
    return any(ranked.gpu.power_watts for ranked in observation.sample.gpus)


def is_evaluating(observation: Observation) -> bool:
    """Rank 0 or all ranks report that they evaluate. Any other rank that reports it alone has lost the others."""
    with_phase = [source for source in observation.sample.progress.sources if source.phase]
    evaluating = [source for source in with_phase if source.phase == EVALUATION_PHASE]
    return bool(evaluating) and (
        len(evaluating) == len(with_phase) or any(source.rank in (0, None) for source in evaluating)
    )
