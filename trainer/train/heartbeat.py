"""What a rank is at, for a watcher on another host: RUN/heartbeat/rank-00003.json.

A file that only says "alive" is worthless: 512 GPUs once beat for 33 minutes without a step. So step and phase. The
training loop only sets values; a thread writes them, and stands alone in front of a file system that hangs.
No torch here.
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
CLOSE_SECONDS: Final = 2.0  # that the last write may take


class RankPhase(StrEnum):
    """What a rank is in."""

    LOAD = "load"
    TRAIN = "train"
    SAVE = "save"
    BARRIER = "barrier"  # waits for all others to come to a save
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
    restart: int  # attempts before this one
    phase: str
    step: int  # steps done
    steps: int | None
    micro: int  # micro-steps done of the step under way
    blocks_left: int | None
    tokens_per_second: float | None
    data_wait_ms: float | None
    loss: float | None
    t_wall: float  # Unix seconds, when the training loop last said something
    t_step: float  # Unix seconds, when `step` last changed


WriteFile = Callable[[Path, bytes], None]


def replace_file(path: Path, data: bytes) -> None:
    """By rename and without fsync: of a heartbeat only the newest counts, and none needs to outlive a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = f"{path}.tmp"
    with open(staged, "wb") as file:
        file.write(data)
    os.replace(staged, path)


class HeartbeatWriter:
    """Writes a rank's file at most once in an interval, and at once when the phase changes.

    Nothing here raises or waits for the file system, but `close`, which waits for a bounded time. What went wrong last
    is in `problem`, for the log. A context manager.
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
        """`attempt` counts from 1. `write` puts a file in its place; it may raise OSError and take for ever."""
        now = time.time()
        self.run = run
        self.problem = ""
        self._path = directory.heartbeat(rank)
        self._interval_seconds = interval_seconds
        self._write = write
        self._news = threading.Condition()
        self._beat = HeartbeatRecord(
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
        self._said: HeartbeatRecord | None = self._beat  # not written yet
        self._written_phase = ""
        self._closing = False
        self._writer = threading.Thread(target=self._write_all, name="heartbeat", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads on this machine: training matters more
            self._writer.start()

    @property
    def step(self) -> int:
        """Steps done, as last said."""
        return self._beat.step

    def __enter__(self) -> HeartbeatWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def beat(
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
        """What is None stays as it was."""
        now = time.time()
        said = {
            "phase": None if phase is None else str(phase),
            "step": step,
            "steps": steps,
            "micro": micro,
            "blocks_left": blocks_left,
            "tokens_per_second": tokens_per_second,
            "data_wait_ms": data_wait_ms,
            "loss": loss,
        }
        known: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        with self._news:
            if known.get("step", self._beat.step) != self._beat.step:
                known["t_step"] = now
            self._beat = self._said = replace(self._beat, t_wall=now, **known)
            self._news.notify()

    def close(self, wait_seconds: float = CLOSE_SECONDS) -> bool:
        """Writes what was said last; False where that could not be done in time. The file stays."""
        with self._news:
            self._closing = True
            self._news.notify()
        with contextlib.suppress(RuntimeError):  # the thread never started
            self._writer.join(wait_seconds)
        return not self._writer.is_alive() and self._said is None

    def _write_all(self) -> None:
        """The thread. Never holds the lock while it writes: `beat` must not wait for a file system."""
        due = 0.0
        while (beat := self._next(due)) is not None:
            try:
                self._write(self._path, encode_heartbeat(beat))
                self.problem = ""
            except Exception as error:  # noqa: BLE001 - a heartbeat is no reason to stop a job
                self.problem = f"{self._path}: {error}"
            self._written_phase = beat.phase
            due = time.monotonic() + self._interval_seconds

    def _next(self, due: float) -> HeartbeatRecord | None:
        """What to write, once it is due; None at the end."""
        with self._news:
            while not self._closing:
                if self._said is None:
                    self._news.wait()
                elif self._said.phase != self._written_phase or time.monotonic() >= due:
                    break
                else:
                    self._news.wait(due - time.monotonic())
            said, self._said = self._said, None
            return said


def encode_heartbeat(beat: HeartbeatRecord) -> bytes:
    """JSON has no NaN: a loss that is not finite is a text, which the watcher reads as the number."""
    return (
        json.dumps({name: json_value(value) for name, value in asdict(beat).items()}, allow_nan=False).encode() + b"\n"
    )


def json_value(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
