"""Broken boards: lost, wanting a reset, vanished from the list, or named by a fatal Xid in the kernel log."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from wattwatch.collectors.samples import KernelEvent, ReadingStatus
from wattwatch.watcher.detection.model import NodeState, Suspect, normalized_pci_id
from wattwatch.watcher.detection.trackers.observation import Observation, Streak

# A reading may fail once; a board that fails on two rounds is broken. Lost and reset are said by the driver: at once.
UNREADABLE_ROUNDS: Final = 2
# The kernel says a thing once: it is remembered this long, or until the board is seen healthy after a restart.
XID_SECONDS: Final = 900.0
# Lines are sent again after a reconnect; an old one is history.
RECENT_LINE_SECONDS: Final = 120.0
# The same words once more: sent again if written at that time, a new event if written later than this.
SAME_LINE_SECONDS: Final = 60.0
KEPT_LINES: Final = 1000


@cache
def fatal_xids() -> Mapping[int, str]:
    """Code -> what it means, from xid.toml."""
    table = tomllib.loads(resources.files(__package__).joinpath("xid.toml").read_text("utf-8"))
    return {int(code): meaning for code, meaning in table["faults"].items()}


@cache
def degrading_xids() -> Mapping[int, str]:
    """Code -> what it means, from xid.toml: the board works on, and wants a reset at the next occasion."""
    table = tomllib.loads(resources.files(__package__).joinpath("xid.toml").read_text("utf-8"))
    return {int(code): meaning for code, meaning in table["wear"].items()}


@dataclass(frozen=True, slots=True)
class FaultyGpu:
    """One board and everything that says it is broken."""

    suspect: Suspect
    key: str  # UUID, PCI id or index: what the episode is about
    evidence: tuple[str, ...]
    since_seconds: float  # when it was first told
    grave: bool = True  # False: only the kernel log says so, and the board can go on


class GpuHealthTracker:
    """Follows the boards of one job."""

    def __init__(self) -> None:
        self._unreadable: dict[tuple[str, str], Streak] = {}
        self._xids: dict[tuple[str, str], tuple[float, KernelEvent]] = {}
        self._known_lines: dict[tuple[str, str], float] = {}  # (node, text) -> when it was written, on our clock
        self._since: dict[tuple[str, str], float] = {}
        self._last: dict[tuple[str, str], FaultyGpu] = {}
        self._places: dict[tuple[str, str], Suspect] = {}  # (node, PCI id) -> index and rank when it last answered

    def update(self, observation: Observation) -> tuple[FaultyGpu, ...]:
        """All boards that are broken now, one entry a board, with every witness of it."""
        for node in observation.sample.nodes:
            self._read_kernel(node, observation.now)
        for ranked in observation.sample.gpus:
            if ranked.gpu.pci_bus_id is not None:
                place = (ranked.node, normalized_pci_id(ranked.gpu.pci_bus_id))
                self._places[place] = Suspect(ranked.node, ranked.gpu.index, ranked.rank)
        found: dict[tuple[str, str], tuple[Suspect, list[str]]] = {}
        grave: set[tuple[str, str]] = set()
        told = [(*each, True) for each in self._told(observation)]
        for suspect, key, words, is_grave in (*told, *self._named_by_kernel(observation)):
            entry = found.setdefault((suspect.node, key), (suspect, []))
            if words not in entry[1]:
                entry[1].append(words)
            if is_grave:
                grave.add((suspect.node, key))
        # A node whose boards are out of sight takes nothing back: a lost board is lost until the node shows it again.
        seen = {node.node for node in observation.sample.nodes if node.fresh}
        held = {place: board for place, board in self._last.items() if place[0] not in seen and place not in found}
        self._since = {place: self._since.get(place, observation.now) for place in (*found, *held)}
        self._last = held | {
            place: FaultyGpu(suspect, place[1], tuple(words), self._since[place], place in grave)
            for place, (suspect, words) in found.items()
        }
        return tuple(self._last.values())

    def _read_kernel(self, node: NodeState, now: float) -> None:
        for event in node.kernel_events:
            if event.xid not in fatal_xids() and event.xid not in degrading_xids():
                continue
            line, written = (node.node, event.text), now - (event.age_seconds or 0.0)
            before = self._known_lines.pop(line, None)
            # A line without an age cannot be told from the one that was read before.
            again = before is not None and (event.age_seconds is None or written - before <= SAME_LINE_SECONDS)
            self._known_lines[line] = before if again and before is not None else written
            if len(self._known_lines) > KEPT_LINES:
                del self._known_lines[next(iter(self._known_lines))]
            if again:
                continue
            if event.age_seconds is None or event.age_seconds <= RECENT_LINE_SECONDS:
                self._xids[(node.node, (event.pci_bus_id or "?").lower())] = (now, event)

    def _told(self, observation: Observation) -> Iterator[tuple[Suspect, str, str]]:
        """What the boards themselves, or their absence, say."""
        for node in observation.sample.nodes:
            for missing in node.missing_gpus:
                suspect = Suspect(node.node, missing.index)
                yield suspect, self._key(node.node, missing.index, missing.pci_bus_id), missing.text
        faulty = set()
        for ranked in observation.sample.gpus:
            fault = ranked.gpu.fault
            if fault is None:
                continue
            place = (ranked.node, ranked.gpu.key)
            faulty.add(place)
            held = self._unreadable.setdefault(place, Streak())
            held.update(True, observation, ranked.node)
            if fault is ReadingStatus.UNREADABLE and held.rounds < UNREADABLE_ROUNDS:
                continue
            fields = ", ".join(sorted(name for name, reason in ranked.gpu.reasons.items() if reason is fault)[:4])
            words = f"GPU {ranked.gpu.index} {fault.value.replace('_', ' ')}: {fields}"
            key = self._key(ranked.node, ranked.gpu.index, ranked.gpu.pci_bus_id)
            yield Suspect(ranked.node, ranked.gpu.index, ranked.rank), key, words
        for place in [place for place in self._unreadable if place not in faulty]:
            del self._unreadable[place]

    def _named_by_kernel(self, observation: Observation) -> Iterator[tuple[Suspect, str, str, bool]]:
        for (node, pci), (since, event) in list(self._xids.items()):
            if observation.now - since > XID_SECONDS:
                del self._xids[(node, pci)]
                continue
            suspect = self._places.get((node, normalized_pci_id(pci)), Suspect(node))
            code = event.xid or 0
            meaning = fatal_xids().get(code) or degrading_xids()[code]
            yield suspect, normalized_pci_id(pci), f"Xid {code} ({meaning}): {event.text}", code in fatal_xids()

    def _key(self, node: str, index: int | None, pci: str | None) -> str:
        """One name for a board however a witness names it: its PCI id where any sample told it, else its index."""
        if pci is not None:
            return normalized_pci_id(pci)
        told = (known for (at, known), suspect in self._places.items() if at == node and suspect.gpu == index)
        return next(told, "?" if index is None else str(index))
