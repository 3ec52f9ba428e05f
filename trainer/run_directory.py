"""Every name in a run directory (DESIGN: the run directory), and run.json: what a watcher reads of a job.

Standard library only: launcher, gate and ranks share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from wattwatch.trainer.atomic_files import atomic_write_text
from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError

RUN_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths below RUN. `attempt` counts from 1; step directories are named by steps done."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def gate_json(self) -> Path:
        return self.path / "gate.json"

    @property
    def stop_file(self) -> Path:
        """Who makes this file asks the job to save and end."""
        return self.path / "stop"

    @property
    def launch_lock(self) -> Path:
        """Held by the one launch that is at work."""
        return self.path / "launch.lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def latest(self) -> Path:
        """A file that holds the name of the newest complete checkpoint."""
        return self.checkpoints / "latest"

    def heartbeat(self, rank: int) -> Path:
        return self.path / "heartbeat" / f"rank-{rank:05d}.json"

    def worker_socket(self, rank: int) -> Path:
        return self.path / "worker" / f"rank-{rank:05d}.sock"

    @property
    def flight(self) -> Path:
        """Flight-recorder dumps of all attempts."""
        return self.path / "flight"

    def flight_records(self, attempt: int) -> Path:
        """`torchfrtrace` reads a directory of one attempt."""
        return self.flight / f"attempt-{attempt:02d}"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt:02d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.logs(attempt) / f"rank-{rank:05d}.log"

    def ending(self, attempt: int, rank: int) -> Path:
        """How a rank ended, in its own words; absent where it was killed."""
        return self.logs(attempt) / f"rank-{rank:05d}.ending.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json"""

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
    t_wall: float


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank ended. Codes are those of `wattwatch-train run`."""

    code: int
    why: str
    step: int | None = None  # steps done
    follows: bool = False  # it may well be that another rank's end was the cause


def write_run_record(directory: RunDirectory, record: RunRecord) -> None:
    atomic_write_text(str(directory.run_json), json.dumps(asdict(record), indent=1) + "\n")


def read_rank_exit(path: Path) -> RankExit | None:
    """None where the rank left none: it was killed, or its node has gone. Raises Refusal for one that is not ours."""
    try:
        return parse_dataclass(RankExit, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidDataError) as error:
        raise UserError(f"{path}: {error}") from None


# Who still lives in a run directory: heartbeats with a process behind them (DESIGN: the run directory).
#
# A heartbeat tells when its training loop last spoke, and a long step says nothing for minutes: on its own host the
# process is asked for. Of another host only the age is known. Standard library only.

FRESH_HEARTBEAT_SECONDS: Final = 60.0
START_TIME_SLACK_SECONDS: Final = 2.0
MAX_HEARTBEAT_BYTES: Final = 65536
DONE_PHASE: Final = "done"  # the phase of a rank that has ended well


def find_live_heartbeats(directory: str) -> list[dict[str, Any]]:
    """Of `directory`, RUN/heartbeat: those that are fresh, or whose process lives here. Raises OSError, but for none.

    A fresh one whose process is gone from here is told too: other nodes cannot know that.
    """
    host, now, found = os.uname().nodename, time.time(), []
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    for name in names:
        beat = _read_heartbeat(f"{directory}/{name}") if name.endswith(".json") else None
        if beat is None or beat["phase"] == DONE_PHASE:
            continue
        age = now - beat["t_wall"]
        alive = process_running_since(beat["pid"], beat["t_wall"]) if beat["host"] == host else None
        if alive or abs(age) < FRESH_HEARTBEAT_SECONDS:
            who = {key: beat[key] for key in ("run", "rank", "host", "pid")}
            found.append(who | {"age_seconds": round(age, 1), "alive": alive})
    return found


class ReportedHeartbeat(Protocol):
    """A heartbeat that a node has found."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool | None: ...


HeartbeatT = TypeVar("HeartbeatT", bound=ReportedHeartbeat)


def exclude_dead(beats: Sequence[HeartbeatT]) -> list[HeartbeatT]:
    """Of what several nodes have found: a process that its own node says is gone is not there, however fresh."""
    gone = {(beat.host, beat.pid) for beat in beats if beat.alive is False}
    return [beat for beat in beats if (beat.host, beat.pid) not in gone]


def _read_heartbeat(path: str) -> dict[str, Any] | None:
    """None for what is no heartbeat: a file that cannot be read is no sign of life."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(path, "rb") as file:
            beat = json.loads(file.read(MAX_HEARTBEAT_BYTES))
        kinds = {"run": str, "rank": int, "host": str, "pid": int, "phase": str, "t_wall": float}
        if isinstance(beat, dict):
            if type(beat.get("t_wall")) is int:
                beat["t_wall"] = float(beat["t_wall"])
            if all(type(beat.get(key)) is kind for key, kind in kinds.items()):
                return beat
    return None


def process_running_since(pid: int, since: float) -> bool:
    """Is there a process `pid` that was there at `since` (Unix seconds)? A later one only inherited the number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may hold anything
        with open("/proc/uptime", encoding="ascii") as file:
            booted = time.time() - float(file.read().split()[0])
    except (OSError, ValueError):
        return False
    state, started = fields[0], booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started <= since + START_TIME_SLACK_SECONDS
