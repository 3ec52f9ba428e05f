"""A node without Python: the shell probe gives the same samples with less in them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from importlib import resources

import pytest

from tests.collectors.probe.running_probe import Node, processes_with, running_probe, wait_until
from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors import probe
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import HostStatus

REQUEST = ProbeRequest(interval_seconds=1.0)


def test_a_node_without_python_is_read_by_the_shell(node: Node) -> None:
    node.with_nvidia_smi()
    (node.root / "holders").write_text("4101, GPU-bbbbbbbb-0000-0000-0000-000000000000\n")
    node.process(4101, "python3", "D")
    (node.root / "proc/uptime").write_text("1234.50 9.9\n")
    (node.root / "proc/loadavg").write_text("7.25 1.0 1.0 3/900 1\n")
    (node.root / "proc/driver/nvidia").mkdir(parents=True)
    (node.root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.42.02  Release Build  (root@x)\n"
    )
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: s.gpus is not None)
        assert (sample.status, sample.gpu_source, sample.node_seconds) == (HostStatus.OK, "shell", 1234.5)
        assert [gpu.utilization_percent for gpu in sample.gpus or ()] == [100.0, 0.0]
        assert [(p.pid, p.name, p.state, p.gpu_indexes) for p in sample.processes or ()] == [
            (4101, "python3", "D", (1,))
        ]
        assert sample.load.load_1m == 7.25
        assert sample.driver_version == "555.42.02"
        probe.sample(lambda s: s.sequence >= 2)
        assert probe.reader.garbage_bytes == 0
        probe.close_stdin()
        probe.is_gone()


def test_nobody_is_said_only_where_the_list_of_processes_is_empty(node: Node) -> None:
    node.with_nvidia_smi()
    (node.root / "holders").write_text("4101, GPU-bbbbbbbb-0000-0000-0000-000000000000\n")
    node.process(4101, "python3")
    with running_probe(node, REQUEST) as probe:
        seen = probe.sample(lambda s: bool(s.processes)).sequence
        (node.root / "proc/4101/stat").unlink()
        hidden = probe.sample(lambda s: s.sequence > seen and not s.processes)
        assert hidden.processes is None, "it is listed, and in another pid namespace"
        (node.root / "holders").write_text("")
        assert probe.sample(lambda s: s.processes == ()).exited_processes == frozenset()
        answer = f"exec cat {node.root}/answer"
        node.script("nvidia-smi", f'case "$*" in *compute-apps*) exit 9;; esac\n{answer}')
        empty = probe.samples[-1].sequence
        assert probe.sample(lambda s: s.sequence > empty + 1).processes is None, "the query failed"


def test_an_old_driver_is_queried_for_fewer_fields(node: Node) -> None:
    answer = "0, GPU-aaaaaaaa-0000-0000-0000-000000000000, 00000000:19:00.0, Tesla T4, 27.00, 70.00, 0, 0, 1, 15360, 40"
    node.script(
        "nvidia-smi",
        'case "$*" in *clocks_event_reasons.active*)\n'
        """echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;; esac\n"""
        f'echo "{answer}, 300, P8"',
    )
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: s.gpus is not None)
        assert [(gpu.power_watts, gpu.performance_state) for gpu in sample.gpus or ()] == [(27.0, "P8")]


def test_text_with_quotes_backslashes_and_control_characters_is_transmitted(node: Node) -> None:
    node.script(
        "nvidia-smi", r"""printf 'Failed "to" \\ initialize NVML: \001Driver/library version mismatch\n'; exit 18"""
    )
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: bool(s.gpu_source))
        assert sample.status is HostStatus.DRIVER_DOWN
        assert sample.gpus is None


def test_a_hanging_nvidia_smi_is_started_once_and_gone_at_the_end(node: Node) -> None:
    node.script("nvidia-smi", f"echo started >>{node.root}/starts; exec sleep 1000")
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: s.sequence >= 3)
        assert sample.gpus is None
        assert "nvidia-smi has not answered" in sample.detail
        assert (node.root / "starts").read_text() == "started\n"
        probe.close_stdin()
        probe.is_gone()


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_a_stdin_that_ends_at_once_leaves_no_process_behind(node: Node, shell: str) -> None:
    """Many starts, because the fault needs a child that has not begun to run when the probe ends: one start in ten."""
    node.script("nvidia-smi", "exec sleep 1000")
    script = node.root / "script"
    script.write_text(
        "interval=1\nfields=index\nold_fields=index\nform=csv\n"
        + resources.files(probe).joinpath("shell_probe.sh").read_text("utf-8")
    )
    environment = {"PATH": str(node.bin), "WATTWATCH_TEST_MARK": str(node.root)}
    groups = []
    try:
        for _ in range(60):
            with (
                script.open("rb") as stdin,
                subprocess.Popen(
                    [shell], stdin=stdin, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
                ) as started,
            ):
                groups.append(started.pid)
                assert started.wait(DEADLINE_SECONDS) == 0
        wait_until(lambda: not processes_with(f"WATTWATCH_TEST_MARK={node.root}") or None)
    finally:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def test_the_shell_probe_exits_when_its_lease_is_not_renewed(node: Node) -> None:
    node.with_nvidia_smi()
    real = (node.bin / "sleep").readlink()
    (node.bin / "sleep").unlink()
    # Its clock is `sleep`: here it runs twenty times as fast.
    node.script("sleep", f'case "$1" in 20) exec {real} 1;; *) exec {real} 0.05;; esac')
    with running_probe(node, REQUEST) as probe:
        probe.sample(lambda s: s.sequence >= 2)
        probe.is_gone()
