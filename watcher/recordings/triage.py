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
from wattwatch.watcher.common.formatting import format_count, format_duration
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.profiles import (
    PowerProfile,
    UserProfile,
    find_profile,
    unknown_model_text,
    user_profile_for,
)
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.conclusion import PROVIDE_PROGRESS
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import (
    JobSample,
    JobSpec,
    NodeState,
    PowerState,
    Suspect,
    UtilizationPattern,
    Verdict,
)
from wattwatch.watcher.recordings.format import Recording
from wattwatch.watcher.recordings.inputs import (
    GpuLog,
    HostOrder,
    InputError,
    SourcePlayer,
    current_parts,
    read_input,
    read_input_file,
    split_by_job,
)
from wattwatch.watcher.recordings.replay import ROUND_WINDOW_FRACTION

SAMPLES_PER_HOST: Final = 2  # a single sample proves little: two agree, or the verdict says that they do not
DISAGREEMENT_FACTOR: Final = 0.7  # applied to the confidence if they disagree; chosen
MAX_MISSING_NODES: Final = 4  # named with their reason in one sentence
HOST_SECONDS: Final = 20.0  # for the login and two samples
FIRST_READINGS_SEQUENCE: Final = 5  # lines of the probe that may come before its first readings of the GPUs
# Conditions of a host that are themselves the finding: a query that hangs and a driver without devices are faults of
# the host. Another driver error (an upgrade under a running job, a container without its devices) says nothing about
# the GPUs, unless the driver is gone. None of them says which GPU is at fault, so the advice is about the host.
HOST_FAULT_CONFIDENCE: Final = 0.6
HOST_FAULT_ADVICE: Final = {
    HostStatus.NO_DEVICES: "Run `lspci | grep -i nvidia` on the host. If it lists the GPUs, check the kernel log for "
    "errors of the driver; if it does not list them, the GPUs are off the PCI bus: drain the node and power it off and "
    "on.",
    # SIGKILL to a process that was reading a GPU has frozen it: NVIDIA/dcgm-exporter#84.
    HostStatus.SAMPLER_TIMEOUT: "Check the kernel log of the host for Xid errors and for blocked processes. Do not "
    "kill the query with SIGKILL, because that can freeze the GPU. Drain the node and reboot it.",
    HostStatus.DRIVER_DOWN: "Check the kernel log of the host for NVRM messages, and check whether the nvidia module "
    "is loaded (`lsmod | grep nvidia`). Load or install the driver again, or reboot the node. The GPUs may be fine.",
}
# In place of PROVIDE_PROGRESS: `serve` reads the progress of a job by itself, here the user has to say it.
PROGRESS_ADVICE: Final = (
    "Add --progress advancing if steps advance, or --progress stalled if not (`wattwatch progress LOG` shows the step)"
)
# Readings of one job that are further apart do not show one moment: a save alone takes longer. Chosen.
MAX_APART_SECONDS: Final = 60.0
DRIVER_GONE_PATTERN: Final = re.compile("cannot reach the NVIDIA driver|driver is not loaded")
RANK_WORD: Final = re.compile(r"\b[Rr]ank(s?)\b")
NOT_THE_FIRST_NODE: Final = (
    "If this host is not the first node of its job, its GPU 0 is not rank 0 and does not save checkpoints; in that "
    "case the job hangs. For a verdict on the job, give the output of each of its nodes with --job."
)


@dataclass(frozen=True, slots=True)
class AssumedModel:
    """The GPU model that the user names, for inputs that do not name it themselves."""

    model: str
    profile: PowerProfile


# One profile for every GPU; or the profiles of the user, each for the GPUs that it matches; or a model, for GPUs that
# do not name theirs.
ProfileChoice = PowerProfile | tuple[UserProfile, ...] | AssumedModel | None


def assume_model(model: str, profiles: Sequence[UserProfile] = ()) -> AssumedModel | None:
    """The profile of the GPU model that the user names: one of `profiles` that matches it, else the shipped one. None
    if the model is not known."""
    profile = user_profile_for(profiles, model) or find_profile(model)
    return None if profile is None else AssumedModel(model, profile)


@dataclass(frozen=True, slots=True)
class TriageResult:
    """The verdict about one job, and the sample that it is about."""

    source: str
    verdict: Verdict
    sample: JobSample


def triage_text_or_path(
    text_or_path: str | os.PathLike[str], progress: str | None = None, board: str | None = None
) -> tuple[TriageResult, ...]:
    """One verdict for each job in a text with GPU readings, or in a file if there is one of that name.

    Raises InputError or RecordingError if it cannot be read, ValueError if `board` is no GPU model with a profile.
    """
    assumed = None if board is None else assume_model(board)
    if board is not None and assumed is None:
        raise ValueError(unknown_model_text(board))
    name, path = "text", None
    if not isinstance(text_or_path, str) or ("\n" not in text_or_path and _is_file(text_or_path)):
        path = Path(text_or_path)
    if path is not None:
        name, source = str(path), read_input_file(path, only_the_end=True)
    else:
        source = read_input(name, str(text_or_path).encode())
    return triage_source(name, source, None if progress is None else StepProgress(progress), assumed)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False


