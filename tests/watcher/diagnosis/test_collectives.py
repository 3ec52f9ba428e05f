"""Real flight records with a known culprit: named, and no healthy rank, whatever is lost and however it is ordered.

gloo_*: recorded from four ranks with torch 2.13; nc_*: the same written as NCCL would; nccl_*: sixteen ranks of a
Megatron job in which a fault was injected into two (NVIDIA/nvidia-resiliency-ext, Apache-2.0).
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.flight_recorder.loader import read_flight_records
from wattwatch.watcher.diagnosis.flight_recorder.model import RankRecord
from wattwatch.watcher.diagnosis.model import CollectiveAnalysis, DiagnosisVerdict, MemberState

SETS = Path(__file__).parents[2] / "data" / "flight_recorder"
CULPRITS = {
    "gloo_213_barrier_r3": {3},
    "gloo_213_early_r3": {3},
    "gloo_213_fsdp_r1": {1},
    "gloo_213_missing_r2": {2},
    "nc_early_r3": {3},
    "nc_missing_r2": {2},
}
# Records that leave out what would tell, so that nobody, or one of a tie, is all that can be said.
DOUBTFUL = {
    "gloo_213_batch_r1": {1},
    "gloo_213_exit_r3": {3},
    "gloo_213_mesh_r3": {3},
    "gloo_213_skip_r2": {2},
    "gloo_213_two_r2_r3": {2, 3},
}
INJECTED = ("nccl_gpu_error_1st", "nccl_lock_gil_1st")
EVERY_SET = sorted([*CULPRITS, *INJECTED])


def culprits_of(name: str) -> set[int]:
    if name in CULPRITS:
        return CULPRITS[name]
    told = re.search(r"Fault ranks: (\[.*\])", (SETS / name / "fault_injection.log").read_text())
    assert told is not None
    return set(json.loads(told[1]))


def records_of(name: str) -> tuple[RankRecord, ...]:
    records, _ = read_flight_records(SETS / name)
    return records


def reading_of(directory: Path) -> CollectiveAnalysis:
    return analyze_collectives(*read_flight_records(directory))


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix != ".log")


def rank_of(path: Path) -> int:
    return int(re.findall(r"\d+", path.stem)[-1])


@pytest.mark.parametrize("name", EVERY_SET)
def test_the_culprits_are_named(name: str) -> None:
    reading = analyze_collectives(records_of(name))
    assert set(reading.culprits) == culprits_of(name), reading.why
    assert reading.confidence >= 0.8


@pytest.mark.parametrize("name", EVERY_SET)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_order_of_files_changes_the_answer(name: str, data: st.DataObject) -> None:
    files = files_of(SETS / name)
    mixed, _ = read_flight_records(data.draw(st.permutations(files)))
    assert analyze_collectives(mixed) == analyze_collectives(records_of(name))


@pytest.mark.parametrize("name", EVERY_SET)
@pytest.mark.parametrize("harm", ["missing", "truncated", "empty"])
def test_one_file_less(name: str, harm: str, tmp_path: Path) -> None:
    """All forms of one rank are harmed. Where it is a culprit's, the others cannot always tell it from a healthy rank
    whose file was lost: then it is said to have left no record, and is named as a culprit only by all that wait."""
    truth = culprits_of(name)
    for rank in sorted({rank_of(path) for path in files_of(SETS / name)}):
        directory = tmp_path / f"without-{rank}"
        shutil.copytree(SETS / name, directory)
        for path in files_of(directory):
            if rank_of(path) == rank:
                _harm(path, harm)
        reading = reading_of(directory)
        assert set(reading.culprits) <= truth, f"without rank {rank}: {reading.why}"
        assert set(reading.culprits) >= truth - {rank}, f"without rank {rank}: {reading.why}"
        if rank in truth - set(reading.culprits):
            assert f"rank {rank} left no record" in reading.why


@pytest.mark.parametrize("name", sorted(DOUBTFUL))
def test_where_records_do_not_tell_no_healthy_rank_is_named(name: str) -> None:
    records = records_of(name)
    for kept in (records, *([r for r in records if r.rank != missing.rank] for missing in records)):
        reading = analyze_collectives(kept)
        present = {record.rank for record in kept}
        assert set(reading.culprits) <= DOUBTFUL[name], reading.why
        assert not reading.tied or any(DOUBTFUL[name] & present & set(side) for side in reading.tied), reading.why
        if DOUBTFUL[name] - present:
            assert reading.verdict is not DiagnosisVerdict.NO_DESYNC or max(DOUBTFUL[name]) > max(present), reading.why


def test_ranks_in_sends_that_are_not_written_down_are_not_taken_for_silent() -> None:
    reading = analyze_collectives(records_of("gloo_213_batch_r1"))
    assert reading.verdict is DiagnosisVerdict.UNKNOWN
    assert "ranks 3-5 wait in all_reduce at slot 4 of default_pg; nothing on record shows ranks 0-2" in reading.why


def test_operations_that_end_because_a_peer_is_gone_are_not_finished() -> None:
    reading = analyze_collectives(records_of("gloo_213_exit_r3"))
    assert reading.culprits == ()
    assert "rank 3 left no record" in reading.why


def _harm(path: Path, harm: str) -> None:
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:87])
    else:
        path.write_bytes(b"")


def test_different_collectives_at_one_slot_are_conclusive() -> None:
    reading = analyze_collectives(records_of("gloo_213_barrier_r3"))
    assert reading.verdict is DiagnosisVerdict.DESYNC
    assert reading.conclusive
    assert reading.why == "slot 7 of default_pg: ranks 0-2 in all_gather, rank 3 in barrier"
    members = {member.rank: member for member in reading.groups[0].members}
    assert all(members[rank].place is MemberState.WAITING for rank in range(4))
    assert members[3].operation is not None
    assert members[3].operation.name == "barrier"
    assert members[3].frame is not None


def test_who_did_not_finish_what_others_finished() -> None:
    """No other analyser names rank 14 here: its host went on launching, its board's completions were never seen."""
    reading = analyze_collectives(records_of("nccl_gpu_error_1st"))
    assert reading.verdict is DiagnosisVerdict.NEVER_ARRIVED
    assert not reading.conclusive
    assert "rank 14 did not finish" in reading.why


