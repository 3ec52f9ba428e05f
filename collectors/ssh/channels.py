"""More channels on the fleet's connection to a node: run a command there, or connect to a port there.

For every thread but the fleet's. Each use has its own channel beside the probe's, so it blocks and fails alone:
- It never waits for the fleet and never makes the fleet wait. What it writes (at most MAX_STDIN_BYTES) fits into the
  socket's buffer, so no lock of the transport is held while a frozen node reads nothing. A node whose lines have
  stopped is not written to at all.
- What it reads is bounded by the channel's window: a command that floods us is stopped by flow control.
- It closes only its own channel. If the connection is lost or renewed in the meantime, the output so far is kept.

Deadlines are real seconds of this machine, also where the watcher's clock runs faster (simulated clusters): a command
on a node takes the time that it takes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import paramiko

from wattwatch.collectors.ssh.model import error_text

MAX_STDIN_BYTES: Final = 32 * 1024
READ_BYTES: Final = 64 * 1024
STDERR_TAIL_BYTES: Final = 300
STATUS_SECONDS: Final = 1.0  # how long the exit status may arrive after the end of the output
PROHIBITED: Final = 1  # reasons of RFC 4254, section 5.1, for not opening a channel
CONNECT_FAILED: Final = 2
ONE_SESSION: Final = (
    "the probe uses one session, and sshd on the node does not allow a second one: MaxSessions may be 1, or too many "
    "processes may be running on the node"
)
NO_FORWARDING: Final = (
    "sshd on the node does not allow the login key to forward to port {port}: the key needs port-forwarding and "
    'permitopen="127.0.0.1:{port}" in authorized_keys, and sshd_config must set AllowTcpForwarding to yes or local'
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `error`: a sentence where its output may be incomplete; None where it is complete."""

    exit_status: int | None
    stderr_tail: str = ""
    error: str | None = None


class NodeChannels:
    """Access to one node while the fleet is connected to it."""

    def __init__(self, node: str, transport: Callable[[], paramiko.Transport | str]) -> None:
        """`transport` returns that of the connection, or a sentence why none can be used now."""
        self.node = node
        self._transport = transport

    def run(
        self,
        command: str,
        stdin: bytes,
        on_output: Callable[[bytes], None],
        *,
        deadline_seconds: float,
        byte_limit: int,
    ) -> CommandResult:
        """Run `command`, write `stdin` and close it, and pass the output to `on_output` as it arrives.

        Never raises for what the node does. The deadline covers all of it. Raises ValueError where `stdin` is longer
        than MAX_STDIN_BYTES.
        """
        if len(stdin) > MAX_STDIN_BYTES:
            raise ValueError(
                f"stdin has {len(stdin):,} bytes, but only {MAX_STDIN_BYTES:,} bytes can be written without blocking"
            )
        transport = self._transport()
        if isinstance(transport, str):
            return CommandResult(None, error=transport)
        try:
            channel = transport.open_session(timeout=deadline_seconds)
        except paramiko.ChannelException:
            return CommandResult(None, error=ONE_SESSION)
        except (paramiko.SSHException, EOFError, OSError) as failure:
            return CommandResult(None, error=f"cannot open another session on the node: {error_text(failure)}")
        stderr_tail, error = b"", None
        # paramiko has no deadline for exec_command or for a slow reader: closing the channel from a timer unblocks all.
        with _closed_after(channel, deadline_seconds) as expired:
            try:
                channel.exec_command(command)  # blocks without limit: closing the channel ends it
                _send(channel, stdin)
                error = _read(channel, on_output, byte_limit)
                if error is None:
                    channel.status_event.wait(STATUS_SECONDS)
                # Only stderr that has arrived: a command may keep stderr open in a background process.
                if channel.recv_stderr_ready():
                    stderr_tail = channel.recv_stderr(READ_BYTES)[-STDERR_TAIL_BYTES:]
            except (paramiko.SSHException, EOFError, OSError) as failure:
                error = f"the connection to the node failed: {error_text(failure)}"
            status = channel.exit_status if channel.exit_status >= 0 else None
            if expired.is_set():
                error = f"the command did not finish within {deadline_seconds:g} s"
            elif error is None and status is None:
                error = "the connection to the node was lost before the command ended"
        return CommandResult(status, stderr_tail.decode("utf-8", "replace").strip(), error)

    def connect(self, port: int, deadline_seconds: float) -> paramiko.Channel:
        """A connection to 127.0.0.1:`port` on the node, used and closed like a socket.

        Raises PermissionError where sshd does not allow forwarding, ConnectionRefusedError where nothing listens on
        the port, another OSError otherwise; each with a sentence.
        """
        transport = self._transport()
        if isinstance(transport, str):
            raise ConnectionError(transport)
        try:
            return transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=deadline_seconds
            )
        except paramiko.ChannelException as error:
            if error.code == PROHIBITED:
                raise PermissionError(NO_FORWARDING.format(port=port)) from None
            if error.code == CONNECT_FAILED:
                raise ConnectionRefusedError(f"nothing listens on 127.0.0.1:{port}") from None
            raise ConnectionError(f"sshd on the node cannot connect to 127.0.0.1:{port}: {error.text}") from None
        except (paramiko.SSHException, EOFError) as error:
            raise ConnectionError(
                f"cannot open an SSH channel to 127.0.0.1:{port} on the node: {error_text(error)}"
            ) from None


def _send(channel: paramiko.Channel, stdin: bytes) -> None:
    """Raises OSError, but not if the command exited before it read its input: then its exit status says more."""
    try:
        channel.sendall(stdin)
        channel.shutdown_write()
    except OSError:
        if channel.exit_status < 0:
            raise


def _read(channel: paramiko.Channel, on_output: Callable[[bytes], None], byte_limit: int) -> str | None:
    """Read to the end of the output; a sentence if it is longer than `byte_limit`."""
    left = byte_limit
    while chunk := channel.recv(READ_BYTES):
        if len(chunk) > left:
            on_output(chunk[:left])
            return f"the command printed more than {byte_limit:,} bytes"
        on_output(chunk)
        left -= len(chunk)
    return None


@contextlib.contextmanager
def _closed_after(channel: paramiko.Channel, seconds: float) -> Iterator[threading.Event]:
    """Close the channel at the end of the block, or at the deadline, which unblocks whatever waits on it.

    The event is set if the deadline passed.
    """
    expired = threading.Event()

    def end() -> None:
        expired.set()
        _close(channel)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()
        _close(channel)


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
        channel.close()
