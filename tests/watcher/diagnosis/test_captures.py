"""Captures of real jobs that hung: the diagnosis from all evidence, compared with the truth."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.watcher.diagnosis.hung_jobs.runner import KINDS, Kind
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence
from wattwatch.watcher.diagnosis.model import (
    Diagnosis,
    DiagnosisVerdict,
    Evidence,
    HangCause,
    LiveEvidence,
    RankReadings,
)

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
HANG = {name: kind for name, kind in KINDS.items() if not kind.dies}
# Without heartbeats an early end looks like any other collective.
CAUSE_WITHOUT_MORE = {"early_end": HangCause.PROGRAM, "waits_for_data": HangCause.DATA}


def named(diagnosis: Diagnosis) -> tuple[int, ...]:
    return tuple(culprit.rank for culprit in diagnosis.culprits)


@pytest.mark.parametrize(("name", "kind"), HANG.items(), ids=list(HANG))
def test_the_culprit_is_named(name: str, kind: Kind) -> None:
    found = diagnose(load_evidence(CAPTURES / name))
    assert named(found) == kind.culprits, found.why
    if kind.culprits:
        assert found.verdict is kind.verdict
        assert found.cause is CAUSE_WITHOUT_MORE.get(name, kind.cause)
        assert found.conclusive is (kind.verdict is DiagnosisVerdict.DESYNC)
        assert found.culprits[0].node == "node-01"


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in HANG.items() if kind.culprits])
def test_an_idle_gpu_raises_the_confidence(name: str, kind: Kind) -> None:
    evidence = load_evidence(CAPTURES / name)
    ranks = tuple(
        RankReadings(rank, "node-01", rank, *((190.0, 0.0) if rank in kind.culprits else (230.0, 100.0)))
        for rank in range(4)
    )
    live = LiveEvidence("job", 0.0, "hung", "one_low_rest_busy", 100, ranks, kind.culprits)
    alone, together = diagnose(evidence), diagnose(replace(evidence, live=live))
    assert named(together) == kind.culprits
    assert together.confidence >= alone.confidence


def test_an_early_end_is_caused_by_the_data_once_a_heartbeat_shows_the_phase() -> None:
    ranks = tuple(RankReadings(rank, "node-01", phase="save" if rank == 3 else "train") for rank in range(4))
    live = LiveEvidence("job", 0.0, "hung", "unknown", 3, ranks)
    found = diagnose(replace(load_evidence(CAPTURES / "early_end"), live=live))
    assert (named(found), found.cause) == ((3,), HangCause.DATA)


def test_a_job_that_has_died_is_diagnosed_from_its_logs() -> None:
    found = diagnose(load_evidence(CAPTURES / "size_mismatch"))
    assert (named(found), found.verdict, found.cause) == ((2,), DiagnosisVerdict.MISMATCH, HangCause.PROGRAM)
    assert "32 vs 8" in found.summary
    assert "ranks 0-1, 3 all launched all_reduce of [64] Float" in found.why
    silent = diagnose(replace(load_evidence(CAPTURES / "size_mismatch"), logs=()))
    assert named(silent) == ()
    assert not silent.no_hang
    assert "4 of 4 processes: ranks 0-3 are gone" in silent.summary


def test_the_log_of_a_rank_that_raised_gives_the_reason() -> None:
    found = diagnose(load_evidence(CAPTURES / "raised"))
    assert "it raised ValueError: shard 7 holds no tokens, at read_shard" in found.summary
    assert found.logs[0].lines[-1] == "ValueError: shard 7 holds no tokens"
    assert "the log of rank 2, in the code or in the data" in found.advice


@pytest.mark.parametrize(("name", "kind"), HANG.items(), ids=list(HANG))
def test_with_any_kind_of_evidence_missing_no_innocent_rank_is_named(name: str, kind: Kind) -> None:
    whole = load_evidence(CAPTURES / name)
    parts: list[dict[str, object]] = [{"records": ()}, {"stacks": ()}, {"processes": ()}]
    for number in range(len(parts) + 1):
        for chosen in combinations(parts, number):
            changes = {key: value for part in chosen for key, value in part.items()}
            found = diagnose(replace(whole, **changes))  # type: ignore[arg-type]
            assert set(named(found)) <= set(kind.culprits), (sorted(changes), found.why)


@pytest.mark.parametrize(("name", "kind"), HANG.items(), ids=list(HANG))
def test_with_the_files_of_any_one_rank_lost_no_innocent_rank_gets_high_confidence(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    for lost in range(4):
        directory = tmp_path / str(lost)
        shutil.copytree(CAPTURES / name, directory)
        for path in directory.glob(f"rank-{lost:05d}.*"):
            path.unlink()
        found = diagnose(load_evidence(directory))
        wrong = set(named(found)) - set(kind.culprits)
        assert not wrong or found.confidence < 0.75, (lost, found)


def test_no_evidence_names_nobody() -> None:
    assert named(diagnose(Evidence())) == ()
