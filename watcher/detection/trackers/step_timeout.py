"""How long the counter may stand: what takes its time in a healthy job, and how long it may take.

Two answers, since some pictures are those of a hang and of a healthy pause alike: from when on a hang is suspected, and
from when on it counts as proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.detection.classifier.features import HIGHEST_FLOOR_FRACTION
from wattwatch.watcher.detection.model import PowerState, UtilizationPattern
from wattwatch.watcher.detection.trackers.checkpoint_save import DEFAULT_SAVE_LIMIT_SECONDS, CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

# While the boards work at full power a standing counter may be a long evaluation or a log that lags.
WORKING_FACTOR: Final = 3.0
MIN_WORKING_SECONDS: Final = 600.0
EVALUATION_SECONDS: Final = 1800.0
FIRST_STEP_SECONDS: Final = 1800.0
# Rank 0 tokenises before the first step while the others wait in a barrier: over 30 min in LlamaFactory#2424 and
# nanotron#204. DLRover allows a first step as long as this.
TOKENIZING_SECONDS: Final = 7200.0
# All ranks at rest: a save by all of them, the start of an epoch; three times the longest that ended by itself.
REST_FACTOR: Final = 3.0
WORKING_STATES: Final = frozenset(
    {PowerState.COMPUTE, PowerState.COMMUNICATION, PowerState.STARVATION, PowerState.THROTTLE}
)
INCONCLUSIVE_STATES: Final = frozenset({PowerState.UNKNOWN, PowerState.GPU_FAULT})
EVALUATION_PHASE: Final = "eval"


@dataclass(frozen=True, slots=True)
class StepTimeout:
    """Seconds that the counter may stand."""

    suspect_seconds: float
    confirm_seconds: float


def step_timeout(
    observation: Observation,
    step_rate: StepRateTracker,
    saves: CheckpointSaveTracker,
    *,
    first_step: bool,
    rest_seconds: float,
    few_processes_compute: bool,
) -> StepTimeout:
    """`first_step`: none was seen yet, it may compile; `rest_seconds`: the longest rest of all ranks that ended;
    `few_compute`: few of the job's processes use a core."""
    limit = step_rate.limit_seconds(observation)
    if first_step:
        limit = max(limit, FIRST_STEP_SECONDS)
    if is_evaluating(observation):
        return _fixed(max(limit, EVALUATION_SECONDS))
    prepares = observation.verdict.pattern is UtilizationPattern.ALL_LOW and few_processes_compute
    if first_step and (observation.verdict.pattern is UtilizationPattern.RANK0_LOW_REST_BUSY or prepares):
        return _fixed(max(limit, TOKENIZING_SECONDS))
    if "load" in observation.phases:
        return _fixed(max(limit, FIRST_STEP_SECONDS))
    if may_be_working(observation):
        return _fixed(max(WORKING_FACTOR * limit, MIN_WORKING_SECONDS))
    if _at_last_step(observation):
        return _fixed(max(limit, DEFAULT_SAVE_LIMIT_SECONDS))  # the last save and its upload; no step will come
    if observation.verdict.pattern is UtilizationPattern.ALL_LOW:
        suspect = max(limit, min(EVALUATION_SECONDS, REST_FACTOR * rest_seconds))
        if observation.spec.stall_limit_seconds is not None:
            return _fixed(suspect)  # whoever sets it knows how long this job rests
        return StepTimeout(suspect, max(suspect, saves.limit_seconds))
    if observation.verdict.state is PowerState.UNKNOWN and not observation.verdict.at_floor:
        return StepTimeout(limit, max(limit, MIN_WORKING_SECONDS))
    return _fixed(limit)


def _fixed(seconds: float) -> StepTimeout:
    return StepTimeout(seconds, seconds)


def _at_last_step(observation: Observation) -> bool:
    progress = observation.sample.progress
    total = progress.total_steps
    return progress.step is not None and total is not None and progress.step >= total - 1


def may_be_working(observation: Observation) -> bool:
    """The boards work, or draw so much that they may: on a board of unknown floor, or one that reads no utilisation,
    watts above every floor seen are no sign of a hang."""
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
    """Rank 0 or all ranks say that they evaluate; one that says so alone has lost the others."""
    phased = [source for source in observation.sample.progress.sources if source.phase]
    in_eval = [source for source in phased if source.phase == EVALUATION_PHASE]
    return bool(in_eval) and (len(in_eval) == len(phased) or any(source.rank in (0, None) for source in in_eval))
