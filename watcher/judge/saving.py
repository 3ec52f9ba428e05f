"""Checkpoints: is one being written, do its files grow, for how long may that go on.

The limit is learned: three times the slowest save seen, ten minutes before any was seen (healthy saves of 394 s and
over 400 s are reported). One that grows is a slow save, never a hang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from collectors.samples import CheckpointEntry
from watcher.judge.look import Look
from watcher.judge.verdict import PowerState

UNSEEN_LIMIT_SECONDS: Final = 600.0
FACTOR: Final = 3.0
FLOOR_SECONDS: Final = 120.0
CEILING_SECONDS: Final = 3600.0
# Bytes that arrived this recently are growth: writers flush in bursts, NFS shows sizes late.
GROWING_SECONDS: Final = 30.0
# A checkpoint whose files last changed this long ago is a leftover of an earlier run, not a save under way.
LEFTOVER_SECONDS: Final = 1800.0
SAVE: Final = "save"


@dataclass(frozen=True, slots=True)
class Save:
    """A save that is under way: for how long, and since when no byte has come; None where no file is seen."""

    seconds: float
    quiet_seconds: float | None
    entry: CheckpointEntry | None
    by_heartbeat: bool


class Saving:
    """Follows the saves of one job."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._quiet_seconds: float | None = None
        self._bytes: int | None = None
        self._slowest_seconds: float | None = None
        self.save: Save | None = None
        self.newest_complete: CheckpointEntry | None = None

    def look(self, look: Look) -> None:
        """Take note of what is being written now."""
        entries = [entry for listing in look.sample.checkpoints for entry in listing.entries]
        complete = [entry for entry in entries if entry.complete]
        self.newest_complete = max(complete, key=_newness, default=None)
        entry = self._under_way(entries)
        growing = entry is not None and self._grows(entry, look)
        by_heartbeat = SAVE in look.phases
        pictured = look.verdict.state is PowerState.CHECKPOINT
        if not (by_heartbeat or growing or pictured or (self.save is not None and self.save.entry and entry)):
            self._end()
            return
        self._seconds += look.seen_seconds
        self.save = Save(self._seconds, self._quiet_seconds if entry is not None else None, entry, by_heartbeat)

    def _under_way(self, entries: list[CheckpointEntry]) -> CheckpointEntry | None:
        """The newest one that lacks its mark of completion and is not a leftover."""
        open_entries = [
            e for e in entries if e.complete is False and (e.age_seconds is None or e.age_seconds < LEFTOVER_SECONDS)
        ]
        return open_entries[-1] if open_entries else None

    def _grows(self, entry: CheckpointEntry, look: Look) -> bool:
        if self._bytes is None or entry.bytes != self._bytes:
            first = self._bytes is None
            self._bytes = entry.bytes
            self._quiet_seconds = (entry.age_seconds or 0.0) if first else 0.0
        else:
            self._quiet_seconds = (self._quiet_seconds or 0.0) + look.seen_seconds
        return (self._quiet_seconds or 0.0) < GROWING_SECONDS

    def _end(self) -> None:
        if self.save is not None and self._seconds > (self._slowest_seconds or 0.0):
            self._slowest_seconds = self._seconds
        self._seconds, self._quiet_seconds, self._bytes, self.save = 0.0, None, None, None

    @property
    def limit_seconds(self) -> float:
        """How long a save may take before it counts as stalled."""
        if self._slowest_seconds is None:
            return UNSEEN_LIMIT_SECONDS
        return min(CEILING_SECONDS, max(FLOOR_SECONDS, FACTOR * self._slowest_seconds))

    @property
    def within_limit(self) -> bool:
        """A save is under way that may still be one: young enough, or its files grow."""
        if self.save is None:
            return False
        grows = self.save.quiet_seconds is not None and self.save.quiet_seconds < GROWING_SECONDS
        return grows or self.save.seconds <= self.limit_seconds


def _newness(entry: CheckpointEntry) -> tuple[float, int]:
    """By age: names may tell no step, and the run before may have come further."""
    age = math.inf if entry.age_seconds is None else entry.age_seconds
    return (-age, -1 if entry.step is None else entry.step)
