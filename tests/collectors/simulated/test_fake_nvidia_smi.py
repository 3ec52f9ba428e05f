"""The fake nvidia-smi, run as a node runs it and parsed by the reader of the real one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import HostStatus, ReadingStatus
from wattwatch.collectors.simulated.driver import set_up_scenarios, write_job_state
from wattwatch.collectors.simulated.node_directory import NodeDirectory
from wattwatch.collectors.simulated.scenario import get_scenario
from wattwatch.collectors.smi import QUERY_FIELDS, read_gpu_output


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    """A node of eight GPUs in a deadlock."""
    plays, _ = set_up_scenarios([get_scenario("deadlock")], tmp_path / "live", tmp_path / "tools", Clock())
    write_job_state(plays[0], 1, 3850, tick=1)
    return plays[0].nodes[0]


def run(node: NodeDirectory, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", 'exec nvidia-smi "$@"', "sh", *arguments],
        env=node.environment(),
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def change(node: NodeDirectory, **changes: Any) -> None:
    path = node.directory / "state.json"
    staged = node.directory / "state.new"  # a query that reads meanwhile must find the old state or the new one
    staged.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    staged.rename(path)


@pytest.mark.parametrize("form", ["csv", "csv,noheader", "csv,nounits"])
def test_the_probes_own_query_reads_as_eight_gpus_with_one_low(node: NodeDirectory, form: str) -> None:
    fields = QUERY_FIELDS if form != "csv,noheader" else ("index", "power.draw", "utilization.gpu", "memory.used")
    answer = run(node, f"--query-gpu={','.join(fields)}", f"--format={form}")
    report = read_gpu_output(answer.stdout, answer.stderr, answer.returncode)
    assert report.status is HostStatus.OK
    gpus = report.snapshots[-1].gpus
    assert [gpu.utilization_percent for gpu in gpus] == [100, 100, 100, 0, 100, 100, 100, 100]
    assert all(gpu.power_watts is not None and 180 <= gpu.power_watts <= 200 for gpu in gpus)


def test_the_table_reads_as_the_same_gpus(node: NodeDirectory) -> None:
    answer = run(node)
    lines = answer.stdout.decode().splitlines()
    assert {len(line) for line in lines if line} == {91}  # as wide as the real one
    report = read_gpu_output(answer.stdout, answer.stderr, answer.returncode)
    assert report.status is HostStatus.OK
    gpus = report.snapshots[-1].gpus
    assert [gpu.utilization_percent for gpu in gpus] == [100, 100, 100, 0, 100, 100, 100, 100]
    assert all(gpu.power_limit_watts == 1100 for gpu in gpus)


def test_a_lost_gpu_is_lost_in_every_format(node: NodeDirectory) -> None:
    gpus = json.loads((node.directory / "state.json").read_text())["gpus"]
    gpus[5]["lost"] = True
    change(node, gpus=gpus)
    answer = run(node, f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv")
    gpu = read_gpu_output(answer.stdout, answer.stderr, answer.returncode).snapshots[-1].gpus[5]
    assert gpu.fault is ReadingStatus.LOST
    assert gpu.power_watts is None
    assert gpu.name == "NVIDIA B300 SXM6 AC"
    table = run(node)
    assert b"GPU is lost" in table.stdout


def test_the_process_list_and_the_gpu_list(node: NodeDirectory) -> None:
    processes = run(node, "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader").stdout.decode().splitlines()
    assert [int(line.split(",")[0]) for line in processes] == list(node.pids)
    assert len(run(node, "-L").stdout.splitlines()) == 8


def test_a_field_that_the_driver_does_not_know_is_rejected_with_code_2(node: NodeDirectory) -> None:
    answer = run(node, "--query-gpu=index,power.psychic", "--format=csv")
    assert answer.returncode == 2
    assert b'Field "power.psychic" is not a valid field to query.' in answer.stdout


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        ("no_driver", 9, HostStatus.DRIVER_DOWN),
        ("mismatch", 18, HostStatus.DRIVER_DOWN),
        ("unknown", 255, HostStatus.DRIVER_DOWN),
        ("no_devices", 6, HostStatus.NO_DEVICES),
    ],
)
def test_the_driver_fails_with_its_message(node: NodeDirectory, failure: str, code: int, status: HostStatus) -> None:
    change(node, smi=failure)
    answer = run(node, f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv")
    assert answer.returncode == code
    assert read_gpu_output(answer.stdout, answer.stderr, answer.returncode).status is status


def test_a_hung_query_returns_only_when_the_driver_recovers(node: NodeDirectory) -> None:
    change(node, smi="hang")
    query = subprocess.Popen(
        ["/bin/sh", "-c", "exec nvidia-smi -L"], env=node.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with query:
        with pytest.raises(subprocess.TimeoutExpired):
            query.wait(0.5)
        change(node, smi="ok")
        assert len(query.communicate(timeout=DEADLINE_SECONDS)[0].splitlines()) == 8