def triage_source(
    name: str, source: GpuLog | Recording, progress: StepProgress | None, profile: ProfileChoice = None
) -> tuple[TriageResult, ...]:
    """One verdict for each job of an input, from its last rounds of samples.

    Of an input that holds several logs, one after the other, those that ended long before the newest are not judged.
    """
    if isinstance(source, GpuLog) and source.parts:
        return tuple(
            each
            for log in split_by_job(current_parts(source))
            for each in triage_source(f"{name}: {log.specs[0].name}", log, progress, profile)
        )
    if isinstance(source, GpuLog) and len(source.specs) > 1:
        return tuple(
            replace(each, source=f"{name}: {log.specs[0].name}")
            for log in split_by_job(source)
            for each in triage_source(name, log, progress, profile)
        )
    ranks: Mapping[tuple[str, int], int] = source.ranks if isinstance(source, GpuLog) else {}
    # GPU 0 of one host has rank 0 only if the job has no other node before it, which the output of a host cannot show.
    ranks_known = isinstance(source, Recording) or bool(ranks) or len(source.specs[0].nodes) > 1
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
            job_sample = replace(job_sample, ranks_known=ranks_known)
            last_rounds[spec.name] = [*last_rounds[spec.name][1 - SAMPLES_PER_HOST :], job_sample]
    if isinstance(source, GpuLog) and not source.events:
        assemblers[0].add(_unread_sample(source.specs[0].nodes[0], source))
        last_rounds[source.specs[0].name] = [assemblers[0].assemble({}, 0.0, 0.0)]
    for spec, assembler in zip(source.specs, assemblers, strict=True):
        # Such as a recording that ends before the first sample: that nothing is known is a verdict too.
        last_rounds[spec.name] = last_rounds[spec.name] or [assembler.assemble(player.links(), 0.0, 0.0)]
    if isinstance(source, GpuLog) and source.advice:
        (rounds,) = last_rounds.values()
        verdict = judge_rounds(rounds, progress, profile)
        why = f"No GPU readings: {source.detail}."
        return (TriageResult(name, replace(verdict, why=why, advice=source.advice), rounds[-1]),)
    remarks = _remarks(source)
    return tuple(
        _result(name if len(last_rounds) == 1 else f"{name}: {job}", rounds, remarks, progress, profile)
        for job, rounds in last_rounds.items()
    )


def _result(
    name: str,
    rounds: Sequence[JobSample],
    remarks: Sequence[str],
    progress: StepProgress | None,
    profile: ProfileChoice,
) -> TriageResult:
    verdict = judge_rounds(rounds, progress, profile)
    last = rounds[-1]
    if not last.ranks_known:
        last = replace(last, gpus=tuple(replace(ranked, rank=None) for ranked in last.gpus))
    return TriageResult(name, replace(verdict, why=" ".join((_sentence(verdict.why), *remarks))), last)


def _unread_sample(node: str, log: GpuLog) -> NodeSample:
    """A host of which no GPU could be read, with the reason."""
    return NodeSample(node, log.status, log.detail, 0, 0.0, 0.0, 0.0)


def _remarks(source: GpuLog | Recording) -> tuple[str, ...]:
    """What a reader must know of the input to trust the verdict."""
    if isinstance(source, Recording):
        return (source.end.problem,) if source.end is not None and source.end.problem else ()
    remarks = [*source.remarks]
    if source.undated_outputs:
        count = source.undated_outputs
        remarks.append(
            f"The input contains {count} outputs without dates or UUIDs, which were read as {count} samples of one "
            "host. If they are from several hosts, give each host's output as a file of its own."
        )
    return tuple(remarks)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


# Several inputs, or several hosts in one input, that are the nodes of one job


