"""The tensors of a sharded model, whole, one after the other, on the one rank that writes them.

Every rank issues the same all_gathers in the same order, on the save's own process group, even if its files failed.
Not DTensor.full_tensor: it uses the training group, and allocates the whole tensor on every rank.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from wattwatch.trainer.checkpoint.safetensors_writer import TensorSpec
from wattwatch.trainer.errors import UserError

SAVED_DTYPE: Final = torch.bfloat16
# Received at once, on the device. Chosen: large enough for full bandwidth, small beside the memory of any GPU.
SCRATCH_BYTES: Final = 256 << 20


def tensors_to_save(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once however many names it has, and the buffers that are part of state_dict."""
    # Before named_parameters: state_dict also reshards parameters that a forward pass has left unsharded.
    state = set(model.state_dict(keep_vars=True))
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found |= {name: buffer for name, buffer in model.named_buffers() if name in state}
    return found


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or all of a tensor that is not sharded. Shares its memory and is outside of any graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def find_non_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor whose shard on this rank contains NaN or infinity."""
    for name, tensor in tensors.items():
        shard = local_shard(tensor)
        if shard.is_floating_point() and not bool(torch.isfinite(shard).all()):
            return name
    return None


def describe_tensors(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    """The tensors as they will be saved. Raises UserError for a sharding that TensorGatherer does not undo."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tuple(tensor.placements) != (Shard(0),):
            raise UserError(
                f"tensor {name} cannot be saved: it is sharded as {tensor.placements}, but a sharded tensor can be "
                "saved only if it is sharded along its first dimension"
            )
    return [TensorSpec(name, tuple(tensor.shape), _saved_dtype(tensor)) for name, tensor in tensors.items()]


def _saved_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Parameters in bfloat16; buffers unchanged, since a model may need the precision in which it keeps them."""
    is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return SAVED_DTYPE if is_weight else tensor.dtype


class TensorGatherer:
    """Gathers tensors through two scratch tensors of limited size."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, scratch_bytes: int) -> None:
        """Allocates at most SCRATCH_BYTES. Raises RuntimeError if the device has no memory left."""
        self.group = group
        self.world = group.size()
        self.piece = max(1, min(scratch_bytes, SCRATCH_BYTES) // SAVED_DTYPE.itemsize // self.world)
        self.sent = torch.zeros(self.piece, dtype=SAVED_DTYPE, device=device)
        self.received = torch.empty(self.piece * self.world, dtype=SAVED_DTYPE, device=device)

    @torch.no_grad()
    def gather(self, tensor: torch.Tensor, into: torch.Tensor | None) -> None:
        """Copies all of `tensor`, flat and cast, into `into` on the host. None on ranks that only take part."""
        if not isinstance(tensor, DTensor):
            if into is not None:
                into.copy_(tensor.detach().reshape(-1))
            return
        local = tensor.to_local().reshape(-1)
        # FSDP2 shards like torch.chunk: ceil(rows / world) rows on each rank, and fewer or none on the last ones. So
        # the whole is the shards one after the other, each padded to `span`, and cut off at the end.
        rows = math.ceil(tensor.shape[0] / self.world)
        span = rows * math.prod(tensor.shape[1:])
        for begin in range(0, span, self.piece):
            count = min(self.piece, span - begin)
            part = local[begin : begin + count]
            sent, received = self.sent[:count], self.received[: count * self.world]
            # The last ranks send less than `count`; what is behind it in the scratch tensor is cut off by the receiver.
            sent[: part.numel()].copy_(part)
            dist.all_gather_single(received, sent, group=self.group)
            if into is not None:
                self._place(received, into, begin, count, span)

    def _place(self, received: torch.Tensor, into: torch.Tensor, begin: int, count: int, span: int) -> None:
        if count == span:  # in one piece, so it is already in order
            into.copy_(received[: into.numel()])
            return
        for rank in range(self.world):
            target = into[rank * span + begin : rank * span + begin + count]
            target.copy_(received[rank * count : rank * count + target.numel()])
