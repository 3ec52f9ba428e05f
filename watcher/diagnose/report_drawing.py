"""What an incident's page draws: power and steps over time, and every rank at the moment of the capture. Pure.

Paths and places only; the template gives them their looks. One path for many marks keeps a thousand ranks small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from watcher.diagnose.evidence import RankSeen
from watcher.snapshot import TimelinePoint

WIDTH: Final = 1000.0
POWER_HEIGHT: Final = 150.0
STEP_HEIGHT: Final = 46.0
BEFORE_SECONDS: Final = 600.0  # of the alert's opening
POINTS_MOST: Final = 400
MARGIN: Final = 1.01  # so that what is told last has a line to stand at
TICKS: Final = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)
TICKS_MOST: Final = 7

BARS_MOST: Final = 64  # more ranks than this are cells
BAR_HEIGHT: Final = 90.0
LEAST_WIDTH: Final = 330.0  # so that few bars are not drawn huge
CELL: Final = 9.0
PITCH: Final = 11.0
ROW_GAP: Final = 14.0
SHADES: Final = 8
MOST_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    words: str


@dataclass(frozen=True, slots=True)
class Mark:
    x: float
    words: str
    before: bool  # its words stand before the line, where the next one or the edge is near behind it


@dataclass(frozen=True, slots=True)
class Ribbon:
    x: float
    width: float
    state: str
    named: bool  # wide enough for its name


@dataclass(frozen=True, slots=True)
class TimelinePicture:
    """Power above, the state as a ribbon, the step below; vertical marks where something was told."""

    band: str
    median: str
    steps: str
    step_words: str
    ribbons: tuple[Ribbon, ...]
    ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    top_words: str
    day: str


@dataclass(frozen=True, slots=True)
class NodeLabel:
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True)
class RankPicture:
    """Bars for few ranks; for many, a column of cells a node, darker where the value is higher."""

    width: float
    height: float
    bars: str
    shades: tuple[str, ...]  # paths of cells, palest first; () where bars are drawn
    marked: str  # of culprits: bars, or frames around cells
    absent: str  # no reading
    labels: tuple[tuple[float, str, bool], ...]  # x, rank, whether it is a culprit
    nodes: tuple[NodeLabel, ...]
    spread: str
    others: str  # what the others show, where culprits are known
    top_words: str


def timeline_picture(
    points: Sequence[TimelinePoint], opened: float | None, diagnosed: float | None, closed: float | None
) -> TimelinePicture | None:
    """None where there are less than two moments to draw."""
    start = None if opened is None else opened - BEFORE_SECONDS
    recent = [point for point in points if start is None or point.wall_seconds >= start]
    if len(recent) < 2:
        return None
    first = recent[0].wall_seconds
    last = max(recent[-1].wall_seconds, closed or 0.0, diagnosed or 0.0)
    span = max((last - first) * MARGIN, 1.0)

    def across(seconds: float) -> float:
        return round(min(max((seconds - first) / span, 0.0), 1.0) * WIDTH, 1)

    top = max((p.power_watts_high for p in recent if p.power_watts_high is not None), default=0.0) * 1.06 or 1.0
    band, median = [], []
    drawn = recent[:: max(1, len(recent) // POINTS_MOST)]
    for stretch in unbroken([*drawn, recent[-1]] if drawn[-1] is not recent[-1] else drawn):
        over = [f"{across(p.wall_seconds)} {down(p.power_watts_high, top)}" for p in stretch]
        under = [f"{across(p.wall_seconds)} {down(p.power_watts_low, top)}" for p in stretch]
        band.append("M" + "L".join([*over, *reversed(under)]) + "z")
        median.append("M" + "L".join(f"{across(p.wall_seconds)} {down(p.power_watts_median, top)}" for p in stretch))
    told = (("alert", opened), ("diagnosed", diagnosed), ("over", closed))
    return TimelinePicture(
        band="".join(band),
        median="".join(median),
        steps=steps_path([(across(p.wall_seconds), p.step) for p in drawn if p.step is not None]),
        step_words=step_words([p.step for p in recent if p.step is not None]),
        ribbons=ribbons([(across(p.wall_seconds), p.state.value) for p in recent], across(last)),
        ticks=tuple(Tick(across(at), clock_words(at, span)) for at in tick_seconds(first, last)),
        marks=marks([(across(at), words) for words, at in told if at is not None and at >= first]),
        top_words=f"{top:,.0f} W",
        day=datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d"),
    )


def marks(told: Sequence[tuple[float, str]]) -> tuple[Mark, ...]:
    ends = [*(x for x, _ in told[1:]), WIDTH]
    return tuple(Mark(x, words, end - x < 7.5 * len(words)) for (x, words), end in zip(told, ends, strict=True))


def down(watts: float | None, top: float) -> str:
    return f"{POWER_HEIGHT - (watts or 0.0) / top * POWER_HEIGHT:.1f}"


def unbroken(points: Sequence[TimelinePoint]) -> list[list[TimelinePoint]]:
    """Stretches with readings: a gap in the data is a gap in the picture."""
    stretches: list[list[TimelinePoint]] = [[]]
    for point in points:
        if point.power_watts_median is None:
            stretches.append([])
        else:
            stretches[-1].append(point)
    return [stretch for stretch in stretches if len(stretch) > 1]


def steps_path(steps: Sequence[tuple[float, int]]) -> str:
    """A staircase: it stays at a step until the next is reported."""
    if len(steps) < 2:
        return ""
    low, high = min(step for _, step in steps), max(step for _, step in steps)
    scale = (STEP_HEIGHT - 6) / max(1, high - low)
    path = [f"M{steps[0][0]} {STEP_HEIGHT - 3 - (steps[0][1] - low) * scale:.1f}"]
    path += [f"H{x}V{STEP_HEIGHT - 3 - (step - low) * scale:.1f}" for x, step in steps[1:]]
    return "".join(path)


def step_words(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[-1]:,}" if steps[0] == steps[-1] else f"step {min(steps):,} to {max(steps):,}"


def ribbons(states: Sequence[tuple[float, str]], end: float) -> tuple[Ribbon, ...]:
    changes: list[tuple[float, str]] = []
    for x, state in states:
        if not changes or changes[-1][1] != state:
            changes.append((x, state))
    ends = [x for x, _ in changes[1:]] + [end]
    return tuple(
        Ribbon(x, round(until - x, 1), state, until - x > 8.5 * len(state))
        for (x, state), until in zip(changes, ends, strict=True)
    )


def tick_seconds(first: float, last: float) -> list[float]:
    step = next((each for each in TICKS if (last - first) / each <= TICKS_MOST), TICKS[-1])
    start = (int(first) // step + 1) * step
    return [float(at) for at in range(start, int(last) + 1, step)]


def clock_words(seconds: float, span: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M" if span >= 420 else "%H:%M:%S")


def rank_picture(
    ranks: Sequence[RankSeen], culprits: frozenset[int], reads: str, unit: str, top: float | None = None
) -> RankPicture | None:
    """None where no rank has a reading. `top`: what the full height means; else the highest reading."""
    values: list[float | None] = [getattr(rank, reads) for rank in ranks]
    known = [value for value in values if value is not None]
    if not known:
        return None
    ceiling = max(top or max(known) * 1.06, *known) or 1.0
    draw = bars if len(ranks) <= BARS_MOST else cells
    spread = span_words(known, unit)
    apart = [v for rank, v in zip(ranks, values, strict=True) if v is not None and rank.rank in culprits]
    others = [v for rank, v in zip(ranks, values, strict=True) if v is not None and rank.rank not in culprits]
    words = f"{span_words(apart, unit)} against {span_words(others, unit)}" if apart and others else ""
    return draw(ranks, values, culprits, ceiling, spread, words, f"{ceiling:,.0f} {unit}")


def span_words(values: Sequence[float], unit: str) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{low} {unit}" if low == high else f"{low}–{high} {unit}"


def bars(
    ranks: Sequence[RankSeen],
    values: Sequence[float | None],
    culprits: frozenset[int],
    ceiling: float,
    spread: str,
    others: str,
    top_words: str,
) -> RankPicture:
    """A bar a rank; nodes stand a little apart."""
    pitch, gap = 30.0 if len(ranks) <= 16 else 22.0 if len(ranks) <= 32 else 14.0, 10.0
    plain: list[str] = []
    marked: list[str] = []
    absent: list[str] = []
    labels: list[tuple[float, str, bool]] = []
    nodes: list[NodeLabel] = []
    x, node, began = 0.0, ranks[0].node, 0.0
    for rank, value in zip(ranks, values, strict=True):
        if rank.node != node:
            nodes.append(NodeLabel(began, x - began - 4, node))
            x, node = x + gap, rank.node
            began = x
        wide = pitch - 4
        if value is None:
            absent.append(f"M{x} {BAR_HEIGHT - 4}h{wide}v3h-{wide}z")
        else:
            height = max(1.5, min(1.0, value / ceiling) * BAR_HEIGHT)
            path = f"M{x} {BAR_HEIGHT}v-{height:.1f}h{wide}v{height:.1f}z"
            (marked if rank.rank in culprits else plain).append(path)
        if len(ranks) <= 32 or rank.rank in culprits or rank.rank % 8 == 0:
            labels.append((x + wide / 2, str(rank.rank), rank.rank in culprits))
        x += pitch
    nodes.append(NodeLabel(began, x - began - 4, node))
    return RankPicture(
        width=max(x - 4, LEAST_WIDTH),
        height=BAR_HEIGHT,
        bars="".join(plain),
        shades=(),
        marked="".join(marked),
        absent="".join(absent),
        labels=tuple(labels),
        nodes=tuple(nodes),
        spread=spread,
        others=others,
        top_words=top_words,
    )


def cell_places(ranks: Sequence[RankSeen]) -> tuple[list[tuple[int, int]], int]:
    """Column and row of each rank, and how many rows there are. Very many on one node take several columns."""
    deep = min(MOST_ROWS, max(Counter(rank.node for rank in ranks).values()))
    places: list[tuple[int, int]] = []
    column, row, node = -1, 0, None
    for rank in ranks:
        if rank.node != node or row >= deep:
            column, row, node = column + 1, 0, rank.node
        places.append((column, row))
        row += 1
    return places, deep


def cells(
    ranks: Sequence[RankSeen],
    values: Sequence[float | None],
    culprits: frozenset[int],
    ceiling: float,
    spread: str,
    others: str,
    top_words: str,
) -> RankPicture:
    """A column a node, so that a node or a place on all nodes that differs is seen at once; wrapped to the width."""
    places, deep = cell_places(ranks)
    count = places[-1][0] + 1
    lines = max(1, math.ceil(count * PITCH / WIDTH))
    columns = math.ceil(count / lines)
    shades: list[list[str]] = [[] for _ in range(SHADES)]
    marked, absent = [], []
    for rank, value, (column, row) in zip(ranks, values, places, strict=True):
        x = column % columns * PITCH
        y = column // columns * (deep * PITCH + ROW_GAP) + row * PITCH
        square = f"M{x:g} {y:g}h{CELL:g}v{CELL:g}h-{CELL:g}z"
        if value is None:
            absent.append(f"M{x:g} {y + CELL / 2:g}h{CELL:g}")
        else:
            shades[min(SHADES - 1, int(max(0.0, value) / ceiling * SHADES))].append(square)
        if rank.rank in culprits:
            marked.append(f"M{x - 1.5:g} {y - 1.5:g}h{CELL + 3:g}v{CELL + 3:g}h-{CELL + 3:g}z")
    return RankPicture(
        width=columns * PITCH,
        height=lines * (deep * PITCH + ROW_GAP) - ROW_GAP,
        bars="",
        shades=tuple("".join(paths) for paths in shades),
        marked="".join(marked),
        absent="".join(absent),
        labels=(),
        nodes=(),
        spread=spread,
        others=others,
        top_words=top_words,
    )
