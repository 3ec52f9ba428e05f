"""The benchmark of diagnosis runs; reading flight records costs what it should, with room for a busy machine."""

from __future__ import annotations

from tests.benchmarks.diagnose import measure


def test_reading_sixteen_ranks_takes_little_memory() -> None:
    cost = measure(ranks=16, entries=500)
    assert cost["mb"] < 200
    assert cost["processor_seconds"] < 10
