"""How utilisation lies over the ranks. Averages would hide the one that matters."""

from __future__ import annotations

import pytest

from tests.watcher.judge.pictures import picture
from watcher.judge.shape import picture_of
from watcher.judge.verdict import Shape


@pytest.mark.parametrize(
    ("utilization", "shape", "standing_out"),
    [
        ([100] * 8, Shape.ALL_BUSY, []),
        ([90, 96, 97, 99, 100, 100, 95, 91], Shape.ALL_BUSY, []),
        ([0] * 8, Shape.ALL_LOW, []),
        ([100, 100, 100, 0, 100, 100, 100, 100], Shape.ONE_LOW_REST_BUSY, [3]),
        ([97, 96, 5, 100, 99, 100, 98, 96], Shape.ONE_LOW_REST_BUSY, [2]),
        ([0, 100, 100, 100, 100, 100, 100, 100], Shape.RANK0_LOW_REST_BUSY, [0]),
        ([0, 0, 0, 0, 0, 100, 0, 0], Shape.ONE_BUSY_REST_LOW, [5]),
        ([0, 0, 0, 100, 100, 100, 100, 100], Shape.TWO_GROUPS, [0, 1, 2]),
        ([100, 30, 88, 0, 64, 100, 92, 45], Shape.SCATTER, []),
        ([100, 0], Shape.ONE_LOW_REST_BUSY, [1]),
        ([0, 100], Shape.RANK0_LOW_REST_BUSY, [0]),
        ([100], Shape.ALL_BUSY, []),
        ([0], Shape.ALL_LOW, []),
        ([50], Shape.SCATTER, []),
        ([None] * 8, Shape.UNKNOWN, []),
        ([None, 100, 100, 0, 100, 100, 100, 100], Shape.ONE_LOW_REST_BUSY, [3]),
        ([], Shape.UNKNOWN, []),
    ],
)
def test_shapes(utilization: list[float | None], shape: Shape, standing_out: list[int]) -> None:
    seen = picture_of(picture([190.0] * len(utilization), utilization).gpus)
    assert seen.shape is shape
    assert [g.rank for g in seen.standing_out] == standing_out