def triage_job(
    sources: Sequence[tuple[str, GpuLog | Recording]],
    progress: StepProgress | None,
    profile: ProfileChoice = None,
) -> tuple[TriageResult, ...]:
    """One verdict for one job whose nodes are the hosts of all sources, in their order: ranks are counted over them.

    Raises InputError if the sources cannot be the nodes of one job.
    """
    name, first = sources[0]
    if len(sources) == 1 and len(first.specs) == 1:
        return triage_source(name, first, progress, profile)
    logs: list[tuple[str, GpuLog]] = []
    for name, source in sources:
        if name in (known for known, _ in logs):
            raise InputError(f"{name}: given twice. Give each file once")
        if isinstance(source, Recording):
            raise InputError(f"{name}: a recording already contains its jobs. Give it as the only input, without --job")
        if source.parts:
            logs.append((name, _nodes_in_one_file(name, source)))
            continue
        if len(source.specs) > 1 and source.host_order is None:
            raise InputError(
                f"{name}: this file already contains {len(source.specs)} jobs. Give it as the only input, without --job"
            )
        logs.append((name, source))
    samples: dict[str, list[NodeSample]] = {}
    ranks: dict[tuple[str, int], int] = {}
    for name, log in logs:
        for node, mine in _samples_by_node(log).items():
            # Files of the same name in several directories are called by their paths.
            unique = node if node not in samples else name if node == Path(name).name else f"{name}/{node}"
            samples[unique] = [replace(sample, node=unique) for sample in mine]
            ranks |= {(unique, index): rank for (of, index), rank in log.ranks.items() if of == node}
    spec = JobSpec("job", tuple(samples))
    rounds = [apply_reported_ranks(each, ranks) for each in last_rounds_of_nodes(spec, samples, {}, 0.0)]
    result = _result(spec.name, rounds, _remarks_on_job(logs, ranks), progress, profile)
    apart = _seconds_apart(samples)
    if apart > MAX_APART_SECONDS:
        reason = (
            f"The last samples of the nodes are {format_duration(apart)} apart, so they do not show the same moment."
        )
        result = replace(result, verdict=_lower_confidence(result.verdict, reason))
    return (result,)


def _nodes_in_one_file(name: str, source: GpuLog) -> GpuLog:
    """Of several logs in one input, those that are not past: the logs of nodes that were concatenated."""
    current = split_by_job(current_parts(source))
    if len(current) == 1:
        return current[0]
    if any(part.ends_wall_seconds is None for part in source.parts):
        raise InputError(
            f"{name}: contains {len(source.parts)} logs one after the other, and their times do not show which is the "
            "newest. Give each log as a file of its own"
        )
    remark = f"The {len(current)} logs in {name} that end at the same time were each read as a separate node."
    return replace(current_parts(source), parts=(), remarks=(*source.remarks, remark))


def _samples_by_node(log: GpuLog) -> dict[str, list[NodeSample]]:
    specs = sorted(log.specs, key=_host_sort_key) if log.host_order is HostOrder.ARRIVAL else log.specs
    samples: dict[str, list[NodeSample]] = {node: [] for spec in specs for node in spec.nodes}
    for event in log.events:
        if event.sample is not None:
            samples[event.sample.node].append(event.sample)
    return {node: mine or [_unread_sample(node, log)] for node, mine in samples.items()}


def _host_sort_key(spec: JobSpec) -> list[tuple[int, str]]:
    """gpu-2 before gpu-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", spec.name)]


def _remarks_on_job(logs: Sequence[tuple[str, GpuLog]], ranks: Mapping[tuple[str, int], int]) -> tuple[str, ...]:
    remarks = []
    for name, log in logs:
        if log.undated_outputs and log.host_order is not None:
            remarks.append(f"The {log.undated_outputs} outputs in {name} were each read as a separate node.")
        elif log.undated_outputs:
            remarks.append(f"The {log.undated_outputs} outputs in {name} were read as samples of one node.")
        remarks += log.remarks
    if not ranks:
        by_name = any(log.host_order is HostOrder.ARRIVAL for _, log in logs)
        order = "in the order of the host names" if by_name else "in the order in which the nodes were given"
        remarks.append(f"Ranks are numbered {order}.")
    return tuple(remarks)


def _seconds_apart(samples: Mapping[str, Sequence[NodeSample]]) -> float:
    """Between the oldest and the newest of the nodes' last samples; 0 where they have no dates."""
    dates = [mine[-1].wall_seconds for mine in samples.values() if mine[-1].wall_seconds > 0]
    return max(dates) - min(dates) if dates else 0.0


def last_rounds_of_nodes(
    spec: JobSpec, samples: Mapping[str, Sequence[NodeSample]], links: Mapping[str, NodeLink], now: float
) -> list[JobSample]:
    """The last SAMPLES_PER_HOST rounds. Hosts answer at different times; their samples are treated as if they came
    together. Earlier samples show which GPUs a host has."""
    assembler = JobAssembler(spec)
    for node in spec.nodes:
        for sample in samples[node][:-SAMPLES_PER_HOST]:
            assembler.add(replace(sample, received_seconds=now))
    rounds = []
    for back in range(SAMPLES_PER_HOST, 0, -1):
        for node in spec.nodes:
            mine = samples[node]
            if mine:
                assembler.add(replace(mine[max(0, len(mine) - back)], received_seconds=now))
        rounds.append(assembler.assemble(links, now, 0.0))
    return rounds


