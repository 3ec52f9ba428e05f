"""Two launches in one run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.launch.launcher import lock_run_directory
from wattwatch.trainer.run_directory import RunDirectory


def test_a_second_launch_is_refused_and_names_the_process_of_the_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    refused = pytest.raises(UserError, match=rf"another launch is using this run directory \(pid {os.getpid()} on ")
    with lock_run_directory(run), refused, lock_run_directory(run):
        pass
    with lock_run_directory(run):
        assert run.launch_lock.read_text().startswith(f"pid {os.getpid()} on ")
