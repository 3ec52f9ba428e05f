"""Real flight records with a known culprit: it is named and no healthy rank is, whatever is lost, in any order.

gloo_*: recorded from four ranks with torch 2.13; nc_*: the same records as NCCL would write them; nccl_*: sixteen ranks
of a Megatron job in which a fault was injected into two (NVIDIA/nvidia-resiliency-ext, Apache-2.0).
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

SETS = Path(__file__).parents[3] / "data" / "flight_recorder"
CULPRITS = {
    "gloo_213_barrier_r3": {3},
    "gloo_213_early_r3": {3},
    "gloo_213_fsdp_r1": {1},
    "gloo_213_missing_r2": {2},
    "nc_early_r3": {3},
    "nc_missing_r2": {2},
}
# Records that omit the decisive part, so that at most a tie can be reported.
UNDECIDABLE = {
    "gloo_213_batch_r1": {1},
    "gloo_213_exit_r3": {3},
    "gloo_213_mesh_r3": {3},
    "gloo_213_skip_r2": {2},
    "gloo_213_two_r2_r3": {2, 3},
}
INJECTED = ("nccl_gpu_error_1st", "nccl_lock_gil_1st")
EVERY_SET = sorted([*CULPRITS, *INJECTED])


def true_culprits(name: str) -> set[int]:
    if name in CULPRITS:
        return CULPRITS[name]
    found = re.search(r"Fault ranks: (\[.*\])", (SETS / name / "fault_injection.log").read_text())
    assert found is not None
    return set(json.loads(found[1]))


def records_of(name: str) -> tuple[RankRecord, ...]:
    records, _ = read_flight_records(SETS / name)
    return records


def analyze_directory(directory: Path) -> CollectiveAnalysis:
    return analyze_collectives(*read_flight_records(directory))


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix != ".log")


def rank_of(path: Path) -> int:
    return int(re.findall(r"\d+", path.stem)[-1])


@pytest.mark.parametrize("name", EVERY_SET)
def test_the_culprits_are_named(name: str) -> None:
    analysis = analyze_collectives(records_of(name))
    assert set(analysis.culprits) == true_culprits(name), analysis.why
    assert analysis.confidence >= 0.8


@pytest.mark.parametrize("name", EVERY_SET)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_order_of_files_changes_the_answer(name: str, data: st.DataObject) -> None:
    files = files_of(SETS / name)
    mixed, _ = read_flight_records(data.draw(st.permutations(files)))
    assert analyze_collectives(mixed) == analyze_collectives(records_of(name))


@pytest.mark.parametrize("name", EVERY_SET)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_with_the_files_of_one_rank_damaged(name: str, damage: str, tmp_path: Path) -> None:
    """All files of one rank are damaged. If it is a culprit, the other records cannot always tell it from a healthy
    rank whose file was lost: then it is only reported to have left no flight record."""
    culprits = true_culprits(name)
    for rank in sorted({rank_of(path) for path in files_of(SETS / name)}):
        directory = tmp_path / f"without-{rank}"
        shutil.copytree(SETS / name, directory)
        for path in files_of(directory):
            if rank_of(path) == rank:
                _damage(path, damage)
        analysis = analyze_directory(directory)
        assert set(analysis.culprits) <= culprits, f"without rank {rank}: {analysis.why}"
        assert set(analysis.culprits) >= culprits - {rank}, f"without rank {rank}: {analysis.why}"
        if rank in culprits - set(analysis.culprits):
            assert f"rank {rank} left no flight record" in analysis.why


@pytest.mark.parametrize("name", sorted(UNDECIDABLE))
def test_no_healthy_rank_is_named_if_the_records_cannot_decide(name: str) -> None:
    records = records_of(name)
    for kept in (records, *([r for r in records if r.rank != missing.rank] for missing in records)):
        analysis = analyze_collectives(kept)
        present = {record.rank for record in kept}
        assert set(analysis.culprits) <= UNDECIDABLE[name], analysis.why
        assert not analysis.tied or any(UNDECIDABLE[name] & present & set(side) for side in analysis.tied), analysis.why
        if UNDECIDABLE[name] - present:
            assert analysis.verdict is not DiagnosisVerdict.NO_DESYNC or max(UNDECIDABLE[name]) > max(present), (
                analysis.why
            )


def test_ranks_in_unrecorded_sends_are_not_mistaken_for_silent() -> None:
    analysis = analyze_collectives(records_of("gloo_213_batch_r1"))
    assert analysis.verdict is DiagnosisVerdict.UNKNOWN
    assert (
        "ranks 3-5 wait in all_reduce at sequence number 4 of default_pg; ranks 0-2 are not waiting in any recorded"
        in analysis.why
    )


def test_operations_that_end_because_a_peer_is_gone_are_not_finished() -> None:
    analysis = analyze_collectives(records_of("gloo_213_exit_r3"))
    assert analysis.culprits == ()
    assert "rank 3 left no flight record" in analysis.why


def _damage(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:87])
    else:
        path.write_bytes(b"")


def test_different_collectives_at_one_slot_are_conclusive() -> None:
    analysis = analyze_collectives(records_of("gloo_213_barrier_r3"))
    assert analysis.verdict is DiagnosisVerdict.DESYNC
    assert analysis.conclusive
    assert analysis.why == "at sequence number 7 of default_pg, ranks 0-2 are in all_gather, rank 3 is in barrier"
    members = {member.rank: member for member in analysis.groups[0].members}
    assert all(members[rank].state is MemberState.WAITING for rank in range(4))
    assert members[3].operation is not None
    assert members[3].operation.name == "barrier"
    assert members[3].frame is not None


def test_a_rank_that_did_not_finish_what_others_finished() -> None:
    """No other analyzer names rank 14 here: its host kept launching, but completions of its GPU were never seen."""
    analysis = analyze_collectives(records_of("nccl_gpu_error_1st"))
    assert analysis.verdict is DiagnosisVerdict.NEVER_ARRIVED
    assert not analysis.conclusive
    assert "rank 14 did not finish" in analysis.why


def test_no_records_at_all() -> None:
    analysis = analyze_collectives([])
    assert analysis.verdict is DiagnosisVerdict.UNKNOWN
    assert analysis.why == "no flight record could be read"


@pytest.mark.parametrize("launched", [1, 3, 6])
def test_a_rank_that_joins_the_stuck_operation_and_launches_little_after_it(launched: int) -> None:
    """The real job of nccl_lock_gil_1st, changed as if ranks 9 and 14 had joined the operation that all ranks are in,
    like their peers 8 and 12, and had launched `launched` operations in total, as a host does whose GPU has died."""
    records = {record.rank: record for record in records_of("nccl_lock_gil_1st")}
    for rank, peer in ((9, 8), (14, 12)):
        records[rank] = joined_as(records[rank], records[peer], launched)
    analysis = analyze_collectives(list(records.values()))
    assert analysis.verdict is DiagnosisVerdict.NEVER_ARRIVED
    assert analysis.culprits == (9, 14), analysis.why
    for missing in records:
        analysis = analyze_collectives([record for rank, record in records.items() if rank != missing])
        assert set(analysis.culprits) <= {9, 14}, f"without rank {missing}: {analysis.why}"


def joined_as(record: RankRecord, peer: RankRecord, launched: int) -> RankRecord:
    """The record with the first pending launches of its peer in the groups that both are in."""
    last = sorted(launch.record_id for part in peer.groups for launch in part.launches)[launched - 1]
    of_peer = {part.group: part.launches for part in peer.groups}
    parts = []
    for part in record.groups:
        launches = tuple(launch for launch in of_peer.get(part.group, ()) if launch.record_id <= last)
        enqueued = max([part.last_enqueued or 0, *(launch.slot for launch in launches)])
        parts.append(replace(part, launches=launches, last_enqueued=enqueued))
    return replace(record, groups=tuple(parts))
