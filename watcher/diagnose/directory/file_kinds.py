"""What a file of a capture, of a run or of an unknown directory is, from its name and its first bytes. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from watcher.diagnose.flight.files import is_named_like_one

HEAD_BYTES: Final = 64 * 1024  # of a file: enough to see what it is


class FileKind(StrEnum):
    RECORD = "record"  # of a flight recorder
    STACKS = "stacks"
    RAS = "ras"
    PROCESSES = "processes"
    ENDING = "ending"
    LOG = "log"
    OTHER = "other"


# Names that this project gives, here and in a run directory.
MANIFEST: Final = "manifest.json"  # of a capture
SEEN: Final = "seen.json"  # what the watcher saw from outside, `Seen`
DIAGNOSIS: Final = "diagnosis.json"
REPORT: Final = "report.html"
OUR_NAMES: Final = (
    (re.compile(r"rank-\d+\.recorder(\.json|\.pickle)?"), FileKind.RECORD),
    (re.compile(r"rank-\d+\.stacks\.txt"), FileKind.STACKS),
    (re.compile(r"node-.+\.processes\.json"), FileKind.PROCESSES),
    (re.compile(r"node-.+\.ras-\d+\.(json|txt)"), FileKind.RAS),
    (re.compile(r"rank-\d+\.ending\.json"), FileKind.ENDING),
    (re.compile(r"rank-\d+\.log\.txt"), FileKind.LOG),
)
OF_A_RUN: Final = re.compile(r"(rank|nccl|recorder)-\d+(\.json)?")
NOT_EVIDENCE: Final = frozenset({MANIFEST, SEEN, DIAGNOSIS, REPORT, "run.json", "gate.json"})
NOT_EVIDENCE_ENDINGS: Final = (".md", ".html", ".py", ".toml", ".yaml", ".yml", ".ras.json", ".safetensors", ".sock")


def kind_of(name: str, head: bytes) -> FileKind:
    for pattern, kind in OUR_NAMES:
        if pattern.fullmatch(name):
            return kind
    if name in NOT_EVIDENCE or name.endswith(NOT_EVIDENCE_ENDINGS):
        return FileKind.OTHER
    if head.startswith(b"\x80"):
        return FileKind.RECORD
    found = _kind_of_text(head.decode("utf-8", "replace").lstrip("\ufeff \r\n\t"))
    # Empty, torn or foreign: worth a word, as the rank that is missing may be the one.
    if found is FileKind.OTHER and (is_named_like_one(name) or (not head and OF_A_RUN.fullmatch(name))):
        return FileKind.RECORD
    return found


def _kind_of_text(text: str) -> FileKind:
    if text.startswith("{"):
        if '"communicators' in text or '"PEER_' in text:  # a report, or what its monitor printed
            return FileKind.RAS
        if any(key in text for key in ('"entries"', '"pg_config"', '"pg_status"')):
            return FileKind.RECORD
        return FileKind.OTHER
    if "(most recent call first):" in text or re.search(r"^Thread \w+ \((active|idle)", text, re.MULTILINE):
        return FileKind.STACKS
    if text.startswith("[") and '"frames"' in text and '"thread_id"' in text:
        return FileKind.STACKS
    if re.search(r"^\[[\d :-]{19}\] PEER_\w+: ", text, re.MULTILINE):
        return FileKind.RAS
    if "SERVER PROTOCOL" in text or ("NCCL version" in text and re.search("Job summary|Communicators", text)):
        return FileKind.RAS
    return FileKind.OTHER
