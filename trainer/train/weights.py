"""A rank's shards filled: from the slices of safetensors files that are its own, or by a seed.

A rank reads its rows of each tensor and no others: the model crosses the file system once, however many ranks.
"""

from __future__ import annotations

import hashlib
import json
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.checkpoint.gather import own_part
from trainer.refusal import Refusal

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
FLOATS: Final = ("F64", "F32", "BF16", "F16")


def rows_of(shape: torch.Size, world: int, rank: int) -> slice:
    """The rows of a tensor that FSDP2 gives a rank: ceil(rows / world) each, while there are any."""
    size = -(-shape[0] // world)
    return slice(min(rank * size, shape[0]), min((rank + 1) * size, shape[0]))


def own_rows(tensor: torch.Tensor) -> slice:
    """Those of this rank; all of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0]) if tensor.dim() else slice(0, 0)
    mesh = tensor.device_mesh
    return rows_of(tensor.shape, mesh.size(), mesh.get_local_rank())


@torch.no_grad()
def load_weights(model: nn.Module, directory: Path) -> None:
    """Fills all parameters, and those buffers that are kept in files. Raises Refusal that names file and tensor."""
    files = weight_files(directory)
    wanted = dict(model.named_parameters()) | kept_buffers(model)
    if missing := sorted(wanted.keys() - files.keys()):
        raise Refusal(f"{directory}: no weights for {missing[0]}" + _more(missing) + "; another model's files?")
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in wanted.items():
            path = files[name]
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                _fill(tensor, opened[path], name, path)
            except (OSError, SafetensorError) as error:
                raise Refusal(f"{path}: {name}: {error}") from None


def _fill(tensor: torch.Tensor, file: Any, name: str, path: Path) -> None:
    piece = file.get_slice(name)
    if tuple(piece.get_shape()) != tuple(tensor.shape):
        raise Refusal(f"{path}: {name} is {tuple(piece.get_shape())}, the model's is {tuple(tensor.shape)}")
    if piece.get_dtype() not in FLOATS:
        raise Refusal(f"{path}: {name} is {piece.get_dtype()}, not one of {', '.join(FLOATS)}: convert it first")
    rows = own_rows(tensor)
    if not tensor.dim():
        own_part(tensor).copy_(file.get_tensor(name))
    elif rows.start < rows.stop:
        own_part(tensor).copy_(piece[rows])


def kept_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that state_dict holds: batch statistics and the like; rotary frequencies are not among them."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def weight_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor. Raises Refusal."""
    index = directory / INDEX
    try:
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {str(name): directory / str(file) for name, file in weight_map.items()}
        with safe_open(directory / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / SINGLE)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{index}: no index of weights: {type(error).__name__}: {error}") from None
    except FileNotFoundError:
        raise Refusal(f"{directory}: neither {INDEX} nor {SINGLE}; random_weights = true starts without") from None
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{directory}: {error}") from None


@torch.no_grad()
def random_weights(model: Any, seed: int) -> None:
    """As the model's own class initialises, the same values on any number of ranks.

    A module at a time is filled whole by a generator that knows the seed and the module's name; each rank keeps its
    rows.
    """
    done: set[int] = set()
    for module_name, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in done}
        if not own:
            continue
        done |= {id(parameter) for parameter in own.values()}
        twin = _initialised(model, module, _seed_of(seed, module_name))
        for name, parameter in own.items():
            whole, rows = twin[name], own_rows(parameter)
            own_part(parameter).copy_(whole[rows] if whole.dim() else whole)


def _initialised(model: Any, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Whole parameters of a module on the CPU, filled in a twin of it by the model's own rules."""
    twin: nn.Module = object.__new__(type(module))  # not its own __new__: FSDP's would build a module
    twin.__dict__.update(module.__dict__)
    twin._modules = {}
    twin._parameters = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
        for name, p in module._parameters.items()
    }
    whole = {name: parameter.data for name, parameter in twin._parameters.items() if parameter is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for values in whole.values():  # what the model's rules leave alone
            values.fill_(1.0) if values.dim() < 2 else values.normal_(std=0.02)
        model._init_weights(twin)
    return whole


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int(struct.unpack("<q", digest[:8])[0])


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
