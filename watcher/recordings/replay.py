"""Runs a recording or a log through the real engine: the same ticks as live, at the times of the source."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.common.formatting import format_duration
from wattwatch.watcher.common.state_store import StateStore
from wattwatch.watcher.detection.baselines.profiles import UserProfile
from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.snapshot import EpisodeView, Snapshot
from wattwatch.watcher.recordings.format import RecordedEvent, Recording
from wattwatch.watcher.recordings.inputs import GpuLog, SourcePlayer, split_by_job

# Samples that come within this fraction of an interval form one round. Chosen: nodes answer within milliseconds of each
# other, and a slow one should not wait for the next round.
ROUND_WINDOW_FRACTION: Final = 0.25


# During a pause of a log that is longer than each of these, the state is unknown. Chosen.
PAUSE_SECONDS: Final = 60.0
PAUSE_INTERVALS: Final = 10.0
PAUSE_FACTOR: Final = 3.0  # times the pause between the two samples before


@dataclass(frozen=True, slots=True)
class StateChange:
    at_seconds: float  # since the start of the source
    job: str
    state: JobState
    reason: str


class AlertTransition(StrEnum):
    OPENED = "opened"
    ESCALATED = "escalated"  # to a higher severity
    CONFIRMED = "confirmed"  # a suspicion became certain, at the same severity
    CAUSE_CHANGED = "cause_changed"  # a cause was reported that no earlier message has named
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class AlertChange:
    """A change of an alert episode, with its severity and text at that time."""

    at_seconds: float  # since the start of the source
    step: AlertTransition
    episode: EpisodeView
    over_seconds: float | None = None  # of a resolved one: since when the problem was gone


@dataclass(frozen=True, slots=True)
class LogBeginning:
    """Another log begins in the source: of another host or job, or of a logger that was started again."""

    at_seconds: float  # since the start of the source
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What the watcher would have reported about a source."""

    source: str
    seconds: float
    rounds: int  # updates of the watcher, those without a new sample included
    samples: int  # lines of nodes, or rounds of a log
    changes: tuple[StateChange, ...]
    episodes: tuple[
        EpisodeView, ...
    ]  # in their last state, in the order in which they opened; wall seconds count from the start
    alerts: tuple[AlertChange, ...]  # in order of time
    problem: str = ""  # of the source, such as a missing end: what is known only up to there
    beginnings: tuple[LogBeginning, ...] = ()  # nothing that was observed before one counts after it
    assumptions: tuple[str, ...] = ()  # what the source does not say, one clause each


class SourceClock(Clock):
    """A clock that follows the source: `monotonic` is the clock of its time stamps, `wall` counts from its start."""

    def __init__(self, start_seconds: float | None = None) -> None:
        super().__init__()
        self.start = start_seconds
        self.now = 0.0 if start_seconds is None else start_seconds

    def set(self, seconds: float) -> None:
        self.start = seconds if self.start is None else self.start
        self.now = seconds

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 0.0 if self.start is None else self.now - self.start


def replay(name: str, source: GpuLog | Recording, profiles: Sequence[UserProfile] = ()) -> ReplayResult:
    """Judges everything in `source`, in order, as if it came in live. `profiles`: the user's own.

    Each job of a log is judged by itself: they end at different times, and none is silent because another goes on.
    """
    if isinstance(source, Recording):
        return _replay_one(name, source, profiles, None)
    start = source.events[0].seconds if source.events else None
    logs = [_replay_one(name, log, profiles, start) for log in split_by_job(source)]
    return ReplayResult(
        name,
        seconds=max(log.seconds for log in logs),
        rounds=sum(log.rounds for log in logs),
        samples=sum(log.samples for log in logs),
        changes=tuple(sorted((each for log in logs for each in log.changes), key=lambda each: each.at_seconds)),
        episodes=tuple(
            sorted((each for log in logs for each in log.episodes), key=lambda each: each.opened_wall_seconds)
        ),
        alerts=tuple(sorted((each for log in logs for each in log.alerts), key=lambda each: each.at_seconds)),
        problem=_problem(source),
        beginnings=tuple(
            LogBeginning(part.begins_seconds - (start or 0.0), part.job, part.begins)
            for part in source.parts
            if part.begins
        ),
        assumptions=source.assumptions,
    )


