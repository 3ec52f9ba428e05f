"""Concluding in another process: the same answer, errors as sentences, and nothing left when the watcher ends."""

from __future__ import annotations

import threading
from pathlib import Path

import orjson
import pytest

from tests.watcher.diagnosis.sample_incidents import incident
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence
from wattwatch.watcher.incidents import diagnosis_process as concluding
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisError, DiagnosisProcesses

DEADLINE_SECONDS = 30.0


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    (tmp_path / "seen.json").write_bytes(orjson.dumps(incident().seen))
    return tmp_path


def test_it_is_what_this_process_would_conclude(capture: Path) -> None:
    evidence, diagnosis = DiagnosisProcesses().conclude(capture)
    assert evidence == load_evidence(capture)
    assert diagnosis == diagnose(evidence)
    assert [culprit.rank for culprit in diagnosis.culprits] == [3]


def test_a_directory_without_evidence_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DiagnosisError, match=str(tmp_path)):
        DiagnosisProcesses().conclude(tmp_path)
    with pytest.raises(DiagnosisError, match=r"not a directory|No such file"):
        DiagnosisProcesses().conclude(tmp_path / "seen.json")


def test_what_fails_in_it_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concluding, "START", "raise ValueError('a slot of no group')")
    with pytest.raises(DiagnosisError, match="failed: ValueError: a slot of no group"):
        DiagnosisProcesses().conclude(tmp_path)


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concluding, "START", "import time; time.sleep(600)")
    monkeypatch.setattr(concluding, "LONGEST_SECONDS", 0.2)
    with pytest.raises(DiagnosisError, match="took longer"):
        DiagnosisProcesses().conclude(tmp_path)


def test_its_process_ends_with_the_watcher_and_none_is_begun_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concluding, "START", "import time; time.sleep(600)")
    works = DiagnosisProcesses()
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(DiagnosisError) as error:
            works.conclude(tmp_path)
        said.append(str(error.value))

    thread = threading.Thread(target=ask)
    thread.start()
    pause = threading.Event()
    while not works._running and thread.is_alive():
        pause.wait(0.01)
    works.stop()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert "its process ended with -9" in said[0]
    with pytest.raises(DiagnosisError, match="is ending"):
        works.conclude(tmp_path)
