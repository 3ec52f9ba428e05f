"""Any bytes give a report: with GPUs, or with a sentence why not."""

from __future__ import annotations

import tomllib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from wattwatch.collectors.samples import GpuSample, HostStatus
from wattwatch.collectors.smi import SmiReport, read_gpu_output, read_query_csv

DATA = Path(__file__).parents[2] / "data" / "smi"
TEXTS = [case["text"] for case in tomllib.loads((DATA / "odd_outputs.toml").read_text("utf-8"))["case"]]
LINES = sorted({line for text in TEXTS for line in text.splitlines()})


def holds(report: SmiReport) -> None:
    assert (report.status is HostStatus.OK) == (report.detail == "")
    assert report.snapshots or report.status is not HostStatus.OK
    for snapshot in report.snapshots:
        assert snapshot.gpus
        for gpu in snapshot.gpus:
            holds_of_board(gpu)


def holds_of_board(gpu: GpuSample) -> None:
    """Unknown is None, never out of range; a source exactly where there are watts."""
    assert (gpu.power_watts is None) == (gpu.power_source is None)
    for name in ("power_watts", "power_limit_watts", "memory_used_bytes"):
        value = getattr(gpu, name)
        assert value is None or 0.0 <= value < 1e19
    assert gpu.utilization_percent is None or 0.0 <= gpu.utilization_percent <= 100.0
    for name in gpu.reasons:
        assert getattr(gpu, name, None) is None


@given(st.binary(max_size=400), st.binary(max_size=60), st.none() | st.integers(-300, 300))
@settings(max_examples=200, deadline=None)
def test_any_bytes(data: bytes, stderr: bytes, exit_code: int | None) -> None:
    holds(read_gpu_output(data, stderr, exit_code))
    holds(read_query_csv(data, stderr, exit_code))


@given(st.lists(st.sampled_from(LINES), max_size=12), st.sampled_from(["\n", "\r\n", "\n\0"]), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_any_mixture_of_known_lines_cut_anywhere(lines: list[str], end: str, cut: int) -> None:
    data = end.join(lines).encode()
    holds(read_gpu_output(data[: len(data) - cut] if cut < len(data) else data))


CELLS = [
    "0",
    "1",
    "[N/A]",
    "[GPU is lost]",
    "P0",
    "55 %",
    "300.00 W",
    "2 MiB",
    "GPU-a",
    "0x4",
    "",
    "x",
    "1e999",
    "-5 W",
    "101 %",
]
HEADERS = [
    "index",
    "uuid",
    "power.draw [W]",
    "utilization.gpu [%]",
    "mig.mode.current",
    "timestamp",
    "node",
    "pstate",
    "x",
]


@given(
    st.lists(st.sampled_from(HEADERS), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from(CELLS), min_size=1, max_size=5), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_any_header_over_any_cells(header: list[str], rows: list[list[str]]) -> None:
    holds(read_gpu_output("\n".join(", ".join(row) for row in [header, *rows]).encode()))
    holds(read_gpu_output("\n".join(", ".join(row) for row in rows).encode(), columns=header))


@given(st.sampled_from(["csv", "table", "dmon"]), st.data())
@settings(max_examples=60, deadline=None)
def test_a_real_output_with_damaged_bytes(kind: str, data: st.DataObject) -> None:
    text = bytearray((DATA / "captures" / f"h200_mig.load.{kind}.txt").read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=8)):
        text[place] = data.draw(st.integers(0, 255))
    holds(read_gpu_output(bytes(text)))


GARBAGE = (
    *(b"GPU[0] : ", b"[0] a | 1'C, ", b"A : b ", b"<br>", b"&nbsp;", b"\x1b[1;", b"> ", b'{"a":', b"[{", b"{\n"),
    *(
        b"+---",
        b"|===+",
        b"| 0 MiB / ",
        b"00:00:00 ",
        b"=3D=\n",
        b"ERR! ",
        b"timed out ",
        b"    A : 1\n",
        b'{"a": 1}\n',
    ),
)


def test_garbage_without_line_ends_does_not_make_a_search_explode() -> None:
    for unit in (b"| 0 A ", b"GPU 0: ", b"N/A ", b"<gpu ", b"<nvidia_smi_log", b"1", b" ", b"\0", b"a, ", *GARBAGE):
        holds(read_gpu_output(unit * (300_000 // len(unit))))
