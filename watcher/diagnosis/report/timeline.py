"""What an incident's page draws of its history: power, state and steps over time. Pure.

Paths and places only; the template gives them their looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from wattwatch.watcher.detection.timeline import TimelinePoint, continuous_segments, state_changes

WIDTH: Final = 1000.0
POWER_HEIGHT: Final = 150.0
STEP_HEIGHT: Final = 46.0
LEAD_SECONDS: Final = 600.0  # of the alert's opening
MAX_POINTS: Final = 400
RIGHT_MARGIN: Final = 1.01  # so that what is told last has a line to stand at
TICK_INTERVALS_SECONDS: Final = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)
MAX_TICKS: Final = 7
LETTER_WIDTH: Final = 7.5  # width of one, of the words at marks
MARK_GAP: Final = 8.0


@dataclass(frozen=True, slots=True)
class TimeTick:
    x: float
    words: str


@dataclass(frozen=True, slots=True)
class EventMark:
    x: float
    words: str
    before: bool  # its words stand before the line, where the next one or the edge is near behind it
    row: int = 0  # above the lowest, where the words of another stand in its place


@dataclass(frozen=True, slots=True)
class StateSegment:
    x: float
    width: float
    state: str
    named: bool  # wide enough for its name


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Power above, the state as a ribbon, the step below; vertical marks where something was told."""

    band: str
    median: str
    steps: str
    step_words: str
    ribbons: tuple[StateSegment, ...]
    ticks: tuple[TimeTick, ...]
    marks: tuple[EventMark, ...]
    top_words: str
    day: str


def draw_timeline(
    points: Sequence[TimelinePoint], opened: float | None, diagnosed: float | None, closed: float | None
) -> TimelineChart | None:
    """None where there are less than two moments to draw."""
    start = None if opened is None else opened - LEAD_SECONDS
    recent = [point for point in points if start is None or point.wall_seconds >= start]
    if len(recent) < 2:
        return None
    first = recent[0].wall_seconds
    last = max(recent[-1].wall_seconds, closed or 0.0, diagnosed or 0.0)
    span = max((last - first) * RIGHT_MARGIN, 1.0)

    def across(seconds: float) -> float:
        return round(min(max((seconds - first) / span, 0.0), 1.0) * WIDTH, 1)

    top = max((p.power_watts_high for p in recent if p.power_watts_high is not None), default=0.0) * 1.06 or 1.0
    band, median = [], []
    drawn = recent[:: max(1, len(recent) // MAX_POINTS)]
    for stretch in continuous_segments([*drawn, recent[-1]] if drawn[-1] is not recent[-1] else drawn):
        over = [f"{across(p.wall_seconds)} {power_y(p.power_watts_high, top)}" for p in stretch]
        under = [f"{across(p.wall_seconds)} {power_y(p.power_watts_low, top)}" for p in stretch]
        band.append("M" + "L".join([*over, *reversed(under)]) + "z")
        median.append("M" + "L".join(f"{across(p.wall_seconds)} {power_y(p.power_watts_median, top)}" for p in stretch))
    told = (("alert", opened), ("diagnosed", diagnosed), ("over", closed))
    return TimelineChart(
        band="".join(band),
        median="".join(median),
        steps=steps_path([(across(p.wall_seconds), p.step) for p in drawn if p.step is not None]),
        step_words=format_step_range([p.step for p in recent if p.step is not None]),
        ribbons=ribbons([(across(at), state.value) for at, state in state_changes(recent)], across(last)),
        ticks=tuple(TimeTick(across(at), format_tick_time(at, span)) for at in tick_times(first, last)),
        marks=marks([(across(at), words) for words, at in told if at is not None and at >= first]),
        top_words=f"{top:,.0f} W",
        day=datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d"),
    )


def marks(told: Sequence[tuple[float, str]]) -> tuple[EventMark, ...]:
    """No words stand over others."""
    ends = [*(x for x, _ in told[1:]), WIDTH]
    found: list[EventMark] = []
    for (x, words), end in zip(told, ends, strict=True):
        width = LETTER_WIDTH * len(words)
        before = end - x < width + MARK_GAP and x > width + MARK_GAP
        rows = (
            row
            for row in range(len(told))
            if not any(_overlap(EventMark(x, words, before, row), each) for each in found)
        )
        found.append(EventMark(x, words, before, next(rows)))
    return tuple(found)


def _overlap(one: EventMark, other: EventMark) -> bool:
    (left, right), (start, end) = _extent(one), _extent(other)
    return one.row == other.row and left < end and start < right


def _extent(mark: EventMark) -> tuple[float, float]:
    """From the line itself, which no other's words may cross."""
    far = LETTER_WIDTH * len(mark.words) + MARK_GAP
    return (mark.x - far, mark.x) if mark.before else (mark.x, mark.x + far)


def power_y(watts: float | None, top: float) -> str:
    return f"{POWER_HEIGHT - (watts or 0.0) / top * POWER_HEIGHT:.1f}"


def steps_path(steps: Sequence[tuple[float, int]]) -> str:
    """A staircase: it stays at a step until the next is reported."""
    if len(steps) < 2:
        return ""
    low, high = min(step for _, step in steps), max(step for _, step in steps)
    scale = (STEP_HEIGHT - 6) / max(1, high - low)
    path = [f"M{steps[0][0]} {STEP_HEIGHT - 3 - (steps[0][1] - low) * scale:.1f}"]
    path += [f"H{x}V{STEP_HEIGHT - 3 - (step - low) * scale:.1f}" for x, step in steps[1:]]
    return "".join(path)


def format_step_range(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[-1]:,}" if steps[0] == steps[-1] else f"step {min(steps):,} to {max(steps):,}"


def ribbons(states: Sequence[tuple[float, str]], end: float) -> tuple[StateSegment, ...]:
    """`states`: where each stretch of one state begins; the last reaches up to `end`."""
    ends = [x for x, _ in states[1:]] + [end]
    return tuple(
        StateSegment(x, round(until - x, 1), state, until - x > 8.5 * len(state))
        for (x, state), until in zip(states, ends, strict=True)
    )


def tick_times(first: float, last: float) -> list[float]:
    step = next(
        (each for each in TICK_INTERVALS_SECONDS if (last - first) / each <= MAX_TICKS), TICK_INTERVALS_SECONDS[-1]
    )
    start = (int(first) // step + 1) * step
    return [float(at) for at in range(start, int(last) + 1, step)]


def format_tick_time(seconds: float, span: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M" if span >= 420 else "%H:%M:%S")
