"""A job's history, thinned with age: every point of the last ten minutes, then one a minute for a day."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.detection.model import JobSample, JobState

RECENT_SECONDS: Final = 600.0
COARSE_STEP_SECONDS: Final = 60.0
RETENTION_SECONDS: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One moment of a job's history; None where it was not known."""

    wall_seconds: float
    state: JobState
    step: int | None
    tokens_per_second: float | None
    power_watts_median: float | None
    power_watts_low: float | None
    power_watts_high: float | None
    utilization_percent_mean: float | None


def timeline_point(sample: JobSample, state: JobState) -> TimelinePoint:
    """The job at one moment in eight numbers."""
    watts = [r.gpu.power_watts for r in sample.gpus if r.gpu.power_watts is not None]
    busy = [r.gpu.utilization_percent for r in sample.gpus if r.gpu.utilization_percent is not None]
    return TimelinePoint(
        wall_seconds=sample.wall_seconds,
        state=state,
        step=sample.progress.step,
        tokens_per_second=sample.progress.tokens_per_second,
        power_watts_median=statistics.median(watts) if watts else None,
        power_watts_low=min(watts, default=None),
        power_watts_high=max(watts, default=None),
        utilization_percent_mean=statistics.fmean(busy) if busy else None,
    )


def continuous_segments(points: Sequence[TimelinePoint]) -> list[list[TimelinePoint]]:
    """Stretches with readings: a gap in the data is a gap in the picture."""
    stretches: list[list[TimelinePoint]] = [[]]
    for point in points:
        if point.power_watts_median is None:
            stretches.append([])
        else:
            stretches[-1].append(point)
    return [stretch for stretch in stretches if len(stretch) > 1]


def state_changes(points: Sequence[TimelinePoint]) -> list[tuple[float, JobState]]:
    """When each stretch of moments in one state began, wall seconds; each lasts until the next begins."""
    changes: list[tuple[float, JobState]] = []
    for point in points:
        if not changes or changes[-1][1] is not point.state:
            changes.append((point.wall_seconds, point.state))
    return changes


class Timeline:
    """Bounded in memory: at most about 600 recent and 1,440 older points at one sample a second."""

    def __init__(self) -> None:
        self._recent: deque[TimelinePoint] = deque(maxlen=1200)
        self._older: deque[TimelinePoint] = deque()

    def add(self, point: TimelinePoint) -> None:
        self._recent.append(point)
        while self._recent[0].wall_seconds < point.wall_seconds - RECENT_SECONDS:
            self._retire(self._recent.popleft())
        while self._older and self._older[0].wall_seconds < point.wall_seconds - RETENTION_SECONDS:
            self._older.popleft()

    def _retire(self, point: TimelinePoint) -> None:
        """Keep one a minute, and each change of state: changes are what people ask for."""
        last = self._older[-1] if self._older else None
        if (
            last is None
            or last.state is not point.state
            or point.wall_seconds - last.wall_seconds >= COARSE_STEP_SECONDS
        ):
            self._older.append(point)

    def points(self) -> tuple[TimelinePoint, ...]:
        return (*self._older, *self._recent)
