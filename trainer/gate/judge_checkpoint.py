"""Checkpoint: one directory for all ranks, theirs alone, with room and speed for a save; and one to resume from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from trainer.gate.beats import living
from trainer.gate.report import GateSettings, NodeReport, ResumeLook
from trainer.gate.saying import fail, size_in_words, some, warn
from trainer.gate.verdict import Check, Evenness, Problem
from trainer.pack.manifest import blocks_sha256

WEIGHT_BYTES: Final = 2  # of a parameter, bf16
OPTIMIZER_BYTES: Final = 12  # master and two moments, float32
MAX_SAVE_SHARE: Final = 0.5  # of the timeout: other jobs write to the same disks


def judge_checkpoint(reports: Sequence[NodeReport], even: Evenness | None) -> Check:
    settings, one = reports[0].settings, _size_of_one(reports)
    problems = [*_directory(reports), *_other_jobs(reports), *_model(reports), *_resume(reports, even)]
    looks = [report.checkpoint for report in reports if report.checkpoint]
    free = min((look.free_bytes for look in looks if look.free_bytes is not None), default=None)
    if one and free is not None and free < (settings.keep + 1) * one:
        short = free < settings.keep * one
        what = f"{settings.keep} checkpoints of {size_in_words(one)}{'' if short else ' and one being written'}"
        problem = (
            f"{looks[0].directory}: {size_in_words(free)} free, too little for {what}: free "
            f"{size_in_words((settings.keep + 1) * one - free)} more, or keep fewer"
        )
        problems.append(fail(problem) if short else warn(problem))
    seconds = _save_seconds(reports, one)
    timeout = settings.save_timeout_seconds
    if seconds is not None and timeout is not None and seconds > MAX_SAVE_SHARE * timeout:
        rates = [look.write_bytes_per_second for look in looks if look.write_bytes_per_second]
        problems.append(
            warn(
                f"{looks[0].directory}: a save of {size_in_words(one)} would take about {seconds:,.0f} s of the "
                f"{timeout:,.0f} s it may: a small file was written at {size_in_words(min(rates))}/s; set a longer "
                "checkpoint.timeout_seconds, or save to a faster disk"
            )
        )
    words = f"free={size_in_words(free)} keep={settings.keep} size={size_in_words(one) if one else 'unknown'}"
    return Check("checkpoint", tuple(problems), words + ("" if seconds is None else f" save={seconds:,.1f}s"))


def _directory(reports: Sequence[NodeReport]) -> list[Problem]:
    problems = []
    for report in reports:
        look = report.checkpoint
        if look is None:
            problems.append(fail(f"{report.node}: the checkpoint directory was not looked at"))
        elif look.trouble:
            problems.append(
                fail(
                    f"{report.node}: {look.directory}: cannot be written: {look.trouble}; "
                    "name a run directory that the job's user can write to"
                )
            )
        elif look.sees_rank_0 is False:
            problems.append(
                fail(
                    f"{report.node}: {look.directory}: not the directory that {reports[0].node} writes to: not shared; "
                    "name a directory of a shared file system as run directory"
                )
            )
    return problems


def _other_jobs(reports: Sequence[NodeReport]) -> list[Problem]:
    """Heartbeats with somebody behind them. A rank whose own node says that it is gone is no longer there."""
    beats = [(report, beat) for report in reports if report.checkpoint for beat in report.checkpoint.beats]
    still = set(living([beat for _, beat in beats]))
    found = {}
    for report, beat in beats:
        if beat in still and (beat.rank not in found or beat.alive):
            found[beat.rank] = report, beat
    return [
        fail(
            f"{report.node}: rank {beat.rank} of run {beat.run!r} still lives in this run directory: pid {beat.pid} on "
            f"{beat.host}, heartbeat {beat.age_seconds:.0f} s old; end it, or take another run directory"
        )
        for _, (report, beat) in sorted(found.items())
    ]


def _model(reports: Sequence[NodeReport]) -> list[Problem]:
    troubles = [(r.node, r.model.trouble) for r in reports if r.model and r.model.trouble]
    problems = [fail(f"{nodes}: {trouble}") for nodes, trouble in _together(troubles)]
    without = [
        report.node
        for report in reports
        if report.settings.random_weights is False and report.model and not report.model.trouble
        if report.model.parameters is None
    ]
    if without:
        problems.append(
            fail(f"{some(without)}: the model has no weights; set train.random_weights to start from its config.json")
        )
    return problems


def _resume(reports: Sequence[NodeReport], even: Evenness | None) -> list[Problem]:
    """The checkpoint is whole, of this job's data, shapes and, where the optimizer's state is wanted, world."""
    said = []
    for report in reports:
        if report.model and report.model.resume:
            look = report.model.resume
            troubles = [look.trouble] if look.trouble else _unfit(reports, look, even)
            said += [(report.node, f"{look.directory}: {text}" if not look.trouble else text) for text in troubles]
    problems = [fail(f"{nodes}: cannot resume: {text}") for nodes, text in _together(said)]
    looks = [report.model.resume for report in reports if report.model and report.model.resume]
    if even and looks and looks[0].step is not None and not problems:
        total = even.steps * reports[0].settings.epochs
        if looks[0].step == total:
            problems.append(warn(f"{looks[0].directory}: all {total:,} steps are done: the job will end at once"))
        if reports[0].settings.optimizer and looks[0].optimizer is False:
            problems.append(
                warn(f"{looks[0].directory}: holds no optimizer state: only the weights are resumed, warmed up anew")
            )
    return problems


def _unfit(reports: Sequence[NodeReport], look: ResumeLook, even: Evenness | None) -> Iterable[str]:
    settings = reports[0].settings
    if look.other_shape:
        yield f"{look.other_shape}: it is of another model"
    if settings.optimizer and look.optimizer and look.world != settings.world:
        yield (
            f"its optimizer state is of {look.world} ranks, the job has {settings.world}; use as many, or set "
            "checkpoint.optimizer to false to resume the weights only"
        )
    said = {shard.rank: shard.manifest for report in reports for shard in report.shards if shard.manifest}
    by_rank = {rank: manifest.sha256 for rank, manifest in said.items()}
    step_tokens = settings.blocks_per_step * settings.world * max((one.seq_len for one in said.values()), default=0)
    if look.blocks_sha256 and len(by_rank) == settings.world and look.blocks_sha256 != blocks_sha256(by_rank):
        yield "it was trained on other blocks than these, its step means nothing in them; start from it as model"
    elif said and look.step and look.tokens is not None and look.tokens != look.step * step_tokens:
        yield (
            f"it took {look.tokens:,} tokens in {look.step:,} steps, this job takes {step_tokens:,} a step: blocks "
            "would be missed or seen twice; use the same micro_batch x accumulation"
        )
    if even and look.step is not None and look.step > even.steps * settings.epochs:
        yield f"it has done {look.step:,} steps, the job has {even.steps * settings.epochs:,}; set more train.epochs"


def _together(said: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(nodes, text), each text once."""
    nodes = defaultdict(list)
    for node, text in said:
        nodes[text].append(node)
    return [(some(names), text) for text, names in nodes.items()]


