"""A child process with a deadline: a mount or a driver that hangs blocks the child, and the gate continues."""

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

IMPORT_ROOT: Final = str(Path(__file__).parents[3])  # the directory that contains the package `wattwatch`
SEND_SECONDS: Final = 1.0  # a request is below the pipe's 64 KiB, so this is only for a child that does not start
WAIT_AFTER_KILL_SECONDS: Final = 0.5
# The child runs isolated, so our package's directory has to be named. At the end of sys.path, so that no other package
# in site-packages can replace a module of the standard library.
PROBE_PROGRAM: Final = "import sys; sys.path.append(sys.argv[1]); from wattwatch.trainer.gate.probe import main; main()"


class ChildProcess:
    """One process, read line by line.

    It is killed on `close`, and abandoned if even that has no effect: a process in state D, waiting for a dead NFS
    server, does not react to SIGKILL.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._buffer = b""
        self.ended = False

    def send(self, message: dict[str, Any], until: float) -> None:
        """Writes one line. What the child has not read by `until` is dropped: such a child hangs."""
        assert self._process.stdin is not None
        handle = self._process.stdin.fileno()
        # A blocking write would hang together with the child once the pipe is full.
        os.set_blocking(handle, False)
        poll = select.poll()
        poll.register(handle, select.POLLOUT)
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data and poll.poll(max(0.0, until - time.monotonic()) * 1000):
                data = data[os.write(handle, data) :]

    def line(self, until: float) -> str | None:
        """The next line. None if there was none by `until` (time.monotonic()), or if there are no more (`ended`)."""
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while b"\n" not in self._buffer and not self.ended:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            data = os.read(handle, 65536)
            self._buffer += data
            self.ended = not data  # an empty read is the end of the pipe
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace") if line or not self.ended else None

    def lines(self, until: float) -> list[str]:
        """All lines up to the end of the output or to the deadline; `ended` says which of the two."""
        found = []
        while (line := self.line(until)) is not None:
            found.append(line)
        return found

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(WAIT_AFTER_KILL_SECONDS)
        return None

    def close(self, wait_seconds: float = 0.0) -> None:
        """Closes the child's standard input, waits for it to exit by itself, then kills it."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_seconds)
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_AFTER_KILL_SECONDS)
        process.stdout.close()


def start_path_probe(request: dict[str, Any]) -> ChildProcess:
    """A child that runs wattwatch.trainer.gate.probe on `request`.

    -I ignores the working directory and PYTHONPATH, so that no file there can replace our modules. -S skips
    site-packages, whose .pth files may import anything: the child starts in milliseconds.
    """
    child = ChildProcess([sys.executable, "-I", "-S", "-c", PROBE_PROGRAM, IMPORT_ROOT])
    child.send(request, time.monotonic() + SEND_SECONDS)
    return child
