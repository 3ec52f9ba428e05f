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

from tests.tools import DEADLINE_SECONDS
from tests.trainer.train.rank_processes import free_port
from tests.trainer.train.tiny_model import write_blocks, write_model

STEPS: Final = 30
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


@dataclass(frozen=True, slots=True)
class InterruptedJob:
    """One job that is launched three times and interrupted each time; launches as exit code and output."""

    directory: Path
    terminated: tuple[int, str]  # one rank got SIGTERM
    endings: list[dict[str, Any]]  # of that attempt, by rank
    stopped: tuple[int, str]  # by the stop file
    newest_checkpoint: Path  # that the stop file caused; its weights lose a byte before the third launch
    newest_step: int  # as its COMPLETE.json says
    killed: tuple[int, str]  # one rank got SIGKILL; the launch retries and completes


@pytest.fixture(scope="module")
def interrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> InterruptedJob:
    """Importing torch is most of what a launch costs, so one job undergoes all interruptions, one after the other."""
    directory = tmp_path_factory.mktemp("interrupted")
    first = launch(directory, inputs)
    os.kill(first.wait_for_step(7)["pid"], signal.SIGTERM)
    terminated = first.end()
    logs = directory / "run" / "logs" / "attempt-01"
    endings = [json.loads(path.read_text()) for path in sorted(logs.glob("*.ending.json"))]

    second = launch(directory, inputs)
    second.wait_for_step(10)
    (directory / "run" / "stop").touch()
    stopped = second.end()
    newest = directory / "run" / "checkpoints" / checkpoints(directory)[-1]
    newest_step = json.loads((newest / "COMPLETE.json").read_text())["step"]
    weights = newest / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)

    third = launch(directory, inputs)
    os.kill(third.wait_for_step(14)["pid"], signal.SIGKILL)
    return InterruptedJob(directory, terminated, endings, stopped, newest, newest_step, third.end())


def test_sigterm_on_one_rank_stops_all_at_the_same_step(interrupted: InterruptedJob) -> None:
    code, said = interrupted.terminated
    assert code == 4, said
    endings = interrupted.endings
    assert [ending["code"] for ending in endings] == [4, 4]
    assert endings[0]["step"] == endings[1]["step"] < STEPS
    assert "SIGTERM" in endings[1]["why"]


def test_a_new_launch_continues_until_the_stop_file_which_saves(interrupted: InterruptedJob) -> None:
    code, said = interrupted.stopped
    assert code == 4, said
    assert f"step-{interrupted.newest_step:08d}" == interrupted.newest_checkpoint.name
    # Not later on a machine on which the first launch was past step 10 when it stopped: this one then stops at once.
    assert interrupted.newest_step >= interrupted.endings[0]["step"]


def test_a_damaged_checkpoint_is_skipped(interrupted: InterruptedJob) -> None:
    code, said = interrupted.killed
    assert code == 0, said
    assert f"{interrupted.newest_checkpoint / 'model.safetensors'} is truncated" in said


def test_a_killed_rank_costs_one_attempt_and_nothing_else(interrupted: InterruptedJob) -> None:
    code, said = interrupted.killed
    assert code == 0, said
    assert "rank 1 on localhost was killed by SIGKILL" in said
    assert re.search(r"launch: attempt 4, .*step-000000", said), said


def test_the_final_weights_are_those_of_an_uninterrupted_run(
    interrupted: InterruptedJob, uninterrupted: dict[str, str]
) -> None:
    assert hashes(interrupted.directory) == uninterrupted
