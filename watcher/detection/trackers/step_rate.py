"""The job's step counter over time: how often it usually changes, how long it has not changed, and its best rate.

The stall limit comes from the job's own steps and log interval, because jobs differ: torchtitan logs nothing for 50 s
by default. It is six times the slowest recent interval, at least 30 s and at most 15 min; PortOS#1381 uses the same
factor and ceiling. An interval longer than the limit was a stall and teaches nothing about the pace: otherwise one
hang of 76 s that ended by itself would delay the report of the next one to 456 s.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Final

from wattwatch.watcher.detection.model import JobProgress, JobThroughput
from wattwatch.watcher.detection.trackers.observation import Observation, StepRateHistory

STALL_FACTOR: Final = 6.0
MIN_STALL_SECONDS: Final = 30.0
MAX_STALL_SECONDS: Final = 900.0
MIN_INTERVALS: Final = 2
KEPT_INTERVALS: Final = 20
# So many stalls that ended by themselves are a habit of the job: in a row, its new pace; otherwise a pause that comes
# again, say an evaluation that nothing announces, and may be longer the next time by this factor.
HABIT_STALLS: Final = 3
HABIT_FACTOR: Final = 1.5
# A source below the furthest step must move this often to be another run: one that is read late may move once.
RESTART_MOVES: Final = 2
# Rate is measured over this many observations, since one change is seen up to one observation late.
RATE_OBSERVATIONS: Final = 30.0
LATE_FACTOR: Final = 2  # intervals without a step after which the next one is late
# A change of the counter is noticed up to one observation late, and so is the one before it.
LATE_OBSERVATIONS: Final = 2
# A reported rate is believed for this long where the usual interval between steps is not known yet. Chosen: longer than
# the 50 s between two lines of torchtitan's log.
UNKNOWN_INTERVAL_SECONDS: Final = 60.0


def repeated_stall_seconds(stalls: Iterable[float]) -> float:
    """What HABIT_STALLS of the stalls lasted at least; 0 where there were fewer."""
    longest = sorted(stalls, reverse=True)[:HABIT_STALLS]
    return longest[-1] if len(longest) == HABIT_STALLS else 0.0


class StepRateTracker:
    """Learns the job's step rate, and starts over when the job is restarted."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._unchanged_seconds = 0.0
        self._sources: dict[tuple[str, int | None], tuple[int | None, int | None]] = {}
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)  # seconds between changes of the counter
        self._seconds_per_step: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._stalls: deque[float] = deque(maxlen=KEPT_INTERVALS)  # intervals longer than the stall limit of their time
        self._stalls_in_a_row = 0
        self._measured_seconds, self._measured_steps = 0.0, 0
        self._best_seconds_per_step: float | None = None
        self._last_seconds_per_step: float | None = None
        self._was_unreadable = False  # at the previous observation
        self.stalled_seconds: float | None = None  # observed time without a change; None: the counter cannot be read
        self.advances = 0  # observed changes
        self.restarted = False  # in this observation
        self.new_interval: tuple[float, int] | None = (
            None  # in this observation: seconds between two changes, and steps
        )
        self.start_observed = False  # the run started while watched, so time without a step is its start-up
        self.pausing = False  # in this observation
        self._disturbed = False
        self._step_below: int | None = None  # step of a source behind the furthest one
        self._moves_below = 0

    def update(self, observation: Observation, pausing: bool) -> None:
        """`pausing`: the job saves, evaluates or loads, so this interval says nothing about its step time."""
        progress = observation.sample.progress
        self.restarted, self.new_interval = False, None
        self.pausing = pausing
        if progress.step is None:
            # Unreadable: for how long it has not changed is unknown, and an interval that spans this teaches nothing.
            self.stalled_seconds, self._disturbed, self._was_unreadable = None, True, True
            return
        unobserved, self._was_unreadable = self._was_unreadable or observation.gap, False
        self.restarted = self._is_restart(observation) or self._another_run_advances(progress.step)
        if self.restarted:
            self._reset()
        step = progress.step if self._step is None else max(self._step, progress.step)
        if self._step is None:
            self._unchanged_seconds = progress.age_seconds or 0.0
        elif step != self._step:
            self._add_interval(step - self._step, observation)
            self._unchanged_seconds = 0.0
        else:
            self._unchanged_seconds += observation.observed_seconds
        self.stalled_seconds = self._unchanged_seconds
        # A change that happened unobserved begins an interval of unknown length.
        self._disturbed = (self._disturbed or pausing or observation.gap) if step == self._step else unobserved
        self._step = step

    def _another_run_advances(self, step: int) -> bool:
        """Steps are counted below the furthest one: another run, which writes a log file of its own."""
        if self._step is None or step >= self._step:
            self._step_below, self._moves_below = None, 0
            return False
        self._moves_below += self._step_below is not None and step > self._step_below
        self._step_below = step
        return self._moves_below >= RESTART_MOVES

    def _is_restart(self, observation: Observation) -> bool:
        """A source counts backwards, or its restart counter changed. A source that disappears is no restart."""
        now = {(s.source, s.rank): (s.step, s.restart) for s in observation.sample.progress.sources}
        before, self._sources = self._sources, now
        return any(
            (step is not None and earlier_step is not None and step < earlier_step)
            or (restart is not None and earlier_restart is not None and restart != earlier_restart)
            for key, (step, restart) in now.items()
            for earlier_step, earlier_restart in [before.get(key, (None, None))]
        )

    def _add_interval(self, steps: int, observation: Observation) -> None:
        interval = self._unchanged_seconds + observation.observed_seconds
        self.advances += 1
        # The first observed change ends an interval that began before the watcher did.
        if self._disturbed or self.pausing or observation.gap or self.advances == 1 or interval <= 0:
            return
        self.new_interval = (interval, steps)
        self._seconds_per_step.append(interval / steps)
        self._learn_interval(interval, observation)
        self._measured_seconds += interval
        self._measured_steps += steps
        if self._measured_seconds >= RATE_OBSERVATIONS * observation.spec.interval_seconds:
            self._last_seconds_per_step = self._measured_seconds / self._measured_steps
            self._best_seconds_per_step = min(self._best_seconds_per_step or math.inf, self._last_seconds_per_step)
            self._measured_seconds, self._measured_steps = 0.0, 0

    def _learn_interval(self, interval: float, observation: Observation) -> None:
        if interval <= self.stall_limit_seconds(observation):
            self._intervals.append(interval)
            self._stalls_in_a_row = 0
            return
        self._stalls.append(interval)
        self._stalls_in_a_row += 1
        if self._stalls_in_a_row >= HABIT_STALLS:
            self._intervals.extend(list(self._stalls)[-HABIT_STALLS:])
            self._stalls_in_a_row = 0

    def begin_new_run(self, observation: Observation) -> None:
        """New processes run; the step that sources still show is the last one of the previous run."""
        self._reset()
        self._step, self._unchanged_seconds = observation.sample.progress.step, 0.0
        self.stalled_seconds = None if self._step is None else 0.0

    def forget_best_rate(self) -> None:
        """The best rate is no longer comparable, for example after a change of the power limit. The stall limit is."""
        self._best_seconds_per_step = self._last_seconds_per_step = None
        self._measured_seconds, self._measured_steps = 0.0, 0

    def _reset(self) -> None:
        self._step, self._best_seconds_per_step, self._last_seconds_per_step = None, None, None
        self._intervals.clear()
        self._seconds_per_step.clear()
        self._stalls.clear()
        self._stalls_in_a_row = 0
        self._measured_seconds, self._measured_steps = 0.0, 0
        self._step_below, self._moves_below = None, 0
        self.advances = 0
        self.stalled_seconds = None
        self._disturbed = False
        self.start_observed = True

    def history(self) -> StepRateHistory:
        best, last = self._best_seconds_per_step, self._last_seconds_per_step
        return StepRateHistory(tuple(self._intervals), best, last, self.advances, tuple(self._stalls))

    def restore_history(self, history: StepRateHistory) -> None:
        """Take over what was learned before the first observation."""
        self._intervals.extend(history.intervals)
        self._stalls.extend(history.stalls)
        self._best_seconds_per_step = history.best_seconds_per_step
        self._last_seconds_per_step = history.last_seconds_per_step
        self.advances = history.advances

    @property
    def has_counter(self) -> bool:
        """A step counter was seen in this run, if not in this observation."""
        return self._step is not None

    @property
    def usual_interval_seconds(self) -> float | None:
        """The slowest recent interval between two changes of the counter; None before two were observed."""
        return max(self._intervals) if len(self._intervals) >= MIN_INTERVALS else None

    @property
    def is_late(self) -> bool:
        """The next step is late, though not yet beyond the stall limit."""
        usual = self.usual_interval_seconds
        return usual is not None and self.stalled_seconds is not None and self.stalled_seconds > LATE_FACTOR * usual

    def stall_limit_seconds(self, observation: Observation) -> float:
        """How long the counter may stay unchanged before the job counts as hung; `stall_limit` of the configuration if
        set."""
        if observation.spec.stall_limit_seconds is not None:
            return observation.spec.stall_limit_seconds
        line_interval = observation.sample.progress.line_interval_seconds
        seen = [s for s in (self.usual_interval_seconds, line_interval) if s is not None]
        if not seen:
            return MAX_STALL_SECONDS
        limit = max(MIN_STALL_SECONDS, STALL_FACTOR * max(seen), HABIT_FACTOR * repeated_stall_seconds(self._stalls))
        return min(MAX_STALL_SECONDS, limit)

    def throughput(self, observation: Observation) -> JobThroughput:
        """What the job reports, for as long as steps are counted: a save, a hang and a crash process no tokens,
        whatever the last line of the log says.

        Late by the median interval, not by the slowest one: a pause that ended makes no later pause productive.
        """
        progress, tokens = observation.sample.progress, observation.spec.tokens_per_step
        reported, age = progress.tokens_per_second, progress.age_seconds
        if age is None:
            return JobThroughput()
        per_step = statistics.median(self._seconds_per_step) if self._seconds_per_step else progress.seconds_per_step
        calculated = reported is None and tokens is not None and per_step is not None
        if reported is None and tokens is not None and per_step is not None:
            reported = tokens / per_step
        interval = statistics.median(self._intervals) if self._intervals else progress.line_interval_seconds
        if interval is None:
            late = None if age > UNKNOWN_INTERVAL_SECONDS else False
        else:
            late = age > LATE_FACTOR * interval + LATE_OBSERVATIONS * observation.spec.interval_seconds
        current = None if reported is None or late is None else 0.0 if late else reported
        eta = None if late is not False else self._eta_seconds(progress, per_step, age)
        return JobThroughput(current, reported, None if reported is None else age, calculated, per_step, eta)

    def _eta_seconds(self, progress: JobProgress, seconds_per_step: float | None, age_seconds: float) -> float | None:
        """Until the last planned step; as the log prints it where it does not print the number of steps."""
        if progress.total_steps is not None and progress.step is not None and seconds_per_step is not None:
            return max(0.0, (progress.total_steps - progress.step) * seconds_per_step - age_seconds)
        return None if progress.eta_seconds is None else max(0.0, progress.eta_seconds - age_seconds)

    @property
    def lost_share(self) -> float:
        """Share (0..1) of GPU time lost against the job's own best rate; 0 while nothing is learned."""
        if not self._best_seconds_per_step or not self._last_seconds_per_step:
            return 0.0
        return max(0.0, 1.0 - self._best_seconds_per_step / self._last_seconds_per_step)
