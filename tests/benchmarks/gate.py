"""How long the gate takes: two nodes x 8 ranks as processes on this machine, wall-clock seconds per part and in total.

    python -m tests.benchmarks.gate [--repeat 7] [--ways node rank]

The gate of arXiv 2608.05944 took 2.71 s on two nodes. Here both nodes share this machine's cores; the target is 1.0 s
on two cores. `node` is one gate process per node, `rank` one per rank. For comparison, the same number of Python
processes that do nothing is started in the same run. Files are small: the gate reads at most 192 KiB of each anyway.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.trainer.gate.gate_processes import Gates, write_job

TARGET_SECONDS: Final = 1.0
PAPER_SECONDS: Final = 2.71
WORLD: Final = 16
BLOCKS: Final = (3_085, 3_085, 3_086, 3_083, 3_086, 3_087, 3_085, 3_084) * 2
WAYS: Final = {"node": ("0-7", "8-15"), "rank": tuple(str(rank) for rank in range(WORLD))}


@dataclass(frozen=True, slots=True)
class Measured:
    wall_seconds: float  # from the first process's start to the last one's end
    record: dict[str, Any]


def gate_once(directory: Path, data: Path, ranks: tuple[str, ...]) -> Measured:
    gates = Gates(directory)
    try:
        begun = time.perf_counter()
        processes = [gates.member(data, own, WORLD) for own in ranks]
        codes = [process.wait(60) for process in processes]
        wall = time.perf_counter() - begun
        if set(codes) != {1}:  # the spread is a warning
            raise SystemExit(f"the gate ended with {codes}: {processes[0].communicate()}")
        return Measured(wall, gates.record)
    finally:
        gates.end()


def start_once(count: int) -> float:
    begun = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(count)]
    for process in processes:
        process.wait()
    return time.perf_counter() - begun


def in_parts(record: dict[str, Any]) -> list[str]:
    """When each part was done, in seconds since the process began, node by node."""
    lines = []
    for report in record["reports"]:
        parts = "  ".join(f"{name} {seconds:.3f}" for name, seconds in report["seconds"].items())
        lines.append(f"      {report['node']:<10} done at (s): {parts}")
    return lines


def say(*words: object) -> None:
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")


def measure(way: str, repeat: int) -> float:
    with tempfile.TemporaryDirectory(prefix="gate-bench-") as name:
        data = write_job(Path(name) / "data", BLOCKS)
        runs, starts = [], []
        for _ in range(repeat):
            starts.append(start_once(len(WAYS[way])))
            runs.append(gate_once(Path(name), data, WAYS[way]))
        typical = sorted(runs, key=lambda run: run.wall_seconds)[len(runs) // 2]
        walls = [run.wall_seconds for run in runs]
        say(f"one process per {way}: {len(WAYS[way])} processes, {WORLD} ranks, {repeat} runs")
        median = typical.wall_seconds
        say(f"   wall, start to end: median {median:.3f} s, best {min(walls):.3f}, worst {max(walls):.3f}")
        say(f"   the same number of idle Python processes: median {statistics.median(starts):.3f} s")
        say(
            f"   inside rank 0's process, from probes to verdict: {typical.record['seconds']:.3f} s; "
            "parts of the median run:"
        )
        say("\n".join(in_parts(typical.record)))
        return median


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    say(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; arXiv 2608.05944: {PAPER_SECONDS} s")
    walls = {way: measure(way, options.repeat) for way in options.ways}
    if "node" in walls:
        verdict = "met" if walls["node"] < TARGET_SECONDS else "MISSED"
        say(f"target {TARGET_SECONDS:.1f} s over two nodes x 8 ranks: {walls['node']:.3f} s, {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
