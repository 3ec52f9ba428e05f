"""What a node prints: frames of one JSON line and as many bytes as it says. Whatever else comes is no frame. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

HEAD_BYTES: Final = 64 * 1024
EXCERPT_BYTES: Final = 80


@dataclass(frozen=True, slots=True)
class Frame:
    head: dict[str, Any]
    data: bytes = b""


@dataclass(slots=True)
class FrameReader:
    """Fed with bytes as they come. `garbage` is the start of what could not be read; nothing after it is believed,
    but before the first frame lines are passed over: a login shell may greet."""

    most_bytes: int  # of one frame
    ended: bool = False
    garbage: bytes = b""
    _pending: bytearray = field(default_factory=bytearray)
    _began: bool = False

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        if self.ended:
            return
        self._pending += chunk
        while (frame := self._next()) is not None:
            if "end" in frame.head:
                self.ended = True
                return
            yield frame

    def _next(self) -> Frame | None:
        while not self.ended:
            line, newline, _ = self._pending.partition(b"\n")
            if not newline:
                if len(self._pending) > HEAD_BYTES:
                    self._give_up(bytes(self._pending))
                return None
            head = _head(bytes(line))
            if head is None or head["bytes"] > self.most_bytes:
                self.garbage = self.garbage or bytes(line[:EXCERPT_BYTES])
                if self._began:
                    self._give_up(bytes(line))
                    return None
                del self._pending[: len(line) + 1]
                continue
            ends = len(line) + 1 + head["bytes"]
            if len(self._pending) < ends:
                return None
            data = bytes(self._pending[len(line) + 1 : ends])
            del self._pending[:ends]
            if not self._began:
                self._began, self.garbage = True, b""
            return Frame(head, data)
        return None

    def _give_up(self, seen: bytes) -> None:
        self.garbage = seen[:EXCERPT_BYTES]
        self.ended = True
        self._pending.clear()

    @property
    def complete(self) -> bool:
        """The node said that it is done."""
        return self.ended and not self.garbage

    @property
    def torn(self) -> int:
        """Bytes of a frame that did not come to its end."""
        return len(self._pending)


def _head(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(head, dict) or type(head.get("bytes")) is not int or head["bytes"] < 0:
        return None
    return head
