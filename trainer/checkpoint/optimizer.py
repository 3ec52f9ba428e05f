"""Optimizer state for an exact resume: each rank's shards of float32 parameters and AdamW's moments, bit for bit.

One file per rank, written without a collective; so it can only be resumed with the same number of ranks. The names in
the file are a kind, a dot, and the parameter: `master.lm_head.weight` (the float32 parameter itself),
`exp_avg.lm_head.weight`, `step.lm_head.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from wattwatch.trainer.checkpoint.complete import START_FROM_WEIGHTS, optimizer_file, read_completion
from wattwatch.trainer.checkpoint.gather import local_shard
from wattwatch.trainer.checkpoint.safetensors_writer import DTYPE_NAMES, TensorSpec, host_bytes, safetensors_layout
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count

MASTER: Final = "master"  # the float32 parameter: the checkpoint's weights are bfloat16 and have lost its low bits


def optimizer_file_chunks(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int
) -> Iterator[bytes | memoryview]:
    """The bytes of the file of `rank`, tensor by tensor: each is copied to the host only when it is written."""
    tensors = _local_tensors(model, optimizer)
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    layout = safetensors_layout(specs, {"format": "pt", "rank": str(rank), "world": str(world)})
    yield layout.header
    for spec in layout.tensors:
        yield host_bytes(tensors[spec.name])


@torch.no_grad()
def load_optimizer_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int
) -> None:
    """Restores parameters and optimizer state of `rank` as they were when `directory` was saved. Not a collective.

    `model` must be sharded already, over the same world. Raises UserError for another world or another model, and for a
    checkpoint without optimizer state; model and optimizer are then unchanged.
    """
    completion = read_completion(directory)
    advice = f"use the settings of the run that saved this checkpoint, or, {START_FROM_WEIGHTS}"
    if not completion.optimizer:
        raise UserError(f"{directory} was saved without optimizer state, so only its weights can be loaded")
    if completion.world != world:
        raise UserError(
            f"{directory} was saved by {format_count(completion.world, 'rank')}, but this job has {world}; {advice}"
        )
    path = directory / optimizer_file(rank)
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            if mismatch := _mismatch(file, {name: local_shard(parameter) for name, parameter in parameters.items()}):
                raise UserError(f"{path}: {mismatch}; {advice}")
            _restore_state(file, parameters, optimizer)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: {error}; resume from another checkpoint") from None


def _restore_state(file: Any, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """One tensor after the other, so that the host never holds the whole file."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    # What a step before the resume may have left; nothing of it belongs to the checkpoint.
    optimizer.state.clear()
    for key in file.keys():  # noqa: SIM118  # safe_open is not a mapping
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
        # Sorted: the order in memory is another one after a resume, and the same state must give the same file.
        for kind, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                found[f"{kind}.{name}"] = local_shard(value)
    return found


def _mismatch(file: Any, shards: dict[str, torch.Tensor]) -> str:
    """The first difference between file and model, from the header alone; "" if they fit."""
    keys = set(file.keys())
    if missing := [name for name in shards if f"{MASTER}.{name}" not in keys]:
        return f"the file has no tensor {missing[0]}"
    for key in sorted(keys):
        kind, _, name = key.partition(".")
        if name not in shards:
            return f"the file has tensor {name}, which the model does not have"
        saved, shard = file.get_slice(key), shards[name]
        shape = tuple(saved.get_shape())
        if shape != tuple(shard.shape) and (shape or kind == MASTER):  # AdamW's step count has no shape
            return f"tensor {name} has shape {shape} in the file, but {tuple(shard.shape)} in this rank's shard"
        if kind == MASTER and saved.get_dtype() != DTYPE_NAMES[shard.dtype]:
            return (
                f"tensor {name} has type {saved.get_dtype()} in the file, but {DTYPE_NAMES[shard.dtype]} in the model"
            )
    return ""


def _as_optimizer_state(parameter: torch.Tensor, tensor: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The value as the optimizer itself would hold it for `parameter`."""
    if not tensor.dim() and parameter.dim():  # a step count: on the device only for kernels that read it there
        return tensor.to(parameter.device if group.get("fused") or group.get("capturable") else "cpu")
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,  # would be a collective
        # The last ranks' shards may be smaller, so the whole shape cannot be computed from this rank's.
        shape=parameter.shape,
        stride=parameter.stride(),
    )
