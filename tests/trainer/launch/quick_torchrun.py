"""Like torchrun: its command line, order of events and report, without the seconds that importing torch takes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time

from tests.tools import DEADLINE_SECONDS
from wattwatch.trainer.launch.processes import terminate_with_parent
from wattwatch.trainer.launch.protocol import REPORT_VARIABLE


def main() -> None:
    terminate_with_parent()
    parser = argparse.ArgumentParser()
    for name in ("nnodes", "node-rank", "nproc-per-node", "max-restarts", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("rdzv-backend", "rdzv-id", "master-addr"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--no-python", action="store_true", required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    local, first = options.nproc_per_node, options.node_rank * options.nproc_per_node
    ranks = {}
    for rank in range(first, first + local):
        world = {"RANK": str(rank), "WORLD_SIZE": str(options.nnodes * local), "LOCAL_RANK": str(rank - first)}
        ranks[rank] = subprocess.Popen(options.program, env=os.environ | world, start_new_session=True)

    def left(_number: int, _frame: object) -> None:
        end(ranks)
        sys.exit(143)

    signal.signal(signal.SIGTERM, left)
    while any(process.poll() is None for process in ranks.values()):
        if any(process.poll() for process in ranks.values()):
            break
        time.sleep(0.02)
    failed = {rank: process for rank, process in ranks.items() if process.poll()}
    report = [
        {"rank": rank, "exit_code": process.returncode, "pid": process.pid, "time": int(time.time())}
        for rank, process in failed.items()
    ]
    end(ranks)
    if failed:
        os.write(int(os.environ[REPORT_VARIABLE]), json.dumps(report).encode())
        sys.exit(1)


def end(ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    """SIGTERM, then SIGKILL, to every rank that still runs."""
    for process in ranks.values():
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + DEADLINE_SECONDS
    for process in ranks.values():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
