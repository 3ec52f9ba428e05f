"""`nvidia-smi dmon`: a line per board and second under a `# gpu pwr gtemp ...` header; "-" is absence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from collectors.smi.board import read_board
from collectors.smi.columns import NEEDED
from collectors.smi.grouping import Row, group_rows
from collectors.smi.messages import Said
from collectors.smi.report import Rows
from collectors.smi.stamps import read_stamps

HEADER: Final = re.compile(r"^#\s*(?:Date[\s,]+)?(?:Time[\s,]+)?gpu[\s,]+\S", re.IGNORECASE)
_FIELDS: Final = {
    "gpu": ("index", ""),
    "pwr": ("power_draw", "W"),
    "gtemp": ("temperature", "C"),
    "temp": ("temperature", "C"),  # drivers before memory temperatures
    "sm": ("utilization", "%"),
    "mem": ("memory_utilization", "%"),
    "fb": ("memory_used", "MiB"),
    "pclk": ("sm_clock", "MHz"),
}


def read_dmon(lines: Sequence[str], said: Said) -> Rows:
    """All boards of all seconds. A row with fewer cells than its header (cut off) is no row."""
    names: list[str] = []
    found: list[tuple[dict[str, tuple[str, str]], str]] = []
    unreadable, last = 0, -1
    for number, line in enumerate(lines):
        cells = line.replace(",", " ").split()
        if HEADER.match(line):
            names = line.replace("#", " ").replace(",", " ").casefold().split()
            if "pid" in names:
                return Rows((), (), 0, f"this is pmon's list of processes, not of GPUs; needed: {NEEDED}", -1)
        elif not cells or line.startswith("#"):
            continue
        elif len(cells) == len(names) and cells[names.index("gpu")].isdigit():
            stamp = " ".join(cell for cell, name in zip(cells, names, strict=True) if name in {"date", "time"})
            named = {
                _FIELDS[name][0]: (cell, _FIELDS[name][1])
                for cell, name in zip(cells, names, strict=True)
                if name in _FIELDS
            }
            found.append((named, f"{stamp[:4]}/{stamp[4:6]}/{stamp[6:]}" if re.match(r"\d{8} ", stamp) else stamp))
            last = number
        elif not said.listen(line, number):
            unreadable += 1
            said.warn(f"line {number + 1} is no dmon row: {line.strip()!r}")
    seconds = read_stamps([stamp for _, stamp in found])
    rows = [Row(read_board(named), second) for (named, _), second in zip(found, seconds, strict=True)]
    return Rows(group_rows(rows), (), unreadable, "a dmon header and no rows below it", last)
