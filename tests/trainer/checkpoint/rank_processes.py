"""Real ranks: processes that share a gloo group on the loopback interface, forked from one that has torch loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.tools import DEADLINE_SECONDS
from tests.trainer.preloaded_processes import preloaded_context


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended, and what it returned."""

    exit_code: int | None
    value: Any


def run_ranks(world: int, work: Callable[..., Any], **arguments: Any) -> list[Ended]:
    """`work(rank, world, **arguments)` in each of `world` processes."""
    context = preloaded_context()
    with tempfile.TemporaryDirectory() as meeting:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_rank, args=(rank, world, f"{meeting}/store", pipe, work, arguments))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            values = [_received(ours) for ours, _ in pipes]
            for process in processes:
                process.join(DEADLINE_SECONDS)
            return [Ended(process.exitcode, value) for process, value in zip(processes, values, strict=True)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _received(pipe: Connection) -> Any:
    with pipe:
        if not pipe.poll(DEADLINE_SECONDS):
            return "this rank gave no answer"
        try:
            return pipe.recv()
        except EOFError:
            return None


def _rank(
    rank: int, world: int, store: str, pipe: Connection, work: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world)
    pipe.send(work(rank, world, **arguments))
    pipe.close()
    os._exit(0)  # without destroying groups: a peer may be dead
