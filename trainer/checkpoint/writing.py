"""A rank's own files of one save: one in memory, written by a thread while the other ranks' files are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from trainer.checkpoint.agreement import reason_of
from trainer.checkpoint.complete import FileFact
from trainer.checkpoint.plan import WeightsFile
from trainer.checkpoint.tensors_file import raw_bytes, write_synced


class Writing:
    """What one rank has written, or why it cannot. Never raises for that: peers wait in the next collective.

    After a first failure nothing more is written; the rank only goes on taking part.
    """

    def __init__(self, staged: Path, rank: int) -> None:
        self.staged = staged
        self.rank = rank
        self.facts: dict[str, FileFact] = {}
        self.reason: str | None = None
        self.peak_bytes = 0  # of weights in this rank's memory at any time
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def room(self, file: WeightsFile) -> torch.Tensor | None:
        """Memory for the tensors of `file`, once the file before has left it. None: they are not wanted here."""
        self._wait()
        memory: list[torch.Tensor] = []
        if file.owner == self.rank:
            self.attempt(lambda: memory.append(torch.empty(file.layout.tensor_bytes, dtype=torch.uint8)))
            self.peak_bytes = max(self.peak_bytes, file.layout.tensor_bytes)
        return memory[0] if memory else None

    def send(self, file: WeightsFile, memory: torch.Tensor) -> None:
        """Begins to write; `memory` is the thread's from here on."""

        def write() -> None:
            self.facts[file.name] = write_synced(self.staged / file.name, [file.layout.header, raw_bytes(memory)])

        self._pending = self._thread.submit(self.attempt, write)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """A file beside the weights, at once."""

        def write() -> None:
            self.facts[name] = write_synced(self.staged / name, pieces)

        self.attempt(write)

    def attempt(self, work: Callable[[], object]) -> None:
        """Does `work` unless something has failed before; keeps why it failed."""
        if self.reason is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it and not wait
            self.reason = reason_of(error, self.rank)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Returns when all is on the disk."""
        self._wait()
        self._thread.shutdown()
