"""What an incident's page draws of its ranks at the moment of the capture: few as bars, many as cells. Pure.

Paths and places only; one path for many marks keeps a thousand ranks small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from wattwatch.watcher.diagnosis.model import RankReadings

WIDTH: Final = 1000.0
MAX_BARS: Final = 64  # more ranks than this are cells
BAR_HEIGHT: Final = 90.0
MIN_WIDTH: Final = 330.0  # so that few bars are not drawn huge
CELL: Final = 9.0
PITCH: Final = 11.0
ROW_GAP: Final = 14.0
SHADES: Final = 8
MAX_CELL_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class NodeLabel:
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True)
class RankChart:
    """Bars for few ranks; for many, a column of cells a node, darker where the value is higher."""

    width: float
    height: float
    bars: str
    shades: tuple[str, ...]  # paths of cells, palest first; () where bars are drawn
    marked: str  # of culprits: bars, or frames around cells
    absent: str  # no reading
    labels: tuple[tuple[float, str, bool], ...]  # x, rank, whether it is a culprit
    nodes: tuple[NodeLabel, ...]
    spread: str = ""
    others: str = ""  # what the others show, where culprits are known
    top_words: str = ""


def draw_rank_chart(
    ranks: Sequence[RankReadings], culprits: frozenset[int], reads: str, unit: str, top: float | None = None
) -> RankChart | None:
    """None where no rank has a reading. `top`: what the full height means; else the highest reading."""
    values: list[float | None] = [getattr(rank, reads) for rank in ranks]
    known = [value for value in values if value is not None]
    if not known:
        return None
    ceiling = max(top or max(known) * 1.06, *known) or 1.0
    draw = bars if len(ranks) <= MAX_BARS else draw_cells
    apart = [v for rank, v in zip(ranks, values, strict=True) if v is not None and rank.rank in culprits]
    others = [v for rank, v in zip(ranks, values, strict=True) if v is not None and rank.rank not in culprits]
    words = f"{format_range(apart, unit)} against {format_range(others, unit)}" if apart and others else ""
    picture = draw(ranks, values, culprits, ceiling)
    return replace(picture, spread=format_range(known, unit), others=words, top_words=f"{ceiling:,.0f} {unit}")


def format_range(values: Sequence[float], unit: str) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{low} {unit}" if low == high else f"{low}–{high} {unit}"


def bars(
    ranks: Sequence[RankReadings],
    values: Sequence[float | None],
    culprits: frozenset[int],
    ceiling: float,
) -> RankChart:
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
    return RankChart(
        width=max(x - 4, MIN_WIDTH),
        height=BAR_HEIGHT,
        bars="".join(plain),
        shades=(),
        marked="".join(marked),
        absent="".join(absent),
        labels=tuple(labels),
        nodes=tuple(nodes),
    )


def cell_positions(ranks: Sequence[RankReadings]) -> tuple[list[tuple[int, int]], int]:
    """Column and row of each rank, and how many rows there are. Very many on one node take several columns."""
    deep = min(MAX_CELL_ROWS, max(Counter(rank.node for rank in ranks).values()))
    places: list[tuple[int, int]] = []
    column, row, node = -1, 0, None
    for rank in ranks:
        if rank.node != node or row >= deep:
            column, row, node = column + 1, 0, rank.node
        places.append((column, row))
        row += 1
    return places, deep


def draw_cells(
    ranks: Sequence[RankReadings],
    values: Sequence[float | None],
    culprits: frozenset[int],
    ceiling: float,
) -> RankChart:
    """A column a node, so that a node or a place on all nodes that differs is seen at once; wrapped to the width."""
    places, deep = cell_positions(ranks)
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
    return RankChart(
        width=columns * PITCH,
        height=lines * (deep * PITCH + ROW_GAP) - ROW_GAP,
        bars="",
        shades=tuple("".join(paths) for paths in shades),
        marked="".join(marked),
        absent="".join(absent),
        labels=(),
        nodes=(),
    )
