"""Diagnosing in a child process: the same result, errors as sentences, and nothing left when the watcher ends."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.tools import DEADLINE_SECONDS
from tests.watcher.diagnosis.sample_incidents import incident
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence
from wattwatch.watcher.incidents import diagnosis_process
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisError, DiagnosisProcesses


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    (tmp_path / "seen.json").write_bytes(orjson.dumps(incident().live))
    return tmp_path


def test_the_result_is_the_same_as_in_this_process(capture: Path) -> None:
    evidence, diagnosis = DiagnosisProcesses().diagnose(capture)
    assert evidence == load_evidence(capture)
    assert diagnosis == diagnose(evidence)
    assert [culprit.rank for culprit in diagnosis.culprits] == [3]


def test_a_directory_without_evidence_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DiagnosisError, match=str(tmp_path)):
        DiagnosisProcesses().diagnose(tmp_path)
    with pytest.raises(DiagnosisError, match=r"not a directory|No such file"):
        DiagnosisProcesses().diagnose(tmp_path / "seen.json")


def test_a_failure_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_process, "START", "raise ValueError('a slot of no group')")
    with pytest.raises(DiagnosisError, match="failed: ValueError: a slot of no group"):
        DiagnosisProcesses().diagnose(tmp_path)


def test_a_diagnosis_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_process, "START", "import time; time.sleep(6000)")
    monkeypatch.setattr(diagnosis_process, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(DiagnosisError, match="took longer"):
        DiagnosisProcesses().diagnose(tmp_path)


def test_the_child_ends_with_the_watcher_and_none_is_started_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis_process, "START", "import time; time.sleep(6000)")
    processes = DiagnosisProcesses()
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(DiagnosisError) as error:
            processes.diagnose(tmp_path)
        errors.append(str(error.value))

    thread = threading.Thread(target=ask)
    thread.start()
    pause = threading.Event()
    while not processes._running and thread.is_alive():
        pause.wait(0.01)
    processes.stop()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert "the diagnosis process exited with code -9" in errors[0]
    with pytest.raises(DiagnosisError, match="is shutting down"):
        processes.diagnose(tmp_path)


def test_a_diagnosis_can_be_ended_although_the_watcher_blocks_the_signal(
    capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_terminate(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        child = start(*arguments, **settings)
        child.terminate()  # pending until the child unblocks it
        return child

    monkeypatch.setattr(subprocess, "Popen", start_and_terminate)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        with pytest.raises(DiagnosisError, match="exited with code -15"):
            DiagnosisProcesses().diagnose(capture)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_modules_in_the_working_directory_or_on_pythonpath_do_not_replace_ours(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    for name in ("wattwatch", "watcher", "trainer", "collectors"):
        (planted / f"{name}.py").write_text("raise SystemExit('a planted module was imported')\n")
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PYTHONPATH", str(planted))
    _, diagnosis = DiagnosisProcesses().diagnose(capture)
    assert [culprit.rank for culprit in diagnosis.culprits] == [3]
