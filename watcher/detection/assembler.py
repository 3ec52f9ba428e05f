"""What is kept of one node between looks: its boards as they were ever shown, and how often they were read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from wattwatch.collectors.samples import (
    CheckpointSample,
    GpuSample,
    HostStatus,
    KernelEvent,
    MissingGpu,
    NodeSample,
    ProcessSample,
    ProgressSample,
    ReadingStatus,
)
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import (
    CONTEXT_BYTES,
    JobProgress,
    JobSample,
    JobSpec,
    NodeState,
    RankGpu,
    normalized_pci_id,
)

# Boards asked within this long of each other were asked once: a slow query's answer stands in several lines.
SAME_READING_SECONDS: Final = 0.05


@dataclass(slots=True)
class NodeHistory:
    """What is kept of one node between looks."""

    sample: NodeSample | None = None
    boards: dict[str, GpuSample] = field(default_factory=dict)  # by key: the most it has ever shown
    used: set[str] = field(default_factory=set)  # keys of those that ever held somebody's memory
    kernel_events: list[KernelEvent] = field(default_factory=list)  # since the last look
    reading: int = 0  # how often its boards were read
    read_seconds: float | None = None  # when, on the node's clock

    def places(self) -> dict[str, int]:
        """Key -> place of each board among the node's, by the driver's index. Those that nobody ever used beside others
        that are in use are not the job's (CUDA_VISIBLE_DEVICES), and ranks are counted without them."""
        idle = [
            gpu.index
            for key, gpu in (self.boards.items() if 0 < len(self.used) < len(self.boards) else ())
            if gpu.index is not None and gpu.memory_used_bytes is not None and key not in self.used
        ]
        return {
            key: gpu.index - sum(other < gpu.index for other in idle)
            for key, gpu in self.boards.items()
            if gpu.index is not None and gpu.index not in idle
        }

    def count_reading(self, sample: NodeSample) -> None:
        """Tell a new reading of the boards from an old answer that is repeated."""
        if sample.gpus is None or (self.sample is not None and sample.sequence == self.sample.sequence):
            return
        read = sample.node_seconds - sample.gpus_age_seconds
        repeated = sample.gpus_age_seconds > 0 and self.read_seconds is not None
        if not repeated or abs(read - (self.read_seconds or 0.0)) > SAME_READING_SECONDS:
            self.reading += 1
        self.read_seconds = read


def without_replaced_gpus(known: Mapping[str, GpuSample], now: Mapping[str, GpuSample]) -> dict[str, GpuSample]:
    """Those known before, without the ones that another board sits in the place of: it was exchanged, or another tool
    calls it by another name. That is no loss."""
    new = [gpu for key, gpu in now.items() if key not in known]
    slots = {normalized_pci_id(gpu.pci_bus_id) for gpu in new if gpu.pci_bus_id is not None}
    indexes = {gpu.index for gpu in new} - {None}
    slotless = {gpu.index for gpu in new if gpu.pci_bus_id is None} - {None}

    def taken(gpu: GpuSample) -> bool:
        # The slot tells; where one of the two names none, the driver's index does.
        if gpu.pci_bus_id is None:
            return gpu.index in indexes
        return normalized_pci_id(gpu.pci_bus_id) in slots or gpu.index in slotless

    return {key: gpu for key, gpu in known.items() if key in now or not taken(gpu)}


# Samples of the nodes, put side by side: one `JobSample` whenever the job is looked at.
#
# Keeps what a single line cannot say: which boards a node has ever shown, when the step last changed, which kernel lines
# came since the last look. Time comes in as an argument.

# A node's boards are part of the picture while its last line is younger than this: one line may be late.
FRESH_INTERVALS: Final = 2.5
HEARTBEAT: Final = "heartbeat"
# Sources that changed this much before the freshest one of their kind are left over from an earlier run.
LEFTOVER_SECONDS: Final = 300.0
MIN_LEFTOVER_SECONDS: Final = 30.0
LEFTOVER_LINES: Final = 6.0
# Files that changed this close to the freshest one are of the same run.
SAME_RUN_SECONDS: Final = 2.0
READ_CALL_PREFIX: Final = "read "  # how the probe calls its reading of a run directory or of a log's pattern


