"""The Python probe as a real process, started as sshd would, on a directory that stands for a node."""

from __future__ import annotations

import ast
import ctypes
import fcntl
import json
import os
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.collectors.probe.running_probe import Node, running_probe, wait_until
from wattwatch.collectors.probe.node_probe import (
    CollectorThread,
    GpuCollector,
    NvmlReader,
    PendingLine,
    ProcessCollector,
    load_nvml,
)
from wattwatch.collectors.probe.payload import _pynvml_source, probe_command, probe_payload
from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.collectors.samples import HostStatus, PowerSource

REQUEST = ProbeRequest(interval_seconds=0.2)
F_SETPIPE_SZ = 1031


def test_the_probe_is_python_3_8() -> None:
    source = resources.files("wattwatch.collectors.probe").joinpath("node_probe.py").read_text("utf-8")
    ast.parse(source, feature_version=(3, 8))


def test_the_command_works_in_any_login_shell_and_length_limit() -> None:
    command = probe_command(REQUEST)
    assert len(command) < 4096
    head, script, tail = command.split("'")
    assert (head, tail) == ("exec /bin/sh -c ", "")
    assert not set(script) & set("\\!`\n")


def test_one_payload_serves_all_nodes_with_the_same_request() -> None:
    assert probe_payload(ProbeRequest(process_pattern="x")) is probe_payload(ProbeRequest(process_pattern="x"))


def test_nvidia_smi_is_read_where_there_is_no_nvml(node: Node) -> None:
    node.with_python()
    node.with_nvidia_smi()
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: s.gpus is not None)
        assert sample.status is HostStatus.OK
        assert sample.gpu_source == "nvidia-smi"
        assert [gpu.power_watts for gpu in sample.gpus or ()] == [640.12, 118.4]
        assert (sample.gpus or ())[0].power_source is PowerSource.DRAW
        probe.sample(lambda s: s.sequence >= 3)
        assert [s.sequence for s in probe.samples[:4]] == [0, 1, 2, 3]
        assert probe.reader.garbage_bytes == 0


def test_a_field_that_an_old_driver_does_not_know_is_dropped_from_the_query(node: Node) -> None:
    node.with_python()
    answer = "0, GPU-aaaaaaaa-0000-0000-0000-000000000000, 00000000:19:00.0, Tesla T4, 27.00, 70.00, 0, 0, 1, 15360, 40"
    node.script(
        "nvidia-smi",
        'for field in power.draw.instant clocks_event_reasons.active; do case "$*" in *"$field"*)\n'
        """echo "Field \\"$field\\" is not a valid field to query."; exit 2;; esac; done\n"""
        f'echo "{answer}, 300, P8, Disabled, [N/A], 27.00"',
    )
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: s.gpus is not None)
        (gpu,) = sample.gpus or ()
        assert (gpu.power_watts, gpu.performance_state, gpu.mig) == (27.0, "P8", False)


def test_a_node_without_gpu_tools_says_so(node: Node) -> None:
    node.with_python()
    (node.root / "proc").rmdir()
    with running_probe(node, REQUEST) as probe:
        sample = probe.sample(lambda s: True)
        assert sample.gpus is None
        assert sample.status is not HostStatus.OK
        assert sample.detail


def test_a_hanging_nvidia_smi_is_named_with_its_age_started_once_and_gone_at_the_end(node: Node) -> None:
    node.with_fast_python(10.0)
    node.script("nvidia-smi", f"echo started >>{node.root}/starts; exec sleep 1000")
    with running_probe(node, ProbeRequest(interval_seconds=1.0)) as probe:
        sample = probe.sample(lambda s: s.status is HostStatus.SAMPLER_TIMEOUT and bool(s.hung_calls))
        assert sample.detail.startswith("nvidia-smi has not answered for ")
        assert sample.hung_calls[0].call == "nvidia-smi"
        assert sample.hung_calls[0].age_seconds >= 5.0
        later = probe.sample(lambda s: s.sequence > sample.sequence + 3)
        assert later.hung_calls[0].age_seconds > sample.hung_calls[0].age_seconds
        assert (node.root / "starts").read_text() == "started\n"
        probe.close_stdin()
        probe.is_gone()


