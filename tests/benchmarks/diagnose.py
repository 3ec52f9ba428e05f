"""The cost of diagnosing a hung job from its flight records: seconds and memory, for 16 and 1,024 ranks.

    python -m tests.benchmarks.diagnose [--ranks 16 1024] [--entries 2000] [--frames 5]

Records as torch 2.10 writes them: NCCL, pickle, each string and each stack line written once. Each size is read in a
new process, so that peak memory is its own, and that of its readers is added. Creating the files is not counted. The
result is judged by CPU time, which other load on the machine does not change much; elapsed time is shown as well.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.flight_recorder.loader import READER_PROCESSES, read_flight_records

# Ranks -> CPU seconds and MB of memory that are acceptable for a watcher that runs beside other work. Chosen.
TARGETS: Final = {16: (1.0, 200.0), 1024: (60.0, 2000.0)}
CALLS: Final = ("_all_gather_base", "_reduce_scatter_base", "all_reduce", "all_gather")
START_NS: Final = 1_750_000_000_000_000_000


def record(rank: int, ranks: int, entries: int, frames: int) -> dict[str, Any]:
    """The last reduction is open; rank 3 has not launched it."""
    lines = [{"name": f"function_{i}", "filename": f"/opt/job/file_{i}.py", "line": 10 * i} for i in range(frames + 8)]
    groups = {
        "0": ("default_pg", list(range(ranks))),
        "1": ("TENSOR_MODEL_PARALLEL_GROUP", [rank - rank % 8 + i for i in range(8)]),
    }
    rows: list[dict[str, Any]] = []
    slots = [0, 0]
    for i in range(entries - (rank == 3)):
        number = 0 if i % 4 == 3 or i == entries - 1 else 1
        name, (description, _) = list(groups.items())[number]
        slots[number] += 1
        ended = i < entries - 1
        size = 4096 * (1 + i % 8)
        created = START_NS + i * 1_000_000 + rank
        rows.append(
            {
                "frames": [lines[(i + k) % len(lines)] for k in range(frames)],
                "record_id": i, "pg_id": number, "process_group": (name, description), "thread_name": "pt_autograd_0",
                "thread_id": "23437656749760", "collective_seq_id": slots[number], "p2p_seq_id": 0,
                "op_id": slots[number], "profiling_name": f"nccl:{CALLS[i % 4]}", "time_created_ns": created,
                "input_sizes": [[size, 1, 5120]], "input_dtypes": ["BFloat16"], "output_sizes": [[size, 1, 5120]],
                "output_dtypes": ["BFloat16"], "state": "completed" if ended else "scheduled",
                "time_discovered_started_ns": None, "time_discovered_completed_ns": created + 500 if ended else None,
                "retired": ended, "timeout_ms": 600_000, "is_p2p": False,
            }
        )  # fmt: skip
    status = {
        str(number): {
            "last_enqueued_collective": slots[number],
            "last_started_collective": -1,
            "last_completed_collective": slots[number] - (number == 0 and rank != 3),
        }
        for number in (0, 1)
    }
    config = {name: {"name": name, "desc": d, "ranks": str(members)} for name, (d, members) in groups.items()}
    return {
        "version": "2.10", "comm_lib_version": "2.27.5", "pg_config": config, "pg_status": status, "entries": rows,
    }  # fmt: skip


def write(directory: Path, ranks: int, entries: int, frames: int) -> int:
    """Bytes written."""
    total = 0
    for rank in range(ranks):
        data = pickle.dumps(record(rank, ranks, entries, frames), 2)
        total += directory.joinpath(f"nccl_trace_rank_{rank}").write_bytes(data)
    return total


def read(directory: str) -> dict[str, float]:
    """In this process."""
    before = time.perf_counter()
    records, unread = read_flight_records(directory)
    reading = analyze_collectives(records, unread)
    seconds = time.perf_counter() - before
    assert reading.culprits == (3,), reading.why
    assert not unread, unread[:3]
    own, child = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    child_mb = child.ru_maxrss / 1000
    # Not `ru_maxrss`: that of a new process begins at what started it.
    own_mb = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1000
    return {
        "seconds": seconds,
        "processor_seconds": sum(each.ru_utime + each.ru_stime for each in (own, child)),
        "own_mb": own_mb,
        "child_mb": child_mb,
        "mb": own_mb + READER_PROCESSES * child_mb,
    }


def measure(ranks: int, entries: int = 2000, frames: int = 5) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        size = write(Path(directory), ranks, entries, frames)
        command = [sys.executable, "-m", "tests.benchmarks.diagnose", "--read", directory]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {**json.loads(said), "file_mb": size / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=5)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        sys.stdout.write(json.dumps(read(asked.read)))
        return 0
    missed = False
    for ranks in asked.ranks:
        cost = measure(ranks, asked.entries, asked.frames)
        seconds, megabytes = TARGETS.get(ranks, (float("inf"), float("inf")))
        missed |= cost["processor_seconds"] > seconds or cost["mb"] > megabytes
        sys.stdout.write(
            f"{ranks} ranks x {asked.entries} entries, {cost['file_mb']:.0f} MB of files: diagnosed in "
            f"{cost['seconds']:.2f} s, {cost['processor_seconds']:.2f} s of processor (target {seconds:g}), "
            f"{cost['mb']:.0f} MB (target {megabytes:g}): "
            f"{cost['own_mb']:.0f} and {cost['child_mb']:.0f} for each reading process\n"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
