"""What an exact resume needs of a rank: its shards of the float32 masters and of the optimizer's state, bit for bit.

One file a rank, without a collective, so that it belongs to one world size. Names in the file: what it is, a dot, the
parameter: `master.lm_head.weight`, `exp_avg.lm_head.weight`, `step.lm_head.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from wattwatch.trainer.checkpoint.complete import optimizer_file, read_completion
from wattwatch.trainer.checkpoint.gather import local_shard
from wattwatch.trainer.checkpoint.safetensors_writer import DTYPE_NAMES, TensorSpec, host_bytes, safetensors_layout
from wattwatch.trainer.errors import UserError

MASTER: Final = "master"


def optimizer_file_chunks(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int
) -> Iterator[bytes | memoryview]:
    """The bytes of the file of `rank`, one tensor after the other: each is copied to the host when its turn comes."""
    tensors = _local_tensors(model, optimizer)
    facts = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    content = safetensors_layout(facts, {"format": "pt", "rank": str(rank), "world": str(world)})
    yield content.header
    for tensor in content.tensors:
        yield host_bytes(tensors[tensor.name])


@torch.no_grad()
def load_optimizer_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int
) -> None:
    """Puts masters and state of `rank` back as they were when `directory` was saved. No collective.

    `model` is sharded already, over the same world. Raises Refusal for another world or another model, and for a
    checkpoint without optimizer; model and optimizer are then untouched.
    """
    completion = read_completion(directory)
    advice = "resume with weights only, or as it was saved"
    if not completion.optimizer:
        raise UserError(f"{directory}: saved without the optimizer; resume with weights only")
    if completion.world != world:
        raise UserError(f"{directory}: saved by {completion.world} ranks, this job has {world}; {advice}")
    path = directory / optimizer_file(rank)
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            if wrong := _mismatch(file, {name: local_shard(parameter) for name, parameter in parameters.items()}):
                raise UserError(f"{path}: {wrong}; {advice}")
            _restore_state(file, parameters, optimizer)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: {error}; resume from another checkpoint") from None


def _restore_state(file: Any, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """One tensor after the other, so that the host never holds the file."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for key in file.keys():  # noqa: SIM118  # safe_open is no mapping
        kind, _, name = key.partition(".")
        parameter = parameters[name]
        if kind == MASTER:
            local_shard(parameter).copy_(file.get_tensor(key))
        else:
            optimizer.state[parameter][kind] = _as_optimizer_state(parameter, file.get_tensor(key), groups[parameter])


def _local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"{MASTER}.{name}"] = local_shard(parameter)
        for kind, value in sorted(optimizer.state.get(parameter, {}).items()):  # the order in memory follows history
            if isinstance(value, torch.Tensor):
                found[f"{kind}.{name}"] = local_shard(value)
    return found


def _mismatch(file: Any, shards: dict[str, torch.Tensor]) -> str:
    """What the file and the model do not share, from the header alone; "" where they fit."""
    keys = set(file.keys())
    if absent := [name for name in shards if f"{MASTER}.{name}" not in keys]:
        return f"has no {absent[0]}"
    for key in sorted(keys):
        kind, _, name = key.partition(".")
        if name not in shards:
            return f"holds {name}, which the model has not"
        saved, shard = file.get_slice(key), shards[name]
        shape = tuple(saved.get_shape())
        if shape != tuple(shard.shape) and (shape or kind == MASTER):  # a count of steps has no shape
            return f"holds {shape} of {name}, this rank of the model {tuple(shard.shape)}"
        if kind == MASTER and saved.get_dtype() != DTYPE_NAMES[shard.dtype]:
            return f"holds {name} as {saved.get_dtype()}, the model as {DTYPE_NAMES[shard.dtype]}"
    return ""


def _as_optimizer_state(parameter: torch.Tensor, tensor: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A value of the state as the optimizer itself would hold it for `parameter`."""
    if not tensor.dim() and parameter.dim():  # a step count; on the device only where kernels read it there
        return tensor.to(parameter.device if group.get("fused") or group.get("capturable") else "cpu")
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
