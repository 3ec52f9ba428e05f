"""Which files are flight records, and of which rank. Opens nothing that could block."""

from __future__ import annotations

import os
import pickletools
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from watcher.diagnose.flight.pickled import NAMED as NAMING_INSTRUCTIONS

LARGEST_BYTES: Final = 64 * 2**20
MOST_FILES: Final = 100_000  # of a directory: somebody named the wrong one
LARGEST_RANK: Final = 1_000_000  # a larger number in a name is a date or a process
ENDINGS: Final = (".json", ".pickle", ".pkl", ".bin", ".recorder")
# Ours, and those of torch: _dump_9, nccl_trace_rank_3, comm_lib_trace_rank_3, fr_trace_json_1.json.
NAMED: Final = re.compile(r"(dump|trace|recorder|flight)", re.IGNORECASE)
NAMED_OTHERWISE: Final = re.compile(
    r"(traceback|stacks?\b|\.(log|txt|html?|py|md|pipe|toml|ya?ml|csv|gz|tmp|part)$)", re.I
)
FIELDS: Final = (b'"pg_config"', b'"pg_status"', b'"nccl_comm_state"', b'"comm_lib_version"', b'"collective_seq_id"')
HEAD_BYTES: Final = 4096
A_NAME: Final = re.compile(r"[\w.]+ [\w.]+")  # "posix system"


class NotUsable(Exception):
    """Why a file is no record that can be read, in words. `incomplete`: asking the rank again may help."""

    def __init__(self, why: str, incomplete: bool = False) -> None:
        super().__init__(why)
        self.why, self.incomplete = why, incomplete


@dataclass(frozen=True, slots=True)
class Candidate:
    """`named`: somebody said, or its name says, that it is a record; else only its bytes can tell."""

    path: Path
    rank: int | None
    named: bool


def rank_of(name: str) -> int | None:
    """ "trace-node-01_rank_3.json" -> 3. The number after "rank", else the last one; None where there is none."""
    while name.endswith(ENDINGS):
        name = name[: name.rindex(".")]
    numbers = re.findall(r"rank[-_.]?(\d+)", name, re.IGNORECASE) or re.findall(r"\d+", name)
    if not numbers or len(numbers[-1]) > 9 or int(numbers[-1]) > LARGEST_RANK:
        return None
    return int(numbers[-1])


def is_named_like_one(name: str) -> bool:
    return rank_of(name) is not None and bool(NAMED.search(name)) and not NAMED_OTHERWISE.search(name)


def candidates(paths: Iterable[str | os.PathLike[str]]) -> list[Candidate]:
    """Files named, and those below directories named, each once, in the order of their paths."""
    found: dict[Path, Candidate] = {}
    for path in map(Path, paths):
        for file in _below(path) if path.is_dir() else (path,):
            named = file == path or is_named_like_one(file.name)
            if not named and NAMED_OTHERWISE.search(file.name):
                continue
            found.setdefault(file, Candidate(file, rank_of(file.name), named))
    return [found[path] for path in sorted(found)]


def _below(directory: Path) -> Iterator[Path]:
    left = MOST_FILES
    for place, _, names in os.walk(directory):  # follows no links to directories
        for name in names[:left]:
            yield Path(place, name)
        left -= len(names)
        if left <= 0:
            return


def content(candidate: Candidate) -> bytes | None:
    """None: it is something else, of which nobody said that it be a record. Raises `NotUsable`."""
    try:
        return _content(candidate)
    except OSError as error:
        if not candidate.named:
            return None
        raise NotUsable(f"it cannot be read: {error.strerror or error}") from None


def _content(candidate: Candidate) -> bytes | None:
    try:
        if not stat.S_ISREG(candidate.path.stat().st_mode):  # first: opening a device may do things
            raise NotUsable("it is no regular file")
        file = os.open(candidate.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return _whole(file)
        finally:
            os.close(file)
    except NotUsable:
        if candidate.named:
            raise
        return None


def _whole(file: int) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise NotUsable("it is no regular file")
    head = os.read(file, HEAD_BYTES)
    if not head:
        raise NotUsable("it is empty: the rank has not written it yet", incomplete=True)
    if not looks_like_one(head):
        raise NotUsable(old_pickle(head) or "it is neither a pickle nor JSON of a flight record")
    if status.st_size > LARGEST_BYTES:
        raise NotUsable(f"it has {status.st_size:,} bytes where at most {LARGEST_BYTES:,} are read")
    parts = [head]
    left = LARGEST_BYTES - len(head)
    while left and (part := os.read(file, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def looks_like_one(head: bytes) -> bool:
    """A pickle, whatever it holds, or JSON with a field that only flight records have."""
    if head[:1] == b"\x80":
        return len(head) < 2 or head[1] <= 5
    return head.lstrip()[:1] == b"{" and any(field in head for field in FIELDS)


def old_pickle(head: bytes) -> str | None:
    """A pickle of protocol 0 or 1 has no mark at its beginning, and is told by its instructions alone: listed, not run.
    torch writes none; one that names or calls something was put there. None: it is no pickle."""
    found: list[str] = []
    try:
        for instruction, told, _ in pickletools.genops(head):
            if instruction.name in ("GLOBAL", "INST") and not A_NAME.fullmatch(str(told)):
                return None  # a text that begins like one
            found.append(instruction.name)
    except (ValueError, OverflowError) as error:
        if len(head) < HEAD_BYTES or "unknown" in str(error):  # else the head ends before the pickle does
            return None
    runs = next((name for name in found if name in NAMING_INSTRUCTIONS.values()), None)
    if runs is None:
        return "it is a pickle of protocol 0 or 1, which torch does not write" if len(found) > 1 else None
    return f"it is a pickle of protocol 0 or 1 with the instruction {runs}, which runs code: no flight record has it"
