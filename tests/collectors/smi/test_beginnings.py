"""Several logs in one file: where another one begins, and what of it is no fault of a GPU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi import SmiReport, read_gpu_output

HEADER = "timestamp, index, power.draw [W], utilization.gpu [%], memory.used [MiB]\n"
UNNAMED = HEADER.replace("index, ", "")
ROW_SECONDS = 0.002


def stamp(second: float) -> str:
    minutes, rest = divmod(second, 60)
    hours, minute = divmod(int(minutes), 60)
    return f"2026/01/01 {10 + hours:02}:{minute:02}:{rest:06.3f}"


def rows(start: float, count: int, gpus: int, *, every: float = 1.0, index: bool = True, pause: float = 0.0) -> str:
    """Rounds of a log. `pause`: within each round, before its second half."""
    lines = []
    for number in range(count):
        for gpu in range(gpus):
            second = start + number * every + gpu * ROW_SECONDS + (pause if gpu >= gpus // 2 else 0.0)
            name = f" {gpu}," if index else ""
            lines.append(f"{stamp(second)},{name} {300 + gpu}.00 W, 97 %, {1000 + 100 * gpu} MiB\n")
    return "".join(lines)


def table(gpus: dict[int, str], date: str = "", name: str = "NVIDIA A40") -> str:
    head = "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |\n"
    return (date and f"{date}\n") + head + "".join(
        f"|   {index}  {name}          On   | 00000000:{bus}:00.0 Off |                    0 |\n"
        "|  0%   30C    P8   140W / 300W |   9000MiB / 46068MiB |     97%      Default |\n"
        for index, bus in gpus.items()
    )  # fmt: skip


def read(text: str) -> SmiReport:
    return read_gpu_output(text.encode())


def sizes(report: SmiReport) -> list[int]:
    return [len(snapshot.gpus) for snapshot in report.snapshots]


def reasons(report: SmiReport) -> list[str]:
    return [snapshot.begins for snapshot in report.snapshots if snapshot.begins]


# Rows without identity are counted


@pytest.mark.parametrize("pause", [0.03, 0.115, 0.2])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_pause_within_each_round_does_not_halve_it(pause: float, gpus: int) -> None:
    text = UNNAMED + rows(0, 40, gpus, every=0.5, index=False, pause=pause)
    assert sizes(read(text)) == [gpus] * 40


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_pauses_that_begin_in_the_middle_of_a_log_do_not_halve_its_rounds(gpus: int) -> None:
    text = UNNAMED + rows(0, 50, gpus, every=0.13, index=False)
    text += rows(6.5, 20, gpus, every=0.245, index=False, pause=0.115) + rows(11.4, 40, gpus, every=0.13, index=False)
    report = read(text)
    assert set(sizes(report)) == {gpus}
    assert reasons(report) == []


def test_a_lost_line_loses_its_round_and_no_gpu() -> None:
    lines = rows(0, 30, 8, index=False).splitlines(keepends=True)
    del lines[83]
    report = read(UNNAMED + "".join(lines))
    assert sizes(report) == [8] * 29
    assert reasons(report) == []


def test_one_gpu_with_pauses_stays_one() -> None:
    chance = random.Random(1)
    seconds, now = [], 0.0
    for _ in range(200):
        now += 0.1 if chance.random() < 0.9 else chance.uniform(0.1, 2.0)
        seconds.append(now)
    text = "".join(f"{stamp(second)}, 300.00 W, 97 %, 9000 MiB\n" for second in seconds)
    assert set(sizes(read(UNNAMED + text))) == {1}


def test_the_next_log_of_fewer_gpus_is_another_log_and_none_of_them_is_gone() -> None:
    report = read(UNNAMED + rows(0, 30, 8, index=False) + UNNAMED + rows(30, 30, 2, index=False))
    assert sizes(report) == [8] * 30 + [2] * 30
    assert reasons(report) == ["a new header or table begins, and the size of each round changes from 8 rows to 2 rows"]


def test_gpus_that_were_counted_are_said_to_be_counted() -> None:
    (how,) = {snapshot.counted_by for snapshot in read(UNNAMED + rows(0, 9, 4, index=False)).snapshots}
    assert how == "4 GPUs, numbered in the order of the rows of each round"
    assert {snapshot.counted_by for snapshot in read(HEADER + rows(0, 9, 4)).snapshots} == {""}
    assert {snapshot.counted_by for snapshot in read(UNNAMED + rows(0, 9, 1, index=False)).snapshots} == {""}


def test_without_time_stamps_either_every_row_that_is_alike_is_the_same_gpu() -> None:
    lines = [f"{300 + gpu}.00 W, 97 %, {1000 + 100 * gpu} MiB\n" for _ in range(40) for gpu in range(4)]
    report = read("power.draw [W], utilization.gpu [%], memory.used [MiB]\n" + "".join(lines))
    assert sizes(report) == [4] * 40
    assert "the values repeat every 4 rows" in report.snapshots[0].counted_by


# Another log begins


def test_time_that_goes_back_begins_another_log() -> None:
    report = read(HEADER + rows(600, 20, 2) + rows(0, 20, 2))
    assert reasons(report) == ["the time stamps go back by 10 min"]


def test_a_clock_that_is_set_back_on_gpus_that_name_themselves_begins_none() -> None:
    head = "timestamp, index, uuid, power.draw [W]\n"
    text = "".join(f"{stamp(second)}, 0, GPU-5a, 300.00 W\n" for second in (*range(600, 620), *range(20)))
    assert reasons(read(head + text)) == []


def test_gpus_at_other_places_begin_another_log_and_the_first_ones_are_not_gone() -> None:
    dates = [f"Thu Jan  1 1{hour}:0{minute}:00 2026" for hour in (0, 3) for minute in range(6)]
    buses = ["CA"] * 6 + ["31"] * 6
    report = read("".join(table({0: bus}, date) for date, bus in zip(dates, buses, strict=True)))
    assert sizes(report) == [1] * 12
    assert reasons(report) == [
        "there are no samples for 2 h 55 min, and GPU 0 changes from NVIDIA A40 at 00000000:CA:00.0 to "
        "NVIDIA A40 at 00000000:31:00.0"
    ]


def test_tables_of_two_hosts_in_a_row_are_not_one_round() -> None:
    report = read(table({0: "1A", 1: "2A"}) * 5 + table({0: "31", 1: "42"}) * 5)
    assert sizes(report) == [2] * 10
    assert len(reasons(report)) == 1


def test_fewer_gpus_after_a_restart_of_the_logger_are_not_gone() -> None:
    report = read(HEADER + rows(0, 20, 8) + HEADER + rows(30, 20, 5))
    assert sizes(report) == [8] * 20 + [5] * 20
    assert reasons(report) == ["a new header or table begins, and GPUs 5 to 7 are no longer listed"]


def test_fewer_gpus_after_a_long_pause_are_not_gone() -> None:
    assert reasons(read(HEADER + rows(0, 20, 8) + rows(3600, 20, 7))) == [
        "there are no samples for 1 h 0 min, and GPU 7 is no longer listed"
    ]


def test_half_of_the_gpus_or_more_do_not_vanish_at_once_if_only_their_index_is_known() -> None:
    assert reasons(read(HEADER + rows(0, 20, 8) + rows(20, 20, 4))) == ["GPUs 4 to 7 are no longer listed"]


def test_a_gpu_that_vanishes_while_the_others_go_on_is_no_beginning() -> None:
    assert reasons(read(HEADER + rows(0, 20, 8) + rows(20, 20, 7))) == []
    one_less = rows(20, 20, 8).splitlines(keepends=True)
    assert reasons(read(HEADER + rows(0, 20, 8) + "".join(one_less[i] for i in range(160) if i % 8))) == []


def test_more_gpus_than_ever_begin_another_log() -> None:
    assert reasons(read(HEADER + rows(0, 20, 2) + rows(20, 20, 8))) == ["GPUs 2 to 7 are listed for the first time"]


def test_another_pace_for_good_begins_another_log_and_a_pause_does_not() -> None:
    report = read(HEADER + rows(0, 20, 1, every=60) + rows(1200, 100, 1, every=0.5))
    assert reasons(report) == ["the time between samples changes from 60 s to 0.5 s"]
    assert reasons(read(HEADER + rows(0, 20, 1, every=0.5) + rows(30, 20, 1, every=0.5))) == []


def test_a_restart_of_the_logger_alone_begins_no_other_log() -> None:
    assert reasons(read(HEADER + rows(0, 20, 8) + HEADER + rows(25, 20, 8))) == []
    assert reasons(read("".join(HEADER + rows(second, 1, 8) for second in range(20)))) == []


def test_logs_of_single_gpus_in_one_file_are_in_order_of_time() -> None:
    """`cat gpu-0.csv gpu-1.csv`, or one buffered writer for each GPU."""
    lines = rows(0, 60, 4).splitlines(keepends=True)
    for text in (
        "".join(HEADER + "".join(lines[gpu::4]) for gpu in range(4)),
        HEADER + "".join(sorted(lines, key=lambda line: line.split(",")[1])),
    ):
        report = read(text)
        assert sizes(report) == [4] * 60
        assert reasons(report) == []


# Time


def test_rounds_within_one_second_of_a_coarse_clock_are_spread_over_it() -> None:
    text = "".join(f"2026/01/01 10:00:{second:02}, 0, 300.00 W, 97 %, 9 MiB\n" * 4 for second in range(10))
    stamps = [snapshot.time_seconds or 0.0 for snapshot in read(HEADER + text).snapshots]
    assert {round(after - before, 3) for before, after in pairwise(stamps)} == {0.25}


@pytest.mark.parametrize(
    "line", ["Thu Jan  1 10:0{}:00 2026", "=== 2026-01-01 10:0{}:00 ===", "Timestamp: Thu Jan  1 10:0{}:00 UTC 2026"]
)
def test_a_date_below_a_list_of_processes_is_that_of_the_next_table(line: str) -> None:
    processes = (
        "| Processes:                                                               |\n"
        "|  GPU   GI   CI        PID   Type   Process name               GPU Memory |\n"
        "|    0   N/A  N/A      4711      C   python3                       9000MiB |\n"
    )
    report = read("".join(f"{line.format(minute)}\n" + table({0: "CA"}) + processes for minute in range(5)))
    stamps = [snapshot.time_seconds or 0.0 for snapshot in report.snapshots]
    assert [after - before for before, after in pairwise(stamps)] == [60.0] * 4


# Rows of several formats


def test_rows_of_another_format_after_those_of_a_header_are_read_by_their_own_columns() -> None:
    other = "".join(f"{stamp(60 + second)}, 9 %, 1 %, 2 MiB, 20146 MiB, 27, 11.60 W\n" for second in range(9))
    report = read(HEADER + rows(0, 20, 1) + other)
    assert len(report.snapshots) == 29
    gpu: GpuSample = report.snapshots[-1].gpus[0]
    assert (gpu.power_watts, gpu.utilization_percent) == (11.6, 9.0)


def test_a_cell_with_the_unit_of_another_column_is_no_value_of_this_one() -> None:
    other = "".join(f"{stamp(60 + second)}, 9 %, 11.60 W, 27 %, 2 MiB\n" for second in range(9))
    report = read(HEADER + rows(0, 20, 1) + other)
    assert {snapshot.gpus[0].power_watts for snapshot in report.snapshots} <= {300.0, 11.6}


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_the_first_row_of_a_cut_log_spoils_no_column(cut: int) -> None:
    report = read(rows(0, 20, 4)[cut:])
    assert 19 <= len(report.snapshots) <= 20
    assert set(sizes(report)) == {4}
    assert all(snapshot.time_seconds for snapshot in report.snapshots)
