"""What the tests of the commands share."""

from __future__ import annotations

import pytest

from tests.watcher.command_shell import Shell


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)
