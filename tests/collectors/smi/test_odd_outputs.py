"""Every unusual output from public reports, and how it must be read: tests/data/smi/odd_outputs.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from wattwatch.collectors.samples import GpuSample, HostStatus
from wattwatch.collectors.smi import SmiReport, read_gpu_output

DATA = Path(__file__).parents[2] / "data" / "smi"
CASES: list[dict[str, Any]] = tomllib.loads((DATA / "odd_outputs.toml").read_text("utf-8"))["case"]


def said_of(gpu: GpuSample, name: str) -> object:
    """The value as the table writes it: a plain value, or "none:<reason>"."""
    if name == "fault":
        return gpu.fault.value if gpu.fault else ""
    if name.endswith("_mib"):
        value = getattr(gpu, name.replace("_mib", "_bytes"))
        return None if value is None else value / 2**20
    value = getattr(gpu, name)
    if isinstance(value, frozenset):
        return sorted(value)
    if name == "power_source":
        return value.value if value else None
    return f"none:{gpu.reading(name).reason}" if value is None else value


def check(report: SmiReport, case: dict[str, Any]) -> None:
    assert report.status == HostStatus(case.get("status", "ok")), report.detail
    assert case.get("detail", "") in report.detail
    assert (report.detail == "") == (report.status is HostStatus.OK)
    assert report.source == case.get("source", report.source)
    assert len(report.snapshots) == case.get("snapshots", min(1, len(case.get("gpus", ()))))
    assert report.unreadable_rows == case.get("unreadable_rows", 0)
    assert list(report.invalid_fields) == case.get("invalid_fields", [])
    assert case.get("warning", "") in "\n".join(report.warnings)
    missing = [
        {"index": board.index, "pci_bus_id": board.pci_bus_id, "reason": board.reason.value}
        for board in report.missing_gpus
    ]
    assert missing == [{"index": None, "pci_bus_id": None} | board for board in case.get("missing", [])]
    expected = case.get("gpus", [])
    gpus = report.snapshots[-1].gpus if report.snapshots else ()
    assert len(gpus) == len(expected)
    for gpu, wanted in zip(gpus, expected, strict=True):
        assert {name: said_of(gpu, name) for name in wanted} == wanted


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_odd_output_gets_its_handling(case: dict[str, Any]) -> None:
    check(read_gpu_output(case["text"].lstrip("\n").encode(), b"", case.get("exit_code")), case)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
@pytest.mark.parametrize("dress", ["crlf", "utf-16-le", "utf-16-be", "utf-8-sig", "colours", "blank lines"])
def test_the_same_output_in_another_encoding_gives_the_same(case: dict[str, Any], dress: str) -> None:
    text: str = case["text"].lstrip("\n")
    if dress == "crlf":
        data = text.replace("\n", "\r\n").encode()
    elif dress == "colours":
        data = ("\x1b[0m" + text.replace("\n", "\x1b[K\n")).encode() if text.strip() else text.encode()
    elif dress == "blank lines":
        data = text.replace("\n", "\n\n").encode()
    else:
        mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff", "utf-8-sig": b""}[dress]
        data = mark + text.encode(dress)
    check(read_gpu_output(data, b"", case.get("exit_code")), case)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "missing" in case or case.get("status") in {"driver_down", "no_devices"}],
    ids=lambda case: case["name"],
)  # fmt: skip
def test_an_error_line_counts_on_stderr_as_on_stdout(case: dict[str, Any]) -> None:
    rows: list[str] = []
    errors: list[str] = []
    for line in case["text"].lstrip("\n").splitlines(keepends=True):
        (errors if not line[0].isdigit() and ", " not in line else rows).append(line)
    report = read_gpu_output("".join(rows).encode(), "".join(errors).encode(), case.get("exit_code"))
    if not (rows and case.get("status")):  # a last word needs an order, which two streams do not have
        check(report, case)


CORPUS = Path(__file__).parents[4] / "shared" / "corpus"


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of public reports is not laid beside this checkout")
def test_no_file_of_the_corpus_raises_or_gives_no_reason() -> None:
    for path in sorted([*CORPUS.glob("smi_odd/*.*"), *CORPUS.glob("timeseries/*.csv")]):
        report = read_gpu_output(path.read_bytes())
        assert report.snapshots or report.detail, path.name


@pytest.mark.parametrize("mark", [";", "\t"])
def test_decimal_commas_of_a_spreadsheet_are_read(mark: str) -> None:
    rows = ["index;power.draw;utilization.gpu;memory.used", "0;120,5 W;100 %;70000 MiB", "1;1043,25 W;0 %;4 MiB"]
    report = read_gpu_output("\n".join(row.replace(";", mark) for row in rows).encode() + b"\n")
    (snapshot,) = report.snapshots
    assert [gpu.power_watts for gpu in snapshot.gpus] == [120.5, 1043.25]
    assert [gpu.utilization_percent for gpu in snapshot.gpus] == [100.0, 0.0]


@pytest.mark.parametrize("before", ["alice  10:32 AM\nlook, please; it hangs:\n```\n", "{noformat}\n", ""])
def test_decimal_commas_are_read_beside_other_text(before: str) -> None:
    names = ("0;NVIDIA RTX 6000 Ada Generation;193,56 W", "1;NVIDIA RTX 6000 Ada Generation;97,04 W")
    rows = "\n".join(("index;name;power.draw [W]", *names, ""))
    (snapshot,) = read_gpu_output(f"{before}{rows}".encode()).snapshots
    assert [gpu.power_watts for gpu in snapshot.gpus] == [193.56, 97.04]
    assert {gpu.name for gpu in snapshot.gpus} == {"NVIDIA RTX 6000 Ada Generation"}


def test_a_row_with_a_bus_id_and_semicolons_is_no_line_of_a_table() -> None:
    row = "{0};NVIDIA RTX 6000 Ada Generation;40;00000000:1{0}:00.0;100 %;71.16 W"
    text = "index;name;temperature.gpu;pci.bus_id;utilization.gpu;power.draw\n" + "\n".join(map(row.format, range(3)))
    (snapshot,) = read_gpu_output(text.encode() + b"\n").snapshots
    assert [(gpu.index, gpu.power_watts) for gpu in snapshot.gpus] == [(0, 71.16), (1, 71.16), (2, 71.16)]


@pytest.mark.parametrize(
    "row", ["0, NVIDIA A10G, 300.00 W, 4 MiB, 0 %, 16.55 W", "0, NVIDIA A10G, 300.00 W, 4 MiB, 99 %, 269.48 W"]
)
def test_power_is_not_taken_from_the_limit_where_the_limit_comes_first(row: str) -> None:
    ((gpu,),) = (snapshot.gpus for snapshot in read_gpu_output(row.encode() + b"\n").snapshots)
    assert gpu.power_limit_watts == 300.0
    assert gpu.power_watts == float(row.split(", ")[-1].removesuffix(" W"))


@pytest.mark.parametrize("prefix", ["2026-03-01T10:00:00.123456789Z ", "worker-1  | "])
def test_what_a_log_collector_puts_before_each_line_does_not_hide_the_header(prefix: str) -> None:
    rows = [
        "index, memory.total [MiB], utilization.gpu [%], power.draw [W]",
        "0, 15360, 12, 9.90",
        "1, 15360, 99, 69.10",
    ]
    for mark in (", ", ";"):
        text = "".join(f"{prefix}{row.replace(', ', mark)}\n" for row in rows)
        (snapshot,) = read_gpu_output(text.encode()).snapshots
        read = [(g.index, g.memory_used_bytes, g.utilization_percent, g.power_watts) for g in snapshot.gpus]
        assert read == [(0, None, 12.0, 9.9), (1, None, 99.0, 69.1)]
