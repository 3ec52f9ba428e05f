"""A capture directory: files are written as they come, the manifest last. Names are ours, whatever a node says."""

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

MANIFEST_VERSION: Final = 1
OWNER_ONLY_MODE: Final = 0o700


@dataclass(frozen=True, slots=True)
class CapturedFile:
    """As in the manifest. None: the node did not tell, or it was no file there."""

    bytes: int
    sha256: str
    node: str
    source: str | None = None  # where the node had it from: a path, a command
    owner_uid: int | None = None
    age_seconds: float | None = None


@dataclass(slots=True)
class CaptureDirectory:
    """May be written to by all threads of one capture until it is sealed; what comes later is dropped."""

    path: Path
    total_bytes: int
    files: dict[str, CapturedFile] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    node_of_rank: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sealed: bool = False

    def make(self) -> None:
        """Raises OSError."""
        self.path.mkdir(mode=OWNER_ONLY_MODE, parents=True, exist_ok=True)
        self.path.chmod(OWNER_ONLY_MODE)

    def keep(self, name: str, data: bytes, node: str, **told: Any) -> None:
        """Of two files of one name the first stays: several nodes may see one file of a shared directory."""
        with self._lock:
            if self._sealed or name in self.files:
                return
            if sum(file.bytes for file in self.files.values()) + len(data) > self.total_bytes:
                self.missing.append(f"{node}: {name} of {len(data):,} bytes: more than is kept of one capture")
                return
            try:
                descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except OSError as error:
                self.missing.append(f"{node}: {name} cannot be written: {error.strerror or error}")
                return
            self.files[name] = CapturedFile(len(data), hashlib.sha256(data).hexdigest(), node, **told)

    def lack(self, sentence: str) -> None:
        with self._lock:
            if not self._sealed and sentence not in self.missing:
                self.missing.append(sentence)

    def place(self, rank: int, node: str) -> None:
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
            staged = self.path / f".{MANIFEST_NAME}"
            staged.write_text(json.dumps(manifest, indent=1) + "\n")
            staged.replace(self.path / MANIFEST_NAME)


def node_file_name(node: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", node)[:100].lstrip(".") or "node"


def rank_file_name(rank: int, suffix: str) -> str:
    return f"rank-{rank:05d}.{suffix}"


# What a node prints: frames of one JSON line and as many bytes as it says. Whatever else comes is no frame. Pure.

MAX_HEADER_BYTES: Final = 64 * 1024
EXCERPT_BYTES: Final = 80


@dataclass(frozen=True, slots=True)
class AgentFrame:
    head: dict[str, Any]
    data: bytes = b""


@dataclass(slots=True)
class AgentFrameReader:
    """Fed with bytes as they come. `garbage` is the start of what could not be read; nothing after it is believed,
    but before the first frame lines are passed over: a login shell may greet."""

    most_bytes: int  # of one frame
    ended: bool = False
    garbage: bytes = b""
    _pending: bytearray = field(default_factory=bytearray)
    _began: bool = False

    def feed(self, chunk: bytes) -> Iterator[AgentFrame]:
        if self.ended:
            return
        self._pending += chunk
        while (frame := self._next()) is not None:
            if "end" in frame.head:
                self.ended = True
                return
            yield frame

    def _next(self) -> AgentFrame | None:
        while not self.ended:
            line, newline, _ = self._pending.partition(b"\n")
            if not newline:
                if len(self._pending) > MAX_HEADER_BYTES:
                    self._give_up(bytes(self._pending))
                return None
            head = _parse_header(bytes(line))
            if head is None or head["bytes"] > self.most_bytes:
                self.garbage = self.garbage or bytes(line[:EXCERPT_BYTES])
                if self._began:
                    self._give_up(bytes(line))
                    return None
                del self._pending[: len(line) + 1]
                continue
            ends = len(line) + 1 + head["bytes"]
            if len(self._pending) < ends:
                return None
            data = bytes(self._pending[len(line) + 1 : ends])
            del self._pending[:ends]
            if not self._began:
                self._began, self.garbage = True, b""
            return AgentFrame(head, data)
        return None

    def _give_up(self, seen: bytes) -> None:
        self.garbage = seen[:EXCERPT_BYTES]
        self.ended = True
        self._pending.clear()

    @property
    def complete(self) -> bool:
        """The node said that it is done."""
        return self.ended and not self.garbage

    @property
    def torn(self) -> int:
        """Bytes of a frame that did not come to its end."""
        return len(self._pending)


def _parse_header(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(head, dict) or type(head.get("bytes")) is not int or head["bytes"] < 0:
        return None
    return head
