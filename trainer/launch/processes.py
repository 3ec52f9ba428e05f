"""All that runs below this process, so that it can be ended whole: ranks live in sessions of their own, where no
process group of ours reaches them (torch 2.13 subprocess_handler.py)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """What our children leave behind becomes our child, not init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def terminate_with_parent() -> None:
    """SIGTERM to this process when its parent dies in whatever way."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: then only what signals reach is ended
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Pids of its children, theirs, and so on, that still run; zombies do not."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(name))
    found, frontier = [], [pid]
    while frontier:
        nearest = children.get(frontier.pop(), [])
        found += nearest
        frontier += nearest
    return found


def kill_descendants(patience_seconds: float) -> list[int]:
    """SIGKILL to all, again and again while they fork; those that still run at the end (state D) are returned."""
    until = time.monotonic() + patience_seconds
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)
    _reap()
    return left


def _reap() -> None:
    """Orphans that we adopted are ours to wait for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
