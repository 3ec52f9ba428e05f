"""The comparison with PyTorch's analyzer runs, and shows that its answer depends on the order of files."""

from __future__ import annotations

from tests.benchmarks.flight_analyzers import NamedRanks, compare


def test_the_order_of_files_decides_which_ranks_the_official_analyzer_blames() -> None:
    comparison = compare("nc_early_r3")
    assert comparison.ours == comparison.culprits == {3}
    assert comparison.theirs == {NamedRanks(frozenset({3})): ("0", "1", "2"), NamedRanks(frozenset({0, 1, 2})): ("3",)}
