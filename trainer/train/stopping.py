"""Being asked to stop: the request of any one rank becomes all ranks' at the next step's first collective.

    file RUN/stop, SIGUSR1    save, then end           (Slurm: --signal=USR1@600)
    SIGTERM, SIGINT           end after this step, saving nothing

A save may take minutes, and torchrun gives a node 30 s after SIGTERM: so SIGTERM cannot mean "save". A rank that stands
in a collective hears no Python handler; one that was asked to leave and cannot for LEAVE_SECONDS is ended by a thread.
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
LEAVE_SECONDS: Final = 20.0
SIGNALS: Final = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class StopRequest(IntEnum):
    """What was asked, the stronger the higher."""

    NONE = 0
    SAVE = 1
    LEAVE = 2

    def votes(self) -> tuple[int, int]:
        """What a sum over ranks is made of."""
        return int(self is StopRequest.SAVE), int(self is StopRequest.LEAVE)

    @classmethod
    def of(cls, votes: Sequence[int]) -> StopRequest:
        """What the summed votes say."""
        return cls.LEAVE if votes[1] else cls.SAVE if votes[0] else cls.NONE


class StopListener:
    """Listens to signals, and, on rank 0, for the stop file. A context manager of the main thread.

    The file is looked at by a thread: a shared file system that hangs must not hold the training loop.
    `cannot_leave` is called in another thread where the loop does not come to a step's end; it must end the process.
    """

    def __init__(self, stop_file: Path | None, cannot_leave: Callable[[], None]) -> None:
        self._stop_file, self._cannot_leave = stop_file, cannot_leave
        self._request, self.why = StopRequest.NONE, ""
        self._ended = threading.Event()
        self._before: dict[int, Any] = {}
        self._reader, self._writer = os.pipe()

    @property
    def request(self) -> StopRequest:
        return self._request

    def ask(self, request: StopRequest, why: str) -> None:
        if request > self._request:
            self._request, self.why = request, why

    def __enter__(self) -> StopListener:
        os.set_blocking(self._writer, False)
        # The wakeup descriptor is written by the C handler, even while the main thread waits in a collective.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._hear, name="signals", daemon=True).start()
        if self._stop_file:
            threading.Thread(target=self._look, name="stop file", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._writer)

    def _hear(self) -> None:
        while data := os.read(self._reader, 64):
            for number in data:
                if number == signal.SIGUSR1:
                    self.ask(StopRequest.SAVE, "SIGUSR1")
                elif number in (signal.SIGTERM, signal.SIGINT) and self._request < StopRequest.LEAVE:
                    self.ask(StopRequest.LEAVE, signal.Signals(number).name)
                    threading.Thread(target=self._insist, name="leaving", daemon=True).start()
        os.close(self._reader)

    def _insist(self) -> None:
        if not self._ended.wait(LEAVE_SECONDS):
            self._cannot_leave()

    def _look(self) -> None:
        assert self._stop_file is not None
        while not self._ended.wait(POLL_SECONDS):
            if os.path.exists(self._stop_file):
                self.ask(StopRequest.SAVE, f"{self._stop_file} is there")
                return
