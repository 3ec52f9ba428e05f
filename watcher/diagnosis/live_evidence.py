"""What the watcher knows about a job from outside, as evidence: readings of its ranks, faults of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import HostStatus, KernelEvent, ProgressSample, ReadingStatus
from wattwatch.watcher.detection.classifier.classifier import SLOWDOWN_REASONS
from wattwatch.watcher.detection.model import (
    AlertName,
    Finding,
    JobSample,
    JobState,
    NodeState,
    RankGpu,
    Suspect,
    Verdict,
)
from wattwatch.watcher.detection.trackers.gpu_health import degrading_xids, fatal_xids
from wattwatch.watcher.diagnosis.model import LiveEvidence, NodeFault, RankReadings

DRIVER_STATUSES: Final = frozenset({HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES, HostStatus.SAMPLER_TIMEOUT})
DRIVER_CALLS: Final = ("nvml", "nvidia-smi")
KERNEL_CALLS: Final = frozenset({"read /proc"})  # hangs with the kernel, says nothing about a file system of the job
STOPPED_STATES: Final = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has exited, but its parent process has not reaped it",
}


@dataclass(frozen=True, slots=True)
class NodeKernelEvent:
    """A line of a node's kernel log."""

    node: str
    event: KernelEvent
    age_seconds: float | None  # time since it was written; None: unknown


def collect_live_evidence(
    sample: JobSample,
    verdict: Verdict,
    findings: Sequence[Finding],
    state: JobState,
    events: Sequence[NodeKernelEvent] = (),
) -> LiveEvidence:
    """`events`: kernel log lines of the last minutes, with or without those of the sample."""
    suspects = [*verdict.suspects, *(suspect for finding in findings for suspect in finding.suspects)]
    return LiveEvidence(
        job=sample.job,
        wall_seconds=sample.wall_seconds,
        state=state.value,
        shape=verdict.pattern.value,
        step=sample.progress.step,
        ranks=tuple(sorted(rank_readings(sample), key=lambda each: each.rank)),
        suspects=tuple(sorted({rank for each in suspects if (rank := suspect_rank(each, sample.gpus)) is not None})),
        at_floor=verdict.at_floor,
        faults=tuple(dict.fromkeys(collect_node_faults(sample, findings, events))),
    )


def rank_readings(sample: JobSample) -> Iterator[RankReadings]:
    """Every rank that has a GPU, a process or a heartbeat; those whose GPU is not seen have no reading."""
    gpus = {rank_gpu.rank: rank_gpu for rank_gpu in sample.gpus if rank_gpu.rank is not None}
    sources = newest_progress_by_rank(sample.progress.sources)
    node_of_rank = {p.rank: n.node for n in sample.nodes for p in n.processes or () if p.rank is not None}
    listed = {node.node for node in sample.nodes if node.processes is not None}
    unseen = {each.rank: each for each in sample.unseen if each.rank is not None and each.rank not in gpus}
    for rank in {*gpus, *sources, *node_of_rank, *unseen}:
        rank_gpu, source, missing = gpus.get(rank), sources.get(rank), unseen.get(rank)
        node = (
            rank_gpu.node if rank_gpu is not None else node_of_rank.get(rank, "" if missing is None else missing.node)
        )
        index = rank_gpu.gpu.index if rank_gpu is not None else None if missing is None else missing.index
        # Only a node that lists its processes can show that a rank is gone.
        alive: bool | None = True if rank in node_of_rank else None
        if alive is None and source is not None and source.pid is not None and node in listed:
            alive = False  # its heartbeat names a process that the node does not list
        throttle = None if rank_gpu is None else rank_gpu.gpu.throttle_reasons
        yield RankReadings(
            rank=rank,
            node=node,
            gpu=index,
            power_watts=None if rank_gpu is None else rank_gpu.gpu.power_watts,
            utilization_percent=None if rank_gpu is None else rank_gpu.gpu.utilization_percent,
            step=None if source is None else source.step,
            phase=None if source is None else source.phase,
            alive=alive,
            data_wait_ms=None if source is None else source.data_wait_ms,
            throttled=None if throttle is None else bool(throttle & SLOWDOWN_REASONS),
        )


def newest_progress_by_rank(sources: Iterable[ProgressSample]) -> Mapping[int, ProgressSample]:
    """By rank, from the latest restart of the job: files of an earlier attempt may still be there."""
    newest: dict[int, ProgressSample] = {}
    for source in sources:
        if source.rank is None:
            continue
        before = newest.get(source.rank)
        if before is None or (source.restart or 0, source.step or 0) >= (before.restart or 0, before.step or 0):
            newest[source.rank] = source
    return newest


def suspect_rank(suspect: Suspect, gpus: Sequence[RankGpu]) -> int | None:
    """The rank of the suspect itself, or of its GPU."""
    if suspect.rank is not None or suspect.gpu is None:
        return suspect.rank
    return next((b.rank for b in gpus if (b.node, b.gpu.index) == (suspect.node, suspect.gpu)), None)


