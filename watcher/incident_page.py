"""The page of an incident, from the job as the watcher saw it and what the capture gave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from watcher.diagnose.directory.file_kinds import DIAGNOSIS, MANIFEST, REPORT
from watcher.diagnose.report.page import EvidenceFile, Incident, incident_report
from watcher.inquiry import Result
from watcher.snapshot import EpisodeView, JobView

NO_EVIDENCE: Final = frozenset({MANIFEST, REPORT, DIAGNOSIS})


def page_of(view: JobView, episode: EpisodeView, result: Result) -> str:
    """HTML. Raises ValueError where there is no diagnosis to show."""
    if result.diagnosis is None:
        raise ValueError("there is no diagnosis")
    return incident_report(
        Incident(
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
            files=files_of(result.directory),
            directory=str(result.directory),
            gpu_hours_lost=episode.gpu_hours_lost,
            kilowatt_hours_lost=episode.kilowatt_hours_lost,
        )
    )


def files_of(directory: Path) -> tuple[EvidenceFile, ...]:
    """As the capture has listed them; what it has not, is read for its digest. Files that go meanwhile are left out."""
    listed = manifest_files(directory)
    found = []
    for path in sorted(directory.iterdir()):
        if path.name in NO_EVIDENCE or path.name.startswith(".") or not path.is_file():
            continue
        told = listed.get(path.name, {})
        about = [str(told[key]) for key in ("node", "source") if told.get(key)]
        try:
            size, digest = path.stat().st_size, told.get("sha256") or hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
        found.append(EvidenceFile(path.name, size, str(digest), ", ".join(about)))
    return tuple(found)


def manifest_files(directory: Path) -> dict[str, dict[str, Any]]:
    try:
        files = json.loads((directory / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return (
        {str(name): told for name, told in files.items() if isinstance(told, dict)} if isinstance(files, dict) else {}
    )
