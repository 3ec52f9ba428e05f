"""Files in the working directory or on PYTHONPATH that are named like our packages never replace ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.trainer.gate.gate_processes import write_job
from tests.trainer.launch.jobs import QUICK, MadeJob
from wattwatch.trainer.launch.placement import rank_program

PACKAGES = ("trainer", "watcher", "collectors", "wattwatch")


def plant(directory: Path, names: tuple[str, ...]) -> Path:
    """Modules that leave a file and end their process when they are imported."""
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory / "planted-module-ran"
    for name in names:
        (directory / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close(); raise SystemExit(99)\n")
    return marker


@pytest.fixture
def markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    """Plants in the working directory and on PYTHONPATH.

    Not `wattwatch.py` on PYTHONPATH: Python then means what its user asked for, as it does for every package.
    """
    in_working_directory = plant(tmp_path / "here", PACKAGES)
    on_path = plant(tmp_path / "path", PACKAGES[:3])
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    return in_working_directory, on_path


def test_planted_modules_run_if_nothing_prevents_it(markers: tuple[Path, ...]) -> None:
    """Otherwise the other tests would prove nothing."""
    done = subprocess.run([sys.executable, "-m", "wattwatch.trainer.cli", "--version"], timeout=DEADLINE_SECONDS)
    assert done.returncode == 99
    assert markers[0].exists()
    subprocess.run([sys.executable, "-P", "-c", "import trainer"], timeout=DEADLINE_SECONDS)
    assert markers[1].exists()


def test_the_gate_and_its_probes_are_ours(markers: tuple[Path, ...], tmp_path: Path) -> None:
    data, run = write_job(tmp_path / "data", [16, 16]), tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wattwatch.trainer.cli", "gate", "--data", data, "--run", run, "--world", "2"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gate passed: PASS" in done.stdout
    assert not any(marker.exists() for marker in markers)


def test_everything_that_a_launch_starts_is_ours(markers: tuple[Path, ...], tmp_path: Path) -> None:
    """Node program, gate, probes, a substitute for torchrun, and ranks, with planted files where they start."""
    job = MadeJob(tmp_path / "job")
    job.directory.mkdir()
    job.write()
    # The tests' own programs are on PYTHONPATH behind the planted modules.
    text = job.file.read_text()
    root = json.dumps(os.environ["PYTHONPATH"] + os.pathsep + str(Path(__file__).parents[2]))
    job.file.write_text(
        "\n".join(f"PYTHONPATH = {root}" if "PYTHONPATH" in line else line for line in text.splitlines())
    )
    assert job.start(QUICK) == 0, job.output
    assert not any(marker.exists() for marker in markers)


def test_a_rank_is_ours(markers: tuple[Path, ...], tmp_path: Path) -> None:
    """The command line that torchrun gets for each rank. Without torchrun's variables it refuses, in our words."""
    pytest.importorskip("torch")
    job = MadeJob(tmp_path / "job")
    job.directory.mkdir()
    job.write()
    from wattwatch.trainer.settings import read_job_file

    command = rank_program(read_job_file(str(job.file)), None, None)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WATTWATCH_ATTEMPT")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "RANK is not set: start ranks with `wattwatch-train launch JOB.toml` or torchrun" in done.stdout
    assert not any(marker.exists() for marker in markers)
