"""Combines the latest sample of each node of a job into one `JobSample` per evaluation.

Keeps what a single line of a node cannot show: all GPUs a node has ever had, when the step counter last changed, and
the kernel log lines since the last evaluation. Time is an argument.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    HEARTBEAT_FORMAT,
    JobProgress,
    JobSample,
    JobSpec,
    NodeState,
    RankGpu,
    UnseenGpu,
    normalized_pci_id,
)

# GPU readings taken within this time are one reading: a slow query repeats its answer in several lines.
SAME_READING_SECONDS: Final = 0.05
# A node's GPUs belong to the sample while its last line is this recent: one line may be late.
FRESH_INTERVALS: Final = 2.5
# A source that changed this long before the freshest one of its kind was left over by an earlier run. Where the
# interval between log lines is known, a log is left over once it misses this many lines while another one continues.
LEFTOVER_SECONDS: Final = 300.0
MIN_LEFTOVER_SECONDS: Final = 30.0
LEFTOVER_LINES: Final = 6.0
# Files that changed within this time of the freshest one belong to the same run.
SAME_RUN_SECONDS: Final = 2.0
READ_CALL_PREFIX: Final = "read "  # how the probe names a read of a run directory or of the files of a log pattern


@dataclass(slots=True)
class NodeHistory:
    """What is kept of one node between evaluations."""

    sample: NodeSample | None = None
    gpus: dict[str, GpuSample] = field(default_factory=dict)  # by key: the most the node ever showed at once
    used: set[str] = field(default_factory=set)  # keys of GPUs on which memory was ever in use
    kernel_events: list[KernelEvent] = field(default_factory=list)  # since the last evaluation
    reading: int = 0  # number of GPU queries
    read_seconds: float | None = None  # time of the last one, on the node's clock
    ranks: dict[str, int] = field(default_factory=dict)  # key of a GPU -> its rank when it was last read
    lists_processes: bool = False  # a process of the job that holds a GPU or has a rank was listed
    hides_processes: bool = False  # memory was in use while none was listed: whoever uses it is not in the list

    def count_gpus(self) -> int:
        """The most that were known at once, with those that were missing from the first sample on."""
        sample = self.sample
        named = 0 if sample is None else len(sample.gpus or ()) + len(sample.missing_gpus)
        return max(len(self.gpus), named)

    def gpu_positions(self) -> dict[str, int]:
        """Key -> position of each GPU among the node's, by the driver's index. GPUs that were never used beside others
        that are in use are not the job's (CUDA_VISIBLE_DEVICES), so ranks are counted without them."""
        unused = [
            gpu.index
            for key, gpu in (self.gpus.items() if 0 < len(self.used) < len(self.gpus) else ())
            if gpu.index is not None and gpu.memory_used_bytes is not None and key not in self.used
        ]
        return {
            key: gpu.index - sum(other < gpu.index for other in unused)
            for key, gpu in self.gpus.items()
            if gpu.index is not None and gpu.index not in unused
        }

    def count_reading(self, sample: NodeSample) -> None:
        """Tell a new GPU reading from a repeated old one."""
        if sample.gpus is None or (self.sample is not None and sample.sequence == self.sample.sequence):
            return
        read = sample.node_seconds - sample.gpus_age_seconds
        may_repeat = sample.gpus_age_seconds > 0 and self.read_seconds is not None
        if not may_repeat or abs(read - (self.read_seconds or 0.0)) > SAME_READING_SECONDS:
            self.reading += 1
        self.read_seconds = read


def without_replaced_gpus(known: Mapping[str, GpuSample], now: Mapping[str, GpuSample]) -> dict[str, GpuSample]:
    """The known GPUs without those whose place another one has taken. That is no loss: the GPU was exchanged, or
    another tool reports it under another key."""
    new = [gpu for key, gpu in now.items() if key not in known]
    slots = {normalized_pci_id(gpu.pci_bus_id) for gpu in new if gpu.pci_bus_id is not None}
    indexes = {gpu.index for gpu in new} - {None}
    indexes_without_slot = {gpu.index for gpu in new if gpu.pci_bus_id is None} - {None}

    def is_replaced(gpu: GpuSample) -> bool:
        # The PCI slot decides; where one of the two samples has none, the driver's index does.
        if gpu.pci_bus_id is None:
            return gpu.index in indexes
        return normalized_pci_id(gpu.pci_bus_id) in slots or gpu.index in indexes_without_slot

    return {key: gpu for key, gpu in known.items() if key in now or not is_replaced(gpu)}


