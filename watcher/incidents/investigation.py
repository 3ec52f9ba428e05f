"""One investigation of a hung job: capture, diagnosis, report. Runs in a thread of its own.

A failure of one part costs only that part: without a capture, what the watcher knows from outside is still diagnosed;
without a report, the diagnosis is still published.
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
from typing import Any, Final

import orjson

from wattwatch.watcher.diagnosis.loading.directory import (
    DIAGNOSIS_NAME,
    LIVE_EVIDENCE_NAME,
    MANIFEST_NAME,
    REPORT_NAME,
)
from wattwatch.watcher.diagnosis.model import Diagnosis, Evidence, LiveEvidence
from wattwatch.watcher.diagnosis.report.page import EvidenceFile, IncidentReport, render_incident_report
from wattwatch.watcher.diagnosis.serialization import diagnosis_document
from wattwatch.watcher.engine.snapshot import EpisodeView, JobView
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisError
from wattwatch.watcher.incidents.recorder import MAX_RECORDINGS

CAPTURE_SUFFIX: Final = ".capture"
MAX_CAPTURE_BYTES: Final = 2 << 30  # of all captures together; a capture of a thousand ranks takes about 450 MB
NOT_LISTED_AS_EVIDENCE: Final = frozenset({MANIFEST_NAME, REPORT_NAME, DIAGNOSIS_NAME})

log = logging.getLogger("wattwatch.incidents")


@dataclass(frozen=True, slots=True)
class InvestigationResult:
    """Either `diagnosis` is set, or `trouble` says in a sentence why there is none."""

    directory: Path
    live: LiveEvidence
    ended_wall_seconds: float
    evidence: Evidence | None = None
    diagnosis: Diagnosis | None = None
    trouble: str = ""
    report: Path | None = None


CaptureFunction = Callable[[JobView, Path], None]
"""Collects evidence from the nodes of the job into the directory."""
DiagnoseFunction = Callable[[Path], tuple[Evidence, Diagnosis]]
"""Diagnoses the capture in the directory; raises DiagnosisError."""
ReportFunction = Callable[[JobView, EpisodeView, InvestigationResult], str]
"""Renders the incident report as HTML."""


@dataclass(frozen=True, slots=True)
class Investigator:
    """How to investigate a job. Holds no state of any job, so all threads share one."""

    capture: CaptureFunction
    diagnose: DiagnoseFunction
    report: ReportFunction
    wall: Callable[[], float]  # Unix time

    def run(self, episode: EpisodeView, view: JobView, live: LiveEvidence, directory: Path) -> InvestigationResult:
        """Never raises: whatever fails is in the result and in the log."""
        try:
            return self._investigate(episode, view, live, directory)
        # Without a result, the investigation would count as running forever.
        except Exception as error:
            log.error("the diagnosis of job %s failed", view.name, exc_info=error)
            words = f"internal error ({type(error).__name__}: {str(error)[:200]}); see the watcher's log"
            return InvestigationResult(directory, live, self.wall(), trouble=words)

    def _investigate(
        self, episode: EpisodeView, view: JobView, live: LiveEvidence, directory: Path
    ) -> InvestigationResult:
        failure = ""
        try:
            # Before the capture, so that it finds room on the disk.
            prune_captures(directory.parent)
            directory.mkdir(mode=0o700, parents=True)
            (directory / LIVE_EVIDENCE_NAME).write_bytes(orjson.dumps(live))
        except OSError as error:
            words = f"{directory} cannot be written: {error.strerror or error}"
            return InvestigationResult(directory, live, self.wall(), trouble=words)
        try:
            self.capture(view, directory)
        except Exception as error:
            log.error("the capture of job %s failed", view.name, exc_info=error)
            failure = f"the capture failed ({type(error).__name__}: {str(error)[:200]})"
        try:
            evidence, diagnosis = self.diagnose(directory)
        except DiagnosisError as error:
            words = f"{failure}; {error}" if failure else str(error)
            return InvestigationResult(directory, live, self.wall(), trouble=words)
        # The diagnosis may be wrong for lack of evidence: say so beside it.
        if failure:
            diagnosis = replace(diagnosis, missing=(*diagnosis.missing, failure))
        with contextlib.suppress(OSError):  # a full disk must not keep the diagnosis from the alert
            text = orjson.dumps(diagnosis_document(diagnosis), option=orjson.OPT_INDENT_2)
            (directory / DIAGNOSIS_NAME).write_bytes(text + b"\n")
        result = InvestigationResult(directory, live, self.wall(), evidence, diagnosis)
        return replace(result, report=self.write_report(view, episode, result))

    def write_report(self, view: JobView, episode: EpisodeView, result: InvestigationResult) -> Path | None:
        """The path of the report; None if it cannot be rendered or written (the log says why)."""
        path = result.directory / REPORT_NAME
        try:
            path.write_bytes(self.report(view, episode, result).encode("utf-8", "replace"))
        except Exception as error:
            log.error("the incident report of job %s cannot be written", view.name, exc_info=error)
            return None
        return path


# Directories of captures


def capture_directory_name(job: str, alert: str, wall: float, number: int) -> str:
    """Begins with the time like the name of the incident's recording, so both sort together."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job)[:60] or "job"
    suffix = f"-{number + 1}" if number else ""
    return f"{strftime('%Y%m%dT%H%M%SZ', gmtime(wall))}-{name}-{alert}{suffix}{CAPTURE_SUFFIX}"


def prune_captures(directory: Path, kept: int = MAX_RECORDINGS, kept_bytes: int = MAX_CAPTURE_BYTES) -> None:
    """Removes the oldest captures to make room for one more within both limits."""
    left = kept_bytes
    for place, capture in enumerate(sorted(directory.glob(f"*{CAPTURE_SUFFIX}"), reverse=True), 1):
        # Sizes are only needed until the limit is reached; a large capture has thousands of files.
        left -= sum(file.stat().st_size for file in capture.iterdir() if file.is_file()) if left > 0 else 0
        if place >= kept or left <= 0:
            shutil.rmtree(capture, ignore_errors=True)


# The report


def render_report(view: JobView, episode: EpisodeView, result: InvestigationResult) -> str:
    """The incident report as HTML. Raises ValueError if the result has no diagnosis."""
    if result.diagnosis is None:
        raise ValueError("there is no diagnosis")
    return render_incident_report(
        IncidentReport(
            job=view.name,
            diagnosis=result.diagnosis,
            live=result.live,
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
    """Digests come from the capture's manifest; files that it does not list are hashed here. Files that disappear in
    the meantime are left out."""
    listed = files_in_manifest(directory)
    found = []
    for path in sorted(directory.iterdir()):
        if path.name in NOT_LISTED_AS_EVIDENCE or path.name.startswith(".") or not path.is_file():
            continue
        entry = listed.get(path.name, {})
        about = [str(entry[key]) for key in ("node", "source") if entry.get(key)]
        try:
            size, digest = path.stat().st_size, entry.get("sha256") or hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
        found.append(EvidenceFile(path.name, size, str(digest), ", ".join(about)))
    return tuple(found)


def files_in_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """By file name; empty without a usable manifest."""
    try:
        files = json.loads((directory / MANIFEST_NAME).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(files, dict):
        return {}
    return {str(name): entry for name, entry in files.items() if isinstance(entry, dict)}
