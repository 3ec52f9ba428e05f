"""One optimizer step: the same collectives in the same order on every rank, whatever its data.

    all_reduce(tokens, stop requests)           training group
    for each micro-step: gather, forward, gather, backward, reduce_scatter (FSDP, each layer)
    all_reduce(norm of the gradient), all_reduce(loss)

The loss of a step is the mean over all target tokens of all ranks: every micro-step adds its sum of token losses,
scaled by world / tokens because FSDP averages over ranks. Means of means weigh a token by the company it keeps
(transformers#34191). Gradients are reduced at every micro-step, as in the paper: unsharded ones of a 32 B model would
take 131 GB more a GPU. Where they fit, `gather = "step"` holds weights and gradients whole for a step, and issues one
gather and one reduction a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from wattwatch.trainer.settings import GatherMode, TrainSettings
from wattwatch.trainer.train.batches import IGNORE_INDEX, BatchReader, MicroBatch
from wattwatch.trainer.train.stopping import StopRequest


@dataclass(frozen=True, slots=True)
class StepResult:
    """The same on all ranks, but for the wait."""

    loss: float  # mean over the target tokens of all ranks
    grad_norm: float  # before clipping
    tokens: int  # targets, over all ranks
    request: StopRequest  # the strongest of any rank when the step began
    data_wait_seconds: float  # of this rank


def token_loss(model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
    """The sum over targets of their cross entropy, in float32, with its graph."""
    ids = batch.ids.to(device, non_blocking=True)
    # None, where nothing begins anew inside: given any, the model looks on the device whether something does.
    positions = None if batch.positions is None else batch.positions.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def run_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: BatchReader,
    step: int,
    settings: TrainSettings,
    request: StopRequest,
    device: torch.device,
    on_micro: Callable[[int], None] | None = None,
) -> StepResult:
    """Step number `step`, from 0, at the learning rate that the optimizer's groups hold.

    `request` is what this rank was asked; `on_micro(n)` is told of each micro-step done. The host waits for the device
    once, at the end.
    """
    predicted = batches.predicted(step)
    agreed = torch.tensor([predicted, *request.votes()], dtype=torch.float64, device=device)
    dist.all_reduce(agreed)
    scale = dist.get_world_size() / agreed[0].clamp(min=1)
    summed = torch.zeros((), dtype=torch.float64, device=device)
    waited = 0.0
    for micro in range(batches.accumulation):
        begun = time.perf_counter()
        batch = batches.read(step, micro)
        waited += time.perf_counter() - begun
        if settings.gather == GatherMode.STEP:
            keep_unsharded_until(model, last=micro == batches.accumulation - 1)
        loss = token_loss(model, batch, device)
        (loss * scale.to(loss.dtype)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        summed += loss.detach()
        if on_micro:
            on_micro(micro + 1)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = full_value(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if settings.clip_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, settings.clip_norm, norm)
    dist.all_reduce(summed)
    loss_value = float(summed / agreed[0].clamp(min=1))
    norm_value = float(norm)
    if is_finite(loss_value, norm_value):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tokens, *votes = (int(value) for value in agreed.tolist())
    return StepResult(loss_value, norm_value, tokens, StopRequest.of(votes), waited)


def keep_unsharded_until(model: Any, last: bool) -> None:
    """Whole weights and gradients stay on this rank until the last backward of a step."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


def is_finite(*values: float) -> bool:
    return all(value - value == 0 for value in values)


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded value on every rank: one all_reduce for a norm."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
