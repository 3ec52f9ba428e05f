"""Learns on request what GPUs draw: from hosts that are idle now, or from a recording or log by the rules of the live
watcher. The result can be written as a [[profiles]] table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import orjson

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.baseline import (
    PLATEAU_LOWER_END,
    Baseline,
    BaselineKind,
    BaselineTable,
    GpuId,
    LearningPhase,
    expected_floor_watts,
    implausible_reason,
    is_same_limit,
)
from wattwatch.watcher.detection.baselines.learner import JobLearner, unsteady_reason
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import CONTEXT_BYTES, IDLE_PERCENT, JobProgress, JobSample, valid_power_watts
from wattwatch.watcher.recordings.format import Recording
from wattwatch.watcher.recordings.inputs import GpuLog, SourcePlayer
from wattwatch.watcher.recordings.replay import ROUND_WINDOW_FRACTION

HOST_SECONDS: Final = 20.0  # for the login and the first sample
MIN_SAMPLE_FRACTION: Final = 0.9  # of the samples requested; chosen: a few lost lines do no harm
BUSY_PERCENT: Final = 0.0  # a GPU with any utilization is not idle


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned from one source, and a sentence for each thing that could not be learned."""

    source: str
    boards: Mapping[GpuId, GpuSample]  # as last seen
    values: tuple[Baseline, ...]
    not_learned: tuple[str, ...]


def calibrate_source(name: str, source: GpuLog | Recording, progress: StepProgress | None) -> Calibration:
    """Learns by the rules of the live watcher. `progress`: the user's statement that the steps of a job without a step
    counter advanced from its first kernel on.

    What could not be learned is in `not_learned`; a source without any GPU has one sentence there and nothing else.
    """
    knowledge = BaselineTable()
    interval = min((spec.interval_seconds for spec in source.specs), default=1.0)
    player = SourcePlayer(source.specs, iter(source.events))
    jobs = [(JobAssembler(spec), JobDetector(spec), JobLearner(spec, knowledge)) for spec in source.specs]
    boards: dict[GpuId, GpuSample] = {}
    latest: dict[str, NodeSample] = {}
    counted = worked = False
    for round_number, seconds in enumerate(player.play(interval * ROUND_WINDOW_FRACTION)):
        for node_sample in player.drain():
            latest[node_sample.node] = node_sample
            for assembler, _, _ in jobs:
                assembler.add(node_sample)
        for assembler, detector, learner in jobs:
            wall = max((node_sample.wall_seconds for node_sample in latest.values()), default=0.0)
            sample = assembler.assemble(player.links(), seconds, wall)
            worked = worked or any((ranked.gpu.utilization_percent or 0.0) > IDLE_PERCENT for ranked in sample.gpus)
            if worked and progress is StepProgress.ADVANCING and not sample.progress.readable:
                sample = replace(sample, progress=JobProgress(step=round_number))
            counted = counted or sample.progress.readable
            boards.update({(ranked.node, ranked.gpu.key): ranked.gpu for ranked in sample.gpus})
            _learn(sample, detector, learner, seconds, latest)
    if not boards:
        problem = source.detail if isinstance(source, GpuLog) and source.detail else "it contains no readable GPU"
        return Calibration(name, {}, (), (problem,))
    reason = {key: why for _, _, learner in jobs for key, why in learner.rejected.items()}
    return Calibration(
        name, boards, knowledge.values(), tuple(_missing_values(boards, knowledge, reason, counted=counted))
    )


def _learn(
    sample: JobSample, detector: JobDetector, learner: JobLearner, seconds: float, latest: Mapping[str, NodeSample]
) -> None:
    verdict = classify(sample, learned=learner.learned(sample))
    findings = detector.observe(verdict, sample, seconds)
    learner.update(sample, verdict, findings, detector.state, seconds, latest)


def _missing_values(
    boards: Mapping[GpuId, GpuSample],
    knowledge: BaselineTable,
    reason: Mapping[tuple[GpuId, BaselineKind], str],
    *,
    counted: bool,
) -> Iterator[str]:
    """One sentence for each kind of value that is missing for some GPU."""
    no_steps = "the source has no step counter; if you know that steps advanced, add --progress advancing"
    usual = {
        BaselineKind.IDLE: "no full minute was found with 0 % utilization, without a process and without memory in use",
        BaselineKind.CONTEXT: "no time was found with memory in use and 0 % utilization, either before the first "
        "kernel of a job that started on an empty GPU, or in pauses between steps",
        BaselineKind.PLATEAU: "no two minutes were found in which steps advanced and the GPUs were equally busy"
        if counted
        else no_steps,
    }
    for kind in BaselineKind:
        known = {(value.node, value.board) for value in knowledge.values() if value.kind is kind}
        lacking = [board for board in boards if board not in known]
        if lacking:
            why = next((reason[board, kind] for board in lacking if (board, kind) in reason), usual[kind])
            yield f"{KIND_LABELS[kind]} was not learned for {len(lacking)} of {format_count(len(boards), 'GPU')}: {why}"


