"""Run-logger keys, `system.gpu.0.powerWatts=123`, also as JSON: read what is there, name what is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from collectors.smi.board import read_board
from collectors.smi.report import GpuSnapshot, Rows

_KEY: Final = re.compile(r"system[./]gpu\.(\d{1,3})\.(\w+)[\"']?\s*[=:,\s]\s*(-?[\d.]+(?:[eE][+-]?\d+)?)")
_FIELDS: Final = {
    "gpu": ("utilization", "%"),
    "memory": ("memory_utilization", "%"),
    "memoryAllocatedBytes": ("memory_used", "B"),
    "temp": ("temperature", "C"),
    "powerWatts": ("power_draw", "W"),
    "enforcedPowerLimitWatts": ("power_limit_enforced", "W"),
    "smClock": ("sm_clock", "MHz"),
}


def looks_like_wandb(text: str) -> bool:
    return bool(_KEY.search(text))


def read_wandb(lines: Sequence[str]) -> Rows:
    """The last value of each key, as one snapshot; error counters alone are no reading of a board."""
    boards: dict[int, dict[str, tuple[str, str]]] = {}
    others: set[str] = set()
    for line in lines:
        for index, key, value in _KEY.findall(line):
            if key in _FIELDS:
                field, unit = _FIELDS[key]
                boards.setdefault(int(index), {"index": (index, "")})[field] = (value, unit)
            else:
                others.add(key)
    if not boards:
        found = ", ".join(sorted(others)[:10])
        return Rows(trouble=f"no GPU readings: this logger recorded only {found}; needed: powerWatts, gpu, temp")
    return Rows((GpuSnapshot(None, tuple(read_board(boards[index]) for index in sorted(boards))),))
