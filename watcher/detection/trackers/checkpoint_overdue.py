"""Is a checkpoint overdue? Counted from the newest complete one, or from the start of the run where that was seen."""

from __future__ import annotations

import math
from typing import Final

from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, PowerState
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

LATE_INTERVALS: Final = 2.0
LOAD_PHASE: Final = "load"
WORKING_STATES: Final = frozenset({PowerState.COMPUTE, PowerState.COMMUNICATION})


class OverdueCheckpointTracker:
    """Remembers since when the run could have saved. A run that is at work when the watcher comes owes its saves."""

    def __init__(self) -> None:
        self._started: float | None = None  # None: before our time
        self._worked: float | None = None  # first seen at work
        self._starting = False

    def clear(self) -> None:
        """The job was started again: what lies in the directory is of the run before."""
        self._starting, self._worked = True, None

    def update(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker
    ) -> Finding | None:
        """No complete checkpoint for twice the configured interval, of a job that is at work."""
        every = observation.spec.checkpoint_every_seconds
        if every is None:
            return None
        counted = observation.spec.run_directory is not None or bool(observation.spec.logs)
        if (
            self._starting
            or LOAD_PHASE in observation.phases
            or observation.alive is False
            or (counted and not step_rate.known)
        ):
            self._started, self._starting = observation.now, False
        works = step_rate.advances > 0 if counted else observation.verdict.state in WORKING_STATES
        if works and self._worked is None:
            self._worked = observation.now
        if self._worked is None or (counted and not _moves(observation, step_rate)):
            return None
        newest = saves.newest_complete
        if newest is None and all(listing.error is not None for listing in observation.sample.checkpoints):
            return None  # nobody can see whether there is one
        if newest is not None and newest.age_seconds is None:
            return None
        since = self._worked if newest is None else observation.now - (newest.age_seconds or 0.0)
        age = observation.now - max(since, -math.inf if self._started is None else self._started)
        if age <= LATE_INTERVALS * every:
            return None
        return checkpoint_overdue_finding(observation, newest, age, every)


def _moves(observation: Observation, step_rate: StepRateTracker) -> bool:
    """A job that stands makes no checkpoints, and what holds it is told elsewhere."""
    return step_rate.stalled_seconds is not None and step_rate.stalled_seconds <= step_rate.limit_seconds(observation)


def checkpoint_overdue_finding(
    observation: Observation, newest: CheckpointEntry | None, age_seconds: float, every_seconds: float
) -> Finding:
    """The run has gone on for longer than it should without a complete checkpoint."""
    seen = "none was seen of this run"
    if newest is not None and newest.age_seconds is not None:
        seen = f"the newest, {newest.name}, is {newest.age_seconds / 60:.0f} min old"
    return Finding(
        job=observation.spec.name,
        alert=AlertName.CHECKPOINT_OVERDUE,
        severity=ALERT_KINDS[AlertName.CHECKPOINT_OVERDUE].severity,
        scope="",
        summary=f"{observation.spec.name}: no complete checkpoint for {age_seconds / 60:.0f} min.",
        evidence=(f"{seen}; one is expected each {every_seconds / 60:.0f} min",),
        advice="A crash now loses all work since then: look at the job's log for failed saves.",
        since_seconds=observation.now - (age_seconds - every_seconds),
    )
