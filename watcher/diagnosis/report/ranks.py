"""Draws one reading of every rank as SVG paths: bars for few ranks, shaded cells for many. Pure.

The live page draws its bars with the same `bar_paths`. One path for many bars keeps a page of a thousand ranks small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from wattwatch.watcher.diagnosis.model import RankReadings

# Sizes in units of the SVG view box.
WIDTH: Final = 1000.0
BAR_HEIGHT: Final = 90.0
BAR_GAP: Final = 4.0
NODE_GAP: Final = 10.0
MIN_WIDTH: Final = 330.0  # so that a chart of few bars is not scaled up to the whole page
MIN_BAR_HEIGHT: Final = 1.0  # a reading of 0 is still visible, unlike one that is missing
CELL: Final = 9.0
PITCH: Final = 11.0  # from one cell to the next
ROW_GAP: Final = 14.0  # between wrapped rows of nodes

MAX_BARS: Final = 64  # ranks; more than this are drawn as cells
SHADES: Final = 8
MAX_CELL_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class BarLayout:
    """Sizes in units of the SVG view box; `pitch` is from the left edge of one bar to that of the next."""

    bar_width: float
    pitch: float
    node_gap: float  # extra space before the first bar of another node
    height: float


@dataclass(frozen=True, slots=True)
class BarPaths:
    plain: str
    marked: str
    absent: str  # short marks where there is no reading
    lefts: tuple[float, ...]  # left edge of each bar
    width: float


@dataclass(frozen=True, slots=True)
class NodeLabel:
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True)
class RankChart:
    """Either bars, or one column of cells for each node, darker where the value is higher."""

    width: float
    height: float
    bars: str
    shades: tuple[str, ...]  # paths of cells, lightest first; empty where bars are drawn
    marked: str  # culprits: their bars, or frames around their cells
    absent: str  # ranks without a reading
    labels: tuple[tuple[float, str, bool], ...]  # x, rank, whether it is a culprit
    nodes: tuple[NodeLabel, ...]
    spread: str = ""
    others: str = ""  # culprits compared with the others, where there are culprits
    top_words: str = ""


def draw_rank_chart(
    ranks: Sequence[RankReadings], culprits: frozenset[int], reads: str, unit: str, top: float | None = None
) -> RankChart | None:
    """`reads`: field of `RankReadings` to draw; `top`: value of the full height, default slightly above the highest
    reading. Returns None if no rank has a reading."""
    values: list[float | None] = [getattr(rank, reads) for rank in ranks]
    known = [value for value in values if value is not None]
    if not known:
        return None
    # A reading above the given top raises the scale: no bar is ever cut off.
    ceiling = max(top or max(known) * 1.06, *known) or 1.0
    of_culprits = [v for rank, v in zip(ranks, values, strict=True) if v is not None and rank.rank in culprits]
    of_others = [v for rank, v in zip(ranks, values, strict=True) if v is not None and rank.rank not in culprits]
    comparison = ""
    if of_culprits and of_others:
        comparison = (
            f"{format_range(of_culprits, unit)} on the marked ranks, {format_range(of_others, unit)} on the others"
        )
    draw = draw_bars if len(ranks) <= MAX_BARS else draw_cells
    chart = draw(ranks, values, culprits, ceiling)
    return replace(chart, spread=format_range(known, unit), others=comparison, top_words=f"{ceiling:,.0f} {unit}")


def format_range(values: Sequence[float], unit: str) -> str:
    """`184 W`, `189–193 W`; raises ValueError without values."""
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{low} {unit}" if low == high else f"{low}–{high} {unit}"


def bar_paths(
    nodes: Sequence[str], values: Sequence[float | None], marked: Sequence[bool], ceiling: float, layout: BarLayout
) -> BarPaths:
    """One bar for each value. `nodes`: the node of each bar, all bars of a node in a row; `ceiling`: full height."""
    width, height = layout.bar_width, layout.height
    plain: list[str] = []
    highlighted: list[str] = []
    absent: list[str] = []
    lefts: list[float] = []
    x, node = 0.0, nodes[0] if nodes else ""
    for own_node, value, is_marked in zip(nodes, values, marked, strict=True):
        if own_node != node:
            x, node = x + layout.node_gap, own_node
        if value is None:
            absent.append(f"M{x:g} {height - 3:g}h{width:g}v2h-{width:g}z")
        else:
            tall = max(MIN_BAR_HEIGHT, min(1.0, value / ceiling) * height)
            path = f"M{x:g} {height:g}v-{tall:.1f}h{width:g}v{tall:.1f}z"
            (highlighted if is_marked else plain).append(path)
        lefts.append(x)
        x += layout.pitch
    right = lefts[-1] + width if lefts else width
    return BarPaths("".join(plain), "".join(highlighted), "".join(absent), tuple(lefts), right)


def draw_bars(
    ranks: Sequence[RankReadings], values: Sequence[float | None], culprits: frozenset[int], ceiling: float
) -> RankChart:
    """One bar for each rank; ranks of one node stand together."""
    # Wider bars for fewer ranks, so that the charts have about the same width.
    pitch = 30.0 if len(ranks) <= 16 else 22.0 if len(ranks) <= 32 else 14.0
    layout = BarLayout(pitch - BAR_GAP, pitch, NODE_GAP, BAR_HEIGHT)
    paths = bar_paths([rank.node for rank in ranks], values, [rank.rank in culprits for rank in ranks], ceiling, layout)
    labels = tuple(
        (left + layout.bar_width / 2, str(rank.rank), rank.rank in culprits)
        for rank, left in zip(ranks, paths.lefts, strict=True)
        # With more bars than this, the numbers would overlap.
        if len(ranks) <= 32 or rank.rank in culprits or rank.rank % 8 == 0
    )
    extents: list[tuple[str, float, float]] = []  # node, left of its first bar, right of its last
    for rank, left in zip(ranks, paths.lefts, strict=True):
        if extents and extents[-1][0] == rank.node:
            extents[-1] = (rank.node, extents[-1][1], left + layout.bar_width)
        else:
            extents.append((rank.node, left, left + layout.bar_width))
    return RankChart(
        width=max(paths.width, MIN_WIDTH),
        height=BAR_HEIGHT,
        bars=paths.plain,
        shades=(),
        marked=paths.marked,
        absent=paths.absent,
        labels=labels,
        nodes=tuple(NodeLabel(left, right - left, node) for node, left, right in extents),
    )


def cell_positions(ranks: Sequence[RankReadings]) -> tuple[list[tuple[int, int]], int]:
    """Column and row of each rank, and the number of rows. A node with very many ranks takes several columns."""
    rows = min(MAX_CELL_ROWS, max(Counter(rank.node for rank in ranks).values()))
    positions: list[tuple[int, int]] = []
    column, row, node = -1, 0, None
    for rank in ranks:
        if rank.node != node or row >= rows:
            column, row, node = column + 1, 0, rank.node
        positions.append((column, row))
        row += 1
    return positions, rows


def draw_cells(
    ranks: Sequence[RankReadings], values: Sequence[float | None], culprits: frozenset[int], ceiling: float
) -> RankChart:
    """One column for each node, wrapped to the width of the page: a node that differs shows as a column, and a GPU
    position that differs on all nodes as a row."""
    positions, rows = cell_positions(ranks)
    count = positions[-1][0] + 1
    lines = max(1, math.ceil(count * PITCH / WIDTH))
    columns = math.ceil(count / lines)
    shades: list[list[str]] = [[] for _ in range(SHADES)]
    marked, absent = [], []
    for rank, value, (column, row) in zip(ranks, values, positions, strict=True):
        x = column % columns * PITCH
        y = column // columns * (rows * PITCH + ROW_GAP) + row * PITCH
        square = f"M{x:g} {y:g}h{CELL:g}v{CELL:g}h-{CELL:g}z"
        if value is None:
            absent.append(f"M{x:g} {y + CELL / 2:g}h{CELL:g}")
        else:
            shades[min(SHADES - 1, int(max(0.0, value) / ceiling * SHADES))].append(square)
        if rank.rank in culprits:
            marked.append(f"M{x - 1.5:g} {y - 1.5:g}h{CELL + 3:g}v{CELL + 3:g}h-{CELL + 3:g}z")
    return RankChart(
        width=columns * PITCH,
        height=lines * (rows * PITCH + ROW_GAP) - ROW_GAP,
        bars="",
        shades=tuple("".join(paths) for paths in shades),
        marked="".join(marked),
        absent="".join(absent),
        labels=(),
        nodes=(),
    )
