"""Which files of a directory are evidence, and reading them safely.

The directory may come from anywhere: only regular files are opened, and their number and size are bounded. What a file
is, is decided from its name if we gave it, else from its first bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

from wattwatch.watcher.common.formatting import single_line
from wattwatch.watcher.diagnosis.flight_recorder.loader import is_record_name

# What a file is

HEAD_BYTES: Final = 64 * 1024  # read of every file to classify it


class EvidenceKind(StrEnum):
    RECORD = "record"  # flight record
    STACKS = "stacks"
    RAS = "ras"
    PROCESSES = "processes"
    EXIT_REPORT = "ending"
    LOG = "log"
    OTHER = "other"


# Names in a capture directory.
MANIFEST_NAME: Final = "manifest.json"
LIVE_EVIDENCE_NAME: Final = "seen.json"  # holds a `LiveEvidence`
DIAGNOSIS_NAME: Final = "diagnosis.json"
REPORT_NAME: Final = "report.html"
CAPTURE_FILE_NAMES: Final = (
    (re.compile(r"rank-\d+\.recorder(\.json|\.pickle)?"), EvidenceKind.RECORD),
    (re.compile(r"rank-\d+\.stacks\.txt"), EvidenceKind.STACKS),
    (re.compile(r"node-.+\.processes\.json"), EvidenceKind.PROCESSES),
    (re.compile(r"node-.+\.ras-\d+\.(json|txt)"), EvidenceKind.RAS),
    (re.compile(r"rank-\d+\.ending\.json"), EvidenceKind.EXIT_REPORT),
    (re.compile(r"rank-\d+\.log\.txt"), EvidenceKind.LOG),
)
# Flight records in the run directory of wattwatch-train.
RUN_FILE_NAME: Final = re.compile(r"(rank|nccl|recorder)-\d+(\.json)?")
NOT_EVIDENCE: Final = frozenset(
    {MANIFEST_NAME, LIVE_EVIDENCE_NAME, DIAGNOSIS_NAME, REPORT_NAME, "run.json", "gate.json"}
)
NOT_EVIDENCE_SUFFIXES: Final = (".md", ".html", ".py", ".toml", ".yaml", ".yml", ".ras.json", ".safetensors", ".sock")


def classify_file(name: str, head: bytes) -> EvidenceKind:
    for pattern, kind in CAPTURE_FILE_NAMES:
        if pattern.fullmatch(name):
            return kind
    if name in NOT_EVIDENCE or name.endswith(NOT_EVIDENCE_SUFFIXES):
        return EvidenceKind.OTHER
    if head.startswith(b"\x80"):
        return EvidenceKind.RECORD
    found = _classify_text(head.decode("utf-8", "replace").lstrip("\ufeff \r\n\t"))
    # By its name a record, but empty, cut off or something else. It must be reported: its rank may be the culprit.
    if found is EvidenceKind.OTHER and (is_record_name(name) or (not head and RUN_FILE_NAME.fullmatch(name))):
        return EvidenceKind.RECORD
    return found


def _classify_text(text: str) -> EvidenceKind:
    if text.startswith("{"):
        if '"communicators' in text or '"PEER_' in text:  # a report, or output of the RAS monitor
            return EvidenceKind.RAS
        if any(key in text for key in ('"entries"', '"pg_config"', '"pg_status"')):
            return EvidenceKind.RECORD
        return EvidenceKind.OTHER
    if "(most recent call first):" in text or re.search(r"^Thread \w+ \((active|idle)", text, re.MULTILINE):
        return EvidenceKind.STACKS
    if text.startswith("[") and '"frames"' in text and '"thread_id"' in text:
        return EvidenceKind.STACKS
    if re.search(r"^\[[\d :-]{19}\] PEER_\w+: ", text, re.MULTILINE):
        return EvidenceKind.RAS
    if "SERVER PROTOCOL" in text or ("NCCL version" in text and re.search("Job summary|Communicators", text)):
        return EvidenceKind.RAS
    return EvidenceKind.OTHER


# The files of a directory

MAX_FILES: Final = 100_000
MAX_DEPTH: Final = 3
MAX_FILE_BYTES: Final = 64 * 1024 * 1024
ATTEMPT_DIRECTORY: Final = re.compile(r"attempt-(\d{1,9})")
# Of a run directory. Checkpoints can be large; heartbeats and logs are read by evidence.py.
SKIPPED_RUN_DIRECTORIES: Final = frozenset({"checkpoints", "worker", "heartbeat", "logs"})


@dataclass(frozen=True, slots=True)
class ListedFile:
    path: Path
    name: str  # relative to the directory, for messages
    kind: EvidenceKind


@dataclass(frozen=True, slots=True)
class EvidenceListing:
    files: tuple[ListedFile, ...]  # sorted by name
    missing: tuple[str, ...]


def list_evidence_files(directory: Path) -> EvidenceListing:
    """Of several attempt-NN directories only the newest is listed. Raises OSError if `directory` cannot be listed."""
    found: list[ListedFile] = []
    missing: list[str] = []
    os.listdir(directory)  # os.walk ignores a directory that it may not read
    for path in _walk(directory, missing):
        if len(found) == MAX_FILES:
            missing.append(f"{directory}: only the first {MAX_FILES:,} files were read")
            break
        name = _display_name(path, directory)
        try:
            head = read_regular_file(path, HEAD_BYTES, whole=False)
        except OSError as error:
            missing.append(f"{name}: cannot be read: {error.strerror or error}")
            continue
        if head is None and is_record_name(path.name):
            missing.append(f"{name}: not opened, because this is {_describe_file_type(path)}, not a flight record")
        if head is not None:
            found.append(ListedFile(path, name, classify_file(path.name, head)))
    return EvidenceListing(tuple(found), tuple(missing))


def _walk(directory: Path, missing: list[str]) -> Iterator[Path]:
    for at, directories, names in os.walk(directory):
        here = Path(at)
        for name in sorted(directories):
            if is_record_name(name) and ((here / name).is_symlink() or not _has_entries(here / name)):
                shown = _display_name(here / name, directory)
                missing.append(f"{shown}: this is {_describe_file_type(here / name)}, not a flight record")
        attempts = {int(m[1]): name for name in directories if (m := ATTEMPT_DIRECTORY.fullmatch(name))}
        newest = attempts[max(attempts)] if attempts else None
        is_run = (here / "run.json").exists()
        directories[:] = sorted(
            name
            for name in directories
            if (ATTEMPT_DIRECTORY.fullmatch(name) is None or name == newest)
            and not (is_run and name in SKIPPED_RUN_DIRECTORIES)
        )
        if len(here.relative_to(directory).parts) >= MAX_DEPTH and directories:
            missing.append(f"{here.relative_to(directory)}: the directories in it were not read")
            directories.clear()
        yield from (here / name for name in sorted(names))


def _display_name(path: Path, directory: Path) -> str:
    return single_line(os.fsencode(path.relative_to(directory)).decode("utf-8", "replace"))


def _has_entries(directory: Path) -> bool:
    try:
        with os.scandir(directory) as inside:
            return next(inside, None) is not None
    except OSError:
        return False


def _describe_file_type(path: Path) -> str:
    link = "a link to " if path.is_symlink() else ""
    mode = path.stat().st_mode
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return link + next((words for fits, words in kinds if fits(mode)), "a device")


def read_regular_file(path: Path, most: int = MAX_FILE_BYTES, whole: bool = True) -> bytes | None:
    """At most `most` bytes; None if it is not a regular file. Raises OSError, also if the file is larger and `whole`.

    torch keeps FIFOs beside its dumps, and opening one could block forever.
    """
    file = _open_regular(path)
    if file is None:
        return None
    with file:
        data = file.read(most + 1)
    if len(data) > most and whole:
        raise OSError(27, f"larger than {most:,} bytes")
    return data[:most]


def read_json_object(path: Path, missing: list[str], most: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """The JSON object in the file; {} if there is no file, or if it is unusable, which is noted in `missing`."""
    if not path.exists():
        return {}
    try:
        data = json.loads(read_regular_file(path, most) or b"null")
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path.name}: cannot be read: {error}")
        return {}
    if not isinstance(data, dict):
        missing.append(f"{path.name}: not a JSON object")
        return {}
    return data


def read_file_tail(path: Path, most: int) -> bytes | None:
    """At most the last `most` bytes; None if it is not a regular file. Raises OSError."""
    file = _open_regular(path)
    if file is None:
        return None
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def _open_regular(path: Path) -> BinaryIO | None:
    # Checked before and after opening: opening a device can have effects, and the path may be replaced in between.
    if not stat.S_ISREG(path.stat().st_mode):
        return None
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None
