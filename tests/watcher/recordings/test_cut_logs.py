"""A log that begins or ends within a round (head, tail, a copy while it is written) tells of no lost board."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.watcher.command_shell import Shell

HEADER = "timestamp, index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"
BOARDS = 8


def log(rounds: int, lost_from: int | None = None) -> list[str]:
    return [
        f"2026/01/01 10:{second // 60:02}:{second % 60:02}.{board:03}, {board}, NVIDIA H100 80GB HBM3, 640.00 W, "
        "700.00 W, 100 %, 71000 MiB\n"
        for second in range(rounds)
        for board in range(BOARDS)
        if lost_from is None or board != 3 or second < lost_from
    ]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 7), (3, 0), (5, 2), (4, 4)])
def test_no_command_mistakes_a_truncated_log_for_a_lost_gpu(
    first: int, last: int, shell: Shell, tmp_path: Path
) -> None:
    lines = log(200)
    path = tmp_path / "run.csv"
    path.write_text(HEADER + "".join(lines[first : len(lines) - last]), "utf-8")
    triage = shell.run("triage", "--json", path)
    assert (triage.exit_code, triage.json[0]["state"], len(triage.json[0]["gpus"])) == (0, "compute", BOARDS)
    replay = shell.run("replay", "--json", path)
    assert (replay.exit_code, replay.json[0]["alerts"]) == (0, [])
    path.with_name("run.csv.label.json").write_text(json.dumps({"state": "compute"}), "utf-8")
    assert shell.run("backtest", "--json", tmp_path).json["logs"]["played"][0]["false_alarms"] == []


@pytest.mark.parametrize("count", [9, 12, 20, 23])
def test_the_last_lines_of_a_log_have_all_gpus(count: int, shell: Shell) -> None:
    answer = shell.run("triage", "--json", "-", stdin="".join(log(9)[-count:]).encode())
    assert (answer.json[0]["state"], len(answer.json[0]["gpus"])) == ("compute", BOARDS)


def test_a_gpu_that_stays_missing_is_lost_for_every_command(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text(HEADER + "".join(log(200, lost_from=150)[2:-3]), "utf-8")
    assert shell.run("triage", "--json", path).json[0]["state"] == "gpu_fault"
    (alert,) = shell.run("replay", "--json", path).json[0]["alerts"]
    assert alert["alert"] == "GpuFault"
    assert 149 <= alert["opened_seconds"] <= 151
    told = {"intervals": [{"state": "gpu_fault", "from_seconds": 149}]}
    path.with_name("run.csv.label.json").write_text(json.dumps(told), "utf-8")
    (played,) = shell.run("backtest", "--json", tmp_path).json["logs"]["played"]
    assert played["incidents"][0]["confirmed"]
