"""What the ranks of a test do. Imported by the process that ranks are forked from, so that torch is loaded once."""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.tools import DEADLINE_SECONDS
from wattwatch.trainer.checkpoint.gather import TensorGatherer
from wattwatch.trainer.checkpoint.optimizer import load_optimizer_state
from wattwatch.trainer.checkpoint.save import CheckpointSaver, SaveError, SavePoint, SaveReport
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.run_directory import RunDirectory


@dataclass(frozen=True)
class Fault:
    """What happens to `rank` at `event` (an audit event of Python) on a path that contains `text`."""

    rank: int
    event: str
    text: str
    errno: int | None = None  # None: kill -9
    pipe: Path | None = None  # hangs instead, until another process opens this named pipe


def config(tied: bool, hidden: int = 32) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=400,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,  # its norms are smaller than a world of 3
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )


def whole_model(tied: bool, seed: int = 0, hidden: int = 32) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config(tied, hidden))


def sharded_model(world: int, tied: bool, seed: int = 0, hidden: int = 32) -> Any:
    model = whole_model(tied, seed, hidden)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save_point(step: int) -> SavePoint:
    return SavePoint("made", step, 1000, 0, step * 64, "gate", "blocks")


def inject(fault: Fault | None, rank: int) -> None:
    if fault is None or fault.rank != rank:
        return
    left = [fault]  # an audit hook stays: it acts once

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if left and event == fault.event and fault.text in str(arguments[0]):
            left.clear()
            if fault.pipe is not None:
                fault.pipe.read_bytes()
            elif fault.errno is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(fault.errno, os.strerror(fault.errno), str(arguments[0]))

    sys.addaudithook(hook)


def saver_of(
    run: Path, model: Path, keep: int = 2, file_bytes: int = 20_000, timeout_seconds: float = DEADLINE_SECONDS
) -> CheckpointSaver:
    return CheckpointSaver(
        RunDirectory(run),
        model,
        keep=keep,
        file_bytes=file_bytes,
        timeout_seconds=timeout_seconds,
        ranks_per_node=2,
    )


def saves(
    rank: int,
    world: int,
    run: Path,
    model: Path,
    steps: tuple[int, ...] = (500,),
    tied: bool = False,
    fault: Fault | None = None,
    file_limit_bytes: int | None = None,
    limited_rank: int = 1,
    optimizer: bool = False,
    **settings: Any,
) -> list[SaveReport | str]:
    """Saves at each of `steps`; fault and limit apply to the first."""
    sharded = sharded_model(world, tied)
    adam = torch.optim.AdamW(sharded.parameters()) if optimizer else None
    saver = saver_of(run, model, **settings)
    inject(fault, rank)
    answers: list[SaveReport | str] = []
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_limit_bytes is not None and rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, unlimited[1]))
    for step in steps:
        try:
            answers.append(saver.save(sharded, adam, save_point(step)))
        except SaveError as error:
            answers.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    if fault and fault.pipe and fault.rank != rank:
        fault.pipe.write_bytes(b"go on")
    return answers


def refused_saver(rank: int, world: int, run: Path, model: Path) -> str:
    try:
        saver_of(run, model)
    except UserError as error:
        return str(error)
    return "not refused"


def gathered_in_pieces(rank: int, world: int, scratch_bytes: int) -> list[str]:
    """The shapes that were not gathered correctly."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    gatherer = TensorGatherer(group, torch.device("cpu"), scratch_bytes)
    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for shape in [(1,), (2,), (3,), (7,), (64,), (1, 5), (5, 3), (100, 7), (4, 2, 3), (0, 4)]:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        into = torch.empty(whole.numel(), dtype=torch.bfloat16)
        gatherer.gather(distribute_tensor(whole, mesh, [ShardOf(0)]), into if rank == 0 else None)
        if rank == 0 and not torch.equal(into, whole.bfloat16().reshape(-1)):
            wrong.append(str(shape))
    scalar = torch.empty(1, dtype=torch.bfloat16)
    gatherer.gather(torch.tensor(1.5), scalar)
    return wrong if scalar.item() == 1.5 else [*wrong, "a scalar"]


def train(model: Any, optimizer: torch.optim.Optimizer, seed: int, rank: int) -> None:
    ids = torch.randint(0, 400, (1, 16), generator=torch.Generator().manual_seed(100 * seed + rank))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def local_bytes(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {}
    for name, parameter in model.named_parameters():
        for kind, value in {"master": parameter.detach(), **optimizer.state[parameter]}.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            found[f"{kind}.{name}"] = local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def resumed_exactly(rank: int, world: int, run: Path, model: Path, tied: bool) -> dict[str, Any]:
    """Two steps, a save, two steps; compared with another model that loads that state and does the same."""
    first = sharded_model(world, tied)
    optimizer = adamw(first)
    for seed in (1, 2):
        train(first, optimizer, seed, rank)
    directory = saver_of(run, model).save(first, optimizer, save_point(2)).directory
    saved = local_bytes(first, optimizer)
    for seed in (3, 4):
        train(first, optimizer, seed, rank)

    second = sharded_model(world, tied, seed=9)
    other = adamw(second)
    load_optimizer_state(directory, second, other, rank, world)
    answer: dict[str, Any] = {"restored": local_bytes(second, other) == saved}
    for seed in (3, 4):
        train(second, other, seed, rank)
    answer["continued"] = local_bytes(second, other) == local_bytes(first, optimizer)

    before = local_bytes(second, other)
    answer["other world"] = refusal(directory, second, other, rank, world + 1)
    third = sharded_model(world, tied, hidden=64)
    answer["other shape"] = refusal(directory, third, adamw(third), rank, world)
    answer["other model"] = refusal(directory, sharded_model(world, not tied), other, rank, world)
    weights_only = saver_of(run, model).save(first, None, save_point(3)).directory
    answer["weights only"] = refusal(weights_only, second, other, rank, world)
    answer["untouched"] = local_bytes(second, other) == before
    return answer


def refusal(directory: Path, model: Any, optimizer: torch.optim.Optimizer, rank: int, world: int) -> str:
    try:
        load_optimizer_state(directory, model, optimizer, rank, world)
    except UserError as error:
        return str(error)
    return "not refused"
