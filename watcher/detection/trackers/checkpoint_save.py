"""Checkpoints: is one being written, do its files grow, for how long may that go on.

The limit is learned: three times the slowest save that ended well, and not under ten minutes before three were seen
(healthy saves of 394 s and over 400 s are reported). One that grows is a slow save, never a hang. One under which
steps go on is written in the background: it excuses nothing, and no board waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.detection.model import PowerState, UtilizationPattern
from wattwatch.watcher.detection.trackers.observation import CheckpointSaveHistory, Observation

DEFAULT_SAVE_LIMIT_SECONDS: Final = 600.0
SAVE_LIMIT_FACTOR: Final = 3.0
MIN_SAVE_LIMIT_SECONDS: Final = 120.0
MAX_SAVE_LIMIT_SECONDS: Final = 3600.0
# Bytes that arrived this recently are growth: writers flush in bursts, NFS shows sizes late.
GROWING_SECONDS: Final = 30.0
# An upload in the background comes in bursts that are further apart.
BACKGROUND_QUIET_SECONDS: Final = 120.0
MAX_QUIET_SECONDS: Final = 600.0
# A checkpoint whose files last changed this long ago is a leftover of an earlier run, not a save under way.
LEFTOVER_SECONDS: Final = 1800.0
# Shorter ones teach nothing: a flicker of the picture, a save that was skipped.
MIN_LEARNED_SECONDS: Final = 10.0
LEARNED_SAVES: Final = 3
# So often the counter must move under a save for the job not to wait for it; it may move once as a save starts.
BACKGROUND_STEPS: Final = 2
# A directory is listed each other second: what the run before wrote may be listed after the restart was seen.
LISTING_SECONDS: Final = 10.0
SAVE_PHASE: Final = "save"
LOAD_PHASE: Final = "load"


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """A save that is under way: for how long, and since when no byte has come; None where no file is seen."""

    seconds: float
    quiet_seconds: float | None
    entry: CheckpointEntry | None
    by_heartbeat: bool
    background: bool = False  # steps go on under it
    longest_quiet_seconds: float = 0.0  # between two bytes of it

    @property
    def grows(self) -> bool:
        """Bytes came as recently as this writer's pauses let expect."""
        least = BACKGROUND_QUIET_SECONDS if self.background else GROWING_SECONDS
        limit = min(MAX_QUIET_SECONDS, max(least, SAVE_LIMIT_FACTOR * self.longest_quiet_seconds))
        return self.quiet_seconds is not None and self.quiet_seconds < limit


