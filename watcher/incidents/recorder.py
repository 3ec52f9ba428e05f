"""Records every incident: what the nodes of a job sent before and during it, for `wattwatch replay`.

The last minutes of every node's lines are kept in memory, compressed. When a job gets an alert of severity warning or
higher, they are written to a new recording, and the following lines are appended until the incident is over.

A probe sends large parts (heartbeats, logs, checkpoint listings) only when they change. What was sent before those last
minutes and is still valid is therefore kept as `ProbeState`, and a recording begins with it.

A full disk ends a recording and is reported in `error`; the watcher goes on.
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

# All limits are chosen, not measured.
BEFORE_SECONDS: Final = 300.0  # recorded before the alert
AFTER_SECONDS: Final = 60.0  # recorded after the last finding
MAX_RECORDING_SECONDS: Final = 2 * 3600.0
MAX_RECORDING_BYTES: Final = 512 << 20  # of lines; about a tenth of it on disk
MAX_RECORDINGS: Final = 20  # kept; the oldest are removed
MAX_QUEUED_BYTES: Final = 128 << 20  # waiting for the disk
CHUNK_SECONDS: Final = 30.0
RECORDING_SUFFIX: Final = ".wattwatch.gz"

# Parts of a line that a probe sends only when they change. They are searched for in the raw line, because most lines
# have none of them and need not be parsed.
STATE_KEYS: Final = (b'"hello":', b'"beat":', b'"log":', b'"ckpt":', b'"listed":', b'"fs":')

log = logging.getLogger("wattwatch.incidents")

ReceivedLine = tuple[float, bytes]  # when it was received, in monotonic seconds of the control host, and the line


# Memory of each node


@dataclass(slots=True)
class ProbeState:
    """What the lines of one node have reported and is still valid. The fields hold rows of the probe's protocol."""

    stamp: dict[str, Any] = field(default_factory=dict)  # seq, t, w of the newest line that was folded in
    hello: Any = None
    heartbeats: dict[str, Any] = field(default_factory=dict)  # by path
    logs: dict[str, Any] = field(default_factory=dict)  # by path
    directories: dict[str, dict[str, Any]] = field(default_factory=dict)  # checkpoint directories, by path
    listed: dict[str, Any] = field(default_factory=dict)
    filesystems: dict[str, Any] = field(default_factory=dict)  # by path

    def fold(self, line: bytes) -> None:
        """Takes in a line that leaves the memory. Lines that are not of our probe are ignored."""
        if not any(key in line for key in STATE_KEYS):
            return
        try:
            self._fold(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            return

    def _fold(self, message: dict[str, Any]) -> None:
        self.stamp = {"seq": message["seq"], "t": message["t"], "w": message["w"]}
        if "hello" in message:  # a new connection: the probe sends everything again
            self.hello = message["hello"]
            for outdated in (self.heartbeats, self.logs, self.directories, self.listed, self.filesystems):
                outdated.clear()
        for row in message.get("beat", ()):
            _put(self.heartbeats, row[0], row, gone=row[2] is None)
        for row in message.get("log", ()):
            known = self.logs.get(row[1])
            _put(self.logs, row[1], row if known is None else _append_to_log(known, row), gone=row[2] is None)
        for change in message.get("ckpt", ()):
            known = self.directories.setdefault(change["dir"], {})
            entries = {**known.get("entries", {}), **change.get("entries", {})}
            known.update(change)
            names = known.get("names")
            known["entries"] = {k: v for k, v in entries.items() if names is None or k in names}
        self.listed.update(message.get("listed", ()))
        self.filesystems.update((row[0], row) for row in message.get("fs", ()))

    def lines(self) -> Iterable[bytes]:
        """The state as lines, as if the probe had just started and sent all of it."""
        parts: list[dict[str, Any]] = [{} if self.hello is None else {"hello": self.hello}]
        parts += [{"beat": [row]} for row in self.heartbeats.values()]
        parts += [{"log": [row]} for row in self.logs.values()]
        parts += [{"ckpt": [listing]} for listing in self.directories.values()]
        parts.append({"listed": list(self.listed.items()), "fs": list(self.filesystems.values())})
        if not self.stamp:
            return
        for part in parts:
            if any(part.values()):
                yield orjson.dumps({"v": 1, **self.stamp, **part})


def _put(rows: dict[str, Any], key: str, row: Any, *, gone: bool) -> None:
    if gone:
        rows.pop(key, None)
    else:
        rows[key] = row


def _append_to_log(known: Any, row: Any) -> Any:
    """The row of a log with the newly written text appended, cut to the length that the probe keeps."""
    if row[2] is None or known[3] != row[2]:
        return row  # the log was replaced, or the probe skipped a part
    tail = (known[5] + row[5])[-TAIL_BYTES:]
    start = known[2] if len(tail) == len(known[5]) + len(row[5]) else max(1, row[3] - len(tail))
    return [row[0], row[1], start, row[3], row[4], tail]


@dataclass(slots=True)
class NodeLineBuffer:
    """The last minutes of one node's lines; all but the newest chunk are compressed."""

    state: ProbeState = field(default_factory=ProbeState)  # from the lines that have left the buffer
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)  # time of the last line, compressed lines
    lines: list[ReceivedLine] = field(default_factory=list)
    offset_seconds: float = 0.0  # of its chunk boundaries, so that not all nodes compress at the same moment

    def add(self, seconds: float, line: bytes) -> None:
        if self.lines and self._chunk_number(seconds) != self._chunk_number(self.lines[-1][0]):
            # Level 1: lines of JSON compress well, and this runs on the thread that reads all nodes.
            packed = orjson.dumps([(t, text.decode("utf-8", "replace")) for t, text in self.lines])
            self.chunks.append((self.lines[-1][0], zlib.compress(packed, 1)))
            self.lines = []
        while self.chunks and seconds - self.chunks[0][0] > BEFORE_SECONDS:
            for _, old in unpack_chunk(self.chunks.popleft()[1]):
                self.state.fold(old)
        self.lines.append((seconds, line))

    def _chunk_number(self, seconds: float) -> int:
        return int((seconds + self.offset_seconds) // CHUNK_SECONDS)


def unpack_chunk(chunk: bytes) -> list[ReceivedLine]:
    return [(t, text.encode()) for t, text in orjson.loads(zlib.decompress(chunk))]


# Recordings


def job_file_name(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", job)[:60] or "job"


def newest_recording(directory: Path, job: str) -> Path | None:
    its = re.compile(rf"\d+T\d+Z-{re.escape(job_file_name(job))}-[A-Za-z]+{re.escape(RECORDING_SUFFIX)}")
    return max((path for path in directory.glob(f"*{RECORDING_SUFFIX}") if its.fullmatch(path.name)), default=None)


@dataclass(slots=True)
class OpenRecording:
    """A recording in progress, of one job. Times are monotonic seconds."""

    spec: JobSpec
    writer: RecordingWriter
    since: float
    bytes: int = 0
    last_finding: float = 0.0  # when the job last had a finding


class IncidentRecorder:
    """Keeps the last minutes of all nodes and writes the recordings.

    `add_line` is called from the fleet's reader thread, `update` from the engine's. A third thread writes to the disk,
    so that neither of them waits for it.
    """

    def __init__(self, directory: Path, specs: Sequence[JobSpec]) -> None:
        self._directory = directory
        self._specs = {spec.name: spec for spec in specs}
        self._jobs_of_node: dict[str, list[str]] = {}
        for spec in specs:
            for node in spec.nodes:
                self._jobs_of_node.setdefault(node, []).append(spec.name)
        self._buffers: dict[str, NodeLineBuffer] = {
            node: NodeLineBuffer(offset_seconds=place * CHUNK_SECONDS / len(self._jobs_of_node))
            for place, node in enumerate(self._jobs_of_node)
        }
        self._lock = threading.Lock()
        self._open: dict[str, OpenRecording] = {}  # by job
        self._prior_states: deque[tuple[float, PriorState]] = deque()
        self._links: deque[tuple[float, dict[str, NodeLink]]] = deque()  # one entry for each change of any link
        self._work: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._queued = 0
        self._thread = threading.Thread(target=self._write, name="incidents", daemon=True)
        self.error: str | None = None
        self.newest = {
            name: str(path) for name in self._specs if (path := newest_recording(directory, name)) is not None
        }
        """By job, the path of its newest recording; may be read from any thread."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Ends the open recordings, after what is queued has been written."""
        with self._lock:
            for job in list(self._open):
                self._close(job)
        self._work.put(None)
        self._thread.join(timeout_seconds)

    def add_line(self, node: str, received_seconds: float, line: bytes) -> None:
        buffer = self._buffers.get(node)
        if buffer is None:
            return
        with self._lock:
            buffer.add(received_seconds, line)
            for job in self._jobs_of_node[node]:
                recording = self._open.get(job)
                if recording is not None:
                    recording.bytes += len(line)
                    self._queued += len(line)
                    self._work.put(("lines", (recording.writer, [(node, received_seconds, line)])))

    def update(
        self,
        links: Mapping[str, NodeLink],
        findings: Mapping[str, Sequence[Finding]],
        now: float,
        wall: float,
        prior_state: Callable[[], PriorState] | None = None,
    ) -> None:
        """Call after each tick of the engine, with the state of all links and the findings of each job.

        `now`: monotonic seconds; `wall`: Unix time; `prior_state` returns what the watcher has learned so far, and is
        called every CHUNK_SECONDS.
        """
        if prior_state is not None and (not self._prior_states or now - self._prior_states[-1][0] >= CHUNK_SECONDS):
            self._prior_states.append((now, prior_state()))
        with self._lock:
            self._remember_links(links, now)
            for job, of_job in findings.items():
                serious = [finding for finding in of_job if finding.severity is not Severity.INFO]
                if serious and job in self._specs and job not in self._open:
                    self._begin(self._specs[job], serious[0].alert.value, now, wall)
                if serious and job in self._open:
                    self._open[job].last_finding = now
            for job, recording in list(self._open.items()):
                own_links = {node: links[node] for node in recording.spec.nodes if node in links}
                self._work.put(("links", (recording.writer, own_links, now)))
                # A queue that grows means that the disk cannot keep up: end the recording rather than fill the memory.
                too_long = now - recording.since > MAX_RECORDING_SECONDS or recording.bytes > MAX_RECORDING_BYTES
                if now - recording.last_finding > AFTER_SECONDS or too_long or self._queued > MAX_QUEUED_BYTES:
                    self._close(job)

    def _remember_links(self, links: Mapping[str, NodeLink], now: float) -> None:
        before = self._links[-1][1] if self._links else {}
        if any(node not in before or before[node].status is not link.status for node, link in links.items()):
            self._links.append((now, dict(links)))
        # Of both, the newest entry that is older than the first line of a recording beginning now must stay.
        while len(self._links) > 1 and now - self._links[1][0] > BEFORE_SECONDS:
            self._links.popleft()
        while len(self._prior_states) > 1 and now - self._prior_states[1][0] > BEFORE_SECONDS:
            self._prior_states.popleft()

    def _begin(self, spec: JobSpec, alert: str, now: float, wall: float) -> None:
        stamp = strftime("%Y%m%dT%H%M%SZ", gmtime(wall))
        path = self._directory / f"{stamp}-{job_file_name(spec.name)}-{alert}{RECORDING_SUFFIX}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._prune()
            writer = RecordingWriter(path, [spec])
        except OSError as error:
            self.error = f"the incident of job {spec.name} cannot be recorded: {error.strerror or error}"
            return
        self.error = None
        self.newest[spec.name] = str(path)
        log.info("recording the incident of job %s and the %.0f s before it in %s", spec.name, BEFORE_SECONDS, path)
        self._open[spec.name] = OpenRecording(spec, writer, now, last_finding=now)
        # Only references are copied here, under the lock: the writer thread unpacks, sorts and writes them.
        buffered = {
            node: (list(buffer.state.lines()), list(buffer.chunks), list(buffer.lines))
            for node in spec.nodes
            if (buffer := self._buffers[node])
        }
        prior_state = self._prior_states[0][1] if self._prior_states else None
        self._work.put(("buffered", (writer, spec, buffered, list(self._links), prior_state)))

    def _prune(self) -> None:
        """Removes the oldest recordings to make room for one more."""
        # Names begin with the time: sorted by name is sorted by age.
        recordings = sorted(self._directory.glob(f"*{RECORDING_SUFFIX}"))
        for old in recordings[: max(0, len(recordings) - MAX_RECORDINGS + 1)]:
            with contextlib.suppress(OSError):
                old.unlink()
            for job in [job for job, path in self.newest.items() if path == str(old)]:
                del self.newest[job]

    def _close(self, job: str) -> None:
        self._work.put(("close", self._open.pop(job).writer))

    # The writer thread

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            kind, what = work
            if kind == "close":
                what.close()
                self.error = what.error or self.error
            elif kind == "links":
                writer, links, now = what
                writer.write_links(links, now)
            elif kind == "lines":
                writer, lines = what
                for node, seconds, line in lines:
                    writer.write_line(node, seconds, line)
                with self._lock:
                    self._queued -= sum(len(line) for _, _, line in lines)
            else:
                write_buffered_lines(*what)


def write_buffered_lines(
    writer: RecordingWriter,
    spec: JobSpec,
    buffered: Mapping[str, tuple[list[bytes], list[tuple[float, bytes]], list[ReceivedLine]]],
    links: Sequence[tuple[float, Mapping[str, NodeLink]]],
    prior_state: PriorState | None = None,
) -> None:
    """Writes the prior state, then the minutes before the incident in order of time.

    `buffered`: for each node the lines of its probe state, its compressed chunks and its newest lines. The probe state
    is written just before the node's first line.
    """
    if prior_state is not None:
        writer.write_prior_state(restrict_to_jobs(prior_state, [spec]))
    lines: list[tuple[float, str, bytes]] = []
    for node, (state, chunks, newest) in buffered.items():
        received = [line for _, chunk in chunks for line in unpack_chunk(chunk)] + newest
        if received:
            lines += [(received[0][0], node, line) for line in state]
            lines += [(seconds, node, line) for seconds, line in received]
    # Stable: lines of one node that share a time keep their order.
    lines.sort(key=lambda entry: entry[0])
    changes = deque(links)
    for seconds, node, line in lines:
        while changes and changes[0][0] <= seconds:
            at, states = changes.popleft()
            writer.write_links({n: states[n] for n in spec.nodes if n in states}, max(at, lines[0][0]))
        writer.write_line(node, seconds, line)
    for at, states in changes:
        writer.write_links({n: states[n] for n in spec.nodes if n in states}, at)
