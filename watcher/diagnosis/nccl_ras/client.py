"""A session with NCCL's RAS over any byte channel: bytes as they came, and what was wrong. Does not read them.

RAS listens on each node (127.0.0.1:28028 unless NCCL_RAS_ADDR says otherwise), speaks lines, and closes after the
report. It belongs to the training process: it may be old, stuck, or not RAS at all, so everything has a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.config.settings import NCCL_RAS_PORT

DEADLINE_SECONDS = 15.0  # RAS takes up to twice its own timeout, 5 s by default
MAX_REPORT_BYTES = 32 * 1024 * 1024  # 1,024 ranks in 20 communicators are about 10 MB of JSON
_MAX_LINE_BYTES = 4096
_CHUNK_BYTES = 65536


class RasChannel(Protocol):
    """A connected socket, or an SSH channel that is forwarded to RAS's port."""

    def sendall(self, data: bytes, /) -> object: ...

    def recv(self, size: int, /) -> bytes: ...

    def settimeout(self, seconds: float | None, /) -> object: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class RasAnswer:
    raw: bytes  # the report as it came, without the replies to the set-up lines
    form: str  # "json" or "text"
    trouble: str | None = None  # why there is no report, or why it is not whole

    @property
    def suffix(self) -> str:
        """For the name of a file that keeps it."""
        return ".json" if self.form == "json" else ".txt"


def request_report(
    channel: RasChannel, clock: Clock, deadline_seconds: float = DEADLINE_SECONDS, byte_limit: int = MAX_REPORT_BYTES
) -> RasAnswer:
    """One report, JSON where the server knows it (NCCL 2.28.7), else text. Closes the channel.

    Never raises for what the other end does: that, and what had come by then, is in the answer. The deadline holds for
    the whole session, in seconds of `clock`.
    """
    session = _Session(channel, clock, deadline_seconds, byte_limit)
    try:
        return session.run(min(5.0, deadline_seconds / 3))
    finally:
        channel.close()


class _SessionFailed(Exception):
    """Ends the session; its text is for people."""


class _Session:
    def __init__(self, channel: RasChannel, clock: Clock, deadline_seconds: float, byte_limit: int) -> None:
        self.channel = channel
        self.clock = clock
        self.deadline_seconds = deadline_seconds
        self.ends = clock.monotonic() + deadline_seconds
        self.byte_limit = byte_limit
        self.pending = bytearray()

    def run(self, server_seconds: float) -> RasAnswer:
        form = "text"
        try:
            greeting = self.command("CLIENT PROTOCOL 2")
            if not greeting.upper().startswith("SERVER PROTOCOL"):
                raise _SessionFailed(
                    f"it answers {greeting[:60]!r}, not as NCCL RAS does: something else listens there"
                )
            self.command(f"TIMEOUT {server_seconds:g}")  # refused: RAS keeps its own, the deadline holds either way
            if self.command("SET FORMAT json").upper() == "OK":
                form = "json"
            self.send("VERBOSE STATUS")
        except _SessionFailed as trouble:
            return RasAnswer(b"", form, str(trouble))
        try:
            while self.receive():
                pass
        except _SessionFailed as trouble:
            return self.answer(form, str(trouble))
        return self.answer(form, None)

    def answer(self, form: str, trouble: str | None) -> RasAnswer:
        raw = bytes(self.pending)
        if trouble is None:
            if not raw.strip():
                trouble = "it closed the connection without a report"
            elif raw[:6].upper() == b"ERROR:":
                trouble = f"it refuses: {_decode_line(raw)}"
            elif form == "json" and not raw.rstrip().endswith(b"}"):
                trouble = f"it closed the connection within its report, after {len(raw):,} bytes"
        elif raw:
            trouble = f"{trouble}; {len(raw):,} bytes of the report had come and are kept"
        return RasAnswer(raw, form, trouble)

    def command(self, line: str) -> str:
        """One line there, one line back."""
        self.send(line)
        while b"\n" not in self.pending:
            if len(self.pending) > _MAX_LINE_BYTES:
                raise _SessionFailed(f"it answers {line!r} with {len(self.pending):,} bytes and no line: no NCCL RAS")
            if not self.receive():
                raise _SessionFailed(f"it closed the connection at {line!r}")
        reply, _, rest = self.pending.partition(b"\n")
        self.pending = rest
        return _decode_line(bytes(reply))

    def send(self, line: str) -> None:
        self.limit_wait()
        try:
            self.channel.sendall(line.encode("ascii") + b"\n")
        except TimeoutError:
            raise self.late() from None
        except (OSError, EOFError) as error:
            raise _SessionFailed(f"the connection broke: {describe_connection_error(error)}") from None

    def receive(self) -> bool:
        """Some more bytes; False at the end. The deadline is of the session: a drip of bytes does not extend it."""
        self.limit_wait()
        try:
            chunk = self.channel.recv(_CHUNK_BYTES)
        except TimeoutError:
            raise self.late() from None
        except (OSError, EOFError) as error:
            raise _SessionFailed(f"the connection broke: {describe_connection_error(error)}") from None
        room = self.byte_limit - len(self.pending)
        self.pending += chunk[:room]
        if len(chunk) > room:
            raise _SessionFailed(f"it sends more than {self.byte_limit:,} bytes")
        return bool(chunk)

    def limit_wait(self) -> None:
        left = self.ends - self.clock.monotonic()
        if left <= 0:
            raise self.late()
        self.channel.settimeout(max(0.001, self.clock.real_seconds(left)))

    def late(self) -> _SessionFailed:
        return _SessionFailed(f"it did not finish within {self.deadline_seconds:g} s")


