"""The end of a long log gives the verdict of the whole."""

from __future__ import annotations

import pytest

from wattwatch.watcher.recordings import inputs
from wattwatch.watcher.recordings.format import Recording
from wattwatch.watcher.recordings.inputs import GpuLog, head_and_tail_of_log, read_end_of_log, read_input
from wattwatch.watcher.recordings.triage import TriageResult, triage_source

HEADER = "timestamp, index, power.draw [W], utilization.gpu [%], memory.used [MiB], power.limit [W], name\n"
OTHER = "timestamp, index, utilization.gpu [%], power.draw [W], memory.used [MiB], power.limit [W], name\n"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LOG_HEAD_BYTES", 2000)
    monkeypatch.setattr(inputs, "LOG_TAIL_BYTES", 6000)


def rounds(start: int, count: int, boards: range = range(8), watts: float = 640.0, *, other: bool = False) -> str:
    lines = []
    for second in range(start, start + count):
        for board in boards:
            stamp = f"2026/05/01 {second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.{board:03}"
            figures = "98 %, 640.00 W" if other else f"{watts + board:.2f} W, 98 %"
            lines.append(f"{stamp}, {board}, {figures}, 71000 MiB, 700.00 W, NVIDIA H100 80GB HBM3\n")
    return "".join(lines)


def judged(source: GpuLog | Recording) -> TriageResult:
    (triage,) = triage_source("f", source, None, None)
    return triage


LOGS = {
    "plain": HEADER + rounds(0, 200),
    "no header": rounds(0, 200),
    "cut": (HEADER + rounds(0, 200))[:-700],
    "torn": (HEADER + rounds(0, 200))[:-130],
    "hangs at the end": HEADER + rounds(0, 200) + rounds(200, 50, watts=145.0),
    "hung long ago, and works": HEADER + rounds(0, 100, watts=145.0) + rounds(100, 100),
    **{
        f"lost a board long ago, {boards}": HEADER + rounds(0, at) + rounds(at, 200 - at, range(boards))
        for at, boards in ((50, 7), (51, 7), (100, 6))
    },
    "lost a board long ago": HEADER + rounds(0, 50) + rounds(50, 150, range(7)),
    "other columns later": HEADER + rounds(0, 60) + OTHER + rounds(60, 140, other=True),
    "a header each round": "".join(HEADER + rounds(second, 1) for second in range(200)),
    "windows": (HEADER + rounds(0, 200)).replace("\n", "\r\n"),
    "no driver at last": HEADER + rounds(0, 200) + "Failed to initialize NVML: Driver Not Loaded\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_the_tail_gets_the_verdict_of_the_whole_log(name: str) -> None:
    data = LOGS[name].encode()
    end = head_and_tail_of_log(data)
    assert len(end) < len(data) / 2
    whole, short = judged(read_input("f", data)), judged(read_end_of_log("f", data))
    assert short.verdict == whole.verdict
    assert [r.gpu for r in short.sample.gpus] == [r.gpu for r in whole.sample.gpus]


@pytest.mark.parametrize(
    "data",
    [
        (HEADER + rounds(0, 5)).encode(),  # short
        (HEADER + rounds(0, 200)).encode("utf-16"),
        b'{"samples": [' + b" " * 99_999 + b"]}",
        b'<?xml version="1.0" ?>\n<nvidia_smi_log>' + b"<a/>\n" * 9_999,
        b"x" * 99_999,
    ],
)
def test_other_content_is_not_cut(data: bytes) -> None:
    assert head_and_tail_of_log(data) is data
