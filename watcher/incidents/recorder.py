"""What a probe told once and still holds: heartbeats, logs, checkpoint listings, which it ships when they change.

A recording that begins in mid-run begins with this.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import gmtime, strftime
from typing import Any, Final

import orjson

from wattwatch.collectors.probe.node_probe import TAIL_BYTES
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import Finding, JobSpec, Severity
from wattwatch.watcher.detection.prior_state import PriorState, restrict_to_jobs
from wattwatch.watcher.recordings.format import RecordingWriter

# What a line tells only when it changes, and so must outlive the line.
STATE_KEYS: Final = (b'"hello":', b'"beat":', b'"log":', b'"ckpt":', b'"listed":', b'"fs":')


@dataclass(slots=True)
class ProbeState:
    """What one node's lines have told and still holds."""

    stamp: dict[str, Any] = field(default_factory=dict)  # seq, t, w of the newest line that was folded in
    hello: Any = None
    beats: dict[str, Any] = field(default_factory=dict)  # path -> row
    logs: dict[str, Any] = field(default_factory=dict)
    directories: dict[str, dict[str, Any]] = field(default_factory=dict)
    listed: dict[str, Any] = field(default_factory=dict)
    filesystems: dict[str, Any] = field(default_factory=dict)

    def fold(self, line: bytes) -> None:
        """Takes in a line that leaves the memory. What is no line of ours is dropped, as the reader would."""
        if not any(kind in line for kind in STATE_KEYS):
            return
        try:
            self._fold(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            return

    def _fold(self, message: dict[str, Any]) -> None:
        self.stamp = {"seq": message["seq"], "t": message["t"], "w": message["w"]}
        if "hello" in message:  # a new connection tells everything anew
            self.hello = message["hello"]
            for known_before in (self.beats, self.logs, self.directories, self.listed, self.filesystems):
                known_before.clear()
        for row in message.get("beat", ()):
            _put(self.beats, row[0], row, gone=row[2] is None)
        for row in message.get("log", ()):
            known = self.logs.get(row[1])
            _put(self.logs, row[1], row if known is None else _append_to_log(known, row), gone=row[2] is None)
        for news in message.get("ckpt", ()):
            known = self.directories.setdefault(news["dir"], {})
            entries = {**known.get("entries", {}), **news.get("entries", {})}
            known.update(news)
            names = known.get("names")
            known["entries"] = {k: v for k, v in entries.items() if names is None or k in names}
        self.listed.update(message.get("listed", ()))
        self.filesystems.update((row[0], row) for row in message.get("fs", ()))

    def lines(self) -> Iterable[bytes]:
        """Lines that a reader takes for a probe's first ones."""
        parts: list[dict[str, Any]] = [{} if self.hello is None else {"hello": self.hello}]
        parts += [{"beat": [row]} for row in self.beats.values()]
        parts += [{"log": [row]} for row in self.logs.values()]
        parts += [{"ckpt": [news]} for news in self.directories.values()]
        parts.append({"listed": list(self.listed.items()), "fs": list(self.filesystems.values())})
        if not self.stamp:
            return
        for part in parts:
            if any(part.values()):
                yield orjson.dumps({"v": 1, **self.stamp, **part})


def _put(known: dict[str, Any], key: str, row: Any, *, gone: bool) -> None:
    if gone:
        known.pop(key, None)
    else:
        known[key] = row


def _append_to_log(known: Any, row: Any) -> Any:
    """What was appended to a log, behind what is known of it."""
    if row[2] is None or known[3] != row[2]:
        return row
    tail = (known[5] + row[5])[-TAIL_BYTES:]
    start = known[2] if len(tail) == len(known[5]) + len(row[5]) else max(1, row[3] - len(tail))
    return [row[0], row[1], start, row[3], row[4], tail]


# Every incident leaves a recording: what the nodes of its job said before and during it, for `wattwatch replay`.
#
# The last minutes of all lines are kept in memory, compressed. When a warning or worse is said of a job, they go to a
# file of their own, and what comes after follows until it is over. A probe ships what is large only when it changes:
# what has left the memory and still holds is folded into one line a node, with which the file begins.
#
# Bounds: LONGEST_SECONDS and MOST_BYTES a recording, KEPT recordings, QUEUED_BYTES waiting for the disk. A full disk ends
# a recording and is told in `error`; the watch goes on.

BEFORE_SECONDS: Final = 300.0
AFTER_SECONDS: Final = 60.0
MAX_RECORDING_SECONDS: Final = 2 * 3600.0
MAX_RECORDING_BYTES: Final = 512 << 20  # of lines; a tenth of it on disk
MAX_RECORDINGS: Final = 20
MAX_QUEUED_BYTES: Final = 128 << 20
CHUNK_SECONDS: Final = 30.0
RECORDING_SUFFIX: Final = ".wattwatch.gz"

log = logging.getLogger(__name__)

ReceivedLine = tuple[float, bytes]  # received at, on the control host's clock


@dataclass(slots=True)
class NodeLineBuffer:
    """The last minutes of one node's lines; older chunks are compressed."""

    lasting: ProbeState = field(default_factory=ProbeState)
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)  # (last line, compressed lines)
    lines: list[ReceivedLine] = field(default_factory=list)
    offset_seconds: float = 0.0  # of its chunks, so that not all nodes pack theirs in the same moment

    def add(self, seconds: float, line: bytes) -> None:
        if self.lines and self._chunk_of(seconds) != self._chunk_of(self.lines[-1][0]):
            packed = orjson.dumps([(t, text.decode("utf-8", "replace")) for t, text in self.lines])
            self.chunks.append((self.lines[-1][0], zlib.compress(packed, 1)))
            self.lines = []
        while self.chunks and seconds - self.chunks[0][0] > BEFORE_SECONDS:
            for _, old in unpack_chunk(self.chunks.popleft()[1]):
                self.lasting.fold(old)
        self.lines.append((seconds, line))

    def _chunk_of(self, seconds: float) -> int:
        return int((seconds + self.offset_seconds) // CHUNK_SECONDS)


def job_file_name(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", job)[:60] or "job"


def newest_recording(directory: Path, job: str) -> Path | None:
    """The job's newest recording there; None without any."""
    its = re.compile(rf"\d+T\d+Z-{re.escape(job_file_name(job))}-[A-Za-z]+{re.escape(RECORDING_SUFFIX)}")
    return max((path for path in directory.glob(f"*{RECORDING_SUFFIX}") if its.fullmatch(path.name)), default=None)


def unpack_chunk(chunk: bytes) -> list[ReceivedLine]:
    return [(t, text.encode()) for t, text in orjson.loads(zlib.decompress(chunk))]


@dataclass(slots=True)
class OpenRecording:
    """A recording that is being written, for one job."""

    spec: JobSpec
    recorder: RecordingWriter
    since: float
    bytes: int = 0
    last_true: float = 0.0


class IncidentRecorder:
    """Keeps the memory and writes the recordings. `line` is called by the fleet's reader thread, `look` by the
    engine's; a thread of its own writes, so that neither waits for the disk."""

    def __init__(self, directory: Path, specs: Sequence[JobSpec]) -> None:
        self._directory = directory
        self._specs = {spec.name: spec for spec in specs}
        self._jobs_of: dict[str, list[str]] = {}
        for spec in specs:
            for node in spec.nodes:
                self._jobs_of.setdefault(node, []).append(spec.name)
        self._memory: dict[str, NodeLineBuffer] = {
            node: NodeLineBuffer(offset_seconds=place * CHUNK_SECONDS / len(self._jobs_of))
            for place, node in enumerate(self._jobs_of)
        }
        self._lock = threading.Lock()
        self._open: dict[str, OpenRecording] = {}
        self._known: deque[tuple[float, PriorState]] = deque()  # what was learned by then
        self._links: deque[tuple[float, dict[str, NodeLink]]] = deque()  # when any of them changed
        self._work: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._queued = 0
        self._writer = threading.Thread(target=self._write, name="incidents", daemon=True)
        self.error: str | None = None
        self.newest = {
            name: str(path) for name in self._specs if (path := newest_recording(directory, name)) is not None
        }
        """By job, the path of its newest recording; may be read from any thread."""

    def start(self) -> None:
        self._writer.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Ends the open recordings; what is queued is written first."""
        with self._lock:
            for job in list(self._open):
                self._close(job)
        self._work.put(None)
        self._writer.join(timeout_seconds)

    def line(self, node: str, received_seconds: float, line: bytes) -> None:
        memory = self._memory.get(node)
        if memory is None:
            return
        with self._lock:
            memory.add(received_seconds, line)
            for job in self._jobs_of[node]:
                incident = self._open.get(job)
                if incident is not None:
                    incident.bytes += len(line)
                    self._queue(len(line), incident.recorder, [(node, received_seconds, line)])

    def look(
        self,
        links: Mapping[str, NodeLink],
        findings: Mapping[str, Sequence[Finding]],
        now: float,
        wall: float,
        known: Callable[[], PriorState] | None = None,
    ) -> None:
        """How the links stand, and what is true of each job now. Call after each tick. `known`: what the watcher has
        learned by now; asked each CHUNK_SECONDS."""
        if known is not None and (not self._known or now - self._known[-1][0] >= CHUNK_SECONDS):
            self._known.append((now, known()))
        with self._lock:
            self._remember(links, now)
            for job, told in findings.items():
                grave = [finding for finding in told if finding.severity is not Severity.INFO]
                if grave and job in self._specs and job not in self._open:
                    self._begin(self._specs[job], grave[0].alert.value, now, wall)
                if grave and job in self._open:
                    self._open[job].last_true = now
            for job, incident in list(self._open.items()):
                mine = {node: links[node] for node in incident.spec.nodes if node in links}
                self._work.put(("links", (incident.recorder, mine, now)))
                too_long = now - incident.since > MAX_RECORDING_SECONDS or incident.bytes > MAX_RECORDING_BYTES
                if now - incident.last_true > AFTER_SECONDS or too_long or self._queued > MAX_QUEUED_BYTES:
                    self._close(job)

    def _remember(self, links: Mapping[str, NodeLink], now: float) -> None:
        before = self._links[-1][1] if self._links else {}
        if any(node not in before or before[node].status is not link.status for node, link in links.items()):
            self._links.append((now, dict(links)))
        while len(self._links) > 1 and now - self._links[1][0] > BEFORE_SECONDS:
            self._links.popleft()
        # The newest that is as old as the first line of a recording that begins now.
        while len(self._known) > 1 and now - self._known[1][0] > BEFORE_SECONDS:
            self._known.popleft()

    def _begin(self, spec: JobSpec, alert: str, now: float, wall: float) -> None:
        stamp = strftime("%Y%m%dT%H%M%SZ", gmtime(wall))
        path = self._directory / f"{stamp}-{job_file_name(spec.name)}-{alert}{RECORDING_SUFFIX}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._prune()
            recorder = RecordingWriter(path, [spec])
        except OSError as error:
            self.error = f"an incident of {spec.name} is not recorded: {error.strerror or error}"
            return
        self.error = None
        self.newest[spec.name] = str(path)
        log.info("recording this incident of %s, with the minutes before it, in %s", spec.name, path)
        self._open[spec.name] = OpenRecording(spec, recorder, now, last_true=now)
        # Only references: they are unpacked, sorted and written by the writer.
        kept = {
            node: (list(m.lasting.lines()), list(m.chunks), list(m.lines))
            for node in spec.nodes
            if (m := self._memory[node])
        }
        before = self._known[0][1] if self._known else None
        self._work.put(("memory", (recorder, spec, kept, list(self._links), before)))

    def _prune(self) -> None:
        """Makes room for one more."""
        recordings = sorted(self._directory.glob(f"*{RECORDING_SUFFIX}"))
        for old in recordings[: max(0, len(recordings) - MAX_RECORDINGS + 1)]:
            with contextlib.suppress(OSError):
                old.unlink()
            for job in [job for job, path in self.newest.items() if path == str(old)]:
                del self.newest[job]

    def _close(self, job: str) -> None:
        self._work.put(("close", self._open.pop(job).recorder))

    def _queue(self, size: int, recorder: RecordingWriter, lines: list[tuple[str, float, bytes]]) -> None:
        self._queued += size
        self._work.put(("lines", (recorder, lines)))

    # The writer's thread

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            kind, what = work
            if kind == "close":
                what.close()
                self.error = what.error or self.error
            elif kind == "links":
                recorder, links, now = what
                recorder.links(links, now)
            elif kind == "lines":
                recorder, lines = what
                for node, seconds, line in lines:
                    recorder.line(node, seconds, line)
                with self._lock:
                    self._queued -= sum(len(line) for _, _, line in lines)
            else:
                write_buffered_lines(*what)


def write_buffered_lines(
    recorder: RecordingWriter,
    spec: JobSpec,
    kept: Mapping[str, tuple[list[bytes], list[tuple[float, bytes]], list[ReceivedLine]]],
    links: Sequence[tuple[float, Mapping[str, NodeLink]]],
    known: PriorState | None = None,
) -> None:
    """What was known before, then the minutes before, in order of time. What is older and still holds comes with each
    node's first line."""
    if known is not None:
        recorder.known(restrict_to_jobs(known, [spec]))
    lines: list[tuple[float, str, bytes]] = []
    for node, (lasting, chunks, newest) in kept.items():
        mine = [line for _, chunk in chunks for line in unpack_chunk(chunk)] + newest
        if mine:
            lines += [(mine[0][0], node, line) for line in lasting]
            lines += [(seconds, node, line) for seconds, line in mine]
    lines.sort(key=lambda entry: entry[0])
    changes = deque(links)
    for seconds, node, line in lines:
        while changes and changes[0][0] <= seconds:
            at, states = changes.popleft()
            recorder.links({n: states[n] for n in spec.nodes if n in states}, max(at, lines[0][0]))
        recorder.line(node, seconds, line)
    for at, states in changes:
        recorder.links({n: states[n] for n in spec.nodes if n in states}, at)
