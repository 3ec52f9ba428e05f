"""What boards draw, learned on demand: from hosts that are idle now, or from a recording or a log by the live rules."""

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
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.baseline import Baseline, BaselineKind, BaselineTable, GpuId, LearningPhase
from wattwatch.watcher.detection.baselines.learner import JobLearner, unsteady_reason
from wattwatch.watcher.detection.baselines.plausibility import (
    PLATEAU_LOWER_END,
    expected_floor_watts,
    implausible_reason,
    is_same_limit,
)
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import CONTEXT_BYTES, IDLE_PERCENT, JobProgress, JobSample, valid_power_watts
from wattwatch.watcher.recordings.format import Recording
from wattwatch.watcher.recordings.inputs import GpuLog, SourcePlayer
from wattwatch.watcher.recordings.replay import ROUND_WINDOW_FRACTION

HOST_SECONDS: Final = 20.0  # to log in and to give the first sample
MIN_SAMPLE_FRACTION: Final = 0.9  # of the samples asked for
BUSY_PERCENT: Final = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned of one source, and a sentence for each thing that was not."""

    source: str
    boards: Mapping[GpuId, GpuSample]  # as last seen
    values: tuple[Baseline, ...]
    refusals: tuple[str, ...]


def calibrate_source(name: str, source: GpuLog | Recording, progress: StepProgress | None) -> Calibration:
    """By the rules of the live watcher. `progress`: the asker's word that a job without a counter advanced from its
    first kernel on.

    What cannot be learned is a sentence; a source without any board gives that alone.
    """
    knowledge = BaselineTable()
    interval = min((spec.interval_seconds for spec in source.specs), default=1.0)
    played = SourcePlayer(source.specs, iter(source.moments))
    jobs = [(JobAssembler(spec), JobDetector(spec), JobLearner(spec, knowledge)) for spec in source.specs]
    boards: dict[GpuId, GpuSample] = {}
    said: dict[str, NodeSample] = {}
    counted = worked = False
    for round_number, seconds in enumerate(played.play(interval * ROUND_WINDOW_FRACTION)):
        for heard in played.drain():
            said[heard.node] = heard
            for assembler, _, _ in jobs:
                assembler.add(heard)
        for assembler, detector, learner in jobs:
            wall = max((heard.wall_seconds for heard in said.values()), default=0.0)
            sample = assembler.assemble(played.links(), seconds, wall)
            worked = worked or any((ranked.gpu.utilization_percent or 0.0) > IDLE_PERCENT for ranked in sample.gpus)
            if worked and progress is StepProgress.ADVANCING and not sample.progress.readable:
                sample = replace(sample, progress=JobProgress(step=round_number))
            counted = counted or sample.progress.readable
            boards.update({(ranked.node, ranked.gpu.key): ranked.gpu for ranked in sample.gpus})
            _learn(sample, detector, learner, seconds, said)
    if not boards:
        trouble = source.detail if isinstance(source, GpuLog) and source.detail else "no board in it could be read"
        return Calibration(name, {}, (), (trouble,))
    refused = {key: why for _, _, learner in jobs for key, why in learner.refused.items()}
    return Calibration(name, boards, knowledge.values(), tuple(_refusals(boards, knowledge, refused, counted=counted)))


def _learn(
    sample: JobSample, detector: JobDetector, learner: JobLearner, seconds: float, said: Mapping[str, NodeSample]
) -> None:
    verdict = classify(sample, learned=learner.learned(sample))
    findings = detector.observe(verdict, sample, seconds)
    learner.update(sample, verdict, findings, detector.state, seconds, said)


def _refusals(
    boards: Mapping[GpuId, GpuSample],
    knowledge: BaselineTable,
    refused: Mapping[tuple[GpuId, BaselineKind], str],
    *,
    counted: bool,
) -> Iterator[str]:
    """One sentence a kind that some board lacks."""
    no_steps = "no step counter in this source; where you know that steps advanced, say --progress advancing"
    usual = {
        BaselineKind.IDLE: "no stretch of a minute at 0 % with no process and no memory held",
        BaselineKind.CONTEXT: "no start-up from an empty board to the first kernel, and no rests between steps, at 0 % with "
        "memory held",
        BaselineKind.PLATEAU: "no two minutes of steps that advance while all boards are evenly busy"
        if counted
        else no_steps,
    }
    for kind in BaselineKind:
        known = {(value.node, value.board) for value in knowledge.values() if value.kind is kind}
        lacking = [board for board in boards if board not in known]
        if lacking:
            why = next((refused[board, kind] for board in lacking if (board, kind) in refused), usual[kind])
            yield f"{KIND_LABELS[kind]}: not learned of {len(lacking)} of {len(boards)} boards: {why}"


KIND_LABELS: Final = {
    BaselineKind.IDLE: "idle floor",
    BaselineKind.CONTEXT: "floor with a context",
    BaselineKind.PLATEAU: "compute plateau",
}


def calibrate_hosts(hosts: Sequence[str], settings: SshSettings, samples: int) -> tuple[Calibration, ...]:
    """Ask hosts over SSH for `samples` samples, one a second: what their boards idle at now."""
    names = tuple(dict.fromkeys(hosts))
    clock = Clock()
    fleet = Fleet({name: ProbeRequest(interval_seconds=1.0) for name in names}, settings, clock)
    heard: dict[str, list[NodeSample]] = {name: [] for name in names}
    fleet.start()
    try:
        deadline = clock.monotonic() + HOST_SECONDS + samples
        settled: set[str] = set()
        while clock.monotonic() < deadline and len(settled) < len(names):
            fleet.wait(0.2)
            for sample in fleet.drain():
                heard[sample.node].append(sample)
            links = fleet.links()
            settled = {n for n in names if _readings(heard[n]) >= samples or links[n].failures > 0}
        links = fleet.links()
    finally:
        fleet.stop()
    return tuple(
        calibrate_idle(name, heard[name], samples, "" if links[name].status is HostStatus.OK else links[name].detail)
        for name in names
    )


def _readings(heard: Sequence[NodeSample]) -> int:
    return sum(sample.gpus is not None for sample in heard)


def calibrate_idle(node: str, heard: Sequence[NodeSample], samples: int, trouble: str = "") -> Calibration:
    """The idle floor of each board that had nobody on it in all of these samples."""
    read = [sample for sample in heard if sample.gpus is not None]
    if len(read) < MIN_SAMPLE_FRACTION * samples:
        last = next((sample.detail for sample in reversed(heard) if sample.detail), "")
        why = trouble or last or "the host does not answer in time"
        return Calibration(node, {}, (), (f"{len(read)} of {samples} samples came: {why}",))
    boards: dict[GpuId, GpuSample] = {}
    of_board: dict[GpuId, list[tuple[NodeSample, GpuSample]]] = {}
    for sample in read:
        for gpu in sample.gpus or ():
            boards[node, gpu.key] = gpu
            of_board.setdefault((node, gpu.key), []).append((sample, gpu))
    knowledge = BaselineTable()
    refusals: list[str] = []
    for board, rows in of_board.items():
        gpu = rows[-1][1]
        watts = [w for _, each in rows if (w := valid_power_watts(each)) is not None]
        refused = _not_idle(rows, watts)
        value = Baseline(
            *board, BaselineKind.IDLE, "", round(statistics.median(watts), 1) if watts else 0.0, len(watts), LearningPhase.EMPTY,
            rows[-1][0].wall_seconds, gpu.name, gpu.power_limit_watts, gpu.energy_joules,
        )  # fmt: skip
        base = profile_for(gpu.name, gpu.power_limit_watts)
        refused = refused or unsteady_reason(watts) or implausible_reason(value, base, knowledge)
        if refused is None:
            knowledge.put(value)
        else:
            refusals.append(f"idle floor of GPU {gpu.key if gpu.index is None else gpu.index}: not learned: {refused}")
    return Calibration(node, boards, knowledge.values(), tuple(refusals))


def _not_idle(rows: Sequence[tuple[NodeSample, GpuSample]], watts: Sequence[float]) -> str | None:
    if len(watts) < max(2, MIN_SAMPLE_FRACTION * len(rows)):
        return "its power cannot be read"
    memory = [gpu.memory_used_bytes for _, gpu in rows]
    busy = [gpu.utilization_percent for _, gpu in rows]
    if any(each is None for each in (*memory, *busy)):
        return "its memory or utilisation cannot be read, so nobody can say that it is idle"
    held = {i for sample, _ in rows for process in sample.processes or () for i in process.gpu_indexes}
    if rows[-1][1].index in held:
        return "a process is on it: wait until it has left"
    most = max(each for each in memory if each is not None)
    if most >= CONTEXT_BYTES:
        return f"{most / 1e9:.1f} GB are in use on it: wait until whoever holds them has left"
    highest = max(each for each in busy if each is not None)
    return f"it reads {highest:.0f} % busy" if highest > BUSY_PERCENT else None


@dataclass(frozen=True, slots=True)
class LearnedProfile:
    """What becomes one [[profiles]] table: the boards of one model, with where each number came from."""

    model: str
    boards: int
    profile: PowerProfile
    grounds: Mapping[str, str]  # setting -> words


def build_profiles(calibrations: Sequence[Calibration]) -> tuple[tuple[LearnedProfile, ...], tuple[str, ...]]:
    """One profile a model of which anything was learned, and a sentence for each that cannot have one."""
    knowledge = BaselineTable([value for each in calibrations for value in each.values])
    boards = {board: gpu for each in calibrations for board, gpu in each.boards.items()}
    learned = {(value.node, value.board) for value in knowledge.values()}
    models: dict[str | None, list[GpuId]] = {}
    for board, gpu in boards.items():
        if board in learned:
            models.setdefault(gpu.name, []).append(board)
    made: list[LearnedProfile] = []
    refusals: list[str] = []
    for model, members in models.items():
        limits = [limit for board in members if (limit := boards[board].power_limit_watts)]
        if model is None or not limits:
            lack = "name" if model is None else "power limit"
            refusals.append(
                f"no profile of {model or 'these boards'}: their {lack} is not in the source: ask nvidia-smi "
                "for name and power.limit too, or write a [[profiles]] table by hand"
            )
            continue
        made.append(_profile(model, statistics.mode(limits), members, knowledge))
    return tuple(made), tuple(refusals)


def _profile(model: str, limit: float, members: Sequence[GpuId], knowledge: BaselineTable) -> LearnedProfile:
    base = profile_for(model, limit)
    shipped = f"not learned; as shipped for {base.name}"
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
        "floor_watts": f"{describe_learned(contexts)}; and what spinning adds" if contexts else shipped,
        "compute_watts": f"{PLATEAU_LOWER_END:.0%} of {describe_learned(plateaus)}" if plateaus else shipped,
    }
    return LearnedProfile(model, len(members), profile, grounds)


def describe_learned(values: Sequence[Baseline]) -> str:
    """Watts and grounds of values of one kind: "139 W (135 to 144 W on 8 boards, 30 samples a board ...)"."""
    watts = [value.watts for value in values]
    spread = f"{min(watts):.0f} to {max(watts):.0f} W on {len(values)} boards, " if len(values) > 1 else ""
    samples = round(statistics.median(value.samples for value in values))
    each = " a board" if len(values) > 1 else ""
    return f"{statistics.median(watts):.0f} W ({spread}{samples} samples{each} {values[0].phase.value})"


def format_profiles_toml(profiles: Sequence[LearnedProfile]) -> str:
    """[[profiles]] tables for wattwatch.toml."""
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
    """A TOML basic string: what JSON escapes, TOML reads; DEL alone must be escaped besides."""
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")
