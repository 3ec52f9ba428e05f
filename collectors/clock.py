"""The one seam where time comes in. A simulated cluster in compressed time and the watcher on it share a speed."""

from __future__ import annotations

import threading
import time
from typing import Final

# An NTP daemon slews a clock by at most 0.5 ms a second (adjtimex(2)); a larger difference means that it was set. The
# two clocks are read one after the other, and a busy machine may pause the process in between.
MIN_STEP_SECONDS: Final = 2.0


class WallClockSteps:
    """Notices that the wall clock was set, by comparing it with the monotonic clock.

    Whatever was dated before lies at another distance from now than it did: it must be dated again, or an alert ends
    before it began.
    """

    def __init__(self) -> None:
        self._offset_seconds: float | None = None

    def update(self, now: float, wall: float) -> float:
        """By how many seconds the wall clock was set since the previous call; 0 unless it was. `now`: monotonic."""
        before, self._offset_seconds = self._offset_seconds, wall - now
        if before is None:
            return 0.0
        step = self._offset_seconds - before
        return step if abs(step) >= MIN_STEP_SECONDS else 0.0


class Clock:
    """Monotonic seconds for deadlines, wall seconds for people; both run `speed` times as fast as the machine's."""

    def __init__(
        self, speed: float = 1.0, monotonic_origin: float | None = None, wall_origin: float | None = None
    ) -> None:
        """The origins are where this clock and the machine's agree: now, or those of a clock in another process."""
        self.speed = speed
        self.monotonic_origin = time.monotonic() if monotonic_origin is None else monotonic_origin
        self.wall_origin = time.time() if wall_origin is None else wall_origin

    def monotonic(self) -> float:
        return self.monotonic_origin + (time.monotonic() - self.monotonic_origin) * self.speed

    def wall(self) -> float:
        # Follows the machine's wall clock through its corrections; only the part since start is stretched.
        return self.wall_origin + (time.time() - self.wall_origin) * self.speed

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for the event at most `seconds` of this clock; True if it was set."""
        return event.wait(max(0.0, seconds) / self.speed)

    def real_seconds(self, seconds: float) -> float:
        """How long `seconds` of this clock last on the machine: for timeouts of sockets and selectors."""
        return seconds / self.speed
