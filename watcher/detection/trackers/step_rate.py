"""The job's own pace: how long its counter usually stands, and from when on it stands too long.

A stall limit comes from the job's own steps and log interval: torchtitan is silent for 50 s by design. Six times the
slowest recent interval, not under 30 s, not over 15 min (PortOS#1381 uses the same factor and ceiling).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from wattwatch.watcher.detection.trackers.observation import Observation, StepRateHistory

STALL_FACTOR: Final = 6.0
MIN_STALL_SECONDS: Final = 30.0
MAX_STALL_SECONDS: Final = 900.0
MIN_INTERVALS: Final = 2
KEPT_INTERVALS: Final = 20
RESTART_MOVES: Final = 2
# Pace is measured over this many looks: one change is seen up to a look late.
RATE_OBSERVATIONS: Final = 30.0


class StepRateTracker:
    """Learns from looks; forgets at a restart."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._stood_seconds = 0.0
        self._sources: dict[tuple[str, int | None], tuple[int | None, int | None]] = {}
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)  # seconds between changes of the counter
        self._measured_seconds, self._measured_steps = 0.0, 0
        self._best_seconds_per_step: float | None = None
        self._last_seconds_per_step: float | None = None
        self._out_of_sight = False  # at the look before
        self.stalled_seconds: float | None = None  # how long the counter has been seen to stand; None: no counter
        self.advances = 0  # changes seen
        self.restarted = False  # in this very look
        self.learned: tuple[float, int] | None = None  # in this look: seconds between two changes, and steps
        self.start_observed = False  # the run was started under our eyes, so what stands is its start
        self.pausing = False  # in this look
        self._disturbed = False
        self._below: int | None = None  # a step behind the furthest one, and how often that one has moved
        self._moves = 0

    def update(self, observation: Observation, pausing: bool) -> None:
        """`pausing`: the job saves, evaluates or loads; such an interval teaches nothing about its steps."""
        progress = observation.sample.progress
        self.restarted, self.learned = False, None
        self.pausing = pausing
        if progress.step is None:
            # Out of sight: how long it stands is not known, and what lies between teaches nothing.
            self.stalled_seconds, self._disturbed, self._out_of_sight = None, True, True
            return
        unseen, self._out_of_sight = self._out_of_sight or observation.gap, False
        self.restarted = self._is_restart(observation)
        if self.restarted:
            self._forget()
        elif self._moves_below(progress.step):
            self.restarted = True
            self._forget()
        step = progress.step if self._step is None else max(self._step, progress.step)
        if self._step is None:
            self._stood_seconds = progress.age_seconds or 0.0
        elif step != self._step:
            self._learn(step - self._step, observation)
            self._stood_seconds = 0.0
        else:
            self._stood_seconds += observation.observed_seconds
        self.stalled_seconds = self._stood_seconds
        # A change that nobody saw happen begins an interval of unknown length.
        self._disturbed = (self._disturbed or pausing or observation.gap) if step == self._step else unseen
        self._step = step

    def _moves_below(self, step: int) -> bool:
        """Steps are counted below the furthest one: another run, in a file of its own. Twice, since one that is read
        late may move once."""
        if self._step is None or step >= self._step:
            self._below, self._moves = None, 0
            return False
        self._moves += self._below is not None and step > self._below
        self._below = step
        return self._moves >= RESTART_MOVES

    def _is_restart(self, observation: Observation) -> bool:
        """A source counts backwards, or its restart counter changed. That a source is lost is no restart."""
        now = {(s.source, s.rank): (s.step, s.restart) for s in observation.sample.progress.sources}
        before, self._sources = self._sources, now
        return any(
            (step is not None and earlier_step is not None and step < earlier_step)
            or (restart is not None and earlier_restart is not None and restart != earlier_restart)
            for key, (step, restart) in now.items()
            for earlier_step, earlier_restart in [before.get(key, (None, None))]
        )

    def _learn(self, steps: int, observation: Observation) -> None:
        interval = self._stood_seconds + observation.observed_seconds
        self.advances += 1
        # The first change seen began before we looked.
        if self._disturbed or self.pausing or observation.gap or self.advances == 1 or interval <= 0:
            return
        self.learned = (interval, steps)
        self._intervals.append(interval)
        self._measured_seconds += interval
        self._measured_steps += steps
        if self._measured_seconds >= RATE_OBSERVATIONS * observation.spec.interval_seconds:
            self._last_seconds_per_step = self._measured_seconds / self._measured_steps
            self._best_seconds_per_step = min(self._best_seconds_per_step or math.inf, self._last_seconds_per_step)
            self._measured_seconds, self._measured_steps = 0.0, 0

    def begin_new_run(self, observation: Observation) -> None:
        """New processes run: what the counter still shows is the last step of the run before."""
        self._forget()
        self._step, self._stood_seconds = observation.sample.progress.step, 0.0
        self.stalled_seconds = None if self._step is None else 0.0

    def forget_best_rate(self) -> None:
        """What the job could do is no measure any more; how long its counter stands still is."""
        self._best_seconds_per_step = self._last_seconds_per_step = None
        self._measured_seconds, self._measured_steps = 0.0, 0

    def _forget(self) -> None:
        self._step, self._best_seconds_per_step, self._last_seconds_per_step = None, None, None
        self._intervals.clear()
        self._measured_seconds, self._measured_steps = 0.0, 0
        self._below, self._moves = None, 0
        self.advances = 0
        self.stalled_seconds = None
        self._disturbed = False
        self.start_observed = True

    def history(self) -> StepRateHistory:
        best, last = self._best_seconds_per_step, self._last_seconds_per_step
        return StepRateHistory(tuple(self._intervals), best, last, self.advances)

    def restore_history(self, history: StepRateHistory) -> None:
        """What was learned before the first look."""
        self._intervals.extend(history.intervals)
        self._best_seconds_per_step, self._last_seconds_per_step = (
            history.best_seconds_per_step,
            history.last_seconds_per_step,
        )
        self.advances = history.advances

    @property
    def known(self) -> bool:
        """A counter was seen, if not in this look."""
        return self._step is not None

    @property
    def usual_interval_seconds(self) -> float | None:
        """The slowest recent interval between two changes of the counter."""
        return max(self._intervals) if len(self._intervals) >= MIN_INTERVALS else None

    @property
    def is_late(self) -> bool:
        """Longer than it usually does, if not yet for longer than it may."""
        usual = self.usual_interval_seconds
        return usual is not None and self.stalled_seconds is not None and self.stalled_seconds > 2 * usual

    def limit_seconds(self, observation: Observation) -> float:
        """How long the counter may stand before the job counts as hung."""
        if observation.spec.stall_limit_seconds is not None:
            return observation.spec.stall_limit_seconds
        seen = [
            s for s in (self.usual_interval_seconds, observation.sample.progress.line_interval_seconds) if s is not None
        ]
        if not seen:
            return MAX_STALL_SECONDS
        return min(MAX_STALL_SECONDS, max(MIN_STALL_SECONDS, STALL_FACTOR * max(seen)))

    @property
    def lost_share(self) -> float:
        """Share of the boards' time that is lost against the job's own best pace, 0 while nothing is learned."""
        if not self._best_seconds_per_step or not self._last_seconds_per_step:
            return 0.0
        return max(0.0, 1.0 - self._best_seconds_per_step / self._last_seconds_per_step)
