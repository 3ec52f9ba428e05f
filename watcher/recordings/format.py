"""Recordings: what the nodes said and how their links stood, line by line, so that the same code can judge it again.

A recording is gzip-compressed JSON lines. The first line is a header with the jobs; then `line` records hold a probe's
line as it came, and `link` records the state of a connection when it changed. Nothing that was judged is stored:
replay judges anew. What the watcher had learned before may stand behind the header (`known_before.py`).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.config.settings import probe_request_for
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.detection.prior_state import (
    PRIOR_STATE_KEY,
    PriorState,
    prior_state_from_records,
    prior_state_to_records,
)

FORMAT: Final = "wattwatch-recording"
VERSION: Final = 1
MAGIC: Final = b"\x1f\x8b"
MAX_LINE_BYTES: Final = 1 << 20  # a probe's line is at most 64 KiB
FLUSH_SECONDS: Final = 10.0
JOB_SPECS_ADAPTER: Final = TypeAdapter(list[JobSpec])


class RecordingError(Exception):
    """The file is no recording, or one that this version cannot read."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """What arrived at one instant of the control host's clock."""

    seconds: float
    sample: NodeSample | None = None
    link: NodeLink | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """An open recording: its jobs, and its moments in order."""

    specs: tuple[JobSpec, ...]
    moments: Iterator[RecordedEvent]
    known: PriorState | None = None  # learned before its first line


class RecordingWriter:
    """Writes a recording as lines come, from the fleet's reader thread. A full disk stops it, never the watcher.

    What came until FLUSH_SECONDS before a kill -9 is in the file.
    """

    def __init__(self, path: Path, specs: Sequence[JobSpec]) -> None:
        """Raises OSError where the file cannot be made. What logs and kernels say is for its owner only."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        self._lock = threading.Lock()
        self._file: gzip.GzipFile | None = gzip.GzipFile(path, "wb", compresslevel=5)
        self._links: dict[str, tuple[HostStatus, str]] = {}
        self._looked_seconds: float | None = None
        self._flushed_seconds = float("-inf")
        self.error: str | None = None
        self._write({"format": FORMAT, "version": VERSION, "jobs": [asdict(spec) for spec in specs]})

    def known(self, known: PriorState) -> None:
        """What was learned before the lines that come; call before any of them."""
        for record in prior_state_to_records(known):
            self._write(record)

    def line(self, node: str, received_seconds: float, line: bytes) -> None:
        self._write({"n": node, "t": received_seconds, "line": line.decode("utf-8", "replace")})

    def links(self, links: Mapping[str, NodeLink], now: float) -> None:
        """How the links stand now; call at each tick."""
        self._looked_seconds = now
        for node, link in links.items():
            if self._links.get(node) != (link.status, link.detail):
                self._links[node] = (link.status, link.detail)
                self._write({"n": node, "t": now, "link": link.status.value, "detail": link.detail})
        if now - self._flushed_seconds >= FLUSH_SECONDS:
            self._flushed_seconds = now
            self._do(lambda file: file.flush())

    def close(self) -> None:
        """The last record says until when was watched: silence at the end is part of what happened."""
        if self._looked_seconds is not None:
            self._write({"t": self._looked_seconds, "end": True})
        self._do(lambda file: file.close())
        with self._lock:
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        self._do(lambda file: file.write(orjson.dumps(record) + b"\n"))

    def _do(self, work: Callable[[gzip.GzipFile], object]) -> None:
        with self._lock:
            if self._file is None or self._file.closed:
                return
            try:
                work(self._file)
            except OSError as error:
                self.error = f"the recording stopped: {error.strerror or error}"
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None


def is_recording(start: bytes) -> bool:
    """Whether a file that starts with these bytes is one of ours, compressed or not."""
    if start.startswith(MAGIC):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, 256)
        except zlib.error:
            return False
    return FORMAT.encode() in start[:256]


def open_recording(path: Path) -> Recording:
    """Raises RecordingError with one sentence. A recording cut short (kill -9) is read up to the cut."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_recording(str(path), raw)


def parse_recording(name: str, raw: BinaryIO) -> Recording:
    """As `open_recording`, of bytes that are open already; closes them at their end. `name` is for people."""
    specs, lines = _header(name, raw)
    head, lines = _split_prior_state(lines)
    return Recording(specs, _events(lines, specs), prior_state_from_records(_records(head)))


def _split_prior_state(lines: Iterator[bytes]) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """Those at the head that tell what was known before, and all others."""
    start = f'{{"{PRIOR_STATE_KEY}"'.encode()
    head: list[bytes] = []
    for line in lines:
        if not line.startswith(start):
            return iter(head), itertools.chain((line,), lines)
        head.append(line)
    return iter(head), lines


def read_raw_records(path: Path) -> tuple[tuple[JobSpec, ...], Iterator[dict[str, Any]]]:
    """The jobs and the records as they were written, for whoever copies a recording. Raises RecordingError."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    specs, lines = _header(str(path), raw)
    return specs, _records(lines)


def _records(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # a torn line
        if isinstance(record, dict):
            yield record


def _header(name: str, raw: BinaryIO) -> tuple[tuple[JobSpec, ...], Iterator[bytes]]:
    lines = _lines(name, raw)
    first = next(lines, b"")
    try:
        header = orjson.loads(first)
        if header["format"] != FORMAT:
            raise KeyError("format")
        if header["version"] != VERSION:
            lines.close()
            raise RecordingError(f"{name}: recording version {header['version']}; this wattwatch reads {VERSION}")
        specs = tuple(JOB_SPECS_ADAPTER.validate_python(header["jobs"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError):
        lines.close()
        raise RecordingError(f"{name}: not a wattwatch recording (no header line)") from None
    return specs, lines


def _lines(name: str, raw: BinaryIO) -> Generator[bytes, None, None]:
    """Lines of at most LONGEST_LINE_BYTES; a longer one comes in pieces, none of which is a record."""
    try:
        with raw:
            start = raw.read(len(MAGIC))
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if start == MAGIC else raw as stream:
                while line := stream.readline(MAX_LINE_BYTES):
                    yield line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return  # cut short: what was written before the cut is good
    except OSError as error:
        raise RecordingError(f"{name}: cannot be read: {error.strerror}") from None


def _events(lines: Iterator[bytes], specs: tuple[JobSpec, ...]) -> Iterator[RecordedEvent]:
    readers: dict[str, ProbeReader] = {}
    for line in lines:
        try:
            record = orjson.loads(line)
            seconds = float(record["t"])
            if "end" in record:
                yield RecordedEvent(seconds)
                continue
            node = str(record["n"])
            link = (
                NodeLink(node, HostStatus(record["link"]), str(record.get("detail", ""))) if "link" in record else None
            )
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            continue  # a torn line, or one that a later version wrote
        if link is not None:
            if link.status is not HostStatus.OK:
                readers.pop(node, None)  # a new connection starts a new probe
            yield RecordedEvent(seconds, link=link)
        elif "line" in record:
            reader = readers.setdefault(node, ProbeReader(node, probe_request_for(specs, node)))
            sample = reader.read(str(record["line"]).encode(), seconds)
            if sample is not None:
                yield RecordedEvent(seconds, sample=sample)
