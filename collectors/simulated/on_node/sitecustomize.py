"""Loaded by every Python that starts on a simulated node: installs the node's clock and its NVML library.

Python imports a module of this name before the program (docs.python.org/3/library/site.html); the node's PYTHONPATH
contains this directory. Programs on the node need not know about it: the real probe uses `time`, and the real pynvml
loads libnvidia-ml.so.1 through `ctypes`.

The clock runs `WATTWATCH_NODE_SPEED` times as fast as the machine's, from an origin shared by all nodes and the
watcher (collectors/clock.py computes the same), so that ages agree everywhere.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import sys
import time
from typing import Any, SupportsIndex

LIBRARY = "libnvidia-ml.so.1"


def set_host_name(name: str) -> None:
    """Set the host name that a real rank on a simulated node sees: its heartbeats must contain the node's name."""
    system, _, *others = os.uname()
    named = os.uname_result((system, name, *others))
    socket.gethostname = lambda: name
    os.uname = lambda: named


def run_clock_faster(speed: float, monotonic_origin: float, wall_origin: float) -> None:
    """Replace the clocks and `sleep` of the module `time`. Timeouts of selectors and locks stay in real time."""
    real_monotonic, real_time, real_sleep = time.monotonic, time.time, time.sleep

    def monotonic() -> float:
        return monotonic_origin + (real_monotonic() - monotonic_origin) * speed

    def wall() -> float:
        return wall_origin + (real_time() - wall_origin) * speed

    def sleep(seconds: float | SupportsIndex) -> None:
        real_sleep(float(seconds) / speed)

    time.monotonic = monotonic
    time.time = wall
    time.sleep = sleep
    time.monotonic_ns = lambda: int(monotonic() * 1e9)
    time.time_ns = lambda: int(wall() * 1e9)


def install_nvml(state_file: str) -> None:
    """Make `ctypes.CDLL("libnvidia-ml.so.1")` return the fake library that reads the node's state file."""
    real_library = ctypes.CDLL

    def load(name: Any, *arguments: Any, **options: Any) -> Any:
        if name != LIBRARY:
            return real_library(name, *arguments, **options)
        import fake_nvml  # type: ignore[import-not-found]  # beside this file, in the node's PYTHONPATH

        return fake_nvml.load_library(state_file)

    ctypes.CDLL = load  # type: ignore[assignment,misc]  # pynvml only calls it


def load_pynvml_from(path: str) -> None:
    """Load the real pynvml from its file, and so from its compiled form. The probe uses it if it is already loaded.

    The probe normally compiles the pynvml that was sent with it: a third of a second per node. Twenty simulated nodes
    on one machine would be late for their first minute.
    """
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["pynvml"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "WATTWATCH_NODE_HOSTNAME" in os.environ:
    set_host_name(os.environ["WATTWATCH_NODE_HOSTNAME"])

if "WATTWATCH_NODE_STATE" in os.environ:
    if os.environ.get("WATTWATCH_NODE_SPEED", "1") != "1":
        run_clock_faster(
            float(os.environ["WATTWATCH_NODE_SPEED"]),
            float(os.environ["WATTWATCH_NODE_MONOTONIC_ORIGIN"]),
            float(os.environ["WATTWATCH_NODE_WALL_ORIGIN"]),
        )
    install_nvml(os.environ["WATTWATCH_NODE_STATE"])
    if os.environ.get("WATTWATCH_NODE_PYNVML"):
        load_pynvml_from(os.environ["WATTWATCH_NODE_PYNVML"])
