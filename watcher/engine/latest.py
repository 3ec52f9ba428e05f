"""Where the engine's thread leaves each snapshot, and where everybody else finds the newest one with its age."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

from wattwatch.watcher.engine.engine import EngineClock
from wattwatch.watcher.engine.snapshot import Snapshot

# A tick may wait for a slow store or a starved machine; beyond this the watcher is not to be believed.
FRESH_INTERVALS: Final = 10.0
FRESH_MIN_SECONDS: Final = 10.0


class LatestSnapshot:
    """The newest snapshot. `came_round` is for the engine's thread; everything else may be asked from any."""

    def __init__(
        self,
        snapshot: Snapshot,
        clock: EngineClock,
        interval_seconds: float,
        recordings: Mapping[str, str] | None = None,
    ) -> None:
        """`recordings`: by job, the path of the recording of its newest incident; it may change at any time."""
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Snapshot], None]] = []
        self._round_seconds: float | None = None
        self.interval_seconds = interval_seconds
        self.recordings: Mapping[str, str] = {} if recordings is None else recordings
        self.snapshot = snapshot
        self.rounds = 0  # times the engine came round, whether or not there was anything to judge

    def listen(self, listener: Callable[[Snapshot], None]) -> None:
        """Call this with every new snapshot, on the engine's thread: it must return at once."""
        with self._lock:
            self._listeners.append(listener)

    def came_round(self, snapshot: Snapshot) -> None:
        """The engine looked again; the snapshot is the old one where there was nothing to judge."""
        self._round_seconds = self._clock.monotonic()
        self.rounds += 1
        if snapshot is self.snapshot:
            return
        self.snapshot = snapshot
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(snapshot)

    @property
    def age_seconds(self) -> float:
        """Since the engine last came round, on the watcher's clock; infinite before the first time."""
        return float("inf") if self._round_seconds is None else max(0.0, self._clock.monotonic() - self._round_seconds)

    @property
    def fresh_limit_seconds(self) -> float:
        return max(FRESH_MIN_SECONDS, FRESH_INTERVALS * self.interval_seconds)

    @property
    def fresh(self) -> bool:
        return self.age_seconds <= self.fresh_limit_seconds

    @property
    def wall_seconds(self) -> float:
        """Now, for people: ages of what the snapshot says are counted up to here."""
        return self._clock.wall()
