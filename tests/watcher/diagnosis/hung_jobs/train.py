"""One rank of a small job that hangs on purpose: `train.py RUN RANK WORLD KIND STEPS`. CPU and gloo; see runner.py."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from wattwatch.trainer.run_directory import RunDirectory
from wattwatch.trainer.train import diagnostics
from wattwatch.trainer.train.diagnostics import worker_socket, write_flight_record
from wattwatch.trainer.train.heartbeat import HeartbeatWriter, RankPhase

GRADIENTS = 64
LONG_SECONDS = 3600.0


def reduce_gradients(size: int = GRADIENTS) -> None:
    dist.all_reduce(torch.ones(size))


def gather_parameters() -> None:
    dist.all_gather([torch.zeros(GRADIENTS) for _ in range(dist.get_world_size())], torch.ones(GRADIENTS))


def save_checkpoint(heartbeat: HeartbeatWriter) -> None:
    heartbeat.update(RankPhase.BARRIER)
    dist.barrier()


def load_batch() -> None:
    queue.Queue[int]().get()  # a loader that never delivers


def tokenize() -> None:
    while True:
        sum(range(100))


def tokenize_in_one_call() -> None:
    assert "" in itertools.repeat("token")  # C code that neither ends nor lets another thread run


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_shard() -> None:
    raise ValueError("shard 7 holds no tokens")


def keep_alive_after_error() -> None:
    """A thread that is no daemon: the process of a rank that raised stays."""
    threading.Thread(target=time.sleep, args=(LONG_SECONDS,), name="upload").start()


def hang(kind: str, rank: int, heartbeat: HeartbeatWriter) -> None:
    """The step at which it happens."""
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)] if kind == "crossed_groups" else []
    odd: dict[tuple[str, int], Callable[[], None]] = {
        ("early_end", 3): lambda: save_checkpoint(heartbeat),
        ("different_collective", 1): gather_parameters,
        ("size_mismatch", 2): lambda: reduce_gradients(GRADIENTS // 4),
        ("waits_for_data", 3): load_batch,
        ("endless_loop", 2): tokenize,
        ("endless_call", 2): tokenize_in_one_call,
        ("stopped", 1): stop_itself,
        ("raised", 2): read_shard,
    }
    if groups:
        for group in groups if rank < 2 else reversed(groups):
            dist.all_reduce(torch.ones(GRADIENTS), group=group)
    odd.get((kind, rank), reduce_gradients)()


def train(run_path: str, rank: int, world: int, kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    # The product gives up early, because the file system may hang; here only the CPU is busy.
    mock.patch.object(diagnostics, "DUMP_SECONDS", LONG_SECONDS).start()
    run = Path(run_path)
    directory = RunDirectory(run)
    with (
        HeartbeatWriter(directory, run=run.name, rank=rank, world=world, attempt=1, steps=100) as heartbeat,
        worker_socket(directory, rank, print),
    ):
        dist.init_process_group(
            "gloo", f"file://{run}/store", timedelta(seconds=LONG_SECONDS), rank=rank, world_size=world
        )
        for step in range(1, steps + 1):
            reduce_gradients()
            heartbeat.update(RankPhase.TRAIN, step, tokens_per_second=1000.0, data_wait_ms=1.0)
        time.sleep(0.1)  # the heartbeat's thread writes the last step, also where it will not run again
        if kind == "raised" and rank == 2:
            keep_alive_after_error()
        try:
            hang(kind, rank, heartbeat)
        except RuntimeError:  # a collective that failed, because the other end of it has gone
            write_flight_record(directory, 1, rank, print)
            raise


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
