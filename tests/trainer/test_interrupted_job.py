"""A whole job under its launcher, interrupted in several ways, ends as if nothing had happened.

With optimizer state saved, the final weights are those of an uninterrupted run, bit for bit: every step used the same
blocks, at the same learning rate, from the same state.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.trainer.train.rank_processes import free_port
from tests.trainer.train.tiny_model import write_blocks, write_model

STEPS: Final = 30
DEADLINE_SECONDS: Final = 100.0
JOB: Final = """
run = "{directory}/run"
data = "{inputs}/data"
model = "{inputs}/model"
[train]
accumulation = 4
warmup_steps = 5
learning_rate = 1e-3
document_mask = true
[checkpoint]
save_every = 6
keep = 3
optimizer = true
[launch]
ranks_per_node = 2
port = {port}
retry_wait_seconds = 0.1
"""


@dataclass(frozen=True, slots=True)
class RunningLaunch:
    """A launch that is running."""

    directory: Path
    process: subprocess.Popen[str]

    def heartbeat(self, rank: int) -> dict[str, Any]:
        """The last heartbeat of a rank of this launch; {} before the first."""
        try:
            beat = json.loads((self.directory / "run" / "heartbeat" / f"rank-{rank:05d}.json").read_text())
        except FileNotFoundError:
            return {}
        assert isinstance(beat, dict)
        return beat if os.path.exists(f"/proc/{beat['pid']}") else {}

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """The heartbeat of rank 1 at this step or a later one."""
        until = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < until:
            if (beat := self.heartbeat(1)).get("step", -1) >= step and beat["phase"] == "train":
                return beat
            time.sleep(0.02)
        raise AssertionError(f"rank 1 never came to step {step}: {self.end()}")

    def end(self) -> tuple[int, str]:
        """Exit code, and all output."""
        try:
            out, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
        return self.process.returncode, out


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    write_model(directory / "model")
    write_blocks(directory / "data", [STEPS * 4 + 1, STEPS * 4 + 9])
    return directory


def launch(directory: Path, inputs: Path) -> RunningLaunch:
    job = directory / "job.toml"
    if not job.exists():
        job.write_text(JOB.format(directory=directory, inputs=inputs, port=free_port()))
    command = [sys.executable, "-m", "wattwatch.trainer.cli", "launch", str(job)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return RunningLaunch(directory, process)


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """sha256 of every file of the last checkpoint, by name."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    code, said = launch(directory, inputs).end()
    assert code == 0, said
    return hashes(directory)


def hashes(directory: Path) -> dict[str, str]:
    path = directory / "run" / "checkpoints" / f"step-{STEPS:08d}" / "COMPLETE.json"
    return {name: fact["sha256"] for name, fact in json.loads(path.read_text())["files"].items()}


def checkpoints(directory: Path) -> list[str]:
    return sorted(entry.name for entry in (directory / "run" / "checkpoints").iterdir() if entry.is_dir())


def test_a_killed_rank_costs_one_attempt_and_nothing_else(
    inputs: Path, uninterrupted: dict[str, str], tmp_path: Path
) -> None:
    job = launch(tmp_path, inputs)
    os.kill(job.wait_for_step(8)["pid"], signal.SIGKILL)
    code, said = job.end()
    assert code == 0, said
    assert "rank 1 on localhost was killed by SIGKILL" in said
    assert re.search(r"launch: attempt 2, .*step-000000", said), said
    assert hashes(tmp_path) == uninterrupted


def test_sigterm_on_one_rank_stops_all_at_the_same_step_and_a_new_launch_continues(
    inputs: Path, uninterrupted: dict[str, str], tmp_path: Path
) -> None:
    job = launch(tmp_path, inputs)
    os.kill(job.wait_for_step(8)["pid"], signal.SIGTERM)
    code, said = job.end()
    assert code == 4, said
    endings = [
        json.loads(p.read_text()) for p in sorted((tmp_path / "run" / "logs" / "attempt-01").glob("*.ending.json"))
    ]
    assert [ending["code"] for ending in endings] == [4, 4]
    assert endings[0]["step"] == endings[1]["step"] < STEPS
    assert "SIGTERM" in endings[1]["why"]
    code, said = launch(tmp_path, inputs).end()
    assert code == 0, said
    assert hashes(tmp_path) == uninterrupted


def test_the_stop_file_saves_and_a_damaged_checkpoint_is_skipped(
    inputs: Path, uninterrupted: dict[str, str], tmp_path: Path
) -> None:
    job = launch(tmp_path, inputs)
    job.wait_for_step(8)
    (tmp_path / "run" / "stop").touch()
    code, said = job.end()
    assert code == 4, said
    newest = tmp_path / "run" / "checkpoints" / checkpoints(tmp_path)[-1]
    assert f"step-{json.loads((newest / 'COMPLETE.json').read_text())['step']:08d}" == newest.name
    weights = newest / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    code, said = launch(tmp_path, inputs).end()
    assert code == 0, said
    assert f"{weights}: truncated" in said
    assert hashes(tmp_path) == uninterrupted
