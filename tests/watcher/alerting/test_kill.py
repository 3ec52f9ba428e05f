"""kill -9 at each step of a delivery, then a restart: delivered at least once, and twice only under the same key.

Alertmanager 0.25, killed and restarted the same way, loses an alert that resolves meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.watcher.alerting.fakes import FakeReceiver, ScriptedReply, fake_receiver

ROOT = Path(__file__).parents[3]


def run(directory: Path, hook: FakeReceiver, step: str) -> int:
    command = [sys.executable, "-m", "tests.watcher.alerting.killed_process", str(directory), str(hook.port), step]
    return subprocess.run(command, cwd=ROOT, timeout=DEADLINE_SECONDS, check=False).returncode


@pytest.mark.parametrize(
    ("step", "posts_before", "posts_in_all"),
    [
        ("before_commit", 0, 1),  # nothing saved: the restarted watcher detects it again
        ("after_commit", 0, 1),  # on disk, not posted
        ("before_outcome", 1, 2),  # posted and accepted, but the outcome is not saved: posted again
        ("after_outcome", 1, 1),
    ],
)
def test_a_kill_at_any_commit_loses_no_message(tmp_path: Path, step: str, posts_before: int, posts_in_all: int) -> None:
    with fake_receiver() as hook:
        assert run(tmp_path, hook, step) == -signal.SIGKILL
        assert len(hook.posts) == posts_before
        assert run(tmp_path, hook, "never") == 0
        assert len(hook.posts) == posts_in_all
        assert len(set(hook.keys())) == 1
        assert len({post.body for post in hook.posts}) == 1


def test_a_kill_between_the_post_and_its_response_loses_no_message(tmp_path: Path) -> None:
    with fake_receiver() as hook:
        process: list[subprocess.Popen[bytes]] = []
        hook.replies = [ScriptedReply(before=lambda: os.kill(process[0].pid, signal.SIGKILL), cut=True)]
        command = [
            sys.executable,
            "-m",
            "tests.watcher.alerting.killed_process",
            str(tmp_path),
            str(hook.port),
            "never",
        ]
        process.append(subprocess.Popen(command, cwd=ROOT))
        assert process[0].wait(DEADLINE_SECONDS) == -signal.SIGKILL
        assert run(tmp_path, hook, "never") == 0
        assert len(hook.posts) == 2
        assert len(set(hook.keys())) == 1
