"""The probe's output on one connection: bytes -> lines -> samples.

The probe is started on one channel. Memory stays bounded whatever arrives: lines have a maximum length, and what is
not a line of the probe is counted and dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import paramiko

from wattwatch.collectors.probe.payload import LEASE_LINE, probe_command, probe_payload
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.samples import NodeSample
from wattwatch.collectors.ssh.connections import SshConnection
from wattwatch.collectors.ssh.login import LoginAttempt
from wattwatch.collectors.ssh.model import UnreachableCause, error_text, unreachable

MAX_LINE_BYTES: Final = 64 * 1024


class LineSplitter:
    """Splits a stream into lines. A line longer than MAX_LINE_BYTES is skipped to its end and counted, never stored."""

    def __init__(self) -> None:
        self.skipped_bytes = 0  # of lines that were too long
        self._rest = b""  # the beginning of a line whose end has not arrived
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by `data`, without line ends; empty ones are dropped."""
        if self._skipping:
            end = data.find(b"\n")
            self.skipped_bytes += len(data) if end < 0 else end + 1
            if end < 0:
                return []
            data, self._skipping = data[end + 1 :], False
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self.skipped_bytes += len(self._rest)
            self._rest, self._skipping = b"", True
        whole = []
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                self.skipped_bytes += len(line)
            elif line:
                whole.append(line)
        return whole

    def cut(self) -> None:
        """The stream has ended: count the incomplete last line as skipped."""
        self.skipped_bytes += len(self._rest)
        self._rest = b""


READ_BYTES: Final = 64 * 1024
READS_PER_TURN: Final = 4  # then the next node's turn: a node that floods us must not delay the others
STDERR_TAIL_BYTES: Final = 2000
CLOSE_TIMEOUT_REAL_SECONDS: Final = 2.0
EXCERPT_BYTES: Final = 40


class ReadyStreams:
    """Streams with data to read, and the event that wakes the fleet. Filled by transports, emptied by the fleet."""

    def __init__(self) -> None:
        self.streams: deque[ProbeStream] = deque()
        self.wake = threading.Event()


class ArrivalEvent(threading.Event):
    """The event that paramiko sets when bytes arrive or a channel ends; setting it queues the stream.

    It replaces `Channel.fileno`, which costs a pipe, two system calls per line and a selector.
    """

    def __init__(self, stream: ProbeStream, ready: ReadyStreams) -> None:
        super().__init__()
        self._stream = stream
        self._ready = ready
        self.pending = False

    def set(self) -> None:
        if not self.pending:
            self.pending = True
            self._ready.streams.append(self._stream)
            self._ready.wake.set()

    def clear(self) -> None:
        """paramiko clears the event when a buffer is empty; `pending` replaces that state."""


