"""Bytes of a channel -> lines, in bounded memory whatever arrives."""

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
from wattwatch.collectors.ssh.model import error_text, unreachable

MAX_LINE_BYTES: Final = 64 * 1024


class LineSplitter:
    """Cuts a stream at its line ends. A line longer than the limit is skipped to its end and counted, never kept."""

    def __init__(self) -> None:
        self.skipped_bytes = 0  # of lines too long
        self._rest = b""  # a line whose end has not come
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by `data`, without their ends; empty ones are left out."""
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
        """The stream has ended: a line cut in the middle is no line."""
        self.skipped_bytes += len(self._rest)
        self._rest = b""


# One connection's stream: the probe is launched on one channel, and its bytes become lines and samples.

READ_BYTES: Final = 64 * 1024
READS_PER_TURN: Final = 4  # then the next node's turn: garbage of one must not hold up the others
STDERR_TAIL_BYTES: Final = 2000
CLOSE_TIMEOUT_REAL_SECONDS: Final = 2.0
EXCERPT_BYTES: Final = 40


class ReadyStreams:
    """Streams with something to read, and the event that says so: filled by transports, emptied by the fleet."""

    def __init__(self) -> None:
        self.streams: deque[ProbeStream] = deque()
        self.wake = threading.Event()


class ArrivalEvent(threading.Event):
    """What paramiko sets when bytes arrive or a channel ends: instead of `Channel.fileno`, which costs a pipe, two
    system calls a line and a selector."""

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
        pass


class ProbeStream:
    """A running probe. All but `close` is called by the fleet's thread."""

    def __init__(
        self, node: str, request: ProbeRequest, connection: SshConnection, channel: paramiko.Channel, now: float
    ) -> None:
        self.node = node
        self.connection = connection
        self.channel = channel
        self.reader = ProbeReader(node, request)
        self.opened_seconds = now
        self.lease_seconds = now  # when the lease was renewed last
        self.last_line_seconds: float | None = None
        self.first_line_seconds: float | None = None
        self.last_sample: NodeSample | None = None
        self.lines = 0
        self.took_over = False  # from another stream, whose last round it may repeat
        self.ended = False  # nothing more will come
        self.ended_by_peer = False  # so the probe there has ended too
        self.garbage_since_line = 0
        self.excerpt = b""  # of the garbage
        self._splitter = LineSplitter()
        self._complaint = b""
        self._counted_garbage = 0
        self._skipped_at_line = 0
        self._closing = threading.Lock()
        self._closed = False

    def watch(self, ready: ReadyStreams) -> None:
        self.arrival = ArrivalEvent(self, ready)
        self.channel.in_stderr_buffer.set_event(self.arrival)
        self.channel.in_buffer.set_event(self.arrival)

    def read(self) -> list[bytes]:
        """Lines that have arrived. Sets `ended` at the end of the stream; asks for another turn if there is more."""
        self.arrival.pending = False  # before reading: what arrives from here on asks again
        lines: list[bytes] = []
        try:
            for _ in range(READS_PER_TURN):
                if not self.channel.recv_ready():
                    break
                lines += self._splitter.feed(self.channel.recv(READ_BYTES))
            if self.channel.recv_stderr_ready():
                self._complaint = (self._complaint + self.channel.recv_stderr(READ_BYTES))[-STDERR_TAIL_BYTES:]
        except (OSError, EOFError, paramiko.SSHException):  # it ended while the window was renewed
            self.ended = True
        if self.channel.recv_ready():
            self.arrival.set()
        else:
            self.look_for_end()
        return lines

    def look_for_end(self) -> None:
        """The exit status follows the end of the output: the channel's own end is waited for."""
        if self.channel.closed or not self.connection.transport.is_active():
            self.ended = self.ended_by_peer = True
            self._splitter.cut()

    def sample_of(self, line: bytes, now: float) -> NodeSample | None:
        """The line's sample, with the books kept; None for what is no line of ours."""
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
        """Bytes that were no line of ours, since last asked."""
        total = self.reader.garbage_bytes + self._splitter.skipped_bytes
        new, self._counted_garbage = total - self._counted_garbage, total
        return new

    @property
    def unread_garbage(self) -> int:
        """Bytes since the last line of ours, those of lines too long included. Half a line is none yet."""
        return self.garbage_since_line + self._splitter.skipped_bytes - self._skipped_at_line

    def renew_lease(self, now: float) -> None:
        """Tell the probe that somebody listens. Skipped while keys are exchanged: the next one is in time."""
        if self.channel.closed or not self.connection.transport.clear_to_send.is_set():
            return
        self.lease_seconds = now
        try:
            self.channel.send(LEASE_LINE)
        except (OSError, EOFError, paramiko.SSHException):
            self.ended = True

    def last_words(self) -> str:
        """How it ended: exit status and the last line of stderr where there are any."""
        complaint = self._complaint.decode("utf-8", "replace").strip().splitlines()
        said = f': "{complaint[-1][:200]}"' if complaint else ""
        if self.channel.exit_status_ready() and self.channel.exit_status >= 0:
            return f"the probe ended with exit status {self.channel.exit_status}{said}"
        error = self.connection.transport.saved_exception
        cause = f" ({error_text(error)})" if error is not None and not isinstance(error, EOFError) else ""
        return f"the node closed the connection{cause}{said}"

    def close(self, on_end: Callable[[bool], None] | None = None) -> None:
        """End the probe, then the connection, in FAREWELL_REAL_SECONDS. `on_end(True)`: the probe was seen to end."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        gone = self.ended_by_peer
        if not gone and self.connection.transport.is_active():
            try:
                self.channel.shutdown_write()  # the end of its stdin: it ends, and says so
                self.channel.status_event.wait(CLOSE_TIMEOUT_REAL_SECONDS)
                gone = self.channel.exit_status_ready() and self.channel.exit_status != -1
            except (OSError, EOFError, paramiko.SSHException):
                pass
        self.connection.close()
        if on_end is not None:
            on_end(gone)


def start_probe(node: str, request: ProbeRequest, connection: SshConnection, attempt: LoginAttempt) -> ProbeStream:
    """Launch the probe. Raises Refusal; the connection stays the caller's to close."""
    transport = connection.transport
    attempt.enter("opening a session")
    try:
        channel = transport.open_session(timeout=attempt.real_timeout_seconds)
    except paramiko.ChannelException as error:
        raise unreachable(
            f"logged in, and refused a session: {error.text}", "MaxSessions of its sshd, or too many processes"
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise unreachable(f"logged in, and got no session: {error_text(error)}") from None
    attempt.enter("starting the probe")
    try:
        channel.settimeout(attempt.real_timeout_seconds)
        channel.exec_command(probe_command(request))
        channel.sendall(probe_payload(request))
        channel.settimeout(0.0)
    except TimeoutError:
        raise unreachable("logged in, and the node did not take the probe in time") from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise unreachable(f"logged in, and could not start the probe: {error_text(error)}") from None
    return ProbeStream(node, request, connection, channel, attempt.clock.monotonic())
