"""A capture directory: files are written as they come, the manifest last. Names are ours, whatever a node says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from watcher.diagnose.directory.file_kinds import MANIFEST

VERSION: Final = 1
OURS_ONLY: Final = 0o700


@dataclass(frozen=True, slots=True)
class KeptFile:
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
    files: dict[str, KeptFile] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    node_of_rank: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sealed: bool = False

    def make(self) -> None:
        """Raises OSError."""
        self.path.mkdir(mode=OURS_ONLY, parents=True, exist_ok=True)
        self.path.chmod(OURS_ONLY)

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
            self.files[name] = KeptFile(len(data), hashlib.sha256(data).hexdigest(), node, **told)

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
                "v": VERSION,
                "job": job,
                "wall_seconds": wall_seconds,
                "node_of_rank": {str(rank): node for rank, node in sorted(self.node_of_rank.items())},
                "missing": self.missing,
                "files": {name: asdict(file) for name, file in sorted(self.files.items())},
            }
            staged = self.path / f".{MANIFEST}"
            staged.write_text(json.dumps(manifest, indent=1) + "\n")
            staged.replace(self.path / MANIFEST)


def name_of_node(node: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", node)[:100].lstrip(".") or "node"


def name_of_rank(rank: int, suffix: str) -> str:
    return f"rank-{rank:05d}.{suffix}"
