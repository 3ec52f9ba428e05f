"""Launches with torch's own torchrun: its report, how it ends, and two nodes over real SSH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.trainer.launch.jobs import QUICK, MadeJob
from tests.trainer.launch.rank_program import Plan
from tests.trainer.launch.sshd import TwoNodes, two_nodes
from tests.trainer.launch.test_launch import await_nothing_left
from wattwatch.trainer.launch.attempt import InterruptCount
from wattwatch.trainer.launch.placement import TORCHRUN_MODULE


def test_torchruns_report_names_the_rank_and_the_signal(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = MadeJob(tmp_path, plan=Plan(rank=1, at=3, until_attempt=1, act="kill", children=True))
    job.write()
    assert job.start(TORCHRUN_MODULE) == 0
    assert job.printed(
        "attempt 1: rank 1 on localhost was killed by SIGKILL after step 3; the other ranks failed as a result"
    )
    assert "exitcode  : -9" in (job.run.logs(1) / "node-localhost.log").read_text()
    assert job.left_running() == [], "children of ranks too, in sessions of their own"


def test_a_torchrun_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = MadeJob(tmp_path, plan=Plan(steps=10_000, save_every=10_000), launch={"retries": 0})
    job.write()

    def kill_torchrun(line: str, interrupts: InterruptCount) -> None:
        if line.startswith("step 3/"):
            (pid,) = [
                int(left.split()[0]) for left in job.left_running() if "wattwatch.trainer.launch.torchrun" in left
            ]
            os.kill(pid, signal.SIGKILL)

    assert job.start(TORCHRUN_MODULE, on_line=kill_torchrun) == 5
    assert job.left_running() == []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path / "site") as made:
        yield made


def over_ssh(tmp_path: Path, nodes: TwoNodes, plan: Plan, **launch: object) -> MadeJob:
    table = {"nodes": "node-a,node-b", "via": "ssh", "address": "127.0.0.1", "ssh_options": ["-F", str(nodes.config)]}
    job = MadeJob(tmp_path, nodes=2, plan=plan, launch={**table, **launch})
    job.write()
    return job


def test_two_nodes_over_ssh_under_torchrun(tmp_path: Path, nodes: TwoNodes) -> None:
    pytest.importorskip("torch")
    job = over_ssh(tmp_path, nodes, Plan(rank=3, at=3, until_attempt=1, act="kill"))
    assert job.start(TORCHRUN_MODULE) == 0
    assert job.printed(
        "attempt 1: rank 3 on node-b was killed by SIGKILL after step 3; the other ranks failed as a result"
    )
    assert job.printed("launch: attempt 2, from", "step-00000002")
    assert {path.name for path in job.run.logs(2).glob("node-*.log")} == {"node-node-a.log", "node-node-b.log"}
    assert "node node-b rank 2" in job.run.rank_log(2, 2).read_text()
    await_nothing_left(str(tmp_path / "job"))


def test_a_connection_that_breaks_is_a_lost_node_and_ends_everything_there(tmp_path: Path, nodes: TwoNodes) -> None:
    job = over_ssh(tmp_path, nodes, Plan(steps=10_000, save_every=10_000), retries=0)

    def break_one(line: str, interrupts: InterruptCount) -> None:
        if line.startswith("step 3/"):
            nodes.break_connections("node-b")

    assert job.start(QUICK, on_line=break_one) == 5
    assert job.printed("launch: node-b is lost: ssh exited with code 255")
    assert "node-b was lost" in job.output[-1]
    await_nothing_left(str(job.run.path))
    await_nothing_left(str(job.file))


def test_a_node_that_cannot_be_reached_is_named_and_nothing_is_started(tmp_path: Path, nodes: TwoNodes) -> None:
    job = over_ssh(tmp_path, nodes, Plan())
    nodes.close("node-b")
    began = job.start(QUICK)
    assert began == 2
    assert "the gate did not complete on node-b: ssh exited with code 255: " in job.output[-1]
    assert "no rank was started" in job.output[-1]
    assert not list((job.run.path / "logs").iterdir())


def test_a_closed_pipe_ends_a_program_that_ignores_sigterm() -> None:
    """The node program alone: one request in, messages out."""
    from wattwatch.trainer.launch.protocol import (
        PROTOCOL_VERSION,
        MessageKind,
        StartRequest,
        encode_request,
        parse_message,
    )

    ignore = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ignoring', flush=True); time.sleep(600)"
    )
    order = StartRequest(PROTOCOL_VERSION, ("n",), 0, ((sys.executable, "-c", ignore),), {})
    program = "import wattwatch.trainer.launch.node as node; node.TERMINATE_SECONDS = 0.5; node.main()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(encode_request(order))
        messages = []
        for line in process.stdout:
            messages.append(parse_message(line))
            if messages[-1] and messages[-1].kind == MessageKind.LINE:
                process.stdin.close()
        assert process.wait(DEADLINE_SECONDS) == 0
    assert [message.kind for message in messages if message] == [
        MessageKind.STARTED,
        MessageKind.LINE,
        MessageKind.ENDED,
    ]
    assert messages[-1]
    assert messages[-1].code == -signal.SIGKILL


@pytest.mark.parametrize("line", [b"", b"hello\n", b'{"v": 99, "nodes": [], "index": 0, "commands": []}\n'])
def test_an_invalid_request_is_answered_with_a_trouble_message_and_nothing_runs(line: bytes) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "wattwatch.trainer.launch.node"],
        input=line,
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert (b'"trouble"' in answer.stdout) == bool(line)


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path) -> None:
    job = MadeJob(tmp_path, launch={"python": "/nowhere/python"})
    job.write()
    from wattwatch.trainer.errors import UserError

    with pytest.raises(UserError, match="/nowhere/python: No such file"):
        job.start(QUICK)