def collect_node_faults(
    sample: JobSample, findings: Sequence[Finding], events: Sequence[NodeKernelEvent]
) -> Iterator[NodeFault]:
    yield from gpu_faults(sample, findings)
    yield from throttled_gpus(sample)
    for reported in events:
        yield kernel_fault(reported.node, reported.event, reported.age_seconds)
    # The kernel log lines of the sample are usually among the remembered ones.
    kept = {(reported.node, reported.event.text) for reported in events}
    for node in sample.nodes:
        for event in node.kernel_events:
            if (node.node, event.text) not in kept:
                yield kernel_fault(node.node, event, event.age_seconds)
        yield from node_faults(node)
    for listing in sample.checkpoints:
        if listing.error is not None:
            yield NodeFault("storage", "", f"{listing.directory} cannot be listed: {listing.error}")


def gpu_faults(sample: JobSample, findings: Sequence[Finding]) -> Iterator[NodeFault]:
    """From the detector's findings, which remember kernel messages of minutes ago; else from the GPU's own readings."""
    reported: set[tuple[str, int | None]] = set()
    for finding in findings:
        if finding.alert is AlertName.GPU_FAULT:
            # A finding without suspects still names the node in its scope, NODE/GPU.
            suspect = finding.suspects[0] if finding.suspects else Suspect(finding.scope.partition("/")[0])
            reported.add((suspect.node, suspect.gpu))
            words = "; ".join(finding.evidence) or finding.summary
            yield NodeFault("gpu", suspect.node, words, suspect_rank(suspect, sample.gpus), suspect.gpu)
    for rank_gpu in sample.gpus:
        fault = rank_gpu.gpu.fault
        # A single unreadable sample is no fault yet: the detector decides when it becomes one.
        if fault not in (None, ReadingStatus.UNREADABLE) and (rank_gpu.node, rank_gpu.gpu.index) not in reported:
            words = f"GPU {rank_gpu.gpu.index} {fault.value.replace('_', ' ')}" if fault is not None else ""
            yield NodeFault("gpu", rank_gpu.node, words, rank_gpu.rank, rank_gpu.gpu.index)
    for node in sample.nodes:
        for missing in node.missing_gpus:
            if (node.node, missing.index) not in reported:
                suspect = sample.missing_suspect(node.node, missing)
                yield NodeFault("gpu", node.node, missing.text, suspect.rank, suspect.gpu)


def throttled_gpus(sample: JobSample) -> Iterator[NodeFault]:
    for rank_gpu in sample.gpus:
        slowed = (rank_gpu.gpu.throttle_reasons or frozenset()) & SLOWDOWN_REASONS
        if slowed:
            clock, heat = rank_gpu.gpu.sm_clock_mhz, rank_gpu.gpu.temperature_celsius
            numbers = [] if clock is None else [f"{clock:.0f} MHz"]
            numbers += [] if heat is None else [f"{heat:.0f} °C"]
            words = f"GPU {rank_gpu.gpu.index} is throttled: {', '.join([*sorted(slowed), *numbers])}"
            yield NodeFault("throttle", rank_gpu.node, words, rank_gpu.rank, rank_gpu.gpu.index)


def kernel_fault(node: str, event: KernelEvent, age_seconds: float | None) -> NodeFault:
    """An out-of-memory kill, a crash, or an Xid.

    Xids that are not in the tables of fatal and degrading ones are errors of the program, not of the GPU.
    """
    ago = "" if age_seconds is None else f" ({age_seconds:.0f} s ago)"
    if event.kind == "oom":
        return NodeFault("oom", node, f"out-of-memory kill: {event.text}{ago}")
    if event.xid is not None:
        meaning = fatal_xids().get(event.xid) or degrading_xids().get(event.xid)
        named = f"Xid {event.xid}" + (f" ({meaning})" if meaning else "")
        return NodeFault("gpu" if meaning else "process", node, f"{named}: {event.text}{ago}")
    return NodeFault("process", node, f"{event.text}{ago}")


def node_faults(node: NodeState) -> Iterator[NodeFault]:
    """What does not respond on the node: the node itself, its GPU driver, file systems or processes."""
    if node.status is HostStatus.UNREACHABLE:
        yield NodeFault("host", node.node, f"the node {node.unreachable_text}: {node.detail}")
    elif node.status in DRIVER_STATUSES:
        yield NodeFault("gpu", node.node, f"the GPU driver does not respond correctly: {node.detail}")
    for call in node.hung_calls:
        driver = call.call.startswith(DRIVER_CALLS)
        if driver or ("/" in call.call and call.call not in KERNEL_CALLS):
            # A call with a path, such as `statvfs /mnt/data`, hangs in that file system.
            words = f"`{call.call}` has not returned for {call.age_seconds:.0f} s"
            yield NodeFault("gpu" if driver else "storage", node.node, words)
    for filesystem in node.filesystems:
        if filesystem.error is not None:
            yield NodeFault("storage", node.node, f"{filesystem.path}: {filesystem.error}")
        elif filesystem.free_bytes == 0:
            yield NodeFault("storage", node.node, f"{filesystem.path} is full")
    for process in node.processes or ():
        if process.rank is not None and process.state in STOPPED_STATES:
            words = f"rank {process.rank} (pid {process.pid}, {process.name}) {STOPPED_STATES[process.state]}"
            yield NodeFault("process", node.node, words, process.rank)
