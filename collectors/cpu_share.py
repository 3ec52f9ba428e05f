"""CPU seconds of processes, line after line -> per cent of one core over the last seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Shorter than this a share says more about the moment than about the process; workers are looked at each 5 s.
WINDOW_SECONDS: Final = 10.0
LEAST_SECONDS: Final = 4.0
FORGET_SECONDS: Final = 60.0

Process = tuple[int, float]  # pid and start: a pid is given out again


@dataclass(slots=True)
class Ran:
    """CPU seconds at two moments some while ago, and when the process was last seen."""

    before: tuple[float, float]  # node's monotonic seconds, CPU seconds
    since: tuple[float, float]
    seen: float


class CpuShares:
    """Follows the processes of one node over one connection."""

    def __init__(self) -> None:
        self._ran: dict[Process, Ran] = {}
        self._forget_from = 0.0

    def of(self, process: Process, cpu_seconds: float | None, now: float) -> float | None:
        """Per cent of one core over the last one or two windows; None until it was seen for LEAST_SECONDS."""
        if cpu_seconds is None:
            return None
        known = self._ran.get(process)
        if known is None or cpu_seconds < known.since[1] or now < known.since[0]:
            self._ran[process] = Ran((now, cpu_seconds), (now, cpu_seconds), now)
            return None
        known.seen = now
        start, used = known.before
        share = 100.0 * (cpu_seconds - used) / (now - start) if now - start >= LEAST_SECONDS else None
        if now - known.since[0] >= WINDOW_SECONDS:
            known.before, known.since = known.since, (now, cpu_seconds)
        return share

    def forget(self, now: float) -> None:
        """Drops processes that were not seen for a while."""
        if now < self._forget_from:
            return
        self._forget_from = now + FORGET_SECONDS
        self._ran = {process: ran for process, ran in self._ran.items() if now - ran.seen <= FORGET_SECONDS}
