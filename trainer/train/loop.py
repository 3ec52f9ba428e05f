"""The loop: steps, lines, saves, stops. Every decision in it is the same on all ranks, or they part and hang."""

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
    """Ended on request, before the work was done; the text says whose, and what was saved."""


class NonFiniteLoss(Exception):
    """A loss or a gradient that is no number: nothing was changed by it, and nothing is saved."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that the loop works with, ready."""

    settings: JobSettings
    place: RankInfo
    device: torch.device
    plan: StepPlan
    model: Any
    optimizer: torch.optim.Optimizer
    batches: BatchReader
    meter: ThroughputMeter
    heartbeat: HeartbeatWriter
    stopping: StopListener
    save: Callable[[int], None]  # with the steps done, on all ranks together
    tokens_per_step: int  # over all ranks
    first_step: int = 0  # steps done before
    warm_from: int = 0  # where the optimizer's moments began


def train(job: TrainingJob) -> int:
    """From `first_step` to the end; steps done. Raises Stopped, NotFinite, and what a collective or a save raises."""
    plan, every = job.plan, job.settings.checkpoint.save_every
    for step in range(job.first_step, plan.steps):
        rate = learning_rate(job.settings.train, step, plan.steps, job.warm_from)
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        result = take_step(job, step)
        done = step + 1
        if done % job.settings.train.log_every == 0 or done in (job.first_step + 1, plan.steps):
            log_step(job, done, result, rate)
        saves = done % every == 0 or plan.ends_epoch(done)
        if saves or result.request is StopRequest.SAVE:
            save_checkpoint(job, done)
        if result.request and done < plan.steps:
            kept = (
                "its state is saved"
                if saves or result.request is StopRequest.SAVE
                else "steps since the last save are lost"
            )
            raise TrainingStopped(
                f"asked to stop ({job.stopping.why or 'another rank was'}); step {done:,} is done, {kept}"
            )
    return plan.steps


def take_step(job: TrainingJob, step: int) -> StepResult:
    """One step and its heartbeats. Raises NotFinite on all ranks alike: loss and norm are sums over all."""
    job.heartbeat.beat(RankPhase.TRAIN, step, micro=0, blocks_left=(job.plan.steps - step) * job.plan.blocks_per_step)
    # Of dropout, where a model has any: a step draws the same however often it is begun anew.
    torch.manual_seed(hash((job.settings.train.seed, step, job.place.rank)))
    result = run_step(
        job.model, job.optimizer, job.batches, step, job.settings.train,
        job.stopping.request, job.device, on_micro=_report_micro_step(job.heartbeat),
    )  # fmt: skip
    if not is_finite(result.loss, result.grad_norm):
        job.heartbeat.beat(loss=result.loss)
        raise NonFiniteLoss(
            f"step {step + 1:,}: loss {result.loss}, norm of the gradient {result.grad_norm}; nothing was saved of it. "
            "Look at its blocks, or lower learning_rate"
        )
    left = (job.plan.steps - step - 1) * job.plan.blocks_per_step
    job.heartbeat.beat(step=step + 1, loss=result.loss, blocks_left=left, micro=0)
    job.meter.step(job.tokens_per_step, result.data_wait_seconds)
    return result


def _report_micro_step(heartbeat: HeartbeatWriter) -> Callable[[int], None]:
    return lambda done: heartbeat.beat(micro=done)


def log_step(job: TrainingJob, done: int, result: StepResult, rate: float) -> None:
    """The line of a step; the pace goes into the heartbeat too."""
    pace = job.meter.pace()
    line = f"step={done}/{job.plan.steps} loss={result.loss:.4f} grad_norm={result.grad_norm:.3f} lr={rate:.2e}"
    if pace:
        job.heartbeat.beat(tokens_per_second=pace.tokens_per_second, data_wait_ms=pace.data_wait_ms)
        line += f" tok_s={pace.tokens_per_second:.0f}"
        line += "" if pace.mfu is None else f" mfu={pace.mfu:.1%}"
        line += f" data_wait_ms={pace.data_wait_ms:.1f}"
    if job.place.rank == 0:
        log.info("%s", line)


def save_checkpoint(job: TrainingJob, done: int) -> None:
    """All ranks leave the step under its own short timeout; then they save under the long one."""
    job.heartbeat.beat(RankPhase.BARRIER, done)
    barrier(job.device)
    job.heartbeat.beat(RankPhase.SAVE, done)
    job.save(done)
    job.meter.restart()


# The learning rate: a warm-up, then a cosine over the steps that all ranks take.


def learning_rate(settings: TrainSettings, step: int, steps: int, warm_from: int = 0) -> float:
    """For the step with this number, from 0, of `steps` in all.

    `warm_from` is the step from which the optimizer's moments are new: a weights-only resume warms up again there, and
    meets the cosine where it would have been.
    """
    warmup = min(settings.warmup_steps, steps)
    top, final = settings.learning_rate, settings.learning_rate * settings.final_learning_rate_share
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = final + (top - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    since = step - warm_from
    return cosine * (since + 1) / warmup if since < warmup else cosine
