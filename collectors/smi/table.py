"""The default nvidia-smi table of any driver age, whole or pasted in part.

A board is two lines: who it is (index, name, PCI id, ECC) and what it does (fan, temperature, state, power, memory,
utilisation); drivers since R450 add a third with the MIG mode. Lines are found by what stands in them, not by borders
or widths: boards of 1000 W and more, 4-digit PCI domains and pasted tables shift every column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from collectors.samples import PowerSource
from collectors.smi.board import read_board
from collectors.smi.grouping import Row, group_rows
from collectors.smi.messages import Said
from collectors.smi.report import Rows
from collectors.smi.stamps import is_stamp, read_stamps

_BUS: Final = re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f](?![0-9A-Za-z])")
_NUMBERED: Final = re.compile(r"(?:^|[|\s])(\d{1,4})\.?\s+([A-Za-z?].*)")
_MODES: Final = frozenset(
    {"On", "Off", "N/A", "ERR!", "WDDM", "TCC", "MCDM", "Enabled", "Disabled"}
)  # persistence, driver
_DOES: Final = re.compile(
    r"(?:^|[|\s])(?P<fan>\d+\s?%|N/A|ERR!)\s+(?P<temp>\d+\s?C|N/A|ERR!)\s+(?P<perf>P\d+|N/A|ERR!|Unknown)\s+"
    r"(?P<draw>\d+(?:\.\d+)?\s?W|N/A|ERR!|Unknown)\s*/\s*(?P<limit>\d+(?:\.\d+)?\s?W|N/A|ERR!|Unknown)"
    r"(?:[\s|]+(?:\d+%\s+)?(?P<used>\d+\s?Mi?B|N/A|ERR!)\s*/\s*(?P<total>\d+\s?Mi?B|N/A|ERR!))?"
    r"(?:[\s|]+(?P<util>\d+\s?%|N/A|ERR!))?"
)
_MIG: Final = re.compile(r"^[^|]*\|\s*\|\s*\|\s*(?P<mig>Enabled\*?|Disabled\*?|N/A|ERR!)\s*\|?\s*$")
_WIDEST: Final = 300  # a table is some 90 wide; what is longer is no table, and searching it would be slow
_NEW_TABLE: Final = re.compile(r"NVIDIA-SMI\s+\d")


def looks_like_table(lines: Sequence[str]) -> bool:
    return any(_DOES.search(line[:_WIDEST]) or _who(line[:_WIDEST]) for line in lines)


def read_table(lines: Sequence[str], said: Said) -> Rows:
    """All boards of all tables. A second line without its first (a pasted scrap) is a board without a number."""
    boards: list[tuple[dict[str, tuple[str, str]], int, str]] = []
    block, stamp, last, in_slices, open_board = 0, "", -1, False, False
    for number, whole in enumerate(lines):
        line = whole[:_WIDEST]
        if _NEW_TABLE.search(line):
            block, in_slices, open_board = block + 1, False, False
        elif "MIG devices:" in line or "Processes:" in line:
            in_slices, open_board = True, False  # rows below look like boards and are slices or processes
        elif who := _who(line):
            in_slices, open_board, last = False, True, number
            boards.append((who, block, stamp))
        elif in_slices:
            continue
        elif does := _DOES.search(line):
            if not open_board or "power_draw" in boards[-1][0]:
                boards.append(({}, block, stamp))
            boards[-1][0].update(_does(does))
            open_board, last = True, number
        elif open_board and (mig := _MIG.match(line)):
            boards[-1][0]["mig"] = (mig["mig"].rstrip("*"), "")
            open_board = False
        elif is_stamp(line):
            stamp, block = line.strip(), block + 1
        elif not _is_frame(line) and not said.listen(line, number):
            said.warn(f"not understood: {line.strip()!r}")
    seconds = read_stamps([stamp for _, _, stamp in boards])
    rows = [
        Row(read_board(cells, PowerSource.TABLE), second, block)
        for (cells, block, _), second in zip(boards, seconds, strict=True)
    ]
    return Rows(group_rows(rows), (), 0, "", last)


def _is_frame(line: str) -> bool:
    text = line.strip()
    return not text or text[0] in "|+-=" or text.startswith(("Fan ", "GPU "))


def _who(line: str) -> dict[str, tuple[str, str]]:
    """Index, name, PCI id and ECC of a board's first line; {} for any other line."""
    bus = _BUS.search(line)
    before = line[: bus.start()].rstrip(" |\t") if bus else ""
    numbered = _NUMBERED.search(before)
    if bus is None or numbered is None or "," in before:  # a comma: a CSV row of "RTX 2080 Ti"
        return {}
    words = numbered[2].replace("|", " ").split()
    if len(words) > 1 and words[-1] in _MODES:
        words.pop()
    cells = {"index": (numbered[1], ""), "name": (" ".join(words), ""), "pci_bus_id": (bus[0], "")}
    behind = line[bus.end() :].split("|")
    if len(behind) > 1 and behind[1].strip():
        cells["ecc"] = (behind[1].strip(), "")
    return cells


def _does(match: re.Match[str]) -> dict[str, tuple[str, str]]:
    cells = {
        "temperature": (match["temp"], "C"),
        "performance_state": (match["perf"], ""),
        "power_draw": (match["draw"], "W"),
        "power_limit": (match["limit"], "W"),
        "memory_used": (match["used"], "MiB"),
        "memory_total": (match["total"], "MiB"),
        "utilization": (match["util"], "%"),
    }
    return {field: (text, unit) for field, (text, unit) in cells.items() if text is not None}
