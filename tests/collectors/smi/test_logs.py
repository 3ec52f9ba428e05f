"""Logs of many samples: where one ends, what is cut off, and their timestamps."""

from __future__ import annotations

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.smi import read_gpu_output

HEADER = "timestamp, index, power.draw [W], utilization.gpu [%]\n"


def test_a_snapshot_ends_where_a_gpu_appears_again() -> None:
    rows = "".join(
        f"2026/01/01 10:00:{second:02}.{board:03}, {board}, {300 + board}.00 W, 100 %\n"
        for second in range(3)
        for board in range(8)
    )
    report = read_gpu_output((HEADER + rows).encode())
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [8, 8, 8]
    first, second, _ = (snapshot.time_seconds for snapshot in report.snapshots)
    assert first is not None
    assert second is not None
    assert second - first == 1.0


def test_several_samples_within_one_second_are_separated_by_their_gpus() -> None:
    rows = "2026/01/01 10:00:00, 0, 300.00 W, 9 %\n2026/01/01 10:00:00, 1, 310.00 W, 9 %\n" * 4
    assert [len(snapshot.gpus) for snapshot in read_gpu_output((HEADER + rows).encode()).snapshots] == [2, 2, 2, 2]


def test_a_row_cut_within_a_sample_drops_the_incomplete_sample() -> None:
    whole = "".join(f"2026/01/01 10:00:0{s}.000, {i}, 300.00 W, 100 %\n" for s in range(2) for i in range(4))
    report = read_gpu_output((HEADER + whole + "2026/01/01 10:00:02.000, 0, 300.00 W, 100 %\n2026/01/01 10").encode())
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [4, 4]
    assert report.status is HostStatus.OK
    assert report.unreadable_rows == 1


def test_a_last_cell_without_its_unit_was_cut_within_the_number() -> None:
    rows = "2026/01/01 10:00:00.000, 0, 300.00 W, 100 %\n2026/01/01 10:00:01.000, 0, 300.00 W, 10"
    report = read_gpu_output((HEADER + rows).encode())
    assert len(report.snapshots) == 1
    assert report.unreadable_rows == 1


def test_a_paste_without_a_final_line_end_loses_nothing() -> None:
    rows = "2026/01/01 10:00:00.000, 0, 300.00 W, 100 %\n2026/01/01 10:00:01.000, 0, 301.00 W, 99 %"
    assert len(read_gpu_output((HEADER + rows).encode()).snapshots) == 2


def test_the_padding_of_a_killed_logger_is_ignored() -> None:
    rows = "2026/01/01 10:00:00.000, 0, 300.00 W, 100 %\n2026/01/01 10:00:01.0"
    report = read_gpu_output((HEADER + rows).encode() + b"\0" * 3000)
    assert len(report.snapshots) == 1
    assert report.status is HostStatus.OK


def test_rows_without_index_of_eight_gpus_are_grouped_by_their_burst() -> None:
    head = "timestamp, power.draw [W]\n"
    rows = "".join(
        f"2026/01/01 10:00:{half // 2:02}.{(half % 2) * 500 + board * 12:03}, {300 + board}.00 W\n"
        for half in range(6)
        for board in range(8)
    )
    report = read_gpu_output((head + rows).encode())
    assert [[gpu.index for gpu in snapshot.gpus] for snapshot in report.snapshots] == [list(range(8))] * 6


def test_one_gpu_sampled_fast_is_not_taken_for_many() -> None:
    rows = "".join(f"2026/01/01 10:00:00.{ms:03}, 300.00 W\n" for ms in range(0, 1000, 20))
    report = read_gpu_output(("timestamp, power.draw [W]\n" + rows).encode())
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [1] * 50


def test_the_order_of_day_and_month_is_the_one_that_makes_the_log_shorter() -> None:
    rows = "03-11-2026 23:59:30, 0, 99, 45\n03-12-2026 00:00:30, 0, 99, 45\n"
    report = read_gpu_output(("timestamp, index, utilization.gpu, temperature.gpu\n" + rows).encode())
    first, last = (snapshot.time_seconds for snapshot in report.snapshots)
    assert first is not None
    assert last is not None
    assert last - first == 60.0


def test_a_day_above_twelve_decides_the_order() -> None:
    rows = "01/02/2026 10:00:00, 0, 9\n13/02/2026 10:00:00, 0, 9\n"
    report = read_gpu_output(("timestamp, index, utilization.gpu\n" + rows).encode())
    first, last = (snapshot.time_seconds for snapshot in report.snapshots)
    assert first is not None
    assert last is not None
    assert last - first == 12 * 86400.0


def test_columns_given_by_the_caller_are_used() -> None:
    rows = b"2026/04/25 16:06:06.780, 5 %, 1 %, 2 MiB, 20146 MiB, 27, 11.60 W\n"
    told = [
        "timestamp",
        "utilization.gpu",
        "utilization.memory",
        "memory.used",
        "memory.free",
        "temperature.gpu",
        "power.draw",
    ]
    report = read_gpu_output(rows, columns=told)
    (gpu,) = report.snapshots[0].gpus
    assert (gpu.temperature_celsius, gpu.power_watts, gpu.memory_total_bytes) == (27.0, 11.6, None)
    assert report.warnings == ()


def test_bare_integers_without_a_header_are_an_error_that_names_what_is_needed() -> None:
    report = read_gpu_output(b"64, 97, 75\n66, 98, 71\n")
    assert report.status is HostStatus.PARSE_ERROR
    assert "add a header, e.g. timestamp, index" in report.detail


def test_tables_of_a_loop_are_samples_with_the_time_above_them() -> None:
    table = (
        "{} 2026\n| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |\n"
        "|   0  NVIDIA A40          On   | 00000000:44:00.0 Off |                    0 |\n"
        "|  0%   30C    P8    14W / 300W |      0MiB / 46068MiB |      0%      Default |\n"
    )
    log = table.format("Thu Jan  1 10:00:00") + table.format("Thu Jan  1 10:00:05")
    report = read_gpu_output(log.encode())
    first, last = (snapshot.time_seconds for snapshot in report.snapshots)
    assert first is not None
    assert last is not None
    assert last - first == 5.0


def test_a_warning_and_a_bad_exit_status_leave_the_rows_readable() -> None:
    report = read_gpu_output((HEADER + "2026/01/01 10:00:00.000, 0, 300.00 W, 100 %\n").encode(), b"", 15)
    assert report.status is HostStatus.OK
    assert any("fallen off the bus" in warning for warning in report.warnings)
