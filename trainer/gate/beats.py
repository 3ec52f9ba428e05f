"""Who still lives in a run directory: heartbeats with a process behind them (DESIGN: the run directory).

A heartbeat tells when its training loop last spoke, and a long step says nothing for minutes: on its own host the
process is asked for. Of another host only the age is known. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

FRESH_SECONDS: Final = 60.0
CLOCK_SLACK_SECONDS: Final = 2.0
MAX_BYTES: Final = 65536
GONE: Final = "done"  # the phase of a rank that has ended well


def beats_in(directory: str) -> list[dict[str, Any]]:
    """Of `directory`, RUN/heartbeat: those that are fresh, or whose process lives here. Raises OSError, but for none.

    A fresh one whose process is gone from here is told too: other nodes cannot know that.
    """
    host, now, found = os.uname().nodename, time.time(), []
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    for name in names:
        beat = _read(f"{directory}/{name}") if name.endswith(".json") else None
        if beat is None or beat["phase"] == GONE:
            continue
        age = now - beat["t_wall"]
        alive = lives(beat["pid"], beat["t_wall"]) if beat["host"] == host else None
        if alive or abs(age) < FRESH_SECONDS:
            who = {key: beat[key] for key in ("run", "rank", "host", "pid")}
            found.append(who | {"age_seconds": round(age, 1), "alive": alive})
    return found


class Seen(Protocol):
    """A heartbeat that a node has found."""

    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool | None: ...


Beat = TypeVar("Beat", bound=Seen)


def living(beats: Sequence[Beat]) -> list[Beat]:
    """Of what several nodes have found: a process that its own node says is gone is not there, however fresh."""
    gone = {(beat.host, beat.pid) for beat in beats if beat.alive is False}
    return [beat for beat in beats if (beat.host, beat.pid) not in gone]


def _read(path: str) -> dict[str, Any] | None:
    """None for what is no heartbeat: a file that cannot be read is no sign of life."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(path, "rb") as file:
            beat = json.loads(file.read(MAX_BYTES))
        kinds = {"run": str, "rank": int, "host": str, "pid": int, "phase": str, "t_wall": float}
        if isinstance(beat, dict):
            if type(beat.get("t_wall")) is int:
                beat["t_wall"] = float(beat["t_wall"])
            if all(type(beat.get(key)) is kind for key, kind in kinds.items()):
                return beat
    return None


def lives(pid: int, since: float) -> bool:
    """Is there a process `pid` that was there at `since` (Unix seconds)? A later one only inherited the number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may hold anything
        with open("/proc/uptime", encoding="ascii") as file:
            booted = time.time() - float(file.read().split()[0])
    except (OSError, ValueError):
        return False
    state, started = fields[0], booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started <= since + CLOCK_SLACK_SECONDS