KIND_LABELS: Final = {
    BaselineKind.IDLE: "idle power",
    BaselineKind.CONTEXT: "power with a CUDA context",
    BaselineKind.PLATEAU: "compute power",
}


def calibrate_hosts(hosts: Sequence[str], settings: SshSettings, samples: int) -> tuple[Calibration, ...]:
    """Takes `samples` samples of each host over SSH, one per second, and learns the idle power of its GPUs."""
    names = tuple(dict.fromkeys(hosts))
    clock = Clock()
    fleet = Fleet({name: ProbeRequest(interval_seconds=1.0) for name in names}, settings, clock)
    received: dict[str, list[NodeSample]] = {name: [] for name in names}
    fleet.start()
    try:
        deadline = clock.monotonic() + HOST_SECONDS + samples
        finished: set[str] = set()
        while clock.monotonic() < deadline and len(finished) < len(names):
            fleet.wait(0.2)
            for sample in fleet.drain():
                received[sample.node].append(sample)
            links = fleet.links()
            finished = {n for n in names if _readings(received[n]) >= samples or links[n].failures > 0}
        links = fleet.links()
    finally:
        fleet.stop()
    return tuple(
        calibrate_idle(name, received[name], samples, "" if links[name].status is HostStatus.OK else links[name].detail)
        for name in names
    )


def _readings(received: Sequence[NodeSample]) -> int:
    return sum(sample.gpus is not None for sample in received)


def calibrate_idle(node: str, received: Sequence[NodeSample], samples: int, problem: str = "") -> Calibration:
    """The idle power of each GPU that nothing used in all of these samples."""
    read = [sample for sample in received if sample.gpus is not None]
    if len(read) < MIN_SAMPLE_FRACTION * samples:
        last = next((sample.detail for sample in reversed(received) if sample.detail), "")
        why = problem or last or "the host did not answer in time"
        return Calibration(node, {}, (), (f"only {len(read)} of {format_count(samples, 'sample')} arrived: {why}",))
    boards: dict[GpuId, GpuSample] = {}
    rows_by_board: dict[GpuId, list[tuple[NodeSample, GpuSample]]] = {}
    for sample in read:
        for gpu in sample.gpus or ():
            boards[node, gpu.key] = gpu
            rows_by_board.setdefault((node, gpu.key), []).append((sample, gpu))
    knowledge = BaselineTable()
    not_learned: list[str] = []
    for board, rows in rows_by_board.items():
        gpu = rows[-1][1]
        watts = [w for _, each in rows if (w := valid_power_watts(each)) is not None]
        reason = _not_idle(rows, watts)
        value = Baseline(
            *board, BaselineKind.IDLE, "", round(statistics.median(watts), 1) if watts else 0.0, len(watts),
            LearningPhase.EMPTY, rows[-1][0].wall_seconds, gpu.name, gpu.power_limit_watts, gpu.energy_joules,
        )  # fmt: skip
        base = profile_for(gpu.name, gpu.power_limit_watts)
        reason = reason or unsteady_reason(watts) or implausible_reason(value, base, knowledge)
        if reason is None:
            knowledge.put(value)
        else:
            not_learned.append(
                f"idle power of GPU {gpu.key if gpu.index is None else gpu.index} was not learned: {reason}"
            )
    return Calibration(node, boards, knowledge.values(), tuple(not_learned))


def _not_idle(rows: Sequence[tuple[NodeSample, GpuSample]], watts: Sequence[float]) -> str | None:
    if len(watts) < max(2, MIN_SAMPLE_FRACTION * len(rows)):
        return "its power cannot be read"
    memory = [gpu.memory_used_bytes for _, gpu in rows]
    busy = [gpu.utilization_percent for _, gpu in rows]
    if any(each is None for each in (*memory, *busy)):
        return "its memory use or utilization cannot be read, so the GPU may not be idle"
    held = {i for sample, _ in rows for process in sample.processes or () for i in process.gpu_indexes}
    if rows[-1][1].index in held:
        return "a process is using the GPU: wait until the process has ended"
    most = max(each for each in memory if each is not None)
    if most >= CONTEXT_BYTES:
        return f"{most / 1e9:.1f} GB of its memory are in use: wait until that memory is free"
    highest = max(each for each in busy if each is not None)
    return f"its utilization was {highest:.0f} %: wait until it is idle" if highest > BUSY_PERCENT else None


