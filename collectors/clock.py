"""The one seam where time comes in. A simulated cluster in compressed time and the watcher on it share a speed."""

from __future__ import annotations

import threading
import time


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
