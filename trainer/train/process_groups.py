"""The ranks' meeting: gloo on CPUs, NCCL on GPUs, by the same code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wattwatch.trainer.errors import UserError

LAUNCHER_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among the ranks, as torchrun names it in the environment."""

    rank: int
    world: int
    local_rank: int
    ranks_per_node: int

    @staticmethod
    def from_environment() -> RankInfo:
        """Raises Refusal where no launcher started this process."""
        if missing := [name for name in LAUNCHER_VARIABLES if not os.environ.get(name)]:
            raise UserError(
                f"{missing[0]} is not set: a rank is started by `wattwatch-train launch JOB.toml` or torchrun"
            )
        rank, world, local_rank = (int(os.environ[name]) for name in LAUNCHER_VARIABLES[:3])
        return RankInfo(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


@contextmanager
def process_group(place: RankInfo, timeout_seconds: float) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """All ranks in one group and one mesh. Its collectives end the job after `timeout_seconds`."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", place.local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if gpu else None,
    )
    try:
        yield init_device_mesh(device.type, (place.world,)), device
    finally:
        dist.destroy_process_group()


def refuse_on_all_ranks(trouble: str | None) -> None:
    """Each rank says what stands in its way; where anything does, all raise the same Refusal.

    A rank that refuses alone leaves the others in a collective until they are killed, and nobody reads why.
    """
    troubles: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(troubles, trouble)
    said = {rank: text for rank, text in enumerate(troubles) if text is not None}
    if not said:
        return
    texts = dict.fromkeys(said.values())
    if len(said) == len(troubles) and len(texts) == 1:
        raise UserError(next(iter(texts)))
    raise UserError("; ".join(f"rank {rank}: {text}" for rank, text in list(said.items())[:8]))


def barrier(device: torch.device) -> None:
    """All ranks have come here."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
