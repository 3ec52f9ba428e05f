"""From a job's file to a loop that is ready: gate, blocks, model, weights, agreement, refused by all or none.

gate.json ──► Blocks ──► evenfix ──► StepPlan ──► model, sharded ──► weights, or a checkpoint ──► Job
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig

from trainer.checkpoint.complete import Completion, incomplete, read_completion
from trainer.checkpoint.optimizer import load_optimizer
from trainer.checkpoint.save import Moment, Saver
from trainer.gate.saying import size_in_words
from trainer.pack.blocks import Blocks
from trainer.refusal import Refusal
from trainer.run_directory import VERSION, RunDirectory, RunRecord, publish_run
from trainer.settings import Evenness, JobFile, JobSettings, TrainSettings
from trainer.train.batches import Batches
from trainer.train.evenfix import StepPlan, agree_on_blocks
from trainer.train.gate_record import GateRecord, check_plan, check_shard, read_gate
from trainer.train.heartbeat import Heartbeat
from trainer.train.loop import Job
from trainer.train.meter import Meter, flops_per_token, peak_flops
from trainer.train.model import empty_model
from trainer.train.process_groups import Place, refuse_together
from trainer.train.stopping import Stopping
from trainer.train.weights import load_weights, random_weights

log = logging.getLogger("wattwatch.train")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the launcher says of this start."""

    number: int = 1
    gate_id: str | None = None
    resume: Path | None = None
    smoke: bool = False  # the last two steps only


@contextmanager
def together() -> Iterator[None]:
    """A Refusal of one rank within becomes that of all, after it: no collectives inside."""
    trouble = None
    try:
        yield
    except Refusal as error:
        trouble = str(error)
    refuse_together(trouble)


@dataclass(frozen=True, slots=True)
class Begun:
    """Where the steps begin."""

    step: int = 0  # steps done before
    warm_from: int = 0  # where the optimizer's moments begin
    said: str = ""  # for the log


def prepare(
    job: JobFile, attempt: Attempt, place: Place, mesh: DeviceMesh, device: torch.device, heartbeat: Heartbeat,
    stopping: Stopping,
) -> Job:  # fmt: skip
    """All that the loop works with. Raises Refusal, on all ranks."""
    settings, train, directory = job.settings, job.settings.train, RunDirectory(Path(job.settings.run))
    with together():
        gate = read_gate(directory, job, place.world, attempt.gate_id)
        blocks = Blocks(Path(settings.data), place.rank)
        check_shard(gate, blocks.manifest, place.rank)
        check_blocks(blocks, settings)
    plan = agree_on_blocks(blocks.count, settings.blocks_per_step, train.epochs, Evenness(train.evenness), device)
    log.info("%s", plan)
    tokens_per_step = settings.blocks_per_step * blocks.manifest.seq_len * place.world
    with together():
        check_plan(gate, plan)
        completion = resumed(attempt.resume, gate, plan, tokens_per_step)
        model = empty_model(Path(settings.model), train, mesh, device)
        fill(model, settings, attempt.resume)
        optimizer = new_optimizer(model, train)
        if attempt.resume and completion and completion.optimizer:
            load_optimizer(attempt.resume, model, optimizer, place.rank, place.world)
    begun = begin(completion, attempt, plan, settings)
    record = RunRecord(
        v=VERSION, run=heartbeat.run, world=place.world, nodes=gate.nodes, steps=plan.steps,
        tokens_per_step=tokens_per_step, save_every=settings.checkpoint.save_every, seq_len=blocks.manifest.seq_len,
        gate_id=gate.gate_id, attempt=attempt.number, t_wall=time.time(),
        resumed_from=attempt.resume.name if attempt.resume else None,
    )  # fmt: skip
    if place.rank == 0:
        publish_run(directory, record)
        log.info("step %d of %d, %s", begun.step, plan.steps, begun.said)
    heartbeat.beat(steps=plan.steps, step=begun.step)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    meter = Meter(flops_per_token(model, blocks.manifest.seq_len), peak and peak * place.world)
    batches = Batches(blocks, plan, train.micro_batch, train.document_mask)
    save = saving(job, place, model, optimizer, record, gate, plan, begun.warm_from)
    return Job(
        settings, place, device, plan, model, optimizer, batches, meter, heartbeat, stopping, save, tokens_per_step,
        begun.step, begun.warm_from,
    )  # fmt: skip


