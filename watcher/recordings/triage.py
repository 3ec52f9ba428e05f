"""One-shot verdicts: a source that was read, or hosts that were asked twice, as one picture each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.collectors.ssh.model import NodeLink, SshSettings
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, UserProfile, user_profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.conclusion import ADVICE
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import JobSample, JobSpec, NodeState, PowerState, Suspect, Verdict
from wattwatch.watcher.recordings.format import Recording
from wattwatch.watcher.recordings.inputs import GpuLog, SourcePlayer, split_by_job
from wattwatch.watcher.recordings.replay import ROUND_WINDOW_FRACTION

SAMPLES_PER_HOST: Final = 2  # one moment proves little: two agree, or the verdict says that they do not
DISAGREEMENT_FACTOR: Final = 0.7  # what is left of the confidence where they do not, or where nodes are missing
HOST_SECONDS: Final = 20.0
# Hosts whose state is itself the finding: a query that hangs, or a driver that sees nothing, is a fault of the host.
# A driver that cannot be asked (upgraded under the job, a container without its devices) says nothing of the boards,
# unless it is gone.
HOST_FAULT_CONFIDENCE: Final = {HostStatus.NO_DEVICES: 0.6, HostStatus.SAMPLER_TIMEOUT: 0.6}
# Live, a job's progress is read; here the asker has to say it.
PROGRESS_ADVICE_REPLACEMENT: Final = (
    "Give the job's progress (a log or a run directory)",
    "Say what the steps do, --progress stalled or --progress advancing (`wattwatch progress LOG` reads them)",
)
DRIVER_GONE_PATTERN: Final = re.compile("cannot reach the NVIDIA driver|driver is not loaded")
DRIVER_GONE_CONFIDENCE: Final = 0.6

# One profile for whatever board; or a user's own, for the boards that they match.
ProfileChoice = PowerProfile | tuple[UserProfile, ...] | None


@dataclass(frozen=True, slots=True)
class TriageResult:
    source: str
    verdict: Verdict
    sample: JobSample


def triage_source(
    name: str, source: GpuLog | Recording, progress: StepProgress | None, profile: ProfileChoice = None
) -> tuple[TriageResult, ...]:
    """One verdict a job of the source: from its last rounds."""
    if isinstance(source, GpuLog) and len(source.specs) > 1:
        return tuple(
            replace(each, source=f"{name}: {log.specs[0].name}")
            for log in split_by_job(source)
            for each in triage_source(name, log, progress, profile)
        )
    ranks: Mapping[tuple[str, int], int] = source.ranks if isinstance(source, GpuLog) else {}
    interval = min((spec.interval_seconds for spec in source.specs), default=1.0)
    played = SourcePlayer(source.specs, iter(source.moments))
    assemblers = [JobAssembler(spec) for spec in source.specs]
    pictures: dict[str, list[JobSample]] = {spec.name: [] for spec in source.specs}
    for seconds in played.play(interval * ROUND_WINDOW_FRACTION):
        for sample in played.drain():
            for assembler in assemblers:
                assembler.add(sample)
        for spec, assembler in zip(source.specs, assemblers, strict=True):
            picture = apply_reported_ranks(assembler.assemble(played.links(), seconds, 0.0), ranks)
            pictures[spec.name] = [*pictures[spec.name][1 - SAMPLES_PER_HOST :], picture]
    if isinstance(source, GpuLog) and not source.moments:
        unread = NodeSample(source.specs[0].nodes[0], source.status, source.detail, 0, 0.0, 0.0, 0.0)
        assemblers[0].add(unread)
        pictures[source.specs[0].name] = [assemblers[0].assemble({}, 0.0, 0.0)]
    if isinstance(source, GpuLog) and source.advice:
        (rounds,) = pictures.values()
        verdict = judge_rounds(rounds, progress, profile)
        why = f"No board in it: {source.detail}."
        return (TriageResult(name, replace(verdict, why=why, advice=source.advice), rounds[-1]),)
    return tuple(
        TriageResult(
            name if len(pictures) == 1 else f"{name}: {job}", judge_rounds(rounds, progress, profile), rounds[-1]
        )
        for job, rounds in pictures.items()
        if rounds
    )


def select_profile(profiles: ProfileChoice, sample: JobSample) -> PowerProfile | None:
    """The one that holds for these boards; None: the shipped one of their name."""
    if profiles is None or isinstance(profiles, PowerProfile):
        return profiles
    return user_profile_for(profiles, next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None))


def apply_reported_ranks(sample: JobSample, ranks: Mapping[tuple[str, int], int]) -> JobSample:
    """Ranks that the source itself tells replace those guessed from the order of boards."""
    if not ranks:
        return sample
    told = tuple(replace(g, rank=ranks.get((g.node, -1 if g.gpu.index is None else g.gpu.index))) for g in sample.gpus)
    return replace(sample, gpus=told)


def judge_rounds(rounds: Sequence[JobSample], progress: StepProgress | None, profiles: ProfileChoice = None) -> Verdict:
    """The verdict on the last round; less sure where the one before says otherwise, or where nodes are missing."""
    last = rounds[-1]
    profile = select_profile(profiles, last)
    verdict = classify(last, profile, progress)
    faults = [_host_fault_confidence(node) for node in last.nodes]
    if not last.gpus and verdict.state is PowerState.UNKNOWN and faults and None not in faults:
        return replace(
            verdict,
            state=PowerState.GPU_FAULT,
            confidence=min(fault for fault in faults if fault is not None),
            suspects=tuple(Suspect(node.node) for node in last.nodes),
            advice=ADVICE[PowerState.GPU_FAULT],
        )
    if progress is None:
        verdict = replace(verdict, advice=verdict.advice.replace(*PROGRESS_ADVICE_REPLACEMENT))
    for earlier in rounds[:-1]:
        before = classify(earlier, profile, progress)
        # A board that is lost now was well before: that is no disagreement.
        if before.state is not verdict.state and verdict.state is not PowerState.GPU_FAULT and earlier.gpus:
            verdict = _lower_confidence(verdict, f"The sample before read as {before.state.value}.")
    unseen = [node for node in last.nodes if not node.fresh]
    if last.gpus and unseen:
        words = "; ".join(f"{node.node}: {node.status.value.replace('_', ' ')}, {node.detail}" for node in unseen[:4])
        verdict = _lower_confidence(verdict, f"Not seen: {words}.")
    return verdict


def _lower_confidence(verdict: Verdict, words: str) -> Verdict:
    why = verdict.why if verdict.why.endswith(".") else f"{verdict.why}."
    return replace(verdict, confidence=round(verdict.confidence * DISAGREEMENT_FACTOR, 2), why=f"{why} {words}")


def _host_fault_confidence(node: NodeState) -> float | None:
    """How sure it is that a host without readable boards is broken; None where that cannot be said."""
    if node.status is HostStatus.DRIVER_DOWN and DRIVER_GONE_PATTERN.search(node.detail):
        return DRIVER_GONE_CONFIDENCE
    return HOST_FAULT_CONFIDENCE.get(node.status)


def triage_hosts(
    hosts: Sequence[str],
    settings: SshSettings,
    *,
    as_one_job: bool,
    progress: StepProgress | None,
    profile: ProfileChoice,
) -> tuple[TriageResult, ...]:
    """Ask hosts over SSH for two samples each. A host that cannot be asked gets the verdict that says so."""
    names = tuple(dict.fromkeys(hosts))
    specs = [JobSpec("job", names)] if as_one_job else [JobSpec(name, (name,)) for name in names]
    clock = Clock()
    fleet = Fleet({name: ProbeRequest(interval_seconds=1.0) for name in names}, settings, clock)
    fleet.start()
    try:
        heard = _two_samples(fleet, names, clock)
        links = fleet.links()
        now = clock.monotonic()
    finally:
        fleet.stop()
    return tuple(_host_triages(specs, heard, links, now, progress, profile))


def _two_samples(fleet: Fleet, names: Sequence[str], clock: Clock) -> dict[str, list[NodeSample]]:
    """Until each host has given two samples with boards, or has failed, or time is up."""
    heard: dict[str, list[NodeSample]] = {name: [] for name in names}
    deadline = clock.monotonic() + HOST_SECONDS
    settled: set[str] = set()
    while clock.monotonic() < deadline and len(settled) < len(names):
        fleet.wait(0.2)
        for sample in fleet.drain():
            # The first line comes before the boards were read: it waits for them, it does not time out.
            if sample.gpus is not None or sample.sequence > 5:
                heard[sample.node].append(sample)
        links = fleet.links()
        settled = {n for n in names if len(heard[n]) >= SAMPLES_PER_HOST or links[n].failures > 0}
    return heard


def _host_triages(
    specs: Sequence[JobSpec],
    heard: Mapping[str, Sequence[NodeSample]],
    links: Mapping[str, NodeLink],
    now: float,
    progress: StepProgress | None,
    profile: ProfileChoice,
) -> Iterator[TriageResult]:
    for spec in specs:
        assembler = JobAssembler(spec)
        rounds = []
        for i in range(SAMPLES_PER_HOST):
            for node in spec.nodes:
                for sample in heard[node][i : i + 1]:
                    # Rounds of hosts that were asked one after the other are put side by side here.
                    assembler.add(replace(sample, received_seconds=now))
            rounds.append(assembler.assemble(links, now, 0.0))
        yield TriageResult(spec.name, judge_rounds(rounds, progress, profile), rounds[-1])