def describe_connection_error(error: Exception) -> str:
    return str(error) or type(error).__name__


def _decode_line(raw: bytes) -> str:
    return raw[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").strip()


# Two reports some seconds apart: a hang can only be seen between two.

POLL_INTERVAL_SECONDS = 10.0  # longer than most steps; launches of a job that runs go on within it
DEFAULT_ADDRESS = f"127.0.0.1:{NCCL_RAS_PORT}"


@dataclass(frozen=True, slots=True)
class RasPollResult:
    answers: tuple[RasAnswer, ...]  # those with bytes, oldest first
    apart_seconds: float | None  # from the first answer to the second question, so at least; None: there are not two
    trouble: str | None  # in words: why there is none, or no second one, or none that is whole


def poll_twice(
    connect: Callable[[], RasChannel],
    clock: Clock,
    apart_seconds: float = POLL_INTERVAL_SECONDS,
    *,
    place: str = DEFAULT_ADDRESS,
    deadline_seconds: float = DEADLINE_SECONDS,
    byte_limit: int = MAX_REPORT_BYTES,
    stop: threading.Event | None = None,
) -> RasPollResult:
    """Ask, wait, ask again, each time on a connection of its own, as RAS closes it after a report.

    `connect` raises ConnectionRefusedError where nothing listens, PermissionError where it may not connect, another
    OSError otherwise. `stop` ends the wait early: then there is one report.
    """
    answers: list[RasAnswer] = []
    answered = asked = clock.monotonic()
    trouble: list[str] = []
    for number in (1, 2):
        if number == 2 and clock.wait(stop or threading.Event(), apart_seconds):
            trouble.append("stopped before the second report")
            break
        asked = clock.monotonic()
        answer = _request_once(connect, clock, place, deadline_seconds, byte_limit)
        if number == 1:
            answered = clock.monotonic()
        if answer.trouble:
            trouble.append(answer.trouble if number == 1 else f"second report: {answer.trouble}")
        if answer.raw:
            answers.append(answer)
        if not answer.raw and number == 1:
            break
    apart = asked - answered if len(answers) == 2 else None
    return RasPollResult(tuple(answers), apart, "; ".join(trouble) or None)


def _request_once(
    connect: Callable[[], RasChannel], clock: Clock, place: str, deadline_seconds: float, byte_limit: int
) -> RasAnswer:
    try:
        channel = connect()
    except ConnectionRefusedError:
        why = f"nothing listens on {place}: NCCL older than 2.24, or NCCL_RAS_ENABLE=0, or no NCCL job"
        return RasAnswer(b"", "text", why)
    except PermissionError as error:
        return RasAnswer(b"", "text", f"not allowed to connect to {place}: {error}")
    except (OSError, EOFError) as error:
        return RasAnswer(b"", "text", f"no connection to {place}: {describe_connection_error(error)}")
    answer = request_report(channel, clock, deadline_seconds, byte_limit)
    if answer.trouble is None:
        return answer
    return RasAnswer(answer.raw, answer.form, f"NCCL RAS on {place}: {answer.trouble}")
