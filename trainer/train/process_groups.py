"""The process group of all ranks: gloo on CPUs, NCCL on GPUs, through the same code."""

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
MAX_REASONS_SHOWN: Final = 8  # chosen: one line of a terminal or two


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among the ranks, from the environment that torchrun sets."""

    rank: int
    world: int
    local_rank: int
    ranks_per_node: int

    @staticmethod
    def from_environment() -> RankInfo:
        """Raises UserError if no launcher started this process."""
        if missing := [name for name in LAUNCHER_VARIABLES if not os.environ.get(name)]:
            raise UserError(f"{missing[0]} is not set: start ranks with `wattwatch-train launch JOB.toml` or torchrun")
        rank, world, local_rank = (int(os.environ[name]) for name in LAUNCHER_VARIABLES[:3])
        return RankInfo(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


@contextmanager
def process_group(info: RankInfo, timeout_seconds: float) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """All ranks in one process group and one mesh. A collective that exceeds the timeout ends the job.

    On GPUs the group has both backends: NCCL for tensors on the GPU, gloo for objects and CPU tensors, such as those of
    all_gather_object, which would otherwise be copied to the GPU.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", info.local_rank) if gpu else torch.device("cpu")
    if gpu:
        # Before the group: otherwise NCCL creates contexts of all ranks of the node on GPU 0.
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        # Binds the group to the device, so that NCCL connects now and not in the first collective, where a node that
        # cannot be reached would look like a hang of that step.
        device_id=device if gpu else None,
    )
    try:
        yield init_device_mesh(device.type, (info.world,)), device
    finally:
        dist.destroy_process_group()


def refuse_on_all_ranks(reason: str | None) -> None:
    """A collective. Each rank gives its reason not to start, or None; if there is any, all raise the same UserError.

    A rank that exits alone leaves the others in their next collective until its timeout, and their messages then hide
    the reason.
    """
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    given = {rank: text for rank, text in enumerate(reasons) if text is not None}
    if not given:
        return
    texts = dict.fromkeys(given.values())
    if len(given) == len(reasons) and len(texts) == 1:
        raise UserError(next(iter(texts)))
    raise UserError("; ".join(f"rank {rank}: {text}" for rank, text in list(given.items())[:MAX_REASONS_SHOWN]))


def barrier(device: torch.device) -> None:
    """Returns when all ranks have called it."""
    # NCCL has to be told the device, or it guesses one from the rank and may choose another rank's GPU.
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
