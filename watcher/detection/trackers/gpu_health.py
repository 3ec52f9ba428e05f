"""Faulty GPUs: lost, in need of a reset, missing from the list, with new memory errors, or named by a fatal Xid."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Final

from wattwatch.collectors.samples import GpuSample, KernelEvent, ReadingStatus
from wattwatch.watcher.common.formatting import format_count, format_duration
from wattwatch.watcher.detection.model import PCI_ID, NodeState, Suspect, normalized_pci_id
from wattwatch.watcher.detection.trackers.observation import Observation, Streak

# One reading may fail by itself; a GPU whose readings fail in two rounds is faulty. "Lost" and "reset required" are the
# driver's own words and count at once.
UNREADABLE_ROUNDS: Final = 2
# The kernel logs an Xid once. It counts for this long, or until the GPU is healthy after a restart of the node.
XID_SECONDS: Final = 900.0
# After a reconnect the probe sends old lines again: an Xid older than this is history.
RECENT_LINE_SECONDS: Final = 120.0
# The same text with a time stamp later than this is a new event, otherwise the same line sent again.
SAME_LINE_SECONDS: Final = 60.0
KEPT_LINES: Final = 1000
LAST_SEEN: Final = "the GPUs of its node cannot be read now; this was last seen "
MAX_FIELDS_NAMED: Final = 4
FAULT_TEXT: Final = {
    ReadingStatus.LOST: "is lost according to the driver",
    ReadingStatus.RESET_REQUIRED: "needs a reset according to the driver",
    ReadingStatus.UNREADABLE: "cannot be read",
}

GpuPlace = tuple[str, str]  # node and key of a GPU


@cache
def fatal_xids() -> Mapping[int, str]:
    """Xid code -> meaning, from xid.toml: the GPU, its memory, its link or its firmware failed."""
    table = tomllib.loads(resources.files(__package__).joinpath("xid.toml").read_text("utf-8"))
    return {int(code): meaning for code, meaning in table["faults"].items()}


@cache
def degrading_xids() -> Mapping[int, str]:
    """Xid code -> meaning, from xid.toml: the GPU works on, and needs a reset at the next opportunity."""
    table = tomllib.loads(resources.files(__package__).joinpath("xid.toml").read_text("utf-8"))
    return {int(code): meaning for code, meaning in table["wear"].items()}


@dataclass(frozen=True, slots=True)
class FaultyGpu:
    """One GPU with all evidence of its fault."""

    suspect: Suspect
    key: str  # PCI id, UUID or index: scope of the alert
    evidence: tuple[str, ...]
    since_seconds: float  # when the fault was first seen
    unusable: bool = True  # False: only the kernel log or a counter reports it, and the GPU works on
    answers: bool = False  # only the kernel log reports it, and the GPU's readings are those of a working one
    xid: int | None = None  # the Xid that decided; None where the driver itself reports the GPU as lost or broken
    causes: tuple[str, ...] = ()  # kinds of fault in the evidence: "lost", "Xid 79"
    read_seconds: float = 0.0  # when it was last found so: its node may be unreadable since then
    memory_error_seconds: float | None = None  # when its counter of uncorrected memory errors last rose


@dataclass(slots=True)
class EccCount:
    """A GPU's counter of uncorrected memory errors: its last value, and what was added while it was followed."""

    last: float
    new: float = 0.0
    seen_seconds: float | None = None  # when it last rose


def _with_age(gpu: FaultyGpu, now: float) -> FaultyGpu:
    """A fault of a node that cannot be read now, with the time since it was last seen."""
    evidence = tuple(fact for fact in gpu.evidence if not fact.startswith(LAST_SEEN))
    return replace(gpu, evidence=(*evidence, f"{LAST_SEEN}{format_duration(now - gpu.read_seconds)} ago"))