@dataclass(frozen=True, slots=True)
class LearnedProfile:
    """The content of one [[profiles]] table: one GPU model, with the origin of each number."""

    model: str
    boards: int
    profile: PowerProfile
    grounds: Mapping[str, str]  # key of the table -> where its number comes from


def build_profiles(calibrations: Sequence[Calibration]) -> tuple[tuple[LearnedProfile, ...], tuple[str, ...]]:
    """One profile per GPU model about which something was learned, and a sentence for each that cannot have one."""
    knowledge = BaselineTable([value for each in calibrations for value in each.values])
    boards = {board: gpu for each in calibrations for board, gpu in each.boards.items()}
    learned = {(value.node, value.board) for value in knowledge.values()}
    models: dict[str | None, list[GpuId]] = {}
    for board, gpu in boards.items():
        if board in learned:
            models.setdefault(gpu.name, []).append(board)
    made: list[LearnedProfile] = []
    not_learned: list[str] = []
    for model, members in models.items():
        limits = [limit for board in members if (limit := boards[board].power_limit_watts)]
        if model is None or not limits:
            lack = "name" if model is None else "power limit"
            not_learned.append(
                f"no profile was made for {model or 'these GPUs'}, because the source does not contain the {lack}. "
                "Query nvidia-smi for name and power.limit too, or write the [[profiles]] table yourself"
            )
            continue
        made.append(_profile(model, statistics.mode(limits), members, knowledge))
    return tuple(made), tuple(not_learned)


def _profile(model: str, limit: float, members: Sequence[GpuId], knowledge: BaselineTable) -> LearnedProfile:
    base = profile_for(model, limit)
    shipped = f"not learned; from the shipped profile {base.name}"
    of_kind = {
        kind: [v for v in knowledge.values() if v.kind is kind and (v.node, v.board) in set(members)]
        for kind in BaselineKind
    }
    plateaus = [v for v in of_kind[BaselineKind.PLATEAU] if is_same_limit(v, limit)]
    idles, contexts = of_kind[BaselineKind.IDLE], of_kind[BaselineKind.CONTEXT]
    idle = statistics.median(v.watts for v in idles) if idles else base.idle_watts
    floors = [expected_floor_watts(knowledge, (v.node, v.board), base) for v in contexts]
    floor = statistics.median(floors) if floors else max(base.floor_watts, idle)
    compute = PLATEAU_LOWER_END * statistics.median(v.watts for v in plateaus) if plateaus else base.compute_watts
    profile = replace(
        base,
        name=re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-"),
        match=f"^{re.escape(model)}$".replace(r"\ ", " ").replace(r"\-", "-"),
        limit_watts=limit,
        idle_watts=idle,
        floor_watts=floor,
        compute_watts=compute,
    )
    grounds = {
        "idle_watts": describe_learned(idles) if idles else shipped,
        "floor_watts": f"{describe_learned(contexts)}, plus the extra power of waiting in a collective"
        if contexts
        else shipped,
        "compute_watts": f"{PLATEAU_LOWER_END:.0%} of {describe_learned(plateaus)}" if plateaus else shipped,
    }
    return LearnedProfile(model, len(members), profile, grounds)


def describe_learned(values: Sequence[Baseline]) -> str:
    """Values of one kind in words: "139 W (135 to 144 W on 8 GPUs, 30 samples each ...)"."""
    watts = [value.watts for value in values]
    spread = f"{min(watts):.0f} to {max(watts):.0f} W on {len(values)} GPUs, " if len(values) > 1 else ""
    samples = round(statistics.median(value.samples for value in values))
    each = " each" if len(values) > 1 else ""
    return f"{statistics.median(watts):.0f} W ({spread}{format_count(samples, 'sample')}{each} {values[0].phase.value})"


def format_profiles_toml(profiles: Sequence[LearnedProfile]) -> str:
    """The profiles as [[profiles]] tables for wattwatch.toml."""
    tables = []
    for learned in profiles:
        profile = learned.profile
        lines = [
            "[[profiles]]",
            f"name = {toml_string(profile.name)}",
            f"match = {toml_string(profile.match)}",
            f"limit_watts = {profile.limit_watts:.0f}",
        ]
        numbers = {
            "idle_watts": profile.idle_watts,
            "floor_watts": profile.floor_watts,
            "compute_watts": profile.compute_watts,
        }
        lines += [f"{setting} = {watts:.1f}  # {learned.grounds[setting]}" for setting, watts in numbers.items()]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def toml_string(text: str) -> str:
    """A TOML basic string. TOML reads what JSON escapes; DEL, which JSON does not escape, must be escaped in TOML."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")
