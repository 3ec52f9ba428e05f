"""A log that another process writes, line by line as it grows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\):|Exception raised from |frame #\d+: ")
LOG_LINE: Final = re.compile(r"\brank=\d+ ")  # as `wattwatch-train run` begins its lines


class FollowedFile:
    """The file may come later, or never."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._rest = b""

    def lines(self, end: bool = False) -> list[str]:
        """Whole lines since the last call; at the `end` what stands without a line end too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            data = b""
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if end and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


class ForPeople:
    """What of a log belongs on a screen: a traceback ends where the rank's own next line begins."""

    def __init__(self) -> None:
        self._inside = False
        self.hidden = 0  # lines

    def shown(self, line: str) -> bool:
        if TRACEBACK.search(line):
            self._inside = True
        elif LOG_LINE.search(line):
            self._inside = False
        self.hidden += self._inside
        return not self._inside
