"""A process with a deadline: whatever it waits for, a hung mount or a hung driver, the gate does not wait with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

IMPORT_ROOT: Final = str(Path(__file__).parents[3])
SEND_SECONDS: Final = 1.0
PROBE_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from wattwatch.trainer.gate.probe import main; main()"
)


class ChildProcess:
    """Lines of one process. It is killed at the end, and left alone if it cannot even be killed (state D)."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._buffer = b""
        self.ended = False

    def send(self, message: dict[str, Any], until: float) -> None:
        """Writes one line; what the child has not taken by `until` is dropped: it hangs, and its answer will tell."""
        assert self._process.stdin is not None
        handle = self._process.stdin.fileno()
        os.set_blocking(handle, False)
        poll = select.poll()
        poll.register(handle, select.POLLOUT)
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data and poll.poll(max(0.0, until - time.monotonic()) * 1000):
                data = data[os.write(handle, data) :]

    def line(self, until: float) -> str | None:
        """The next line, by time.monotonic() `until`; None where none came in time or none will come (`ended`)."""
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while b"\n" not in self._buffer and not self.ended:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            data = os.read(handle, 65536)
            self._buffer += data
            self.ended = not data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace") if line or not self.ended else None

    def lines(self, until: float) -> list[str]:
        """All lines to the end, or to the deadline: `ended` tells which."""
        found = []
        while (line := self.line(until)) is not None:
            found.append(line)
        return found

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.5)
        return None

    def close(self, patience_seconds: float = 0.0) -> None:
        """Ends standard input, waits a little for an end in peace, kills."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_seconds)
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.stdout.close()


def start_path_probe(request: dict[str, Any]) -> ChildProcess:
    """A child of probe.py at work on `request`; isolated, without site-packages: it starts in milliseconds."""
    child = ChildProcess([sys.executable, "-I", "-S", "-c", PROBE_PROGRAM, IMPORT_ROOT])
    child.send(request, time.monotonic() + SEND_SECONDS)
    return child