def test_nothing_is_left_when_stdin_closes(node: Node) -> None:
    node.with_python()
    node.with_nvidia_smi()
    with running_probe(node, REQUEST) as probe:
        probe.sample(lambda s: s.sequence >= 1)
        probe.close_stdin()
        probe.is_gone()


def test_nothing_is_left_when_stdin_closes_within_the_payload(node: Node) -> None:
    node.with_python()
    with running_probe(node, REQUEST) as probe:
        probe.close_stdin()
        probe.is_gone()


def test_the_probe_exits_when_its_lease_is_not_renewed(node: Node) -> None:
    node.with_fast_python(60.0)
    with running_probe(node, ProbeRequest(interval_seconds=5.0)) as probe:
        probe.is_gone()
        assert probe.samples[-1].node_seconds - probe.samples[0].node_seconds >= 50.0


def test_the_probe_exits_when_its_peer_is_frozen(node: Node) -> None:
    node.with_fast_python(60.0)
    with running_probe(node, ProbeRequest(interval_seconds=1.0), read_stdout=False) as probe:
        assert probe.process.stdout is not None
        fcntl.fcntl(probe.process.stdout, F_SETPIPE_SZ, 4096)
        probe.is_gone()


def test_processes_are_those_that_match_and_those_that_hold_a_gpu(node: Node) -> None:
    node.with_python()
    node.with_nvidia_smi()
    (node.root / "holders").write_text("4101, GPU-bbbbbbbb-0000-0000-0000-000000000000\n999999, [N/A]\n")
    node.process(4100, "train (a) b")
    node.process(4101, "python3", "D")
    node.process(4102, "bash")
    with running_probe(node, ProbeRequest(0.2, process_pattern="^train")) as probe:
        sample = probe.sample(lambda s: len(s.processes or ()) == 2)
        first, second = sample.processes or ()
        assert (first.pid, first.name, first.state, first.cpu_seconds) == (4100, "train (a) b", "R", 2.0)
        assert (second.pid, second.state, second.gpu_indexes) == (4101, "D", (1,))


def test_a_process_that_exits_is_proven_gone_though_the_gpu_query_hangs(node: Node) -> None:
    """With both nodes' nvidia-smi hung, sixteen ranks ended, and their list became "unknown"."""
    node.with_fast_python(10.0)
    node.with_nvidia_smi()
    (node.root / "holders").write_text("4101, GPU-bbbbbbbb-0000-0000-0000-000000000000\n")
    node.process(4101, "python3")
    with running_probe(node, ProbeRequest(1.0)) as probe:
        first = probe.sample(lambda s: bool(s.processes))
        assert first.exited_processes == frozenset()
        node.script("nvidia-smi", "exec sleep 1000")
        probe.sample(lambda s: bool(s.hung_calls))
        (node.root / "proc/4101/stat").unlink()
        gone = probe.sample(lambda s: bool(s.exited_processes))
        assert gone.exited_processes == {(4101, 42.0)}
        assert gone.processes is None, "who came instead cannot be known"
        probe.close_stdin()
        probe.is_gone()