class JobAssembler:
    """Puts the samples of one job's nodes side by side."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._heard = {node: NodeHistory() for node in spec.nodes}
        self._process_name = re.compile(spec.processes) if spec.processes else None
        self._step: int | None = None
        self._restart: int | None = None
        self._step_changed_seconds: float | None = None

    def add(self, sample: NodeSample) -> None:
        """Take one node's sample; of several since the last look the newest counts, and no kernel line is lost."""
        heard = self._heard.get(sample.node)
        if heard is None:
            return
        heard.count_reading(sample)
        heard.sample = sample
        heard.kernel_events.extend(sample.kernel_events)
        boards = {
            gpu.key: gpu
            for gpu in sample.gpus or ()
            if gpu.uuid is not None or gpu.pci_bus_id is not None or gpu.index is not None
        }
        heard.used |= {key for key, gpu in boards.items() if (gpu.memory_used_bytes or 0.0) >= CONTEXT_BYTES}
        # As many as ever: these are the node's boards, also where one was replaced or another tool names them anew.
        heard.boards = (
            boards if len(boards) >= len(heard.boards) else {**without_replaced_gpus(heard.boards, boards), **boards}
        )

    def assemble(self, links: Mapping[str, NodeLink], now: float, wall: float) -> JobSample:
        """The job as it is known at `now` (control host's monotonic clock; `wall` is for people)."""
        readers = tuple(self._readers(now))
        sources = self._sources(readers)
        formats = _step_formats(readers, sources)
        nodes = tuple(
            self._node_state(node, links.get(node), now, formats.get(node, frozenset())) for node in self._spec.nodes
        )
        fresh = {state.node for state in nodes if state.fresh}
        return JobSample(
            job=self._spec.name,
            gpus=self._ranked(nodes, sources, fresh),
            nodes=nodes,
            progress=self._progress(sources, now),
            checkpoints=self._checkpoints(readers),
            wall_seconds=wall,
        )

    def _node_state(self, node: str, link: NodeLink | None, now: float, step_formats: frozenset[str]) -> NodeState:
        heard = self._heard[node]
        sample = heard.sample
        age = None if sample is None else max(0.0, now - sample.received_seconds)
        status, detail = (HostStatus.OK, "") if sample is None else (sample.status, sample.detail)
        if link is not None and link.status is not HostStatus.OK:
            status, detail = link.status, link.detail
        events = tuple(heard.kernel_events)
        heard.kernel_events = []
        if sample is None or age is None:
            return NodeState(node, status, detail or "no sample yet", None, fresh=False, kernel_events=events)
        young = age <= FRESH_INTERVALS * self._spec.interval_seconds
        return NodeState(
            node=node,
            status=status,
            detail=detail,
            age_seconds=age,
            fresh=young and sample.gpus is not None and status is HostStatus.OK,
            sequence=sample.sequence,
            reading=heard.reading,
            expected_gpus=self._spec.gpus_per_node or len(heard.boards) or None,
            missing_gpus=(*sample.missing_gpus, *self._vanished(heard)) if young else (),
            processes=self._mine(sample.processes) if young else None,
            kernel_events=events,
            hung_calls=sample.hung_calls if young else (),
            filesystems=sample.filesystems,
            load=sample.load,
            driver_version=sample.driver_version,
            workers=sample.workers if young else (),
            step_formats=step_formats,
        )

    def _mine(self, processes: tuple[ProcessSample, ...] | None) -> tuple[ProcessSample, ...] | None:
        """The job's processes: those with the configured name or a heartbeat; else all that hold a board."""
        if processes is None or self._process_name is None:
            return processes
        return tuple(p for p in processes if p.rank is not None or self._process_name.search(p.name))

    def _vanished(self, heard: NodeHistory) -> list[MissingGpu]:
        """Boards shown before and no longer listed: a vanished board is a fault, not a smaller node."""
        sample = heard.sample
        if sample is None or sample.gpus is None or sample.status is not HostStatus.OK:
            return []
        present = {gpu.key for gpu in sample.gpus}
        told = ({m.pci_bus_id for m in sample.missing_gpus} | {m.index for m in sample.missing_gpus}) - {None}
        vanished = [
            MissingGpu(gpu.index, gpu.pci_bus_id, ReadingStatus.LOST, f"board {gpu.key} was listed before and is gone")
            for key, gpu in heard.boards.items()
            if key not in present and gpu.pci_bus_id not in told and gpu.index not in told
        ]
        there, expected = len(present) + len(sample.missing_gpus) + len(vanished), self._spec.gpus_per_node
        if expected is not None and there < expected:
            vanished.append(
                MissingGpu(
                    None, None, ReadingStatus.LOST, f"{len(present)} boards are listed where {expected} should be"
                )
            )
        return vanished

    def _readers(self, now: float) -> Iterator[NodeSample]:
        """The last word of each node that still speaks. What a silent node said last proves no standing counter."""
        for heard in self._heard.values():
            sample = heard.sample
            if sample is not None and now - sample.received_seconds <= FRESH_INTERVALS * self._spec.interval_seconds:
                yield sample

    def _sources(self, samples: Iterable[NodeSample]) -> tuple[ProgressSample, ...]:
        """The job's sources; one that several nodes see (a shared file system) counts once, at its freshest.
        A source whose reading hangs says nothing: its file system may stand, and the job not."""
        freshest: dict[tuple[str, int | None], ProgressSample] = {}
        for sample in samples:
            hung = tuple(
                c.call.removeprefix(READ_CALL_PREFIX) for c in sample.hung_calls if c.call.startswith(READ_CALL_PREFIX)
            )
            for source in sample.progress:
                if not self._is_mine(source) or (hung and _is_read_from(source.source, hung)):
                    continue
                known = freshest.get((source.source, source.rank))
                if known is None or (source.step or -1, -(source.age_seconds or 0)) > (
                    known.step or -1,
                    -(known.age_seconds or 0),
                ):
                    freshest[(source.source, source.rank)] = source
        return _of_this_run(tuple(freshest.values()))

    def _is_mine(self, source: ProgressSample) -> bool:
        if source.format == HEARTBEAT:
            directory = self._spec.run_directory
            return directory is not None and source.source.startswith(directory.rstrip("/") + "/")
        return any(fnmatch.fnmatchcase(source.source, pattern) for pattern in self._spec.logs)

    def _progress(self, sources: tuple[ProgressSample, ...], now: float) -> JobProgress:
        """The furthest step counts; its age is since it last changed, on the control host's clock."""
        told = [source for source in sources if source.step is not None]
        if not told:
            return JobProgress(sources=sources)
        front = max(told, key=lambda s: s.step or 0)
        steps = [s.step for s in told if s.step is not None]
        restarts = [s.restart for s in told if s.restart is not None]
        restart = max(restarts, default=None)
        step = max(steps)
        if self._step is None or self._step_changed_seconds is None:
            self._step_changed_seconds = now - (front.age_seconds or 0.0)
        elif step != self._step or (restart is not None and restart != self._restart):
            self._step_changed_seconds = now
        self._step, self._restart = step, self._restart if restart is None else restart
        ranked = [s.step for s in told if s.rank is not None and s.step is not None]
        rates = [s.tokens_per_second for s in told if s.tokens_per_second is not None]
        losses = [s.loss for s in sorted(told, key=lambda s: s.step or 0) if s.loss is not None]
        return JobProgress(
            step=step,
            slowest_step=min(ranked, default=None),
            total_steps=max((s.total_steps for s in told if s.total_steps is not None), default=None),
            loss=losses[-1] if losses else None,
            tokens_per_second=max(rates, default=None),
            age_seconds=max(0.0, now - self._step_changed_seconds),
            line_interval_seconds=front.line_interval_seconds,
            restart=restart,
            sources=sources,
        )

    def _checkpoints(self, samples: Iterable[NodeSample]) -> tuple[CheckpointSample, ...]:
        """Of each of the job's directories the listing that is freshest over all nodes that speak."""
        freshest: dict[str, CheckpointSample] = {}
        for sample in samples:
            for listing in sample.checkpoints:
                if listing.directory != self._spec.checkpoint_directory:
                    continue
                known = freshest.get(listing.directory)
                if known is None or listing.age_seconds < known.age_seconds:
                    freshest[listing.directory] = listing
        return tuple(freshest.values())

    def _ranked(
        self, nodes: tuple[NodeState, ...], sources: tuple[ProgressSample, ...], fresh: set[str]
    ) -> tuple[RankGpu, ...]:
        """Boards in order of nodes, each with its rank: by heartbeat and process, else by order where that is sure."""
        by_process: dict[tuple[str, int], int] = {}
        for state in nodes:
            for process in state.processes or ():
                if process.rank is not None and len(process.gpu_indexes) == 1:
                    by_process[(state.node, process.gpu_indexes[0])] = process.rank
        ranked: list[RankGpu] = []
        offset: int | None = 0
        for state in nodes:
            heard = self._heard[state.node]
            place = heard.places()
            if state.node in fresh and heard.sample is not None:
                for gpu in heard.sample.gpus or ():
                    rank = by_process.get((state.node, -1 if gpu.index is None else gpu.index))
                    if rank is None and not by_process and offset is not None and gpu.key in place:
                        rank = offset + place[gpu.key]
                    ranked.append(RankGpu(state.node, rank, gpu))
            # The order of boards tells ranks only as long as every node before this one is known.
            idle = len(heard.boards) - len(place)
            offset = None if offset is None or state.expected_gpus is None else offset + state.expected_gpus - idle
        return tuple(ranked)


