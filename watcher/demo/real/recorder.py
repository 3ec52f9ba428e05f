"""Which rank waits in what: each rank's flight recorder and stack, from its worker socket, put side by side.

Torch's worker server answers while the rank's main thread hangs. Different collectives at one slot of one group are
conclusive (arXiv 2608.05944, section 3). A gloo entry that is not `retired` is the one that the rank is in; its `state`
stays "scheduled".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

ASK_SECONDS: Final = 10.0
FRAME: Final = re.compile(r'File "[^"]*?(trainer/[^"]+)", line (\d+) in (\w+)')


@dataclass(frozen=True, slots=True)
class Wait:
    """The collective that one rank is in."""

    rank: int
    group: str
    slot: int  # the count of collectives in the group, the same for all ranks that agree
    collective: str  # as "gloo:barrier"
    place: str  # innermost lines of the trainer on its stack; "" where it gave none


def ask(socket_path: Path, handler: str) -> bytes:
    """One answer of a worker server. Raises httpx.HTTPError or OSError where there is none."""
    transport = httpx.HTTPTransport(uds=str(socket_path.resolve()))  # it may be a link to a shorter name
    with httpx.Client(transport=transport, timeout=ASK_SECONDS) as client:
        return client.post(f"http://rank/handler/{handler}").raise_for_status().content


def wait_of(rank: int, record: Mapping[str, Any], stacks: str) -> Wait | None:
    """None where the record has nothing under way."""
    for entry in record.get("entries", ()):
        if not entry["retired"] and entry["state"] != "completed":
            group = entry["process_group"][1] or entry["process_group"][0]
            return Wait(rank, group, entry["collective_seq_id"], entry["profiling_name"], place_in(stacks))
    return None


def place_in(stacks: str) -> str:
    """The trainer's own frames of the main thread, which stands last, innermost first."""
    frames = FRAME.findall(stacks.rpartition("Thread 0x")[2])[:2]
    return " in ".join(f"{function} ({file}:{line})" for file, line, function in frames)


@dataclass(frozen=True, slots=True)
class Parting:
    """Ranks by what they wait in, at one slot of one group."""

    group: str
    slot: int
    ranks: Mapping[str, tuple[int, ...]]  # by collective


def parting_of(waits: Sequence[Wait]) -> Parting | None:
    """Where the ranks have parted: one slot of one group, different collectives. None where they have not."""
    slots = {(wait.group, wait.slot) for wait in waits}
    names = sorted({wait.collective for wait in waits})
    if len(slots) != 1 or len(names) < 2:
        return None
    ((group, slot),) = slots
    by_name = {name: tuple(wait.rank for wait in waits if wait.collective == name) for name in names}
    return Parting(group, slot, by_name)
