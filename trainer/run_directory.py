"""The run directory: every path in it, and the small JSON files that launcher, gate, ranks and watcher share.

Standard library only: all of them import it, and gate and launcher run where torch is not loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from wattwatch.trainer.atomic_files import atomic_write_text
from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError

RUN_FORMAT_VERSION: Final = 1  # of run.json and the heartbeats

# A heartbeat of another host counts as a live rank below this age. Chosen: heartbeats are written every second, and a
# shared file system may show one many seconds late. The training loop may also be silent for longer in one step, which
# is why a rank of this host is looked up in /proc instead.
FRESH_HEARTBEAT_SECONDS: Final = 60.0
START_TIME_SLACK_SECONDS: Final = 2.0  # /proc counts in clock ticks since boot; the result may be off by a second
# Ours are below 500 bytes; a log that somebody wrote to that path must not be read to its end.
MAX_HEARTBEAT_BYTES: Final = 65536
DONE_PHASE: Final = "done"  # the phase of a rank that has finished: its process may be gone, and that is fine


class RankExitCode(IntEnum):
    """Exit codes of `wattwatch-train run`, and `code` in the exit files."""

    DONE = 0  # all steps are done and saved
    REFUSED = 2  # a UserError: another attempt would end the same way
    INTERNAL_ERROR = 3  # an exception that we did not expect: a bug
    STOPPED = 4  # stopped on request, before the last step
    FAILED = 5  # an error that may not happen again: a lost peer, a full disk, a collective that timed out


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended, as it stated itself (RUN/logs/attempt-NN/rank-NNNNN.ending.json)."""

    code: int  # RankExitCode
    why: str
    step: int | None = None  # steps done
    follows: bool = False  # a collective failed: probably the consequence of another rank's end


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json: what the watcher needs to know about the attempt that is running."""

    v: int
    run: str
    world: int
    nodes: tuple[str, ...]
    steps: int
    tokens_per_step: int
    save_every: int
    seq_len: int
    gate_id: str
    attempt: int
    resumed_from: str | None
    t_wall: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class FoundHeartbeat:
    """The heartbeat of a rank that may still be running, as one node found it."""

    run: str
    rank: int
    host: str
    pid: int
    age_seconds: float  # by the clock of the node that read it
    alive: bool | None  # whether the process exists; None: it is on another host


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths below RUN. Attempts count from 1; checkpoint directories are named after the number of steps done."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def gate_json(self) -> Path:
        return self.path / "gate.json"

    @property
    def stop_file(self) -> Path:
        """Creating this file asks the job to save and stop."""
        return self.path / "stop"

    @property
    def launch_lock(self) -> Path:
        """Locked by the one launch that uses this directory."""
        return self.path / "launch.lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def latest(self) -> Path:
        """A text file with the name of the newest complete checkpoint."""
        return self.checkpoints / "latest"

    def heartbeat(self, rank: int) -> Path:
        return self.path / "heartbeat" / f"rank-{rank:05d}.json"

    def worker_socket(self, rank: int) -> Path:
        return self.path / "worker" / f"rank-{rank:05d}.sock"

    @property
    def flight(self) -> Path:
        """Flight recorder dumps of all attempts."""
        return self.path / "flight"

    def flight_records(self, attempt: int) -> Path:
        """One directory per attempt: `torchfrtrace` takes every file in a directory for the same moment of one job."""
        return self.flight / f"attempt-{attempt:02d}"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt:02d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Standard output and standard error of a rank."""
        return self.logs(attempt) / f"rank-{rank:05d}.log"

    def exit_file(self, attempt: int, rank: int) -> Path:
        """The rank's RankExit as JSON. Missing if the rank was killed."""
        return self.logs(attempt) / f"rank-{rank:05d}.ending.json"


def write_run_record(directory: RunDirectory, record: RunRecord) -> None:
    """Replaces run.json. Raises OSError."""
    atomic_write_text(str(directory.run_json), json.dumps(asdict(record), indent=1) + "\n")


def read_rank_exit(path: Path) -> RankExit | None:
    """The exit file at `path`; None if the rank left none, because it was killed or its node has gone.

    Raises UserError for a file that is not an exit file.
    """
    try:
        return parse_dataclass(RankExit, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidDataError) as error:
        raise UserError(f"{path}: {error}") from None


def find_live_heartbeats(directory: str) -> list[FoundHeartbeat]:
    """Heartbeats in `directory` (RUN/heartbeat) that are fresh, or whose process still runs on this host.

    The time in a heartbeat is that of the training loop's last update, and one long step may be silent for minutes, so
    on its own host the process is looked up. A fresh heartbeat whose process is gone from this host is returned too,
    with `alive` False: other nodes cannot know that it is gone (see `exclude_dead`). A directory that does not exist
    holds none. Raises other OSErrors.
    """
    host, now, found = os.uname().nodename, time.time(), []
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    for name in names:
        heartbeat = _read_heartbeat(f"{directory}/{name}") if name.endswith(".json") else None
        # A rank that has finished leaves its last heartbeat behind, which is fresh for a minute.
        if heartbeat is None or heartbeat["phase"] == DONE_PHASE:
            continue
        age = now - heartbeat["t_wall"]
        alive = process_running_since(heartbeat["pid"], heartbeat["t_wall"]) if heartbeat["host"] == host else None
        # abs: the other host's clock may be ahead of ours
        if alive or abs(age) < FRESH_HEARTBEAT_SECONDS:
            identity = {key: heartbeat[key] for key in ("run", "rank", "host", "pid")}
            found.append(FoundHeartbeat(**identity, age_seconds=round(age, 1), alive=alive))
    return found


def exclude_dead(heartbeats: Iterable[FoundHeartbeat]) -> list[FoundHeartbeat]:
    """What several nodes found, without the processes that their own node knows to be gone, however fresh they look."""
    heartbeats = list(heartbeats)
    dead = {(heartbeat.host, heartbeat.pid) for heartbeat in heartbeats if heartbeat.alive is False}
    return [heartbeat for heartbeat in heartbeats if (heartbeat.host, heartbeat.pid) not in dead]


def _read_heartbeat(path: str) -> dict[str, Any] | None:
    """The fields of a heartbeat file; None for anything else: an unreadable file is not a sign of a live rank."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(path, "rb") as file:
            heartbeat = json.loads(file.read(MAX_HEARTBEAT_BYTES))
        types = {"run": str, "rank": int, "host": str, "pid": int, "phase": str, "t_wall": float}
        if isinstance(heartbeat, dict):
            # Other trainers may write whole seconds.
            if type(heartbeat.get("t_wall")) is int:
                heartbeat["t_wall"] = float(heartbeat["t_wall"])
            if all(type(heartbeat.get(key)) is kind for key, kind in types.items()):
                return heartbeat
    return None


def process_running_since(pid: int, since: float) -> bool:
    """Whether the process `pid` of this host runs and already existed at `since` (Unix seconds).

    The kernel reuses process ids: one that started later is another process with the same number.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field is the command in parentheses, and may itself contain spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
        with open("/proc/uptime", encoding="ascii") as file:
            booted = time.time() - float(file.read().split()[0])
    except (OSError, ValueError):
        return False
    state, started = fields[0], booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started <= since + START_TIME_SLACK_SECONDS  # Z, X: a zombie, dead
