"""Runs a diagnosis in a child process of low priority.

Reading the flight records of a thousand ranks takes a minute of a CPU core and hundreds of megabytes. In the daemon's
own process that would hold the interpreter's lock, and the engine would miss its ticks.
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
from wattwatch.watcher.diagnosis.flight_recorder.sandbox import UNBLOCK_SIGNALS
from wattwatch.watcher.diagnosis.loading.evidence import NoEvidenceError, load_evidence
from wattwatch.watcher.diagnosis.model import Diagnosis, Evidence

TIMEOUT_SECONDS: Final = 900.0  # fifteen times what a thousand ranks take; chosen
NICENESS: Final = 10
NO_EVIDENCE_EXIT_CODE: Final = 3
IMPORT_ROOT: Final = Path(__file__).parents[3]  # the directory that holds the package `wattwatch`
# -P keeps the working directory off sys.path, but PYTHONPATH still comes before site-packages. Our directory comes
# first while `wattwatch` is imported, so that no other package of that name can replace it. Then it is removed again:
# site-packages must not hide the standard library.
START: Final = (
    f"{UNBLOCK_SIGNALS}import sys; sys.path.insert(0, sys.argv.pop()); import wattwatch; del sys.path[0]; "
    "from wattwatch.watcher.incidents.diagnosis_process import main; main()"
)


class DiagnosisError(Exception):
    """There is no diagnosis; the text says why, in a sentence."""


class DiagnosisProcesses:
    """Starts one child process for each diagnosis. `diagnose` may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def diagnose(self, directory: Path) -> tuple[Evidence, Diagnosis]:
        """The evidence in the directory without its flight records, and the diagnosis. Raises DiagnosisError."""
        command = [sys.executable, "-P", "-c", START, str(directory), str(IMPORT_ROOT)]
        pipe = subprocess.PIPE
        with self._lock:
            if self._stopped:
                raise DiagnosisError("the watcher is shutting down")
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
            self._running.add(child)
        try:
            output, errors = child.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise DiagnosisError(f"reading {directory} took longer than {TIMEOUT_SECONDS:.0f} s") from None
        finally:
            self._end(child)
        if child.returncode != 0:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            reason = lines[-1] if lines else f"the diagnosis process exited with code {child.returncode}"
            no_evidence = child.returncode == NO_EVIDENCE_EXIT_CODE
            raise DiagnosisError(reason if no_evidence else f"reading {directory} failed: {reason}")
        evidence, diagnosis = pickle.loads(output)  # written by our own code, never by a node
        return evidence, diagnosis

    def stop(self) -> None:
        """Ends all running diagnoses; their callers get a DiagnosisError."""
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
    """The child process. Argument: the directory. Output: the pickled evidence and diagnosis."""
    os.nice(NICENESS)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not corrupt the output
    try:
        evidence = load_evidence(Path(sys.argv[1]))
    except NoEvidenceError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_EVIDENCE_EXIT_CODE)
    # The watcher keeps the evidence while the episode is open, which may be days: without the records it is small.
    with output:
        pickle.dump((replace(evidence, records=()), diagnose(evidence)), output)
