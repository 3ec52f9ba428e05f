"""The benchmark of the gate runs. Its figures are not asserted: the machine may be busy."""

from __future__ import annotations

import pytest

from tests.benchmarks.gate import main


def test_the_benchmark_prints_total_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeat", "1", "--ways", "node"]) == 0
    out = capsys.readouterr().out
    assert "one process per node: 2 processes, 16 ranks" in out
    assert "node-8-15  done at (s): rendezvous" in out
    assert "target 1.0 s over two nodes x 8 ranks: " in out