class JobAssembler:
    """Combines the samples of one job's nodes."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._nodes = {node: NodeHistory() for node in spec.nodes}
        self._process_name = re.compile(spec.processes) if spec.processes else None
        self._step: int | None = None
        self._restart: int | None = None
        self._front: tuple[str, int | None] | None = None  # path and rank of the source that showed this step
        self._step_read_seconds = 0.0
        self._step_changed_seconds = 0.0

    def add(self, sample: NodeSample) -> None:
        """Take one node's sample. Of several since the last evaluation the newest counts; all kernel lines are kept."""
        history = self._nodes.get(sample.node)
        if history is None:
            return
        history.count_reading(sample)
        history.sample = sample
        self._check_process_list(history, sample)
        history.kernel_events.extend(sample.kernel_events)
        gpus = {
            gpu.key: gpu
            for gpu in sample.gpus or ()
            if gpu.uuid is not None or gpu.pci_bus_id is not None or gpu.index is not None
        }
        history.used |= {key for key, gpu in gpus.items() if (gpu.memory_used_bytes or 0.0) >= CONTEXT_BYTES}
        # As many as ever: these are the node's GPUs, even if one was replaced or another tool reports other keys.
        if len(gpus) >= len(history.gpus):
            history.gpus = gpus
        else:
            history.gpus = {**without_replaced_gpus(history.gpus, gpus), **gpus}

    def _check_process_list(self, history: NodeHistory, sample: NodeSample) -> None:
        """Find out whether the node's process list shows the job's processes. Without the rights for it, in another
        pid namespace or after an error of the driver, it may be empty beside gigabytes in use."""
        listed = self._job_processes(sample.processes)
        if listed is None:
            return
        if any(process.gpu_indexes or process.rank is not None for process in listed):
            history.lists_processes, history.hides_processes = True, False
        elif not history.lists_processes:
            in_use = any((gpu.memory_used_bytes or 0.0) >= CONTEXT_BYTES for gpu in sample.gpus or ())
            history.hides_processes = history.hides_processes or in_use

    def assemble(self, links: Mapping[str, NodeLink], now: float, wall: float) -> JobSample:
        """The job at `now` (control host's monotonic clock); `wall` (Unix time) is for display."""
        recent = tuple(self._recent_samples(now))
        sources = self._sources(recent)
        formats = _step_formats(recent, sources)
        nodes = tuple(
            self._node_state(node, links.get(node), now, formats.get(node, frozenset())) for node in self._spec.nodes
        )
        fresh = {state.node for state in nodes if state.fresh}
        gpus, unseen = self._rank_gpus(nodes, fresh)
        return JobSample(
            job=self._spec.name,
            gpus=gpus,
            nodes=nodes,
            progress=self._progress(sources, now),
            checkpoints=self._checkpoints(recent),
            wall_seconds=wall,
            unseen=unseen,
        )

    def _node_state(self, node: str, link: NodeLink | None, now: float, step_formats: frozenset[str]) -> NodeState:
        history = self._nodes[node]
        sample = history.sample
        age = None if sample is None else max(0.0, now - sample.received_seconds)
        status, detail = (HostStatus.OK, "") if sample is None else (sample.status, sample.detail)
        cause = None
        if link is not None and link.status is not HostStatus.OK:
            status, detail, cause = link.status, link.detail, link.cause
        events = tuple(history.kernel_events)
        history.kernel_events = []
        if sample is None or age is None:
            return NodeState(
                node,
                status,
                detail or "no sample yet",
                None,
                fresh=False,
                expected_gpus=self._spec.gpus_per_node,
                kernel_events=events,
                cause=cause,
            )
        recent = age <= FRESH_INTERVALS * self._spec.interval_seconds
        processes = self._job_processes(sample.processes) if recent else None
        if not processes and history.hides_processes:
            processes = None  # an empty list proves nothing on this node
        return NodeState(
            node=node,
            status=status,
            detail=detail,
            age_seconds=age,
            fresh=recent and sample.gpus is not None and status is HostStatus.OK,
            sequence=sample.sequence,
            reading=history.reading,
            expected_gpus=self._spec.gpus_per_node or history.count_gpus() or None,
            missing_gpus=(*sample.missing_gpus, *self._vanished_gpus(history)) if recent else (),
            processes=processes,
            exited_processes=sample.exited_processes,
            unlisted_processes=sample.unlisted_processes,
            kernel_log_error=sample.kernel_log_error,
            kernel_events=events,
            hung_calls=sample.hung_calls if recent else (),
            filesystems=sample.filesystems,
            load=sample.load,
            driver_version=sample.driver_version,
            workers=sample.workers if recent else (),
            step_formats=step_formats,
            cause=cause,
        )

    def _job_processes(self, processes: tuple[ProcessSample, ...] | None) -> tuple[ProcessSample, ...] | None:
        """Those with the configured name or a heartbeat; without a configured name, all that were listed."""
        if processes is None or self._process_name is None:
            return processes
        return tuple(p for p in processes if p.rank is not None or self._process_name.search(p.name))

    def _vanished_gpus(self, history: NodeHistory) -> list[MissingGpu]:
        """GPUs that were listed before and are not any more: a vanished GPU is a fault, not a smaller node."""
        sample = history.sample
        if sample is None or sample.gpus is None or sample.status is not HostStatus.OK:
            return []
        present = {gpu.key for gpu in sample.gpus}
        reported = ({m.pci_bus_id for m in sample.missing_gpus} | {m.index for m in sample.missing_gpus}) - {None}
        vanished = [
            MissingGpu(
                gpu.index,
                gpu.pci_bus_id,
                ReadingStatus.LOST,
                f"GPU {gpu.key} was listed before but is missing now",
            )
            for key, gpu in history.gpus.items()
            if key not in present and gpu.pci_bus_id not in reported and gpu.index not in reported
        ]
        found, expected = len(present) + len(sample.missing_gpus) + len(vanished), self._spec.gpus_per_node
        if expected is not None and found < expected:
            listed = f"{len(present)} GPU{' is' if len(present) == 1 else 's are'} listed"
            text = f"{listed}, but the configuration expects {expected}"
            vanished.append(MissingGpu(None, None, ReadingStatus.LOST, text))
        return vanished

    def _recent_samples(self, now: float) -> Iterator[NodeSample]:
        """The last sample of each node that still sends: what a silent node said last proves no stalled counter."""
        for history in self._nodes.values():
            sample = history.sample
            if sample is not None and now - sample.received_seconds <= FRESH_INTERVALS * self._spec.interval_seconds:
                yield sample

    def _sources(self, samples: Iterable[NodeSample]) -> tuple[ProgressSample, ...]:
        """The job's progress sources. One that several nodes see (on a shared file system) counts once, at its
        freshest.

        A source whose read hangs is left out: its file system may be stalled while the job is not.
        """
        freshest: dict[tuple[str, int | None], ProgressSample] = {}
        for sample in samples:
            hung = tuple(
                c.call.removeprefix(READ_CALL_PREFIX) for c in sample.hung_calls if c.call.startswith(READ_CALL_PREFIX)
            )
            for source in sample.progress:
                if not self._is_own(source) or (hung and _is_read_from(source.source, hung)):
                    continue
                known = freshest.get((source.source, source.rank))
                if known is None or (source.step or -1, -(source.age_seconds or 0)) > (
                    known.step or -1,
                    -(known.age_seconds or 0),
                ):
                    freshest[(source.source, source.rank)] = source
        return _of_this_run(tuple(freshest.values()))

    def _is_own(self, source: ProgressSample) -> bool:
        if source.format == HEARTBEAT_FORMAT:
            directory = self._spec.run_directory
            return directory is not None and source.source.startswith(directory.rstrip("/") + "/")
        return any(fnmatch.fnmatchcase(source.source, pattern) for pattern in self._spec.logs)

    def _progress(self, sources: tuple[ProgressSample, ...], now: float) -> JobProgress:
        """The highest step counts; its age is since it last changed, on the control host's clock."""
        with_step = [source for source in sources if source.step is not None]
        if not with_step:
            return JobProgress(sources=sources)
        front = max(with_step, key=lambda s: s.step or 0)
        steps = [s.step for s in with_step if s.step is not None]
        restarts = [s.restart for s in with_step if s.restart is not None]
        restart = max(restarts, default=None)
        step = max(steps)
        self._follow_step(step, restart, front, now)
        of_ranks = [s.step for s in with_step if s.rank is not None and s.step is not None]
        rates = [s.tokens_per_second for s in with_step if s.tokens_per_second is not None]
        losses = [s.loss for s in sorted(with_step, key=lambda s: s.step or 0) if s.loss is not None]
        return JobProgress(
            step=step,
            slowest_step=min(of_ranks, default=None),
            total_steps=max((s.total_steps for s in with_step if s.total_steps is not None), default=None),
            loss=losses[-1] if losses else None,
            tokens_per_second=max(rates, default=None),
            age_seconds=max(0.0, now - self._step_changed_seconds),
            line_interval_seconds=front.line_interval_seconds,
            restart=restart,
            sources=sources,
            epoch=front.epoch,
            epochs=front.epochs,
            epoch_step=front.epoch_step,
            epoch_steps=front.epoch_steps,
            samples_per_second=front.samples_per_second,
            seconds_per_step=front.seconds_per_step,
            eta_seconds=front.eta_seconds,
            guessed=front.guessed,
        )

    def _follow_step(self, step: int, restart: int | None, front: ProgressSample, now: float) -> None:
        """Note when the step last changed. A change in a source that is read all the time happened just now. Any other
        one was perhaps only noticed now: another source may show a lower step because its node is the only one left,
        and a file that could not be read may have changed long ago. Then the source's own age counts."""
        place = (front.source, front.rank)
        read_all_along = now - self._step_read_seconds <= FRESH_INTERVALS * self._spec.interval_seconds
        restarted = restart is not None and restart != self._restart
        if self._step is None or step != self._step or restarted:
            followed = self._step is not None and step > self._step and place == self._front and read_all_along
            self._step_changed_seconds = now - (0.0 if followed else front.age_seconds or 0.0)
        self._step, self._restart = step, self._restart if restart is None else restart
        self._front, self._step_read_seconds = place, now

    def _checkpoints(self, samples: Iterable[NodeSample]) -> tuple[CheckpointSample, ...]:
        """The freshest listing of the job's checkpoint directory over all nodes that still send."""
        freshest: dict[str, CheckpointSample] = {}
        for sample in samples:
            for listing in sample.checkpoints:
                if listing.directory != self._spec.checkpoint_directory:
                    continue
                known = freshest.get(listing.directory)
                if known is None or listing.age_seconds < known.age_seconds:
                    freshest[listing.directory] = listing
        return tuple(freshest.values())

    def _rank_gpus(
        self, nodes: tuple[NodeState, ...], fresh: set[str]
    ) -> tuple[tuple[RankGpu, ...], tuple[UnseenGpu, ...]]:
        """GPUs in order of nodes, each with its rank: from heartbeat and process, else from their order where that is
        sure. Then the known ones of which there is no reading now."""
        by_process: dict[tuple[str, int], int] = {}
        for state in nodes:
            for process in state.processes or ():
                if process.rank is not None and len(process.gpu_indexes) == 1:
                    by_process[(state.node, process.gpu_indexes[0])] = process.rank
        ranked: list[RankGpu] = []
        unseen: list[UnseenGpu] = []
        offset: int | None = 0
        for state in nodes:
            history = self._nodes[state.node]
            positions = history.gpu_positions()
            gpus = (history.sample.gpus or ()) if history.sample is not None and state.node in fresh else ()
            by_order = not by_process and offset is not None
            for gpu in gpus:
                key = gpu.key
                rank = by_process.get((state.node, -1 if gpu.index is None else gpu.index)) if by_process else None
                if by_order and offset is not None and key in positions:
                    rank = offset + positions[key]
                if rank is not None:
                    history.ranks[key] = rank
                ranked.append(RankGpu(state.node, rank, gpu))
            if state.missing_gpus or len(gpus) < max(len(history.gpus), state.expected_gpus or 0):
                unseen += _unseen_gpus(state, history, [gpu.key for gpu in gpus], None if by_process else offset)
            # The order of GPUs gives ranks only while the number of GPUs of every earlier node is known.
            unused = len(history.gpus) - len(positions)
            offset = None if offset is None or state.expected_gpus is None else offset + state.expected_gpus - unused
        return tuple(ranked), tuple(unseen)


