"""The directory that a capture writes: each part may fail by itself, with a sentence, whatever a node sends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.collectors.ssh.real_sshd import Site, site
from tests.collectors.ssh.running_fleet import RunningFleet, running_fleet
from tests.watcher.diagnosis.capture import worker_servers as servers
from tests.watcher.diagnosis.nccl_ras.ras_servers import serving, speaks_ras
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.config.settings import CaptureSettings
from wattwatch.watcher.diagnosis.capture.collector import (
    CapturePlan,
    CaptureResult,
    NodeCapturePlan,
    capture_evidence,
)
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "site").mkdir()
    with site(tmp_path / "site") as made:
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run directory with four ranks that answer."""
    path = tmp_path / "r"
    (path / "worker").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        for rank in range(4):
            stack.enter_context(servers.serving(path / "worker" / f"rank-{rank:05d}.sock", servers.answers))
        yield path


def plan_for(run: Path, *nodes: NodeCapturePlan, **changes: object) -> CapturePlan:
    plan = CapturePlan("llama", nodes or (NodeCapturePlan("node", (0, 1, 2, 3)),), str(run), py_spy=False)
    return replace(plan, **changes)  # type: ignore[arg-type]


def missing_text(result: CaptureResult) -> str:
    return "; ".join(result.missing)


def test_the_directory_is_private_and_its_manifest_is_complete(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    result = capture_evidence(plan_for(run), watch.fleet.channels, tmp_path / "capture", Clock())
    assert result.directory.stat().st_mode & 0o777 == 0o700
    manifest = json.loads((result.directory / "manifest.json").read_text())
    assert (manifest["v"], manifest["job"]) == (1, "llama")
    assert manifest["node_of_rank"] == {str(rank): "node" for rank in range(4)}
    assert set(manifest["files"]) == {path.name for path in result.directory.iterdir()} - {"manifest.json"}
    for name, entry in manifest["files"].items():
        data = (result.directory / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert (entry["bytes"], entry["owner_uid"]) == (len(data), os.geteuid())
        assert (result.directory / name).stat().st_mode & 0o777 == 0o600


def test_it_is_read_as_evidence(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    result = capture_evidence(plan_for(run), watch.fleet.channels, tmp_path / "capture", Clock())
    evidence = load_evidence(result.directory)
    assert [stacks.rank for stacks in evidence.stacks] == [0, 1, 2, 3]
    assert not evidence.unreadable


def test_two_reports_of_nccl_come_through_the_connection(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    with serving(speaks_ras(lambda: b'{"communicators": []}')) as server:
        plan = plan_for(
            run,
            NodeCapturePlan("node", ras=True),
            settings=CaptureSettings(ras_port=int(server.address.rpartition(":")[2])),
        )
        result = capture_evidence(plan, watch.fleet.channels, tmp_path / "capture", Clock())
    assert {"node-node.ras-1.json", "node-node.ras-2.json", "node-node.ras.json"} <= set(result.files)
    entry = json.loads((result.directory / "node-node.ras.json").read_text())
    assert entry["trouble"] is None
    assert entry["apart_seconds"] > 0


def test_without_nccl_ras_everything_else_is_captured(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    plan = plan_for(run, NodeCapturePlan("node", ras=True), settings=CaptureSettings(ras_port=port))
    result = capture_evidence(plan, watch.fleet.channels, tmp_path / "capture", Clock())
    assert f"node: NCCL RAS: nothing listens on 127.0.0.1:{port}" in missing_text(result)
    assert "rank-00003.stacks.txt" in result.files


def test_a_node_without_a_free_session_costs_one_sentence(here: Site, run: Path, tmp_path: Path) -> None:
    here.server("node", "MaxSessions 1")
    check_refused(
        here, run, tmp_path / "capture", "the probe uses one session, and sshd on the node does not allow a second one"
    )


def test_a_node_without_python_costs_one_sentence(here: Site, run: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in Path("/usr/bin").iterdir():  # all but Python: there the probe is a shell script
        if not tool.name.startswith("python"):
            (tools / tool.name).symlink_to(tool)
    here.server("node", f"SetEnv PATH={tools}")
    check_refused(here, run, tmp_path / "capture", "no Python 3.8 or later was found on the node")


def check_refused(here: Site, run: Path, directory: Path, words: str) -> None:
    with running_fleet(here.settings()) as watch:
        watch.until_lines(1)
        result = capture_evidence(plan_for(run), watch.fleet.channels, directory, Clock())
        watch.until_lines(1)
        assert watch.link().logins == 1
    assert result.files == {}
    assert words in missing_text(result)
    assert json.loads((directory / "manifest.json").read_text())["missing"] == list(result.missing)


def test_an_unreachable_node_costs_only_its_own_part(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    nodes = (
        NodeCapturePlan("gone", (4, 5), unreachable="no answer from gone within 10 s"),
        NodeCapturePlan("node", (0, 1)),
    )
    result = capture_evidence(plan_for(run, *nodes), watch.fleet.channels, tmp_path / "capture", Clock())
    assert "gone: not queried: no answer from gone within 10 s" in result.missing
    assert result.node_of_rank == {0: "node", 1: "node", 4: "gone", 5: "gone"}
    assert {name for name in result.files if name.startswith("rank")} == {
        f"rank-0000{rank}.{suffix}" for rank in (0, 1) for suffix in ("recorder.json", "stacks.txt")
    }


def test_files_over_the_size_limit_of_a_capture_are_left_out(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    plan = plan_for(run, total_bytes=len(servers.RECORD) * 2 + len(servers.STACKS))
    result = capture_evidence(plan, watch.fleet.channels, tmp_path / "capture", Clock())
    assert sum(file.bytes for file in result.files.values()) <= plan.total_bytes
    assert "with it, the capture would exceed" in missing_text(result)


def test_ranks_that_do_not_answer_leave_the_others_evidence_at_the_deadline(
    watch: RunningFleet, tmp_path: Path
) -> None:
    run = tmp_path / "s"
    (run / "worker").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        for rank, talk in enumerate((servers.answers, servers.stalls, servers.stalls)):
            stack.enter_context(servers.serving(run / "worker" / f"rank-{rank:05d}.sock", talk))
        for deadline_seconds in (3.0, 30.0, 300.0):  # a slow machine needs more for the rank that answers
            plan = plan_for(run, NodeCapturePlan("node", (0, 1, 2)), deadline_seconds=deadline_seconds)
            directory = tmp_path / f"capture-{deadline_seconds:.0f}"
            result = capture_evidence(plan, watch.fleet.channels, directory, Clock())
            if "rank-00000.stacks.txt" in result.files:
                break
    assert "rank-00000.stacks.txt" in result.files
    assert "not everything could be captured" in missing_text(result) or "not finished within" in missing_text(result)


def test_node_names_cannot_escape_the_directory(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    plan = plan_for(run, NodeCapturePlan("../../node", (0,), ((0, os.getpid()),)))
    result = capture_evidence(plan, lambda _: watch.fleet.channels("node"), tmp_path / "capture", Clock())
    assert "node--..-node.processes.json" in result.files or "node-.-node.processes.json" in result.files
    assert {path.parent for path in result.directory.iterdir()} == {result.directory}


def test_a_directory_that_cannot_be_written_raises_oserror(watch: RunningFleet, run: Path, tmp_path: Path) -> None:
    (tmp_path / "capture").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        capture_evidence(plan_for(run), watch.fleet.channels, tmp_path / "capture", Clock())
