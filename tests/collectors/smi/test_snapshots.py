"""GPUs that a round of a log does not list: cut ends, lost lines, rows in any order."""

from __future__ import annotations

import random

import pytest

from wattwatch.collectors.smi import SmiReport, read_gpu_output

HEADER = "timestamp, index, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"
BOARDS = 8


def row(second: float, board: int) -> str:
    minute, rest = divmod(second + board / 1000, 60)
    return f"2026/01/01 10:{int(minute):02}:{rest:06.3f}, {board}, 640.00 W, 700.00 W, 100 %, 71000 MiB\n"


def rounds(count: int, start: int = 0, without: frozenset[int] = frozenset()) -> list[str]:
    return [row(start + s, board) for s in range(count) for board in range(BOARDS) if board not in without]


def read(lines: list[str], header: str = HEADER) -> SmiReport:
    return read_gpu_output((header + "".join(lines)).encode())


def listed(report: SmiReport) -> list[list[int | None]]:
    return [[gpu.index for gpu in snapshot.gpus] for snapshot in report.snapshots]


@pytest.mark.parametrize("header", [HEADER, ""])
@pytest.mark.parametrize("first", range(BOARDS))
@pytest.mark.parametrize("last", range(BOARDS))
def test_a_log_cut_at_any_line_lacks_no_gpu(first: int, last: int, header: str) -> None:
    lines = rounds(6)
    report = read(lines[first : len(lines) - last], header)
    assert {tuple(each) for each in listed(report)} == {tuple(range(BOARDS))}
    assert 4 <= len(report.snapshots) <= 6


@pytest.mark.parametrize("count", range(BOARDS, 3 * BOARDS))
def test_the_last_lines_of_a_log_lack_no_gpu(count: int) -> None:
    for snapshot in listed(read(rounds(6)[-count:], "")):
        assert sorted(i for i in snapshot if i is not None) == list(range(BOARDS))


def test_no_round_of_a_log_that_begins_within_a_round_mixes_two_moments() -> None:
    stamps = [snapshot.time_seconds or 0.0 for snapshot in read(rounds(6)[5:]).snapshots]
    assert [round(second % 1, 3) for second in stamps] == [0.0] * 5


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_line_is_not_a_lost_gpu(lost: int) -> None:
    lines = [*rounds(4), *rounds(lost, 4, frozenset({3})), *rounds(4, 4 + lost)]
    assert {tuple(each) for each in listed(read(lines))} == {tuple(range(BOARDS))}


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("cut", [0, 3])
def test_a_gpu_missing_from_several_rounds_is_gone(returns: bool, cut: int) -> None:
    lines = [*rounds(4), *rounds(5, 4, frozenset({3})), *(rounds(4, 9) if returns else [])]
    told = listed(read(lines[: len(lines) - cut]))
    assert [3 in each for each in told[:8]] == [True] * 4 + [False] * 4


def test_gpus_queried_one_by_one_come_in_any_order_and_are_all_present() -> None:
    """One `nvidia-smi -i N -l` a board, all into one file: each has its own pace."""
    chance = random.Random(1)
    at = sorted((n * (1 + board / 200) + chance.random() * 0.9, board) for board in range(BOARDS) for n in range(200))
    at = [(second, board) for second, board in at if second < 199]  # somebody ends them all
    for start, end in ((0, len(at)), (3, -5), (11, -13)):
        told = listed(read([row(second, board) for second, board in at[start:end]]))
        assert all(set(each) == set(range(BOARDS)) for each in told[2:-2])


def test_a_gpu_queried_less_often_is_present_in_between() -> None:
    at = sorted(
        (n * (5 if board == 7 else 1), board) for board in range(BOARDS) for n in range(20 if board == 7 else 100)
    )
    told = listed(read([row(second, board) for second, board in at]))
    assert {tuple(each) for each in told} == {tuple(range(BOARDS))}


def test_rows_without_identity_lack_none_where_a_burst_was_cut() -> None:
    lines = [line.replace(f", {i % BOARDS}, ", ", ", 1) for i, line in enumerate(rounds(6))]
    report = read(lines[3:-2], HEADER.replace("index, ", ""))
    assert [len(each) for each in listed(report)] == [BOARDS] * 4


def test_a_table_of_a_loop_that_was_cut_proves_no_absence() -> None:
    table = "".join(
        f"|   {board}  NVIDIA H100 80GB HBM3          On  |   00000000:{board + 1:02X}:00.0 Off |         0 |\n"
        "| N/A   34C    P0             640W /  700W |   71000MiB /  81559MiB |    100%      Default |\n"
        for board in range(4)
    )
    whole = "| NVIDIA-SMI 535.1   Driver Version: 535.1   CUDA Version: 12.2 |\n" + table
    report = read_gpu_output((whole * 3)[: -len(table) // 2].encode())
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [4, 4]


def test_an_incomplete_document_proves_no_absence_and_a_complete_one_does() -> None:
    gpu = '<gpu id="00000000:0{}:00.0"><minor_number>{}</minor_number><uuid>GPU-{}</uuid></gpu>'
    gpus = [gpu.format(board, board, board) for board in range(4)]
    whole, shorter = (f"<nvidia_smi_log>{''.join(gpus[:n])}</nvidia_smi_log>\n" for n in (4, 3))
    assert [len(s.gpus) for s in read_gpu_output((whole + shorter.split("</nv")[0]).encode()).snapshots] == [4]
    assert [len(s.gpus) for s in read_gpu_output((whole + shorter).encode()).snapshots] == [4, 3]
