"""Whose process is gone. A node that does not answer says nothing; a restart within two looks is a restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from collectors.samples import KernelEvent, ProcessSample
from watcher.judge.job_sample import NodeState
from watcher.judge.look import Look
from watcher.judge.verdict import Suspect

GONE_ROUNDS: Final = 2
DONE: Final = "done"
ENDED: Final = frozenset("ZXx")  # in /proc/PID/stat: it has ended, and its parent has not asked for it yet
# Somebody's test on a board of the node comes and goes as well; the job's own ranks stay.
STRANGER_LOOKS: Final = 10


@dataclass(frozen=True, slots=True)
class Gone:
    """A process of the job that was there and is not."""

    node: str
    process: ProcessSample
    cause: str  # what the kernel log says of its end; "" where it says nothing

    @property
    def suspect(self) -> Suspect:
        boards = self.process.gpu_indexes
        return Suspect(self.node, boards[0] if len(boards) == 1 else None, self.process.rank)


@dataclass(slots=True)
class Known:
    """A process of the job as it was last seen, and on how many looks; `missing`: samples of its node without it."""

    process: ProcessSample
    looks: int = 0
    missing: int = 0
    missed_at: int | None = None  # sequence of the last such sample


Key = tuple[int, float]  # pid and start: a pid alone is used again


class Processes:
    """Remembers the job's processes by node: those with a rank; where none has one, those that hold a board."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Key, Known]] = {}
        self._ends: dict[str, list[KernelEvent]] = {}
        self._ranked = False
        self.renewed = False  # in this very look a process came where another had gone: the job was started again

    def look(self, look: Look) -> None:
        self.renewed = False
        for node in look.sample.nodes:
            self._ends.setdefault(node.node, []).extend(e for e in node.kernel_events if e.pid is not None)
            del self._ends[node.node][:-50]
            if node.processes is not None:
                self._look_at_node(node, node.processes)
        if self.renewed:
            # Who is missing on another node belongs to the run before: the new one may be smaller, or come up later.
            self.forget_missing()

    def _look_at_node(self, node: NodeState, processes: tuple[ProcessSample, ...]) -> None:
        alive = {(p.pid, p.started_seconds): p for p in processes if p.state not in ENDED}
        known = self._known.setdefault(node.node, {})
        came = [p for key, p in alive.items() if key not in known and (p.gpu_indexes or p.rank is not None)]
        # Also one that left since the sample before: a quick restart shows the new one where the old one was.
        departed = [key for key in known if key not in alive]
        if any(_replaces(process, known[key].process) for key in departed for process in came):
            self.renewed = True
            for key in departed:
                del known[key]
        for key, process in alive.items():
            if process.gpu_indexes or process.rank is not None or key in known:
                self._ranked = self._ranked or process.rank is not None
                entry = known.setdefault(key, Known(process))
                # What it held once it is known by: a query that failed names no board.
                if process.gpu_indexes or process.rank is not None:
                    entry.process = process
                entry.looks, entry.missing = entry.looks + 1, 0
        for key, entry in known.items():
            # Without boards in sight nobody can say who holds one: only a rank's pid is looked for then.
            sure = node.fresh or entry.process.rank is not None
            if key not in alive and sure and (not entry.missing or entry.missed_at != node.sequence):
                entry.missing, entry.missed_at = entry.missing + 1, node.sequence

    def forget_missing(self) -> None:
        """The job goes on without them."""
        for known in self._known.values():
            for key in [key for key, entry in known.items() if entry.missing]:
                del known[key]

    def _missing(self) -> Iterator[tuple[str, Known]]:
        """Those that count: ranks; else whoever held a board for a while that nobody holds now."""
        looks = [entry.looks for known in self._known.values() for entry in known.values()]
        all_left = self.nobody_left and max(looks) >= STRANGER_LOOKS
        for node, known in sorted(self._known.items()):
            held = {i for entry in known.values() if not entry.missing for i in entry.process.gpu_indexes}
            for entry in known.values():
                if not entry.missing or (self._ranked and entry.process.rank is None):
                    continue
                stranger = entry.looks < STRANGER_LOOKS or bool(held.intersection(entry.process.gpu_indexes))
                if self._ranked or all_left or not stranger:
                    yield node, entry

    @property
    def just_gone(self) -> bool:
        """Somebody is missing, if only since this look."""
        return next(self._missing(), None) is not None

    @property
    def nobody_left(self) -> bool:
        """Every process of the job that was ever seen is gone."""
        counted = [e for known in self._known.values() for e in known.values() if e.process.rank is not None]
        if not self._ranked:
            counted = [entry for known in self._known.values() for entry in known.values()]
        return bool(counted) and all(entry.missing for entry in counted)

    def gone(self) -> tuple[Gone, ...]:
        """Those missing on two samples of their node."""
        return tuple(
            Gone(node, entry.process, self._cause(node, entry.process))
            for node, entry in self._missing()
            if entry.missing >= GONE_ROUNDS
        )

    def _cause(self, node: str, process: ProcessSample) -> str:
        events = [e for e in self._ends.get(node, ()) if e.pid == process.pid]
        for event in reversed(events):
            if event.kind == "oom":
                return f"killed by the kernel, out of memory (OOM): {event.text[:160]}"
            if event.kind == "xid":
                return f"Xid {event.xid}: {event.text[:160]}"
            if event.kind == "segfault":
                return f"segmentation fault: {event.text[:160]}"
        return ""


def _replaces(new: ProcessSample, gone: ProcessSample) -> bool:
    """The same rank again, or a process on the same board."""
    if new.rank is not None and gone.rank is not None:
        return new.rank == gone.rank
    return not gone.gpu_indexes or bool(set(new.gpu_indexes).intersection(gone.gpu_indexes))
