"""Loading directories: captures, run directories, and files that somebody copied together."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.watcher.diagnosis.hung_job_evidence import live
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import NoEvidenceError, load_evidence
from wattwatch.watcher.diagnosis.model import DiagnosisVerdict, HangCause

DATA = Path(__file__).parents[2] / "data"
PAIR = DATA / "worker_server"
RECORDS = DATA / "flight_recorder"


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A capture of two hung ranks: rank 1 never launched the operation that rank 0 waits in."""
    for rank in (0, 1):
        shutil.copy(PAIR / f"rank{rank}_fr_trace_json.json", tmp_path / f"rank-{rank:05d}.recorder.json")
        shutil.copy(PAIR / f"rank{rank}_dump_traceback.txt", tmp_path / f"rank-{rank:05d}.stacks.txt")
    write(tmp_path / "manifest.json", {"v": 1, "node_of_rank": {"0": "node-01", "1": "node-02"}, "missing": ["no RAS"]})
    write(
        tmp_path / "node-node-02.processes.json",
        [{"rank": 1, "pid": 77, "state": "S", "wait_channel": "sk_wait_data", "cpu_percent": 0.0}],
    )
    write(tmp_path / "seen.json", asdict(live()))
    return tmp_path


def test_all_parts_of_a_capture(capture: Path) -> None:
    evidence = load_evidence(capture)
    assert [record.rank for record in evidence.records] == [0, 1]
    assert [each.rank for each in evidence.stacks] == [0, 1]
    assert [(each.rank, each.node, each.pid) for each in evidence.processes] == [(1, "node-02", 77)]
    assert evidence.live == live()
    assert evidence.node_of_rank == {0: "node-01", 1: "node-02"}
    assert evidence.missing == ("no RAS",)
    assert set(evidence.sources) >= {"rank-00000.recorder.json", "rank-00001.stacks.txt", "node-node-02.processes.json"}
    found = diagnose(evidence)
    assert [culprit.rank for culprit in found.culprits] == [1]
    assert found.verdict is DiagnosisVerdict.NEVER_ARRIVED


def test_worker_server_responses_saved_under_other_names_are_recognized() -> None:
    found = diagnose(load_evidence(PAIR))
    assert ([culprit.rank for culprit in found.culprits], found.cause) == ([1], HangCause.RANK)
    assert {testimony.source for testimony in found.signals} == {"flight recorder", "stacks"}


