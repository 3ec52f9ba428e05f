"""Tokens per second of our loop and of the Hugging Face Trainer: same model, blocks, batches and machine.

    python -m tests.benchmarks.train [--repeat 3] [--precision fp32] [--accumulation 2] [--ways ours hf-fsdp2 ...]

Each run starts two ranks on CPU and gloo, with one thread each; the variants take turns.

    ours           the whole loop, heartbeat and log lines included; gradients are reduced at each micro-step
    ours-held      the same with train.gather = "step": whole weights and gradients for a step, as in DDP
    hf-fsdp2       the Trainer, its model sharded by transformers' own FSDP2, gradients reduced at each micro-step:
                   what ours does, with the same memory
    hf-fsdp2-late  the same by default: reduced at the last micro-step; until then each rank has the gradients of
                   the whole model
    hf-ddp         the Trainer without sharding: model, gradients and moments whole on each rank

accelerate's FSDP2 (fsdp_config version 2) is for accelerators: on CPU it is silently ignored. Start-up and the first
steps do not count. A run's figure is the tokens of a step divided by the median step time, so that a busy second on a
shared machine does not decide it. CPU time is rank 0's, without waiting. Equal losses show that the work is the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.trainer.train.rank_processes import on_ranks
from tests.trainer.train.tiny_model import write_blocks

if TYPE_CHECKING:
    from wattwatch.trainer.settings import JobSettings

TARGET_RATIO: Final = 1.0
WORLD: Final = 2
WARM_STEPS: Final = 3
LOG_STEPS: Final = 10
RATE: Final = 1e-3  # constant: both sides warm up and decay by rules of their own
SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, the same for all variants."""

    hidden: int = 256
    layers: int = 4
    vocabulary: int = 4096
    seq_len: int = 256
    micro_batch: int = 2
    accumulation: int = 2
    steps: int = 20
    precision: str = "fp32"

    @property
    def blocks(self) -> int:
        """Of each rank."""
        return self.steps * self.micro_batch * self.accumulation

    @property
    def step_tokens(self) -> int:
        """Of all ranks."""
        return WORLD * self.micro_batch * self.accumulation * self.seq_len


TINY: Final = Size(hidden=32, layers=2, vocabulary=128, seq_len=32, steps=LOG_STEPS)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one variant, measured on rank 0."""

    step_seconds: list[float]  # after the warm ones
    cpu_seconds: float  # of one step, all threads
    loss: float  # mean of the last LOG_STEPS steps over all ranks

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def write_model(directory: Path, size: Size) -> Path:
    """A Qwen3 with tied weights from the seed."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=size.hidden // 4,
        max_position_embeddings=size.seq_len, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def job_settings(root: Path, size: Size, gather: str) -> JobSettings:
    from wattwatch.trainer.settings import JobSettings, TrainSettings

    train = TrainSettings(
        micro_batch=size.micro_batch, accumulation=size.accumulation, precision=size.precision, learning_rate=RATE,
        final_learning_rate_share=1.0, warmup_steps=0, log_every=LOG_STEPS, gather=gather,
    )  # fmt: skip
    return JobSettings(run=str(root / "run"), data=str(root / "data"), model=str(root / "model"), train=train)


