"""`wattwatch` in this process as in a shell: arguments and standard input go in, exit code and text come out."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from wattwatch.watcher.cli.main import main


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def text(self) -> str:
        return self.out + self.err


class PipedInput(io.TextIOWrapper):
    """Standard input that is not a terminal."""


class Shell:
    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture = capture
        self._patch = patch

    def run(self, *arguments: object, stdin: bytes = b"") -> CommandResult:
        self._patch.setattr(sys, "stdin", PipedInput(io.BytesIO(stdin)))
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = self._capture.readouterr()
        assert "Traceback" not in out + err
        assert "internal error" not in out + err
        assert isinstance(ended.value.code, int)
        return CommandResult(ended.value.code, out, err)
