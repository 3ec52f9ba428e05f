"""The benchmark of judging runs; judging costs what it should, with room for a busy machine."""

from __future__ import annotations

from tests.benchmarks.detection import STAGES, TARGET_CORE_PERCENT, measure


def test_judging_stays_far_below_its_share_of_a_core() -> None:
    cost = measure(nodes=100, boards=8, jobs=5, rounds=5)
    assert cost.boards == 800
    assert set(cost.stages) == set(STAGES)
    assert cost.core_percent < 4 * TARGET_CORE_PERCENT / 10