class ProbeStream:
    """A running probe. Everything but `close` is called from the fleet's thread only."""

    def __init__(
        self, node: str, request: ProbeRequest, connection: SshConnection, channel: paramiko.Channel, now: float
    ) -> None:
        self.node = node
        self.connection = connection
        self.channel = channel
        self.reader = ProbeReader(node, request)
        self.opened_seconds = now
        self.lease_seconds = now  # when the lease was last renewed
        self.last_line_seconds: float | None = None
        self.first_line_seconds: float | None = None
        self.last_sample: NodeSample | None = None
        self.lines = 0
        self.took_over = False  # from another stream: its first lines may repeat that one's last
        self.ended = False  # no more data will arrive
        self.ended_by_peer = False  # then the probe on the node has ended too
        self.garbage_since_line = 0
        self.excerpt = b""  # start of the garbage, for messages
        self._splitter = LineSplitter()
        self._stderr_tail = b""
        self._counted_garbage = 0
        self._skipped_at_line = 0
        self._closing = threading.Lock()
        self._closed = False

    def queue_in(self, ready: ReadyStreams) -> None:
        self.arrival = ArrivalEvent(self, ready)
        self.channel.in_stderr_buffer.set_event(self.arrival)
        self.channel.in_buffer.set_event(self.arrival)

    def read(self) -> list[bytes]:
        """The lines that have arrived. Sets `ended` at the end of the stream; queues another turn if there is more."""
        self.arrival.pending = False  # before reading: whatever arrives from here on queues the stream again
        lines: list[bytes] = []
        try:
            for _ in range(READS_PER_TURN):
                if not self.channel.recv_ready():
                    break
                lines += self._splitter.feed(self.channel.recv(READ_BYTES))
            if self.channel.recv_stderr_ready():
                self._stderr_tail = (self._stderr_tail + self.channel.recv_stderr(READ_BYTES))[-STDERR_TAIL_BYTES:]
        except (OSError, EOFError, paramiko.SSHException):  # it ended while paramiko sent a window update
            self.ended = True
        if self.channel.recv_ready():
            self.arrival.set()
        else:
            self.check_for_end()
        return lines

    def check_for_end(self) -> None:
        """Sets `ended` once the channel is closed. Not at the end of the output: the exit status arrives after it."""
        if self.channel.closed or not self.connection.transport.is_active():
            self.ended = self.ended_by_peer = True
            self._splitter.cut()

    def parse(self, line: bytes, now: float) -> NodeSample | None:
        """The line's sample, counted and remembered; None for what is not a line of the probe."""
        sample = self.reader.read(line, now)
        if sample is None:
            self.garbage_since_line += len(line)
            self.excerpt = self.excerpt or line[:EXCERPT_BYTES]
            return None
        if self.first_line_seconds is None:
            self.first_line_seconds = now
        self.last_line_seconds = now
        self.last_sample = sample
        self.lines += 1
        self.garbage_since_line = 0
        self._skipped_at_line = self._splitter.skipped_bytes
        self.excerpt = b""
        return sample

    def new_garbage_bytes(self) -> int:
        """Bytes that were not a line of the probe, since the last call."""
        total = self.reader.garbage_bytes + self._splitter.skipped_bytes
        new, self._counted_garbage = total - self._counted_garbage, total
        return new

    @property
    def unread_garbage(self) -> int:
        """Bytes of garbage since the last line of the probe, overlong lines included, an incomplete line excluded."""
        return self.garbage_since_line + self._splitter.skipped_bytes - self._skipped_at_line

    def renew_lease(self, now: float) -> None:
        """Write a line to the probe, without which it exits by itself. Skipped during a key exchange: the next one is
        early enough."""
        if self.channel.closed or not self.connection.transport.clear_to_send.is_set():
            return
        self.lease_seconds = now
        try:
            self.channel.send(LEASE_LINE)
        except (OSError, EOFError, paramiko.SSHException):
            self.ended = True

    def describe_end(self) -> str:
        """How it ended: exit status and last line of stderr, where there are any."""
        stderr = self._stderr_tail.decode("utf-8", "replace").strip().splitlines()
        last_line = f': "{stderr[-1][:200]}"' if stderr else ""
        if self.channel.exit_status_ready() and self.channel.exit_status >= 0:
            return f"the probe ended with exit status {self.channel.exit_status}{last_line}"
        error = self.connection.transport.saved_exception
        cause = f" ({error_text(error)})" if error is not None and not isinstance(error, EOFError) else ""
        return f"the node closed the connection{cause}{last_line}"

    def close(self, on_end: Callable[[bool], None] | None = None) -> None:
        """End the probe, then the connection, within CLOSE_TIMEOUT_REAL_SECONDS.

        `on_end(True)`: the node confirmed that the probe has ended.
        """
        with self._closing:  # the fleet and `stop` may both close a stream
            if self._closed:
                return
            self._closed = True
        gone = self.ended_by_peer
        if not gone and self.connection.transport.is_active():
            try:
                self.channel.shutdown_write()  # the end of its stdin makes the probe exit
                self.channel.status_event.wait(CLOSE_TIMEOUT_REAL_SECONDS)
                gone = self.channel.exit_status_ready() and self.channel.exit_status != -1
            except (OSError, EOFError, paramiko.SSHException):
                pass
        self.connection.close()
        if on_end is not None:
            on_end(gone)


def start_probe(node: str, request: ProbeRequest, connection: SshConnection, attempt: LoginAttempt) -> ProbeStream:
    """Start the probe on a new channel. Raises ConnectionFailure; closing the connection is then up to the caller."""
    transport = connection.transport
    attempt.enter("opening a session")
    try:
        channel = transport.open_session(timeout=attempt.real_timeout_seconds)
    except paramiko.ChannelException as error:
        raise unreachable(
            f"logged in, but the node refused a session: {error.text}",
            "check MaxSessions in sshd_config and the number of processes on the node",
            UnreachableCause.SESSION,
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise unreachable(f"logged in, but could not open a session: {error_text(error)}") from None
    attempt.enter("starting the probe")
    try:
        channel.settimeout(attempt.real_timeout_seconds)
        channel.exec_command(probe_command(request))
        channel.sendall(probe_payload(request))
        channel.settimeout(0.0)
    except TimeoutError:
        raise unreachable(
            "logged in, but the node did not accept the probe program in time", cause=UnreachableCause.SESSION
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise unreachable(f"logged in, but could not start the probe: {error_text(error)}") from None
    return ProbeStream(node, request, connection, channel, attempt.clock.monotonic())