def select_profile(profiles: ProfileChoice, sample: JobSample) -> PowerProfile | None:
    """The profile for these GPUs; None: the shipped profile of their model."""
    if profiles is None or isinstance(profiles, PowerProfile):
        return profiles
    name = next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None)
    if isinstance(profiles, AssumedModel):
        return profiles.profile if name is None else None
    return user_profile_for(profiles, name)


def apply_reported_ranks(sample: JobSample, ranks: Mapping[tuple[str, int], int]) -> JobSample:
    """Replaces ranks that were inferred from the order of GPUs by those that the input itself names."""
    if not ranks:
        return sample
    gpus = tuple(replace(g, rank=ranks.get((g.node, -1 if g.gpu.index is None else g.gpu.index))) for g in sample.gpus)
    return replace(sample, gpus=gpus)


def judge_rounds(rounds: Sequence[JobSample], progress: StepProgress | None, profiles: ProfileChoice = None) -> Verdict:
    """The verdict on the last round; less confident if the round before disagrees. Names the nodes that are missing."""
    last = rounds[-1]
    profile = select_profile(profiles, last)
    verdict = classify(last, profile, progress)
    faults = [_host_fault_advice(node) for node in last.nodes]
    if not last.gpus and verdict.state is PowerState.UNKNOWN and faults and None not in faults:
        return replace(
            verdict,
            state=PowerState.GPU_FAULT,
            confidence=HOST_FAULT_CONFIDENCE,
            suspects=tuple(Suspect(node.node) for node in last.nodes),
            advice=" ".join(dict.fromkeys(fault for fault in faults if fault is not None)),
            deciding_check=None,  # running nvidia-smi once more shows nothing new
        )
    if isinstance(profiles, AssumedModel) and profile is not None:
        verdict = replace(verdict, why=f"{_sentence(verdict.why)} GPU model as given with --board: {profiles.model}.")
    if progress is None:
        verdict = replace(verdict, advice=verdict.advice.replace(PROVIDE_PROGRESS, PROGRESS_ADVICE))
    for earlier in rounds[:-1]:
        before = classify(earlier, profile, progress)
        # A GPU that is lost now was fine before: that is no disagreement.
        if before.state is not verdict.state and verdict.state is not PowerState.GPU_FAULT and earlier.gpus:
            verdict = _lower_confidence(verdict, f"The previous sample indicated {before.state.value}.")
    if not last.ranks_known:
        verdict = _without_ranks(verdict)
    missing = [node for node in last.nodes if not node.fresh]
    if last.gpus and missing:
        # The classifier has already lowered the confidence by the share that is not seen.
        text = "; ".join(f"{node.node}: {node.unreadable_reason_in_full}" for node in missing[:MAX_MISSING_NODES])
        more = len(missing) - MAX_MISSING_NODES
        text = f"{text}; and {format_count(more, 'more node')}" if more > 0 else text
        verdict = replace(verdict, why=f"{_sentence(verdict.why)} Not seen: {text}.")
    return verdict


def _without_ranks(verdict: Verdict) -> Verdict:
    """Of one host only the GPUs are known, so its ranks are called GPUs. If its GPU 0 is not rank 0, what looks like a
    save is a hang."""
    suspects = tuple(replace(suspect, rank=None) for suspect in verdict.suspects)
    advice = verdict.advice
    if verdict.state is PowerState.CHECKPOINT and verdict.pattern is UtilizationPattern.RANK0_LOW_REST_BUSY:
        advice = f"{_sentence(advice)} {NOT_THE_FIRST_NODE}"
    return replace(verdict, suspects=suspects, advice=advice, why=RANK_WORD.sub(r"GPU\1", verdict.why))


def _lower_confidence(verdict: Verdict, reason: str) -> Verdict:
    confidence = round(verdict.confidence * DISAGREEMENT_FACTOR, 2)
    other = verdict.alternative
    if other is not None:
        other = replace(other, confidence=min(other.confidence, confidence))
    return replace(verdict, confidence=confidence, alternative=other, why=f"{_sentence(verdict.why)} {reason}")


def _host_fault_advice(node: NodeState) -> str | None:
    """What to do about a host without readable GPUs that is itself at fault; None if that cannot be said."""
    if node.status is HostStatus.DRIVER_DOWN and not DRIVER_GONE_PATTERN.search(node.detail):
        return None
    return HOST_FAULT_ADVICE.get(node.status)


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
        several = len(spec.nodes) > 1
        rounds = [
            replace(each, ranks_known=several)
            for each in last_rounds_of_nodes(spec, {node: samples[node] for node in spec.nodes}, links, now)
        ]
        remarks = ("Ranks are numbered in the order in which the nodes were given.",) if several else ()
        yield _result(spec.name, rounds, remarks, progress, profile)
