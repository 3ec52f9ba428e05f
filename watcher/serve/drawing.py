"""What the page draws: paths of small SVG pictures, from numbers. One path for many bars keeps a large job small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from watcher.judge.job_sample import RankGpu
from watcher.judge.verdict import Suspect
from watcher.snapshot import TimelinePoint
from watcher.timeline import stretches_of_state, unbroken

BAR: Final = 8
PITCH: Final = 10
NODE_GAP: Final = 6
STRIP_HEIGHT: Final = 40
HISTORY_WIDTH: Final = 600
HISTORY_HEIGHT: Final = 60
HISTORY_SECONDS: Final = 600.0
HISTORY_POINTS: Final = 150


@dataclass(frozen=True, slots=True)
class Strip:
    """One bar a board, in the order of the job's ranks; nodes stand a little apart."""

    width: int
    bars: str  # path of the bars with a value
    marked: str  # path of those of suspects
    absent: str  # path of small marks where there is no reading
    top: str  # what the full height means, where it needs saying
    spread: str  # least and most, in words


@dataclass(frozen=True, slots=True)
class Ribbon:
    """One stretch of time in one state."""

    x: float
    width: float
    state: str


@dataclass(frozen=True, slots=True)
class History:
    """The last ten minutes: power between the lowest and the highest board, its median, and the states below."""

    band: str
    median: str
    ribbons: tuple[Ribbon, ...]
    top: str
    span: str  # how long ago it begins


def power_strip(boards: Sequence[RankGpu], suspects: Sequence[Suspect]) -> Strip:
    """Watts against the highest power limit of the job; against the highest reading where no limit is known."""
    watts = [board.gpu.power_watts for board in boards]
    top = ceiling(boards)
    return strip(boards, watts, top, suspects, f"{top:,.0f} W", "W")


def utilization_strip(boards: Sequence[RankGpu], suspects: Sequence[Suspect]) -> Strip:
    return strip(boards, [b.gpu.utilization_percent for b in boards], 100.0, suspects, "", "%")


def ceiling(boards: Sequence[RankGpu]) -> float:
    limits = [b.gpu.power_limit_watts for b in boards if b.gpu.power_limit_watts is not None]
    readings = [b.gpu.power_watts for b in boards if b.gpu.power_watts is not None]
    return max([*(limits or readings), *readings], default=1.0) or 1.0


def strip(
    boards: Sequence[RankGpu],
    values: Sequence[float | None],
    top: float,
    suspects: Sequence[Suspect],
    top_words: str,
    unit: str,
) -> Strip:
    bars: list[str] = []
    marked: list[str] = []
    absent: list[str] = []
    x, node = 0, boards[0].node if boards else ""
    for board, value in zip(boards, values, strict=True):
        if board.node != node:
            x, node = x + NODE_GAP, board.node
        if value is None:
            absent.append(f"M{x} {STRIP_HEIGHT - 3}h{BAR}v2h-{BAR}z")
        else:
            # A reading of 0 is a reading: it keeps a sliver, which an absent one has not.
            height = max(1.0, min(1.0, value / top) * STRIP_HEIGHT)
            path = f"M{x} {STRIP_HEIGHT}v-{height:.4g}h{BAR}v{height:.4g}z"
            (marked if is_suspect(board, suspects) else bars).append(path)
        x += PITCH
    known = [value for value in values if value is not None]
    low, high = (f"{min(known):,.0f}", f"{max(known):,.0f}") if known else ("", "")
    spread = (f"{low}–{high} {unit}" if low != high else f"{low} {unit}") if known else "no reading"
    return Strip(max(x - PITCH + BAR, BAR), "".join(bars), "".join(marked), "".join(absent), top_words, spread)


def is_suspect(board: RankGpu, suspects: Sequence[Suspect]) -> bool:
    index, rank = board.gpu.index, board.rank
    return any(s.node == board.node and s.gpu in (None, index) and s.rank in (None, rank) for s in suspects)


def history(points: Sequence[TimelinePoint], boards: Sequence[RankGpu], now: float) -> History | None:
    """None where there is less than two points to draw."""
    recent = [p for p in points if now - p.wall_seconds <= HISTORY_SECONDS]
    if len(recent) < 2:
        return None
    start, span = recent[0].wall_seconds, max(now - recent[0].wall_seconds, 1.0)
    highest = max((p.power_watts_high for p in recent if p.power_watts_high is not None), default=0.0)
    top = max(ceiling(boards), highest)
    drawn = thinned(recent)
    band, median = [], []
    for stretch in unbroken(drawn):
        across = [(p.wall_seconds - start) / span * HISTORY_WIDTH for p in stretch]
        over = [f"{x:.4g} {height(p.power_watts_high, top):.4g}" for x, p in zip(across, stretch, strict=True)]
        under = [f"{x:.4g} {height(p.power_watts_low, top):.4g}" for x, p in zip(across, stretch, strict=True)]
        middle = [f"{x:.4g} {height(p.power_watts_median, top):.4g}" for x, p in zip(across, stretch, strict=True)]
        band.append("M" + "L".join([*over, *reversed(under)]) + "z")
        median.append("M" + "L".join(middle))
    return History("".join(band), "".join(median), ribbons(recent, start, span), f"{top:,.0f} W", span_words(span))


def span_words(span: float) -> str:
    return f"{span / 60:.0f} min" if span >= 90 else f"{span:.0f} s"


def height(watts: float | None, top: float) -> float:
    return HISTORY_HEIGHT - (watts or 0.0) / top * HISTORY_HEIGHT


def thinned(points: Sequence[TimelinePoint]) -> list[TimelinePoint]:
    """At most about HISTORY_POINTS, the last one among them."""
    step = max(1, len(points) // HISTORY_POINTS)
    return [*points[:-1:step], points[-1]]


def ribbons(points: Sequence[TimelinePoint], start: float, span: float) -> tuple[Ribbon, ...]:
    """Consecutive moments of one state as one stretch; the last reaches up to now."""
    changes = [(began - start, state) for began, state in stretches_of_state(points)]
    ends = [seconds for seconds, _ in changes[1:]] + [span]
    return tuple(
        Ribbon(round(begin / span * HISTORY_WIDTH, 1), round((end - begin) / span * HISTORY_WIDTH, 1), state.value)
        for (begin, state), end in zip(changes, ends, strict=True)
    )