def _unseen_gpus(
    state: NodeState, history: NodeHistory, seen: Sequence[str], offset: int | None
) -> Iterator[UnseenGpu]:
    """The node's GPUs without a reading: those that were read before, then those that it should have beside them.
    `seen`: the keys of those with one; `offset`: rank of the node's first GPU, where the order of GPUs gives ranks."""
    count = len(seen)
    positions = history.gpu_positions()
    all_are_used = len(positions) == len(history.gpus)

    def rank_at(index: int | None, key: str = "") -> int | None:
        if key in history.ranks or offset is None:
            return history.ranks.get(key)
        return offset + index if index is not None and all_are_used else None

    missing = list(state.missing_gpus) if state.fresh else []
    blind = "no reading yet" if state.age_seconds is None and state.cause is None else state.unreadable_reason
    if state.status is HostStatus.OK:
        blind = "no recent reading"
    for key, gpu in sorted(history.gpus.items(), key=lambda item: (item[1].index is None, item[1].index or 0)):
        if key in seen:
            continue
        lost = next((each for each in missing if _is_same_gpu(each, gpu)), None)
        if lost is not None:
            missing.remove(lost)
        count += 1
        reason = blind if lost is None else lost.text
        yield UnseenGpu(state.node, rank_at(gpu.index, key), gpu.index, gpu.pci_bus_id, reason)
    for lost in missing:
        count += 1
        yield UnseenGpu(state.node, rank_at(lost.index), lost.index, lost.pci_bus_id, lost.text)
    for _ in range(count, state.expected_gpus or 0):
        yield UnseenGpu(state.node, None, None, None, blind)


