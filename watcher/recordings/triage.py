"""One verdict now: about a file that was read, or about hosts that are sampled twice over SSH. Nothing is learned and
nothing is remembered; `wattwatch triage` and the public API are thin layers over these functions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.collectors.ssh.model import NodeLink, SshSettings
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, UserProfile, user_profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.conclusion import ADVICE, PROVIDE_PROGRESS
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import JobSample, JobSpec, NodeState, PowerState, Suspect, Verdict
from wattwatch.watcher.recordings.format import Recording
from wattwatch.watcher.recordings.inputs import GpuLog, SourcePlayer, read_input, read_input_file, split_by_job
from wattwatch.watcher.recordings.replay import ROUND_WINDOW_FRACTION

SAMPLES_PER_HOST: Final = 2  # a single sample proves little: two agree, or the verdict says that they do not
DISAGREEMENT_FACTOR: Final = 0.7  # applied to the confidence if they disagree, or if nodes are missing; chosen
HOST_SECONDS: Final = 20.0  # for the login and two samples
FIRST_READINGS_SEQUENCE: Final = 5  # lines of the probe that may come before its first readings of the GPUs
# Conditions of a host that are themselves the finding: a query that hangs and a driver without devices are faults of
# the host. Another driver error (an upgrade under a running job, a container without its devices) says nothing about
# the GPUs, unless the driver is gone.
HOST_FAULT_CONFIDENCE: Final = {HostStatus.NO_DEVICES: 0.6, HostStatus.SAMPLER_TIMEOUT: 0.6}
# In place of PROVIDE_PROGRESS: `serve` reads the progress of a job by itself, here the user has to say it.
PROGRESS_ADVICE: Final = (
    "Add --progress advancing if steps advance, or --progress stalled if not (`wattwatch progress LOG` shows the step)"
)
DRIVER_GONE_PATTERN: Final = re.compile("cannot reach the NVIDIA driver|driver is not loaded")
DRIVER_GONE_CONFIDENCE: Final = 0.6

# One profile for every GPU; or the profiles of the user, each for the GPUs that it matches.
ProfileChoice = PowerProfile | tuple[UserProfile, ...] | None


@dataclass(frozen=True, slots=True)
class TriageResult:
    """The verdict about one job, and the sample that it is about."""

    source: str
    verdict: Verdict
    sample: JobSample


def triage_text_or_path(text_or_path: str | os.PathLike[str], progress: str | None = None) -> tuple[TriageResult, ...]:
    """One verdict for each job in a text with GPU readings, or in a file if there is one of that name.

    Raises InputError or RecordingError if it cannot be read.
    """
    name, path = "text", None
    if not isinstance(text_or_path, str) or ("\n" not in text_or_path and _is_file(text_or_path)):
        path = Path(text_or_path)
    if path is not None:
        name, source = str(path), read_input_file(path, only_the_end=True)
    else:
        source = read_input(name, str(text_or_path).encode())
    return triage_source(name, source, None if progress is None else StepProgress(progress))


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False


def triage_source(
    name: str, source: GpuLog | Recording, progress: StepProgress | None, profile: ProfileChoice = None
) -> tuple[TriageResult, ...]:
    """One verdict for each job of an input, from its last rounds of samples."""
    if isinstance(source, GpuLog) and len(source.specs) > 1:
        return tuple(
            replace(each, source=f"{name}: {log.specs[0].name}")
            for log in split_by_job(source)
            for each in triage_source(name, log, progress, profile)
        )
    ranks: Mapping[tuple[str, int], int] = source.ranks if isinstance(source, GpuLog) else {}
    interval = min((spec.interval_seconds for spec in source.specs), default=1.0)
    player = SourcePlayer(source.specs, iter(source.events))
    assemblers = [JobAssembler(spec) for spec in source.specs]
    last_rounds: dict[str, list[JobSample]] = {spec.name: [] for spec in source.specs}
    for seconds in player.play(interval * ROUND_WINDOW_FRACTION):
        for sample in player.drain():
            for assembler in assemblers:
                assembler.add(sample)
        for spec, assembler in zip(source.specs, assemblers, strict=True):
            job_sample = apply_reported_ranks(assembler.assemble(player.links(), seconds, 0.0), ranks)
            last_rounds[spec.name] = [*last_rounds[spec.name][1 - SAMPLES_PER_HOST :], job_sample]
    if isinstance(source, GpuLog) and not source.events:
        unread = NodeSample(source.specs[0].nodes[0], source.status, source.detail, 0, 0.0, 0.0, 0.0)
        assemblers[0].add(unread)
        last_rounds[source.specs[0].name] = [assemblers[0].assemble({}, 0.0, 0.0)]
    if isinstance(source, GpuLog) and source.advice:
        (rounds,) = last_rounds.values()
        verdict = judge_rounds(rounds, progress, profile)
        why = f"No GPU readings: {source.detail}."
        return (TriageResult(name, replace(verdict, why=why, advice=source.advice), rounds[-1]),)
    return tuple(
        TriageResult(
            name if len(last_rounds) == 1 else f"{name}: {job}", judge_rounds(rounds, progress, profile), rounds[-1]
        )
        for job, rounds in last_rounds.items()
        if rounds
    )


def select_profile(profiles: ProfileChoice, sample: JobSample) -> PowerProfile | None:
    """The profile for these GPUs; None: the shipped profile of their model."""
    if profiles is None or isinstance(profiles, PowerProfile):
        return profiles
    return user_profile_for(profiles, next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None))


def apply_reported_ranks(sample: JobSample, ranks: Mapping[tuple[str, int], int]) -> JobSample:
    """Replaces ranks that were inferred from the order of GPUs by those that the input itself names."""
    if not ranks:
        return sample
    gpus = tuple(replace(g, rank=ranks.get((g.node, -1 if g.gpu.index is None else g.gpu.index))) for g in sample.gpus)
    return replace(sample, gpus=gpus)


def judge_rounds(rounds: Sequence[JobSample], progress: StepProgress | None, profiles: ProfileChoice = None) -> Verdict:
    """The verdict on the last round; less confident if the round before disagrees, or if nodes are missing."""
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
        verdict = replace(verdict, advice=verdict.advice.replace(PROVIDE_PROGRESS, PROGRESS_ADVICE))
    for earlier in rounds[:-1]:
        before = classify(earlier, profile, progress)
        # A GPU that is lost now was fine before: that is no disagreement.
        if before.state is not verdict.state and verdict.state is not PowerState.GPU_FAULT and earlier.gpus:
            verdict = _lower_confidence(verdict, f"The previous sample indicated {before.state.value}.")
    missing = [node for node in last.nodes if not node.fresh]
    if last.gpus and missing:
        text = "; ".join(f"{node.node}: {node.status.value.replace('_', ' ')}, {node.detail}" for node in missing[:4])
        verdict = _lower_confidence(verdict, f"Missing: {text}.")
    return verdict


def _lower_confidence(verdict: Verdict, reason: str) -> Verdict:
    why = verdict.why if verdict.why.endswith(".") else f"{verdict.why}."
    return replace(verdict, confidence=round(verdict.confidence * DISAGREEMENT_FACTOR, 2), why=f"{why} {reason}")


def _host_fault_confidence(node: NodeState) -> float | None:
    """The confidence that a host without readable GPUs is faulty; None if that cannot be said."""
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
    """Takes two samples of each host over SSH. A host that cannot be reached gets a verdict that says so.

    `as_one_job`: all hosts are nodes of one job, which gets one verdict. Otherwise each host gets its own.
    """
    names = tuple(dict.fromkeys(hosts))
    specs = [JobSpec("job", names)] if as_one_job else [JobSpec(name, (name,)) for name in names]
    clock = Clock()
    fleet = Fleet({name: ProbeRequest(interval_seconds=1.0) for name in names}, settings, clock)
    fleet.start()
    try:
        samples = _two_samples(fleet, names, clock)
        links = fleet.links()
        now = clock.monotonic()
    finally:
        fleet.stop()
    return tuple(_host_triages(specs, samples, links, now, progress, profile))


def _two_samples(fleet: Fleet, names: Sequence[str], clock: Clock) -> dict[str, list[NodeSample]]:
    """Waits until each host has sent two samples with GPUs or has failed, at most HOST_SECONDS."""
    samples: dict[str, list[NodeSample]] = {name: [] for name in names}
    deadline = clock.monotonic() + HOST_SECONDS
    finished: set[str] = set()
    while clock.monotonic() < deadline and len(finished) < len(names):
        fleet.wait(0.2)
        for sample in fleet.drain():
            # The first lines may come before the GPUs were read once. A host that never sends readings counts too.
            if sample.gpus is not None or sample.sequence > FIRST_READINGS_SEQUENCE:
                samples[sample.node].append(sample)
        links = fleet.links()
        finished = {n for n in names if len(samples[n]) >= SAMPLES_PER_HOST or links[n].failures > 0}
    return samples


def _host_triages(
    specs: Sequence[JobSpec],
    samples: Mapping[str, Sequence[NodeSample]],
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
                for sample in samples[node][i : i + 1]:
                    # Hosts answer at different times; their samples are treated as if they came together.
                    assembler.add(replace(sample, received_seconds=now))
            rounds.append(assembler.assemble(links, now, 0.0))
        yield TriageResult(spec.name, judge_rounds(rounds, progress, profile), rounds[-1])
