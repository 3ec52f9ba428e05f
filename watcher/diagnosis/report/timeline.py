"""Draws power, job state and step over time as SVG paths. Pure.

The incident report shows the whole chart (`draw_timeline`). The live page draws its last ten minutes with the same
parts: `power_band`, `state_segments`, `thin_points`. Colors and fonts are in the templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from wattwatch.watcher.detection.timeline import (
    TimelinePoint,
    continuous_segments,
    observed_runs,
    state_changes,
)

# Sizes in units of the SVG view box.
WIDTH: Final = 1000.0
POWER_HEIGHT: Final = 150.0
STEP_HEIGHT: Final = 46.0
STEP_PADDING: Final = 3.0  # above and below the step line, so that its stroke is not cut off
LETTER_WIDTH: Final = 7.5  # average width of a letter in an event label, 11 px semibold
STATE_LETTER_WIDTH: Final = 8.5  # the same in a state segment, with its margins
MARK_GAP: Final = 8.0  # between an event label and whatever is next to it

LEAD_SECONDS: Final = 600.0  # shown before the alert opened: enough to see what normal looked like
MAX_POINTS: Final = 400  # more points than this cannot be told apart at the width of a page
RIGHT_MARGIN: Final = 1.01  # leaves room at the right edge for the line of the last event
POWER_HEADROOM: Final = 1.06  # leaves room above the highest reading
TICK_INTERVALS_SECONDS: Final = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)
MAX_TICKS: Final = 7
SECONDS_SHOWN_BELOW: Final = 420.0  # charts shorter than this label their ticks with seconds


@dataclass(frozen=True, slots=True)
class TimeTick:
    x: float
    words: str


@dataclass(frozen=True, slots=True)
class EventMark:
    """A vertical line with a label: when the alert opened, was diagnosed, closed."""

    x: float
    words: str
    before: bool  # the label is left of the line, because the next line or the right edge is too close
    row: int = 0  # labels that would overlap are stacked; 0 is the lowest row


@dataclass(frozen=True, slots=True)
class StateSegment:
    """A stretch of time in which the job stayed in one state."""

    x: float
    width: float
    state: str

    @property
    def fits_label(self) -> bool:
        """Whether the name of the state fits into the segment."""
        return self.width > STATE_LETTER_WIDTH * len(self.state)


@dataclass(frozen=True, slots=True)
class PowerPaths:
    """SVG paths: the area between the lowest and the highest GPU, and the median as a line."""

    band: str
    median: str


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Power on top, job states as a ribbon below it, the step at the bottom, and the events as vertical lines."""

    band: str
    median: str
    steps: str
    step_words: str
    segments: tuple[StateSegment, ...]
    ticks: tuple[TimeTick, ...]
    marks: tuple[EventMark, ...]
    top_words: str
    day: str


def draw_timeline(
    points: Sequence[TimelinePoint], opened: float | None, diagnosed: float | None, closed: float | None
) -> TimelineChart | None:
    """The times are Unix seconds; None: it has not happened. Returns None with fewer than two points to draw."""
    start = None if opened is None else opened - LEAD_SECONDS
    recent = [point for point in points if start is None or point.wall_seconds >= start]
    if len(recent) < 2:
        return None
    first = recent[0].wall_seconds
    last = max(recent[-1].wall_seconds, closed or 0.0, diagnosed or 0.0)
    span = max((last - first) * RIGHT_MARGIN, 1.0)

    def x_at(seconds: float) -> float:
        return round(min(max((seconds - first) / span, 0.0), 1.0) * WIDTH, 1)

    # `or 1.0`: without any power reading the scale must not be zero.
    top = max((p.power_watts_high for p in recent if p.power_watts_high is not None), default=0.0)
    top = top * POWER_HEADROOM or 1.0
    drawn = thin_points(recent, MAX_POINTS)
    power = power_band(recent, MAX_POINTS, x_at, top, POWER_HEIGHT)
    events = (("alert", opened), ("diagnosed", diagnosed), ("closed", closed))
    return TimelineChart(
        band=power.band,
        median=power.median,
        steps=steps_path([(x_at(p.wall_seconds), p.step) for p in drawn if p.step is not None]),
        step_words=format_step_range([p.step for p in recent if p.step is not None]),
        segments=state_segments(recent, x_at),
        ticks=tuple(TimeTick(x_at(at), format_tick_time(at, span)) for at in tick_times(first, last)),
        marks=place_event_marks([(x_at(at), words) for words, at in events if at is not None and at >= first]),
        top_words=f"{top:,.0f} W",
        day=datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d"),
    )


