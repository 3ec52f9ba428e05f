"""Any Hugging Face decoder, sharded over all ranks before a byte of it exists.

    config.json ──► parameters on the meta device ──► fully_shard (FSDP2, each layer) ──► this rank's shards, empty
    ──► weights.py fills them from safetensors slices, or by the seed

Parameters are float32: they are the masters. Computing casts them to bfloat16 where the settings say so; gradients
are reduced in float32 and averaged over ranks.
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

from wattwatch.trainer.checkpoint.gather import local_shard
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.settings import GatherMode, Precision, TrainSettings


def empty_model(directory: Path, settings: TrainSettings, mesh: DeviceMesh, device: torch.device) -> Any:
    """The model of `directory`'s config.json, sharded, its parameters not yet filled. Raises Refusal."""
    model = build_model(directory)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(model)
    if settings.compile:
        for layer in layers:
            layer.compile()
    shard_model(model, layers, mesh, settings)
    # What to_empty() does, but for buffers: rotary frequencies are computed when a model is made, and in no file
    # (transformers#45902).
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.train()
    return model


def build_model(directory: Path) -> Any:
    """The model with its parameters on the meta device and its buffers real. Raises Refusal."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if getattr(config, "quantization_config", None):
            raise UserError(f"{directory}: a quantised model; full fine-tuning needs plain weights")
        with parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: no model can be made of its config.json: {error}") from None


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, new parameters have shape and type and no memory; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied one is registered again, and must stay the same
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as it was


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers that are gathered one by one. Raises Refusal for a model that has no such list."""
    wanted = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return list(module)
    raise UserError(f"{type(model).__name__}: no list of its {wanted} layers was found; it cannot be sharded by layer")


def shard_model(model: Any, layers: list[nn.Module], mesh: DeviceMesh, settings: TrainSettings) -> None:
    """FULL_SHARD: each layer is gathered for its own computing and freed after it, forward and backward.

    Where whole weights may stay for a step, nothing is freed before its last backward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.precision == Precision.BF16 else None, reduce_dtype=torch.float32
    )
    free = settings.gather == GatherMode.LAYER
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:  # tied ones stay together, in the root
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # needed at once, backward
    fully_shard(model, mesh=mesh, mp_policy=policy)


# A rank's shards filled: from the slices of safetensors files that are its own, or by a seed.
#
# A rank reads its rows of each tensor and no others: the model crosses the file system once, however many ranks.

WEIGHTS_INDEX: Final = "model.safetensors.index.json"
SINGLE_WEIGHTS_FILE: Final = "model.safetensors"
FLOAT_DTYPES: Final = ("F64", "F32", "BF16", "F16")


def shard_rows(shape: torch.Size, world: int, rank: int) -> slice:
    """The rows of a tensor that FSDP2 gives a rank: ceil(rows / world) each, while there are any."""
    size = -(-shape[0] // world)
    return slice(min(rank * size, shape[0]), min((rank + 1) * size, shape[0]))


def local_rows(tensor: torch.Tensor) -> slice:
    """Those of this rank; all of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0]) if tensor.dim() else slice(0, 0)
    mesh = tensor.device_mesh
    return shard_rows(tensor.shape, mesh.size(), mesh.get_local_rank())


@torch.no_grad()
def load_weights(model: nn.Module, directory: Path) -> None:
    """Fills all parameters, and those buffers that are kept in files. Raises Refusal that names file and tensor."""
    files = find_weight_files(directory)
    wanted = dict(model.named_parameters()) | persistent_buffers(model)
    if missing := sorted(wanted.keys() - files.keys()):
        raise UserError(f"{directory}: no weights for {missing[0]}" + _and_more(missing) + "; another model's files?")
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in wanted.items():
            path = files[name]
            try:
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                _copy_tensor(tensor, opened[path], name, path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: {name}: {error}") from None


def _copy_tensor(tensor: torch.Tensor, file: Any, name: str, path: Path) -> None:
    piece = file.get_slice(name)
    if tuple(piece.get_shape()) != tuple(tensor.shape):
        raise UserError(f"{path}: {name} is {tuple(piece.get_shape())}, the model's is {tuple(tensor.shape)}")
    if piece.get_dtype() not in FLOAT_DTYPES:
        raise UserError(
            f"{path}: {name} is {piece.get_dtype()}, not one of {', '.join(FLOAT_DTYPES)}: convert it first"
        )
    rows = local_rows(tensor)
    if not tensor.dim():
        local_shard(tensor).copy_(file.get_tensor(name))
    elif rows.start < rows.stop:
        local_shard(tensor).copy_(piece[rows])


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that state_dict holds: batch statistics and the like; rotary frequencies are not among them."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def find_weight_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor. Raises Refusal."""
    index = directory / WEIGHTS_INDEX
    try:
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {str(name): directory / str(file) for name, file in weight_map.items()}
        with safe_open(directory / SINGLE_WEIGHTS_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / SINGLE_WEIGHTS_FILE)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: no index of weights: {type(error).__name__}: {error}") from None
    except FileNotFoundError:
        raise UserError(
            f"{directory}: neither {WEIGHTS_INDEX} nor {SINGLE_WEIGHTS_FILE}; random_weights = true starts without"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: {error}") from None


@torch.no_grad()
def initialize_weights(model: Any, seed: int) -> None:
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
        twin = _initialized_parameters(model, module, _module_seed(seed, module_name))
        for name, parameter in own.items():
            whole, rows = twin[name], local_rows(parameter)
            local_shard(parameter).copy_(whole[rows] if whole.dim() else whole)


def _initialized_parameters(model: Any, module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
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


def _module_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int(struct.unpack("<q", digest[:8])[0])


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
