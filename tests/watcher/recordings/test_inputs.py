"""Files that hold readings become samples in order of time; what is asked of a node is all that its jobs need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from wattwatch.collectors.probe.request import LogSource
from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.config.settings import probe_request_for
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.recordings.inputs import GpuLog, InputError, read_input, read_input_file

HEADER = "timestamp, index, power.draw [W], utilization.gpu [%]\n"


def read(data: str | dict[str, Any] | list[Any]) -> GpuLog:
    source = read_input("f", data.encode() if isinstance(data, str) else json.dumps(data).encode())
    assert isinstance(source, GpuLog)
    return source


def rows(*seconds: float) -> str:
    return HEADER + "".join(f"2026/01/01 10:00:{second:06.3f}, 0, 400.00 W, 99 %\n" for second in seconds)


# Logs


def test_the_interval_of_a_log_comes_from_its_time_stamps() -> None:
    log = read(rows(0, 5, 10, 15.5))
    assert log.specs == (JobSpec("f", ("f",), interval_seconds=5.0),)
    assert [event.seconds for event in log.events] == [0.0, 5.0, 10.0, 15.5]


def test_time_stamps_that_go_back_continue_one_interval_later() -> None:
    assert [event.seconds for event in read(rows(10, 11, 12, 3, 4)).events] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_without_time_stamps_samples_are_one_second_apart() -> None:
    log = read("index, power.draw [W]\n0, 1.00 W\n0, 2.00 W\n0, 3.00 W\n")
    assert [event.seconds for event in log.events] == [0.0, 1.0, 2.0]


def test_an_error_at_the_end_is_the_status_of_the_log() -> None:
    log = read(rows(0, 1) + "Failed to initialize NVML: Driver/library version mismatch\n")
    first, _, last = (event.sample for event in log.events)
    assert first is not None
    assert first.status is HostStatus.OK
    assert last is not None
    assert (last.status, last.gpus, last.received_seconds) == (HostStatus.DRIVER_DOWN, None, 2.0)
    assert log.status is HostStatus.DRIVER_DOWN


def test_a_gpu_that_could_not_be_opened_belongs_to_the_last_sample() -> None:
    log = read(rows(0, 1) + "Unable to determine the device handle for GPU1: 0000:0A:00.0: GPU is lost.\n")
    missing = [() if event.sample is None else event.sample.missing_gpus for event in log.events]
    assert [[board.index for board in boards] for boards in missing] == [[], [1]]


# JSON samples


def board(index: int, **more: Any) -> dict[str, Any]:
    return {"index": index, "util_pct": 100, "power_w": 640.0, "power_limit_w": 700, "mem_used_mib": 1024, **more}


@pytest.mark.parametrize(
    "content",
    [
        {"gpu_model": "NVIDIA H100", "samples": [{"t_seconds": 0, "gpus": [board(0), board(1)]}]},
        [{"gpus": [board(0, name="NVIDIA H100"), board(1, name="NVIDIA H100")]}],
        {"gpu_model": "NVIDIA H100", "gpus": [board(0), board(1)], "what else": "is passed over"},
    ],
    ids=["with a head", "a list", "one sample"],
)
def test_json_samples_come_in_three_forms(content: dict[str, Any] | list[Any]) -> None:
    (event,) = read(content).events
    assert event.sample is not None
    first, second = event.sample.gpus or ()
    assert (first.index, second.index) == (0, 1)
    assert (first.name, first.power_watts, first.memory_used_bytes) == ("NVIDIA H100", 640.0, 1024.0**3)
    assert first.temperature_celsius is None


def test_json_gpus_can_name_their_nodes_and_ranks() -> None:
    log = read(
        {
            "samples": [
                {"t_seconds": t, "gpus": [board(0, node="b", rank=9), board(0, node="a", rank=1)]} for t in (0, 2)
            ]
        }
    )
    assert log.specs[0].nodes == ("b", "a")
    assert log.specs[0].interval_seconds == 2.0
    assert log.ranks == {("b", 0): 9, ("a", 0): 1}
    assert [event.seconds for event in log.events] == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "other", [{"jobs": []}, [1, 2], {"samples": "many"}, {"samples": [{"gpus": [{"power_w": "lots"}]}]}]
)
def test_other_json_has_no_gpus(other: dict[str, Any] | list[Any]) -> None:
    log = read(other)
    assert log.status is HostStatus.PARSE_ERROR
    assert log.detail


def test_a_wrong_value_in_json_samples_is_named_and_no_other_reader_guesses_at_them() -> None:
    nodes = [{**board(i % 8), "node": f"n{i // 8}"} for i in range(16)]
    log = read({"samples": [{"gpus": [*nodes[:3], {**nodes[3], "power_w": "much"}, *nodes[4:]]}]})
    assert (log.status, log.events) == (HostStatus.PARSE_ERROR, ())
    assert "samples[0].gpus[3].power_w: expected a number, got 'much'" in log.detail
    assert log.advice


def test_a_file_that_cannot_be_opened_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "it is a directory; give the files in it")):
        with pytest.raises(InputError, match=re.escape(f"{path}: cannot read the file: {words}")):
            read_input_file(path)


# What a node is asked


def test_a_node_of_two_jobs_gets_one_request_at_the_shorter_interval() -> None:
    one = JobSpec(
        "one", ("a", "b"), run_directory="/run/1", logs=("/l/1", "/l/2"), log_pattern="x", interval_seconds=2.0
    )
    two = JobSpec("two", ("a",), run_directory="/run/1", logs=("/l/2",), checkpoint_directory="/ckpt")
    request = probe_request_for([one, two], "a")
    assert request.interval_seconds == 1.0
    assert request.run_directories == ("/run/1",)
    assert request.logs == (LogSource("/l/1", "x"), LogSource("/l/2", "x"), LogSource("/l/2"))
    assert request.checkpoint_directories == ("/ckpt",)
    assert request.process_pattern is None
    assert probe_request_for([one, two], "b").interval_seconds == 2.0


@pytest.mark.parametrize(
    ("patterns", "named", "others"),
    [
        (["^python"], ["python3"], ["bash", "xpython"]),
        (["^python|^pt_main", "train$"], ["python3", "pt_main_thread", "my-train"], ["trainer"]),
        (["(?i)python"], ["PYTHON"], ["bash"]),
        (["(?i)python", "(?x) t r a i n"], ["PYTHON", "train"], ["TRAIN", "t r a i n"]),
    ],
)
def test_patterns_of_several_jobs_are_combined(patterns: list[str], named: list[str], others: list[str]) -> None:
    specs = [JobSpec(str(i), ("a",), processes=pattern) for i, pattern in enumerate(patterns)]
    asked = re.compile(probe_request_for(specs, "a").process_pattern or "")
    assert [bool(asked.search(name)) for name in named + others] == [True] * len(named) + [False] * len(others)
