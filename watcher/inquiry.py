"""One look into a hung job, from the question to the page: capture, conclusion, report. Runs in a thread of its own.

What it asks and how it concludes is given to it; what it adds is that a failure of one part costs only that part. A
capture that fails leaves what the watcher has seen from outside; a page that cannot be drawn leaves the diagnosis.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import gmtime, strftime
from typing import Final, Protocol

import orjson

from watcher.concluding import CannotConclude
from watcher.diagnose.diagnosis import Diagnosis
from watcher.diagnose.directory.file_kinds import DIAGNOSIS, REPORT, SEEN
from watcher.diagnose.document import document_of
from watcher.diagnose.evidence import Evidence, Seen
from watcher.incidents import KEPT
from watcher.snapshot import EpisodeView, JobView

SUFFIX: Final = ".capture"
KEPT_BYTES: Final = 2 << 30  # of all captures; a thousand ranks give some 450 MB

log = logging.getLogger("wattwatch.diagnosing")


class Capturing(Protocol):
    """Asks the job's nodes for what gives a hang away, and leaves the answers as files in the directory."""

    def __call__(self, view: JobView, directory: Path) -> None: ...


class Concludes(Protocol):
    """Reads a capture directory and weighs what is in it. Raises CannotConclude."""

    def __call__(self, directory: Path) -> tuple[Evidence, Diagnosis]: ...


class Reporting(Protocol):
    """The page of the incident, as HTML."""

    def __call__(self, view: JobView, episode: EpisodeView, result: Result) -> str: ...


@dataclass(frozen=True, slots=True)
class Result:
    """What one inquiry gave. Exactly one of `diagnosis` and `trouble` says something."""

    directory: Path
    seen: Seen
    ended_wall_seconds: float
    evidence: Evidence | None = None
    diagnosis: Diagnosis | None = None
    trouble: str = ""
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class Inquiry:
    """How a job is looked into. Shared by all threads; holds nothing of any job."""

    capture: Capturing
    conclude: Concludes
    report: Reporting
    wall: Callable[[], float]

    def run(self, episode: EpisodeView, view: JobView, seen: Seen, directory: Path) -> Result:
        """Never raises: whatever fails is said in the result, and in the log."""
        try:
            return self._look_into(episode, view, seen, directory)
        except Exception as error:
            log.error("a diagnosis of %s failed", view.name, exc_info=error)
            words = f"an error inside the watcher ({type(error).__name__}: {str(error)[:200]}); its log has the rest"
            return Result(directory, seen, self.wall(), trouble=words)

    def _look_into(self, episode: EpisodeView, view: JobView, seen: Seen, directory: Path) -> Result:
        failure = ""
        try:
            prune(directory.parent)
            directory.mkdir(mode=0o700, parents=True)
            (directory / SEEN).write_bytes(orjson.dumps(seen))
        except OSError as error:
            words = f"{directory} cannot be written: {error.strerror or error}"
            return Result(directory, seen, self.wall(), trouble=words)
        try:
            self.capture(view, directory)
        except Exception as error:
            log.error("the capture of %s failed", view.name, exc_info=error)
            failure = f"the capture failed ({type(error).__name__}: {str(error)[:200]})"
        try:
            evidence, diagnosis = self.conclude(directory)
        except CannotConclude as error:
            return Result(directory, seen, self.wall(), trouble=f"{failure}; {error}" if failure else str(error))
        if failure:
            diagnosis = replace(diagnosis, missing=(*diagnosis.missing, failure))
        with contextlib.suppress(OSError):  # a full disk: it is told all the same
            text = orjson.dumps(document_of(diagnosis), option=orjson.OPT_INDENT_2)
            (directory / DIAGNOSIS).write_bytes(text + b"\n")
        result = Result(directory, seen, self.wall(), evidence, diagnosis)
        return replace(result, report=self.write_report(view, episode, result))

    def write_report(self, view: JobView, episode: EpisodeView, result: Result) -> Path | None:
        """None where it cannot be drawn or written; the log says why."""
        path = result.directory / REPORT
        try:
            path.write_bytes(self.report(view, episode, result).encode("utf-8", "replace"))
        except Exception as error:
            log.error("the report of %s cannot be written", view.name, exc_info=error)
            return None
        return path


def directory_name(job: str, alert: str, wall: float, number: int) -> str:
    """Sorts by time, beside the recording of the incident."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job)[:60] or "job"
    return f"{strftime('%Y%m%dT%H%M%SZ', gmtime(wall))}-{name}-{alert}{f'-{number + 1}' if number else ''}{SUFFIX}"


def prune(directory: Path, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
    """Makes room for one more; the newest stay."""
    left = kept_bytes
    for place, capture in enumerate(sorted(directory.glob(f"*{SUFFIX}"), reverse=True), 1):
        left -= sum(file.stat().st_size for file in capture.iterdir() if file.is_file()) if left > 0 else 0
        if place >= kept or left <= 0:
            shutil.rmtree(capture, ignore_errors=True)
