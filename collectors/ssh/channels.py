"""Other business on the connection that the fleet holds to a node: a command with bytes for it, or a port there.

For any thread but the fleet's. Each use is a channel of its own beside the probe's, so it waits and fails for itself:
- It never waits on the fleet, nor lets the fleet wait: what it writes (MOST_WRITTEN_BYTES) fits into the socket's
  buffer, so that no lock of the transport is held while a frozen node takes nothing. A node whose lines have stopped is
  not written to at all.
- What it reads is bounded by the channel's window: a command that floods is stopped by flow control.
- It closes its channel and nothing else. Where the connection is lost or renewed meanwhile, what had come is kept.

Deadlines are in seconds of the machine's clock: what runs on a node takes its time, whatever clock the watcher has.
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
STATUS_SECONDS: Final = 1.0  # from the end of the output to the exit status
PROHIBITED: Final = 1  # RFC 4254, 5.1: why a channel is not opened
CONNECT_FAILED: Final = 2
ONE_SESSION: Final = "its sshd grants no session beside the probe's: MaxSessions 1 there, or too many processes"
NO_FORWARDING: Final = (
    "its sshd does not let our key connect there: it needs port-forwarding and "
    'permitopen="127.0.0.1:{port}" in authorized_keys, and AllowTcpForwarding in its configuration'
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `trouble`: a sentence where its output may not be all; None where it is."""

    exit_status: int | None
    stderr_tail: str = ""  # the end of its stderr
    trouble: str | None = None


class NodeChannels:
    """Access to one node for as long as the fleet is connected to it."""

    def __init__(self, node: str, transport: Callable[[], paramiko.Transport | str]) -> None:
        """`transport` gives that of the connection, or a sentence why there is none to use now."""
        self.node = node
        self._transport = transport

    def run(
        self, command: str, stdin: bytes, take: Callable[[bytes], None], *, deadline_seconds: float, byte_limit: int
    ) -> CommandResult:
        """Execute `command`, write `stdin` and close it, and give its output to `take` as it comes.

        Never raises for what the node does. The deadline covers all of it.
        """
        if len(stdin) > MAX_STDIN_BYTES:
            raise ValueError(f"{len(stdin):,} bytes: at most {MAX_STDIN_BYTES:,} are sure not to wait")
        transport = self._transport()
        if isinstance(transport, str):
            return CommandResult(None, trouble=transport)
        try:
            channel = transport.open_session(timeout=deadline_seconds)
        except paramiko.ChannelException:
            return CommandResult(None, trouble=ONE_SESSION)
        except (paramiko.SSHException, EOFError, OSError) as error:
            return CommandResult(None, trouble=f"no session on its connection: {error_text(error)}")
        stderr_tail, trouble = b"", None
        with _closed_after(channel, deadline_seconds) as late:
            try:
                channel.exec_command(command)  # waits without limit: closing the channel ends it
                _send(channel, stdin)
                trouble = _read(channel, take, byte_limit)
                if trouble is None:
                    channel.status_event.wait(STATUS_SECONDS)
                if channel.recv_stderr_ready():
                    stderr_tail = channel.recv_stderr(READ_BYTES)[-STDERR_TAIL_BYTES:]
            except (paramiko.SSHException, EOFError, OSError) as error:
                trouble = f"its connection failed: {error_text(error)}"
            status = channel.exit_status if channel.exit_status >= 0 else None
            if late.is_set():
                trouble = f"not done within {deadline_seconds:g} s"
            elif trouble is None and status is None:
                trouble = "its connection was lost before the end"
        return CommandResult(status, stderr_tail.decode("utf-8", "replace").strip(), trouble)

    def connect(self, port: int, deadline_seconds: float) -> paramiko.Channel:
        """A connection to 127.0.0.1:`port` of the node, to be used and closed like a socket.

        Raises PermissionError where sshd does not forward, ConnectionRefusedError where nothing listens, another
        OSError otherwise; each with a sentence.
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
            raise ConnectionError(f"its sshd does not connect to 127.0.0.1:{port}: {error.text}") from None
        except (paramiko.SSHException, EOFError) as error:
            raise ConnectionError(f"no channel to 127.0.0.1:{port}: {error_text(error)}") from None


def _send(channel: paramiko.Channel, stdin: bytes) -> None:
    """Raises OSError, but not where the command ended before it took its input: its exit status tells more then."""
    try:
        channel.sendall(stdin)
        channel.shutdown_write()
    except OSError:
        if channel.exit_status < 0:
            raise


def _read(channel: paramiko.Channel, take: Callable[[bytes], None], byte_limit: int) -> str | None:
    """To the end of the output; a sentence if there is more of it than is wanted."""
    left = byte_limit
    while chunk := channel.recv(READ_BYTES):
        if len(chunk) > left:
            take(chunk[:left])
            return f"it sends more than {byte_limit:,} bytes"
        take(chunk)
        left -= len(chunk)
    return None


@contextlib.contextmanager
def _closed_after(channel: paramiko.Channel, seconds: float) -> Iterator[threading.Event]:
    """Closed at the end of the block, or at the deadline, whatever waits in it then; the event says that it came."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _close(channel)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        _close(channel)


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
        channel.close()