def begin(completion: Completion | None, attempt: Attempt, plan: StepPlan, settings: JobSettings) -> Begun:
    if completion and completion.optimizer:
        return Begun(completion.step, completion.warm_from, f"exactly as {attempt.resume} was saved")
    if completion:
        return Begun(completion.step, completion.step, f"weights of {attempt.resume}; the optimizer warms up again")
    if attempt.smoke:
        first = max(0, plan.steps - 2)
        return Begun(first, first, "to see the end of the epoch and its save")
    if settings.train.random_weights:
        return Begun(said=f"from random weights of seed {settings.train.seed}")
    return Begun(said=f"from the weights of {settings.model}")


def saving(
    job: JobFile, place: Place, model: Any, optimizer: torch.optim.Optimizer, record: RunRecord, gate: GateRecord,
    plan: StepPlan, warm_from: int,
) -> Callable[[int], None]:  # fmt: skip
    """What the loop calls with the steps done. Raises Refusal where the model's files cannot be read."""
    checkpoint = job.settings.checkpoint
    saver = Saver(
        RunDirectory(Path(job.settings.run)),
        Path(job.settings.model),
        keep=checkpoint.keep,
        file_bytes=round(checkpoint.file_gigabytes * 1e9),
        timeout_seconds=checkpoint.timeout_seconds,
        ranks_per_node=place.ranks_per_node,
    )

    def save(steps_done: int) -> None:
        moment = Moment(
            run=record.run, step=steps_done, steps=plan.steps, epoch=steps_done // plan.steps_per_epoch,
            tokens=steps_done * record.tokens_per_step, gate_id=gate.gate_id, blocks_sha256=gate.blocks_sha256,
            warm_from=warm_from,
        )  # fmt: skip
        report = saver.save(model, optimizer if checkpoint.optimizer else None, moment)
        if place.rank == 0:
            log.info("saved %s: %s in %.1f s, weights by %d rank%s", report.directory, size_in_words(report.bytes),
                     report.seconds, report.writers, "s"[: report.writers > 1])  # fmt: skip
            for warning in report.warnings:
                log.warning("%s", warning)

    return save


def resumed(resume: Path | None, gate: GateRecord, plan: StepPlan, tokens_per_step: int) -> Completion | None:
    """What the checkpoint says of itself. Raises Refusal where its steps do not count through these blocks."""
    if resume is None:
        return None
    if reason := incomplete(resume):
        raise Refusal(f"{reason}; resume from another checkpoint")
    completion = read_completion(resume)
    if completion.blocks_sha256 != gate.blocks_sha256:
        raise Refusal(f"{resume}: trained on other blocks: its step {completion.step:,} means nothing here")
    if completion.tokens != completion.step * tokens_per_step:
        raise Refusal(
            f"{resume}: took {completion.tokens:,} tokens in {completion.step:,} steps, this job takes "
            f"{tokens_per_step:,} a step: blocks would be missed or seen twice. Use the same micro_batch x accumulation"
        )
    if completion.step > plan.steps:
        raise Refusal(f"{resume}: step {completion.step:,} is beyond this job's {plan.steps:,}")
    return completion


def check_blocks(blocks: Blocks, settings: JobSettings) -> None:
    """Raises Refusal for blocks that the model or the settings cannot take."""
    try:
        vocabulary = AutoConfig.from_pretrained(settings.model, local_files_only=True).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        raise Refusal(f"{settings.model}: {error}") from None
    if blocks.manifest.max_token_id >= vocabulary:  # it would be read from beyond the embedding
        raise Refusal(
            f"{blocks.path}: token id {blocks.manifest.max_token_id:,} is outside the model's vocabulary of "
            f"{vocabulary:,}; pack with the model's tokenizer"
        )
    if settings.train.document_mask and blocks.manifest.document_starts is None:
        raise Refusal(f"{blocks.path}: train.document_mask needs blocks packed with --document-mask")


def fill(model: Any, settings: JobSettings, resume: Path | None) -> None:
    """Weights from the checkpoint, the model's directory, or the seed. Raises Refusal."""
    if resume is None and settings.train.random_weights:
        random_weights(model, settings.train.seed)
    else:
        load_weights(model, resume or Path(settings.model))


def new_optimizer(model: Any, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True,
    )  # fmt: skip
