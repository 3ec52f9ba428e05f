"""The training loop: steps, log lines, saves, stops. Every decision in it is the same on all ranks, or they hang."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wattwatch.trainer.settings import JobSettings, TrainSettings
from wattwatch.trainer.train.batches import BatchReader
from wattwatch.trainer.train.evenfix import StepPlan
from wattwatch.trainer.train.heartbeat import HeartbeatWriter, RankPhase
from wattwatch.trainer.train.meter import ThroughputMeter
from wattwatch.trainer.train.process_groups import RankInfo, barrier
from wattwatch.trainer.train.step import StepResult, is_finite, run_step
from wattwatch.trainer.train.stopping import StopListener, StopRequest

log = logging.getLogger("wattwatch.train")


class TrainingStopped(Exception):
    """Stopped on request, before the last step. The message says by whom, and what was saved."""


class NonFiniteLoss(Exception):
    """The loss or the gradient is NaN or infinite. That step changed nothing, and nothing of it is saved."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that the loop works with."""

    settings: JobSettings
    rank_info: RankInfo
    device: torch.device
    plan: StepPlan
    model: Any
    optimizer: torch.optim.Optimizer
    batches: BatchReader
    meter: ThroughputMeter
    heartbeat: HeartbeatWriter
    stop_listener: StopListener
    save: Callable[[int], None]  # takes the number of steps done; called on all ranks together
    tokens_per_step: int  # over all ranks
    first_step: int = 0  # steps done before this attempt
    warm_from: int = 0  # the step at which the optimizer's moments began


def train(job: TrainingJob) -> int:
    """Trains from `first_step` to the last step; returns the number of steps done.

    Raises TrainingStopped, NonFiniteLoss, and what a collective or a save raises.
    """
    plan, save_every = job.plan, job.settings.checkpoint.save_every
    for step in range(job.first_step, plan.steps):
        rate = learning_rate(job.settings.train, step, plan.steps, job.warm_from)
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        result = take_step(job, step)
        done = step + 1
        if done % job.settings.train.log_every == 0 or done in (job.first_step + 1, plan.steps):
            log_step(job, done, result, rate)
        # Depends on the plan and on the summed stop requests only, which are the same on all ranks.
        is_saved = done % save_every == 0 or plan.ends_epoch(done) or result.request is StopRequest.SAVE
        if is_saved:
            save_checkpoint(job, done)
        if result.request and done < plan.steps:
            state = "and saved" if is_saved else "but not saved, so the steps since the last save are lost"
            by = job.stop_listener.why or "through another rank"
            raise TrainingStopped(f"asked to stop ({by}); step {done:,} is done {state}")
    return plan.steps


def take_step(job: TrainingJob, step: int) -> StepResult:
    """One step and its heartbeats. Raises NonFiniteLoss on all ranks alike: loss and norm are sums over all."""
    left = (job.plan.steps - step) * job.plan.blocks_per_step
    job.heartbeat.update(RankPhase.TRAIN, step, micro=0, blocks_left=left)
    # For dropout, if the model has any: a step that is repeated after a resume draws the same random numbers.
    torch.manual_seed(hash((job.settings.train.seed, step, job.rank_info.rank)))
    result = run_step(
        job.model, job.optimizer, job.batches, step, job.settings.train,
        job.stop_listener.request, job.device, on_micro=lambda done: job.heartbeat.update(micro=done),
    )  # fmt: skip
    if not is_finite(result.loss, result.grad_norm):
        job.heartbeat.update(loss=result.loss)
        raise NonFiniteLoss(
            f"step {step + 1:,}: the loss is {result.loss}, and the gradient norm is {result.grad_norm}; this step "
            "was not saved. Check the data of this step, or lower learning_rate"
        )
    job.heartbeat.update(step=step + 1, loss=result.loss, blocks_left=left - job.plan.blocks_per_step, micro=0)
    job.meter.step(job.tokens_per_step, result.data_wait_seconds)
    return result


def log_step(job: TrainingJob, done: int, result: StepResult, rate: float) -> None:
    """The log line of a step, on rank 0. The throughput goes into every rank's heartbeat too.

    The watcher reads this format, see `wattwatch_train` in collectors/progress_formats.toml.
    """
    throughput = job.meter.throughput()
    line = f"step={done}/{job.plan.steps} loss={result.loss:.4f} grad_norm={result.grad_norm:.3f} lr={rate:.2e}"
    if throughput:
        job.heartbeat.update(tokens_per_second=throughput.tokens_per_second, data_wait_ms=throughput.data_wait_ms)
        line += f" tok_s={throughput.tokens_per_second:.0f}"
        line += "" if throughput.mfu is None else f" mfu={throughput.mfu:.1%}"
        line += f" data_wait_ms={throughput.data_wait_ms:.1f}"
    if job.rank_info.rank == 0:
        log.info("%s", line)


def save_checkpoint(job: TrainingJob, done: int) -> None:
    """Barrier first, save second: a rank that hangs in the step is found under the timeout of a step.

    Without the barrier the others would wait for it in the first collective of the save, under its longer timeout.
    """
    job.heartbeat.update(RankPhase.BARRIER, done)
    barrier(job.device)
    job.heartbeat.update(RankPhase.SAVE, done)
    job.save(done)
    job.meter.restart()


def learning_rate(settings: TrainSettings, step: int, steps: int, warm_from: int = 0) -> float:
    """Linear warm-up, then a cosine over the steps that all ranks take, for step number `step` (from 0) of `steps`.

    `warm_from` is the step from which the optimizer's moments are new: after a resume without optimizer state the
    warm-up is repeated there, and then meets the cosine at its usual place: AdamW's moments are estimates, unreliable
    in their first steps.
    """
    warmup = min(settings.warmup_steps, steps)
    top, final = settings.learning_rate, settings.learning_rate * settings.final_learning_rate_share
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = final + (top - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    since = step - warm_from
    return cosine * (since + 1) / warmup if since < warmup else cosine