def _step_formats(samples: Iterable[NodeSample], sources: tuple[ProgressSample, ...]) -> dict[str, frozenset[str]]:
    """By node, which kinds of the run's own sources tell a step there; a shared one is read on each node."""
    told = {(source.source, source.rank) for source in sources if source.step is not None}
    return {
        sample.node: frozenset(s.format for s in sample.progress if (s.source, s.rank) in told) for sample in samples
    }


def _is_read_from(path: str, places: tuple[str, ...]) -> bool:
    """Whether a source was read from one of these: a directory it lies in, or a pattern it matches."""
    return any(path.startswith(place.rstrip("/") + "/") or fnmatch.fnmatchcase(path, place) for place in places)


def _leftover_seconds(source: ProgressSample) -> float:
    """A log whose lines come at a known pace has ended once it misses many of them while another one goes on."""
    if source.format == HEARTBEAT or source.line_interval_seconds is None:
        return LEFTOVER_SECONDS
    return min(LEFTOVER_SECONDS, max(MIN_LEFTOVER_SECONDS, LEFTOVER_LINES * source.line_interval_seconds))


def _of_this_run(sources: tuple[ProgressSample, ...]) -> tuple[ProgressSample, ...]:
    """Without the logs and heartbeats of earlier runs, whose last step may lie ahead: ranks of one run speak together,
    and when they hang they fall silent together."""
    kept: list[ProgressSample] = []
    for beats in (True, False):
        kind = [s for s in sources if (s.format == HEARTBEAT) is beats]
        freshest = min((s.age_seconds or 0.0 for s in kind), default=0.0)
        young = [s for s in kind if (s.age_seconds or 0.0) <= freshest + _leftover_seconds(s)]
        # A relaunch by hand counts from 0 again: the freshest file's counter is the run's, not the largest one.
        newest = [s for s in young if (s.age_seconds or 0.0) <= freshest + SAME_RUN_SECONDS]
        restart = max((s.restart for s in newest if s.restart is not None), default=None)
        kept += [s for s in young if restart is None or s.restart is None or s.restart == restart]
    return tuple(kept)
