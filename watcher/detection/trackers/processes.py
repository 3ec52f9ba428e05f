"""Whose process is gone. A node that does not answer says nothing; a restart within two looks is a restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import KernelEvent, ProcessSample
from wattwatch.watcher.detection.model import NodeState, Suspect
from wattwatch.watcher.detection.trackers.observation import Observation

EXITED_SAMPLES: Final = 2
DONE_PHASE: Final = "done"
ENDED_STATES: Final = frozenset("ZXx")  # in /proc/PID/stat: it has ended, and its parent has not asked for it yet
# Somebody's test on a board of the node comes and goes as well; the job's own ranks stay.
UNRELATED_OBSERVATIONS: Final = 10
# A board whose memory in use fell below this share was given up by whoever filled it, whoever else holds it still.
RELEASED_MEMORY_SHARE: Final = 0.5
# A process computes that used this share of one core over so long.
CPU_SECONDS: Final = 30.0
CPU_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class ExitedProcess:
    """A process of the job that was there and is not."""

    node: str
    process: ProcessSample
    cause: str  # what the kernel log says of its end; "" where it says nothing
    held_bytes: float | None = None  # the most that was in use on its boards while it lived; None: boards do not say
    since_seconds: float = 0.0  # the look at which it was first missing
    observed_seconds: float = 0.0  # the look at which a sample last showed it

    @property
    def suspect(self) -> Suspect:
        boards = self.process.gpu_indexes
        return Suspect(self.node, boards[0] if len(boards) == 1 else None, self.process.rank)


@dataclass(slots=True)
class KnownProcess:
    """A process of the job as it was last seen, and on how many looks; `missing`: samples of its node without it."""

    process: ProcessSample
    looks: int = 0
    held_bytes: float | None = None  # as in Gone
    missing: int = 0
    missed_at: int | None = None  # sequence of the last such sample
    missed_since: float = 0.0  # look at the first of them
    seen_at: int | None = None  # sequence of the last sample with it
    seen_since: float = 0.0  # look at which that sample was new: the same one may be looked at again
    cpu: tuple[float, float] | None = None  # (looked at, CPU seconds) some while ago
    computes: bool = False  # it used most of a core meanwhile

    def follow_cpu(self, cpu_seconds: float | None, now: float) -> None:
        """Over a while: a process that waits wakes up now and then."""
        if cpu_seconds is None or (self.cpu is not None and cpu_seconds < self.cpu[1]):
            self.cpu, self.computes = None, False
        elif self.cpu is None:
            self.cpu = (now, cpu_seconds)
        elif now - self.cpu[0] >= CPU_SECONDS:
            self.computes = cpu_seconds - self.cpu[1] >= CPU_SHARE * (now - self.cpu[0])
            self.cpu = (now, cpu_seconds)


ProcessKey = tuple[int, float]  # pid and start: a pid alone is used again


class ProcessTracker:
    """Remembers the job's processes by node: those with a rank; where none has one, those that hold a board."""

    def __init__(self) -> None:
        self._known: dict[str, dict[ProcessKey, KnownProcess]] = {}
        self._ends: dict[str, list[KernelEvent]] = {}
        self._ranked = False
        self._now = 0.0
        self._in_use: dict[tuple[str, int], float] = {}  # bytes by node and board, in this look
        self.job_restarted = False  # in this very look a process came where another had gone: the job was started again

    def update(self, observation: Observation) -> None:
        self.job_restarted = False
        self._now = observation.now
        self._in_use = {
            (board.node, board.gpu.index): board.gpu.memory_used_bytes
            for board in observation.sample.gpus
            if board.gpu.index is not None and board.gpu.memory_used_bytes is not None
        }
        for node in observation.sample.nodes:
            self._ends.setdefault(node.node, []).extend(e for e in node.kernel_events if e.pid is not None)
            del self._ends[node.node][:-50]
            if node.processes is not None:
                self._look_at_node(node, node.processes)
        if self.job_restarted:
            # Who is missing on another node belongs to the run before: the new one may be smaller, or come up later.
            self.forget_missing()

    def _look_at_node(self, node: NodeState, processes: tuple[ProcessSample, ...]) -> None:
        alive = {(p.pid, p.started_seconds): p for p in processes if p.state not in ENDED_STATES}
        known = self._known.setdefault(node.node, {})
        came = [p for key, p in alive.items() if key not in known and (p.gpu_indexes or p.rank is not None)]
        # Also one that left since the sample before: a quick restart shows the new one where the old one was.
        departed = [key for key in known if key not in alive]
        if any(_replaces(process, known[key].process) for key in departed for process in came):
            self.job_restarted = True
            for key in departed:
                del known[key]
        for key, process in alive.items():
            if process.gpu_indexes or process.rank is not None or key in known:
                self._ranked = self._ranked or process.rank is not None
                entry = known.setdefault(key, KnownProcess(process))
                # What it held once it is known by: a query that failed names no board.
                if process.gpu_indexes or process.rank is not None:
                    entry.process = process
                entry.looks, entry.missing = entry.looks + 1, 0
                if entry.seen_at is None or entry.seen_at != node.sequence:
                    entry.seen_at, entry.seen_since = node.sequence, self._now
                entry.follow_cpu(process.cpu_seconds, self._now)
                in_use = self._bytes_on(node.node, entry.process)
                if in_use is not None:
                    entry.held_bytes = max(entry.held_bytes or 0.0, in_use)
        for key, entry in known.items():
            # Without boards in sight nobody can say who holds one: only a rank's pid is looked for then.
            sure = node.fresh or entry.process.rank is not None
            if key not in alive and sure and (not entry.missing or entry.missed_at != node.sequence):
                entry.missed_since = entry.missed_since if entry.missing else self._now
                entry.missing, entry.missed_at = entry.missing + 1, node.sequence

    def forget_missing(self) -> None:
        """The job goes on without them."""
        for known in self._known.values():
            for key in [key for key, entry in known.items() if entry.missing]:
                del known[key]

    def _missing(self) -> Iterator[tuple[str, KnownProcess]]:
        """Those that count: ranks; else whoever held a board for a while that nobody holds now."""
        looks = [entry.looks for known in self._known.values() for entry in known.values()]
        all_left = self.all_exited and max(looks) >= UNRELATED_OBSERVATIONS
        for node, known in sorted(self._known.items()):
            held = {i for entry in known.values() if not entry.missing for i in entry.process.gpu_indexes}
            for entry in known.values():
                if not entry.missing or (self._ranked and entry.process.rank is None):
                    continue
                others = bool(held.intersection(entry.process.gpu_indexes))
                stranger = entry.looks < UNRELATED_OBSERVATIONS or (others and not self._given_up(node, entry))
                if self._ranked or all_left or not stranger:
                    yield node, entry

    def _bytes_on(self, node: str, process: ProcessSample) -> float | None:
        told = [self._in_use[node, i] for i in process.gpu_indexes if (node, i) in self._in_use]
        return sum(told) if told else None

    def _given_up(self, node: str, entry: KnownProcess) -> bool:
        """Its boards are held by others, such as a monitor; but what was in their memory has gone with it."""
        in_use = self._bytes_on(node, entry.process)
        return in_use is not None and entry.held_bytes is not None and in_use < RELEASED_MEMORY_SHARE * entry.held_bytes

    @property
    def few_processes_compute(self) -> bool:
        """Some of the job's processes use a core and most do not: these prepare what the others wait for. Where all
        use one they may as well poll."""
        living = [entry for known in self._known.values() for entry in known.values() if not entry.missing]
        working = sum(entry.computes for entry in living)
        return working > 0 and (2 * working <= len(living) or len(living) == 1)

    @property
    def any_missing(self) -> bool:
        """Somebody is missing, if only since this look."""
        return next(self._missing(), None) is not None

    @property
    def ranked(self) -> bool:
        """A heartbeat named one of them."""
        return self._ranked

    @property
    def all_exited(self) -> bool:
        """Every process of the job that was ever seen is gone."""
        counted = [
            (node, entry)
            for node, known in self._known.items()
            for entry in known.values()
            if not self._ranked or entry.process.rank is not None
        ]
        left = [(node, entry) for node, entry in counted if entry.missing]
        names = {entry.process.name for _, entry in left}
        if not left or any(entry.process.name in names for _, entry in counted if not entry.missing):
            return False
        # Whoever stays under another name, such as a monitor, is none of the job's if its memory went without them.
        return len(left) == len(counted) or all(self._given_up(node, entry) for node, entry in left)

    def exited(self) -> tuple[ExitedProcess, ...]:
        """Those missing on two samples of their node."""
        return tuple(
            ExitedProcess(
                node,
                entry.process,
                self._cause(node, entry.process),
                entry.held_bytes,
                entry.missed_since,
                entry.seen_since,
            )
            for node, entry in self._missing()
            if entry.missing >= EXITED_SAMPLES
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


def _replaces(new: ProcessSample, exited: ProcessSample) -> bool:
    """The same rank again, or a process of the same name on the same board."""
    if new.rank is not None and exited.rank is not None:
        return new.rank == exited.rank
    if new.name != exited.name:
        return False
    return not exited.gpu_indexes or bool(set(new.gpu_indexes).intersection(exited.gpu_indexes))
