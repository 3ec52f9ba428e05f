"""The whole back test: every labelled picture and log of a directory, judged and scored. Pure but for reading them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from watcher.backtest.labelled import Case, read_labelled
from watcher.backtest.pictures import Judged, Knowledge, judge
from watcher.backtest.score import Bin, Score, Share, reliability_of, score, share_of
from watcher.backtest.series import DAY_SECONDS, PlayedSeries, play
from watcher.judge.verdict import PowerState

# A hang that the picture cannot tell must be said with no more than this, and named as what it may be instead.
UNSURE: Final = 0.6


@dataclass(frozen=True, slots=True)
class PictureResult:
    """The scored pictures under one knowledge of the steps."""

    plain: Score
    left_out: Share  # the same, each board judged without the profile of its own model
    left_out_false_hangs: int
    left_out_reliability: tuple[Bin, ...]
    unfindable: tuple[Judged, ...]  # missed hangs, those that lack a reading among them
    overconfident: tuple[Judged, ...]  # of those: said with too much confidence, or hang is not the alternative


@dataclass(frozen=True, slots=True)
class Unscored:
    """Cases that are no question to a picture, by why."""

    state_unknown: Mapping[str, int]  # by what was said of them
    no_such_state: Mapping[str, int]  # by label: a picture cannot tell a crash from an idle board
    no_reading: Mapping[str, int]  # by label: watts or utilisation were not reported


@dataclass(frozen=True, slots=True)
class AlertCount:
    """One kind of alert over all logs."""

    incidents: Share  # told of those that happened
    delays_seconds: tuple[float, ...]  # to the first word of it
    confirmed_delays_seconds: tuple[float, ...]
    false: int
    false_per_day: float


@dataclass(frozen=True, slots=True)
class BackTest:
    scored: int
    unscored: Unscored
    pictures: Mapping[Knowledge, PictureResult]
    series: tuple[PlayedSeries, ...]
    unlabelled: tuple[str, ...]

    @property
    def days(self) -> float:
        return sum(each.seconds for each in self.series) / DAY_SECONDS


def back_test(directory: Path, knowledges: Sequence[Knowledge]) -> BackTest:
    """Raises LabelError."""
    labelled = read_labelled(directory)
    question = [case for case in labelled.cases if case.state is not None and case.readable]
    blind = [case for case in labelled.cases if case.state is not None and not case.readable]
    return BackTest(
        scored=len(question),
        unscored=_unscored(labelled.cases),
        pictures={knowledge: _pictures(question, blind, knowledge) for knowledge in knowledges if question},
        series=tuple(play(each) for each in labelled.series),
        unlabelled=labelled.unlabelled,
    )


def _pictures(question: Sequence[Case], blind: Sequence[Case], knowledge: Knowledge) -> PictureResult:
    plain = score(judge(question, knowledge))
    left_out = judge(question, knowledge, leave_model_out=True)
    with_a_board = [case for case in blind if case.state is PowerState.HANG and case.samples["samples"]]
    missed = [j for j in (*plain.missed, *judge(with_a_board, knowledge)) if j.case.state is PowerState.HANG]
    missed = [j for j in missed if not j.right]
    return PictureResult(
        plain=plain,
        left_out=share_of(left_out),
        left_out_false_hangs=sum(j.verdict.state is PowerState.HANG and not j.right for j in left_out),
        left_out_reliability=reliability_of(left_out),
        unfindable=tuple(missed),
        overconfident=tuple(j for j in missed if not _doubts(j)),
    )


def _doubts(judged: Judged) -> bool:
    other = judged.verdict.alternative
    return judged.verdict.confidence <= UNSURE and other is not None and other.state is PowerState.HANG


def _unscored(cases: Sequence[Case]) -> Unscored:
    readable = [case for case in cases if case.readable]
    open_questions = [case for case in readable if case.label == PowerState.UNKNOWN]
    return Unscored(
        state_unknown=_counted(j.verdict.state.value for j in judge(open_questions, Knowledge.NONE)),
        no_such_state=_counted(c.label for c in readable if c.state is None and c.label != PowerState.UNKNOWN),
        no_reading=_counted(case.label for case in cases if not case.readable),
    )


def _counted(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


def alerts_of(series: Sequence[PlayedSeries]) -> dict[str, AlertCount]:
    """By state for what happened, by alert for what was told without a reason."""
    days = sum(each.seconds for each in series) / DAY_SECONDS
    incidents = [incident for each in series for incident in each.incidents]
    false = Counter(alarm.alert for each in series for alarm in each.false_alarms)
    rows: dict[str, AlertCount] = {}
    for state in sorted({incident.state for incident in incidents}):
        mine = [incident for incident in incidents if incident.state == state]
        delays = tuple(sorted(i.delay_seconds for i in mine if i.delay_seconds is not None))
        sure = tuple(sorted(i.confirmed_delay_seconds for i in mine if i.confirmed_delay_seconds is not None))
        rows[state] = AlertCount(Share(len(delays), len(mine)), delays, sure, 0, 0.0)
    for alert, count in sorted(false.items()):
        rows[alert] = AlertCount(Share(0, 0), (), (), count, round(count / days, 2) if days else 0.0)
    return rows
