"""Requests to stop. One rank is asked; all ranks learn it in the first collective of the next step.

    file RUN/stop, SIGUSR1    save, then exit          (Slurm: --signal=USR1@600)
    SIGTERM, SIGINT           exit after this step, without saving

SIGTERM cannot mean "save": a save may take minutes, and torchrun sends SIGKILL 30 s after SIGTERM. Python runs no
signal handler while the main thread is inside a collective; so a thread ends the process if a rank was asked to exit
and has not come to the end of its step after EXIT_SECONDS.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

POLL_SECONDS: Final = 1.0
EXIT_SECONDS: Final = 20.0  # below torchrun's 30 s, so that the rank can still write its exit file
SIGNALS: Final = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class StopRequest(IntEnum):
    """The stronger request has the higher number."""

    NONE = 0
    SAVE = 1
    EXIT = 2

    def votes(self) -> tuple[int, int]:
        """This rank's part of a sum over all ranks."""
        return int(self is StopRequest.SAVE), int(self is StopRequest.EXIT)

    @classmethod
    def from_votes(cls, votes: Sequence[int]) -> StopRequest:
        """The strongest request of any rank, from the summed votes."""
        return cls.EXIT if votes[1] else cls.SAVE if votes[0] else cls.NONE


class StopListener:
    """Listens for signals and, on rank 0, for the stop file. A context manager, for the main thread.

    A thread checks for the file: a shared file system that hangs must not block the training loop.
    `exit_from_collective` is called in another thread if the loop does not reach the end of a step in time; it must end
    the process.
    """

    def __init__(self, stop_file: Path | None, exit_from_collective: Callable[[], None]) -> None:
        self._stop_file, self._exit_from_collective = stop_file, exit_from_collective
        self._request, self.why = StopRequest.NONE, ""
        self._ended = threading.Event()
        self._handlers_before: dict[int, Any] = {}
        self._reader, self._writer = os.pipe()

    @property
    def request(self) -> StopRequest:
        return self._request

    def ask(self, request: StopRequest, why: str) -> None:
        """Records a request, unless an equal or stronger one was made before."""
        # A stop file must not weaken a SIGTERM that came before it.
        if request > self._request:
            self._request, self.why = request, why

    def __enter__(self) -> StopListener:
        os.set_blocking(self._writer, False)
        # The C-level handler writes the signal number to this descriptor at once, even while the main thread is inside
        # a collective and no Python handler can run.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            # A handler that does nothing: without one, the default action would end the process.
            self._handlers_before[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._read_signals, name="signals", daemon=True).start()
        if self._stop_file:
            threading.Thread(target=self._watch_stop_file, name="stop file", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        # In this order: a signal in between must not write to a closed descriptor.
        signal.set_wakeup_fd(-1)
        os.close(self._writer)

    def _read_signals(self) -> None:
        while data := os.read(self._reader, 64):
            for number in data:
                if number == signal.SIGUSR1:
                    self.ask(StopRequest.SAVE, "SIGUSR1")
                elif number in (signal.SIGTERM, signal.SIGINT) and self._request < StopRequest.EXIT:
                    self.ask(StopRequest.EXIT, signal.Signals(number).name)
                    threading.Thread(target=self._enforce_exit, name="exit", daemon=True).start()
        os.close(self._reader)

    def _enforce_exit(self) -> None:
        if not self._ended.wait(EXIT_SECONDS):
            self._exit_from_collective()

    def _watch_stop_file(self) -> None:
        assert self._stop_file is not None
        while not self._ended.wait(POLL_SECONDS):
            if os.path.exists(self._stop_file):
                self.ask(StopRequest.SAVE, f"stop file {self._stop_file}")
                return
