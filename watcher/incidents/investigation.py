"""One look into a hung job, from the question to the page: capture, conclusion, report. Runs in a thread of its own.

What it asks and how it concludes is given to it; what it adds is that a failure of one part costs only that part. A
capture that fails leaves what the watcher has seen from outside; a page that cannot be drawn leaves the diagnosis.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import gmtime, strftime
from typing import Any, Final, Protocol

import orjson

from wattwatch.watcher.diagnosis.loading.directory import DIAGNOSIS_NAME, LIVE_EVIDENCE_NAME, MANIFEST_NAME, REPORT_NAME
from wattwatch.watcher.diagnosis.model import Diagnosis, Evidence, LiveEvidence
from wattwatch.watcher.diagnosis.report.page import EvidenceFile, IncidentReport, render_incident_report
from wattwatch.watcher.diagnosis.serialization import diagnosis_document
from wattwatch.watcher.engine.snapshot import EpisodeView, JobView
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisError
from wattwatch.watcher.incidents.recorder import MAX_RECORDINGS

CAPTURE_SUFFIX: Final = ".capture"
MAX_CAPTURE_BYTES: Final = 2 << 30  # of all captures; a thousand ranks give some 450 MB

log = logging.getLogger("wattwatch.diagnosing")


class CaptureFunction(Protocol):
    """Asks the job's nodes for what gives a hang away, and leaves the answers as files in the directory."""

    def __call__(self, view: JobView, directory: Path) -> None: ...


class DiagnoseFunction(Protocol):
    """Reads a capture directory and weighs what is in it. Raises CannotConclude."""

    def __call__(self, directory: Path) -> tuple[Evidence, Diagnosis]: ...


class ReportFunction(Protocol):
    """The page of the incident, as HTML."""

    def __call__(self, view: JobView, episode: EpisodeView, result: InvestigationResult) -> str: ...


@dataclass(frozen=True, slots=True)
class InvestigationResult:
    """What one inquiry gave. Exactly one of `diagnosis` and `trouble` says something."""

    directory: Path
    seen: LiveEvidence
    ended_wall_seconds: float
    evidence: Evidence | None = None
    diagnosis: Diagnosis | None = None
    trouble: str = ""
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class Investigator:
    """How a job is looked into. Shared by all threads; holds nothing of any job."""

    capture: CaptureFunction
    conclude: DiagnoseFunction
    report: ReportFunction
    wall: Callable[[], float]

    def run(self, episode: EpisodeView, view: JobView, seen: LiveEvidence, directory: Path) -> InvestigationResult:
        """Never raises: whatever fails is said in the result, and in the log."""
        try:
            return self._look_into(episode, view, seen, directory)
        except Exception as error:
            log.error("a diagnosis of %s failed", view.name, exc_info=error)
            words = f"an error inside the watcher ({type(error).__name__}: {str(error)[:200]}); its log has the rest"
            return InvestigationResult(directory, seen, self.wall(), trouble=words)

    def _look_into(
        self, episode: EpisodeView, view: JobView, seen: LiveEvidence, directory: Path
    ) -> InvestigationResult:
        failure = ""
        try:
            prune_captures(directory.parent)
            directory.mkdir(mode=0o700, parents=True)
            (directory / LIVE_EVIDENCE_NAME).write_bytes(orjson.dumps(seen))
        except OSError as error:
            words = f"{directory} cannot be written: {error.strerror or error}"
            return InvestigationResult(directory, seen, self.wall(), trouble=words)
        try:
            self.capture(view, directory)
        except Exception as error:
            log.error("the capture of %s failed", view.name, exc_info=error)
            failure = f"the capture failed ({type(error).__name__}: {str(error)[:200]})"
        try:
            evidence, diagnosis = self.conclude(directory)
        except DiagnosisError as error:
            return InvestigationResult(
                directory, seen, self.wall(), trouble=f"{failure}; {error}" if failure else str(error)
            )
        if failure:
            diagnosis = replace(diagnosis, missing=(*diagnosis.missing, failure))
        with contextlib.suppress(OSError):  # a full disk: it is told all the same
            text = orjson.dumps(diagnosis_document(diagnosis), option=orjson.OPT_INDENT_2)
            (directory / DIAGNOSIS_NAME).write_bytes(text + b"\n")
        result = InvestigationResult(directory, seen, self.wall(), evidence, diagnosis)
        return replace(result, report=self.write_report(view, episode, result))

    def write_report(self, view: JobView, episode: EpisodeView, result: InvestigationResult) -> Path | None:
        """None where it cannot be drawn or written; the log says why."""
        path = result.directory / REPORT_NAME
        try:
            path.write_bytes(self.report(view, episode, result).encode("utf-8", "replace"))
        except Exception as error:
            log.error("the report of %s cannot be written", view.name, exc_info=error)
            return None
        return path


