"""The benchmark runs; its numbers are for people."""

from __future__ import annotations

import subprocess
import sys

from tests.tools import DEADLINE_SECONDS, require_tool


def test_the_benchmark_measures_two_nodes_and_a_reconnection() -> None:
    require_tool("sshd")
    command = [sys.executable, "-m", "tests.benchmarks.watch_nodes", "--way", "fleet"]
    command += ["--nodes", "2", "--seconds", "2", "--reconnects", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    heading, row = done.stdout.splitlines()[:2]
    assert heading.split()[:3] == ["way", "nodes", "s"]
    assert row.split()[:3] == ["fleet", "2", "2"]
    assert "1 reconnections" in done.stdout