@pytest.mark.parametrize("part", ["manifest.json", "seen.json", "node-node-02.processes.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"ranks": 3}', '[{"pid": "x"}]', "[" * 100_000])
def test_a_broken_part_costs_no_more_than_itself(capture: Path, part: str, content: str) -> None:
    (capture / part).write_text(content)
    evidence = load_evidence(capture)
    assert [culprit.rank for culprit in diagnose(evidence).culprits] == [1]


def test_any_file_may_be_missing_and_no_other_rank_is_named(capture: Path) -> None:
    for path in sorted(capture.iterdir()):
        content = path.read_bytes()
        path.unlink()
        assert [culprit.rank for culprit in diagnose(load_evidence(capture)).culprits] in ([1], []), path
        path.write_bytes(content)


def test_of_a_run_the_newest_attempt_counts(tmp_path: Path) -> None:
    write(tmp_path / "run.json", {"run": "r1", "world": 4, "nodes": ["a", "b"], "attempt": 2})
    for attempt, scenario in ((1, "gloo_213_missing_r2"), (2, "gloo_213_barrier_r3")):
        for rank in range(4):
            target = tmp_path / "flight" / f"attempt-{attempt:02d}"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(RECORDS / scenario / f"fr_trace_{rank}", target / f"rank-{rank:05d}")
            shutil.copy(RECORDS / scenario / f"fr_trace_json_{rank}.json", target / f"recorder-{rank:05d}.json")
            ending = {"code": 5, "why": "collective timed out", "step": 9, "follows": True}
            write(tmp_path / "logs" / f"attempt-{attempt:02d}" / f"rank-{rank:05d}.ending.json", ending)
    write(
        tmp_path / "heartbeat" / "rank-00003.json", {"rank": 3, "host": "b", "restart": 1, "phase": "save", "step": 9}
    )
    write(
        tmp_path / "heartbeat" / "rank-00002.json", {"rank": 2, "host": "b", "restart": 0, "phase": "train", "step": 4}
    )
    for directory in (tmp_path, tmp_path / "flight", tmp_path / "flight" / "attempt-02"):
        evidence = load_evidence(directory)
        assert evidence.node_of_rank == {0: "a", 1: "a", 2: "b", 3: "b"}
        assert [(each.rank, each.step) for each in evidence.exit_reports] == [(rank, 9) for rank in range(4)]
        assert evidence.live is not None
        assert [each.rank for each in evidence.live.ranks] == [3], "the heartbeat of rank 2 is of the first attempt"
        found = diagnose(evidence)
        assert ([culprit.rank for culprit in found.culprits], found.conclusive) == ([3], True)
        assert found.culprits[0].node == "b"
    assert [c.rank for c in diagnose(load_evidence(tmp_path / "flight" / "attempt-01")).culprits] == [2]


def test_exit_reports_and_logs_are_read_from_a_capture_and_from_a_run_alike(tmp_path: Path) -> None:
    ending = {"code": 5, "why": "a collective failed, another rank has gone", "step": 9, "follows": True}
    raised = 'Traceback (most recent call last):\n  File "/srv/train.py", line 9, in step\nValueError: no tokens\n'
    capture, run = tmp_path / "capture", tmp_path / "run"
    write(capture / "rank-00000.ending.json", ending)
    write(capture / "rank-00002.log.txt", raised)
    manifest = {
        "node_of_rank": {str(rank): "b" for rank in range(4)},
        "files": {"rank-00002.log.txt": {"age_seconds": 7}},
    }
    write(capture / "manifest.json", manifest)
    write(run / "run.json", {"nodes": ["b"], "world": 4})
    write(run / "logs" / "attempt-01" / "rank-00002.log", "of an attempt before")
    write(run / "logs" / "attempt-02" / "rank-00000.ending.json", ending)
    write(run / "logs" / "attempt-02" / "rank-00002.log", raised)
    for directory in (capture, run):
        evidence = load_evidence(directory)
        assert [(each.rank, each.is_consequence) for each in evidence.exit_reports] == [(0, True)]
        assert [each.rank for each in evidence.logs] == [2]
        found = diagnose(evidence)
        assert ([culprit.rank for culprit in found.culprits], found.cause) == ([2], HangCause.PROGRAM)
        assert found.logs[0].lines[-1] == "ValueError: no tokens"
    assert load_evidence(capture).logs[0].age_seconds == 7.0


def test_directories_that_hold_different_ranks_are_one_set(tmp_path: Path) -> None:
    for rank in range(4):
        target = tmp_path / f"node-{rank // 2}"
        target.mkdir(exist_ok=True)
        shutil.copy(RECORDS / "gloo_213_barrier_r3" / f"fr_trace_{rank}", target / f"nccl_trace_rank_{rank}")
    assert [culprit.rank for culprit in diagnose(load_evidence(tmp_path)).culprits] == [3]


def test_two_sets_are_never_mixed(tmp_path: Path) -> None:
    for name in ("gloo_213_barrier_r3", "gloo_213_missing_r2"):
        shutil.copytree(RECORDS / name, tmp_path / name)
    with pytest.raises(
        NoEvidenceError, match="rank 0 has records in several directories: gloo_213_barrier_r3, gloo_213_missing_r2"
    ):
        load_evidence(tmp_path)


def test_ras_reports_saved_by_hand_are_recognized(tmp_path: Path) -> None:
    for poll in (1, 2):
        shutil.copy(DATA / "ras" / f"desync_crossed_counts_poll{poll}.json", tmp_path)
    evidence = load_evidence(tmp_path)
    assert [len(polls.reports) for polls in evidence.ras] == [2]
    found = diagnose(evidence)
    assert (found.verdict, found.conclusive) == (DiagnosisVerdict.DESYNC, False)
    assert len(found.culprits) == 1


def test_a_fifo_beside_the_dumps_is_not_opened(capture: Path) -> None:
    os.mkfifo(capture / "nccl_trace_rank_3.pipe")
    os.mkfifo(capture / "rank-00004.stacks.txt")
    assert len(load_evidence(capture).stacks) == 2


def test_a_cut_off_record_is_reported(capture: Path) -> None:
    (capture / "rank-00000.recorder.json").write_text('{"version": "2.10", "entries": [')
    evidence = load_evidence(capture)
    assert [(each.source, each.rank) for each in evidence.unreadable] == [("rank-00000.recorder.json", 0)]


def test_stacks_of_an_unknown_rank_are_reported(capture: Path) -> None:
    shutil.copy(PAIR / "rank0_dump_traceback.txt", capture / "stacks.txt")
    assert "stacks.txt: the file name contains no rank" in load_evidence(capture).missing[1]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "the directory is empty"),
        ({"a.md": "x", "b.log": "y"}, "none of the 2 files"),
        ({"stacks.txt": "Thread 1 (idle)"}, "rank"),
    ],
)
def test_a_directory_without_evidence_is_one_sentence(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(NoEvidenceError, match=words):
        load_evidence(tmp_path)


def test_a_path_that_is_not_a_directory_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "file", "x")
    with pytest.raises(NoEvidenceError, match="not a directory"):
        load_evidence(tmp_path / "file")
    with pytest.raises(NoEvidenceError, match="No such file"):
        load_evidence(tmp_path / "nothing")


def test_anything_but_a_file_in_place_of_a_record_is_reported_and_not_opened(tmp_path: Path) -> None:
    for rank in range(4):
        shutil.copy(RECORDS / "gloo_213_barrier_r3" / f"fr_trace_{rank}", tmp_path / f"trace_rank_{rank}")
    os.mkfifo(tmp_path / "trace_rank_4")
    (tmp_path / "trace_rank_5").mkdir()
    (tmp_path / "trace_rank_6").symlink_to("/dev/zero")
    (tmp_path / "trace_rank_7").symlink_to("/")
    (tmp_path / "rank_8_dumps").mkdir()
    (tmp_path / "rank_8_dumps" / "note").write_text("a directory that is not empty is searched")
    os.mkfifo(tmp_path / "_dump_3.pipe")
    found = load_evidence(tmp_path)
    assert [each for each in found.missing if ", not a flight record" in each] == [
        "trace_rank_5: this is a directory, not a flight record",
        "trace_rank_7: this is a link to a directory, not a flight record",
        "trace_rank_4: not opened, because this is a FIFO, not a flight record",
        "trace_rank_6: not opened, because this is a link to a device, not a flight record",
    ]
    assert len(found.records) == 4


def test_archives_are_reported_with_the_advice_to_unpack_them(tmp_path: Path) -> None:
    (tmp_path / "_dump_0.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(NoEvidenceError, match=r"_dump_0\.gz is an archive: unpack"):
        load_evidence(tmp_path)
