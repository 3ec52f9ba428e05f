"""Checkpoint saves: is one running, do its files grow, how long may it take, and is the next one overdue.

The limit is learned: three times the slowest save that ended well, and at least ten minutes until three were seen
(healthy saves of 394 s and of more than 400 s are published). One that was stalled and ended all the same teaches
nothing until it has happened three times. A save whose files grow is slow, never a hang. A save
during which steps advance runs in the background: it excuses no hang, and no GPU waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, PowerState, UtilizationPattern
from wattwatch.watcher.detection.trackers.observation import CheckpointSaveHistory, Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker, repeated_stall_seconds

DEFAULT_SAVE_LIMIT_SECONDS: Final = 600.0
SAVE_LIMIT_FACTOR: Final = 3.0
MIN_SAVE_LIMIT_SECONDS: Final = 120.0
MAX_SAVE_LIMIT_SECONDS: Final = 3600.0
# Growth within this time counts as growing now: writers flush in bursts, and NFS shows sizes late.
GROWING_SECONDS: Final = 30.0
# A background upload comes in bursts that are further apart.
BACKGROUND_QUIET_SECONDS: Final = 120.0
MAX_QUIET_SECONDS: Final = 600.0
# An incomplete checkpoint whose files last changed this long ago was left over by an earlier run.
LEFTOVER_SECONDS: Final = 1800.0
# Shorter saves are not learned from: a brief change of utilization, or a save that was skipped.
MIN_LEARNED_SECONDS: Final = 10.0
LEARNED_SAVES: Final = 3
# Steps that must advance during a save until it counts as background. One may still be counted as a save begins.
BACKGROUND_STEPS: Final = 2
# Directories are listed every two seconds, so files of the previous run may be listed after the restart was seen.
LISTING_SECONDS: Final = 10.0
SAVE_PHASE: Final = "save"
LOAD_PHASE: Final = "load"
# A checkpoint is overdue after this many configured intervals without a complete one.
OVERDUE_INTERVALS: Final = 2.0
WORKING_STATES: Final = frozenset({PowerState.COMPUTE, PowerState.COMMUNICATION})


@dataclass(frozen=True, slots=True)
class CheckpointSave:
    """A running save: for how long, and for how long no byte was written (None where no file is visible)."""

    seconds: float
    quiet_seconds: float | None
    entry: CheckpointEntry | None
    by_heartbeat: bool
    background: bool = False  # steps advance meanwhile
    longest_quiet_seconds: float = 0.0  # between two writes of this save

    @property
    def is_growing(self) -> bool:
        """A byte was written as recently as the pauses of this writer suggest."""
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
        self._incomplete: dict[str, int] = {}  # name -> bytes
        self._left_over: dict[str, int] = {}  # incomplete ones of the previous run
        self._since_start_seconds = math.inf
        self._step: int | None = None
        self._steps = 0  # times the counter advanced during the save
        self._was_stalled = False  # the save was beyond its limit, and its files did not grow
        # Seconds, entry, whether files or heartbeats showed it, whether it was stalled.
        self._ended: tuple[float, str, bool, bool] | None = None
        self._stalls: list[float] = []  # seconds of stalled saves that ended well
        self._slowest_seconds: float | None = None
        self._learned_saves = 0
        self.save: CheckpointSave | None = None
        self.newest_complete: CheckpointEntry | None = None

    def clear(self) -> None:
        """The job was restarted: nobody continues the saves of the previous run, and aborted saves teach nothing."""
        self._reset()
        self._left_over, self._since_start_seconds = dict(self._incomplete), 0.0
        self._ended, self._step = None, None

    def update(self, observation: Observation) -> None:
        """Take in one observation: which save is running now."""
        entries = [entry for listing in observation.sample.checkpoints for entry in listing.entries]
        complete = [entry for entry in entries if entry.complete]
        self.newest_complete = max(complete, key=_newness, default=None)
        advanced = self._job_advanced(observation)
        self._learn(advanced, {entry.name for entry in complete})
        entry = self._entry_being_written(entries, observation)
        if self.save is not None and self.save.entry and entry and self.save.entry.name != entry.name:
            self._end()
        growing = entry is not None and self._update_growth(entry, observation)
        by_heartbeat = SAVE_PHASE in observation.phases
        # All ranks idle right after work is classified as a save too, but is too weak a sign to count time by. And
        # while ranks load, an idle rank 0 reads and tokenizes for the others.
        by_pattern = (
            observation.verdict.state is PowerState.CHECKPOINT
            and observation.verdict.pattern is UtilizationPattern.RANK0_LOW_REST_BUSY
            and LOAD_PHASE not in observation.phases
        )
        if not (by_heartbeat or growing or by_pattern or (self.save is not None and self.save.entry and entry)):
            unobserved = not observation.sample.complete and not advanced
            if self.save is not None and not self.is_within_limit and unobserved:
                return  # a stalled save is not over because its nodes went silent
            self._end()
            return
        self._seconds += observation.observed_seconds
        self._steps += advanced
        if entry is None and self._quiet_seconds is not None:
            # Its files are complete and ranks still wait: the completion mark is written, directories are synced.
            self._quiet_seconds += observation.observed_seconds
        self.save = CheckpointSave(
            self._seconds,
            self._quiet_seconds,
            entry,
            by_heartbeat,
            background=self._steps >= BACKGROUND_STEPS and not by_heartbeat and not by_pattern,
            longest_quiet_seconds=self._longest_quiet_seconds,
        )
        self._was_stalled = self._was_stalled or not self.is_within_limit

    def _job_advanced(self, observation: Observation) -> bool:
        """The job makes progress: its counter advanced or, without a counter, its GPUs compute."""
        step, before = observation.sample.progress.step, self._step
        if step is None:
            computing = observation.verdict.state is PowerState.COMPUTE and not observation.verdict.at_floor
            return before is None and computing
        self._step = step
        return before is not None and step > before

    def _entry_being_written(self, entries: list[CheckpointEntry], observation: Observation) -> CheckpointEntry | None:
        """The newest checkpoint that lacks its completion mark and is not left over; where the layout has no mark, one
        whose files change."""
        if observation.sample.checkpoints:
            self._incomplete = {e.name: e.bytes for e in entries if not e.complete}
        self._since_start_seconds += observation.observed_seconds
        if self._since_start_seconds < LISTING_SECONDS:
            self._left_over |= self._incomplete
        # One that grows after all belongs to this run.
        self._left_over = {name: size for name, size in self._left_over.items() if self._incomplete.get(name) == size}
        written = [e for e in entries if e.name not in self._left_over and _is_being_written(e)]
        return written[-1] if written else None

    def _update_growth(self, entry: CheckpointEntry, observation: Observation) -> bool:
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
            shown = bool(entry) or self.save.by_heartbeat
            self._ended = (self._seconds, entry.name if entry else "", shown, self._was_stalled)
        self._reset()

    def _reset(self) -> None:
        self._seconds, self._quiet_seconds, self._bytes, self.save = 0.0, None, None, None
        self._longest_quiet_seconds, self._steps = 0.0, 0
        self._was_stalled = False

    def _learn(self, advanced: bool, complete: set[str]) -> None:
        """Learn from the last save once the job advanced after it, or it is complete: a hang in a save is no slow
        save."""
        if self._ended is None or self.save is not None:
            return
        seconds, name, shown, stalled = self._ended
        if advanced or name in complete:
            self._ended = None
            if stalled:
                self._stalls.append(seconds)
                seconds = repeated_stall_seconds(self._stalls)
            else:
                self._learned_saves += shown
            self._slowest_seconds = max(seconds, self._slowest_seconds or 0.0)

    def history(self) -> CheckpointSaveHistory:
        return CheckpointSaveHistory(self._slowest_seconds, self._learned_saves)

    def restore_history(self, history: CheckpointSaveHistory) -> None:
        """Take over what was learned before the first observation."""
        self._slowest_seconds, self._learned_saves = history.slowest_seconds, history.saves

    @property
    def blocking(self) -> CheckpointSave | None:
        """The save that the job waits for; None for a background save."""
        return None if self.save is None or self.save.background else self.save

    @property
    def save_limit_seconds(self) -> float:
        """How long a save may take before it counts as stalled."""
        floor = MIN_SAVE_LIMIT_SECONDS if self._learned_saves >= LEARNED_SAVES else DEFAULT_SAVE_LIMIT_SECONDS
        return min(MAX_SAVE_LIMIT_SECONDS, max(floor, SAVE_LIMIT_FACTOR * (self._slowest_seconds or 0.0)))

    @property
    def is_within_limit(self) -> bool:
        """A save is running, and it is recent enough or its files grow."""
        return self.save is not None and (self.save.is_growing or self.save.seconds <= self.save_limit_seconds)


def _is_being_written(entry: CheckpointEntry) -> bool:
    if entry.complete is None:
        return entry.age_seconds is not None and entry.age_seconds < GROWING_SECONDS
    return not entry.complete and (entry.age_seconds is None or entry.age_seconds < LEFTOVER_SECONDS)


def _newness(entry: CheckpointEntry) -> tuple[float, int]:
    """Sort key by age first: names may lack a step, and the previous run may have been further."""
    age = math.inf if entry.age_seconds is None else entry.age_seconds
    return (-age, -1 if entry.step is None else entry.step)


class OverdueCheckpointTracker:
    """Whether the next complete checkpoint is overdue, counted from the newest one or from the start of the run.

    A run that is already working when the watcher starts is expected to save from then on.
    """

    def __init__(self) -> None:
        self._started: float | None = None  # None: before the watcher started
        self._working_since: float | None = None
        self._restarted = False

    def clear(self) -> None:
        """The job was restarted: the checkpoints in the directory belong to the previous run."""
        self._restarted, self._working_since = True, None

    def update(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker
    ) -> Finding | None:
        """The finding where a working job has had no complete checkpoint for twice the configured interval."""
        every, now = observation.spec.checkpoint_every_seconds, observation.now
        if every is None:
            return None
        counted = observation.spec.has_progress_source
        waiting_for_counter = counted and not step_rate.has_counter
        if self._restarted or LOAD_PHASE in observation.phases or observation.alive is False or waiting_for_counter:
            self._started, self._restarted = now, False
        working = step_rate.advances > 0 if counted else observation.verdict.state in WORKING_STATES
        if working and self._working_since is None:
            self._working_since = now
        if self._working_since is None or (counted and not _is_advancing(observation, step_rate)):
            return None
        newest = saves.newest_complete
        if newest is None and all(listing.error is not None for listing in observation.sample.checkpoints):
            return None  # the directory cannot be read, so there may be one
        if newest is not None and newest.age_seconds is None:
            return None
        since = self._working_since if newest is None else now - (newest.age_seconds or 0.0)
        age = now - max(since, -math.inf if self._started is None else self._started)
        if age <= OVERDUE_INTERVALS * every:
            return None
        entries = [entry for listing in observation.sample.checkpoints for entry in listing.entries]
        if any(e.complete is None and (e.age_seconds or 0.0) < age for e in entries):
            return None  # whether it is complete is not known: there may be one in time
        return _overdue_finding(observation, newest, age, every)


def _is_advancing(observation: Observation, step_rate: StepRateTracker) -> bool:
    """A stalled job saves nothing, and its stall is reported by another alert."""
    return step_rate.stalled_seconds is not None and step_rate.stalled_seconds <= step_rate.stall_limit_seconds(
        observation
    )


def _overdue_finding(
    observation: Observation, newest: CheckpointEntry | None, age_seconds: float, every_seconds: float
) -> Finding:
    text = "no complete checkpoint of this run was seen"
    if newest is not None and newest.age_seconds is not None:
        text = f"the newest complete checkpoint, {newest.name}, is {newest.age_seconds / 60:.0f} min old"
    kind = ALERT_KINDS[AlertName.CHECKPOINT_OVERDUE]
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=kind.severity,
        scope="",
        summary=f"{observation.spec.name}: no complete checkpoint for {age_seconds / 60:.0f} min.",
        evidence=(f"{text}; the configuration expects one every {every_seconds / 60:.0f} min",),
        advice=kind.advice,
        since_seconds=observation.now - (age_seconds - every_seconds),
    )
