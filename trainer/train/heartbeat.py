"""A rank's heartbeat, RUN/heartbeat/rank-00003.json: where it is, for a watcher on another host.

A file that only says "alive" is not enough: the processes of a hung job are alive. So it has the step and the phase.
The training loop only sets values; a thread writes them, so that
a file system that hangs blocks that thread and not the loop. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from wattwatch.trainer.run_directory import RUN_FORMAT_VERSION, RunDirectory

INTERVAL_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 2.0  # how long the end of the job waits for the last write


class RankPhase(StrEnum):
    LOAD = "load"
    TRAIN = "train"
    SAVE = "save"
    BARRIER = "barrier"  # waiting for all ranks before a save
    EVAL = "eval"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The file, field by field. None: not known yet."""

    v: int
    run: str
    rank: int
    world: int
    host: str
    pid: int
    restart: int  # number of attempts before this one
    phase: str
    step: int  # steps done
    steps: int | None
    micro: int  # micro-steps done of the current step
    blocks_left: int | None
    tokens_per_second: float | None
    data_wait_ms: float | None
    loss: float | None
    t_wall: float  # Unix time of the training loop's last update
    t_step: float  # Unix time when `step` last changed


WriteFile = Callable[[Path, bytes], None]


def replace_file(path: Path, data: bytes) -> None:
    """By rename, so that readers never see half of it. Without fsync: it need not survive a power failure.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = f"{path}.tmp"
    with open(staged, "wb") as file:
        file.write(data)
    os.replace(staged, path)


class HeartbeatWriter:
    """Writes a rank's heartbeat at most once per interval, and immediately when the phase changes. A context manager.

    Neither raises nor waits for the file system, except `close`, which waits for a limited time. The last error is in
    `problem`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        run: str,
        rank: int,
        world: int,
        attempt: int,
        steps: int | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
        write: WriteFile = replace_file,
    ) -> None:
        """`attempt` counts from 1. `write` replaces the file; it may raise OSError, and may hang."""
        now = time.time()
        self.run = run
        self.problem = ""
        self._path = directory.heartbeat(rank)
        self._interval_seconds = interval_seconds
        self._write = write
        self._changed = threading.Condition()
        self._record = HeartbeatRecord(
            v=RUN_FORMAT_VERSION,
            run=run,
            rank=rank,
            world=world,
            host=socket.gethostname(),
            pid=os.getpid(),
            restart=attempt - 1,
            phase=RankPhase.LOAD.value,
            step=0,
            steps=steps,
            micro=0,
            blocks_left=None,
            tokens_per_second=None,
            data_wait_ms=None,
            loss=None,
            t_wall=now,
            t_step=now,
        )
        self._unwritten: HeartbeatRecord | None = self._record
        self._written_phase = ""
        self._closing = False
        # A daemon: a thread that hangs in a write must not keep the process from exiting.
        self._writer = threading.Thread(target=self._write_all, name="heartbeat", daemon=True)
        with contextlib.suppress(RuntimeError):  # the machine allows no more threads: training matters more
            self._writer.start()

    @property
    def step(self) -> int:
        """Steps done, as of the last update."""
        return self._record.step

    def __enter__(self) -> HeartbeatWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def update(
        self,
        phase: str | None = None,
        step: int | None = None,
        *,
        steps: int | None = None,
        micro: int | None = None,
        blocks_left: int | None = None,
        tokens_per_second: float | None = None,
        data_wait_ms: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Sets the fields that are not None; the others keep their values."""
        now = time.time()
        given = {
            "phase": None if phase is None else str(phase),
            "step": step,
            "steps": steps,
            "micro": micro,
            "blocks_left": blocks_left,
            "tokens_per_second": tokens_per_second,
            "data_wait_ms": data_wait_ms,
            "loss": loss,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        # The lock is held for an assignment only, never during a write, so this cannot block the training loop.
        with self._changed:
            if changes.get("step", self._record.step) != self._record.step:
                changes["t_step"] = now
            self._record = self._unwritten = replace(self._record, t_wall=now, **changes)
            self._changed.notify()

    def close(self, wait_seconds: float = CLOSE_SECONDS) -> bool:
        """Writes the last update; False if that did not succeed in time. The file remains."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        with contextlib.suppress(RuntimeError):  # the thread never started
            self._writer.join(wait_seconds)
        return not self._writer.is_alive() and self._unwritten is None

    def _write_all(self) -> None:
        """The thread. It does not hold the lock while it writes: `update` must not wait for a file system."""
        due = 0.0
        while (record := self._next(due)) is not None:
            try:
                self._write(self._path, encode_heartbeat(record))
                self.problem = ""
            except Exception as error:  # noqa: BLE001 - no error of a heartbeat may end a job
                self.problem = f"{self._path}: {error}"
            # Also after an error: retrying at once would spin while the file system is broken.
            self._written_phase = record.phase
            due = time.monotonic() + self._interval_seconds

    def _next(self, due: float) -> HeartbeatRecord | None:
        """Waits until there is something to write and it is due. None: closed, and everything is written.

        What was replaced by a newer update in the meantime is skipped.
        """
        with self._changed:
            while not self._closing:
                if self._unwritten is None:
                    self._changed.wait()
                elif self._unwritten.phase != self._written_phase or time.monotonic() >= due:
                    break
                else:
                    self._changed.wait(due - time.monotonic())
            record, self._unwritten = self._unwritten, None
            return record


def encode_heartbeat(record: HeartbeatRecord) -> bytes:
    """One line of JSON. JSON has no NaN: a loss that is not finite becomes a string, which the watcher understands."""
    fields = {name: json_value(value) for name, value in asdict(record).items()}
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def json_value(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
