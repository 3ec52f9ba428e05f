"""How utilization lies over the ranks. Averages would hide the one that matters."""

from __future__ import annotations

import pytest

from tests.watcher.detection.job_samples import job_sample
from wattwatch.watcher.detection.classifier.features import match_pattern
from wattwatch.watcher.detection.model import UtilizationPattern


@pytest.mark.parametrize(
    ("utilization", "shape", "outliers"),
    [
        ([100] * 8, UtilizationPattern.ALL_BUSY, []),
        ([90, 96, 97, 99, 100, 100, 95, 91], UtilizationPattern.ALL_BUSY, []),
        ([0] * 8, UtilizationPattern.ALL_LOW, []),
        ([100, 100, 100, 0, 100, 100, 100, 100], UtilizationPattern.ONE_LOW_REST_BUSY, [3]),
        ([97, 96, 5, 100, 99, 100, 98, 96], UtilizationPattern.ONE_LOW_REST_BUSY, [2]),
        ([0, 100, 100, 100, 100, 100, 100, 100], UtilizationPattern.RANK0_LOW_REST_BUSY, [0]),
        ([0, 0, 0, 0, 0, 100, 0, 0], UtilizationPattern.ONE_BUSY_REST_LOW, [5]),
        ([0, 0, 0, 100, 100, 100, 100, 100], UtilizationPattern.TWO_GROUPS, [0, 1, 2]),
        ([100, 30, 88, 0, 64, 100, 92, 45], UtilizationPattern.SCATTER, []),
        ([100, 0], UtilizationPattern.ONE_LOW_REST_BUSY, [1]),
        ([0, 100], UtilizationPattern.RANK0_LOW_REST_BUSY, [0]),
        ([100], UtilizationPattern.ALL_BUSY, []),
        ([0], UtilizationPattern.ALL_LOW, []),
        ([50], UtilizationPattern.SCATTER, []),
        ([None] * 8, UtilizationPattern.UNKNOWN, []),
        ([None, 100, 100, 0, 100, 100, 100, 100], UtilizationPattern.ONE_LOW_REST_BUSY, [3]),
        ([], UtilizationPattern.UNKNOWN, []),
    ],
)
def test_shapes(utilization: list[float | None], shape: UtilizationPattern, outliers: list[int]) -> None:
    seen = match_pattern(job_sample([190.0] * len(utilization), utilization).gpus)
    assert seen.pattern is shape
    assert [g.rank for g in seen.outliers] == outliers
