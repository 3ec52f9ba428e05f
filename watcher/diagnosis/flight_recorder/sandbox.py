"""Reads flight records in a process of their own, so that a hostile one costs nothing but itself."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import orjson

from wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker import ANSWER_HEADER, REQUEST_HEADER

MEMORY_BYTES: Final = 2**30  # of address space, for one child
CPU_SECONDS: Final = 2  # a file, and more for a large one: a thousand hostile ones shall not take hours
WALL_SECONDS: Final = 60.0  # a file, on a busy machine
IMPORT_ROOT: Final = Path(__file__).parents[4]  # holds the package `wattwatch`
WORKER_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop()); from wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker import main; main()"


class SandboxedReader:
    """One child at a time, started when there is something to read and again after one that died."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, processor_seconds: int = CPU_SECONDS) -> None:
        self._limits = (str(memory_bytes), str(processor_seconds))
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        with suppress(OSError):
            child.communicate()

    def read(self, data: bytes, longest_answer: int, keep: int) -> dict[str, Any]:
        """A table, or {"why", "incomplete"}. Takes as long as the limits let it."""
        try:
            child = self._child = self._child or self._start()
        except OSError as error:
            return {"why": f"no process could be started to read it: {error.strerror}", "incomplete": True}
        assert child.stdin is not None
        assert child.stdout is not None
        deadline = time.monotonic() + WALL_SECONDS
        try:
            _send(child.stdin.fileno(), REQUEST_HEADER.pack(len(data), longest_answer, keep), deadline)
            _send(child.stdin.fileno(), data, deadline)
            size = ANSWER_HEADER.unpack(_receive(child.stdout.fileno(), ANSWER_HEADER.size, deadline))[0]
            if size > longest_answer:
                raise EOFError
            table = orjson.loads(_receive(child.stdout.fileno(), size, deadline))
        except (OSError, EOFError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0 if isinstance(error, TimeoutError) else 5)  # for the code that it ends with
            self.close()
            return {"why": _describe_exit(child, error), "incomplete": False}
        if "why" in table:
            self.close()  # what it read may still fill its memory
        return dict(table)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", WORKER_PROGRAM, *self._limits, str(IMPORT_ROOT)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, cwd="/", env={}, bufsize=0)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child


def _wait_until_ready(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _send(to: int, data: bytes, deadline: float) -> None:
    left = memoryview(data)
    while left:
        _wait_until_ready(to, select.POLLOUT, deadline)
        left = left[os.write(to, left) :]


def _receive(source: int, size: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        _wait_until_ready(source, select.POLLIN, deadline)
        part = os.read(source, min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _describe_exit(child: subprocess.Popen[bytes], error: Exception) -> str:
    if isinstance(error, TimeoutError):
        end = f"did not end in {WALL_SECONDS:.0f} s"
    elif child.returncode is not None and child.returncode < 0:
        end = f"was ended by signal {-child.returncode}: it took too much time or memory"
    else:
        end = f"ended with code {child.returncode}"
    return f"the process that read it {end}; it is damaged or hostile"
