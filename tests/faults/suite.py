"""The rows as they are played: each in several variants of GPU, ranks, pace and source of progress, and judged."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.faults.plan import HERE, Phase, Setting, as_tuples
from tests.faults.watched_job import RANK, RecordedEpisode, WatchedJob
from tests.message_templates import rendered_problems
from wattwatch.watcher.detection.model import AlertName, Severity, Suspect

SHAPES: Final = ((2, 8), (1, 8), (4, 8))
STEPS_SECONDS: Final = (0.5, 2.0, 5.0, 12.0, 30.0)
BOARD_NAMES: Final = ("b300", "h100", "a100")
WARM_UP_STEPS: Final = 25
LEAST_WARM_UP_SECONDS: Final = 240.0
LONG_WARM_UP_STEPS: Final = 80
LONG_WARM_UP_SECONDS: Final = 900.0
ON_TIME_INTERVALS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be said. `alert`: one of these names. `who`: see rows.toml. `on_time`: within three intervals after
    the job's own stall limit."""

    alert: str
    severity: str
    who: str = ""
    words: str = ""
    on_time: bool = False
    closed: bool = False  # and must be over at the end


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    name: str
    source: str
    play: tuple[Mapping[str, Any], ...]
    expected: tuple[Expected, ...] = ()
    allowed: tuple[str, ...] = ()
    state: str = ""
    long: bool = False  # a warm-up long enough to learn the job's pace
    cold: bool = False  # no warm-up: the job starts before our eyes
    last_steps: bool = False  # the warm-up ends with the last step
    neighbours: int = 0


@dataclass(slots=True)
class Outcome:
    """What one variant of one row gave. Delays in sample intervals; None where nothing was to be said."""

    row: Row
    setting: Setting
    said: list[str] = field(default_factory=list)
    who: str = ""
    first_intervals: float | None = None  # from the injection to the first word of it
    confirmed_intervals: float | None = None
    after_limit_intervals: float | None = None  # from the job's own stall limit to the confirmation
    problems: list[str] = field(default_factory=list)


def load_rows() -> tuple[Row, ...]:
    table = tomllib.loads((HERE / "rows.toml").read_text("utf-8"))
    return tuple(
        Row(**{**as_tuples(row), "expected": tuple(Expected(**each) for each in row.get("expected", ()))})
        for row in table["row"]
    )


ROWS: Final = load_rows()


def variant(row: Row, seed: int) -> Setting:
    """Everything that must not matter, drawn by the seed."""
    draw = random.Random(f"{row.number} {row.name} {seed}")
    nodes, gpus = SHAPES[seed % 3]
    step_seconds = STEPS_SECONDS[(seed + row.number) % 5]
    progress = "log" if (seed + row.number) % 4 == 3 and _readable_by_log(row) else "heartbeat"
    return Setting(
        seed=draw.randrange(1 << 30),
        board=BOARD_NAMES[(seed + row.number) % 3],
        nodes=nodes,
        gpus=gpus,
        step_seconds=step_seconds,
        noise=draw.choice((0.01, 0.03, 0.08)),
        progress=progress,
        log_every=draw.choice((1, 2, 5)) if progress == "log" and step_seconds <= 5 else 1,
        interval_seconds=draw.choice((1.0, 1.0, 2.0)),
        victim=draw.randrange(1, nodes * gpus),
        neighbours=row.neighbours,
    )


def _readable_by_log(row: Row) -> bool:
    """Rows that rest on what a heartbeat says of its phase or loss have no variant with a log alone."""
    return row.number in (1, 2, 3, 4, 6, 7, 15, 16, 17, 18, 23, 24)


def play(row: Row, setting: Setting) -> Outcome:
    """One variant: warm-up, the row's phases, and what the watcher said of them."""
    per_step = setting.step_seconds * setting.log_every
    warm_up = max(LEAST_WARM_UP_SECONDS, WARM_UP_STEPS * per_step)
    if row.long:
        warm_up = max(LONG_WARM_UP_SECONDS, LONG_WARM_UP_STEPS * per_step)
    if row.last_steps:
        steps = int(warm_up / setting.step_seconds)
        setting = replace(setting, total_steps=setting.first_step + steps)
    watch = WatchedJob(setting)
    if not row.cold:
        watch.play(Phase(30.0, "load"))
        _warm_up(watch, warm_up, to_the_end=row.last_steps)
    limit = watch.stall_limit_seconds
    for phase in phases_of(row, setting, limit):
        watch.play(phase)
    return judge(row, watch, limit)


def _warm_up(watch: WatchedJob, seconds: float, *, to_the_end: bool) -> None:
    total = watch.setting.total_steps
    if not to_the_end or total is None:
        watch.play(Phase(seconds, "train"))
        return
    while watch.job.counter.step < total:
        watch.play(Phase(watch.setting.interval_seconds, "train"))


