"""A client for NCCL RAS over any byte channel: returns the bytes as received, and what went wrong. Does not parse them.

RAS listens on each node of the job (127.0.0.1:28028 unless NCCL_RAS_ADDR says otherwise), uses a line-based protocol,
and closes the connection after the report. The server is part of the training process: it may be old, stuck, or not RAS
at all, so the whole session has a deadline and a size limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.common.formatting import format_count

DEADLINE_SECONDS: Final = 15.0  # RAS takes up to twice its own timeout, which is 5 s by default
MAX_REPORT_BYTES: Final = 32 * 1024 * 1024  # 1,024 ranks in 20 communicators are about 10 MB of JSON
POLL_INTERVAL_SECONDS: Final = 10.0  # longer than most steps: a running job launches operations within it; chosen
_MAX_LINE_BYTES: Final = 4096
_CHUNK_BYTES: Final = 65536


class RasChannel(Protocol):
    """A connected socket, or an SSH channel that is forwarded to the RAS port."""

    def sendall(self, data: bytes, /) -> object: ...

    def recv(self, size: int, /) -> bytes: ...

    def settimeout(self, seconds: float | None, /) -> object: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class RasAnswer:
    """What one session gave."""

    raw: bytes  # the report as received, without the replies to the setup commands
    report_format: str  # "json" or "text"
    problem: str | None = None  # why there is no report, or why it is incomplete

    @property
    def suffix(self) -> str:
        """For the name of a file that stores it."""
        return ".json" if self.report_format == "json" else ".txt"


@dataclass(frozen=True, slots=True)
class RasPollResult:
    """What `poll_twice` gave."""

    answers: tuple[RasAnswer, ...]  # those with bytes, oldest first
    # From the first answer to the second request, so at least this long lies between the reports. None: there are not
    # two.
    interval_seconds: float | None
    problem: str | None  # why there is no report, no second one, or none that is complete


def poll_twice(
    connect: Callable[[], RasChannel],
    clock: Clock,
    interval_seconds: float = POLL_INTERVAL_SECONDS,
    *,
    address: str,
    deadline_seconds: float = DEADLINE_SECONDS,
    max_bytes: int = MAX_REPORT_BYTES,
    stop: threading.Event | None = None,
) -> RasPollResult:
    """Request a report, wait, and request another one: a hang is only visible between two.

    `connect` opens a connection, a new one for each report because RAS closes it after a report. It raises
    ConnectionRefusedError if nothing listens, PermissionError if it is not allowed to connect, or another OSError.
    `address` is only for messages. `stop` ends the wait early; then there is one report.
    """
    answers: list[RasAnswer] = []
    answered = requested = clock.monotonic()
    problems: list[str] = []
    for number in (1, 2):
        if number == 2 and clock.wait(stop or threading.Event(), interval_seconds):
            problems.append("polling was stopped before the second report")
            break
        requested = clock.monotonic()
        answer = _request_once(connect, clock, address, deadline_seconds, max_bytes)
        if number == 1:
            answered = clock.monotonic()
        if answer.problem:
            problems.append(answer.problem if number == 1 else f"second report: {answer.problem}")
        if answer.raw:
            answers.append(answer)
        if not answer.raw and number == 1:
            break  # nothing answers: waiting for a second report would only delay the capture
    interval = requested - answered if len(answers) == 2 else None
    return RasPollResult(tuple(answers), interval, "; ".join(problems) or None)


def _request_once(
    connect: Callable[[], RasChannel], clock: Clock, address: str, deadline_seconds: float, max_bytes: int
) -> RasAnswer:
    try:
        channel = connect()
    except ConnectionRefusedError:
        causes = "NCCL is older than 2.24, NCCL_RAS_ENABLE=0 is set, or no NCCL job is running"
        return RasAnswer(b"", "text", f"nothing listens on {address}: {causes}")
    except PermissionError as error:
        return RasAnswer(b"", "text", f"not allowed to connect to {address}: {error}")
    except (OSError, EOFError) as error:
        return RasAnswer(b"", "text", f"cannot connect to {address}: {describe_connection_error(error)}")
    answer = request_report(channel, clock, deadline_seconds, max_bytes)
    if answer.problem is None:
        return answer
    return RasAnswer(answer.raw, answer.report_format, f"NCCL RAS on {address}: {answer.problem}")


def request_report(
    channel: RasChannel,
    clock: Clock,
    deadline_seconds: float = DEADLINE_SECONDS,
    max_bytes: int = MAX_REPORT_BYTES,
) -> RasAnswer:
    """One report: JSON if the server supports it (NCCL 2.28.7), otherwise text. Closes the channel.

    Raises nothing for what the other end does; the answer says what went wrong and contains what was received until
    then. The deadline covers the whole session, in seconds of `clock`.
    """
    session = _Session(channel, clock, deadline_seconds, max_bytes)
    try:
        # RAS waits for its peers twice, so a third of the deadline leaves time for the transfer.
        return session.run(min(5.0, deadline_seconds / 3))
    finally:
        channel.close()


class _SessionFailed(Exception):
    """Ends the session; its text is for people."""


class _Session:
    def __init__(self, channel: RasChannel, clock: Clock, deadline_seconds: float, max_bytes: int) -> None:
        self.channel = channel
        self.clock = clock
        self.deadline_seconds = deadline_seconds
        self.ends = clock.monotonic() + deadline_seconds
        self.max_bytes = max_bytes
        self.received = bytearray()

    def run(self, server_seconds: float) -> RasAnswer:
        """`server_seconds`: how long RAS may wait for its peers, well within our deadline."""
        report_format = "text"
        try:
            greeting = self.command("CLIENT PROTOCOL 2")
            if not greeting.upper().startswith("SERVER PROTOCOL"):
                raise _SessionFailed(
                    f"the answer {greeting[:60]!r} is not from NCCL RAS: another service listens on this port"
                )
            # If the server rejects the timeout, it keeps its own. The deadline of the session holds in both cases.
            self.command(f"TIMEOUT {server_seconds:g}")
            if self.command("SET FORMAT json").upper() == "OK":
                report_format = "json"
            self.send("VERBOSE STATUS")
        except _SessionFailed as failure:
            return RasAnswer(b"", report_format, str(failure))
        try:
            while self.receive():
                pass
        except _SessionFailed as failure:
            return self.answer(report_format, str(failure))
        return self.answer(report_format, None)

    def answer(self, report_format: str, problem: str | None) -> RasAnswer:
        raw = bytes(self.received)
        if problem is None:
            if not raw.strip():
                problem = "the server closed the connection without a report"
            elif raw[:6].upper() == b"ERROR:":
                problem = f"the server rejected the request: {_decode_line(raw)}"
            elif report_format == "json" and not raw.rstrip().endswith(b"}"):
                after = format_count(len(raw), "byte")
                problem = f"the server closed the connection in the middle of its report, after {after}"
        elif raw:
            verb = "is" if len(raw) == 1 else "are"
            problem = f"{problem}; the {format_count(len(raw), 'byte')} received before that {verb} kept"
        return RasAnswer(raw, report_format, problem)

    def command(self, line: str) -> str:
        """Send one line and return the line that answers it."""
        self.send(line)
        while b"\n" not in self.received:
            if len(self.received) > _MAX_LINE_BYTES:
                raise _SessionFailed(
                    f"the server answered {line!r} with {format_count(len(self.received), 'byte')} and no line "
                    "break: it is probably "
                    "not NCCL RAS"
                )
            if not self.receive():
                raise _SessionFailed(f"the server closed the connection after the command {line!r}")
        reply, _, rest = self.received.partition(b"\n")
        self.received = rest
        return _decode_line(bytes(reply))

    def send(self, line: str) -> None:
        self.limit_wait()
        try:
            self.channel.sendall(line.encode("ascii") + b"\n")
        except TimeoutError:
            raise self.deadline_exceeded() from None
        except (OSError, EOFError) as error:
            raise _SessionFailed(f"the connection failed: {describe_connection_error(error)}") from None

    def receive(self) -> bool:
        """Receive some bytes; False at the end of the connection."""
        self.limit_wait()
        try:
            chunk = self.channel.recv(_CHUNK_BYTES)
        except TimeoutError:
            raise self.deadline_exceeded() from None
        except (OSError, EOFError) as error:
            raise _SessionFailed(f"the connection failed: {describe_connection_error(error)}") from None
        left = self.max_bytes - len(self.received)
        self.received += chunk[:left]
        if len(chunk) > left:
            raise _SessionFailed(f"the server sent more than {format_count(self.max_bytes, 'byte')}")
        return bool(chunk)

    def limit_wait(self) -> None:
        """Set the channel's timeout to what is left, so that a server that drips bytes cannot extend the deadline."""
        left = self.ends - self.clock.monotonic()
        if left <= 0:
            raise self.deadline_exceeded()
        self.channel.settimeout(max(0.001, self.clock.real_seconds(left)))

    def deadline_exceeded(self) -> _SessionFailed:
        return _SessionFailed(f"the server did not finish within {self.deadline_seconds:g} s")


def describe_connection_error(error: Exception) -> str:
    """Its text, or the name of its class if it has none."""
    return str(error) or type(error).__name__


def _decode_line(raw: bytes) -> str:
    return raw[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").strip()
