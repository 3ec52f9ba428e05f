"""The recording file: everything the nodes sent and how their links were, so that the same code can judge it again.

A recording is gzip-compressed JSON lines. The first line is a header with the jobs. A `line` record holds one line of a
probe exactly as it came, a `link` record the state of a connection whenever it changed, and the `end` record the time
until which the nodes were watched. No verdict is stored: replay judges again. What the watcher had learned before the
recording began may follow the header (detection/prior_state.py).
"""

from __future__ import annotations

import contextlib
import errno
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
from wattwatch.collectors.ssh.model import NodeLink, UnreachableCause, cause_of_detail
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
MAX_LINE_BYTES: Final = 1 << 20  # a line of a probe has at most 64 KiB; more is not ours, and must not fill memory
FLUSH_SECONDS: Final = 10.0  # what a kill -9 may cost; each flush costs some compression
JOB_SPECS_ADAPTER: Final = TypeAdapter(list[JobSpec])


class RecordingError(Exception):
    """The file is not a recording, or not one that this version can read. One sentence: which file, and why."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """What arrived at one instant: a sample, the state of a link, or neither (the end of the recording)."""

    seconds: float  # monotonic clock of the control host
    sample: NodeSample | None = None
    link: NodeLink | None = None


@dataclass(slots=True)
class RecordingEnd:
    """How the file of a recording ends. Filled in while its events are iterated."""

    complete: bool = False  # the watcher closed the file; otherwise its end is missing
    samples: int = 0

    @property
    def problem(self) -> str:
        """What a reader must know before he trusts a verdict on the recording; "" for nothing."""
        if not self.samples:
            return "The recording contains no samples of any node, so it says nothing about its jobs."
        if not self.complete:
            return (
                "The end of the recording is missing: the file was cut off, or the watcher is still writing it or was "
                "killed. What happened after its last sample is unknown."
            )
        return ""


@dataclass(frozen=True, slots=True)
class Recording:
    """An open recording: its jobs, and an iterator over what happened, in order. It can be iterated once."""

    specs: tuple[JobSpec, ...]
    events: Iterator[RecordedEvent]
    prior_state: PriorState | None = None  # what had been learned before its first line
    end: RecordingEnd | None = None  # None: the events do not come from a file


class RecordingWriter:
    """Writes a recording while the lines come in, on the reader thread of the fleet.

    A full disk ends the recording (`error` says so), never the watcher. After a kill -9 the file lacks at most the last
    FLUSH_SECONDS.
    """

    def __init__(self, path: Path, specs: Sequence[JobSpec]) -> None:
        """Raises OSError if the file cannot be created, FileExistsError if it already holds something. Only its owner
        may read it: it holds lines of logs."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._lock = threading.Lock()
        self._file: gzip.GzipFile | None = gzip.GzipFile(path, "wb", compresslevel=5)
        self._links: dict[str, tuple[HostStatus, str]] = {}
        self._last_tick_seconds: float | None = None
        self._flushed_seconds = float("-inf")
        self.error: str | None = None
        self._write({"format": FORMAT, "version": VERSION, "jobs": [asdict(spec) for spec in specs]})

    def write_prior_state(self, prior_state: PriorState) -> None:
        """Writes what had been learned before; to be called before the first line."""
        for record in prior_state_to_records(prior_state):
            self._write(record)

    def write_line(self, node: str, received_seconds: float, line: bytes) -> None:
        self._write({"n": node, "t": received_seconds, "line": line.decode("utf-8", "replace")})

    def write_links(self, links: Mapping[str, NodeLink], now: float) -> None:
        """Writes the links that have changed; to be called at each tick."""
        self._last_tick_seconds = now
        for node, link in links.items():
            if self._links.get(node) != (link.status, link.detail):
                self._links[node] = (link.status, link.detail)
                record = {"n": node, "t": now, "link": link.status.value, "detail": link.detail}
                self._write(record if link.cause is None else {**record, "cause": link.cause.value})
        if now - self._flushed_seconds >= FLUSH_SECONDS:
            self._flushed_seconds = now
            self._do(lambda file: file.flush())

    def close(self) -> None:
        """Writes the time of the last tick and closes the file. Without that time, a node that fell silent at the end
        would look as if the recording had stopped."""
        if self._last_tick_seconds is not None:
            self._write({"t": self._last_tick_seconds, "end": True})
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
                self.error = f"recording stopped: {error.strerror or error}"
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None