class GpuHealthTracker:
    """Follows the GPUs of one job."""

    def __init__(self) -> None:
        self._unreadable: dict[GpuPlace, Streak] = {}
        # By node and PCI id as the kernel writes it, then by code: the first line of a fault is not the last of it.
        self._xids: dict[GpuPlace, dict[int, tuple[float, KernelEvent]]] = {}
        self._known_lines: dict[tuple[str, str], float] = {}  # (node, text) -> time of the line, on our clock
        self._ecc_errors: dict[GpuPlace, EccCount] = {}
        self._since: dict[GpuPlace, float] = {}
        self._last: dict[GpuPlace, FaultyGpu] = {}
        self._places: dict[GpuPlace, Suspect] = {}  # (node, PCI id) -> index and rank when the GPU last answered
        self._same_gpu: dict[GpuPlace, str] = {}  # key -> the key under which the same GPU was reported first

    def update(self, observation: Observation) -> tuple[FaultyGpu, ...]:
        """All GPUs that are faulty now, each once with all evidence."""
        for node in observation.sample.nodes:
            self._read_kernel_log(node, observation.now)
        for ranked in observation.sample.gpus:
            if ranked.gpu.pci_bus_id is not None:
                place = (ranked.node, normalized_pci_id(ranked.gpu.pci_bus_id))
                self._places[place] = Suspect(ranked.node, ranked.gpu.index, ranked.rank)
        self._pair_missing_gpus(observation)
        found: dict[GpuPlace, tuple[Suspect, list[str]]] = {}
        causes: dict[GpuPlace, set[str]] = {}
        xids: dict[GpuPlace, int] = {}
        for suspect, key, text, fault in self._reported_by_gpus(observation):
            _add_evidence(found, suspect, key, text)
            causes.setdefault((suspect.node, key), set()).add(fault.value)
        reported = frozenset(found)
        unusable = set(reported)
        for suspect, key, text, code in self._reported_by_kernel(observation):
            place = (suspect.node, key)
            _add_evidence(found, suspect, key, text)
            causes.setdefault(place, set()).add(f"Xid {code}")
            if code in fatal_xids():
                unusable.add(place)
                xids[place] = code
            else:
                xids.setdefault(place, code)
        memory_errors: dict[GpuPlace, float] = {}
        for suspect, key, text, cause, seen_seconds in self._reported_by_counters(observation):
            _add_evidence(found, suspect, key, text)
            causes.setdefault((suspect.node, key), set()).add(cause)
            if seen_seconds is not None:
                memory_errors[suspect.node, key] = seen_seconds
        answers = self._add_answers(observation, {place: found[place] for place in xids if place not in reported})
        # A node whose GPUs cannot be read withdraws nothing: a lost GPU is lost until the node shows it again.
        readable = {node.node for node in observation.sample.nodes if node.fresh}
        kept = {place: gpu for place, gpu in self._last.items() if place[0] not in readable and place not in found}
        kept = {place: _with_age(gpu, observation.now) for place, gpu in kept.items()}
        self._since = {place: self._since.get(place, observation.now) for place in (*found, *kept)}
        self._last = kept | {
            place: FaultyGpu(
                suspect,
                place[1],
                tuple(evidence),
                self._since[place],
                place in unusable,
                place in answers,
                None if place in reported else xids.get(place),
                tuple(sorted(causes[place])),
                observation.now,
                memory_errors.get(place),
            )
            for place, (suspect, evidence) in found.items()
        }
        return tuple(self._last.values())

    def _reported_by_counters(self, observation: Observation) -> Iterator[tuple[Suspect, str, str, str, float | None]]:
        """(suspect, key, evidence, cause, time of the last new error) of GPUs whose memory had an error while they were
        followed, or needs repair.

        Errors from before belong to the past: the driver has replaced that memory, or says that it will.
        """
        for ranked in observation.sample.gpus:
            gpu = ranked.gpu
            total = gpu.uncorrected_ecc_errors
            if not total and not gpu.memory_repair_pending and not gpu.memory_repair_failed:
                known = self._ecc_errors.get((ranked.node, gpu.key))
                if total is not None and (known is None or known.last):
                    self._ecc_errors[ranked.node, gpu.key] = EccCount(0.0)
                continue
            suspect = Suspect(ranked.node, gpu.index, ranked.rank)
            key = self._canonical(ranked.node, self._key(ranked.node, gpu.index, gpu.pci_bus_id))
            if total is not None:
                text = self._new_errors((ranked.node, gpu.key), gpu, total, observation.now)
                if text:
                    yield (
                        suspect,
                        key,
                        text,
                        "uncorrected ECC errors",
                        self._ecc_errors[ranked.node, gpu.key].seen_seconds,
                    )
            if gpu.memory_repair_pending:
                text = f"GPU {gpu.index}: the driver replaces damaged memory at the next reset of the GPU"
                yield suspect, key, text, "memory repair pending", None
            if gpu.memory_repair_failed:
                text = f"GPU {gpu.index}: the driver could not replace damaged memory: no spare row is left"
                yield suspect, key, text, "memory repair failed", None

    def _new_errors(self, place: GpuPlace, gpu: GpuSample, total: float, now: float) -> str:
        """The errors that were counted while the GPU was followed, with their age; "" for none in the last minutes."""
        known = self._ecc_errors.get(place)
        if known is None or total < known.last:  # not seen before, or the driver was reloaded
            known = self._ecc_errors[place] = EccCount(total)
        if total > known.last:
            known.new, known.seen_seconds = known.new + total - known.last, now
            known.last = total
        if known.seen_seconds is None or now - known.seen_seconds > XID_SECONDS:
            known.new = 0.0
            return ""
        new = format_count(int(known.new), "new uncorrected memory (ECC) error")
        lifetime = gpu.lifetime_uncorrected_ecc_errors
        ever = "" if lifetime is None else f", {format_count(int(lifetime), 'error')} in its lifetime"
        age = format_duration(now - known.seen_seconds)
        return f"GPU {gpu.index}: {new}, the last one seen {age} ago; {total:,.0f} since the driver was loaded{ever}"

    def _add_answers(
        self, observation: Observation, found: dict[GpuPlace, tuple[Suspect, list[str]]]
    ) -> frozenset[GpuPlace]:
        """Those of which only the kernel log reports a fault while the GPU answers, with its readings as evidence."""
        answers: set[GpuPlace] = set()
        for ranked in observation.sample.gpus if found else ():
            watts, percent = ranked.gpu.power_watts, ranked.gpu.utilization_percent
            if ranked.gpu.pci_bus_id is None or ranked.gpu.fault is not None or watts is None or percent is None:
                continue
            place = (ranked.node, normalized_pci_id(ranked.gpu.pci_bus_id))
            if place in found:
                answers.add(place)
                found[place][1].append(f"the GPU answers: {watts:.0f} W, utilization {percent:.0f} %")
        return frozenset(answers)

    def _pair_missing_gpus(self, observation: Observation) -> None:
        """Recognize a GPU that one source names by its index and another one by its PCI id, where only one GPU of the
        node is missing: all others are there, so it can be no other."""
        for node in observation.sample.nodes:
            if len(node.missing_gpus) != 1 or not self._xids:
                continue
            known = {key for at, key in self._places if at == node.node}
            by_kernel = {
                key
                for (at, pci_id) in self._xids
                if at == node.node and (key := normalized_pci_id(pci_id)) not in known and PCI_ID.fullmatch(key)
            }
            missing = [each for each in node.missing_gpus if each.pci_bus_id is None and each.index is not None]
            by_index = {self._key(node.node, each.index, None) for each in missing} - known
            if len(by_kernel) != 1 or len(by_index) != 1:
                continue
            (pci_id,), (index,) = by_kernel, by_index
            first, second = (index, pci_id) if (node.node, index) in self._since else (pci_id, index)
            if (node.node, first) not in self._same_gpu:
                self._same_gpu.setdefault((node.node, second), first)

    def _read_kernel_log(self, node: NodeState, now: float) -> None:
        for event in node.kernel_events:
            if event.xid not in fatal_xids() and event.xid not in degrading_xids():
                continue
            line, written = (node.node, event.text), now - (event.age_seconds or 0.0)
            before = self._known_lines.pop(line, None)
            # A line without an age cannot be told from the one that was read before.
            repeated = before is not None and (event.age_seconds is None or written - before <= SAME_LINE_SECONDS)
            self._known_lines[line] = before if repeated and before is not None else written
            if len(self._known_lines) > KEPT_LINES:
                del self._known_lines[next(iter(self._known_lines))]
            if repeated:
                continue
            if event.age_seconds is None or event.age_seconds <= RECENT_LINE_SECONDS:
                place = (node.node, (event.pci_bus_id or "?").lower())
                self._xids.setdefault(place, {})[event.xid or 0] = (now, event)

    def _reported_by_gpus(self, observation: Observation) -> Iterator[tuple[Suspect, str, str, ReadingStatus]]:
        """(suspect, key, evidence, fault) of GPUs that are missing, or whose readings report a fault."""
        for node in observation.sample.nodes:
            for missing in node.missing_gpus:
                suspect = observation.sample.missing_suspect(node.node, missing)
                key = self._key(node.node, missing.index, missing.pci_bus_id)
                known = self._places.get((node.node, key), suspect)
                if suspect.rank is None and known.gpu in (None, suspect.gpu):
                    suspect = Suspect(node.node, suspect.gpu if suspect.gpu is not None else known.gpu, known.rank)
                yield suspect, self._canonical(node.node, key), missing.text, missing.reason
        faulty = set()
        for ranked in observation.sample.gpus:
            fault = ranked.gpu.fault
            if fault is None:
                continue
            place = (ranked.node, ranked.gpu.key)
            faulty.add(place)
            streak = self._unreadable.setdefault(place, Streak())
            streak.update(True, observation, ranked.node)
            if fault is ReadingStatus.UNREADABLE and streak.rounds < UNREADABLE_ROUNDS:
                continue
            names = sorted(name for name, reason in ranked.gpu.reasons.items() if reason is fault)
            fields = ", ".join(name.rpartition("_")[0].replace("_", " ") or name for name in names[:MAX_FIELDS_NAMED])
            text = f"GPU {ranked.gpu.index} {FAULT_TEXT[fault]}: it returns no {fields}"
            key = self._key(ranked.node, ranked.gpu.index, ranked.gpu.pci_bus_id)
            yield Suspect(ranked.node, ranked.gpu.index, ranked.rank), self._canonical(ranked.node, key), text, fault
        for place in [place for place in self._unreadable if place not in faulty]:
            del self._unreadable[place]

    def _reported_by_kernel(self, observation: Observation) -> Iterator[tuple[Suspect, str, str, int]]:
        """(suspect, key, evidence, Xid) of GPUs with a recent Xid. Evidence begins with "Xid CODE": alerting
        keeps such episodes for as long as the Xid counts, even if the GPU answers."""
        for (node, pci_id), events in list(self._xids.items()):
            for code in [code for code, (since, _) in events.items() if observation.now - since > XID_SECONDS]:
                del events[code]
            if not events:
                del self._xids[(node, pci_id)]
            key = normalized_pci_id(pci_id)
            suspect = self._places.get((node, key), Suspect(node))
            # The fatal ones first: they decide, and readers of a cut message must see them.
            ordered = sorted(events.items(), key=lambda item: (item[0] not in fatal_xids(), item[1][0]))
            for code, (since, event) in ordered:
                meaning = fatal_xids().get(code) or degrading_xids()[code]
                age = format_duration(observation.now - since + (event.age_seconds or 0.0))
                text = f"Xid {code} ({meaning}), logged {age} ago: {event.text}"
                yield suspect, self._canonical(node, key), text, code

    def _canonical(self, node: str, key: str) -> str:
        return self._same_gpu.get((node, key), key)

    def _key(self, node: str, index: int | None, pci_id: str | None) -> str:
        """One key per GPU however a source names it: its PCI id where any sample had it, else its index."""
        if pci_id is not None:
            return normalized_pci_id(pci_id)
        known = (known for (at, known), suspect in self._places.items() if at == node and suspect.gpu == index)
        return next(known, "?" if index is None else str(index))


def _add_evidence(found: dict[GpuPlace, tuple[Suspect, list[str]]], suspect: Suspect, key: str, text: str) -> None:
    """One finding per GPU. The source that knows its rank names it."""
    known, evidence = found.setdefault((suspect.node, key), (suspect, []))
    if known.rank is None and suspect.rank is not None:
        found[suspect.node, key] = (suspect, evidence)
    if text not in evidence:
        evidence.append(text)
