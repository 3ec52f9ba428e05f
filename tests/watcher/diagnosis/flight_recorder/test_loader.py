"""From a directory with arbitrary files to one record per rank."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.diagnosis.flight_recorder.sample_dumps import DATA, GLOO, NCCL, as_json, loaded
from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.flight_recorder import loader
from wattwatch.watcher.diagnosis.flight_recorder.loader import is_record_name, rank_from_file_name, read_flight_records
from wattwatch.watcher.diagnosis.model import DiagnosisVerdict

EARLY = DATA / "nc_early_r3"


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_9", 9),
        ("nccl_trace_rank_3", 3),
        ("comm_lib_trace_rank_12", 12),
        ("rank-00003", 3),
        ("rank-00003.recorder.json", 3),
        ("rank-00003.recorder", 3),
        ("fr_trace_json_1.json", 1),
        ("rank0_fr_trace_json.json", 0),
        ("trace-node-01_rank_3", 3),
        ("rank_3_on_node-01.pickle", 3),
        ("nccl_trace_gpu-12.cluster7.example.com_5", 5),
        ("dump", None),
        ("dump_1758610505880", None),
        ("dump_20250923", None),
    ],
)
def test_the_rank_is_the_number_after_rank_or_the_last_number(name: str, rank: int | None) -> None:
    assert rank_from_file_name(name) == rank


@pytest.mark.parametrize(
    "name",
    ["fault_injection.log", "manifest.json", "rank-00003.stacks.txt", "rank0_dump_traceback.txt", "trace.py",
     "node-01.ras-1.json", "node-01.processes.json", "nccl_trace_rank_3.pipe", "seen.json", "report.html"],
)  # fmt: skip
def test_other_files_of_a_job_are_not_mistaken_for_records(name: str) -> None:
    assert not is_record_name(name)


def test_a_directory_is_read_in_order_of_rank_and_logs_are_skipped() -> None:
    records, unread = read_flight_records(DATA / "nccl_lock_gil_1st")
    assert [record.rank for record in records] == list(range(16))
    assert unread == ()
    assert records[9].source.endswith("/_dump_9")


def test_the_order_in_which_files_are_named_does_not_matter() -> None:
    paths = [EARLY / f"_dump_{rank}" for rank in range(4)] + [
        DATA / "nccl_gpu_error_1st" / f"_dump_{i}" for i in range(16)
    ]
    whole = read_flight_records(paths)
    for seed in range(3):
        random.Random(seed).shuffle(paths)
        assert read_flight_records(paths) == whole
    assert [record.rank for record in whole[0]] == list(range(16))


def test_directories_per_node_are_searched(tmp_path: Path) -> None:
    for rank in range(4):
        shutil.copy(EARLY / f"_dump_{rank}", _made(tmp_path / f"node-{rank // 2}") / f"nccl_trace_rank_{rank}")
    records, unread = read_flight_records(str(tmp_path))
    assert [record.rank for record in records] == [0, 1, 2, 3]
    assert unread == ()


def test_a_missing_file_is_reported() -> None:
    records, (unread,) = read_flight_records("/nowhere/nccl_trace_rank_3")
    assert records == ()
    assert (unread.rank, unread.why) == (3, "the file cannot be read: No such file or directory")
    assert read_flight_records(()) == ((), ())


def test_the_pickle_is_preferred_over_the_same_record_as_json_for_its_stacks(tmp_path: Path) -> None:
    tmp_path.joinpath("rank-00003.recorder.json").write_bytes(as_json(loaded(NCCL)))
    shutil.copy(NCCL, tmp_path / "rank-00003.recorder")
    (record,), unread = read_flight_records(tmp_path)
    assert record.source.endswith(".recorder")
    assert record.groups[0].launches[0].frames
    assert unread == ()


def test_the_newer_record_is_preferred_in_either_format(tmp_path: Path) -> None:
    later: Any = loaded(NCCL)
    entry = dict(later["entries"][-1])
    entry["collective_seq_id"] += 1
    entry["time_created_ns"] += 1000
    later["entries"].append(entry)
    tmp_path.joinpath("rank-00003.recorder.json").write_bytes(as_json(later))
    shutil.copy(NCCL, tmp_path / "rank-00003.recorder")
    (record,), _ = read_flight_records(tmp_path)
    assert record.source.endswith(".json")
    assert record.groups[0].last_enqueued == 8


@pytest.mark.parametrize(
    ("data", "why", "incomplete"),
    [
        (
            b"",
            "the file is empty: the rank has not written it yet; "
            "request the record from the rank again, or use another copy",
            True,
        ),
        (
            NCCL.read_bytes()[:87],
            "the file is cut off after 87 bytes; request the record from the rank again, or use another copy",
            True,
        ),
        (
            as_json(loaded(NCCL))[:87],
            "the file is cut off after 87 bytes; request the record from the rank again, or use another copy",
            True,
        ),
        (b"\x7fELF and so on", "the file is not a flight record in pickle or JSON format", False),
        (
            pickle.dumps({"version": "2.10", "entries": [pickle.Pickler]}, 2),
            "byte 48 of the file is the pickle instruction GLOBAL, which runs code; "
            "flight records never contain this instruction; "
            "do not open the file with other tools; find out which user owns it on its node",
            False,
        ),
    ],
    ids=["empty", "cut", "cut JSON", "another format", "hostile"],
)
def test_an_unusable_file_is_reported_and_another_file_of_its_rank_is_used(
    tmp_path: Path, data: bytes, why: str, incomplete: bool
) -> None:
    bad = tmp_path / "nccl_trace_rank_3"
    bad.write_bytes(data)
    assert read_flight_records(tmp_path)[0] == ()
    tmp_path.joinpath("rank-00003.recorder.json").write_bytes(as_json(loaded(NCCL)))
    (record,), (unread,) = read_flight_records(tmp_path)
    assert record.source.endswith(".recorder.json")
    assert (unread.source, unread.rank, unread.why, unread.incomplete) == (str(bad), 3, why, incomplete)


def test_a_record_without_a_rank_in_its_name_is_reported(tmp_path: Path) -> None:
    shutil.copy(NCCL, tmp_path / "dump")
    _, (unread,) = read_flight_records(tmp_path)
    assert unread.why == "the file name contains no rank: rename the file, for example to nccl_trace_rank_3"


def test_a_file_over_the_size_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAX_FILE_BYTES", 5000)
    shutil.copy(NCCL, tmp_path / "dump_3")
    _, (unread,) = read_flight_records(tmp_path)
    assert unread.why == "the file has 7,233 bytes, more than the limit of 5,000"


def test_fifos_devices_and_broken_links_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nccl_trace_rank_1")
    os.mkfifo(tmp_path / "nccl_trace_rank_1.pipe")
    tmp_path.joinpath("nccl_trace_rank_2").symlink_to("nccl_trace_rank_2")
    tmp_path.joinpath("nccl_trace_rank_3").mkdir()
    tmp_path.joinpath("nccl_trace_rank_4").symlink_to("/dev/zero")
    tmp_path.joinpath("nccl_trace_rank_5").symlink_to("gone")
    tmp_path.joinpath("notes").symlink_to("notes")
    tmp_path.joinpath("below").symlink_to(tmp_path)
    records, unread = read_flight_records(tmp_path)
    assert records == ()
    assert {each.rank: each.why for each in unread} == {
        1: "this is not a regular file",
        2: "the file cannot be read: Too many levels of symbolic links",
        4: "this is not a regular file",
        5: "the file cannot be read: No such file or directory",
    }


def test_a_file_without_read_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(NCCL, tmp_path / "nccl_trace_rank_3")
    shutil.copy(NCCL, tmp_path / "other")
    if os.geteuid() == 0:  # root may read any file

        def refuse(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("wattwatch.watcher.diagnosis.flight_recorder.loader.os.open", refuse)
    else:
        for file in tmp_path.iterdir():
            file.chmod(0)
    records, (unread,) = read_flight_records(tmp_path)
    assert records == ()
    assert (unread.rank, unread.why) == (3, "the file cannot be read: Permission denied")


def test_a_hostile_file_costs_only_the_record_of_its_rank(tmp_path: Path) -> None:
    shutil.copytree(DATA / "nccl_gpu_error_1st", tmp_path, dirs_exist_ok=True)
    tmp_path.joinpath("_dump_7").write_bytes(b"\x80\x02cposix\nsystem\n.")
    tmp_path.joinpath("_dump_8").write_bytes(b"\x80\x02" + b"]" * 1000)
    records, unread = read_flight_records(tmp_path)
    assert [record.rank for record in records] == [*range(7), *range(9, 16)]
    assert [(each.rank, each.incomplete) for each in unread] == [(7, False), (8, True)]


def test_other_json_of_a_capture_is_skipped(tmp_path: Path) -> None:
    for name in ("manifest.json", "seen.json", "diagnosis.json", "node-01.ras-1.json"):
        tmp_path.joinpath(name).write_text(json.dumps({"v": 1, "version": "2", "entries": []}))
    assert read_flight_records(tmp_path) == ((), ())


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def test_both_recorders_of_a_rank_become_one_record(tmp_path: Path) -> None:
    """Rank 3 is in a Gloo barrier on the CPU; the others are in an all_reduce on their GPUs."""
    for rank in range(4):
        gpu_dump, cpu_dump = loaded(NCCL), loaded(GLOO)
        if rank == 3:
            gpu_dump["entries"].pop()
            gpu_dump["pg_status"]["0"]["last_enqueued_collective"] -= 1
        else:
            cpu_dump["entries"].pop()
            cpu_dump["pg_status"]["0"]["last_enqueued_collective"] -= 1
        (tmp_path / f"rank-{rank:05d}.recorder.json").write_bytes(as_json(gpu_dump))
        (tmp_path / f"rank-{rank:05d}.recorder-cpu.json").write_bytes(as_json(cpu_dump))
    records, unread = read_flight_records(tmp_path)
    assert not unread
    assert [record.rank for record in records] == [0, 1, 2, 3]
    assert [str(part.group) for part in records[3].groups] == ["default_pg", "default_pg on the host"]
    reading = analyze_collectives(records)
    assert reading.verdict is DiagnosisVerdict.DESYNC
    assert reading.culprits == (3,)
