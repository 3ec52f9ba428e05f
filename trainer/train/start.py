"""From the job file to a training loop that is ready to run; refused by all ranks together, or by none.

gate.json ──► blocks ──► evenfix ──► step plan ──► sharded model ──► weights or a checkpoint ──► TrainingJob
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig

from wattwatch.trainer.checkpoint.complete import START_FROM_WEIGHTS, Completion, read_completion, why_incomplete
from wattwatch.trainer.checkpoint.optimizer import load_optimizer_state
from wattwatch.trainer.checkpoint.save import CheckpointSaver, SavePoint
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_bytes_short, format_count
from wattwatch.trainer.pack.blocks import PackedBlocks
from wattwatch.trainer.pack.manifest import PackManifest, blocks_sha256
from wattwatch.trainer.run_directory import RUN_FORMAT_VERSION, RunDirectory, RunRecord, write_run_record
from wattwatch.trainer.settings import Evenness, JobFile, JobSettings, TrainSettings
from wattwatch.trainer.train.batches import BatchReader
from wattwatch.trainer.train.evenfix import StepPlan, agree_on_blocks
from wattwatch.trainer.train.heartbeat import HeartbeatWriter
from wattwatch.trainer.train.loop import TrainingJob
from wattwatch.trainer.train.meter import ThroughputMeter, flops_per_token, peak_flops_of_gpu
from wattwatch.trainer.train.model import empty_model, initialize_weights, load_weights
from wattwatch.trainer.train.process_groups import RankInfo, refuse_on_all_ranks
from wattwatch.trainer.train.stopping import StopListener

SMOKE_STEPS: Final = 2  # the fewest that contain a normal step and the last one

log = logging.getLogger("wattwatch.train")


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """What the launcher says about this attempt."""

    number: int = 1
    gate_id: str | None = None
    resume: Path | None = None
    smoke: bool = False  # only the last two steps


@dataclass(frozen=True, slots=True)
class GateRecord:
    """The part of gate.json that training relies on."""

    gate_id: str
    steps: int  # per epoch, at the smallest block count of any rank
    token_files: Mapping[int, str]  # SHA-256 by rank
    nodes: tuple[str, ...]

    @property
    def blocks_sha256(self) -> str:
        return blocks_sha256(self.token_files)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where this attempt begins."""

    step: int = 0  # steps done before
    warm_from: int = 0  # the step at which the optimizer's moments began
    description: str = ""  # for the log


@contextmanager
def refused_by_all() -> Iterator[None]:
    """A UserError that one rank raises in the block is raised by all ranks after it. No collectives inside the block:
    the rank that raised would not take part in them."""
    reason = None
    try:
        yield
    except UserError as error:
        reason = str(error)
    refuse_on_all_ranks(reason)


def prepare_training(
    job: JobFile, options: AttemptOptions, info: RankInfo, mesh: DeviceMesh, device: torch.device,
    heartbeat: HeartbeatWriter, stop_listener: StopListener,
) -> TrainingJob:  # fmt: skip
    """Everything that the loop works with. Raises UserError, on all ranks."""
    settings, train, directory = job.settings, job.settings.train, RunDirectory(Path(job.settings.run))
    # Everything that can fail on one rank alone, such as a missing file, must be inside a refused_by_all block; every
    # collective must be outside.
    with refused_by_all():
        gate = read_passed_gate(directory, job, info.world, options.gate_id)
        blocks = PackedBlocks(Path(settings.data), info.rank)
        check_shard_passed(gate, blocks.manifest, info.rank)
        check_blocks_fit_model(blocks, settings)
    plan = agree_on_blocks(blocks.count, settings.blocks_per_step, train.epochs, Evenness(train.evenness), device)
    log.info("%s", plan)
    tokens_per_step = settings.blocks_per_step * blocks.manifest.seq_len * info.world
    with refused_by_all():
        check_plan_passed(gate, plan)
        completion = read_resume_checkpoint(options.resume, gate, plan, tokens_per_step)
        model = empty_model(Path(settings.model), train, mesh, device)
        fill_parameters(model, settings, options.resume)
        # After sharding: the optimizer must hold the sharded parameters, and its moments are then sharded too.
        optimizer = make_optimizer(model, train)
        if options.resume and completion and completion.optimizer:
            load_optimizer_state(options.resume, model, optimizer, info.rank, info.world)
    start = find_start_point(completion, options, plan, settings)
    record = RunRecord(
        v=RUN_FORMAT_VERSION, run=heartbeat.run, world=info.world, nodes=gate.nodes, steps=plan.steps,
        tokens_per_step=tokens_per_step, save_every=settings.checkpoint.save_every, seq_len=blocks.manifest.seq_len,
        gate_id=gate.gate_id, attempt=options.number, t_wall=time.time(),
        resumed_from=options.resume.name if options.resume else None,
    )  # fmt: skip
    if info.rank == 0:
        write_run_record(directory, record)
        log.info("training starts after step %d of %d: %s", start.step, plan.steps, start.description)
    # From here on the watcher can tell the end of the job from a hang at its last step.
    heartbeat.update(steps=plan.steps, step=start.step)
    peak = peak_flops_of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    meter = ThroughputMeter(flops_per_token(model, blocks.manifest.seq_len), peak and peak * info.world)
    batches = BatchReader(blocks, plan, train.micro_batch, train.document_mask)
    save = make_save_function(job, info, model, optimizer, record, gate, plan, start.warm_from)
    return TrainingJob(
        settings, info, device, plan, model, optimizer, batches, meter, heartbeat, stop_listener, save,
        tokens_per_step, start.step, start.warm_from,
    )  # fmt: skip


