"""The paper's deadlock for real: ranks of a real job part at the end of the epoch; with evenness = min they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from wattwatch.collectors.simulated import cluster as simulated_cluster
from wattwatch.collectors.simulated.cluster import SimulatedCluster, SimulationError, describe_busy_machine
from wattwatch.collectors.simulated.real_job import FollowedJob, create_rank_view
from wattwatch.watcher.cli import demo
from wattwatch.watcher.cli.demo import demo_command
from wattwatch.watcher.demo.real import job as real_job
from wattwatch.watcher.demo.real import runner as real_runner
from wattwatch.watcher.demo.real.job import JobFiles, JobSize, RealJob
from wattwatch.watcher.demo.real.runner import (
    JOB_NAME,
    CollectiveSplit,
    ExpectationFailed,
    RankWait,
    RealDemoRun,
    RealTerminalScreen,
    describe_lateness,
    find_split,
    trainer_location,
)
from wattwatch.watcher.demo.receiver import ReceivedAlert
from wattwatch.watcher.demo.runner import DemoError

ARGUMENTS = ["--scenario", "epoch-end-deadlock", "--real", "--json"]


@pytest.mark.skipif(util.find_spec("torch") is None, reason="torch is not installed: pip install 'wattwatch[trainer]'")
def test_a_real_deadlock_is_detected_and_evenness_min_prevents_it() -> None:
    answer = CliRunner().invoke(demo_command, ARGUMENTS, standalone_mode=False)
    assert answer.exception is None
    played = json.loads(answer.output)
    assert played["problems"] == []
    assert answer.return_value == 0

    kinds = [event["kind"] for event in played["events"] if event["kind"] not in ("told", "gate", "diagnosed")]
    once = list(dict.fromkeys(kinds))
    diagnosis = [event["text"] for event in played["events"] if event["kind"] == "diagnosed"][-1]
    assert diagnosis.startswith("diagnosis: rank 3 ")
    assert diagnosis.endswith(" (conclusive)")
    assert once == [
        "watching",
        "packed",
        "started",
        "training",
        "parted",
        "recorded",
        "killed",
        "completed",
    ]
    assert kinds.count("started") == 2

    said = [(notice["status"], notice["alert"]) for notice in played["notices"]]
    assert said.index(("firing", "JobHung")) < said.index(("firing", "JobCompleted"))
    about_hang = [notice for notice in played["notices"] if notice["alert"] == "JobHung"]
    begun = next(index for index, notice in enumerate(about_hang) if notice["severity"] == "critical")
    resolved = [index for index, notice in enumerate(about_hang[:begun]) if notice["status"] == "resolved"]
    hung = [n for n in about_hang[max(resolved, default=-1) + 1 :] if n["status"] == "firing" and n["suspects"]]
    assert hung
    assert all("rank 3" in notice["suspects"] for notice in hung)
    assert hung[-1]["severity"] == "critical"

    assert len({(wait["group"], wait["slot"]) for wait in played["waits"]}) == 1
    names = {wait["rank"]: wait["collective"] for wait in played["waits"]}
    assert names == {0: "gloo:all_reduce", 1: "gloo:all_reduce", 2: "gloo:all_reduce", 3: "gloo:barrier"}
    assert (played["gate"]["level"], played["gate"]["shortest_blocks"]) == ("WARN", min(played["blocks"]))
    assert played["cost"]["gpu_hours"] > 0


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "missing_packages", lambda: ("torch",))
    answer = CliRunner().invoke(demo_command, ARGUMENTS)
    assert answer.exit_code == 2
    assert "pip install 'wattwatch[trainer]'" in answer.output
    assert "Traceback" not in answer.output


@pytest.mark.parametrize("arguments", [["--scenario", "epoch-end-deadlock"], ["--scenario", "deadlock", "--real"]])
def test_the_real_scenario_and_real_go_together(arguments: list[str]) -> None:
    answer = CliRunner().invoke(demo_command, arguments)
    assert answer.exit_code == 2
    assert "--scenario epoch-end-deadlock --real" in answer.output


def test_different_collectives_at_one_sequence_number_are_a_split() -> None:
    waits = [
        RankWait(rank, "default_pg", 9, "gloo:barrier" if rank == 3 else "gloo:all_reduce", "") for rank in range(4)
    ]
    assert find_split(waits) == CollectiveSplit("default_pg", 9, {"gloo:all_reduce": (0, 1, 2), "gloo:barrier": (3,)})
    assert find_split(waits[:3]) is None
    assert find_split([*waits[:3], RankWait(3, "default_pg", 10, "gloo:barrier", "")]) is None


def test_the_location_of_a_rank_is_the_innermost_frame_of_the_trainer() -> None:
    stacks = (
        'Current thread 0x1 (most recent call first):\n  File "/x/trainer/train/heartbeat.py", line 9 in _next\n\n'
        'Thread 0x2 (most recent call first):\n  File "/lib/torch/distributed/distributed_c10d.py", line 5 in barrier\n'
        '  File "/x/trainer/train/loop.py", line 115 in save\n  File "/x/trainer/train/loop.py", line 60 in train\n'
    )
    assert trainer_location(stacks) == "save (trainer/train/loop.py:115) in train (trainer/train/loop.py:60)"


def test_a_simulated_gpu_follows_the_phase_of_its_rank(tmp_path: Path) -> None:
    view = create_rank_view(FollowedJob("job", str(tmp_path), ("node-1",), 4), 3)
    assert (view.update(0.0).activity.name, view.update(0.0).alive) == ("ended", False)  # no heartbeat yet
    (tmp_path / "heartbeat").mkdir()

    def shown(now: float, phase: str, step: int, pid: int | None = None) -> str:
        beat = {"pid": os.getpid() if pid is None else pid, "phase": phase, "step": step}
        view.path.write_text(json.dumps(beat))
        return view.update(now).activity.name

    assert shown(0.0, "load", 0) == "load"
    assert shown(1.0, "train", 1) == "compute"
    assert shown(2.0, "train", 2) == "compute"
    assert shown(9.0, "train", 2) == "spin"  # says that it trains, and makes no step
    assert shown(10.0, "barrier", 2) == "wait_in_barrier"
    assert shown(11.0, "save", 2) == "await_save"
    assert shown(12.0, "done", 2) == "ended"
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert shown(13.0, "train", 3, gone.pid) == "ended"


def test_a_rank_that_computes_slowly_is_not_shown_as_waiting(tmp_path: Path) -> None:
    """On a busy machine the first step takes long. A rank that waits in a collective hardly wants the CPU."""
    job = FollowedJob("job", str(tmp_path), ("node-1",), 2)
    (tmp_path / "heartbeat").mkdir()
    programs = ["while True: pass", "import time; time.sleep(600)"]
    ranks = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        views = [create_rank_view(job, rank) for rank in range(2)]
        for view, process in zip(views, ranks, strict=True):
            view.path.write_text(json.dumps({"pid": process.pid, "phase": "train", "step": 0}))
        shown: list[set[str]] = [set(), set()]
        began = time.monotonic()
        while (now := time.monotonic()) < began + 6.0:
            for view, names in zip(views, shown, strict=True):
                name = view.update(now).activity.name
                if now > began + 4.0:
                    names.add(name)
            time.sleep(0.5)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert shown == [{"compute"}, {"spin"}]


def notice(alert: str, status: str = "firing", severity: str = "critical", suspects: str = "") -> ReceivedAlert:
    words = {"summary": f"{alert} {status}"} | ({"suspects": suspects} if suspects else {})
    return ReceivedAlert(status, alert, JOB_NAME, severity, {}, words, 0.0)


def played_with(notices: list[ReceivedAlert]) -> RealDemoRun:
    job = SimpleNamespace(exit_codes=lambda: (None, None))
    service = SimpleNamespace(snapshot=SimpleNamespace(late_seconds=0.0))
    receiver = SimpleNamespace(notices=lambda: tuple(notices))
    screen = RealTerminalScreen(Console(quiet=True))
    run = RealDemoRun(job, service, receiver, screen)  # type: ignore[arg-type]  # what the demo uses of them
    run.outcome.blocks = (9, 9, 9, 7)
    return run


def test_an_alert_from_before_the_deadlock_is_not_its_detection_but_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    early = [notice("JobHung", severity="warning", suspects="rank 3"), notice("JobHung", "resolved", "warning")]
    received = [*early, notice("JobHung", suspects="rank 3")]
    run = played_with(received)
    run._before_deadlock, run._before_end = 1, 3
    run._wait_for_suspect()
    assert run._false_alerts() == ["JobHung was sent although nothing was wrong: JobHung firing"]

    monkeypatch.setattr(real_runner, "ALERT_TIMEOUT_SECONDS", 0.0)
    nothing_since = played_with(early[:1])
    nothing_since._before_deadlock = 1
    with pytest.raises(ExpectationFailed, match="a JobHung alert that names rank 3 within 0 s"):
        nothing_since._wait_for_suspect()


def test_a_hang_in_the_run_that_cannot_hang_is_a_problem() -> None:
    run = played_with([notice("JobHung"), notice("JobCrashed"), notice("JobHung")])
    run._before_deadlock, run._before_end, run._before_remedy = 0, 1, 2
    assert len(run._false_alerts()) == 1
    run._before_end = None
    assert len(run._false_alerts()) == 2


def test_a_slow_machine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (21.4, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert describe_busy_machine() == "1-minute load average 21.4 on 2 CPU cores"
    assert describe_lateness(0.4, 3.2) == (
        "the watcher was up to 3.2 s late (1-minute load average 21.4 on 2 CPU cores)"
    )
    assert describe_lateness(0.4, 0.9) == ""
    monkeypatch.setattr(real_job, "PACK_SECONDS", 0.0)
    with pytest.raises(DemoError, match=r"did not finish within 0 s\. This machine is busy \(1-minute load average"):
        RealJob(JOB_NAME, JobSize(), JobFiles(tmp_path), ()).prepare()
    monkeypatch.setattr(simulated_cluster, "READY_SECONDS", 0.0)
    with pytest.raises(SimulationError, match=r"0 s: the simulated cluster printed nothing\. This machine is busy"):
        SimulatedCluster(()).__enter__()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 0.0, 0.0))
    assert describe_busy_machine() == ""
