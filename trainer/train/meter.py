"""Throughput: tokens per second over all ranks, model FLOPS utilization (MFU), and the wait for data."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Throughput:
    """Since the last log line."""

    tokens_per_second: float  # over all ranks, targets or not
    mfu: float | None  # model FLOPS over peak FLOPS, 0 to 1; None if the GPU's peak is not known
    data_wait_ms: float  # mean per step, on this rank


def peak_flops_of_gpu(name: str) -> float | None:
    """Peak of dense bfloat16 FLOPS by the name that the driver gives; None if it is not in peak_flops.toml."""
    table = tomllib.loads((files("wattwatch.trainer.train") / "peak_flops.toml").read_text())
    for gpu in table["gpus"]:
        if gpu["name"] in name:
            return float(gpu["bf16_tflops"]) * 1e12
    return None


def flops_per_token(model: Any, seq_len: int) -> float:
    """FLOPS of forward and backward pass per token.

    6 per parameter that is multiplied, plus 12 x layers x heads x head size x seq_len for attention (arXiv 2204.02311,
    appendix B). Recomputed activations do not count: this is MFU, not hardware utilization.
    """
    config = model.config.get_text_config()
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if output is not embedding:
        parameters -= embedding.numel()  # rows are looked up, not multiplied
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(6 * parameters + 12 * config.num_hidden_layers * config.num_attention_heads * head_size * seq_len)


class ThroughputMeter:
    """Counts steps; `throughput` gives the figures since its last call."""

    def __init__(self, flops_per_token: float, peak_flops: float | None) -> None:
        """`peak_flops` is that of all ranks together."""
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.restart()

    def step(self, tokens: int, waited_seconds: float) -> None:
        self._tokens += tokens
        self._steps += 1
        self._waited_seconds += waited_seconds

    def restart(self) -> None:
        """Also called after a save, whose time does not count as training."""
        self._since, self._tokens, self._steps, self._waited_seconds = time.perf_counter(), 0, 0, 0.0

    def throughput(self) -> Throughput | None:
        """None if there was no step since the last call."""
        if not self._steps:
            return None
        # Steps end with a float() of the loss, which waits for the GPU, so that wall-clock time is the real time.
        rate = self._tokens / (time.perf_counter() - self._since)
        mfu = rate * self._flops_per_token / self._peak_flops if self._peak_flops else None
        found = Throughput(rate, mfu, 1e3 * self._waited_seconds / self._steps)
        self.restart()
        return found
