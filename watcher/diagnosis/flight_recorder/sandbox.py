"""Parses flight records in a separate, restricted process, so that a hostile file can only harm that process.

This is the parent's side: it starts the worker (`sandbox_worker.py`), sends it one file at a time, and replaces it when
a file kills it. The worker has no access to our environment, files or packages: see `_start_worker`.
"""

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

# The three limits were chosen, not measured: generous for real records, of which 16 ranks take about half a second.
MEMORY_BYTES: Final = 2**30  # address space of one worker
CPU_SECONDS: Final = 2  # per file, plus more for a large one; without a limit, 1,000 hostile files could take hours
WALL_SECONDS: Final = 60.0  # per file: also covers a worker that gets hardly any CPU time on a busy machine

# The watcher blocks these signals in all its threads (daemon/service.py) and a child inherits that: it would ignore
# them. The child restores them itself: unblocked here even for a moment, a signal to the watcher would kill it.
UNBLOCK_SIGNALS: Final = "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT)); "
# The directory that contains the package `wattwatch`: the checkout, or site-packages.
IMPORT_ROOT: Final = Path(__file__).parents[__name__.count(".")]
# The worker sees no installed packages, so everything on the way to it, `wattwatch/__init__.py` included, may only
# import the standard library.
WORKER_PROGRAM: Final = (
    f"{UNBLOCK_SIGNALS}import sys; sys.path.append(sys.argv.pop()); "
    "from wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker import main; main()"
)


class SandboxedReader:
    """One worker process at a time: started with the first file, and again after a file that killed it.

    Not thread-safe: each thread uses a reader of its own.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, cpu_seconds: int = CPU_SECONDS) -> None:
        self._limits = (str(memory_bytes), str(cpu_seconds))
        self._worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker, if there is one."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        with suppress(OSError):
            worker.communicate()

    def read(self, data: bytes, max_answer_bytes: int, max_launches: int) -> dict[str, Any]:
        """Parse one file. Blocks for at most WALL_SECONDS; raises nothing for what is in the file.

        Returns the table that `schema.build_record_table` describes, or {"why": sentence, "incomplete": bool}.
        """
        try:
            worker = self._worker = self._worker or self._start_worker()
        except OSError as error:
            return {
                "why": f"the process that parses the file could not be started: {error.strerror}",
                "incomplete": True,
            }
        assert worker.stdin is not None
        assert worker.stdout is not None
        deadline = time.monotonic() + WALL_SECONDS
        try:
            _send(worker.stdin.fileno(), REQUEST_HEADER.pack(len(data), max_answer_bytes, max_launches), deadline)
            _send(worker.stdin.fileno(), data, deadline)
            size = ANSWER_HEADER.unpack(_receive(worker.stdout.fileno(), ANSWER_HEADER.size, deadline))[0]
            # A worker that a file has taken over could announce any size: never allocate more than we asked for.
            if size > max_answer_bytes:
                raise EOFError
            table = orjson.loads(_receive(worker.stdout.fileno(), size, deadline))
        except (OSError, EOFError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):
                # Its pipe closes a moment before its exit status is available, and the message needs the status.
                worker.wait(0 if isinstance(error, TimeoutError) else 5)
            self.close()
            return {"why": _describe_exit(worker, error), "incomplete": False}
        if "why" in table:
            # What it has read so far may still fill its memory, and the next file would be blamed for that.
            self.close()
        return dict(table)

    def _start_worker(self) -> subprocess.Popen[bytes]:
        """-I ignores PYTHONPATH, the working directory and the user's site-packages; -S leaves out all other packages.

        So only the standard library and IMPORT_ROOT can be imported, in this order: no file planted in the working
        directory or on PYTHONPATH can replace one of our modules or one of Python's.
        """
        command = [sys.executable, "-I", "-S", "-c", WORKER_PROGRAM, *self._limits, str(IMPORT_ROOT)]
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            bufsize=0,
        )
        assert worker.stdin is not None
        # A worker that stops reading must not block us in write(): `_send` waits with a deadline instead.
        os.set_blocking(worker.stdin.fileno(), False)
        return worker


def _wait_until_ready(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _send(descriptor: int, data: bytes, deadline: float) -> None:
    # If the worker dies before it has read everything, write() fails with EPIPE and `read` reports it.
    left = memoryview(data)
    while left:
        _wait_until_ready(descriptor, select.POLLOUT, deadline)
        left = left[os.write(descriptor, left) :]


def _receive(descriptor: int, size: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        _wait_until_ready(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, min(size - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _describe_exit(worker: subprocess.Popen[bytes], error: Exception) -> str:
    if isinstance(error, TimeoutError):
        end = f"did not finish within {WALL_SECONDS:.0f} s"
    elif worker.returncode is not None and worker.returncode < 0:
        end = f"was killed by signal {-worker.returncode} because it used too much CPU time or memory"
    else:
        end = f"exited with status {worker.returncode}"
    return f"the process that parsed the file {end}: the file is damaged or hostile"
