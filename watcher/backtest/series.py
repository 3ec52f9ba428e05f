"""Labelled logs and recordings through the real engine: what it said when, against what happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from watcher.backtest.labelled import Interval, LabelError, Series
from watcher.judge.finding import AlertName, Severity
from watcher.recordings import RecordingError
from watcher.replay import AlertChange, replay
from watcher.snapshot import EpisodeView
from watcher.sources import GpuLog, SourceError, read_file

DAY_SECONDS: Final = 86_400.0
# What tells of a state. A state that is not here wants no alert.
TELLS: Final[Mapping[str, frozenset[str]]] = {
    "hang": frozenset({AlertName.JOB_HUNG, AlertName.CHECKPOINT_STALLED}),
    "crash": frozenset({AlertName.JOB_CRASHED}),
    "gpu_fault": frozenset({AlertName.GPU_FAULT}),
    "starvation": frozenset({AlertName.JOB_STARVING, AlertName.JOB_SLOW}),
    "communication": frozenset({AlertName.JOB_SLOW}),
    "straggler": frozenset({AlertName.STRAGGLER, AlertName.JOB_SLOW}),
    "throttle": frozenset({AlertName.GPU_THROTTLED, AlertName.JOB_SLOW}),
    "completed": frozenset({AlertName.JOB_COMPLETED}),
    "unreachable": frozenset({AlertName.NODE_UNREACHABLE, AlertName.PROBE_BLIND}),
}
WANTED: Final = frozenset(TELLS) - {"communication"}  # a slow link may be told; that a job communicates need not be


@dataclass(frozen=True, slots=True)
class Incident:
    """One interval that wants an alert. Delays count from its beginning; None: never told, or never confirmed."""

    state: str
    from_seconds: float
    delay_seconds: float | None  # to the first alert of it, which may be a suspicion
    confirmed_delay_seconds: float | None  # to the first that is none
    confirmed: bool  # in the end


@dataclass(frozen=True, slots=True)
class FalseAlarm:
    alert: str
    severity: str
    confirmed: bool
    opened_seconds: float


@dataclass(frozen=True, slots=True)
class PlayedSeries:
    name: str
    seconds: float
    rounds: int
    incidents: tuple[Incident, ...]
    false_alarms: tuple[FalseAlarm, ...]


def play(series: Series) -> PlayedSeries:
    """Raises LabelError where the file cannot be read, or its label tells of times beyond it."""
    try:
        source = read_file(series.path)
        if isinstance(source, GpuLog) and not any(m.sample and m.sample.gpus for m in source.moments):
            raise SourceError(f"{series.path}: holds no GPU readings: {source.detail or source.status.value}")
        result = replay(series.name, source)
    except (SourceError, RecordingError) as error:
        raise LabelError(str(error)) from None
    for interval in series.intervals:
        if interval.from_seconds > result.seconds:
            raise LabelError(
                f"{series.path}: is {result.seconds:.0f} s long, and its label tells of {interval.state} from "
                f"{interval.from_seconds:.0f} s on: from_seconds counts from the first sample"
            )
    told = [e for e in result.episodes if e.suppressed_by is None]
    return PlayedSeries(
        name=series.name,
        seconds=result.seconds,
        rounds=result.rounds,
        incidents=tuple(_incident(each, told, result.alerts) for each in series.intervals if each.state in WANTED),
        false_alarms=tuple(
            FalseAlarm(e.alert, e.severity, e.confirmed, round(e.opened_wall_seconds, 1))
            for e in told
            if e.severity != Severity.INFO and not any(_tells(e, each, result.seconds) for each in series.intervals)
        ),
    )


def _tells(episode: EpisodeView, interval: Interval, end_seconds: float) -> bool:
    """The alert is one of the state, and was open in its time."""
    closed = end_seconds if episode.closed_wall_seconds is None else episode.closed_wall_seconds
    overlaps = episode.opened_wall_seconds <= interval.to_seconds and closed >= interval.from_seconds
    return episode.alert in TELLS.get(interval.state, frozenset()) and overlaps


def _incident(interval: Interval, told: Sequence[EpisodeView], changes: Sequence[AlertChange]) -> Incident:
    within = [
        e
        for e in told
        if e.alert in TELLS[interval.state] and interval.from_seconds <= e.opened_wall_seconds <= interval.to_seconds
    ]
    of = {e.id for e in within}
    first = min((e.opened_wall_seconds for e in within), default=None)
    sure = min((c.at_seconds for c in changes if c.episode.id in of and c.episode.confirmed), default=None)
    return Incident(
        interval.state,
        interval.from_seconds,
        None if first is None else round(first - interval.from_seconds, 1),
        None if sure is None else round(sure - interval.from_seconds, 1),
        any(e.confirmed for e in within),
    )