def thin_points(points: Sequence[TimelinePoint], most: int) -> list[TimelinePoint]:
    """Every n-th point, so that about `most` are left; the last one is always kept."""
    step = max(1, len(points) // most)
    return [*points[:-1:step], points[-1]]


def power_band(
    points: Sequence[TimelinePoint], most: int, x_at: Callable[[float], float], top_watts: float, height: float
) -> PowerPaths:
    """`x_at` maps Unix seconds to x; `top_watts` is drawn at y = 0, 0 W at y = `height`. About `most` points are drawn.
    Gaps in the data stay gaps."""

    def at(point: TimelinePoint, watts: float | None) -> str:
        return f"{x_at(point.wall_seconds):.1f} {height - (watts or 0.0) / top_watts * height:.1f}"

    band, median = [], []
    runs = [thin_points(run, max(2, most * len(run) // len(points))) for run in observed_runs(points)]
    for segment in (segment for run in runs for segment in continuous_segments(run)):
        upper = [at(point, point.power_watts_high) for point in segment]
        lower = [at(point, point.power_watts_low) for point in segment]
        band.append("M" + "L".join([*upper, *reversed(lower)]) + "z")
        median.append("M" + "L".join(at(point, point.power_watts_median) for point in segment))
    return PowerPaths("".join(band), "".join(median))


def state_segments(points: Sequence[TimelinePoint], x_at: Callable[[float], float]) -> tuple[StateSegment, ...]:
    """Consecutive points in one state become one segment. It ends with the last point before a gap in the data."""
    segments = []
    for run in observed_runs(points):
        changes = [(x_at(began), state.value) for began, state in state_changes(run)]
        ends = [*(x for x, _ in changes[1:]), x_at(run[-1].wall_seconds)]
        segments += [
            StateSegment(round(x, 1), round(end - x, 1), state) for (x, state), end in zip(changes, ends, strict=True)
        ]
    return tuple(segments)


def place_event_marks(events: Sequence[tuple[float, str]]) -> tuple[EventMark, ...]:
    """`events`: x and label, in order of time. No label overlaps another one or crosses another event's line."""
    ends = [*(x for x, _ in events[1:]), WIDTH]
    placed: list[EventMark] = []
    for (x, words), end in zip(events, ends, strict=True):
        width = LETTER_WIDTH * len(words)
        # Left of the line if there is no room on the right, unless there is none on the left either.
        before = end - x < width + MARK_GAP and x > width + MARK_GAP
        candidates = (EventMark(x, words, before, row) for row in range(len(events)))
        placed.append(next(mark for mark in candidates if not any(_overlap(mark, other) for other in placed)))
    return tuple(placed)


def _overlap(one: EventMark, other: EventMark) -> bool:
    (left, right), (start, end) = _extent(one), _extent(other)
    return one.row == other.row and left < end and start < right


def _extent(mark: EventMark) -> tuple[float, float]:
    """From the line of the mark to the far end of its label."""
    length = LETTER_WIDTH * len(mark.words) + MARK_GAP
    return (mark.x - length, mark.x) if mark.before else (mark.x, mark.x + length)


def steps_path(steps: Sequence[tuple[float, int]]) -> str:
    """`steps`: x and step. A staircase, because a step lasts until the next one is reported."""
    if len(steps) < 2:
        return ""
    low, high = min(step for _, step in steps), max(step for _, step in steps)
    scale = (STEP_HEIGHT - 2 * STEP_PADDING) / max(1, high - low)
    bottom = STEP_HEIGHT - STEP_PADDING
    path = [f"M{steps[0][0]} {bottom - (steps[0][1] - low) * scale:.1f}"]
    path += [f"H{x}V{bottom - (step - low) * scale:.1f}" for x, step in steps[1:]]
    return "".join(path)


def format_step_range(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[-1]:,}" if steps[0] == steps[-1] else f"step {min(steps):,} to {max(steps):,}"


def tick_times(first: float, last: float) -> list[float]:
    """Round times between the two, in Unix seconds, at the smallest interval that gives at most MAX_TICKS."""
    interval = next((each for each in TICK_INTERVALS_SECONDS if (last - first) / each <= MAX_TICKS), None)
    interval = interval or TICK_INTERVALS_SECONDS[-1]
    start = (int(first) // interval + 1) * interval
    return [float(at) for at in range(start, int(last) + 1, interval)]


def format_tick_time(seconds: float, span: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M" if span >= SECONDS_SHOWN_BELOW else "%H:%M:%S")
