"""How many blocks every rank takes, agreed before the schedule and the loop exist (PAPER: "evenfix").

Packed shards hold unequal numbers of blocks. A rank that runs out first enters the save at the end of the epoch while
the others still reduce gradients: both wait for ever. One all_reduce of the counts, before anything depends on them,
makes that impossible. The same idea stands in axolotl's sampler and prime-rl's validation (prime-rl#2515).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.settings import Evenness


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The same on all ranks, unless evenness is off."""

    local_blocks: int  # what this rank has
    blocks: int  # what it takes from one epoch, repeating its first ones where it has fewer
    blocks_per_step: int
    epochs: int
    evenness: Evenness

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps: the blocks of a last, partial accumulation are dropped on all ranks alike."""
        return self.blocks // self.blocks_per_step

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def index(self, step: int, micro: int) -> int:
        """Which of this rank's blocks. Steps count from 0 over all epochs; nothing that came before matters."""
        within = step % self.steps_per_epoch
        return (within * self.blocks_per_step + micro) % self.local_blocks

    def ends_epoch(self, steps_done: int) -> bool:
        return steps_done > 0 and steps_done % self.steps_per_epoch == 0

    def __str__(self) -> str:
        name = "max" if self.evenness is Evenness.PAD else self.evenness
        return f"[evenfix] local={self.local_blocks:,} -> {name}={self.blocks:,}"


def agree_on_blocks(
    local_blocks: int, blocks_per_step: int, epochs: int, evenness: Evenness, device: torch.device
) -> StepPlan:
    """One all_reduce over the training group, MIN or MAX; none where evenness is off. Raises Refusal for no step."""
    blocks = local_blocks
    if evenness is not Evenness.OFF:
        counts = torch.tensor(local_blocks, dtype=torch.int64, device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN if evenness is Evenness.MIN else dist.ReduceOp.MAX)
        blocks = int(counts.item())
    if blocks < blocks_per_step:
        raise UserError(f"{blocks:,} blocks are less than the {blocks_per_step:,} of one step: pack more data")
    return StepPlan(local_blocks, blocks, blocks_per_step, epochs, evenness)
