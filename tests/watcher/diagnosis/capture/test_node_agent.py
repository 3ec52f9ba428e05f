"""The node agent: a run directory may hold anything, a rank may answer anything; each oddity costs one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.watcher.diagnosis.capture import worker_servers as servers
from tests.watcher.diagnosis.capture.local_node_agent import Answer, ask
from wattwatch.watcher.config.settings import CaptureSettings
from wattwatch.watcher.diagnosis.capture.collector import CapturePlan, NodeCapturePlan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "r"
    for name in ("worker", "heartbeat", "flight/attempt-01"):
        (path / name).mkdir(parents=True)
    return path


def plan_for(run: Path, **changes: object) -> CapturePlan:
    return replace(CapturePlan("job", (), str(run), py_spy=False, rank_bytes=100_000), **changes)  # type: ignore[arg-type]


def asked(run: Path, ranks: tuple[int, ...], **changes: object) -> Answer:
    return ask(plan_for(run, **changes), NodeCapturePlan("node", ranks))


def sock(run: Path, rank: int) -> Path:
    return run / "worker" / f"rank-{rank:05d}.sock"


def write_heartbeat(run: Path, rank: int, **more: object) -> None:
    content = {"host": socket.gethostname(), "pid": os.getpid(), "restart": 0, "phase": "train", **more}
    (run / "heartbeat" / f"rank-{rank:05d}.json").write_text(json.dumps(content))


def test_ranks_with_broken_answers_cost_one_sentence_each_and_the_others_nothing(run: Path) -> None:
    talks = [
        servers.answers,
        servers.of_nccl,
        servers.without_recorder,
        servers.stalls,
        servers.drips,
        servers.floods,
        servers.is_no_torch,
        servers.of_nccl_and_gloo,
    ]
    with contextlib.ExitStack() as stack:
        for rank, talk in enumerate(talks):
            stack.enter_context(servers.serving(sock(run, rank), talk))
        answer = asked(run, tuple(range(len(talks))))
    assert answer.complete
    assert answer.files["recorder.json", 0] == answer.files["recorder.json", 1] == servers.RECORD
    assert answer.files["stacks", 0] == answer.files["stacks", 1] == answer.files["stacks", 2] == servers.STACKS
    assert answer.ranks("recorder.json") == {0, 1, 7}
    assert answer.ranks("recorder-cpu.json") == {7}
    assert answer.ranks("stacks") == {0, 1, 2, 7}
    assert "cannot return flight records" in answer.why(2)
    assert "returned no flight record within 2 s" in answer.why(3)
    assert "returned no flight record within 2 s" in answer.why(4)
    assert "sent more than 100,000 bytes" in answer.why(5)
    assert "ESMTP" in answer.why(6)


def test_anything_but_a_socket_in_place_of_a_socket_is_not_opened(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not for the watcher")
    sock(run, 0).symlink_to(secret)
    os.mkfifo(sock(run, 1))
    sock(run, 2).symlink_to("/nowhere/rank-00002.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(sock(run, 3)))
    answer = asked(run, (0, 1, 2, 3, 4))
    assert answer.files == {}
    assert "is not a socket" in answer.why(0)
    assert "is not a socket" in answer.why(1)
    assert "nothing listens on its worker socket" in answer.why(2)
    assert "nothing listens on its worker socket" in answer.why(3)
    assert "no worker socket in" in answer.why(4)


def test_a_socket_behind_a_link_and_one_of_a_long_path_answer(tmp_path: Path) -> None:
    run = tmp_path / ("r" * 100)
    (run / "worker").mkdir(parents=True)
    private = Path(tmp_path / "p.sock")
    sock(run, 0).symlink_to(private)
    here = os.getcwd()
    with contextlib.ExitStack() as stack:
        stack.enter_context(servers.serving(private, servers.answers))
        os.chdir(run / "worker")  # the only way to bind a name that long
        try:
            stack.enter_context(servers.serving(Path(sock(run, 1).name), servers.answers))
        finally:
            os.chdir(here)
        answer = asked(run, (0, 1))
    assert answer.ranks("stacks") == {0, 1}


def test_links_fifos_and_oversized_dumps_are_not_read(run: Path, tmp_path: Path) -> None:
    flight = run / "flight" / "attempt-01"
    secret = tmp_path / "secret"
    secret.write_text("not for the watcher")
    (flight / "rank-00000").symlink_to(secret)
    os.mkfifo(flight / "rank-00001")
    with (flight / "rank-00002").open("wb") as file:
        file.truncate(10 * 2**30)
    (flight / "rank-00003").mkdir()
    (flight / "rank-00004").write_bytes(b"\x80\x02}.")
    (flight / "recorder-00004.json").write_bytes(b'{"entries": []}')
    (flight / "rank-00005").write_bytes(b"\x80\x02}.")
    answer = asked(run, tuple(range(6)))
    assert answer.complete
    assert set(answer.files) == {("recorder.json", 4), ("recorder", 5)}
    assert "symbolic link" in answer.why(0)
    assert "not a regular file" in answer.why(1)
    assert "10,737,418,240 bytes, more than the limit of 100,000 bytes" in answer.why(2)
    assert "not a regular file" in answer.why(3)
    assert answer.heads["recorder", 5]["owner_uid"] == os.geteuid()
    assert answer.heads["recorder", 5]["age_seconds"] >= 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_planted_by_another_user_are_not_read(run: Path) -> None:
    planted = run / "flight" / "attempt-01" / "rank-00000"
    planted.write_bytes(b"\x80\x02}.")
    os.chown(planted, 12345, -1)
    with servers.serving(sock(run, 1), servers.answers):
        os.chown(sock(run, 1), 12345, -1)
        answer = asked(run, (0, 1))
    assert answer.files == {}
    assert "belongs to user 12345" in answer.why(0)
    assert "belongs to user 12345" in answer.why(1)


def test_dumps_of_an_earlier_attempt_are_ignored(run: Path) -> None:
    (run / "flight" / "attempt-01" / "rank-00000").write_bytes(b"\x80\x02}.")
    write_heartbeat(run, 0, restart=1)
    answer = asked(run, ())
    assert ("recorder", 0) not in answer.files
    assert any(
        "ignored, because attempt 2 is running and the dumps are from attempt 1" in sentence
        for sentence in answer.missing
    )


def test_hostile_heartbeats_cost_one_sentence_and_no_time(run: Path, tmp_path: Path) -> None:
    os.mkfifo(run / "heartbeat" / "rank-00000.json")
    (run / "heartbeat" / "rank-00001.json").symlink_to(tmp_path)
    (run / "heartbeat" / "rank-00002.json").write_text("[" * 60000)
    (run / "heartbeat" / "rank-00003.json").write_text('{"host": 3}')
    (run / "heartbeat" / "rank-00004.json").write_bytes(b"x" * 10**6)
    write_heartbeat(run, 5)
    answer = asked(run, ())
    assert answer.complete
    assert all(answer.why(rank) for rank in range(5))
    (row,) = json.loads(answer.files["processes", None])
    assert (row["rank"], row["pid"], row["state"]) == (5, os.getpid(), row["state"])


def test_sockets_of_other_hosts_are_not_asked(run: Path) -> None:
    write_heartbeat(run, 0)
    write_heartbeat(run, 1, host="another")
    with contextlib.ExitStack() as stack:
        for rank in (0, 1):
            stack.enter_context(servers.serving(sock(run, rank), servers.answers))
        answer = asked(run, ())
    assert answer.ranks("stacks") == {0}


def test_without_heartbeats_a_socket_that_refuses_may_be_of_another_host(run: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, servers.serving(sock(run, 0), servers.answers):
        left.bind(str(sock(run, 1)))
        answer = asked(run, ())
    assert answer.ranks("stacks") == {0}
    assert answer.elsewhere == [1]


def test_files_over_the_size_limit_of_a_node_are_not_sent(run: Path) -> None:
    for rank in range(4):
        (run / "flight" / "attempt-01" / f"rank-{rank:05d}").write_bytes(b"\x80" + bytes(60_000))
    answer = asked(run, (0, 1, 2, 3), node_bytes=130_000)
    assert answer.ranks("recorder") == {0, 1}
    assert "more than the limit of" in answer.why(2)


def fifo_reader(path: Path, dump: Path, received: list[bytes]) -> threading.Thread:
    """Like torch's monitor thread: any byte requests a dump."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> None:
        for _ in range(int(DEADLINE_SECONDS / 0.05)):
            if byte := os.read(descriptor, 1):
                received.append(byte)
                dump.write_bytes(b"\x80\x02}.")
                break
            threading.Event().wait(0.05)
        os.close(descriptor)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_a_dump_is_requested_through_a_fifo_if_the_configuration_allows_it(run: Path, tmp_path: Path) -> None:
    settings = CaptureSettings(f"{tmp_path}/nccl_trace_rank_", f"{tmp_path}/pipe_")
    os.mkfifo(tmp_path / "pipe_0.pipe")
    os.mkfifo(tmp_path / "pipe_1.pipe")
    (tmp_path / "pipe_2.pipe").write_text("no FIFO")
    received: list[bytes] = []
    thread = fifo_reader(tmp_path / "pipe_0.pipe", tmp_path / "nccl_trace_rank_0", received)
    answer = asked(run, (0, 1, 2), settings=settings)
    thread.join(DEADLINE_SECONDS)
    assert received == [b"1"]
    assert answer.ranks("recorder") == {0}
    assert "nothing reads it" in answer.why(1)
    assert "is not a FIFO" in answer.why(2)
    assert (tmp_path / "pipe_2.pipe").read_text() == "no FIFO"