def unused_recording_path(path: Path) -> Path:
    """The path itself, or the first of NAME-2, NAME-3 ... that is not taken: a recording is never overwritten, and a
    watcher that is started again with the same command keeps recording."""
    name, dot, suffixes = path.name.partition(".")
    candidates = itertools.chain((path,), (path.with_name(f"{name}-{n}{dot}{suffixes}") for n in itertools.count(2)))
    return next(each for each in candidates if not each.is_file() or not each.stat().st_size)


def is_recording(start: bytes) -> bool:
    """Whether a file that starts with these bytes is a recording, compressed or not."""
    if start.startswith(MAGIC):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, 256)
        except zlib.error:
            return False
    return FORMAT.encode() in start[:256]


def open_recording(path: Path) -> Recording:
    """Opens a recording. Raises RecordingError. A truncated file (after a kill -9, say) is read up to the cut."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path}: cannot read the file: {error.strerror}") from None
    return parse_recording(str(path), raw)


def parse_recording(name: str, raw: BinaryIO) -> Recording:
    """As `open_recording`, for an open stream, which is closed at its end. `name` is used in errors."""
    specs, lines = _header(name, raw)
    head, lines = _split_prior_state(lines)
    end = RecordingEnd()
    return Recording(specs, _events(lines, specs, end), prior_state_from_records(_records(head)), end)


def _split_prior_state(lines: Iterator[bytes]) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """The lines at the head with the prior state, and all lines after them."""
    start = f'{{"{PRIOR_STATE_KEY}"'.encode()
    head: list[bytes] = []
    for line in lines:
        if not line.startswith(start):
            return iter(head), itertools.chain((line,), lines)
        head.append(line)
    return iter(head), lines


def read_raw_records(path: Path) -> tuple[tuple[JobSpec, ...], Iterator[dict[str, Any]]]:
    """The jobs and the records as they were written, for making a copy. Raises RecordingError."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path}: cannot read the file: {error.strerror}") from None
    specs, lines = _header(str(path), raw)
    return specs, _records(lines)


def _records(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # half a line, at the cut of a truncated file
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
            raise RecordingError(
                f"{name}: the recording has version {header['version']}, but this wattwatch reads only "
                f"version {VERSION}"
            )
        specs = tuple(JOB_SPECS_ADAPTER.validate_python(header["jobs"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError):
        lines.close()
        raise RecordingError(f"{name}: not a wattwatch recording: the first line is not a valid header") from None
    return specs, lines


def _lines(name: str, raw: BinaryIO) -> Generator[bytes, None, None]:
    """The lines of the file. A line longer than MAX_LINE_BYTES comes in pieces, which are no valid records."""
    try:
        with raw:
            start = raw.read(len(MAGIC))
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if start == MAGIC else raw as stream:
                while line := stream.readline(MAX_LINE_BYTES):
                    yield line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return  # truncated: what was written before the cut is good
    except OSError as error:
        raise RecordingError(f"{name}: cannot read the file: {error.strerror}") from None


def _link(node: str, record: Mapping[str, Any]) -> NodeLink:
    status, detail = HostStatus(record["link"]), str(record.get("detail", ""))
    try:
        cause = UnreachableCause(record["cause"]) if "cause" in record else cause_of_detail(detail)
    except ValueError:
        cause = None  # one that a later version has added
    return NodeLink(node, status, detail, cause=cause)


def _events(lines: Iterator[bytes], specs: tuple[JobSpec, ...], end: RecordingEnd) -> Iterator[RecordedEvent]:
    readers: dict[str, ProbeReader] = {}
    for line in lines:
        try:
            record = orjson.loads(line)
            seconds = float(record["t"])
            if "end" in record:
                end.complete = True
                yield RecordedEvent(seconds)
                continue
            node = str(record["n"])
            link = _link(node, record) if "link" in record else None
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            continue  # half a line, or a record that a later version has added
        if link is not None:
            if link.status is not HostStatus.OK:
                readers.pop(node, None)  # the next line comes from a new probe, which begins with its greeting
            yield RecordedEvent(seconds, link=link)
        elif "line" in record:
            reader = readers.setdefault(node, ProbeReader(node, probe_request_for(specs, node)))
            sample = reader.read(str(record["line"]).encode(), seconds)
            if sample is not None:
                end.samples += 1
                yield RecordedEvent(seconds, sample=sample)
