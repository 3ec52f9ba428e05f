"""Any Hugging Face decoder, sharded over all ranks before memory for it is allocated, then filled.

    config.json ──► parameters on the meta device ──► fully_shard (FSDP2, each layer) ──► this rank's shards, empty
    ──► filled from slices of safetensors files, or from the seed

Parameters are float32: the optimizer updates these. Layers compute in bfloat16 if the settings say so; gradients are
reduced in float32 and averaged over ranks. No rank ever holds the whole model, neither on its GPU nor on the host.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from wattwatch.trainer.checkpoint.complete import INDEX_FILE, SINGLE_FILE
from wattwatch.trainer.checkpoint.gather import local_shard
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.settings import GatherMode, Precision, TrainSettings

FLOAT_DTYPES: Final = ("F64", "F32", "BF16", "F16")  # quantized weights need a scale that a plain copy would lose


def empty_model(directory: Path, settings: TrainSettings, mesh: DeviceMesh, device: torch.device) -> Any:
    """The model of `directory`'s config.json, sharded, with parameters allocated but not filled. Raises UserError."""
    model = build_model(directory)
    # Checkpointing and compilation before sharding: FSDP's hooks then run outside of the recomputed and compiled parts.
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(model)
    if settings.compile:
        for layer in layers:
            layer.compile()
    shard_model(model, layers, mesh, settings)
    # Like to_empty(), except for buffers: rotary frequencies are computed when a model is built and are in no file, so
    # to_empty() would leave random memory in them (transformers#45902).
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.train()
    return model


def build_model(directory: Path) -> Any:
    """The model with its parameters on the meta device, and real buffers. Raises UserError."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if getattr(config, "quantization_config", None):
            raise UserError(f"{directory}: the model is quantized, but full fine-tuning needs unquantized weights")
        with parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: its config.json does not describe a usable model: {error}") from None


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block, new parameters have a shape and a type but no memory. Buffers are computed as usual.

    `torch.device("meta")` would not do: it also puts the buffers on the meta device, and their values would be lost.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied parameter is registered twice and must stay one object
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as it was


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers, which are gathered one at a time. Raises UserError for a model without a list of its layers.

    Found by the length of the list: every model family gives it another name.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UserError(f"{type(model).__name__} cannot be sharded by layer: no list of its {count} layers was found")


def shard_model(model: Any, layers: list[nn.Module], mesh: DeviceMesh, settings: TrainSettings) -> None:
    """FULL_SHARD: each layer is gathered for its own computation and freed afterwards, in forward and backward.

    With `gather = "step"` nothing is freed before the last backward of a step.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.precision == Precision.BF16 else None,
        reduce_dtype=torch.float32,  # sums of many small bfloat16 gradients would lose their low bits
    )
    free = settings.gather == GatherMode.LAYER
    # From the inside out: each fully_shard takes the parameters that no call before it has taken, and the last call, on
    # the root, takes the rest (the final norm).
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    # Tied embeddings must be in one group, since both modules use the same parameter: they stay in the root's.
    if output is not None and output.weight is not embedding.weight:
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
        # Last in forward, first in backward: freeing it between the two would gather it twice in a row.
        fully_shard(output, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# Filling the shards. A rank reads its own rows of each tensor and no others: the model crosses the file system once,
# however many ranks there are.


def shard_rows(shape: torch.Size, world: int, rank: int) -> slice:
    """The rows of a tensor that FSDP2 gives to a rank: ceil(rows / world) each, as long as there are any."""
    size = -(-shape[0] // world)
    return slice(min(rank * size, shape[0]), min((rank + 1) * size, shape[0]))


def local_rows(tensor: torch.Tensor) -> slice:
    """The rows of this rank; all rows of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0]) if tensor.dim() else slice(0, 0)
    mesh = tensor.device_mesh
    return shard_rows(tensor.shape, mesh.size(), mesh.get_local_rank())


@torch.no_grad()
def load_weights(model: nn.Module, directory: Path) -> None:
    """Fills all parameters, and those buffers that are stored in files.

    Raises UserError that names the file and the tensor.
    """
    files = find_weight_files(directory)
    needed = dict(model.named_parameters()) | persistent_buffers(model)
    if missing := sorted(needed.keys() - files.keys()):
        raise UserError(
            f"{directory}: no weights for {missing[0]}" + _and_more(missing) + "; are these files from another model?"
        )
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in needed.items():
            path = files[name]
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                _copy_tensor(tensor, opened[path], name, path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: {name}: {error}") from None


def _copy_tensor(tensor: torch.Tensor, file: Any, name: str, path: Path) -> None:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != tuple(tensor.shape):
        raise UserError(
            f"{path}: {name} has shape {tuple(stored.get_shape())}, but the model needs {tuple(tensor.shape)}"
        )
    if stored.get_dtype() not in FLOAT_DTYPES:
        raise UserError(
            f"{path}: {name} has type {stored.get_dtype()}; convert it first to one of {', '.join(FLOAT_DTYPES)}"
        )
    rows = local_rows(tensor)
    if not tensor.dim():
        local_shard(tensor).copy_(file.get_tensor(name))
    elif rows.start < rows.stop:  # the last ranks may have no rows of a small tensor
        local_shard(tensor).copy_(stored[rows])


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are part of state_dict, such as batch statistics; rotary frequencies are not."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def find_weight_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor, by name. Raises UserError."""
    index = directory / INDEX_FILE
    try:
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {str(name): directory / str(file) for name, file in weight_map.items()}
        with safe_open(directory / SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / SINGLE_FILE)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a valid weight index file ({type(error).__name__}: {error})") from None
    except FileNotFoundError:
        raise UserError(
            f"{directory} has no {INDEX_FILE} or {SINGLE_FILE}; set train.random_weights to start with random weights"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: {error}") from None


@torch.no_grad()
def initialize_weights(model: Any, seed: int) -> None:
    """Initializes all parameters by the rules of the model's own class, to the same values on any number of ranks.

    One module at a time is initialized whole, by a generator seeded with the seed and the module's name; each rank
    keeps its rows.
    """
    done: set[int] = set()  # a tied parameter belongs to two modules
    for module_name, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in done}
        if not own:
            continue
        done |= {id(parameter) for parameter in own.values()}
        whole = _initialized_parameters(model, module, _module_seed(seed, module_name))
        for name, parameter in own.items():
            values, rows = whole[name], local_rows(parameter)
            local_shard(parameter).copy_(values[rows] if values.dim() else values)


def _initialized_parameters(model: Any, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Whole parameters of a module on the CPU, initialized in a copy of it by the model's own rules."""
    copy: nn.Module = object.__new__(type(module))  # not type(module)(): FSDP's __new__ would build a module
    copy.__dict__.update(module.__dict__)
    copy._modules = {}
    copy._parameters = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
        for name, p in module._parameters.items()
    }
    whole = {name: parameter.data for name, parameter in copy._parameters.items() if parameter is not None}
    with torch.random.fork_rng(devices=[]):  # leaves the global generator as it was
        torch.manual_seed(seed)
        for values in whole.values():  # for parameters that the model's rules do not cover
            values.fill_(1.0) if values.dim() < 2 else values.normal_(std=0.02)
        model._init_weights(copy)
    return whole


def _module_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int(struct.unpack("<q", digest[:8])[0])


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
