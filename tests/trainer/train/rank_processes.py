"""Runs a function on real ranks: one process each, connected by gloo on loopback."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.tools import DEADLINE_SECONDS
from tests.trainer.preloaded_processes import preloaded_context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` in each of `world` processes, with torchrun's environment; results by rank.

    The function must be importable, and its result picklable. Raises RuntimeError with the traceback of a
    rank that raised.
    """
    context, port = preloaded_context(), free_port()
    processes, ends = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = context.Process(target=_child, args=(theirs, environment, function, arguments))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        answers = [_answer(rank, end) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return answers


def _answer(rank: int, end: Connection) -> Any:
    if not end.poll(DEADLINE_SECONDS):
        raise RuntimeError(f"rank {rank} gave no answer in {DEADLINE_SECONDS:.0f} s")
    try:
        good, value = end.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended without an answer") from None
    if not good:
        raise RuntimeError(f"rank {rank}:\n{value}")
    return value


def _child(end: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)  # as torchrun does by OMP_NUM_THREADS
    os.environ.update(environment)
    try:
        answer = (True, function(*arguments))
    except BaseException:  # noqa: BLE001 - the test process shows it
        answer = (False, traceback.format_exc())
    end.send(answer)