def ours(root: str, size: Size, gather: str) -> Ran:
    """The trainer's own loop on this rank, without saving."""
    import torch

    from wattwatch.trainer.pack.blocks import PackedBlocks
    from wattwatch.trainer.run_directory import RunDirectory
    from wattwatch.trainer.settings import Evenness
    from wattwatch.trainer.train.batches import BatchReader
    from wattwatch.trainer.train.evenfix import agree_on_blocks
    from wattwatch.trainer.train.heartbeat import HeartbeatWriter
    from wattwatch.trainer.train.loop import TrainingJob, train
    from wattwatch.trainer.train.meter import ThroughputMeter, flops_per_token
    from wattwatch.trainer.train.model import empty_model, load_weights
    from wattwatch.trainer.train.process_groups import RankInfo, process_group
    from wattwatch.trainer.train.start import make_optimizer
    from wattwatch.trainer.train.stopping import StopListener

    ends: list[tuple[float, float]] = []
    losses: list[float] = []

    class Marking(HeartbeatWriter):
        """Records the loss at the end of each step, and the time."""

        def update(self, phase: str | None = None, step: int | None = None, **said: Any) -> None:
            super().update(phase, step, **said)
            if "loss" in said:
                ends.append((time.perf_counter(), time.process_time()))
                losses.append(said["loss"])

    torch.set_num_threads(1)
    settings, place = job_settings(Path(root), size, gather), RankInfo.from_environment()
    directory = RunDirectory(Path(settings.run))
    with (
        Marking(directory, run="bench", rank=place.rank, world=place.world, attempt=1) as heartbeat,
        StopListener(None, lambda: os._exit(1)) as stopping,
        process_group(place, 60.0) as (mesh, device),
    ):
        blocks = PackedBlocks(Path(settings.data), place.rank)
        plan = agree_on_blocks(blocks.count, settings.blocks_per_step, 1, Evenness.MIN, device)
        model = empty_model(Path(settings.model), settings.train, mesh, device)
        load_weights(model, Path(settings.model))
        job = TrainingJob(
            settings, place, device, plan, model, make_optimizer(model, settings.train),
            BatchReader(blocks, plan, size.micro_batch, document_mask=False),
            ThroughputMeter(flops_per_token(model, size.seq_len), None), heartbeat, stopping, lambda done: None,
            size.step_tokens,
        )  # fmt: skip
        train(job)
    return ran(ends, losses[-LOG_STEPS:])


def ran(ends: list[tuple[float, float]], losses: list[float]) -> Ran:
    """Of the ends of all steps, on the wall's clock and the CPU's."""
    counted = ends[WARM_STEPS - 1 :]
    cpu = (counted[-1][1] - counted[0][1]) / (len(counted) - 1)
    return Ran([after[0] - before[0] for before, after in pairwise(counted)], cpu, statistics.mean(losses))


def hugging_face(root: str, size: Size, sharded: bool, reduce_late: bool) -> Ran:
    """The same by transformers.Trainer."""
    import torch
    from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    from wattwatch.trainer.pack.blocks import PackedBlocks

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    settings = job_settings(Path(root), size, "layer")
    own = [PackedBlocks(Path(settings.data), other) for other in range(WORLD)]

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        """Batches go to the ranks in turn; so each rank gets its own blocks, in their order."""

        def __len__(self) -> int:
            return WORLD * size.blocks

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            batch, place = divmod(row, size.micro_batch)
            turn, owner = divmod(batch, WORLD)
            ids = torch.from_numpy(own[owner].ids(turn * size.micro_batch + place).astype("int64"))
            return {"input_ids": ids, "labels": ids}

    ends: list[tuple[float, float]] = []
    losses: list[float] = []

    class Marking(TrainerCallback):  # type: ignore[misc]  # transformers is read without its types
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
            losses.extend([float(logs["loss"])] if "loss" in logs else [])

    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=torch.float32, attn_implementation="sdpa",
        distributed_config=DistributedConfig(fsdp_size=WORLD) if sharded else None,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=settings.run, use_cpu=True, num_train_epochs=1, bf16=size.precision == "bf16",
        per_device_train_batch_size=size.micro_batch, gradient_accumulation_steps=size.accumulation,
        learning_rate=RATE, lr_scheduler_type="constant", weight_decay=settings.train.weight_decay,
        adam_beta1=settings.train.beta1, adam_beta2=settings.train.beta2, max_grad_norm=settings.train.clip_norm,
        optim="adamw_torch_fused", train_sampling_strategy="sequential", logging_steps=LOG_STEPS,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": not reduce_late}},
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Marking()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    wrapped = type(trainer.model_wrapped).__name__
    if wrapped != ("FSDPQwen3ForCausalLM" if sharded else "DistributedDataParallel"):
        raise SystemExit(f"the Trainer trained a {wrapped}")
    torch.distributed.barrier()  # and no more: under DDP, destroying the group hangs at times; the rank just ends
    return ran(ends, losses[-1:])


