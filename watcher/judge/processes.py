"""Whose process is gone. A node that does not answer says nothing; a restart within two looks is a restart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from collectors.samples import KernelEvent, ProcessSample
from watcher.judge.look import Look
from watcher.judge.verdict import Suspect

GONE_ROUNDS: Final = 2
DONE: Final = "done"


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


class Processes:
    """Remembers the job's processes by node; only those that hold a board or have a rank count."""

    def __init__(self) -> None:
        self._known: dict[str, dict[tuple[int, float], ProcessSample]] = {}
        self._missing: dict[tuple[str, int, float], tuple[ProcessSample, int, int | None]] = {}
        self._ends: dict[str, list[KernelEvent]] = {}
        self.ever = False
        self.renewed = False  # in this very look a process came where another had gone: the job was started again

    def look(self, look: Look) -> None:
        self.renewed = False
        for node in look.sample.nodes:
            self._ends.setdefault(node.node, []).extend(e for e in node.kernel_events if e.pid is not None)
            del self._ends[node.node][:-50]
            if node.processes is None:
                continue
            present = {(p.pid, p.started_seconds): p for p in node.processes if p.gpu_indexes or p.rank is not None}
            known = self._known.get(node.node, {})
            self.ever = self.ever or bool(present)
            if any(n == node.node for n, _, _ in self._missing) and any(key not in known for key in present):
                self._forget(node.node)
                self.renewed = True
            for key in present:
                self._missing.pop((node.node, *key), None)
            for key, process in known.items():
                if key in present:
                    continue
                last = self._missing.get((node.node, *key))
                if last is None:
                    self._missing[(node.node, *key)] = (process, 1, node.sequence)
                elif last[2] != node.sequence:
                    self._missing[(node.node, *key)] = (process, last[1] + 1, node.sequence)
            self._known[node.node] = {**known, **present}

    def _forget(self, node: str) -> None:
        """New processes came: the job, or this rank, was started again."""
        for key in [k for k in self._missing if k[0] == node]:
            del self._missing[key]
        self._known[node] = {}

    @property
    def just_gone(self) -> bool:
        """Somebody is missing, if only since this look."""
        return bool(self._missing)

    def gone(self) -> tuple[Gone, ...]:
        """Those missing on two samples of their node."""
        return tuple(
            Gone(node, process, self._cause(node, process))
            for (node, _, _), (process, rounds, _) in sorted(self._missing.items(), key=lambda item: item[0])
            if rounds >= GONE_ROUNDS
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
