"""Two launches in one run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.launch.lock import only_launch
from trainer.refusal import Refusal
from trainer.run_directory import RunDirectory


def test_the_second_launch_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    refused = pytest.raises(Refusal, match=rf"pid {os.getpid()} on .* launches there already")
    with only_launch(run), refused, only_launch(run):
        pass
    with only_launch(run):
        assert run.launch_lock.read_text().startswith(f"pid {os.getpid()} on ")