WAYS: Final[dict[str, tuple[Callable[..., Ran], tuple[Any, ...]]]] = {
    "ours": (ours, ("layer",)),
    "ours-held": (ours, ("step",)),
    "hf-fsdp2": (hugging_face, (True, False)),
    "hf-fsdp2-late": (hugging_face, (True, True)),
    "hf-ddp": (hugging_face, (False, True)),
}


def run_once(way: str, root: Path, size: Size) -> Ran:
    function, more = WAYS[way]
    first: Ran = on_ranks(WORLD, function, str(root), size, *more)[0]
    return first


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def compare(root: Path, ways: list[str], size: Size, repeat: int) -> None:
    runs: dict[str, list[Ran]] = {way: [] for way in ways}
    say(f"{'run':>3}  {'way':<13} {'tokens/s':>9} {'s/step':>8} {'fastest':>8} {'CPU s':>8} {'loss':>8}")
    for number in range(1, repeat + 1):
        for way in ways:  # in turns, so that other load on the machine affects all
            one = run_once(way, root, size)
            runs[way].append(one)
            figures = f"{one.median_seconds:8.3f} {min(one.step_seconds):8.3f} {one.cpu_seconds:8.3f} {one.loss:8.4f}"
            say(f"{number:3}  {way:<13} {size.step_tokens / one.median_seconds:9,.0f} {figures}")
    for way in ways:
        wall = statistics.median(run.median_seconds for run in runs[way])
        cpu = statistics.median(run.cpu_seconds for run in runs[way])
        say(f"median {way:<13} {size.step_tokens / wall:9,.0f} tokens/s, CPU {cpu:.3f} s a step")
    mine, others = ([way for way in ways if way.startswith("ours") is own] for own in (True, False))
    for own in mine:
        for way in others:
            say(judged(own, runs[own], way, runs[way]))


def judged(name: str, first: list[Ran], other_name: str, other: list[Ran]) -> str:
    """The ratio of each pair of consecutive runs, and the median of the pairs; above 1 the first is faster."""
    walls = [two.median_seconds / one.median_seconds for one, two in zip(first, other, strict=True)]
    cpus = [two.cpu_seconds / one.cpu_seconds for one, two in zip(first, other, strict=True)]
    ratio = statistics.median(walls)
    verdict = "met" if ratio >= TARGET_RATIO else "MISSED"
    each = " ".join(f"{wall:.2f}" for wall in walls)
    return (
        f"{name} / {other_name}: {ratio:.2f} (runs: {each}), target {TARGET_RATIO:.1f}: {verdict}; "
        f"by CPU time {statistics.median(cpus):.2f}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--accumulation", type=int, default=Size().accumulation)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--tiny", action="store_true", help="a model that only shows that all runs")
    options = parser.parse_args(arguments)
    size = replace(TINY if options.tiny else Size(), precision=options.precision, accumulation=options.accumulation)
    say(
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; {WORLD} ranks, {size.precision}, Qwen3 "
        f"of {size.layers} layers x {size.hidden}, {size.vocabulary:,} ids; a step: {size.accumulation} micro-steps of "
        f"{size.micro_batch} x {size.seq_len} on each rank; {size.steps - WARM_STEPS} steps count"
    )
    with tempfile.TemporaryDirectory(prefix="train-bench-") as name:
        root = Path(name)
        write_model(root / "model", size)
        write_blocks(root / "data", [size.blocks] * WORLD, size.seq_len, size.vocabulary)
        compare(root, options.ways, size, options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
