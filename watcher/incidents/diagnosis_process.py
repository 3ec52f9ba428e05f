"""Concludes in a process of its own, and a polite one: the records of a thousand ranks take a minute of a core.

In the daemon's own process they would hold its interpreter's lock and its memory, and with them the engine.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import NoEvidenceError, load_evidence
from wattwatch.watcher.diagnosis.model import Diagnosis, Evidence

TIMEOUT_SECONDS: Final = 900.0
NICENESS: Final = 10
NO_EVIDENCE_EXIT_CODE: Final = 3  # exit code: there is no evidence
IMPORT_ROOT: Final = Path(__file__).parents[3]  # holds the package `wattwatch`
START: Final = "import sys; sys.path.append(sys.argv.pop()); from wattwatch.watcher.incidents.diagnosis_process import main; main()"


class DiagnosisError(Exception):
    """Why there is no diagnosis, as a sentence."""


class DiagnosisProcesses:
    """`conclude` may be called by several threads; `stop` ends what is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def conclude(self, directory: Path) -> tuple[Evidence, Diagnosis]:
        """What lies in the directory, less the records themselves, and what follows from it. Raises CannotConclude."""
        command = [sys.executable, "-c", START, str(directory), str(IMPORT_ROOT)]
        pipe = subprocess.PIPE
        with self._lock:
            if self._stopped:
                raise DiagnosisError("the watcher is ending")
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
            self._running.add(child)
        try:
            answer, complaint = child.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise DiagnosisError(f"reading {directory} took longer than {TIMEOUT_SECONDS:.0f} s") from None
        finally:
            self._end(child)
        if child.returncode != 0:
            said = complaint.decode("utf-8", "replace").strip().splitlines()
            words = said[-1] if said else f"its process ended with {child.returncode}"
            raise DiagnosisError(
                words if child.returncode == NO_EVIDENCE_EXIT_CODE else f"reading {directory} failed: {words}"
            )
        evidence, diagnosis = pickle.loads(answer)  # of our own process
        return evidence, diagnosis

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for child in running:
            child.kill()

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            child.kill()
            child.wait()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        with self._lock:
            self._running.discard(child)


def main() -> None:
    """The process: a directory as its argument, the pickled answer on its output."""
    os.nice(NICENESS)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no part of the answer
    try:
        evidence = load_evidence(Path(sys.argv[1]))
    except NoEvidenceError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_EVIDENCE_EXIT_CODE)
    # An episode may stay open for days: the records of a thousand ranks are not kept that long.
    with output:
        pickle.dump((replace(evidence, records=()), diagnose(evidence)), output)
