"""Child processes that are forked from one that has torch and transformers loaded.

Importing both takes 4 s of CPU time, more than most tests of several ranks need for everything else. The fork server is
started once for the whole test run, has no threads, and never computes anything, so forking it is safe.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

# What ranks import, the slowest first. One that cannot be imported is skipped here and fails in the rank that needs it.
PRELOADED_MODULES: Final = [
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "wattwatch.trainer.train.loop",
    "wattwatch.trainer.train.start",
    "wattwatch.trainer.train.diagnostics",
    "tests.trainer.checkpoint.scenarios",
]


def preloaded_context() -> ForkServerContext:
    """The context whose `Process` is forked with PRELOADED_MODULES in memory.

    Environment variables that torch or OpenMP read at import (OMP_NUM_THREADS) have no effect in the child: use
    `torch.set_num_threads`. Those that are read later (TORCH_FR_BUFFER_SIZE, GLOO_SOCKET_IFNAME) do.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    return context
