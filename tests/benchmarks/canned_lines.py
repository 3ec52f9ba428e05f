"""Lines as the probe prints them on a node of eight B300s in training, to each of many readers once a second.

Run as a process: `python -m tests.benchmarks.canned_lines PORT`. Whoever connects gets a line at each full second. The
numbers move as real ones do (the energy counter grows, a step ends every sixth second with a heartbeat per rank), so
that a reader has all of its usual work.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import sys
import time

RUN = "/mnt/job/run"
STEP_SECONDS = 6


def gpu_row(index: int, energy_millijoules: int) -> list[object]:
    return [
        index,
        f"GPU-fb5a81b3-94e2-50d8-8daa-5dd110afde5{index}",
        f"0000000{index // 4}:{('1A', '69', 'B5', 'DB')[index % 4]}:00.0",
        "NVIDIA B300 SXM6 AC",
        random.randint(940_000, 1_040_000),
        1_100_000,
        random.randint(96, 100),
        random.randint(38, 56),
        82_000_000_000,
        288_400_343_040,
        random.randint(57, 63),
        1920,
        energy_millijoules,
        0,
        0,
        0,
    ]


def heartbeat(rank: int, step: int, wall: float) -> list[object]:
    text = {
        "v": 1, "run": "bench", "rank": rank, "world": 800, "host": "gpu", "pid": 41_001 + rank, "restart": 0,
        "phase": "train", "step": step, "steps": 38_540, "micro": 0, "blocks_left": 120, "tokens_per_second": 52958.4,
        "data_wait_ms": 4.0, "loss": 0.6885, "t_wall": wall, "t_step": wall,
    }  # fmt: skip
    return [f"{RUN}/heartbeat/rank-{rank:05d}.json", wall, json.dumps(text)]


def probe_line(sequence: int) -> bytes:
    """One line, about 1.8 KB; 5 KB when a step has ended."""
    now, wall = round(time.monotonic(), 4), round(time.time(), 4)
    energy = int(now * 1_000_000)
    line: dict[str, object] = {"v": 1, "seq": sequence, "t": now, "w": wall}
    line["gpu"] = {"src": "nvml", "t": now, "rows": [[gpu_row(index, energy)] for index in range(8)]}
    line["proc"] = [[41_001 + rank, 2455.03, "R", "python3", now, [rank]] for rank in range(8)]
    line["load"] = [8.31, 64, 0.31, 0.31, 0.31]
    line["listed"] = [[f"{RUN}/checkpoints", now]]
    if sequence % STEP_SECONDS == 0:
        line["beat"] = [heartbeat(rank, sequence // STEP_SECONDS, wall) for rank in range(8)]
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def serve(port: int) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=512) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        readers: dict[socket.socket, int] = {}
        due = float(int(time.time()) + 1)
        while True:
            for key, _ in selector.select(max(0.0, due - time.time())):
                if key.fileobj is listener:
                    reader, _ = listener.accept()
                    readers[reader] = 0
                    reader.sendall(probe_line(0))
            if time.time() >= due:
                due += 1.0
                send_round(readers)


def send_round(readers: dict[socket.socket, int]) -> None:
    for reader in list(readers):
        readers[reader] += 1
        try:
            reader.sendall(probe_line(readers[reader]))
        except OSError:
            del readers[reader]
            reader.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