def phases_of(row: Row, setting: Setting, limit: float) -> Iterator[Phase]:
    """Lengths in words follow the job's pace: what is long for one job is a step of another."""
    lengths = {
        "stall": limit + 90.0 + 20 * setting.interval_seconds,
        "half a limit": 0.45 * limit,
        "two steps": 2 * setting.step_seconds,
        "slow": max(1200.0, 60 * setting.step_seconds),
    }
    for row_phase in row.play:
        fields = {k: v for k, v in row_phase.items() if k != "all_step"}
        fields["seconds"] = lengths.get(fields["seconds"], fields["seconds"])
        fields["ranks"] = dict(fields.get("ranks", {}))
        if row_phase.get("all_step"):
            fields["activity"] = f"{fields['activity']}_stepping"
        yield Phase(**fields)


def judge(row: Row, watch: WatchedJob, limit: float) -> Outcome:
    """What was said against what was expected."""
    outcome = Outcome(row, watch.setting)
    injected = watch.injected or 0.0
    outcome.said = [f"{said.alert} {said.worst}" for said in watch.said]
    explained: set[int] = set()
    for expected in row.expected:
        mine = [said for said in watch.said if said.alert in expected.alert.split() and said.opened >= injected]
        explained |= {id(said) for said in mine}
        outcome.problems += _problems(expected, mine, watch)
        if mine:
            _measure(outcome, mine, watch, injected, limit if expected.on_time else None)
    outcome.problems += [
        f"{said.alert} {said.worst} was said and nothing of it was injected: {said.first.summary} {said.first.evidence}"
        for said in watch.said
        if id(said) not in explained and not _allowed(row, said)
    ]
    outcome.problems += sorted(
        {
            f"{problem}: {text}"
            for said in watch.said
            for each in (said.first, said.newest)
            for text in (each.summary, *each.evidence)
            for problem in rendered_problems(text)
        }
    )
    if row.state and row.state not in [state.value for state in watch.states]:
        outcome.problems.append(f"was never {row.state}, but {', '.join(watch.states)}")
    return outcome


def _allowed(row: Row, said: RecordedEpisode) -> bool:
    allowed = {AlertName(name): Severity(worst) for name, worst in (each.split() for each in row.allowed)}
    return said.alert in allowed and RANK[said.worst] <= RANK[allowed[said.alert]]


def _problems(expected: Expected, mine: list[RecordedEpisode], watch: WatchedJob) -> list[str]:
    if not mine:
        return [f"{expected.alert} was not said"]
    problems: list[str] = []
    worst = max(mine, key=lambda said: RANK[said.worst])
    if RANK[worst.worst] < RANK[Severity(expected.severity)]:
        problems.append(f"{worst.alert} was only said as {worst.worst}: {worst.newest.summary} {worst.newest.evidence}")
    if not all(_names(expected.who, said, watch) for said in mine):
        named = [str(suspect) for said in mine for suspect in said.newest.suspects]
        problems.append(f"{worst.alert} names {', '.join(named) or 'nobody'}, not {expected.who}")
    texts = " ".join(" ".join((said.newest.summary, *said.newest.evidence)) for said in mine)
    if expected.words and not re.search(expected.words, texts, re.IGNORECASE):
        problems.append(f"{worst.alert} does not say {expected.words!r}: {texts}")
    over = all(watch.job.now - said.last > 30.0 for said in mine)
    if expected.severity != "info" and over is not expected.closed and not _heals(watch):
        problems.append(f"{worst.alert} {'is over and should not' if over else 'is not over and should'}")
    return problems


def _heals(watch: WatchedJob) -> bool:
    """A row whose last phase is healthy may have closed its alert."""
    return watch.setting.progress != "none" and watch.job.counter.changed >= watch.job.now - 60


def _names(who: str, said: RecordedEpisode, watch: WatchedJob) -> bool:
    setting, suspects = watch.setting, said.newest.suspects
    node = watch.job.node_of(setting.victim)
    board = setting.victim % setting.gpus
    if who == "nobody":
        return not suspects
    if who == "victim node":
        return suspects == (Suspect(node),)
    if who == "victim board":
        return [(s.node, s.gpu) for s in suspects] == [(node, board)]
    if who == "victim":
        return [(s.node, s.gpu) for s in suspects] == [(node, board)] and suspects[0].rank in (None, setting.victim)
    return True


def _measure(
    outcome: Outcome, mine: list[RecordedEpisode], watch: WatchedJob, injected: float, limit: float | None
) -> None:
    interval = watch.setting.interval_seconds
    outcome.first_intervals = (min(said.opened for said in mine) - injected) / interval
    outcome.who = ", ".join(str(suspect) for suspect in mine[0].newest.suspects)
    confirmed = [said.confirmed for said in mine if said.confirmed is not None]
    if not confirmed:
        return
    outcome.confirmed_intervals = (min(confirmed) - injected) / interval
    if limit is None:
        return
    outcome.after_limit_intervals = (min(confirmed) - watch.stood_since - limit) / interval
    # The first sample of a stop still averages over work; the two after it show nothing else.
    if outcome.first_intervals > ON_TIME_INTERVALS + 0.5:
        outcome.problems.append(f"suspected {outcome.first_intervals:.1f} intervals after the injection")
    if outcome.after_limit_intervals > ON_TIME_INTERVALS + 0.5:
        outcome.problems.append(f"confirmed {outcome.after_limit_intervals:.1f} intervals after the stall limit")
