"""Is a checkpoint overdue? Counted from the newest complete one, or from the start of the run where that was seen."""

from __future__ import annotations

import math
from typing import Final

from wattwatch.watcher.detection import findings as rules
from wattwatch.watcher.detection.model import Finding, PowerState
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

    def look(self, look: Observation, pace: StepRateTracker, saving: CheckpointSaveTracker) -> Finding | None:
        """No complete checkpoint for twice the configured interval, of a job that is at work."""
        every = look.spec.checkpoint_every_seconds
        if every is None:
            return None
        counted = look.spec.run_directory is not None or bool(look.spec.logs)
        if self._starting or LOAD_PHASE in look.phases or look.alive is False or (counted and not pace.known):
            self._started, self._starting = look.now, False
        works = pace.advances > 0 if counted else look.verdict.state in WORKING_STATES
        if works and self._worked is None:
            self._worked = look.now
        if self._worked is None or (counted and not _moves(look, pace)):
            return None
        newest = saving.newest_complete
        if newest is None and all(listing.error is not None for listing in look.sample.checkpoints):
            return None  # nobody can see whether there is one
        if newest is not None and newest.age_seconds is None:
            return None
        since = self._worked if newest is None else look.now - (newest.age_seconds or 0.0)
        age = look.now - max(since, -math.inf if self._started is None else self._started)
        if age <= LATE_INTERVALS * every:
            return None
        return rules.checkpoint_overdue_finding(look, newest, age, every)


def _moves(look: Observation, pace: StepRateTracker) -> bool:
    """A job that stands makes no checkpoints, and what holds it is told elsewhere."""
    return pace.stalled_seconds is not None and pace.stalled_seconds <= pace.limit_seconds(look)
