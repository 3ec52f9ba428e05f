"""wattwatch watches multi-node GPU training from outside the job.

The public API, for notebooks and scripts; everything else may change without notice:

>>> import wattwatch
>>> wattwatch.triage(pasted_nvidia_smi_output)  # a list of Verdict
>>> wattwatch.diagnose("/captures/2026-08-20")  # a Diagnosis
>>> wattwatch.read_recording("incident.wattwatch.gz")  # a Recording

The implementation is imported on first use, so that `import wattwatch` takes no time.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from wattwatch.watcher.detection.model import Verdict
    from wattwatch.watcher.diagnosis.loading.evidence import NoEvidenceError
    from wattwatch.watcher.diagnosis.model import Diagnosis
    from wattwatch.watcher.recordings.format import Recording, RecordingError
    from wattwatch.watcher.recordings.inputs import InputError

__all__ = [
    "Diagnosis",
    "InputError",
    "NoEvidenceError",
    "Recording",
    "RecordingError",
    "Verdict",
    "diagnose",
    "read_recording",
    "triage",
]

_TYPES = {
    "Diagnosis": "wattwatch.watcher.diagnosis.model",
    "InputError": "wattwatch.watcher.recordings.inputs",
    "NoEvidenceError": "wattwatch.watcher.diagnosis.loading.evidence",
    "Recording": "wattwatch.watcher.recordings.format",
    "RecordingError": "wattwatch.watcher.recordings.format",
    "Verdict": "wattwatch.watcher.detection.model",
}


def triage(
    text_or_path: str | os.PathLike[str],
    *,
    progress: Literal["advancing", "stalled"] | None = None,
    board: str | None = None,
) -> list[Verdict]:
    """One verdict for each job in some GPU readings, as `wattwatch triage` gives it.

    `text_or_path` is the readings themselves (what nvidia-smi prints, a log of it, JSON samples) or the path of a file
    with them, or of a recording. A string is a path if a file of that name exists. `progress` is what you know about
    the steps of the job, `board` the GPU model ("B300") for readings that do not name it. Raises InputError or
    RecordingError if the input cannot be read, ValueError for a model without a power profile. Readings that say
    nothing are no error: their verdict is "unknown".
    """
    from wattwatch.watcher.recordings.triage import triage_text_or_path

    return [result.verdict for result in triage_text_or_path(text_or_path, progress, board)]


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Which rank blocks a hung job, from a directory with flight-recorder dumps, stacks or NCCL RAS reports.

    Dumps from strangers are safe: no code in them is executed. Raises NoEvidenceError if the directory has nothing to
    evaluate.
    """
    from wattwatch.watcher.diagnosis.diagnose import diagnose as diagnose_evidence
    from wattwatch.watcher.diagnosis.loading.evidence import load_evidence

    return diagnose_evidence(load_evidence(Path(path)))


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Opens a recording: its jobs, and an iterator over its samples and link states. Raises RecordingError."""
    from wattwatch.watcher.recordings.format import open_recording

    return open_recording(Path(path))


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        return getattr(importlib.import_module(_TYPES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