def test_a_process_that_is_no_longer_listed_and_lives_is_told_from_one_that_exited(node: Node) -> None:
    node.with_fast_python(20.0)
    node.with_nvidia_smi()
    (node.root / "holders").write_text(
        "4101, GPU-bbbbbbbb-0000-0000-0000-000000000000\n4102, GPU-aaaaaaaa-0000-0000-0000-000000000000\n"
    )
    node.process(4101, "python3")
    node.process(4102, "python3")
    with running_probe(node, ProbeRequest(1.0)) as probe:
        probe.sample(lambda s: len(s.processes or ()) == 2)
        (node.root / "holders").write_text("")
        node.process(4102, "python3", "Z")
        sample = probe.sample(lambda s: bool(s.unlisted_processes) and bool(s.exited_processes))
        assert sample.unlisted_processes == {(4101, 42.0)}
        assert sample.exited_processes == {(4102, 42.0)}


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class Nvml:
    """The driver of a node with two GPUs, as far as the list of processes goes."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.pids: dict[int, list[int] | None] = {0: [70], 1: [71]}  # None: an error

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.pids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        pids = self.pids[handle]
        if pids is None:
            raise NvmlError(999)
        return [SimpleNamespace(pid=pid) for pid in pids]


def test_a_driver_that_cannot_list_the_processes_of_a_gpu_does_not_end_them() -> None:
    driver = Nvml()
    reader = NvmlReader(driver, [])
    reader.read(0.0)
    assert reader.holders() == ({70: [0], 71: [1]}, True)
    driver.pids[1] = None
    assert reader.holders() == ({70: [0], 71: [1]}, False)
    driver.pids[0] = []
    assert reader.holders() == ({71: [1]}, False)
    driver.pids[1] = []
    assert reader.holders() == ({}, True)


def test_a_driver_that_never_lists_a_process_leaves_the_list_unknown_and_not_empty() -> None:
    driver = Nvml()
    driver.pids = {0: None, 1: None}
    reader = NvmlReader(driver, [])
    reader.read(0.0)
    assert reader.holders() == ({}, False)
    outbox = PendingLine()
    gpu = GpuCollector(outbox, [], "csv", [], "")
    processes = ProcessCollector(outbox, gpu, [], None)
    thread = CollectorThread("test", lambda _: None)
    for holders, complete, listed in (({}, False, None), ({}, True, []), (None, False, None)):
        gpu.holders, gpu.holders_complete = holders, complete
        processes(thread)
        assert outbox.take()["proc"] == listed


def test_heartbeats_of_this_host_are_read_again_and_their_ranks_found_by_pid(node: Node, tmp_path: Path) -> None:
    node.with_python()
    (node.root / "proc/sys/kernel").mkdir(parents=True)
    (node.root / "proc/sys/kernel/hostname").write_text("gpu-01\n")
    node.process(4107, "python3")
    run = tmp_path / "run"
    (run / "heartbeat").mkdir(parents=True)

    def heartbeat(rank: int, host: str, step: int) -> None:
        text = json.dumps({"v": 1, "rank": rank, "world": 16, "host": host, "pid": 4100 + rank, "step": step})
        (run / "heartbeat" / f"rank-{rank:05d}.json").write_text(text)

    heartbeat(7, "gpu-01.cluster", 41)
    heartbeat(8, "gpu-02.cluster", 40)
    with running_probe(node, ProbeRequest(0.2, run_directories=(str(run),))) as probe:
        sample = probe.sample(lambda s: bool(s.progress) and bool(s.processes))
        assert [(p.rank, p.step) for p in sample.progress] == [(7, 41)]
        assert [(p.pid, p.rank) for p in sample.processes or ()] == [(4107, 7)]
        heartbeat(7, "gpu-01.cluster", 42)
        again = probe.sample(lambda s: bool(s.progress) and s.progress[0].step == 42)
        assert again.progress[0].age_seconds == 0.0


def test_a_log_is_followed_through_growth_rotation_and_truncation(node: Node, tmp_path: Path) -> None:
    node.with_python()
    log = tmp_path / "train.log"
    log.write_bytes(b"\xff\x00 binary\n" + b"noise\n" * 3000 + b"step=1 loss=9.0 tok_s=5\n")
    request = ProbeRequest(0.2, logs=(LogSource(str(tmp_path / "*.log")),))
    with running_probe(node, request) as probe:

        def step(number: int) -> None:
            probe.sample(lambda s: bool(s.progress) and s.progress[0].step == number)

        step(1)
        with log.open("ab") as file:
            file.write(b"step=2 loss=nan tok_s=5\n")
        step(2)
        log.rename(tmp_path / "train.old")
        log.write_text("step=3 loss=1 tok_s=5\n")
        step(3)
        log.write_text("step=4 loss=1 tok_s=5\n")
        step(4)


def test_a_growing_checkpoint_is_sent_as_it_grows_and_classified(node: Node, tmp_path: Path) -> None:
    node.with_fast_python(5.0)
    save = tmp_path / "ckpt" / "step-500"
    save.mkdir(parents=True)
    (save / "__0_0.distcp").write_bytes(b"x" * 100)
    request = ProbeRequest(1.0, checkpoint_directories=(str(tmp_path / "ckpt"),))
    with running_probe(node, request) as probe:
        sample = probe.sample(lambda s: bool(s.checkpoints) and bool(s.checkpoints[0].entries))
        (entry,) = sample.checkpoints[0].entries
        assert (entry.step, entry.complete, entry.bytes) == (500, False, 100)
        (save / "__0_0.distcp").write_bytes(b"x" * 900)
        probe.sample(lambda s: bool(s.checkpoints) and s.checkpoints[0].entries[0].bytes == 900)
        (save / ".metadata").write_bytes(b"")
        probe.sample(lambda s: bool(s.checkpoints) and s.checkpoints[0].entries[0].complete is True)
        assert sample.filesystems[0].free_bytes


def test_new_kernel_faults_are_reported_once(node: Node) -> None:
    node.with_python()
    with running_probe(node, REQUEST) as probe:
        probe.sample(lambda s: s.sequence >= 1)
        with (node.root / "dev/kmsg").open("a") as file:
            file.write("6,1,100,-;eth0: link up\n")
            file.write(
                "4,2,200,-;NVRM: Xid (PCI:0000:9b:00): 79, pid=4100, name=python3, GPU has fallen off the bus.\n"
            )
        sample = probe.sample(lambda s: bool(s.kernel_events))
        (event,) = sample.kernel_events
        assert (event.kind, event.xid, event.pci_bus_id, event.pid) == ("xid", 79, "00000000:9B:00.0", 4100)
        probe.sample(lambda s: s.sequence >= sample.sequence + 2)
        assert sum(bool(s.kernel_events) for s in list(probe.samples)) == 1


def test_load_and_pressure_come_with_each_line(node: Node) -> None:
    node.with_python()
    (node.root / "proc/loadavg").write_text("12.50 1.0 1.0 3/900 1\n")
    (node.root / "proc/pressure").mkdir()
    (node.root / "proc/pressure/io").write_text("some avg10=44.00 avg60=0.00 avg300=0.00 total=1\n")
    with running_probe(node, REQUEST) as probe:
        load = probe.sample(lambda s: s.load.load_1m is not None).load
        assert (load.load_1m, load.io_pressure_percent, load.cpu_pressure_percent) == (12.5, 44.0, None)


def test_workers_of_ranks_are_reported_with_their_wait_channel(node: Node) -> None:
    node.with_python()
    node.process(4100, "train")
    node.process(4200, "pt_data_worker", "D")
    node.process(4201, "pt_data_worker")
    (node.root / "proc/4100/task/4100").mkdir(parents=True)
    (node.root / "proc/4100/task/4100/children").write_text("4200 4201 9999 ")
    (node.root / "proc/4200/wchan").write_text("nfs_wait_bit_killable")
    (node.root / "proc/meminfo").write_text(
        "MemTotal: 2000 kB\nMemAvailable: 500 kB\nSwapTotal: 90 kB\nSwapFree: 50 kB\n"
    )
    with running_probe(node, ProbeRequest(0.2, process_pattern="^train")) as probe:
        sample = probe.sample(lambda s: len(s.workers) == 2)
        first, second = sample.workers
        assert (first.pid, first.parent_pid, first.name, first.state) == (4200, 4100, "pt_data_worker", "D")
        assert (first.wait_channel, second.wait_channel) == ("nfs_wait_bit_killable", None)
        assert [p.pid for p in sample.processes or ()] == [4100]
        load = sample.load
        sizes = (load.memory_available_bytes, load.memory_total_bytes, load.swap_used_bytes)
        assert sizes == (500 * 1024, 2000 * 1024, 40 * 1024)


def test_the_loaded_drivers_version_is_reported(node: Node) -> None:
    node.with_python()
    node.with_nvidia_smi()
    (node.root / "proc/driver/nvidia").mkdir(parents=True)
    said = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3.0\n"
    )
    (node.root / "proc/driver/nvidia/version").write_text(said)
    with running_probe(node, ProbeRequest(0.2)) as probe:
        assert probe.sample(lambda s: s.gpus is not None).driver_version == "550.54.15"


def test_the_type_of_a_paths_mount_is_reported(node: Node, tmp_path: Path) -> None:
    node.with_python()
    with running_probe(node, ProbeRequest(0.2, run_directories=(str(tmp_path),))) as probe:
        (known,) = probe.sample(lambda s: bool(s.filesystems)).filesystems
        assert known.kind


def test_a_directory_that_cannot_be_read_does_not_stop_the_line(node: Node, tmp_path: Path) -> None:
    node.with_python()
    missing = str(tmp_path / "not there")
    with running_probe(node, ProbeRequest(0.2, (missing,), checkpoint_directories=(missing,))) as probe:
        sample = probe.sample(lambda s: s.sequence >= 2)
        assert sample.checkpoints[0].error == "No such file or directory"
        wait_until(lambda: len(probe.samples) > 4 or None)


def test_a_renewed_lease_keeps_the_probe(node: Node) -> None:
    node.with_fast_python(60.0)
    with running_probe(node, ProbeRequest(interval_seconds=5.0)) as probe:
        first = probe.sample(lambda s: True)

        def long_after() -> bool | None:
            probe.renew()
            return probe.samples[-1].node_seconds - first.node_seconds > 120.0 or None

        wait_until(long_after)
        assert probe.process.poll() is None


def test_the_pynvml_that_was_sent_is_loaded_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _pynvml_source()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # the library of the driver, which this host has not
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert callable(load_nvml(source).nvmlDeviceGetTotalEnergyConsumption)


def test_pynvml_is_not_even_compiled_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml("this is no Python") is None


def test_a_read_that_hangs_is_reported_and_blocks_nothing_else(node: Node, tmp_path: Path) -> None:
    node.with_fast_python(10.0)
    node.with_nvidia_smi()
    (tmp_path / "run/heartbeat").mkdir(parents=True)
    # Opening a FIFO waits for a writer: as a file on a file server that does not answer.
    os.mkfifo(tmp_path / "run/heartbeat/rank-00000.json")
    with running_probe(node, ProbeRequest(1.0, run_directories=(str(tmp_path / "run"),))) as probe:
        sample = probe.sample(lambda s: bool(s.hung_calls))
        assert sample.hung_calls[0].call == f"read {tmp_path}/run/heartbeat"
        assert (sample.status, len(sample.gpus or ())) == (HostStatus.OK, 2)
        probe.close_stdin()
        probe.is_gone()


def test_a_fifo_beside_the_checkpoints_is_not_opened(node: Node, tmp_path: Path) -> None:
    node.with_python()
    os.mkfifo(tmp_path / "dump.pipe")
    with running_probe(node, ProbeRequest(0.2, checkpoint_directories=(str(tmp_path),))) as probe:
        assert probe.sample(lambda s: bool(s.checkpoints)).checkpoints[0].error is None


def test_ranks_that_move_to_this_host_after_a_restart_are_found(node: Node, tmp_path: Path) -> None:
    node.with_fast_python(10.0)
    (node.root / "proc/sys/kernel").mkdir(parents=True)
    (node.root / "proc/sys/kernel/hostname").write_text("gpu-01\n")
    folder = tmp_path / "heartbeat"
    folder.mkdir()

    def heartbeat(rank: int, host: str, step: int) -> None:
        text = json.dumps({"rank": rank, "host": host, "pid": 4100 + rank, "step": step})
        (folder / "staged").write_text(text)
        (folder / "staged").rename(folder / f"rank-{rank:05d}.json")

    heartbeat(0, "gpu-01", 5)
    heartbeat(1, "gpu-02", 5)
    with running_probe(node, ProbeRequest(1.0, run_directories=(str(tmp_path),))) as probe:
        probe.sample(lambda s: [p.rank for p in s.progress] == [0])
        heartbeat(0, "gpu-02", 1)
        heartbeat(1, "gpu-01", 1)
        sample = probe.sample(lambda s: [p.rank for p in s.progress] == [1])
        assert sample.progress[0].step == 1
