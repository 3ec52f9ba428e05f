"""Each row of faults, in variants of GPU, ranks, pace and source of progress: named right, in time, and nothing else.

`python -m tests.faults 10` plays more variants and prints the delays.
"""

from __future__ import annotations

import pytest

from tests.faults.suite import ROWS, Row, play, variant

VARIANTS = [(row, seed) for place, row in enumerate(ROWS) for seed in (place % 5, (place + 2) % 5)]


@pytest.mark.parametrize(("row", "seed"), VARIANTS, ids=[f"{row.number} {row.name}-{seed}" for row, seed in VARIANTS])
def test_a_fault_is_named_right_and_nothing_else_is_said(row: Row, seed: int) -> None:
    assert play(row, variant(row, seed)).problems == []


def test_every_row_of_the_table_is_played() -> None:
    assert {row.number for row in ROWS} == set(range(1, 26))
