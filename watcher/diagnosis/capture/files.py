"""The files of a capture: the directory that they are written to, and the frames in which a node sends them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from wattwatch.watcher.diagnosis.loading.directory import MANIFEST_NAME

# The capture directory

MANIFEST_VERSION: Final = 1
OWNER_ONLY_MODE: Final = 0o700  # logs and stacks may hold secrets of the job


@dataclass(frozen=True, slots=True)
class CapturedFile:
    """An entry of the manifest; the field names are its keys. None: the node did not say, or it has no such value."""

    bytes: int
    sha256: str
    node: str
    source: str | None = None  # the path or command that the node had it from
    owner_uid: int | None = None
    age_seconds: float | None = None


@dataclass(slots=True)
class CaptureDirectory:
    """Files are written as they arrive, the manifest last. Safe for all threads of one capture.

    After `seal`, further files are dropped: a thread may still be receiving when the deadline of the capture passes.
    """

    path: Path
    total_bytes: int
    files: dict[str, CapturedFile] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    node_of_rank: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sealed: bool = False

    def create(self) -> None:
        """Raises OSError."""
        self.path.mkdir(mode=OWNER_ONLY_MODE, parents=True, exist_ok=True)
        self.path.chmod(OWNER_ONLY_MODE)

    def save(self, name: str, data: bytes, node: str, **metadata: Any) -> None:
        """Of two files with one name the first is kept: several nodes may send the same file of a shared directory."""
        with self._lock:
            if self._sealed or name in self.files:
                return
            if sum(file.bytes for file in self.files.values()) + len(data) > self.total_bytes:
                self.missing.append(
                    f"{node}: {name} ({len(data):,} bytes) was left out: with it, the capture would exceed "
                    f"{self.total_bytes:,} bytes"
                )
                return
            try:
                # O_EXCL and O_NOFOLLOW: nothing that was placed in the directory before can redirect the write.
                descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except OSError as error:
                self.missing.append(f"{node}: {name} cannot be written: {error.strerror or error}")
                return
            self.files[name] = CapturedFile(len(data), hashlib.sha256(data).hexdigest(), node, **metadata)

    def add_missing(self, sentence: str) -> None:
        """Notes in a sentence what could not be captured, and why."""
        with self._lock:
            if not self._sealed and sentence not in self.missing:
                self.missing.append(sentence)

    def assign_rank(self, rank: int, node: str) -> None:
        """The first node that is named for a rank stays."""
        with self._lock:
            if not self._sealed:
                self.node_of_rank.setdefault(rank, node)

    def seal(self, job: str, wall_seconds: float) -> None:
        """Writes the manifest; raises OSError."""
        with self._lock:
            self._sealed = True
            manifest = {
                "v": MANIFEST_VERSION,
                "job": job,
                "wall_seconds": wall_seconds,
                "node_of_rank": {str(rank): node for rank, node in sorted(self.node_of_rank.items())},
                "missing": self.missing,
                "files": {name: asdict(file) for name, file in sorted(self.files.items())},
            }
            # Renamed into place, so that whoever finds a manifest finds a complete capture.
            staged = self.path / f".{MANIFEST_NAME}"
            staged.write_text(json.dumps(manifest, indent=1) + "\n")
            staged.replace(self.path / MANIFEST_NAME)


def node_file_name(node: str) -> str:
    """The node's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", node)[:100].lstrip(".") or "node"


def rank_file_name(rank: int, suffix: str) -> str:
    return f"rank-{rank:05d}.{suffix}"


# Frames: one line of JSON, then as many bytes as its "bytes" says

MAX_HEADER_BYTES: Final = 64 * 1024
EXCERPT_BYTES: Final = 80


@dataclass(frozen=True, slots=True)
class AgentFrame:
    header: dict[str, Any]
    data: bytes = b""


@dataclass(slots=True)
class AgentFrameReader:
    """Parses the output of the node agent; fed with bytes as they arrive.

    Lines before the first frame are skipped, because a login shell may print a greeting. After that, the first bytes
    that are not a frame end the reading: another program may have answered.
    """

    max_frame_bytes: int
    ended: bool = False
    garbage: bytes = b""  # start of what could not be parsed
    _pending: bytearray = field(default_factory=bytearray)
    _began: bool = False

    def feed(self, chunk: bytes) -> Iterator[AgentFrame]:
        if self.ended:
            return
        self._pending += chunk
        while (frame := self._next()) is not None:
            # Without this frame the connection was cut, however complete the files look.
            if "end" in frame.header:
                self.ended = True
                return
            yield frame

    def _next(self) -> AgentFrame | None:
        while not self.ended:
            line, newline, _ = self._pending.partition(b"\n")
            if not newline:
                # A header that never ends: not our program.
                if len(self._pending) > MAX_HEADER_BYTES:
                    self._give_up(bytes(self._pending))
                return None
            header = _parse_header(bytes(line))
            if header is None or header["bytes"] > self.max_frame_bytes:
                self.garbage = self.garbage or bytes(line[:EXCERPT_BYTES])
                if self._began:
                    self._give_up(bytes(line))
                    return None
                del self._pending[: len(line) + 1]
                continue
            end = len(line) + 1 + header["bytes"]
            if len(self._pending) < end:
                return None
            data = bytes(self._pending[len(line) + 1 : end])
            del self._pending[:end]
            # The first frame shows that what came before was only a greeting.
            if not self._began:
                self._began, self.garbage = True, b""
            return AgentFrame(header, data)
        return None

    def _give_up(self, unparsed: bytes) -> None:
        self.garbage = unparsed[:EXCERPT_BYTES]
        self.ended = True
        self._pending.clear()

    @property
    def complete(self) -> bool:
        """The agent reported that it is done."""
        return self.ended and not self.garbage

    @property
    def cut_off_bytes(self) -> int:
        """Size of the received part of a frame that is incomplete."""
        return len(self._pending)


def _parse_header(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or type(header.get("bytes")) is not int or header["bytes"] < 0:
        return None
    return header