def _size_of_one(reports: Sequence[NodeReport]) -> int | None:
    """Bytes of a checkpoint: as told, else by the model's parameters, else as large as the model's weights."""
    settings, models = reports[0].settings, [report.model for report in reports if report.model]
    if settings.checkpoint_bytes:
        return settings.checkpoint_bytes
    each = WEIGHT_BYTES + (OPTIMIZER_BYTES if settings.optimizer else 0)
    counted = next((model.parameters for model in models if model.parameters), None)
    return counted * each if counted else next((model.weights_bytes for model in models if model.weights_bytes), None)


def _save_seconds(reports: Sequence[NodeReport], one: int | None) -> float | None:
    """As if every process that writes were as quick as the slowest was, all writing at once."""
    rates = [r.checkpoint.write_bytes_per_second for r in reports if r.checkpoint]
    known = [rate for rate in rates if rate]
    if not one or not known or len(known) < len(rates):
        return None
    return one / _writers(reports[0].settings, one, len(known)) / min(known)


def _writers(settings: GateSettings, one: int, measured: int) -> int:
    """Ranks write whole files: fewer files than ranks leave some idle. No more than were measured side by side."""
    if settings.optimizer or not settings.file_bytes:  # every rank has optimizer state of its own to write
        return measured
    return min(measured, max(1, math.ceil(one / settings.file_bytes)))
