"""Is the job slower than it was itself? Steps are timed in windows; several slow ones in a row are worth a message.

A window holds enough steps that their noise and the interval of looking do not matter. What counts as slow comes from
the job's own windows: a tenth above their median and three of their deviations. Slow windows teach nothing, so that
what lasts stays told, and a drift of one per cent a window is caught once it adds up. Fail-slows of communication hit
two of five large jobs and last 24 minutes on average (arXiv 2410.12588).
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from typing import Final

from wattwatch.watcher.detection.classifier.features import job_gpus
from wattwatch.watcher.detection.model import BUSY_PERCENT, Suspect, valid_power_watts
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

WINDOW_STEPS: Final = 10
WINDOW_OBSERVATIONS: Final = 60.0
KEPT_WINDOWS: Final = 200
MIN_WINDOWS: Final = 5
SLOW_SHARE: Final = 0.10
# The lower quartile of normal noise lies 0.67 deviations below its median: this many times that are three of them.
SLOW_SPREADS: Final = 4.5
SLOW_WINDOWS: Final = 2
SLOW_SECONDS: Final = 300.0
RECOVERED_WINDOWS: Final = 2
# An interval this many times the usual one of its window holds something else than steps: an evaluation, a save.
OUTLIER_FACTOR: Final = 5.0
# Whose clock is so much lower, or power so much higher, than that of most boards on most looks, holds up the rest.
LOW_CLOCK_SHARE: Final = 0.85
HIGH_POWER_RATIO: Final = 1.3
OUTLIER_OBSERVATION_SHARE: Final = 0.7
MIN_OBSERVATIONS: Final = 5
MAX_OUTLIER_SHARE: Final = 0.25
COMPARE_GPUS_EVERY_SECONDS: Final = 4.0


class SlowdownTracker:
    """Follows the pace of one run over hours."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, int]] = []
        self._windows: deque[float] = deque(maxlen=KEPT_WINDOWS)  # seconds a step, of windows that were not slow
        self._slow: list[float] = []  # of the slow ones in a row
        self._slow_seconds = 0.0
        self._well = 0  # windows in a row that were not, while it is told
        self._looks = self._boards = 0
        self._next_seconds = 0.0
        self._odd: Counter[Suspect] = Counter()  # looks on which a board stood out, since the window began
        self.since: float | None = None  # when the first slow window began
        self.told = False
        self.suspects: tuple[Suspect, ...] = ()

    def clear(self) -> None:
        """The job was started again: it may be another model, or run elsewhere."""
        self.__init__()  # type: ignore[misc]  # the same as a new one, and shorter than naming each field twice

    def windows(self) -> tuple[float, ...]:
        """Seconds a step of the windows that were not slow."""
        return tuple(self._windows)

    def restore_history(self, windows: tuple[float, ...]) -> None:
        """What was learned before the first look."""
        self._windows.extend(windows)

    @property
    def usual_seconds_per_step(self) -> float:
        return statistics.median(self._windows) if self._windows else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Of the slow windows."""
        return statistics.fmean(self._slow) if self._slow else 0.0

    @property
    def lost_share(self) -> float:
        """Of the boards' time, against the job's own usual pace."""
        now = self.seconds_per_step
        return max(0.0, 1.0 - self.usual_seconds_per_step / now) if now else 0.0

    def update(self, observation: Observation, step_rate: StepRateTracker) -> bool:
        """Whether the job has been slower than usual for long enough to say so."""
        self._look_at_boards(observation)
        if step_rate.learned is not None:
            self._intervals.append(step_rate.learned)
            seconds = sum(interval for interval, _ in self._intervals)
            steps = sum(steps for _, steps in self._intervals)
            if steps >= WINDOW_STEPS and seconds >= WINDOW_OBSERVATIONS * observation.spec.interval_seconds:
                self._end_window(observation, seconds)
        return self.told

    def _end_window(self, observation: Observation, seconds: float) -> None:
        usual = statistics.median(interval for interval, _ in self._intervals)
        kept = [(i, steps) for i, steps in self._intervals if i <= OUTLIER_FACTOR * usual]
        step_rate = sum(i for i, _ in kept) / sum(steps for _, steps in kept)
        self._intervals.clear()
        if len(self._windows) >= MIN_WINDOWS and step_rate > self._bound():
            self.since = observation.now - seconds if self.since is None else self.since
            self._slow.append(step_rate)
            self._slow_seconds, self._well = self._slow_seconds + seconds, 0
            self._name()
            self.told = self.told or (len(self._slow) >= SLOW_WINDOWS and self._slow_seconds >= SLOW_SECONDS)
        else:
            self._windows.append(step_rate)
            self._well += 1
            if not self.told or self._well >= RECOVERED_WINDOWS:
                self._slow.clear()
                self._slow_seconds, self.since, self.told, self.suspects = 0.0, None, False, ()
        self._looks = 0
        self._odd.clear()

    def _bound(self) -> float:
        median, ordered = self.usual_seconds_per_step, sorted(self._windows)
        spread = median - ordered[len(ordered) // 4]
        return median + max(SLOW_SHARE * median, SLOW_SPREADS * spread)

    def _look_at_boards(self, observation: Observation) -> None:
        """Who stands out by clock or by power, on looks at which the boards work."""
        if observation.now < self._next_seconds:
            return
        self._next_seconds = observation.now + COMPARE_GPUS_EVERY_SECONDS
        boards = job_gpus(observation.sample.gpus)
        members = [g for g in boards if (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT]
        # The few that happen to be busy in a job that starves are no measure for one of them.
        if observation.verdict.at_floor or len(members) < max(2.0, len(boards) / 2):
            return
        self._looks, self._boards = self._looks + 1, len(members)
        clocks = [g.gpu.sm_clock_mhz for g in members if g.gpu.sm_clock_mhz]
        watts = [w for g in members if (w := valid_power_watts(g.gpu)) is not None]
        least = LOW_CLOCK_SHARE * statistics.median(clocks) if clocks else 0.0
        most = HIGH_POWER_RATIO * statistics.median(watts) if watts else float("inf")
        for g in members:
            if (g.gpu.sm_clock_mhz or least) < least or (valid_power_watts(g.gpu) or 0.0) > most:
                self._odd[Suspect(g.node, g.gpu.index, g.rank)] += 1

    def _name(self) -> None:
        named = [
            suspect
            for suspect, looks in self._odd.items()
            if looks >= OUTLIER_OBSERVATION_SHARE * max(self._looks, MIN_OBSERVATIONS)
        ]
        # Where many boards stand out, none does.
        self.suspects = tuple(named) if len(named) <= max(1.0, MAX_OUTLIER_SHARE * self._boards) else ()
