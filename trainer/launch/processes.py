"""All descendants of this process, so that they can be ended together.

torch starts each rank in a session of its own (subprocess_handler.py in torch 2.13), where neither a terminal's Ctrl-C
nor a signal to our process group reaches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER: Final = 36
KILL_INTERVAL_SECONDS: Final = 0.02


def adopt_orphans() -> None:
    """A descendant whose parent dies becomes a child of this process instead of init's, so that we can find it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def terminate_with_parent() -> None:
    """Asks the kernel to send SIGTERM to this process when its parent dies, even if that is killed by SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: then only what signals reach is ended
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Process ids of the running children of `pid`, their children, and so on; without zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may exit between listdir and open
                with open(f"/proc/{name}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                # Zombies have ended already; they only wait for their parent.
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(name))
    found, frontier = [], [pid]
    while frontier:
        nearest = children.get(frontier.pop(), [])
        found += nearest
        frontier += nearest
    return found


def kill_descendants(wait_seconds: float) -> list[int]:
    """Sends SIGKILL to all descendants, repeatedly, since they may fork in between.

    Returns those that still run after `wait_seconds`: processes in state D do not react to SIGKILL.
    """
    until = time.monotonic() + wait_seconds
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(KILL_INTERVAL_SECONDS)
    _reap()
    return left


def _reap() -> None:
    """Orphans that we adopted would remain zombies if we did not wait for them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
