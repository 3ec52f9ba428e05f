"""Lines of the kernel log that report a fault, and all the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattwatch.collectors.probe_reader import full_bus_id, parse_kernel_line

DATA = Path(__file__).parent.parent / "data" / "kernel_log"


def test_an_xid_is_found_among_other_kernel_lines() -> None:
    lines = (DATA / "dmesg-with-xid-119.log").read_text().splitlines()
    (event,) = filter(None, map(parse_kernel_line, lines))
    assert (event.kind, event.xid, event.pci_bus_id) == ("xid", 119, "00000000:9B:00.0")
    assert (event.pid, event.process) == (2024380, "nvidia-smi")


def test_segmentation_faults_include_process_and_pid() -> None:
    events = [parse_kernel_line(line, 3.0) for line in (DATA / "dmesg.decode.iso.log").read_text().splitlines()]
    assert [(e.kind, e.process, e.pid, e.age_seconds) for e in events if e] == [
        ("segfault", "pt_main_thread", 2536443, 3.0)
    ] * 2


def test_a_log_without_faults_gives_no_event() -> None:
    assert not any(map(parse_kernel_line, (DATA / "kmsg.log").read_text().splitlines()))


@pytest.mark.parametrize(
    ("text", "kind", "process", "pid"),
    [
        ("Out of memory: Killed process 4101 (python3) total-vm:3kB, anon-rss:2kB", "oom", "python3", 4101),
        ("Memory cgroup out of memory: Killed process 7 (pt_main_thread) total-vm:3kB", "oom", "pt_main_thread", 7),
        ("Out of memory: Kill process 9 (python) score 977 or sacrifice child", "oom", "python", 9),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=12,uid=0", "oom", "python", 12),
        ("python3[55]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6", "segfault", "python3", 55),
        ("traps: python3[55] general protection fault ip:7f sp:7f error:0", "segfault", "python3", 55),
        (
            "NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off",
            "xid",
            "<unknown>",
            None,
        ),
        ("NVRM: Xid (PCI:0000:18:00): 31, Ch 00000003", "xid", None, None),
    ],
)
def test_wordings_of_several_kernels_and_drivers(text: str, kind: str, process: str | None, pid: int | None) -> None:
    event = parse_kernel_line(text)
    assert event is not None
    assert (event.kind, event.process, event.pid) == (kind, process, pid)


def test_bus_ids_compare_with_those_of_nvidia_smi() -> None:
    assert full_bus_id("0000:9b:00") == "00000000:9B:00.0"
    assert full_bus_id("0008:01:00.0") == "00000008:01:00.0"
    assert full_bus_id("odd") == "odd"