def _replay_one(
    name: str, source: GpuLog | Recording, profiles: Sequence[UserProfile], start_seconds: float | None
) -> ReplayResult:
    """`start_seconds`: the time from which seconds are counted; None: the first event."""
    clock = SourceClock(start_seconds)
    counter = SampleCounter(source.events)
    player = SourcePlayer(source.specs, iter(counter))
    interval = min((spec.interval_seconds for spec in source.specs), default=1.0)
    changes: list[StateChange] = []
    episodes: dict[str, EpisodeView] = {}
    alerts: list[AlertChange] = []
    rounds, pause = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="wattwatch-replay-") as directory:
        store = StateStore(Path(directory) / "replay.db")
        try:
            manager = AlertManager(store, (), (), clock)
            prior_state = source.prior_state if isinstance(source, Recording) else None
            # A pause in a log means nothing. In a recording a node may have fallen silent, so silence is replayed.
            is_live = isinstance(source, Recording)
            engine = Engine(source.specs, player, manager, clock, profiles, prior_state=prior_state, is_live=is_live)
            for seconds in player.play(interval * ROUND_WINDOW_FRACTION, interval if is_live else None):
                usual, pause = pause, seconds - clock.now
                if not is_live and rounds:
                    changes += _unknown_in_pause(changes, clock.wall(), pause, usual, interval)
                clock.set(seconds)
                snapshot = engine.tick()
                rounds += 1
                changes += _state_changes(snapshot, changes, clock.wall())
                for episode in snapshot.episodes:
                    before = episodes.get(episode.id)
                    step = _transition(before, episode)
                    if step is not None:
                        over = before.last_seen_wall_seconds if before and step is AlertTransition.RESOLVED else None
                        alerts.append(AlertChange(clock.wall(), step, episode, over))
                    episodes[episode.id] = episode
        finally:
            store.close()
    return ReplayResult(
        name,
        clock.wall(),
        rounds,
        counter.samples,
        tuple(changes),
        tuple(episodes.values()),
        tuple(alerts),
        _problem(source),
    )


def _problem(source: GpuLog | Recording) -> str:
    if isinstance(source, GpuLog):
        return " ".join(source.remarks)
    return "" if source.end is None else source.end.problem


class SampleCounter:
    """The same events, and how many of them had a sample."""

    def __init__(self, events: Iterable[RecordedEvent]) -> None:
        self._events = events
        self.samples = 0

    def __iter__(self) -> Iterator[RecordedEvent]:
        for event in self._events:
            self.samples += event.sample is not None
            yield event


def _unknown_in_pause(
    changes: Sequence[StateChange], start: float, pause: float, longest_usual: float, interval: float
) -> Iterator[StateChange]:
    """What a log does not show for a long time is not known. `start`: the last sample before; `longest_usual`: the
    pause before that one."""
    if pause > max(PAUSE_SECONDS, PAUSE_INTERVALS * interval, PAUSE_FACTOR * longest_usual):
        reason = f"there are no samples for {format_duration(pause)}"
        for job in {change.job: None for change in changes}:
            yield StateChange(start + interval, job, JobState.UNKNOWN, reason)


def _transition(before: EpisodeView | None, now: EpisodeView) -> AlertTransition | None:
    """The change between two ticks, if any. While an episode is open, severity and certainty only ever rise."""
    if before is None:
        return AlertTransition.OPENED
    if now.closed_wall_seconds is not None:
        return AlertTransition.RESOLVED if before.closed_wall_seconds is None else None
    if now.severity is not before.severity:
        return AlertTransition.ESCALATED
    if now.confirmed and not before.confirmed:
        return AlertTransition.CONFIRMED
    new_causes = set(now.notified_causes) - set(before.notified_causes)
    return AlertTransition.CAUSE_CHANGED if before.notified_causes and new_causes else None


def _state_changes(snapshot: Snapshot, before: list[StateChange], now: float) -> Iterator[StateChange]:
    for job, view in snapshot.jobs.items():
        last = next((change for change in reversed(before) if change.job == job), None)
        if last is None or last.state is not view.state:
            yield StateChange(now, job, view.state, view.reason)
