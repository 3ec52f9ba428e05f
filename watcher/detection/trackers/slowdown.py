"""Is the job slower than it was itself? Steps are timed in windows, and several slow windows in a row are reported.

A window holds enough steps that neither their noise nor the sampling interval matters. "Slow" is relative to the job's
own windows: a tenth above their median and three standard deviations. Slow windows are not learned, so a lasting
slowdown stays reported, and a drift of one per cent per window is caught once it adds up. Slow communication hits two
of five large jobs and lasts 24 minutes on average (arXiv 2410.12588).
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
# The lower quartile of normally distributed noise is 0.67 standard deviations below the median: 4.5 times that
# distance are three of them.
SLOW_SPREADS: Final = 4.5
SLOW_WINDOWS: Final = 2
SLOW_SECONDS: Final = 300.0
RECOVERED_WINDOWS: Final = 2
# An interval this many times the usual one of its window contains more than steps: an evaluation, a save.
OUTLIER_FACTOR: Final = 5.0
# A GPU with a clock this much lower, or power this much higher, than most others in most observations may hold them up.
LOW_CLOCK_SHARE: Final = 0.85
HIGH_POWER_RATIO: Final = 1.3
OUTLIER_OBSERVATION_SHARE: Final = 0.7
MIN_OBSERVATIONS: Final = 5
MAX_OUTLIER_SHARE: Final = 0.25
COMPARE_GPUS_EVERY_SECONDS: Final = 4.0


class SlowdownTracker:
    """Follows the step time of one run over hours."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, int]] = []
        self._windows: deque[float] = deque(maxlen=KEPT_WINDOWS)  # seconds per step, of windows that were not slow
        self._slow: list[float] = []  # of the current series of slow windows
        self._slow_seconds = 0.0
        self._normal_windows = 0  # in a row, while a slowdown is reported
        self._observations = self._compared_gpus = 0
        self._next_seconds = 0.0
        self._outliers: Counter[Suspect] = Counter()  # observations in which a GPU stood out, in this window
        self.since: float | None = None  # when the first slow window began
        self.measured: float | None = None  # when the last slow window ended
        self.is_slow = False
        self.suspects: tuple[Suspect, ...] = ()

    def clear(self) -> None:
        """The job was restarted: it may be another model, or run elsewhere."""
        self.__init__()  # type: ignore[misc]  # equal to a new tracker, without listing every field twice

    def windows(self) -> tuple[float, ...]:
        """Seconds per step of the windows that were not slow."""
        return tuple(self._windows)

    def restore_history(self, windows: tuple[float, ...]) -> None:
        """Take over what was learned before the first observation."""
        self._windows.extend(windows)

    @property
    def usual_seconds_per_step(self) -> float:
        return statistics.median(self._windows) if self._windows else 0.0

    @property
    def seconds_per_step(self) -> float:
        """In the slow windows."""
        return statistics.fmean(self._slow) if self._slow else 0.0

    @property
    def lost_share(self) -> float:
        """Share (0..1) of GPU time lost against the job's own usual step time."""
        now = self.seconds_per_step
        return max(0.0, 1.0 - self.usual_seconds_per_step / now) if now else 0.0

    def update(self, observation: Observation, step_rate: StepRateTracker) -> bool:
        """Whether the job has been slower than usual for long enough to report it."""
        self._compare_gpus(observation)
        if step_rate.new_interval is not None:
            self._intervals.append(step_rate.new_interval)
            seconds = sum(interval for interval, _ in self._intervals)
            steps = sum(steps for _, steps in self._intervals)
            if steps >= WINDOW_STEPS and seconds >= WINDOW_OBSERVATIONS * observation.spec.interval_seconds:
                self._end_window(observation, seconds)
        return self.is_slow

    def _end_window(self, observation: Observation, seconds: float) -> None:
        usual = statistics.median(interval for interval, _ in self._intervals)
        kept = [(i, steps) for i, steps in self._intervals if i <= OUTLIER_FACTOR * usual]
        seconds_per_step = sum(i for i, _ in kept) / sum(steps for _, steps in kept)
        self._intervals.clear()
        if len(self._windows) >= MIN_WINDOWS and seconds_per_step > self._slow_limit():
            self.since = observation.now - seconds if self.since is None else self.since
            self._slow.append(seconds_per_step)
            self.measured = observation.now
            self._slow_seconds, self._normal_windows = self._slow_seconds + seconds, 0
            self._name_suspects()
            self.is_slow = self.is_slow or (len(self._slow) >= SLOW_WINDOWS and self._slow_seconds >= SLOW_SECONDS)
        else:
            self._windows.append(seconds_per_step)
            self._normal_windows += 1
            if not self.is_slow or self._normal_windows >= RECOVERED_WINDOWS:
                self._slow.clear()
                self._slow_seconds, self.since, self.is_slow, self.suspects = 0.0, None, False, ()
        self._observations = 0
        self._outliers.clear()

    def _slow_limit(self) -> float:
        median, ordered = self.usual_seconds_per_step, sorted(self._windows)
        spread = median - ordered[len(ordered) // 4]
        return median + max(SLOW_SHARE * median, SLOW_SPREADS * spread)

    def _compare_gpus(self, observation: Observation) -> None:
        """Count GPUs whose clock or power stands out, in observations in which the GPUs work."""
        if observation.now < self._next_seconds:
            return
        self._next_seconds = observation.now + COMPARE_GPUS_EVERY_SECONDS
        gpus = job_gpus(observation.sample.gpus)
        busy = [g for g in gpus if (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT]
        # The few GPUs that happen to be busy in a starving job are no basis for comparison.
        if observation.verdict.at_floor or len(busy) < max(2.0, len(gpus) / 2):
            return
        self._observations, self._compared_gpus = self._observations + 1, len(busy)
        clocks = [g.gpu.sm_clock_mhz for g in busy if g.gpu.sm_clock_mhz]
        watts = [w for g in busy if (w := valid_power_watts(g.gpu)) is not None]
        lowest_clock = LOW_CLOCK_SHARE * statistics.median(clocks) if clocks else 0.0
        highest_watts = HIGH_POWER_RATIO * statistics.median(watts) if watts else float("inf")
        for g in busy:
            low_clock = (g.gpu.sm_clock_mhz or lowest_clock) < lowest_clock
            if low_clock or (valid_power_watts(g.gpu) or 0.0) > highest_watts:
                self._outliers[Suspect(g.node, g.gpu.index, g.rank)] += 1

    def _name_suspects(self) -> None:
        needed = OUTLIER_OBSERVATION_SHARE * max(self._observations, MIN_OBSERVATIONS)
        named = [suspect for suspect, observations in self._outliers.items() if observations >= needed]
        # Where many GPUs stand out, none is named.
        self.suspects = tuple(named) if len(named) <= max(1.0, MAX_OUTLIER_SHARE * self._compared_gpus) else ()