def find_start_point(
    completion: Completion | None, options: AttemptOptions, plan: StepPlan, settings: JobSettings
) -> StartPoint:
    if completion and completion.optimizer:
        description = f"all state is loaded from {options.resume}"
        return StartPoint(completion.step, completion.warm_from, description)
    if completion:
        description = f"only the weights are loaded from {options.resume}, so the warm-up is repeated"
        return StartPoint(completion.step, completion.step, description)
    if options.smoke:
        first = max(0, plan.steps - SMOKE_STEPS)
        return StartPoint(first, first, "this run tests only the end of the epoch and the save after it")
    if settings.train.random_weights:
        return StartPoint(description=f"the weights are random, with seed {settings.train.seed}")
    return StartPoint(description=f"the weights are loaded from {settings.model}")


def make_save_function(
    job: JobFile, info: RankInfo, model: Any, optimizer: torch.optim.Optimizer, record: RunRecord, gate: GateRecord,
    plan: StepPlan, warm_from: int,
) -> Callable[[int], None]:  # fmt: skip
    """What the loop calls with the number of steps done. Raises UserError if the model's files cannot be read."""
    checkpoint = job.settings.checkpoint
    saver = CheckpointSaver(
        RunDirectory(Path(job.settings.run)),
        Path(job.settings.model),
        keep=checkpoint.keep,
        file_bytes=round(checkpoint.file_gigabytes * 1e9),
        timeout_seconds=checkpoint.timeout_seconds,
        ranks_per_node=info.ranks_per_node,
    )

    def save(steps_done: int) -> None:
        point = SavePoint(
            run=record.run, step=steps_done, steps=plan.steps, epoch=steps_done // plan.steps_per_epoch,
            tokens=steps_done * record.tokens_per_step, gate_id=gate.gate_id, blocks_sha256=gate.blocks_sha256,
            warm_from=warm_from,
        )  # fmt: skip
        report = saver.save(model, optimizer if checkpoint.optimizer else None, point)
        if info.rank == 0:
            log.info("saved %s: %s in %.1f s; %d rank%s wrote the weights", report.directory,
                     format_bytes_short(report.bytes), report.seconds, report.writers,
                     "s"[: report.writers > 1])  # fmt: skip
            for warning in report.warnings:
                log.warning("%s", warning)

    return save


def read_resume_checkpoint(
    resume: Path | None, gate: GateRecord, plan: StepPlan, tokens_per_step: int
) -> Completion | None:
    """The completion record of the checkpoint. Raises UserError if its step number does not apply to these blocks.

    Blocks are counted, not remembered: with other blocks, or another step size, a resume would skip or repeat data.
    """
    if resume is None:
        return None
    if reason := why_incomplete(resume):
        raise UserError(f"{reason}; resume from another checkpoint")
    completion = read_completion(resume)
    if completion.blocks_sha256 != gate.blocks_sha256:
        raise UserError(
            f"the run that saved {resume} used other data blocks than this job, so training cannot continue at the "
            f"checkpoint's step {completion.step:,}; {START_FROM_WEIGHTS}"
        )
    if completion.tokens != completion.step * tokens_per_step:
        raise UserError(
            f"{resume} was saved after {format_count(completion.step, 'step')} and {completion.tokens:,} tokens, but "
            f"this job uses {tokens_per_step:,} tokens per step, so data blocks would be skipped or repeated. Use the "
            "same micro_batch x accumulation as the run that saved it."
        )
    if completion.step > plan.steps:
        raise UserError(
            f"{resume} was saved at step {completion.step:,}, but this job has only "
            f"{format_count(plan.steps, 'step')}; increase train.epochs"
        )
    return completion