def capture_directory_name(job: str, alert: str, wall: float, number: int) -> str:
    """Sorts by time, beside the recording of the incident."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job)[:60] or "job"
    return (
        f"{strftime('%Y%m%dT%H%M%SZ', gmtime(wall))}-{name}-{alert}{f'-{number + 1}' if number else ''}{CAPTURE_SUFFIX}"
    )


def prune_captures(directory: Path, kept: int = MAX_RECORDINGS, kept_bytes: int = MAX_CAPTURE_BYTES) -> None:
    """Makes room for one more; the newest stay."""
    left = kept_bytes
    for place, capture in enumerate(sorted(directory.glob(f"*{CAPTURE_SUFFIX}"), reverse=True), 1):
        left -= sum(file.stat().st_size for file in capture.iterdir() if file.is_file()) if left > 0 else 0
        if place >= kept or left <= 0:
            shutil.rmtree(capture, ignore_errors=True)


# The page of an incident, from the job as the watcher saw it and what the capture gave.

NOT_LISTED_AS_EVIDENCE: Final = frozenset({MANIFEST_NAME, REPORT_NAME, DIAGNOSIS_NAME})


def render_report(view: JobView, episode: EpisodeView, result: InvestigationResult) -> str:
    """HTML. Raises ValueError where there is no diagnosis to show."""
    if result.diagnosis is None:
        raise ValueError("there is no diagnosis")
    return render_incident_report(
        IncidentReport(
            job=view.name,
            diagnosis=result.diagnosis,
            seen=result.seen,
            alert=episode.alert,
            summary=episode.summary,
            facts=episode.evidence,
            opened_wall_seconds=episode.opened_wall_seconds,
            closed_wall_seconds=episode.closed_wall_seconds,
            diagnosed_wall_seconds=result.ended_wall_seconds,
            timeline=view.timeline,
            stacks=() if result.evidence is None else result.evidence.stacks,
            files=list_evidence_with_digests(result.directory),
            directory=str(result.directory),
            gpu_hours_lost=episode.gpu_hours_lost,
            kilowatt_hours_lost=episode.kilowatt_hours_lost,
        )
    )


def list_evidence_with_digests(directory: Path) -> tuple[EvidenceFile, ...]:
    """As the capture has listed them; what it has not, is read for its digest. Files that go meanwhile are left out."""
    listed = files_in_manifest(directory)
    found = []
    for path in sorted(directory.iterdir()):
        if path.name in NOT_LISTED_AS_EVIDENCE or path.name.startswith(".") or not path.is_file():
            continue
        told = listed.get(path.name, {})
        about = [str(told[key]) for key in ("node", "source") if told.get(key)]
        try:
            size, digest = path.stat().st_size, told.get("sha256") or hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
        found.append(EvidenceFile(path.name, size, str(digest), ", ".join(about)))
    return tuple(found)


def files_in_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    try:
        files = json.loads((directory / MANIFEST_NAME).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return (
        {str(name): told for name, told in files.items() if isinstance(told, dict)} if isinstance(files, dict) else {}
    )
