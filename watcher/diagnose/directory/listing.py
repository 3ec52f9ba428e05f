"""The files of a directory that may be evidence, read with care: only plain files, of bounded size and number. Rim."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from watcher.diagnose.directory.file_kinds import HEAD_BYTES, FileKind, kind_of
from watcher.diagnose.flight.files import is_named_like_one
from watcher.diagnose.words import one_line

FILES_MOST: Final = 100_000
DEPTH_MOST: Final = 3
FILE_BYTES_MOST: Final = 64 * 1024 * 1024
ATTEMPT: Final = re.compile(r"attempt-(\d{1,9})")
# Of a run directory: nothing in there is evidence, and the first can be large.
SKIPPED: Final = frozenset({"checkpoints", "worker", "heartbeat", "logs"})


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    name: str  # relative to the directory: what people are told
    kind: FileKind


@dataclass(frozen=True, slots=True)
class Listing:
    files: tuple[Found, ...]  # in the order of their names
    missing: tuple[str, ...]


def list_directory(directory: Path) -> Listing:
    """Raises OSError where the directory itself cannot be listed. Of several attempts only the newest is listed."""
    found: list[Found] = []
    missing: list[str] = []
    os.listdir(directory)  # os.walk is silent about a directory that it may not read
    for path in _walk(directory, missing):
        if len(found) == FILES_MOST:
            missing.append(f"{directory}: only the first {FILES_MOST:,} files were looked at")
            break
        name = _shown_name(path, directory)
        try:
            head = read_bytes(path, HEAD_BYTES, whole=False)
        except OSError as error:
            missing.append(f"{name}: cannot be read: {error.strerror or error}")
            continue
        if head is None and is_named_like_one(path.name):
            missing.append(f"{name}: it is {_what(path)} where a flight record would be; it was not opened")
        if head is not None:
            found.append(Found(path, name, kind_of(path.name, head)))
    return Listing(tuple(found), tuple(missing))


def _walk(directory: Path, missing: list[str]) -> Iterator[Path]:
    for at, directories, names in os.walk(directory):
        here = Path(at)
        for name in sorted(directories):
            if is_named_like_one(name) and ((here / name).is_symlink() or not _holds_any(here / name)):
                of = _shown_name(here / name, directory)
                missing.append(f"{of}: it is {_what(here / name)} where a flight record would be")
        attempts = {int(m[1]): name for name in directories if (m := ATTEMPT.fullmatch(name))}
        newest = attempts[max(attempts)] if attempts else None
        is_run = (here / "run.json").exists()
        directories[:] = sorted(
            name
            for name in directories
            if (ATTEMPT.fullmatch(name) is None or name == newest) and not (is_run and name in SKIPPED)
        )
        if len(here.relative_to(directory).parts) >= DEPTH_MOST and directories:
            missing.append(f"{here.relative_to(directory)}: folders below it were not looked at")
            directories.clear()
        yield from (here / name for name in sorted(names))


def _shown_name(path: Path, directory: Path) -> str:
    return one_line(os.fsencode(path.relative_to(directory)).decode("utf-8", "replace"))


def _holds_any(directory: Path) -> bool:
    try:
        with os.scandir(directory) as inside:
            return next(inside, None) is not None
    except OSError:
        return False


def _what(path: Path) -> str:
    link = "a link to " if path.is_symlink() else ""
    mode = path.stat().st_mode
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return link + next((words for fits, words in kinds if fits(mode)), "a device")


def read_bytes(path: Path, most: int = FILE_BYTES_MOST, whole: bool = True) -> bytes | None:
    """None for what is no plain file: torch keeps FIFOs beside its dumps, and to open one could wait for ever. Raises
    OSError, also for a file that is larger than `most` where it is wanted whole."""
    file = _open_plain(path)
    if file is None:
        return None
    with file:
        data = file.read(most + 1)
    if len(data) > most and whole:
        raise OSError(27, f"larger than {most:,} bytes")
    return data[:most]


def read_object(path: Path, missing: list[str], most: int = FILE_BYTES_MOST) -> dict[str, Any]:
    """The JSON object of a file; {} where there is no file, or none that can be used: then `missing` says why."""
    if not path.exists():
        return {}
    try:
        data = json.loads(read_bytes(path, most) or b"null")
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path.name}: cannot be read: {error}")
        return {}
    if not isinstance(data, dict):
        missing.append(f"{path.name}: holds no JSON object")
        return {}
    return data


def read_end(path: Path, most: int) -> bytes | None:
    """Its last bytes, at most so many; None for what is no plain file. Raises OSError."""
    file = _open_plain(path)
    if file is None:
        return None
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def _open_plain(path: Path) -> BinaryIO | None:
    if not stat.S_ISREG(path.stat().st_mode):
        return None
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None