def _is_same_gpu(missing: MissingGpu, gpu: GpuSample) -> bool:
    """The PCI id decides; where one of the two has none, the driver's index does."""
    if missing.pci_bus_id is not None and gpu.pci_bus_id is not None:
        return normalized_pci_id(missing.pci_bus_id) == normalized_pci_id(gpu.pci_bus_id)
    return missing.index is not None and missing.index == gpu.index


def _step_formats(samples: Iterable[NodeSample], sources: tuple[ProgressSample, ...]) -> dict[str, frozenset[str]]:
    """By node: formats of the run's sources that show a step there. A shared source is read on each node."""
    with_step = {(source.source, source.rank) for source in sources if source.step is not None}
    return {
        sample.node: frozenset(s.format for s in sample.progress if (s.source, s.rank) in with_step)
        for sample in samples
    }


def _is_read_from(path: str, places: tuple[str, ...]) -> bool:
    """Whether a source was read from one of these: a directory that contains it, or a pattern that it matches."""
    return any(path.startswith(place.rstrip("/") + "/") or fnmatch.fnmatchcase(path, place) for place in places)


def _leftover_seconds(source: ProgressSample) -> float:
    """How much older than the freshest source of its kind this one may be."""
    if source.format == HEARTBEAT_FORMAT or source.line_interval_seconds is None:
        return LEFTOVER_SECONDS
    return min(LEFTOVER_SECONDS, max(MIN_LEFTOVER_SECONDS, LEFTOVER_LINES * source.line_interval_seconds))


def _of_this_run(sources: tuple[ProgressSample, ...]) -> tuple[ProgressSample, ...]:
    """Without logs and heartbeats of earlier runs, whose last step may be higher. Ranks of one run write at the same
    time, and when they hang they stop at the same time."""
    kept: list[ProgressSample] = []
    for heartbeats in (True, False):
        kind = [s for s in sources if (s.format == HEARTBEAT_FORMAT) is heartbeats]
        freshest = min((s.age_seconds or 0.0 for s in kind), default=0.0)
        recent = [s for s in kind if (s.age_seconds or 0.0) <= freshest + _leftover_seconds(s)]
        # A manual relaunch counts restarts from 0 again, so the freshest file's counter is the run's, not the largest.
        newest = [s for s in recent if (s.age_seconds or 0.0) <= freshest + SAME_RUN_SECONDS]
        restart = max((s.restart for s in newest if s.restart is not None), default=None)
        kept += [s for s in recent if restart is None or s.restart is None or s.restart == restart]
    return tuple(kept)
