"""What a file of a capture, of a run or of an unknown directory is, from its name and its first bytes. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import PurePath
from typing import Final

HEAD_BYTES: Final = 64 * 1024  # of a file: enough to see what it is


class FileKind(StrEnum):
    RECORD = "record"  # of a flight recorder
    STACKS = "stacks"
    RAS = "ras"
    PROCESSES = "processes"
    ENDING = "ending"
    HEARTBEAT = "heartbeat"
    OTHER = "other"


# Names that this project gives.
OUR_NAMES: Final = (
    (re.compile(r"rank-\d+\.recorder(\.json|\.pickle)?"), FileKind.RECORD),
    (re.compile(r"rank-\d+\.stacks\.txt"), FileKind.STACKS),
    (re.compile(r"node-.+\.processes\.json"), FileKind.PROCESSES),
    (re.compile(r"node-.+\.ras-\d+\.(json|txt)"), FileKind.RAS),
    (re.compile(r"rank-\d+\.ending\.json"), FileKind.ENDING),
)
NOT_EVIDENCE: Final = frozenset(
    {"manifest.json", "seen.json", "diagnosis.json", "report.html", "run.json", "gate.json"}
)
NOT_EVIDENCE_ENDINGS: Final = (".md", ".html", ".py", ".toml", ".yaml", ".yml", ".ras.json", ".safetensors", ".sock")
# torch's prefixes are chosen by the user; these are the defaults and the common ones. A file of such a name that says
# nothing is an empty or torn record, which is worth a word.
RECORD_NAME: Final = re.compile(
    r"(^|[_.-])(trace|dump|recorder|flight|fr)([_.-]|$)|^(rank-|nccl-|_dump_)\d+$", re.IGNORECASE
)
RANK: Final = re.compile(r"(?:rank|^r)[-_.]?(\d{1,6})", re.IGNORECASE)
NUMBER: Final = re.compile(r"\d{1,6}")


def kind_of(name: str, head: bytes) -> FileKind:
    for pattern, kind in OUR_NAMES:
        if pattern.fullmatch(name):
            return kind
    if name in NOT_EVIDENCE or name.endswith(NOT_EVIDENCE_ENDINGS):
        return FileKind.OTHER
    if head.startswith(b"\x80"):
        return FileKind.RECORD
    found = _kind_of_text(head.decode("utf-8", "replace").lstrip("\ufeff \r\n\t"))
    if found is FileKind.OTHER and RECORD_NAME.search(name) and not name.endswith((".log", ".txt")):
        return FileKind.RECORD
    return found


def _kind_of_text(text: str) -> FileKind:
    if text.startswith("{"):
        if '"communicators' in text:
            return FileKind.RAS
        if any(key in text for key in ('"entries"', '"pg_config"', '"pg_status"')):
            return FileKind.RECORD
        return FileKind.OTHER
    if "(most recent call first):" in text or re.search(r"^Thread \w+ \((active|idle)", text, re.MULTILINE):
        return FileKind.STACKS
    if text.startswith("[") and '"frames"' in text and '"thread_id"' in text:
        return FileKind.STACKS
    if "SERVER PROTOCOL" in text or ("NCCL version" in text and re.search("Job summary|Communicators", text)):
        return FileKind.RAS
    return FileKind.OTHER


def rank_of(name: str) -> int | None:
    """ "rank-00003.stacks.txt", "py-spy_rank3.txt", "stacks_3.txt"; None where the name has no number."""
    stem = PurePath(name).name
    if found := RANK.search(stem):
        return int(found[1])
    numbers = NUMBER.findall(re.sub(r"python3?(\.\d+)*", "", stem))
    return int(numbers[-1]) if numbers else None
