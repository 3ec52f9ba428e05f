"""How fast: tokens a second over all ranks, the share of the boards' peak, and the wait for data."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Throughput:
    """Since the last line."""

    tokens_per_second: float  # over all ranks, targets or not
    mfu: float | None  # model FLOPS over peak, 0 to 1; None where the peak is not known
    data_wait_ms: float  # mean of a step, on this rank


def peak_flops_of_gpu(board: str) -> float | None:
    """Dense bfloat16 peak of a board by the name its driver gives; None where it is in no table."""
    table = tomllib.loads((files("wattwatch.trainer.train") / "peak_flops.toml").read_text())
    for entry in table["boards"]:
        if entry["name"] in board:
            return float(entry["bf16_tflops"]) * 1e12
    return None


def flops_per_token(model: Any, seq_len: int) -> float:
    """Forward and backward: 6 for each parameter that multiplies; 12 x layers x heads x size x seq_len for attention.

    Recomputing of activations is no work of the model's and does not count (MFU, not HFU).
    """
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if head is not embedding:
        parameters -= embedding.numel()  # looked up, not multiplied
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(6 * parameters + 12 * config.num_hidden_layers * config.num_attention_heads * head_size * seq_len)


class ThroughputMeter:
    """Takes steps, gives the pace since it was last asked."""

    def __init__(self, flops: float, peak_of_all: float | None) -> None:
        self._flops, self._peak = flops, peak_of_all
        self._begin()

    def _begin(self) -> None:
        self._since, self._tokens, self._steps, self._waited = time.perf_counter(), 0, 0, 0.0

    def step(self, tokens: int, waited_seconds: float) -> None:
        self._tokens += tokens
        self._steps += 1
        self._waited += waited_seconds

    def restart(self) -> None:
        """After a save, which is not training."""
        self._begin()

    def pace(self) -> Throughput | None:
        """None before a step."""
        if not self._steps:
            return None
        rate = self._tokens / (time.perf_counter() - self._since)
        pace = Throughput(
            rate, rate * self._flops / self._peak if self._peak else None, 1e3 * self._waited / self._steps
        )
        self._begin()
        return pace
