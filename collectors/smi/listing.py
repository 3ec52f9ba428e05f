"""`nvidia-smi -L`: names of boards. Lost ones stay on it: it says who is there, nothing of their health."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from collectors.smi.board import read_board
from collectors.smi.grouping import Row, group_rows
from collectors.smi.messages import Said
from collectors.smi.report import Rows

_GPU: Final = re.compile(r"^\s*GPU (?P<index>\d+): (?P<name>.*?)\s*\(UUID: (?P<uuid>[^)]*)\)")
_SLICE: Final = re.compile(r"^\s+MIG\s+\S+\s+Device\s+\d+:")


def looks_like_listing(lines: Sequence[str]) -> bool:
    return any(_GPU.match(line) for line in lines)


def read_listing(lines: Sequence[str], said: Said) -> Rows:
    """Boards with index, name and UUID, and no reading at all. MIG slices below a board make it a sliced one."""
    found: list[dict[str, tuple[str, str]]] = []
    last = -1
    for number, line in enumerate(lines):
        if match := _GPU.match(line):
            found.append({field: (match[field], "") for field in ("index", "name", "uuid")})
            last = number
        elif _SLICE.match(line) and found:
            found[-1]["mig"] = ("Enabled", "")
        elif line.strip() and not said.listen(line, number):
            said.warn(f"not understood: {line.strip()!r}")
    said.warn("a listing (-L) names boards, lost ones too: it says nothing about their health")
    return Rows(group_rows([Row(read_board(cells), None) for cells in found]), (), 0, "", last)