def check_blocks_fit_model(blocks: PackedBlocks, settings: JobSettings) -> None:
    """Raises UserError for blocks that the model or the settings cannot use."""
    try:
        vocabulary = AutoConfig.from_pretrained(settings.model, local_files_only=True).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        raise UserError(f"{settings.model}: {error}") from None
    if blocks.manifest.max_token_id >= vocabulary:  # it would read beyond the embedding
        raise UserError(
            f"{blocks.path}: token id {blocks.manifest.max_token_id:,} is outside the model's vocabulary of "
            f"{vocabulary:,} ids; pack the dataset again with the model's tokenizer"
        )
    if settings.train.document_mask and blocks.manifest.document_starts is None:
        raise UserError(f"{blocks.path} was packed without --document-mask, but train.document_mask needs that option")


def fill_parameters(model: Any, settings: JobSettings, resume: Path | None) -> None:
    """Weights from the checkpoint, from the model's directory, or from the seed. Raises UserError."""
    if resume is None and settings.train.random_weights:
        initialize_weights(model, settings.train.seed)
    else:
        load_weights(model, resume or Path(settings.model))


def make_optimizer(model: Any, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) have no weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        # fused: one kernel for all parameters instead of several for each.
        lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True,
    )  # fmt: skip


# Only the gate of this very job, world and data lets a rank start. A rank that is started by hand, or whose shard was
# packed again after the gate, would break what the gate has proved for all ranks.


def read_passed_gate(directory: RunDirectory, job: JobFile, world: int, gate_id: str | None) -> GateRecord:
    """gate.json, if it is from this job, and from the gate with `gate_id` (None: not known). Raises UserError."""
    path = directory.gate_json
    try:
        gate = json.loads(path.read_text())
        record = _parse_gate_record(gate)
        level, gate_world, config = gate["level"], gate["world"], gate["config_sha256"]
        step_blocks = gate["settings"]["micro_batch"] * gate["settings"]["accumulation"]
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist, because no gate has run; start the job with `wattwatch-train launch`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a gate record ({type(error).__name__}: {error}); run the gate again") from None
    again = "run the gate again"
    if level == "FAIL":
        raise UserError(f"{path}: the gate refused the job; fix the problems listed in this file and {again}")
    if gate_world != world:
        raise UserError(
            f"{path}: the gate checked {format_count(gate_world, 'rank')}, but this job has {world}; {again}"
        )
    if config != job.sha256:
        raise UserError(f"{path}: the gate checked a different configuration than {job.path}; {again}")
    if step_blocks != job.settings.blocks_per_step:
        raise UserError(
            f"{path}: the gate checked {format_count(step_blocks, 'block')} per step, but this job uses "
            f"{job.settings.blocks_per_step}; {again}"
        )
    if gate_id and record.gate_id != gate_id:
        raise UserError(
            f"{path} was written by gate {record.gate_id}, but the launcher ran gate {gate_id}; is another launch "
            "using this directory?"
        )
    return record


def _parse_gate_record(gate: Any) -> GateRecord:
    """Raises KeyError or TypeError for anything but a decoded gate.json."""
    shards = [(shard["rank"], shard["manifest"]) for report in gate["reports"] for shard in report["shards"]]
    return GateRecord(
        gate["gate_id"],
        gate["steps"] or 0,
        {int(rank): str(manifest["sha256"]) for rank, manifest in shards if manifest},
        tuple(str(report["node"]) for report in sorted(gate["reports"], key=lambda report: min(report["ranks"]))),
    )


def check_shard_passed(record: GateRecord, manifest: PackManifest, rank: int) -> None:
    """Raises UserError if this rank's blocks are not those that the gate checked."""
    if record.token_files.get(rank) != manifest.sha256:
        raise UserError(f"rank {rank}: its blocks differ from those that passed the gate; run the gate again")


def check_plan_passed(record: GateRecord, plan: StepPlan) -> None:
    """Raises UserError if the ranks have agreed on another number of steps than the gate computed."""
    if plan.evenness is Evenness.MIN and plan.steps_per_epoch != record.steps:
        raise UserError(
            f"the ranks agreed on {format_count(plan.steps_per_epoch, 'step')} per epoch, but the gate computed "
            f"{record.steps:,}; run the gate again"
        )
