"""The number of blocks that every rank uses, agreed on before the schedule and the loop exist.

Packed shards have unequal numbers of blocks. A rank that runs out first enters the save at the end of the epoch while
the others still reduce gradients: both sides wait forever. One all_reduce of the counts, before anything depends on
them, makes that impossible. arXiv 2608.05944, section 5, calls it "evenfix"; axolotl's sampler and prime-rl's
validation (prime-rl#2515) do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
from wattwatch.trainer.settings import Evenness


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which blocks a rank uses in which step. The same on all ranks except `local_blocks`, unless evenness is off."""

    local_blocks: int  # what this rank has
    blocks: int  # what it uses of one epoch; if it has fewer, it repeats its first ones
    blocks_per_step: int
    epochs: int
    evenness: Evenness

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps: the blocks of a last, partial accumulation are dropped on all ranks."""
        return self.blocks // self.blocks_per_step

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def index(self, step: int, position: int) -> int:
        """The index among this rank's blocks of block `position` of a step.

        Steps count from 0 over all epochs. The result depends on nothing else, so a resumed job uses the same blocks.
        """
        step_in_epoch = step % self.steps_per_epoch
        return (step_in_epoch * self.blocks_per_step + position) % self.local_blocks

    def ends_epoch(self, steps_done: int) -> bool:
        return steps_done > 0 and steps_done % self.steps_per_epoch == 0

    def __str__(self) -> str:
        name = "max" if self.evenness is Evenness.PAD else self.evenness
        return f"[evenfix] local={self.local_blocks:,} -> {name}={self.blocks:,}"


def agree_on_blocks(
    local_blocks: int, blocks_per_step: int, epochs: int, evenness: Evenness, device: torch.device
) -> StepPlan:
    """One all_reduce over the training group, MIN or MAX; none if evenness is off.

    Raises UserError if the blocks are not enough for one step: on all ranks alike, unless evenness is off.
    """
    blocks = local_blocks
    if evenness is not Evenness.OFF:
        counts = torch.tensor(local_blocks, dtype=torch.int64, device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MIN if evenness is Evenness.MIN else dist.ReduceOp.MAX)
        blocks = int(counts.item())
    if blocks < blocks_per_step:
        raise UserError(
            f"a rank has only {format_count(blocks, 'block')} of packed data, but one step needs {blocks_per_step:,}; "
            "pack more data"
        )
    return StepPlan(local_blocks, blocks, blocks_per_step, epochs, evenness)
