"""Stacks and flight recorder of a rank are available while its main thread is in a collective or waits for a lock."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.trainer.run_directory import RunDirectory
from wattwatch.trainer.train.diagnostics import worker_socket

pytest.importorskip("torch", reason="torch is not installed: pip install 'wattwatch[trainer]'")

RANK = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from wattwatch.trainer.run_directory import RunDirectory
from wattwatch.trainer.train import diagnostics
from wattwatch.trainer.train.diagnostics import worker_socket, write_flight_record

diagnostics.DUMP_SECONDS = 180.0  # the product gives up early, because the file system may hang; here the CPU is busy
run, rank, timeout = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
store = f"file://{run}/store"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
with worker_socket(RunDirectory(run), rank, print):
    dist.all_reduce(torch.ones(1))
    try:
        if rank == 0:
            dist.barrier()  # as in a save
        else:
            dist.all_reduce(torch.ones(2))  # as in the next step
    except RuntimeError:
        write_flight_record(RunDirectory(run), 2, rank, print)
        sys.exit(5)
"""


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=DEADLINE_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_SECONDS)
        self.sock.connect(str(self._path.resolve()))


def ask(path: Path, handler: str) -> str:
    connection = UnixConnection(path)
    try:
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()
    finally:
        connection.close()


def start(run: Path, timeout_seconds: float) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(run), str(rank), str(timeout_seconds)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]


def names_when_stuck(path: Path) -> list[str]:
    """Names of the recorded collectives, once there are two. Before the first there is no list."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if path.exists():
            names = [entry["profiling_name"] for entry in json.loads(ask(path, "fr_trace_json")).get("entries", ())]
            if len(names) == 2:
                return names
        time.sleep(0.05)
    raise AssertionError(f"{path} reported no second collective")


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    """Two ranks in two different collectives, until killed."""
    ranks = start(tmp_path, timeout_seconds=600.0)
    try:
        yield tmp_path
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_that_wait_in_different_collectives_report_which_and_where(stuck: Path) -> None:
    directory = RunDirectory(stuck)
    assert names_when_stuck(directory.worker_socket(0)) == ["gloo:all_reduce", "gloo:barrier"]
    assert names_when_stuck(directory.worker_socket(1)) == ["gloo:all_reduce", "gloo:all_reduce"]
    assert "in barrier" in ask(directory.worker_socket(0), "dump_traceback")
    assert "in all_reduce" in ask(directory.worker_socket(1), "dump_traceback")
    assert (stuck / "worker").stat().st_mode & 0o777 == 0o700


def test_a_collective_that_times_out_leaves_a_flight_record(tmp_path: Path) -> None:
    ranks = start(tmp_path, timeout_seconds=2.0)
    try:
        outputs = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [5, 5]
    assert all(f"flight record: {tmp_path}/flight/attempt-02/rank-0000" in output for output in outputs)
    assert not list((tmp_path / "worker").iterdir())
    for number, last in enumerate(("gloo:barrier", "gloo:all_reduce")):
        with (tmp_path / "flight" / "attempt-02" / f"rank-{number:05d}").open("rb") as file:
            assert pickle.load(file)["entries"][-1]["profiling_name"] == last
        record = json.loads((tmp_path / "flight" / "attempt-02" / f"recorder-{number:05d}.json").read_text())
        assert record["entries"][-1]["profiling_name"] == last


def test_the_stack_of_a_waiting_main_thread_is_available_and_the_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path; from wattwatch.trainer.run_directory import RunDirectory\n"
        "from wattwatch.trainer.train.diagnostics import worker_socket\n"
        "def waits_for_a_lock():\n    print('ready', flush=True); sys.stdin.read()\n"
        f"with worker_socket(RunDirectory(Path({str(tmp_path)!r})), 3, print): waits_for_a_lock()\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        path = RunDirectory(tmp_path).worker_socket(3)
        assert "in waits_for_a_lock" in ask(path, "dump_traceback")
    finally:
        rank.communicate(input="")
    assert rank.returncode == 0
    assert not path.exists()


def serve(run: Path) -> list[str]:
    """Starts the server, sends a request, stops it; returns what was logged."""
    output: list[str] = []
    with worker_socket(RunDirectory(run), 3, output.append) as path:
        if path is not None:
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert ask(RunDirectory(run).worker_socket(3), "ping") == "pong"
    return output


def test_a_run_directory_with_a_long_path_gets_a_link_to_a_private_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / ("r" * 100)
    # Not below tmp_path: its name may itself be longer than a socket's path may be.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setattr("tempfile.tempdir", temporary)
        assert serve(run) == []
        assert not list(Path(temporary).iterdir())
    assert not list((run / "worker").iterdir())


def test_the_socket_of_a_killed_attempt_is_removed(tmp_path: Path) -> None:
    link = RunDirectory(tmp_path).worker_socket(3)
    link.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(link))
    assert serve(tmp_path) == []
    link.symlink_to("/nowhere")
    assert serve(tmp_path) == []


def test_a_rank_without_a_socket_logs_that_and_trains(tmp_path: Path) -> None:
    (tmp_path / "worker").write_text("a file where the directory should be")
    output = serve(tmp_path)
    assert len(output) == 1
    assert "cannot create worker socket" in output[0]
