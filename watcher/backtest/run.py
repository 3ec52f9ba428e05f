"""The backtest: every labeled case and log of a directory, judged and scored. No clock, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wattwatch.watcher.backtest.cases import LabeledCase, LabeledInterval, LabeledSeries, LabelError, read_labeled_data
from wattwatch.watcher.backtest.score import (
    CaseScore,
    JudgedCase,
    LeftOut,
    ProgressKnowledge,
    Ratio,
    judge_cases,
    score_cases,
)
from wattwatch.watcher.detection.model import AlertName, PowerState, Severity
from wattwatch.watcher.engine.snapshot import EpisodeView
from wattwatch.watcher.recordings.format import RecordingError
from wattwatch.watcher.recordings.inputs import GpuLog, InputError, read_input_file
from wattwatch.watcher.recordings.replay import AlertChange, replay

DAY_SECONDS: Final = 86_400.0
# The alerts that fit a state. A state that is not listed should raise no alert.
ALERTS_BY_STATE: Final[Mapping[str, frozenset[str]]] = {
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
ALERTING_STATES: Final = frozenset(ALERTS_BY_STATE) - {
    "communication"
}  # JobSlow may be raised for a slow link, but need not be for a job that communicates


@dataclass(frozen=True, slots=True)
class LabeledIncident:
    """One interval that needs an alert. Delays count from its beginning; None: no alert, or never confirmed."""

    state: str
    from_seconds: float
    delay_seconds: float | None  # to the first fitting alert, which may be a suspicion
    confirmed_delay_seconds: float | None  # to the first confirmed one
    confirmed: bool  # in the end


@dataclass(frozen=True, slots=True)
class FalseAlarm:
    alert: str
    severity: str
    confirmed: bool
    opened_seconds: float


@dataclass(frozen=True, slots=True)
class SeriesResult:
    name: str
    seconds: float
    rounds: int
    incidents: tuple[LabeledIncident, ...]
    false_alarms: tuple[FalseAlarm, ...]


def run_series(series: LabeledSeries) -> SeriesResult:
    """Runs a labeled log through the engine. Raises LabelError if the log or its label cannot be used."""
    try:
        source = read_input_file(series.path)
        if isinstance(source, GpuLog) and not any(m.sample and m.sample.gpus for m in source.events):
            raise InputError(
                f"{series.path}: there are no GPU readings in this file: {source.detail or source.status.value}"
            )
        result = replay(series.name, source)
    except (InputError, RecordingError) as error:
        raise LabelError(str(error)) from None
    for interval in series.intervals:
        if interval.from_seconds > result.seconds:
            raise LabelError(
                f"{series.path}: the log is {result.seconds:.0f} s long, but according to its label file "
                f"{interval.state} begins at "
                f"{interval.from_seconds:.0f} s. Count from_seconds from the first sample"
            )
    reported = [e for e in result.episodes if e.suppressed_by is None]
    return SeriesResult(
        name=series.name,
        seconds=result.seconds,
        rounds=result.rounds,
        incidents=tuple(
            _incident(each, reported, result.alerts) for each in series.intervals if each.state in ALERTING_STATES
        ),
        false_alarms=tuple(
            FalseAlarm(e.alert, e.severity, e.confirmed, round(e.opened_wall_seconds, 1))
            for e in reported
            if e.severity != Severity.INFO and not any(_explains(e, each, result.seconds) for each in series.intervals)
        ),
    )


def _explains(episode: EpisodeView, interval: LabeledInterval, end_seconds: float) -> bool:
    """Whether the alert fits the state of the interval and was open during it."""
    closed = end_seconds if episode.closed_wall_seconds is None else episode.closed_wall_seconds
    overlaps = episode.opened_wall_seconds <= interval.to_seconds and closed >= interval.from_seconds
    return episode.alert in ALERTS_BY_STATE.get(interval.state, frozenset()) and overlaps


def _incident(
    interval: LabeledInterval, reported: Sequence[EpisodeView], changes: Sequence[AlertChange]
) -> LabeledIncident:
    within = [
        e
        for e in reported
        if e.alert in ALERTS_BY_STATE[interval.state]
        and interval.from_seconds <= e.opened_wall_seconds <= interval.to_seconds
    ]
    ids = {e.id for e in within}
    first = min((e.opened_wall_seconds for e in within), default=None)
    confirmed = min((c.at_seconds for c in changes if c.episode.id in ids and c.episode.confirmed), default=None)
    return LabeledIncident(
        interval.state,
        interval.from_seconds,
        None if first is None else round(first - interval.from_seconds, 1),
        None if confirmed is None else round(confirmed - interval.from_seconds, 1),
        any(e.confirmed for e in within),
    )


# All of a directory

# A missed hang is acceptable only with at most this confidence in the wrong verdict, and with hang as its alternative.
MAX_UNSURE_CONFIDENCE: Final = 0.6


@dataclass(frozen=True, slots=True)
class CaseResults:
    """The scored cases, with one kind of knowledge about the steps."""

    plain: CaseScore
    left_out: Mapping[LeftOut, CaseScore]  # the same cases, judged without the profile of their model, or their source
    unfindable: tuple[JudgedCase, ...]  # missed hangs, also those without power or utilization
    overconfident: tuple[JudgedCase, ...]  # of these: with too much confidence, or without hang as the alternative


@dataclass(frozen=True, slots=True)
class UnscoredCases:
    """Cases that cannot be scored, by the reason."""

    state_unknown: Mapping[str, int]  # by verdict
    no_such_state: Mapping[str, int]  # by label: samples cannot distinguish a crash from an idle GPU
    no_reading: Mapping[str, int]  # by label: power or utilization was not reported


@dataclass(frozen=True, slots=True)
class AlertStatistics:
    """One state, or one alert without a cause, over all logs."""

    incidents: Ratio  # reported ones among those that happened
    delays_seconds: tuple[float, ...]  # to the first alert
    confirmed_delays_seconds: tuple[float, ...]
    false: int
    false_per_day: float


@dataclass(frozen=True, slots=True)
class BacktestResult:
    scored: int
    unscored: UnscoredCases
    cases: Mapping[ProgressKnowledge, CaseResults]
    series: tuple[SeriesResult, ...]
    unlabeled: tuple[str, ...]

    @property
    def days(self) -> float:
        return sum(each.seconds for each in self.series) / DAY_SECONDS


def run_backtest(directory: Path, knowledges: Sequence[ProgressKnowledge]) -> BacktestResult:
    """Judges and scores everything labeled below the directory. Raises LabelError."""
    labeled = read_labeled_data(directory)
    scorable = [case for case in labeled.cases if case.state is not None and case.readable]
    without_readings = [case for case in labeled.cases if case.state is not None and not case.readable]
    return BacktestResult(
        scored=len(scorable),
        unscored=_unscored(labeled.cases),
        cases={knowledge: _case_results(scorable, without_readings, knowledge) for knowledge in knowledges if scorable},
        series=tuple(run_series(each) for each in labeled.series),
        unlabeled=labeled.unlabeled,
    )


def _case_results(
    scorable: Sequence[LabeledCase], without_readings: Sequence[LabeledCase], knowledge: ProgressKnowledge
) -> CaseResults:
    plain = score_cases(judge_cases(scorable, knowledge))
    with_a_board = [case for case in without_readings if case.state is PowerState.HANG and case.samples["samples"]]
    missed = [j for j in (*plain.missed, *judge_cases(with_a_board, knowledge)) if j.case.state is PowerState.HANG]
    missed = [j for j in missed if not j.right]
    return CaseResults(
        plain=plain,
        left_out={
            left_out: score_cases(judge_cases(scorable, knowledge, left_out))
            for left_out in (LeftOut.MODEL, LeftOut.SOURCE)
        },
        unfindable=tuple(missed),
        overconfident=tuple(j for j in missed if not _is_unsure(j)),
    )


def _is_unsure(judged: JudgedCase) -> bool:
    other = judged.verdict.alternative
    return judged.verdict.confidence <= MAX_UNSURE_CONFIDENCE and other is not None and other.state is PowerState.HANG


def _unscored(cases: Sequence[LabeledCase]) -> UnscoredCases:
    readable = [case for case in cases if case.readable]
    open_questions = [case for case in readable if case.label == PowerState.UNKNOWN]
    return UnscoredCases(
        state_unknown=_counted(j.verdict.state.value for j in judge_cases(open_questions, ProgressKnowledge.NONE)),
        no_such_state=_counted(c.label for c in readable if c.state is None and c.label != PowerState.UNKNOWN),
        no_reading=_counted(case.label for case in cases if not case.readable),
    )


def _counted(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


def alert_statistics(series: Sequence[SeriesResult]) -> dict[str, AlertStatistics]:
    """Incidents by state, and false alarms by alert."""
    days = sum(each.seconds for each in series) / DAY_SECONDS
    incidents = [incident for each in series for incident in each.incidents]
    false = Counter(alarm.alert for each in series for alarm in each.false_alarms)
    rows: dict[str, AlertStatistics] = {}
    for state in sorted({incident.state for incident in incidents}):
        mine = [incident for incident in incidents if incident.state == state]
        delays = tuple(sorted(i.delay_seconds for i in mine if i.delay_seconds is not None))
        confirmed = tuple(sorted(i.confirmed_delay_seconds for i in mine if i.confirmed_delay_seconds is not None))
        rows[state] = AlertStatistics(Ratio(len(delays), len(mine)), delays, confirmed, 0, 0.0)
    for alert, count in sorted(false.items()):
        rows[alert] = AlertStatistics(Ratio(0, 0), (), (), count, round(count / days, 2) if days else 0.0)
    return rows
