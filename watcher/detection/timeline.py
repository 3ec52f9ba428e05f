"""A job's recent history for page, API and reports: every point of the last ten minutes, one per minute for a day."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from wattwatch.collectors.clock import WallClockSteps
from wattwatch.watcher.detection.model import JobSample, JobState, JobThroughput

RECENT_SECONDS: Final = 600.0
COARSE_STEP_SECONDS: Final = 60.0
RETENTION_SECONDS: Final = 86_400.0
MAX_RECENT_POINTS: Final = 1200  # bounds memory where samples come faster than one per second
# Points further apart have a gap between them, in which the job was not evaluated: so many times the usual distance of
# the recent points, which is the sampling interval, and at least this many seconds.
GAP_INTERVALS: Final = 5.0
MIN_GAP_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One moment of a job's history; None where it was not known. Power in watts over the job's GPUs."""

    wall_seconds: float
    state: JobState
    step: int | None
    tokens_per_second: float | None  # 0 while no step was counted, whatever the job had last reported
    power_watts_median: float | None
    power_watts_low: float | None
    power_watts_high: float | None
    utilization_percent_mean: float | None


def timeline_point(sample: JobSample, state: JobState, throughput: JobThroughput) -> TimelinePoint:
    """The sample reduced to eight numbers."""
    watts = [r.gpu.power_watts for r in sample.gpus if r.gpu.power_watts is not None]
    utilization = [r.gpu.utilization_percent for r in sample.gpus if r.gpu.utilization_percent is not None]
    return TimelinePoint(
        wall_seconds=sample.wall_seconds,
        state=state,
        step=sample.progress.step,
        tokens_per_second=throughput.tokens_per_second,
        power_watts_median=statistics.median(watts) if watts else None,
        power_watts_low=min(watts, default=None),
        power_watts_high=max(watts, default=None),
        utilization_percent_mean=statistics.fmean(utilization) if utilization else None,
    )


def observed_runs(points: Sequence[TimelinePoint]) -> list[list[TimelinePoint]]:
    """The points, cut where the job was not evaluated: nobody knows its state and power in between."""
    if not points:
        return []
    last = points[-1].wall_seconds
    steps = [later.wall_seconds - earlier.wall_seconds for earlier, later in pairwise(points)]
    recent = [step for step, point in zip(steps, points, strict=False) if last - point.wall_seconds < RECENT_SECONDS]
    gap = max(MIN_GAP_SECONDS, GAP_INTERVALS * statistics.median(recent or steps or [0.0]))
    thinned_gap = max(gap, 2.5 * COARSE_STEP_SECONDS)
    runs = [[points[0]]]
    for step, point in zip(steps, points[1:], strict=True):
        if step > (gap if last - point.wall_seconds < RECENT_SECONDS - gap else thinned_gap):
            runs.append([])
        runs[-1].append(point)
    return runs


def continuous_segments(points: Sequence[TimelinePoint]) -> list[list[TimelinePoint]]:
    """Runs of points with power readings, to be drawn as separate lines: a gap in the data is a gap in the chart."""
    segments: list[list[TimelinePoint]] = [[]]
    for point in points:
        if point.power_watts_median is None:
            segments.append([])
        else:
            segments[-1].append(point)
    return [segment for segment in segments if len(segment) > 1]


def state_changes(points: Sequence[TimelinePoint]) -> list[tuple[float, JobState]]:
    """Unix time at which each state began; each lasts until the next begins."""
    changes: list[tuple[float, JobState]] = []
    for point in points:
        if not changes or changes[-1][1] is not point.state:
            changes.append((point.wall_seconds, point.state))
    return changes


class Timeline:
    """Bounded in memory: about 600 recent and 1,440 older points at one sample per second."""

    def __init__(self) -> None:
        self._recent: deque[TimelinePoint] = deque(maxlen=MAX_RECENT_POINTS)
        self._older: deque[TimelinePoint] = deque()
        self._clock_steps = WallClockSteps()

    def add(self, point: TimelinePoint, now: float) -> None:
        """`now`: monotonic seconds. If the wall clock was set, all earlier points keep their distance from this one."""
        step = self._clock_steps.update(now, point.wall_seconds)
        if step:
            self._recent = deque((_shifted(each, step) for each in self._recent), maxlen=MAX_RECENT_POINTS)
            self._older = deque(_shifted(each, step) for each in self._older)
        self._recent.append(point)
        while self._recent[0].wall_seconds < point.wall_seconds - RECENT_SECONDS:
            self._thin_out(self._recent.popleft())
        while self._older and self._older[0].wall_seconds < point.wall_seconds - RETENTION_SECONDS:
            self._older.popleft()

    def _thin_out(self, point: TimelinePoint) -> None:
        """Keep one point per minute, and every change of state: state changes are what people look for."""
        last = self._older[-1] if self._older else None
        if (
            last is None
            or last.state is not point.state
            or point.wall_seconds - last.wall_seconds >= COARSE_STEP_SECONDS
        ):
            self._older.append(point)

    def points(self) -> tuple[TimelinePoint, ...]:
        """Oldest first."""
        return (*self._older, *self._recent)


def _shifted(point: TimelinePoint, seconds: float) -> TimelinePoint:
    return replace(point, wall_seconds=point.wall_seconds + seconds)