def test_nothing_at_all() -> None:
    reading = analyze_collectives([])
    assert reading.verdict is DiagnosisVerdict.UNKNOWN
    assert reading.why == "no flight record could be read"


@pytest.mark.parametrize("launched", [1, 3, 6])
def test_who_joins_what_never_ends_and_launches_little_after_it(launched: int) -> None:
    """The real job of nccl_lock_gil_1st, as if ranks 9 and 14 had joined the operation that all are in, like their
    peers 8 and 12, and gone on with `launched` operations in all: as hosts do whose GPU has died."""
    records = {record.rank: record for record in records_of("nccl_lock_gil_1st")}
    for rank, peer in ((9, 8), (14, 12)):
        records[rank] = joined_as(records[rank], records[peer], launched)
    reading = analyze_collectives(list(records.values()))
    assert reading.verdict is DiagnosisVerdict.NEVER_ARRIVED
    assert reading.culprits == (9, 14), reading.why
    for missing in records:
        reading = analyze_collectives([record for rank, record in records.items() if rank != missing])
        assert set(reading.culprits) <= {9, 14}, f"without rank {missing}: {reading.why}"


def joined_as(record: RankRecord, peer: RankRecord, launched: int) -> RankRecord:
    """The record with the first open launches of its peer in the groups that both are in."""
    last = sorted(launch.record for part in peer.groups for launch in part.launches)[launched - 1]
    of_peer = {part.group: part.launches for part in peer.groups}
    parts = []
    for part in record.groups:
        launches = tuple(launch for launch in of_peer.get(part.group, ()) if launch.record <= last)
        enqueued = max([part.last_enqueued or 0, *(launch.slot for launch in launches)])
        parts.append(replace(part, launches=launches, last_enqueued=enqueued))
    return replace(record, groups=tuple(parts))
