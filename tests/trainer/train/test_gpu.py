"""The same step on GPUs over NCCL; skipped where there is none, and the reason says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.train.test_lockstep import RAGGED, pair


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use on this machine")
def test_gpu_ranks_have_the_gradients_of_one_cpu_process(tmp_path: Path) -> None:
    world = min(2, torch.cuda.device_count())
    both = pair(tmp_path, [8] * world, replace(RAGGED, precision="fp32"), 5)
    for result in both.ranks:
        assert result.tokens == both.alone.tokens
        for name, gradient in result.gradients.items():
            np.testing.assert_allclose(gradient, both.alone.gradients[name], rtol=1e-2, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(result.losses, both.alone.losses, rtol=1e-2)
