"""Parsing nvidia-smi, and what is reported when it hangs, fails or does not exist."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.trainer.gate.devices import NvidiaSmiProbe, parse_devices

GPUS = [
    "0, GPU-aaaa-1, NVIDIA B300 SXM6 AC, 580.82.07, 275040, 4",
    "1, GPU-bbbb-2, NVIDIA B300 SXM6 AC, 580.82.07, 275040, 81920",
]


def test_gpus_and_the_processes_on_them_are_read() -> None:
    report = parse_devices(GPUS, ["4711, GPU-bbbb-2", "", "12, GPU-elsewhere"], None)
    assert [(gpu.index, gpu.name, gpu.memory_used_mib) for gpu in report.gpus] == [
        (0, "NVIDIA B300 SXM6 AC", 4.0),
        (1, "NVIDIA B300 SXM6 AC", 81920.0),
    ]
    assert report.processes == ("pid 4711 on GPU 1",)


@pytest.mark.parametrize(
    ("visible", "seen"), [("1", [1]), ("GPU-aaaa", [0]), ("0,1", [0, 1]), ("", []), (None, [0, 1])]
)
def test_only_gpus_that_the_job_may_use_count(visible: str | None, seen: list[int]) -> None:
    report = parse_devices(GPUS, ["4711, GPU-bbbb-2"], visible)
    assert [gpu.index for gpu in report.gpus] == seen
    assert bool(report.processes) == (1 in seen)


def test_health_readings_are_parsed_and_missing_ones_are_unknown() -> None:
    lines = [f"{GPUS[0]}, 3, 31, 184.20, 1100.00, No", f"{GPUS[1]}, [N/A], [N/A], [Unknown Error], [N/A], [N/A]"]
    well, unknown = parse_devices(lines, [], None, ["GPU-aaaa-1, Yes", "GPU-bbbb-2, [N/A]"]).gpus
    assert (well.uncorrected_errors, well.temperature_celsius, well.power_watts) == (3, 31.0, 184.2)
    assert (well.pages_pending, well.rows_pending) == (False, True)
    assert (unknown.uncorrected_errors, unknown.power_watts, unknown.rows_pending) == (None, None, None)


def test_an_older_nvidia_smi_without_some_fields_is_asked_for_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in *retired*) echo 'Field \"power.limit\" is not a valid field to query.'; exit 2;;\n"
        f"*remapped*) echo 'Option is not recognized'; exit 1;; --query-gpu*) echo '{GPUS[0]}';; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    probe = NvidiaSmiProbe()
    try:
        report = probe.report(time.monotonic() + DEADLINE_SECONDS)
    finally:
        probe.close()
    assert (report.trouble, [gpu.index for gpu in report.gpus]) == (None, [0])


def test_output_that_is_not_a_table_is_quoted() -> None:
    assert parse_devices(["No devices were found"], [], None).trouble == (
        "nvidia-smi printed a row that does not describe a GPU: 'No devices were found'"
    )


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        ("exec sleep 6000", "gave no answer in"),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "exited with code 18: Failed",
        ),
    ],
)
def test_a_driver_that_hangs_or_fails_is_reported_within_the_deadline(
    script: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    probe = NvidiaSmiProbe()
    try:
        report = probe.report(time.monotonic() + (0.3 if "sleep" in script else DEADLINE_SECONDS))
    finally:
        probe.close()
    assert report.trouble is not None
    assert trouble in report.trouble


def test_a_node_without_nvidia_smi_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert NvidiaSmiProbe().report(0).skipped == "nvidia-smi was not found on this node"
