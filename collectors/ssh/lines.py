"""Bytes of a channel -> lines, in bounded memory whatever arrives."""

from __future__ import annotations

from typing import Final

LONGEST_LINE_BYTES: Final = 64 * 1024


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
        if len(self._rest) > LONGEST_LINE_BYTES:
            self.skipped_bytes += len(self._rest)
            self._rest, self._skipping = b"", True
        whole = []
        for line in lines:
            if len(line) > LONGEST_LINE_BYTES:
                self.skipped_bytes += len(line)
            elif line:
                whole.append(line)
        return whole

    def cut(self) -> None:
        """The stream has ended: a line cut in the middle is no line."""
        self.skipped_bytes += len(self._rest)
        self._rest = b""
