"""Which of the job's processes have exited. A node that does not answer says nothing, and a restart within two
observations is a restart, not an exit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import KernelEvent, ProcessSample
from wattwatch.watcher.detection.model import NodeState, Suspect
from wattwatch.watcher.detection.trackers.observation import Observation

# One process listing may fail to show a living process, so an exit takes two.
EXITED_SAMPLES: Final = 2
DONE_PHASE: Final = "done"
ENDED_STATES: Final = frozenset("ZXx")  # in /proc/PID/stat: exited, and not yet reaped by its parent
# Somebody's test on one of the node's GPUs comes and goes; the job's own ranks stay for longer than this.
UNRELATED_OBSERVATIONS: Final = 10
# Memory in use below this share of its maximum was released by whoever filled it, whoever else still holds the GPU.
RELEASED_MEMORY_SHARE: Final = 0.5
# A process counts as computing if it used this share of one core over this time: one that waits wakes up now and then.
CPU_SECONDS: Final = 30.0
CPU_SHARE: Final = 0.5
KEPT_KERNEL_EVENTS: Final = 50  # per node
MAX_KERNEL_TEXT: Final = 160


@dataclass(frozen=True, slots=True)
class ExitedProcess:
    """A process of the job that no longer exists."""

    node: str
    process: ProcessSample
    cause: str  # what the kernel log says about its end; "" for nothing
    held_bytes: float | None = None  # the most memory in use on its GPUs while it lived; None: no reading
    since_seconds: float = 0.0  # observation in which it was first missing
    last_seen_seconds: float = 0.0  # observation in which a new sample last showed it

    @property
    def suspect(self) -> Suspect:
        indexes = self.process.gpu_indexes
        return Suspect(self.node, indexes[0] if len(indexes) == 1 else None, self.process.rank)


@dataclass(slots=True)
class KnownProcess:
    """A process of the job as it was last seen."""

    process: ProcessSample
    observations: int = 0  # that showed it
    held_bytes: float | None = None  # as in ExitedProcess
    missing_samples: int = 0  # samples of its node without it
    missing_sequence: int | None = None  # sequence of the last such sample
    missing_since: float = 0.0  # observation of the first such sample
    seen_sequence: int | None = None  # sequence of the last sample with it
    # Observation in which that sample was new. The same sample may be evaluated again, and must not look like news.
    seen_since: float = 0.0
    cpu: tuple[float, float] | None = None  # (observation time, CPU seconds) some while ago
    is_computing: bool = False

    def update_cpu(self, cpu_seconds: float | None, now: float) -> None:
        if cpu_seconds is None or (self.cpu is not None and cpu_seconds < self.cpu[1]):
            self.cpu, self.is_computing = None, False
        elif self.cpu is None:
            self.cpu = (now, cpu_seconds)
        elif now - self.cpu[0] >= CPU_SECONDS:
            self.is_computing = cpu_seconds - self.cpu[1] >= CPU_SHARE * (now - self.cpu[0])
            self.cpu = (now, cpu_seconds)


ProcessKey = tuple[int, float]  # pid and start time: pids are reused


class ProcessTracker:
    """Remembers the job's processes by node: those with a rank or, where no heartbeat names one, those that hold a
    GPU."""

    def __init__(self) -> None:
        self._known: dict[str, dict[ProcessKey, KnownProcess]] = {}
        self._kernel_events: dict[str, list[KernelEvent]] = {}
        self._has_ranks = False
        self._now = 0.0
        self._in_use: dict[tuple[str, int], float] = {}  # bytes by node and GPU index, in this observation
        self.job_restarted = False  # in this observation a process replaced one that had exited

    def update(self, observation: Observation) -> None:
        self.job_restarted = False
        self._now = observation.now
        self._in_use = {
            (ranked.node, ranked.gpu.index): ranked.gpu.memory_used_bytes
            for ranked in observation.sample.gpus
            if ranked.gpu.index is not None and ranked.gpu.memory_used_bytes is not None
        }
        for node in observation.sample.nodes:
            events = self._kernel_events.setdefault(node.node, [])
            events.extend(e for e in node.kernel_events if e.pid is not None)
            del events[:-KEPT_KERNEL_EVENTS]
            self._update_node(node)
        if self.job_restarted:
            # Processes missing on other nodes belong to the previous run: the new one may be smaller, or start later.
            self.forget_missing()

    def _update_node(self, node: NodeState) -> None:
        known = self._known.setdefault(node.node, {})
        if node.processes is None:
            # Nothing is known of the others; but those that the node proves to be gone are gone.
            for key, entry in known.items():
                if key in node.exited_processes:
                    self._count_missing(entry, node)
            return
        alive = {(p.pid, p.started_seconds): p for p in node.processes if p.state not in ENDED_STATES}
        appeared = [p for key, p in alive.items() if key not in known and (p.gpu_indexes or p.rank is not None)]
        # Also one that left since the previous sample: after a quick restart the new one already holds its place.
        disappeared = [key for key in known if key not in alive]
        if any(_replaces(process, known[key].process) for key in disappeared for process in appeared):
            self.job_restarted = True
            for key in disappeared:
                del known[key]
        for key, process in alive.items():
            if process.gpu_indexes or process.rank is not None or key in known:
                self._has_ranks = self._has_ranks or process.rank is not None
                entry = known.setdefault(key, KnownProcess(process))
                # Keep the GPUs it was last seen on: a failed GPU query lists the process without any.
                if process.gpu_indexes or process.rank is not None:
                    entry.process = process
                entry.observations, entry.missing_samples = entry.observations + 1, 0
                if entry.seen_sequence is None or entry.seen_sequence != node.sequence:
                    entry.seen_sequence, entry.seen_since = node.sequence, self._now
                entry.update_cpu(process.cpu_seconds, self._now)
                in_use = self._bytes_in_use(node.node, entry.process)
                if in_use is not None:
                    entry.held_bytes = max(entry.held_bytes or 0.0, in_use)
        for key, entry in known.items():
            if key in alive:
                continue
            if key in node.unlisted_processes:
                entry.missing_samples = 0  # it released its GPU, or the driver does not list it, and it lives
            # While the GPUs cannot be read nobody can say who holds one: then only ranks are looked for, by pid.
            elif node.fresh or entry.process.rank is not None or key in node.exited_processes:
                self._count_missing(entry, node)

    def _count_missing(self, entry: KnownProcess, node: NodeState) -> None:
        if entry.missing_samples and entry.missing_sequence == node.sequence:
            return  # the same sample again
        entry.missing_since = entry.missing_since if entry.missing_samples else self._now
        entry.missing_samples, entry.missing_sequence = entry.missing_samples + 1, node.sequence

    def forget_missing(self) -> None:
        """The job continues without them."""
        for known in self._known.values():
            for key in [key for key, entry in known.items() if entry.missing_samples]:
                del known[key]

    def _missing(self) -> Iterator[tuple[str, KnownProcess]]:
        """Missing processes that count: ranks, or else those that held a GPU for a while that no one holds now."""
        observations = [entry.observations for known in self._known.values() for entry in known.values()]
        all_left = self.all_exited and max(observations) >= UNRELATED_OBSERVATIONS
        for node, known in sorted(self._known.items()):
            in_use = {
                index for entry in known.values() if not entry.missing_samples for index in entry.process.gpu_indexes
            }
            for entry in known.values():
                if not entry.missing_samples or (self._has_ranks and entry.process.rank is None):
                    continue
                held_by_others = bool(in_use.intersection(entry.process.gpu_indexes))
                unrelated = entry.observations < UNRELATED_OBSERVATIONS or (
                    held_by_others and not self._memory_released(node, entry)
                )
                if self._has_ranks or all_left or not unrelated:
                    yield node, entry

    def _bytes_in_use(self, node: str, process: ProcessSample) -> float | None:
        readings = [self._in_use[node, i] for i in process.gpu_indexes if (node, i) in self._in_use]
        return sum(readings) if readings else None

    def _memory_released(self, node: str, entry: KnownProcess) -> bool:
        """Others, such as a monitor, still hold its GPUs, but most of the memory in use went with it."""
        in_use = self._bytes_in_use(node, entry.process)
        return in_use is not None and entry.held_bytes is not None and in_use < RELEASED_MEMORY_SHARE * entry.held_bytes

    @property
    def few_processes_compute(self) -> bool:
        """Some of the job's processes use a CPU core and most do not: these prepare what the others wait for. Where all
        use one, they may just as well poll."""
        living = [entry for known in self._known.values() for entry in known.values() if not entry.missing_samples]
        computing = sum(entry.is_computing for entry in living)
        return computing > 0 and (2 * computing <= len(living) or len(living) == 1)

    @property
    def any_missing(self) -> bool:
        """A process is missing, even if only since this observation."""
        return next(self._missing(), None) is not None

    def newly_missing(self) -> int:
        """Number of processes that are missing for the first time: one listing may fail to show a living process."""
        return sum(entry.missing_samples < EXITED_SAMPLES for _, entry in self._missing())

    def living(self) -> int:
        """Number of the job's processes that were listed in the newest sample of their node."""
        return sum(
            not entry.missing_samples and (not self._has_ranks or entry.process.rank is not None)
            for known in self._known.values()
            for entry in known.values()
        )

    @property
    def has_ranks(self) -> bool:
        """A heartbeat has named one of the processes."""
        return self._has_ranks

    @property
    def all_exited(self) -> bool:
        """Every process of the job that was ever seen has exited."""
        counted = [
            (node, entry)
            for node, known in self._known.items()
            for entry in known.values()
            if not self._has_ranks or entry.process.rank is not None
        ]
        missing = [(node, entry) for node, entry in counted if entry.missing_samples]
        names = {entry.process.name for _, entry in missing}
        if not missing or any(entry.process.name in names for _, entry in counted if not entry.missing_samples):
            return False
        # A process that stays under another name, such as a monitor, is not the job's if memory was released without
        # it.
        return len(missing) == len(counted) or all(self._memory_released(node, entry) for node, entry in missing)

    def exited(self) -> tuple[ExitedProcess, ...]:
        """The processes missing on two samples of their node."""
        return tuple(
            ExitedProcess(
                node=node,
                process=entry.process,
                cause=self._cause(node, entry.process),
                held_bytes=entry.held_bytes,
                since_seconds=entry.missing_since,
                last_seen_seconds=entry.seen_since,
            )
            for node, entry in self._missing()
            if entry.missing_samples >= EXITED_SAMPLES
        )

    def _cause(self, node: str, process: ProcessSample) -> str:
        events = [e for e in self._kernel_events.get(node, ()) if e.pid == process.pid]
        for event in reversed(events):
            text = event.text[:MAX_KERNEL_TEXT]
            if event.kind == "oom":
                return f"killed by the OOM killer of the kernel (out of memory): {text}"
            if event.kind == "xid":
                return f"Xid {event.xid}: {text}"
            if event.kind == "segfault":
                return f"segmentation fault: {text}"
        return ""


def _replaces(new: ProcessSample, exited: ProcessSample) -> bool:
    """The same rank again, or a process of the same name on the same GPU."""
    if new.rank is not None and exited.rank is not None:
        return new.rank == exited.rank
    if new.name != exited.name:
        return False
    return not exited.gpu_indexes or bool(set(new.gpu_indexes).intersection(exited.gpu_indexes))
