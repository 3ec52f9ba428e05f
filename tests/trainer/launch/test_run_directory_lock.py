"""Two launches in one run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.launch.launcher import lock_run_directory
from wattwatch.trainer.run_directory import RunDirectory


def test_the_second_launch_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    refused = pytest.raises(UserError, match=rf"pid {os.getpid()} on .* launches there already")
    with lock_run_directory(run), refused, lock_run_directory(run):
        pass
    with lock_run_directory(run):
        assert run.launch_lock.read_text().startswith(f"pid {os.getpid()} on ")
