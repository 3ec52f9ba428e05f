"""Outputs of several hosts in one paste: told apart where each line names its host, else refused in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from collectors.smi import SmiReport

PREFIX: Final = re.compile(rb"([A-Za-z][\w.\-]*): (?=\S)")  # what pdsh and clush put before each line
MOST_PREFIXED_LINES: Final = 0.9
# A board's place may change over a long log (a driver that was loaded anew); in a paste of a few it does not.
PASTE_ROUNDS: Final = 16


def by_prefix(data: bytes) -> Mapping[str, bytes]:
    """By host, its lines without the prefix; empty where lines have none, or all name the same host."""
    head = [line for line in data[:65536].split(b"\n") if line.strip()]
    if not head or sum(PREFIX.match(line) is not None for line in head) < MOST_PREFIXED_LINES * len(head):
        return {}
    lines: dict[str, list[bytes]] = {}
    for line in data.split(b"\n"):
        if (found := PREFIX.match(line)) is not None:
            lines.setdefault(found[1].decode("ascii", "replace"), []).append(line[found.end() :])
    hosts = {host: b"\n".join(mine) + b"\n" for host, mine in lines.items()}
    return hosts if 1 < len(hosts) <= len(head) / 2 else {}


def trouble_of(report: SmiReport) -> str | None:
    """A sentence where one place holds two boards: what was pasted is not of one host."""
    places: dict[int, tuple[str | None, str | None]] = {}
    for snapshot in report.snapshots if len(report.snapshots) <= PASTE_ROUNDS else ():
        for gpu in snapshot.gpus:
            if gpu.index is None or gpu.mig:
                continue
            name, bus = places.setdefault(gpu.index, (gpu.name, gpu.pci_bus_id))
            if any(_differ(a, b) for a, b in zip((name, bus), (gpu.name, gpu.pci_bus_id), strict=True)):
                return (
                    f"these are boards of several hosts: GPU {gpu.index} is {name or 'a board'} at {bus or '?'} and "
                    f"{gpu.name or 'a board'} at {gpu.pci_bus_id or '?'}. Give each host's output by itself, or name "
                    "the hosts: `wattwatch triage HOST ...`"
                )
    return None


def _differ(a: str | None, b: str | None) -> bool:
    """The last cell of a log that was cut may hold the beginning of a name."""
    return a is not None and b is not None and not a.startswith(b) and not b.startswith(a)
