"""The node agent: exit reports and the ends of logs, whatever is in their place."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.watcher.diagnosis.capture import worker_servers as servers
from tests.watcher.diagnosis.capture.local_node_agent import Answer, ask
from wattwatch.watcher.diagnosis.capture.collector import CapturePlan, NodeCapturePlan

ENDING = b'{"code": 5, "why": "/nfs/ckpt: No space left on device", "step": 40, "follows": false}'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "r"
    for name in ("worker", "heartbeat", "logs/attempt-01", "logs/attempt-02"):
        (path / name).mkdir(parents=True)
    return path


def asked(run: Path, ranks: tuple[int, ...], stands_in_for: tuple[int, ...] = (), node_bytes: int = 2**20) -> Answer:
    plan = CapturePlan("job", (), str(run), py_spy=False, rank_bytes=100_000, node_bytes=node_bytes)
    return ask(plan, NodeCapturePlan("node", ranks, stands_in_for=stands_in_for))


def log(run: Path, rank: int, attempt: int = 2) -> Path:
    return run / "logs" / f"attempt-{attempt:02d}" / f"rank-{rank:05d}.log"


def test_the_newest_exit_reports_and_logs_of_silent_ranks_are_sent(run: Path) -> None:
    for rank in range(4):
        log(run, rank, 1).write_text("of an attempt before")
        log(run, rank).write_text(f"rank {rank} was here")
        log(run, rank).with_suffix(".ending.json").write_bytes(ENDING)
    with servers.serving(run / "worker" / "rank-00000.sock", servers.answers):
        answer = asked(run, (0, 1), (3,))
    assert answer.ranks("ending.json") == {0, 1, 3}
    assert answer.ranks("log") == {1, 3}
    assert answer.files["log", 1] == b"rank 1 was here"
    assert answer.files["ending.json", 1] == ENDING
    assert answer.heads["log", 1]["source"] == str(log(run, 1))
    assert answer.heads["log", 1]["owner_uid"] == os.geteuid()
    assert answer.heads["log", 1]["age_seconds"] >= 0


def test_only_the_end_of_a_log_is_sent(run: Path) -> None:
    with log(run, 0).open("wb") as file:
        file.truncate(10 * 2**30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nValueError: the end")
    log(run, 1).write_bytes(b"")
    log(run, 2).with_suffix(".ending.json").write_bytes(b"x" * 70_000)
    answer = asked(run, (0, 1, 2))
    assert answer.complete
    assert len(answer.files["log", 0]) == 8192
    assert answer.files["log", 0].endswith(b"ValueError: the end")
    assert answer.ranks("log") == {0}
    assert answer.ranks("ending.json") == set()
    assert "70,000 bytes, more than the limit of 65,536 bytes" in answer.why(2)


def test_anything_but_a_file_in_place_of_a_log_is_not_opened(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not for the watcher")
    log(run, 0).symlink_to(secret)
    os.mkfifo(log(run, 1))
    log(run, 2).mkdir()
    log(run, 3).with_suffix(".ending.json").symlink_to(secret)
    answer = asked(run, (0, 1, 2, 3, 4))
    assert answer.complete
    assert answer.files == {}
    assert "symbolic link" in answer.why(0)
    assert "not a regular file" in answer.why(1)
    assert "not a regular file" in answer.why(2)
    assert "symbolic link" in answer.why(3)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_log_of_another_user_is_not_read(run: Path) -> None:
    log(run, 0).write_text("planted")
    os.chown(log(run, 0), 12345, -1)
    answer = asked(run, (0,))
    assert answer.files == {}
    assert "belongs to user 12345" in answer.why(0)


def test_logs_of_an_earlier_attempt_are_ignored(run: Path) -> None:
    log(run, 0).write_text("of attempt 2")
    heartbeat = {"host": socket.gethostname(), "pid": os.getpid(), "restart": 2, "phase": "train"}
    (run / "heartbeat" / "rank-00000.json").write_text(json.dumps(heartbeat))
    answer = asked(run, ())
    assert answer.ranks("log") == set()
    assert any("attempt 3 is running" in sentence for sentence in answer.missing)


def test_a_job_without_logs_is_no_failure(run: Path) -> None:
    for path in (run / "logs").iterdir():
        path.rmdir()
    (run / "logs").rmdir()
    answer = asked(run, (0,))
    assert answer.complete
    assert not any("/logs" in sentence for sentence in answer.missing)


def test_logs_count_towards_the_size_limit_of_a_node(run: Path) -> None:
    for rank in range(4):
        log(run, rank).write_bytes(b"x" * 8192)
    answer = asked(run, (0, 1, 2, 3), node_bytes=20_000)
    assert len(answer.ranks("log")) == 2
    assert "was left out because of the size limit" in answer.why(3)
