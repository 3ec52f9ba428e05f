"""What each rank does in tests of the step, with real FSDP and gloo, and a reference without them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.trainer.train.tiny_model import SEQ_LEN
from wattwatch.trainer.settings import Evenness, TrainSettings

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LockstepResult:
    """The result of one rank."""

    gradients: Arrays  # whole, of the first step
    norm: float
    tokens: int
    losses: list[float]
    collectives: list[tuple[str, str]]  # name and sizes, in order
    plan: str


def lockstep(model_directory: str, data: str, settings: TrainSettings, steps: int) -> LockstepResult:
    """The gradients of step 0, and then `steps` steps from the start with the schedule and AdamW."""
    import torch

    from wattwatch.trainer.pack.blocks import PackedBlocks
    from wattwatch.trainer.train.batches import BatchReader
    from wattwatch.trainer.train.evenfix import agree_on_blocks
    from wattwatch.trainer.train.loop import learning_rate
    from wattwatch.trainer.train.model import empty_model, load_weights
    from wattwatch.trainer.train.process_groups import RankInfo, process_group
    from wattwatch.trainer.train.start import make_optimizer
    from wattwatch.trainer.train.step import run_step
    from wattwatch.trainer.train.stopping import StopRequest

    torch.set_num_threads(1)
    place = RankInfo.from_environment()
    with process_group(place, 60.0) as (mesh, device):
        blocks = PackedBlocks(Path(data), place.rank)
        evenness, a_step = Evenness(settings.evenness), settings.micro_batch * settings.accumulation
        plan = agree_on_blocks(blocks.count, a_step, settings.epochs, evenness, device)
        batches = BatchReader(blocks, plan, settings.micro_batch, settings.document_mask)
        model = empty_model(Path(model_directory), settings, mesh, device)
        load_weights(model, Path(model_directory))
        keeper = gradient_keeper(model)
        first = run_step(model, keeper, batches, 0, replace(settings, clip_norm=0.0), StopRequest.NONE, device)
        optimizer, losses = make_optimizer(model, settings), []
        for step in range(min(steps, plan.steps)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, plan.steps)
            losses.append(run_step(model, optimizer, batches, step, settings, StopRequest.NONE, device).loss)
        return LockstepResult(keeper.kept, first.grad_norm, first.tokens, losses, recorded_collectives(), str(plan))


def gradient_keeper(model: Any) -> Any:
    """An optimizer that stores whole gradients and changes nothing."""
    import torch

    class Keeping(torch.optim.SGD):
        kept: Arrays

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody passes a closure
            self.kept = {name: p.grad.full_tensor().cpu().numpy().copy() for name, p in model.named_parameters()}

    return Keeping(model.parameters(), lr=0.0)


def recorded_collectives() -> list[tuple[str, str]]:
    """The collectives in this rank's flight recorder, in order."""
    from torch._C import _distributed_c10d as recorder

    entries = json.loads(recorder._dump_fr_trace_json())["entries"]  # type: ignore[attr-defined]  # not in torch's stubs
    return [(entry["profiling_name"], str(entry["input_sizes"])) for entry in entries]


@dataclass(frozen=True, slots=True)
class Reference:
    """One process, the unsharded model, all ranks' blocks: the mean over target tokens, by its definition."""

    gradients: Arrays
    norm: float
    tokens: int
    losses: list[float]


def single_process(model_directory: Path, data: Path, world: int, settings: TrainSettings, steps: int) -> Reference:
    """Written without the trainer's own step, schedule, batches or loss."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    ids = [np.fromfile(data / f"rank-{r:05d}.i32", "<i4").astype(np.int64).reshape(-1, SEQ_LEN) for r in range(world)]
    starts = [set(np.fromfile(data / f"rank-{r:05d}.starts.i64", "<i8").tolist()) for r in range(world)]
    a_step = settings.micro_batch * settings.accumulation
    total = min(len(blocks) for blocks in ids) // a_step

    def loss_of(model: Any, step: int) -> tuple[torch.Tensor, int]:
        summed, count = torch.zeros(()), 0
        for rank in range(world):
            for index in range(step * a_step, (step + 1) * a_step):
                block = ids[rank][index]
                begins = [p for p in range(SEQ_LEN) if p == 0 or index * SEQ_LEN + p in starts[rank]]
                if not settings.document_mask:
                    begins = [0]
                for begin, end in zip(begins, [*begins[1:], SEQ_LEN], strict=True):  # each record alone
                    if end - begin > 1:
                        piece = torch.from_numpy(block[begin:end])[None]
                        logp = model(input_ids=piece).logits[0, :-1].float().log_softmax(-1)
                        summed = summed - logp.gather(1, piece[0, 1:, None]).sum()
                        count += end - begin - 1
        return summed / count, count

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    loss, tokens = loss_of(model, 0)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}
    norm = float(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()) ** 0.5)
    model.zero_grad()
    decays = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2), eps=settings.epsilon,
    )  # fmt: skip
    losses = []
    for step in range(min(steps, total)):
        warmup = min(settings.warmup_steps, total)
        part = max(0.0, (step - warmup) / max(1, total - warmup))
        cosine = 0.5 * (1 + np.cos(np.pi * part)) * (1 - settings.final_learning_rate_share)
        rate = settings.learning_rate * (cosine + settings.final_learning_rate_share) * min(1, (step + 1) / warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, _ = loss_of(model, step)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Reference(gradients, norm, tokens, losses)
