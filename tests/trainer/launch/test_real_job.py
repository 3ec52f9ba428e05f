"""The whole command with the real trainer, on this machine's CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.trainer.launch.jobs import ROOT, free_ports, left_running


def test_a_smoke_test_leaves_nothing_that_training_would_resume_from(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.trainer.train.tiny_model import write_blocks, write_model

    write_model(tmp_path / "model")
    write_blocks(tmp_path / "data", [37, 34])
    lines = [f"{name} = {json.dumps(str(tmp_path / name))}" for name in ("run", "data", "model")]
    lines += ["[train]", "accumulation = 2", 'precision = "fp32"']
    lines += ["[launch]", "ranks_per_node = 2", f"port = {free_ports()}"]
    job = tmp_path / "job.toml"
    job.write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "wattwatch.trainer.cli", "launch", str(job), "--smoke", "boundary"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step=17/17 " in done.stdout
    assert "launch: done: the last steps and the save after them succeeded" in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"smoke"}
    assert left_running(str(tmp_path)) == []
