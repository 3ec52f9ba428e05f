"""One-shot verdicts: a source that was read, or hosts that were asked twice, as one picture each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from collectors.clock import Clock
from collectors.probe.request import ProbeRequest
from collectors.samples import HostStatus, NodeSample
from collectors.ssh.fleet import Fleet
from collectors.ssh.link import NodeLink, SshSettings
from watcher.judge.advice import ADVICE
from watcher.judge.assemble import JobAssembler
from watcher.judge.classify import ProgressWord, classify
from watcher.judge.job_sample import JobSample, JobSpec, NodeState
from watcher.judge.own_profiles import OwnProfile, own_profile
from watcher.judge.profiles import Profile
from watcher.judge.verdict import PowerState, Suspect, Verdict
from watcher.recordings import Recording
from watcher.replay import ROUND_SHARE
from watcher.sources import GpuLog, PlayedSource, by_job

SAMPLES: Final = 2  # one moment proves little: two agree, or the verdict says that they do not
DISAGREEMENT: Final = 0.7  # what is left of the confidence where they do not, or where nodes are missing
HOST_SECONDS: Final = 20.0
# Hosts whose state is itself the finding: a query that hangs, or a driver that sees nothing, is a fault of the host.
# A driver that cannot be asked (upgraded under the job, a container without its devices) says nothing of the boards,
# unless it is gone.
HOST_FAULTS: Final = {HostStatus.NO_DEVICES: 0.6, HostStatus.SAMPLER_TIMEOUT: 0.6}
# Live, a job's progress is read; here the asker has to say it.
ASK_FOR_PROGRESS: Final = (
    "Give the job's progress (a log or a run directory)",
    "Say what the steps do, --progress stalled or --progress advancing (`wattwatch progress LOG` reads them)",
)
DRIVER_GONE: Final = re.compile("cannot reach the NVIDIA driver|driver is not loaded")
DRIVER_GONE_CONFIDENCE: Final = 0.6

# One profile for whatever board; or a user's own, for the boards that they match.
Profiles = Profile | tuple[OwnProfile, ...] | None


@dataclass(frozen=True, slots=True)
class Triage:
    source: str
    verdict: Verdict
    sample: JobSample


def triage_source(
    name: str, source: GpuLog | Recording, progress: ProgressWord | None, profile: Profiles = None
) -> tuple[Triage, ...]:
    """One verdict a job of the source: from its last rounds."""
    if isinstance(source, GpuLog) and len(source.specs) > 1:
        return tuple(
            replace(each, source=f"{name}: {log.specs[0].name}")
            for log in by_job(source)
            for each in triage_source(name, log, progress, profile)
        )
    ranks: Mapping[tuple[str, int], int] = source.ranks if isinstance(source, GpuLog) else {}
    interval = min((spec.interval_seconds for spec in source.specs), default=1.0)
    played = PlayedSource(source.specs, iter(source.moments))
    assemblers = [JobAssembler(spec) for spec in source.specs]
    pictures: dict[str, list[JobSample]] = {spec.name: [] for spec in source.specs}
    for seconds in played.play(interval * ROUND_SHARE):
        for sample in played.drain():
            for assembler in assemblers:
                assembler.add(sample)
        for spec, assembler in zip(source.specs, assemblers, strict=True):
            picture = with_ranks(assembler.assemble(played.links(), seconds, 0.0), ranks)
            pictures[spec.name] = [*pictures[spec.name][1 - SAMPLES :], picture]
    if isinstance(source, GpuLog) and not source.moments:
        unread = NodeSample(source.specs[0].nodes[0], source.status, source.detail, 0, 0.0, 0.0, 0.0)
        assemblers[0].add(unread)
        pictures[source.specs[0].name] = [assemblers[0].assemble({}, 0.0, 0.0)]
    if isinstance(source, GpuLog) and source.advice:
        (rounds,) = pictures.values()
        verdict = judged(rounds, progress, profile)
        why = f"No board in it: {source.detail}."
        return (Triage(name, replace(verdict, why=why, advice=source.advice), rounds[-1]),)
    return tuple(
        Triage(name if len(pictures) == 1 else f"{name}: {job}", judged(rounds, progress, profile), rounds[-1])
        for job, rounds in pictures.items()
        if rounds
    )


def profile_among(profiles: Profiles, sample: JobSample) -> Profile | None:
    """The one that holds for these boards; None: the shipped one of their name."""
    if profiles is None or isinstance(profiles, Profile):
        return profiles
    return own_profile(profiles, next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None))


def with_ranks(sample: JobSample, ranks: Mapping[tuple[str, int], int]) -> JobSample:
    """Ranks that the source itself tells replace those guessed from the order of boards."""
    if not ranks:
        return sample
    told = tuple(replace(g, rank=ranks.get((g.node, -1 if g.gpu.index is None else g.gpu.index))) for g in sample.gpus)
    return replace(sample, gpus=told)


def judged(rounds: Sequence[JobSample], progress: ProgressWord | None, profiles: Profiles = None) -> Verdict:
    """The verdict on the last round; less sure where the one before says otherwise, or where nodes are missing."""
    last = rounds[-1]
    profile = profile_among(profiles, last)
    verdict = classify(last, profile, progress)
    faults = [_host_fault(node) for node in last.nodes]
    if not last.gpus and verdict.state is PowerState.UNKNOWN and faults and None not in faults:
        return replace(
            verdict,
            state=PowerState.GPU_FAULT,
            confidence=min(fault for fault in faults if fault is not None),
            suspects=tuple(Suspect(node.node) for node in last.nodes),
            advice=ADVICE[PowerState.GPU_FAULT],
        )
    if progress is None:
        verdict = replace(verdict, advice=verdict.advice.replace(*ASK_FOR_PROGRESS))
    for earlier in rounds[:-1]:
        before = classify(earlier, profile, progress)
        # A board that is lost now was well before: that is no disagreement.
        if before.state is not verdict.state and verdict.state is not PowerState.GPU_FAULT and earlier.gpus:
            verdict = _less_sure(verdict, f"The sample before read as {before.state.value}.")
    unseen = [node for node in last.nodes if not node.fresh]
    if last.gpus and unseen:
        words = "; ".join(f"{node.node}: {node.status.value.replace('_', ' ')}, {node.detail}" for node in unseen[:4])
        verdict = _less_sure(verdict, f"Not seen: {words}.")
    return verdict


def _less_sure(verdict: Verdict, words: str) -> Verdict:
    why = verdict.why if verdict.why.endswith(".") else f"{verdict.why}."
    return replace(verdict, confidence=round(verdict.confidence * DISAGREEMENT, 2), why=f"{why} {words}")


def _host_fault(node: NodeState) -> float | None:
    """How sure it is that a host without readable boards is broken; None where that cannot be said."""
    if node.status is HostStatus.DRIVER_DOWN and DRIVER_GONE.search(node.detail):
        return DRIVER_GONE_CONFIDENCE
    return HOST_FAULTS.get(node.status)


def triage_hosts(
    hosts: Sequence[str],
    settings: SshSettings,
    *,
    as_one_job: bool,
    progress: ProgressWord | None,
    profile: Profiles,
) -> tuple[Triage, ...]:
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
        settled = {n for n in names if len(heard[n]) >= SAMPLES or links[n].failures > 0}
    return heard


def _host_triages(
    specs: Sequence[JobSpec],
    heard: Mapping[str, Sequence[NodeSample]],
    links: Mapping[str, NodeLink],
    now: float,
    progress: ProgressWord | None,
    profile: Profiles,
) -> Iterator[Triage]:
    for spec in specs:
        assembler = JobAssembler(spec)
        rounds = []
        for i in range(SAMPLES):
            for node in spec.nodes:
                for sample in heard[node][i : i + 1]:
                    # Rounds of hosts that were asked one after the other are put side by side here.
                    assembler.add(replace(sample, received_seconds=now))
            rounds.append(assembler.assemble(links, now, 0.0))
        yield Triage(spec.name, judged(rounds, progress, profile), rounds[-1])
