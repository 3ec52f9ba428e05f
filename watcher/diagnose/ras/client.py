"""A session with NCCL's RAS over any byte channel: bytes as they came, and what was wrong. Does not read them.

RAS listens on each node (127.0.0.1:28028 unless NCCL_RAS_ADDR says otherwise), speaks lines, and closes after the
report. It belongs to the training process: it may be old, stuck, or not RAS at all, so everything has a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from collectors.clock import Clock

RAS_PORT: Final = 28028  # of 127.0.0.1, unless NCCL_RAS_ADDR says otherwise
DEADLINE_SECONDS = 15.0  # RAS takes up to twice its own timeout, 5 s by default
BYTE_LIMIT = 32 * 1024 * 1024  # 1,024 ranks in 20 communicators are about 10 MB of JSON
_LINE_LIMIT = 4096
_CHUNK = 65536


class Channel(Protocol):
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


def ask(
    channel: Channel, clock: Clock, deadline_seconds: float = DEADLINE_SECONDS, byte_limit: int = BYTE_LIMIT
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


class _Trouble(Exception):
    """Ends the session; its text is for people."""


class _Session:
    def __init__(self, channel: Channel, clock: Clock, deadline_seconds: float, byte_limit: int) -> None:
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
                raise _Trouble(f"it answers {greeting[:60]!r}, not as NCCL RAS does: something else listens there")
            self.command(f"TIMEOUT {server_seconds:g}")  # refused: RAS keeps its own, the deadline holds either way
            if self.command("SET FORMAT json").upper() == "OK":
                form = "json"
            self.send("VERBOSE STATUS")
        except _Trouble as trouble:
            return RasAnswer(b"", form, str(trouble))
        try:
            while self.receive():
                pass
        except _Trouble as trouble:
            return self.answer(form, str(trouble))
        return self.answer(form, None)

    def answer(self, form: str, trouble: str | None) -> RasAnswer:
        raw = bytes(self.pending)
        if trouble is None:
            if not raw.strip():
                trouble = "it closed the connection without a report"
            elif raw[:6].upper() == b"ERROR:":
                trouble = f"it refuses: {_words(raw)}"
            elif form == "json" and not raw.rstrip().endswith(b"}"):
                trouble = f"it closed the connection within its report, after {len(raw):,} bytes"
        elif raw:
            trouble = f"{trouble}; {len(raw):,} bytes of the report had come and are kept"
        return RasAnswer(raw, form, trouble)

    def command(self, line: str) -> str:
        """One line there, one line back."""
        self.send(line)
        while b"\n" not in self.pending:
            if len(self.pending) > _LINE_LIMIT:
                raise _Trouble(f"it answers {line!r} with {len(self.pending):,} bytes and no line: no NCCL RAS")
            if not self.receive():
                raise _Trouble(f"it closed the connection at {line!r}")
        reply, _, rest = self.pending.partition(b"\n")
        self.pending = rest
        return _words(bytes(reply))

    def send(self, line: str) -> None:
        self.limit_wait()
        try:
            self.channel.sendall(line.encode("ascii") + b"\n")
        except TimeoutError:
            raise self.late() from None
        except (OSError, EOFError) as error:
            raise _Trouble(f"the connection broke: {words_of(error)}") from None

    def receive(self) -> bool:
        """Some more bytes; False at the end. The deadline is of the session: a drip of bytes does not extend it."""
        self.limit_wait()
        try:
            chunk = self.channel.recv(_CHUNK)
        except TimeoutError:
            raise self.late() from None
        except (OSError, EOFError) as error:
            raise _Trouble(f"the connection broke: {words_of(error)}") from None
        room = self.byte_limit - len(self.pending)
        self.pending += chunk[:room]
        if len(chunk) > room:
            raise _Trouble(f"it sends more than {self.byte_limit:,} bytes")
        return bool(chunk)

    def limit_wait(self) -> None:
        left = self.ends - self.clock.monotonic()
        if left <= 0:
            raise self.late()
        self.channel.settimeout(max(0.001, self.clock.real_seconds(left)))

    def late(self) -> _Trouble:
        return _Trouble(f"it did not finish within {self.deadline_seconds:g} s")


def words_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _words(raw: bytes) -> str:
    return raw[:_LINE_LIMIT].decode("utf-8", errors="replace").strip()
