"""Runs `wattwatch-train` in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from wattwatch.trainer.cli import main


@dataclass(frozen=True, slots=True)
class Answer:
    exit_code: int
    out: str
    err: str


def run_wattwatch_train(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Answer:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    assert isinstance(exit.value.code, int)
    return Answer(exit.value.code, output.out, output.err)
