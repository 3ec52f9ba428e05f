"""How utilisation lies over the ranks, and who stands out. Averages hide the one rank that matters; this keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from watcher.judge.job_sample import RankGpu
from watcher.judge.verdict import Shape as Shape

# Spinning reads 90 to 100 % (nccl#2353: 96 %), so "busy" is not == 100; a rank in a barrier reads 0 to 5 %.
BUSY_PERCENT: Final = 90.0
LOW_PERCENT: Final = 10.0
# Shapes in which one rank stands out.
LONE: Final = frozenset({Shape.ONE_LOW_REST_BUSY, Shape.RANK0_LOW_REST_BUSY, Shape.ONE_BUSY_REST_LOW})


@dataclass(frozen=True, slots=True)
class Picture:
    """The shape with those who make it: the low among busy, or the busy among low."""

    shape: Shape
    standing_out: tuple[RankGpu, ...] = ()


def picture_of(gpus: Sequence[RankGpu]) -> Picture:
    """Shape of all boards with a utilisation reading; UNKNOWN where there is none."""
    read = [g for g in gpus if g.gpu.utilization_percent is not None]
    if not read:
        return Picture(Shape.UNKNOWN)
    low = tuple(g for g in read if (g.gpu.utilization_percent or 0.0) <= LOW_PERCENT)
    busy = tuple(g for g in read if (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT)
    if len(busy) == len(read):
        return Picture(Shape.ALL_BUSY)
    if len(low) == len(read):
        return Picture(Shape.ALL_LOW)
    if len(low) + len(busy) < len(read):
        return Picture(Shape.SCATTER)
    if len(read) == 2:
        # One of two: the low one stands out, whichever it is.
        return Picture(Shape.RANK0_LOW_REST_BUSY if low[0].rank == 0 else Shape.ONE_LOW_REST_BUSY, low)
    if len(low) == 1:
        return Picture(Shape.RANK0_LOW_REST_BUSY if low[0].rank == 0 else Shape.ONE_LOW_REST_BUSY, low)
    if len(busy) == 1:
        return Picture(Shape.ONE_BUSY_REST_LOW, busy)
    return Picture(Shape.TWO_GROUPS, min(low, busy, key=len))
