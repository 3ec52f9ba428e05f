"""One optimizer step: the same collectives in the same order on every rank, whatever its data.

    all_reduce(target tokens, stop requests)           training group
    for each micro-step: all_gather, forward, all_gather, backward, reduce_scatter (FSDP, per layer)
    all_reduce(norm of the gradient), all_reduce(loss)

The loss of a step is the mean over all target tokens of all ranks: every micro-step adds the sum of its token losses,
scaled by world / tokens, because FSDP averages over ranks. A mean of means would give the tokens of short micro-batches
more weight (transformers#34191). Gradients are reduced at every micro-step, as in arXiv 2608.05944: unsharded gradients
of a 32 B model would take 131 GB more per GPU. Where they fit, `gather = "step"` keeps weights and gradients whole for
a step, with one all_gather and one reduce_scatter per layer.
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
    """The same on all ranks, except the wait."""

    loss: float  # mean over the target tokens of all ranks
    grad_norm: float  # before clipping
    tokens: int  # target tokens, over all ranks
    request: StopRequest  # the strongest of any rank when the step began
    data_wait_seconds: float  # of this rank


def token_loss(model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
    """The sum over all targets of their cross entropy, in float32, with its graph."""
    ids = batch.ids.to(device, non_blocking=True)
    # None unless records are masked: given positions, transformers inspects them on the device for a second record,
    # which makes the host wait for the device.
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
    """Step number `step`, from 0, at the learning rate that the optimizer's groups have.

    `request` is what this rank was asked; `on_micro(n)` is called when n micro-steps are done. The host waits for the
    device once, at the end.
    """
    # Token counts must be known before the first backward, since they scale every loss. The stop requests travel along:
    # so all ranks see the same ones, and none leaves the loop while another goes on.
    targets = batches.count_targets(step)
    agreed = torch.tensor([targets, *request.votes()], dtype=torch.float64, device=device)
    dist.all_reduce(agreed)
    scale = dist.get_world_size() / agreed[0].clamp(min=1)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    waited = 0.0
    for micro in range(batches.accumulation):
        begun = time.perf_counter()
        batch = batches.read(step, micro)
        waited += time.perf_counter() - begun
        if settings.gather == GatherMode.STEP:
            keep_unsharded_until(model, last=micro == batches.accumulation - 1)
        loss = token_loss(model, batch, device)
        (loss * scale.to(loss.dtype)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss_sum += loss.detach()
        if on_micro:
            on_micro(micro + 1)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = full_value(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if settings.clip_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, settings.clip_norm, norm)
    dist.all_reduce(loss_sum)
    loss_value = float(loss_sum / agreed[0].clamp(min=1))
    norm_value = float(norm)
    # Loss and norm are sums over all ranks, so all skip the update or none does. A NaN would otherwise enter AdamW's
    # moments and stay there.
    if is_finite(loss_value, norm_value):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tokens, *votes = (int(value) for value in agreed.tolist())
    return StepResult(loss_value, norm_value, tokens, StopRequest.from_votes(votes), waited)


def keep_unsharded_until(model: Any, last: bool) -> None:
    """Keeps whole weights and gradients on this rank until the last backward of a step."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


def is_finite(*values: float) -> bool:
    return all(value - value == 0 for value in values)  # NaN - NaN and inf - inf are NaN


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a sharded tensor on every rank: for a norm, one all_reduce."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