class CheckpointSaveTracker:
    """Follows the saves of one job."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._quiet_seconds: float | None = None
        self._longest_quiet_seconds = 0.0
        self._bytes: int | None = None
        self._open: dict[str, int] = {}  # name -> bytes of those that lack their mark
        self._torn: dict[str, int] = {}  # of the run before
        self._since_start_seconds = math.inf
        self._step: int | None = None
        self._steps = 0  # times the counter moved under the save
        self._ended: tuple[float, str, bool] | None = None  # seconds, entry, and whether more than a picture told it
        self._slowest_seconds: float | None = None
        self._learned = 0
        self.save: CheckpointSave | None = None
        self.newest_complete: CheckpointEntry | None = None

    def clear(self) -> None:
        """The job was started again: nobody writes any more what was open then, and a save that was cut short teaches
        nothing."""
        self._reset()
        self._torn, self._since_start_seconds = dict(self._open), 0.0
        self._ended, self._step = None, None

    def update(self, observation: Observation) -> None:
        """Take note of what is being written now."""
        entries = [entry for listing in observation.sample.checkpoints for entry in listing.entries]
        complete = [entry for entry in entries if entry.complete]
        self.newest_complete = max(complete, key=_newness, default=None)
        moved = self._moved(observation)
        self._learn(moved, {entry.name for entry in complete})
        entry = self._under_way(entries, observation)
        if self.save is not None and self.save.entry and entry and self.save.entry.name != entry.name:
            self._end()
        growing = entry is not None and self._grows(entry, observation)
        by_heartbeat = SAVE_PHASE in observation.phases
        # All ranks at rest right after work is said to be a save too, but is no picture of one to count time by.
        # While ranks load, rank 0 alone at rest reads and tokenises for the others.
        pictured = (
            observation.verdict.state is PowerState.CHECKPOINT
            and observation.verdict.pattern is UtilizationPattern.RANK0_LOW_REST_BUSY
            and LOAD_PHASE not in observation.phases
        )
        if not (by_heartbeat or growing or pictured or (self.save is not None and self.save.entry and entry)):
            if self.save is not None and not self.is_within_limit and not observation.sample.complete and not moved:
                return  # a save that does not end has not ended because nobody can see it
            self._end()
            return
        self._seconds += observation.observed_seconds
        self._steps += moved
        if entry is None and self._quiet_seconds is not None:
            # Its files are complete and the ranks still wait: the mark is written, directories are synchronised.
            self._quiet_seconds += observation.observed_seconds
        self.save = CheckpointSave(
            self._seconds,
            self._quiet_seconds,
            entry,
            by_heartbeat,
            background=self._steps >= BACKGROUND_STEPS and not by_heartbeat and not pictured,
            longest_quiet_seconds=self._longest_quiet_seconds,
        )

    def _moved(self, observation: Observation) -> bool:
        """The job goes on: its counter moved; or its boards work, where there is no counter."""
        step, before = observation.sample.progress.step, self._step
        if step is None:
            return (
                before is None and observation.verdict.state is PowerState.COMPUTE and not observation.verdict.at_floor
            )
        self._step = step
        return before is not None and step > before

    def _under_way(self, entries: list[CheckpointEntry], observation: Observation) -> CheckpointEntry | None:
        """The newest one that lacks its mark of completion and is no leftover. Where a layout has no such mark, one
        whose files change."""
        if observation.sample.checkpoints:
            self._open = {e.name: e.bytes for e in entries if not e.complete}
        self._since_start_seconds += observation.observed_seconds
        if self._since_start_seconds < LISTING_SECONDS:
            self._torn |= self._open
        self._torn = {name: size for name, size in self._torn.items() if self._open.get(name) == size}
        open_entries = [e for e in entries if e.name not in self._torn and _is_written(e)]
        return open_entries[-1] if open_entries else None

    def _grows(self, entry: CheckpointEntry, observation: Observation) -> bool:
        if self._bytes is None or entry.bytes != self._bytes:
            first = self._bytes is None
            self._bytes = entry.bytes
            if not first:
                self._longest_quiet_seconds = max(self._longest_quiet_seconds, self._quiet_seconds or 0.0)
            self._quiet_seconds = (entry.age_seconds or 0.0) if first else 0.0
        else:
            self._quiet_seconds = (self._quiet_seconds or 0.0) + observation.observed_seconds
        return (self._quiet_seconds or 0.0) < GROWING_SECONDS

    def _end(self) -> None:
        if self.save is not None and not self.save.background and self._seconds >= MIN_LEARNED_SECONDS:
            entry = self.save.entry
            self._ended = (self._seconds, entry.name if entry else "", bool(entry) or self.save.by_heartbeat)
        self._reset()

    def _reset(self) -> None:
        self._seconds, self._quiet_seconds, self._bytes, self.save = 0.0, None, None, None
        self._longest_quiet_seconds, self._steps = 0.0, 0

    def _learn(self, moved: bool, complete: set[str]) -> None:
        """Only from a save after which the job went on, or that is complete: a hang in a save is no slow save."""
        if self._ended is None or self.save is not None:
            return
        seconds, name, witnessed = self._ended
        if moved or name in complete:
            self._slowest_seconds = max(seconds, self._slowest_seconds or 0.0)
            self._learned += witnessed
            self._ended = None

    def history(self) -> CheckpointSaveHistory:
        return CheckpointSaveHistory(self._slowest_seconds, self._learned)

    def restore_history(self, history: CheckpointSaveHistory) -> None:
        """What was learned before the first look."""
        self._slowest_seconds, self._learned = history.slowest_seconds, history.saves

    @property
    def blocking(self) -> CheckpointSave | None:
        """The save that the job waits for."""
        return None if self.save is None or self.save.background else self.save

    @property
    def limit_seconds(self) -> float:
        """How long a save may take before it counts as stalled."""
        floor = MIN_SAVE_LIMIT_SECONDS if self._learned >= LEARNED_SAVES else DEFAULT_SAVE_LIMIT_SECONDS
        return min(MAX_SAVE_LIMIT_SECONDS, max(floor, SAVE_LIMIT_FACTOR * (self._slowest_seconds or 0.0)))

    @property
    def is_within_limit(self) -> bool:
        """A save is under way that may still be one: young enough, or its files grow."""
        return self.save is not None and (self.save.grows or self.save.seconds <= self.limit_seconds)


def _is_written(entry: CheckpointEntry) -> bool:
    if entry.complete is None:
        return entry.age_seconds is not None and entry.age_seconds < GROWING_SECONDS
    return not entry.complete and (entry.age_seconds is None or entry.age_seconds < LEFTOVER_SECONDS)


def _newness(entry: CheckpointEntry) -> tuple[float, int]:
    """By age: names may tell no step, and the run before may have come further."""
    age = math.inf if entry.age_seconds is None else entry.age_seconds
    return (-age, -1 if entry.step is None else entry.step)
