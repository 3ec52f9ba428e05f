"""The comparison of analysers runs, and shows what it is there to show."""

from __future__ import annotations

from tests.benchmarks.flight_analysers import Answer, compare


def test_the_order_of_files_decides_whom_the_official_analyser_blames() -> None:
    comparison = compare("nc_early_r3")
    assert comparison.ours == comparison.truth == {3}
    assert comparison.theirs == {Answer(frozenset({3})): ("0", "1", "2"), Answer(frozenset({0, 1, 2})): ("3",)}