@pytest.mark.parametrize("told_by", ["watcher", "heartbeat"])
def test_no_dump_is_requested_during_a_save(run: Path, tmp_path: Path, told_by: str) -> None:
    settings = CaptureSettings(f"{tmp_path}/nccl_trace_rank_", f"{tmp_path}/pipe_")
    pipe = tmp_path / "pipe_0.pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    if told_by == "heartbeat":
        write_heartbeat(run, 0, phase="save")
    answer = asked(run, (0,), settings=settings, saving=told_by == "watcher")
    assert os.read(descriptor, 1) == b""
    os.close(descriptor)
    assert any("the job is saving a checkpoint" in sentence for sentence in answer.missing)


def test_the_agent_ends_in_time_whatever_is_blocked(run: Path) -> None:
    with contextlib.ExitStack() as stack:
        for rank in range(8):
            stack.enter_context(servers.serving(sock(run, rank), servers.stalls))
        answer = asked(run, tuple(range(8)), deadline_seconds=2.5)
    assert answer.complete
    assert any(
        "not finished within" in sentence or "not everything could be captured" in sentence
        for sentence in answer.missing
    )


def test_py_spy_is_used_for_ranks_that_gave_no_stacks(run: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "py-spy").write_text(
        f'#!/bin/sh\ncase "$*" in "dump --nonblocking --pid {os.getpid()}")\n'
        'echo "Thread 1 (idle): MainThread"; echo "    step (train.py:3)";; *) exit 1;; esac\n'
    )
    (tools / "py-spy").chmod(0o755)
    node = NodeCapturePlan("node", (0,), ((0, os.getpid()), (1, os.getppid())))
    answer = ask(plan_for(run, py_spy=True), node, tools)
    assert b"step (train.py:3)" in answer.files["stacks", 0]
    assert "py-spy: no stacks" in answer.why(1)


def test_a_process_that_no_longer_exists_is_reported_as_gone(run: Path) -> None:
    node = NodeCapturePlan("node", (0,), ((0, 2**22 + 1),))
    answer = ask(plan_for(run), node)
    (row,) = json.loads(answer.files["processes", None])
    assert row["state"] is None
    assert "its process 4194305 has exited" in answer.why(0)
