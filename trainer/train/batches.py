"""A rank's blocks as tensors for the model: ids, the ids to predict, and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from wattwatch.trainer.pack.blocks import PackedBlocks
from wattwatch.trainer.train.evenfix import StepPlan

IGNORE_INDEX: Final = -100  # targets that torch's cross entropy ignores, its default


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """int64 tensors of shape (micro_batch, seq_len). `targets[i, t]` is the id after `ids[i, t]`, or IGNORE_INDEX."""

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None  # start at 0 at each record; None without a document mask: 0, 1, 2, ...


class BatchReader:
    """A micro-batch is a function of (step, micro-step): a resume at a step reads nothing before it."""

    def __init__(self, blocks: PackedBlocks, plan: StepPlan, micro_batch: int, document_mask: bool) -> None:
        self._blocks, self._plan, self._micro_batch = blocks, plan, micro_batch
        self._document_mask = document_mask
        self.accumulation = plan.blocks_per_step // micro_batch

    def block_indices(self, step: int, micro: int) -> list[int]:
        first = micro * self._micro_batch
        return [self._plan.index(step, first + row) for row in range(self._micro_batch)]

    def read(self, step: int, micro: int) -> MicroBatch:
        """The micro-batch, on the CPU."""
        indices = self.block_indices(step, micro)
        # int64 because torch's embedding and cross entropy take it; the file has int32 to be half the size.
        ids = torch.from_numpy(np.stack([self._blocks.ids(index) for index in indices]).astype(np.int64))
        targets = torch.full_like(ids, IGNORE_INDEX)
        if not self._document_mask:
            targets[:, :-1] = ids[:, 1:]
            return MicroBatch(ids, targets, None)
        positions = torch.from_numpy(np.stack([self._blocks.positions(index) for index in indices]))
        # The first id of a record cannot be predicted: with the mask, the model does not see the record before it.
        targets[:, :-1] = torch.where(positions[:, 1:] > 0, ids[:, 1:], IGNORE_INDEX)
        return MicroBatch(ids, targets, positions)

    def count_targets(self, step: int) -> int:
        """Number of target tokens of this rank in a step, without reading the blocks."""
        seq_len = self._blocks.manifest.seq_len
        if not self._document_mask:
            return self._plan.blocks_per_step * (seq_len - 1)
        targets = 0
        for position in range(self._plan.blocks_per_step):
            targets += seq_len - self._blocks.document_starts(self._plan.index(step, position)).size
        return targets
