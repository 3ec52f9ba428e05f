"""How much a checkpoint costs: our save and torch's Hugging Face writer, with the same model and disk, in one run.

    python -m tests.benchmarks.checkpoint [--megabytes 320] [--worlds 2 4] [--repeat 3]

A random Qwen3 sharded by FSDP2, float32 masters, saved in bfloat16 and the same four files by each variant in turn:

    ours            wattwatch.trainer.checkpoint.save.CheckpointSaver: gathered, hashed, written, synced, renamed
    ours-unsynced   the same without fsync, to see its cost. Not an option for users
    torch           HuggingFaceStorageWriter with enable_consolidation: shards written, then merged by rank 0
    torch-all       shards written by it, then merged by consolidate_safetensors_files_on_every_rank

Seconds are from one barrier to the next. Peak memory is the increase of the resident set over its level before the
save, on the rank with the highest. Bytes are everything on disk afterwards; torch leaves its shards there. `sync
after` is how long fsync of all files takes then: until it is done, a power failure may lose them. torch syncs its
shards, but not the merged files. Finally transformers loads a checkpoint of each variant, and the weights are
compared; torch's gets a config.json first, which it does not write.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tests.trainer.train.rank_processes import on_ranks

WAYS: Final = ("ours", "ours-unsynced", "torch", "torch-all")
FILES: Final = 4
THREADS: Final = 4  # of torch's consolidation
HIDDEN: Final = 1024
VOCABULARY: Final = 32_000
LAYER_PARAMETERS: Final = 15 * HIDDEN * HIDDEN  # attention 6, the three matrices of 3 x HIDDEN 9


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one save on one rank, or the maximum over all ranks."""

    seconds: float
    peak_bytes: int
    disk_bytes: int
    sync_seconds: float


def write_model(directory: Path, megabytes: int) -> Path:
    """A configuration of about that many megabytes in bfloat16, and no weights."""
    from transformers import Qwen3Config

    parameters = megabytes * 500_000
    small = parameters < 2 * VOCABULARY * HIDDEN + LAYER_PARAMETERS
    hidden, vocabulary = (64, 512) if small else (HIDDEN, VOCABULARY)
    layers = 2 if small else (parameters - 2 * VOCABULARY * HIDDEN) // LAYER_PARAMETERS
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64 if small else 96,
        tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(directory)
    return directory


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the highest since `forget_peak`."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> int:
    """Returns free memory to the system and resets the peak; returns the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def files_under(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def sync_all(directory: Path) -> float:
    begun = time.perf_counter()
    for path in files_under(directory):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begun


def saves(root: str, repeat: int, world: int) -> list[dict[str, Cost]]:
    """On each rank: all variants in turn, `repeat` times. The last save of each variant stays on disk."""
    import torch
    import torch.distributed as dist

    from wattwatch.trainer.settings import TrainSettings
    from wattwatch.trainer.train.model import empty_model, initialize_weights
    from wattwatch.trainer.train.process_groups import RankInfo, process_group

    torch.set_num_threads(1)
    place = RankInfo.from_environment()
    source, rounds = Path(root) / "model", []
    with process_group(place, 90.0) as (mesh, device):
        model = empty_model(source, TrainSettings(), mesh, device)
        initialize_weights(model, 0)
        ways = save_ways(model, source, Path(root), world)
        for _ in range(repeat):
            costs = {}
            for way, save in ways.items():
                target = Path(root) / f"saved-{world}" / way
                if place.rank == 0:
                    shutil.rmtree(target, ignore_errors=True)
                dist.barrier()
                level = forget_peak()
                dist.barrier()
                begun = time.perf_counter()
                save(target)
                dist.barrier()
                seconds, peak = time.perf_counter() - begun, resident("VmHWM") - level
                size = sum(path.stat().st_size for path in files_under(target))
                costs[way] = Cost(seconds, peak, size, sync_all(target) if place.rank == 0 else 0.0)
                dist.barrier()
            rounds.append(costs)
    return rounds


def save_ways(model: Any, source: Path, root: Path, world: int) -> dict[str, Callable[[Path], None]]:
    """Functions by variant; each saves `model` into a directory that does not exist yet."""
    import torch
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from wattwatch.trainer.checkpoint.gather import describe_tensors, tensors_to_save
    from wattwatch.trainer.checkpoint.safetensors_writer import plan_weights_files
    from wattwatch.trainer.checkpoint.save import CheckpointSaver, SavePoint
    from wattwatch.trainer.run_directory import RunDirectory

    facts = describe_tensors(tensors_to_save(model))
    total = sum(fact.bytes for fact in facts)
    file_bytes = -(-total // FILES)
    files = plan_weights_files(facts, file_bytes, world, world)
    index = {tensor.name: number for number, file in enumerate(files, 1) for tensor in file.layout.tensors}
    savers = {
        way: CheckpointSaver(
            RunDirectory(root / f"saved-{world}" / way), source, keep=1, file_bytes=file_bytes, timeout_seconds=90.0,
            ranks_per_node=world,
        )
        for way in WAYS[:2]
    }  # fmt: skip

    def ours(target: Path) -> None:
        savers[target.name].save(model, None, SavePoint("bench", 1, 1, 1, 1, "gate", "blocks"))

    def unsynced(target: Path) -> None:
        with patch.object(os, "fsync"):
            ours(target)

    def state() -> dict[str, Any]:
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}

    def torchs(target: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(target), index, save_distributed=True, enable_consolidation=True, thread_count_consolidation=THREADS
        )
        save(state(), storage_writer=writer)

    def torchs_all(target: Path) -> None:
        shards = str(target / "sharded")
        save(state(), storage_writer=HuggingFaceStorageWriter(shards, index, save_distributed=True))
        consolidate_safetensors_files_on_every_rank(shards, str(target), index, THREADS)

    return dict(zip(WAYS, (ours, unsynced, torchs, torchs_all), strict=True))


def weights_of(root: Path, world: int, way: str) -> dict[str, Any]:
    """The weights of the last save of that variant, as transformers loads them."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = root / f"saved-{world}" / way
    if way in WAYS[:2]:
        (directory,) = (directory / "checkpoints").glob("step-*")
    else:
        shutil.copy(root / "model" / "config.json", directory)
    model, told = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    if wrong := {kind: names for kind, names in told.items() if names}:
        raise SystemExit(f"{way}: transformers loads it with {wrong}")
    weights: dict[str, Any] = model.state_dict()
    return weights


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def row(name: str, cost: Cost) -> str:
    return (
        f"{name:<20} {cost.seconds:7.2f} {cost.peak_bytes / 1e6:9.0f} {cost.disk_bytes / 1e6:8.0f} "
        f"{cost.sync_seconds:11.2f}"
    )


