"""Any Hugging Face decoder, sharded over all ranks before a byte of it exists.

    config.json ──► parameters on the meta device ──► fully_shard (FSDP2, each layer) ──► this rank's shards, empty
    ──► weights.py fills them from safetensors slices, or by the seed

Parameters are float32: they are the masters. Computing casts them to bfloat16 where the settings say so; gradients
are reduced in float32 and averaged over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.refusal import Refusal
from trainer.settings import Gather, Precision, TrainSettings


def empty_model(directory: Path, settings: TrainSettings, mesh: DeviceMesh, device: torch.device) -> Any:
    """The model of `directory`'s config.json, sharded, its parameters not yet filled. Raises Refusal."""
    model = described_model(directory)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(model)
    if settings.compile:
        for layer in layers:
            layer.compile()
    shard(model, layers, mesh, settings)
    # What to_empty() does, but for buffers: rotary frequencies are computed when a model is made, and in no file
    # (transformers#45902).
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.train()
    return model


def described_model(directory: Path) -> Any:
    """The model with its parameters on the meta device and its buffers real. Raises Refusal."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if getattr(config, "quantization_config", None):
            raise Refusal(f"{directory}: a quantised model; full fine-tuning needs plain weights")
        with parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{directory}: no model can be made of its config.json: {error}") from None


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
    raise Refusal(f"{type(model).__name__}: no list of its {wanted} layers was found; it cannot be sharded by layer")


def shard(model: Any, layers: list[nn.Module], mesh: DeviceMesh, settings: TrainSettings) -> None:
    """FULL_SHARD: each layer is gathered for its own computing and freed after it, forward and backward.

    Where whole weights may stay for a step, nothing is freed before its last backward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.precision == Precision.BF16 else None, reduce_dtype=torch.float32
    )
    free = settings.gather == Gather.LAYER
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:  # tied ones stay together, in the root
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # needed at once, backward
    fully_shard(model, mesh=mesh, mp_policy=policy)
