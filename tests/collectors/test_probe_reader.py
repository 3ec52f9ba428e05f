"""Lines of a probe -> samples: deltas, caches, ages, and everything that is not a line of the probe."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.samples import HostStatus, NodeSample, PowerSource, ReadingStatus

BOARD = "GPU-aaaaaaaa-0000-0000-0000-00000000000"


def row(index: int, millijoules: int | None = None, milliwatts: int | None = 640_000) -> list[Any]:
    bus = f"00000000:{index}A:00.0"
    numbers = [milliwatts, 1_100_000, 100, 60, 82_000_000_000, 288_000_000_000, 60, 1900, millijoules, 0, 0, 0]
    return [index, f"{BOARD}{index}", bus, "NVIDIA B300 SXM6 AC", *numbers]


def line(sequence: int = 1, t: float = 100.0, **fields: Any) -> bytes:
    return json.dumps({"v": 1, "seq": sequence, "t": t, "w": 1.7e9 + t, **fields}, separators=(",", ":")).encode()


def nvml(t: float, *rows: list[Any]) -> dict[str, Any]:
    return {"src": "nvml", "t": t, "rows": list(rows)}


def reader(**request: Any) -> ProbeReader:
    return ProbeReader("gpu-01", ProbeRequest(**request))


def read(one: ProbeReader, data: bytes) -> NodeSample:
    sample = one.read(data, 7.0)
    assert sample is not None
    return sample


# Processes


def process(pid: int, *gpus: int) -> list[Any]:
    return [pid, 500.0, "S", "python3", 1.0, list(gpus)]


def test_processes_that_the_probe_proves_gone_or_alive_are_handed_on() -> None:
    one = reader()
    sample = read(one, line(1, proc=[process(7, 0)], exited=[[8, 500.0]], unlisted=[[9, 400.5]]))
    assert sample.exited_processes == {(8, 500.0)}
    assert sample.unlisted_processes == {(9, 400.5)}
    sample = read(one, line(2, proc=None, exited=[]))
    assert (sample.processes, sample.exited_processes) == (None, frozenset())


def test_null_after_processes_that_held_gpus_is_their_exit_in_lines_of_older_probes() -> None:
    """Those sent null for "none of the pids that the driver lists exists"; if they existed before, they have exited."""
    one = reader()
    assert read(one, line(0, proc=None)).exited_processes == frozenset()
    read(one, line(1, proc=[process(7, 0), process(8, 1), process(9)]))
    sample = read(one, line(2, proc=None))
    assert sample.processes is None
    assert sample.exited_processes == {(7, 500.0), (8, 500.0)}
    assert read(one, line(3, proc=None)).exited_processes == {(7, 500.0), (8, 500.0)}


def test_why_the_kernel_log_cannot_be_read_is_handed_on() -> None:
    one = reader()
    assert read(one, line(0)).kernel_log_error == ""
    read(one, line(1, kmsg_error="the kernel log cannot be read: dmesg: Operation not permitted"))
    assert "Operation not permitted" in read(one, line(2)).kernel_log_error


# GPUs


def test_mean_power_is_the_energy_between_two_lines() -> None:
    one = reader()
    first = read(one, line(1, 100.0, gpu=nvml(100.0, [row(0, 5_000_000)])))
    second = read(one, line(2, 101.0, gpu=nvml(101.0, [row(0, 5_912_000)])))
    assert (first.gpus or ())[0].power_source is PowerSource.DRAW
    assert (second.gpus or ())[0].power_watts == pytest.approx(912.0)
    assert (second.gpus or ())[0].power_source is PowerSource.ENERGY_COUNTER
    assert (second.node, second.sequence, second.received_seconds) == ("gpu-01", 2, 7.0)


def test_a_lost_gpu_has_no_power_and_says_why() -> None:
    lost = [row(3, None, None), {"power_mw": 15, "util": 15, "energy_mj": 15}]
    sample = read(reader(), line(gpu=nvml(100.0, [row(0)], lost)))
    gpu = (sample.gpus or ())[1]
    assert gpu.power_watts is None
    assert gpu.reasons["power_watts"] is ReadingStatus.LOST


def test_a_gpu_without_a_handle_is_missing_and_not_a_row() -> None:
    sample = read(reader(), line(gpu=nvml(100.0, [row(0)], [[1] + [None] * 15, {"handle": 15}])))
    assert len(sample.gpus or ()) == 1
    assert [gone.index for gone in sample.missing_gpus] == [1]


def test_without_any_gpu_the_status_is_never_ok() -> None:
    for gpu in (nvml(1.0), nvml(1.0, [[0] + [None] * 15, {"handle": 15}])):
        sample = read(reader(), line(gpu=gpu))
        assert sample.gpus is None
        assert sample.status is not HostStatus.OK
        assert sample.detail


def test_the_message_of_nvidia_smi_reaches_the_detail() -> None:
    gpu = {"src": "nvidia-smi", "t": 1.0, "rc": 9, "nvml": 9, "out": "NVIDIA-SMI has failed because it couldn't "
           "communicate with the NVIDIA driver."}  # fmt: skip
    sample = read(reader(), line(gpu=gpu))
    assert sample.status is HostStatus.DRIVER_DOWN
    assert "driver" in sample.detail


def test_an_answer_is_repeated_with_its_age_until_the_next_one() -> None:
    one = reader()
    read(one, line(1, 100.0, gpu=nvml(100.0, [row(0)])))
    later = read(one, line(2, 101.5, busy=[["nvidia-smi", 1.5]]))
    assert later.status is HostStatus.OK
    assert later.gpus_age_seconds == 1.5
    assert later.hung_calls == ()


def test_a_gpu_call_is_hung_after_five_intervals_and_its_old_answer_is_dropped() -> None:
    one = reader()
    read(one, line(1, 100.0, gpu=nvml(100.0, [row(0)])))
    sample = read(one, line(2, 112.0, busy=[["nvidia-smi", 12.0], ["list /mnt/ckpt", 40.0]]))
    assert sample.status is HostStatus.SAMPLER_TIMEOUT
    assert sample.detail == "nvidia-smi has not answered for 12 s"
    assert sample.gpus is None
    assert [(hung.call, hung.age_seconds) for hung in sample.hung_calls] == [
        ("nvidia-smi", 12.0),
        ("list /mnt/ckpt", 40.0),
    ]


def test_a_hung_file_system_does_not_hide_the_gpus() -> None:
    one = reader()
    read(one, line(1, 100.0, gpu=nvml(100.0, [row(0)])))
    sample = read(one, line(2, 130.0, gpu=nvml(130.0, [row(0)]), busy=[["list /mnt/ckpt", 30.0]]))
    assert sample.status is HostStatus.OK
    assert sample.hung_calls[0].call == "list /mnt/ckpt"


def test_before_the_first_answer_the_detail_says_which_call_is_pending() -> None:
    sample = read(reader(), line(busy=[["nvml", 2.0]]))
    assert (sample.status, sample.gpus) == (HostStatus.SAMPLER_TIMEOUT, None)
    assert sample.detail == "nvml has not answered yet (2.0 s so far)"


# Processes, progress, checkpoints, kernel


def beat(rank: int, host: str, step: int) -> str:
    return json.dumps({"v": 1, "rank": rank, "world": 16, "host": host, "pid": 4100 + rank, "step": step})


def test_processes_are_matched_to_gpus_by_uuid_and_to_ranks_by_pid_and_host() -> None:
    one = reader()
    rows = [[4103, 12.0, "R", "python3", 1.0, [f"{BOARD}1"]], [4104, 12.0, "D", "python3", None, [0]]]
    heartbeats = [["/run/rank-3", 1.7e9, beat(3, "gpu-01.x", 5)], ["/run/rank-4", 1.7e9, beat(4, "gpu-02", 5)]]
    gpu = nvml(1.0, [row(0)], [row(1)])
    sample = read(one, line(hello={"host": "gpu-01"}, gpu=gpu, proc=rows, beat=heartbeats))
    first, second = sample.processes or ()
    assert (first.rank, first.gpu_indexes, first.cpu_seconds) == (3, (1,), 1.0)
    assert (second.rank, second.gpu_indexes, second.state, second.cpu_seconds) == (None, (0,), "D", None)


def test_a_process_list_is_used_for_at_most_ten_seconds() -> None:
    one = reader()
    read(one, line(1, 100.0, proc=[[1, 1.0, "R", "x", 1.0, []]]))
    assert read(one, line(2, 109.0)).processes
    assert read(one, line(3, 111.0)).processes is None
    assert read(one, line(4, 112.0, proc=[])).processes == ()


def test_a_heartbeat_that_is_not_sent_again_ages() -> None:
    one = reader()
    first = read(one, line(1, 100.0, beat=[["/r/rank-0", 1.7e9 + 97.0, beat(0, "gpu-01", 5)]]))
    assert first.progress[0].age_seconds == pytest.approx(3.0)  # by the file's own stamp, at first sight
    assert read(one, line(2, 110.0)).progress[0].age_seconds == pytest.approx(13.0)
    # From here on a change is seen, whatever the clock of the file server says.
    changed = read(one, line(3, 111.0, beat=[["/r/rank-0", 0.0, beat(0, "gpu-01", 6)]]))
    assert (changed.progress[0].step, changed.progress[0].age_seconds) == (6, 0.0)
    assert read(one, line(4, 112.0, beat=[["/r/rank-0", 0, None]])).progress == ()


def test_a_log_is_assembled_from_what_was_appended() -> None:
    one = reader(logs=(LogSource("/l/*"),))
    read(one, line(1, 100.0, log=[[0, "/l/a", 0, 10, 1.7e9, "step=1 loss"]]))
    sample = read(one, line(2, 101.0, log=[[0, "/l/a", 10, 20, 1.7e9, "=0.5 tok_s=1\n"]]))
    assert (sample.progress[0].step, sample.progress[0].loss) == (1, 0.5)
    rotated = read(one, line(3, 102.0, log=[[0, "/l/a", 0, 10, 1.7e9, "step=9 loss=1 \n"]]))
    assert rotated.progress[0].step == 9


def test_a_flood_of_other_output_does_not_lose_the_step() -> None:
    one = reader(logs=(LogSource("/l/*"),))
    read(one, line(1, 100.0, log=[[0, "/l/a", 0, 16, 1.7e9, "step=7 loss=0.5 \n"]]))
    sample = read(one, line(2, 101.0, log=[[0, "/l/a", 16, 9000, 1.7e9, "warning\n" * 1100]]))
    assert sample.progress[0].step == 7


def test_the_pattern_of_the_logs_own_source_is_used() -> None:
    one = reader(logs=(LogSource("/a"), LogSource("/b", r"it (?P<step>\d+)")))
    assert read(one, line(log=[[1, "/b", 0, 5, 1.0, "it 44\n"]])).progress[0].step == 44


def facts(size: int, mtime: float = 1.7e9) -> dict[str, Any]:
    return {"bytes": size, "count": 1, "mtime": mtime, "files": [["random_states_0.pkl", size]]}


def listing(t: float, **fields: Any) -> dict[str, Any]:
    return {"dir": "/ck", "t": t, "w": 1.7e9 + t, "error": None, **fields}


def test_a_checkpoint_without_a_marker_is_complete_once_it_has_been_unchanged() -> None:
    one = reader()
    names = ["checkpoint_5"]
    read(one, line(1, 100.0, ckpt=[listing(100.0, names=[], root={})]))
    # The file server's clock is an hour behind: what counts is that it was seen to change.
    news = [listing(110.0, names=names), {**listing(110.0), "entries": {"checkpoint_5": facts(10, 1.7e9 - 3600)}}]
    assert read(one, line(2, 110.0, ckpt=news)).checkpoints[0].entries[0].complete is None
    still = read(one, line(3, 200.0, listed=[["/ck", 200.0]])).checkpoints[0]
    assert (still.entries[0].complete, still.entries[0].age_seconds) == (None, 90.0)
    quiet = read(one, line(4, 240.0, listed=[["/ck", 240.0]])).checkpoints[0]
    assert quiet.entries[0].complete is True


def test_files_that_the_probe_found_damaged_make_a_checkpoint_incomplete() -> None:
    one = reader()
    root = {"epoch=0-step=9.ckpt": ["file", 300, 1.7e9, ""]}
    damaged = {**facts(10), "bad": {"random_states_0.pkl": 2}}
    news = [
        listing(100.0, names=["checkpoint_5"], root=root, bad={"epoch=0-step=9.ckpt": 2}),
        {**listing(100.0), "entries": {"checkpoint_5": damaged}},
    ]
    entries = read(one, line(1, 100.0, ckpt=news)).checkpoints[0].entries
    assert [(entry.step, entry.complete) for entry in entries] == [(5, False), (9, False)]


def test_a_listing_that_hangs_ages() -> None:
    one = reader()
    read(one, line(1, 100.0, ckpt=[listing(100.0, names=[], root={})]))
    sample = read(one, line(2, 160.0, listed=[["/ck", 100.0]], busy=[["list /ck", 58.0]]))
    assert sample.checkpoints[0].age_seconds == 60.0
    assert sample.hung_calls[0].call == "list /ck"


def test_a_deleted_checkpoint_disappears() -> None:
    one = reader()
    news = [listing(100.0, names=["checkpoint_5"], root={}), {**listing(100.0), "entries": {"checkpoint_5": facts(10)}}]
    assert len(read(one, line(1, 100.0, ckpt=news)).checkpoints[0].entries) == 1
    assert read(one, line(2, 101.0, ckpt=[listing(101.0, names=[])])).checkpoints[0].entries == ()


def test_kernel_faults_and_an_unreadable_kernel_log() -> None:
    one = reader()
    text = "Out of memory: Killed process 4101 (python3) total-vm:3kB"
    entries = [[2.5, text], [0.0, "nothing of interest"]]
    sample = read(one, line(kmsg=entries, kmsg_error="the kernel log cannot be read: x"))
    (event,) = sample.kernel_events
    assert (event.kind, event.pid, event.age_seconds) == ("oom", 4101, 2.5)
    again = read(one, line(2))
    assert again.kernel_events == ()
    assert again.warnings == ("the kernel log cannot be read: x",)


def test_file_systems_and_load_are_kept_until_they_change() -> None:
    one = reader()
    read(
        one, line(1, fs=[["/ck", 5, 10, None], ["/gone", None, None, "Stale file handle"]], load=[1.5, 8, 0.1, None, 0])
    )
    sample = read(one, line(2))
    assert [(fs.path, fs.free_bytes, fs.error) for fs in sample.filesystems] == [
        ("/ck", 5, None),
        ("/gone", None, "Stale file handle"),
    ]
    assert (sample.load.load_1m, sample.load.cpu_count, sample.load.io_pressure_percent) == (1.5, 8, None)


# What is no line of ours


@pytest.mark.parametrize(
    "garbage",
    [
        b"Welcome to gpu-01!",
        b'{"v":1,"seq":1,"t":1',
        b'{"v":2,"seq":1,"t":1.0,"w":1.0}',
        b'{"v":true,"seq":1,"t":1.0,"w":1.0}',
        b'[1,{"v":1}]',
        b'{"v":1,"seq":1,"t":1.0,"w":1.0,"x":"\xff\xfe"}',
        b'{"v":1,"t":"' + b"x" * 70_000 + b'"}',
        b"\x00" * 100,
    ],
)
def test_garbage_is_counted_and_skipped(garbage: bytes) -> None:
    one = reader()
    assert one.read(garbage, 0.0) is None
    assert one.garbage_bytes == len(garbage)
    assert read(one, line(gpu=nvml(1.0, [row(0)]))).status is HostStatus.OK


def test_an_empty_line_is_nothing() -> None:
    one = reader()
    assert one.read(b"", 0.0) is None
    assert one.garbage_bytes == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"seq": "1"},
        {"t": None},
        {"w": "now"},
        {"gpu": 7},
        {"gpu": {"src": "nvml", "rows": 7}},
        {"gpu": {"src": "nvml", "rows": [[{}]]}},
        {"gpu": {"src": "nvidia-smi", "rc": "x", "out": ""}},
        {"proc": [[1, 2]]},
        {"proc": [["1", 0.0, "R", "x", 0.0, []]]},
        {"beat": [1]},
        {"log": [[0, "/a", "0", 1, 1, "x"]]},
        {"ckpt": [{"dir": "/x"}]},
        {"ckpt": [{"dir": "/x", "t": 1, "w": 1, "entries": {"a": []}}]},
        {"busy": [["nvml", "long"]]},
        {"busy": [[[], 1.0]]},
        {"fs": [["/", 1.5, 1, None]]},
        {"load": [1]},
        {"work": [[1, 2]]},
        {"kmsg": [["x", "y"]]},
        {"hello": 3},
    ],
)
def test_a_value_of_the_wrong_type_is_a_parse_error_with_a_reason(fields: dict[str, Any]) -> None:
    one = reader(logs=(LogSource("/a"),))
    whole = {"v": 1, "seq": 1, "t": 1.0, "w": 1.0, **fields}
    sample = read(one, json.dumps(whole, separators=(",", ":")).encode())
    assert sample.status is HostStatus.PARSE_ERROR
    assert sample.gpus is None
    assert sample.detail
    assert read(one, line(2, gpu=nvml(1.0, [row(0)]))).status is HostStatus.OK


KEYS = st.sampled_from(
    ["gpu", "proc", "work", "beat", "log", "ckpt", "listed", "fs", "load", "busy", "warn", "kmsg", "hello"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["nvml", "nvidia-smi", "/x", "dir", "rows", "src"]) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6)
    | st.dictionaries(st.sampled_from(["src", "rows", "t", "w", "dir", "names", "root", "entries", "out"]), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_no_line_of_the_probe_raises_or_affects_the_next(fields: dict[str, Any]) -> None:
    one = reader(logs=(LogSource("/a"),))
    for sequence in (1, 2):
        assert isinstance(one.read(line(sequence, **fields), 0.0), NodeSample)
    assert read(one, line(3, gpu=nvml(1.0, [row(0)]))).status is HostStatus.OK


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    one = reader()
    one.read(data, 0.0)
    one.read(b'{"v":1,' + data, 0.0)