def measure(root: Path, world: int, repeat: int) -> None:
    by_rank = on_ranks(world, saves, str(root), repeat, world)
    rounds: dict[str, list[Cost]] = {way: [] for way in WAYS}
    say(f"\n{world} ranks{'':<13} seconds   peak MB  disk MB  sync after")
    for number in range(repeat):
        for way in WAYS:
            told = [rank[number][way] for rank in by_rank]
            most = Cost(
                max(cost.seconds for cost in told), max(cost.peak_bytes for cost in told),
                told[0].disk_bytes, told[0].sync_seconds,
            )  # fmt: skip
            rounds[way].append(most)
            say(row(f"{number + 1} {way}", most))
    medians = {way: median_of(costs) for way, costs in rounds.items()}
    for way, cost in medians.items():
        say(row(f"median {way}", cost))
    first = medians["ours"]
    for way in WAYS[1:]:
        other = medians[way]
        whole = (other.seconds + other.sync_seconds) / (first.seconds + first.sync_seconds)
        say(
            f"{way} / ours: time {other.seconds / first.seconds:.2f}, with sync after {whole:.2f}, "
            f"memory {other.peak_bytes / first.peak_bytes:.2f}, disk {other.disk_bytes / first.disk_bytes:.2f}"
        )
    check(root, world)


def median_of(costs: list[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        round(statistics.median(cost.peak_bytes for cost in costs)),
        round(statistics.median(cost.disk_bytes for cost in costs)),
        statistics.median(cost.sync_seconds for cost in costs),
    )


def check(root: Path, world: int) -> None:
    first = weights_of(root, world, "ours")
    for way in WAYS[1:]:
        other = weights_of(root, world, way)
        if first.keys() != other.keys() or not all(tensor.equal(other[name]) for name, tensor in first.items()):
            raise SystemExit(f"{way}: other weights than ours")
    say("transformers loads all of them; the weights are the same bits")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=320, help="of weights in bfloat16")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    from transformers.utils import logging

    logging.disable_progress_bar()
    say(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; {options.megabytes} MB, {FILES} files")
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-") as name:
        write_model(Path(name) / "model", options.megabytes)
        for world in options.worlds:
            measure(Path(name), world, options.repeat)
            shutil.rmtree(Path(name) / f"saved-{world}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
