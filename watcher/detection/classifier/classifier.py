"""One picture of a job -> one verdict. Pure: no clock, no memory, no disk.

Order of the questions: can it be read at all; is a board broken; is anybody at home; does one board hold up the rest;
then power (at the floor: at_rest.py, above it: at_work.py) names the kind and shape says who. Watts alone decide
nothing: bare idle, a checkpoint and a deadlock draw the same (arXiv 2608.05944 s3; B300 idle 135-184 W in public
tables). Where the picture allows two readings the nearer one is said with a low confidence and the other is named.

A confidence is a share of times: what it stands on is said where it is set, and `wattwatch backtest` counts, over
labelled public cases, how often verdicts of that confidence are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from wattwatch.collectors.samples import HostStatus, ReadingStatus
from wattwatch.watcher.detection.baselines.baseline import JobBaseline
from wattwatch.watcher.detection.baselines.profiles import PowerProfile
from wattwatch.watcher.detection.classifier.active_power import classify_active_power
from wattwatch.watcher.detection.classifier.ambiguity import with_deciding_check
from wattwatch.watcher.detection.classifier.conclusion import ADVICE, is_floor_known, make_verdict
from wattwatch.watcher.detection.classifier.features import (
    PowerFeatures,
    StepProgress,
    extract_features,
    match_pattern,
    median_power_fraction,
)
from wattwatch.watcher.detection.classifier.idle_power import (
    NO_CONTEXT_CONFIDENCE,
    NO_PROCESS_CONFIDENCE,
    classify_idle_power,
    no_context_verdict,
    no_process_listed,
    stalled_verdict,
)
from wattwatch.watcher.detection.classifier.input_bottleneck import find_input_bottleneck
from wattwatch.watcher.detection.model import (
    BUSY_PERCENT,
    CONTEXT_BYTES,
    IDLE_PERCENT,
    Alternative,
    JobSample,
    PowerState,
    Suspect,
    UtilizationPattern,
    Verdict,
    valid_power_watts,
)

STRAGGLER_POWER_RATIO: Final = 2.0
SLOWDOWN_REASONS: Final = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}
)


def classify(
    sample: JobSample,
    profile: PowerProfile | None = None,
    progress: StepProgress | None = None,
    learned: JobBaseline | None = None,
) -> Verdict:
    """What this picture says. `profile` overrides the board's own, `learned` both; `progress` is what is known of the
    steps."""
    verdict = _classify(sample, profile, progress, learned)
    if verdict.state is PowerState.STARVATION:
        upstream = find_input_bottleneck(sample)
        verdict = replace(verdict, why=f"{verdict.why} Upstream: {upstream.words}.", advice=upstream.next_step)
    return with_deciding_check(verdict, sample, told=progress is not None)


def _classify(
    sample: JobSample, profile: PowerProfile | None, progress: StepProgress | None, learned: JobBaseline | None
) -> Verdict:
    if not sample.gpus and not any(node.missing_gpus for node in sample.nodes):
        return _no_readable_gpu(sample)
    broken = _faulty_gpu(sample)
    if broken is not None:
        return broken
    sighted = tuple(
        g for g in sample.gpus if valid_power_watts(g.gpu) is not None and g.gpu.utilization_percent is not None
    )
    if len(sighted) < max(1, (len(sample.gpus) + 1) // 2):
        return _readings_missing(sample, progress)
    scene = extract_features(sample, sighted, profile, progress, learned)
    if scene.held is False and not any(node.processes for node in sample.nodes):
        return no_context_verdict(scene, sample.nodes)
    return (
        stalled_verdict(scene)
        or _straggler(scene)
        or _throttled(scene)
        or classify_idle_power(scene)
        or classify_active_power(scene)
    )


def _no_readable_gpu(sample: JobSample) -> Verdict:
    told = [f"{node.node}: {node.unreadable_reason_in_full}" for node in sample.nodes]
    lost = any(node.status in (HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES) for node in sample.nodes)
    return Verdict(
        state=PowerState.UNKNOWN,
        confidence=0.9 if lost else 0.5,
        pattern=UtilizationPattern.UNKNOWN,
        why="No board could be read. " + "; ".join(told[:4]),
        advice="The job may be well: look at the node itself." + (" A driver was replaced or lost." if lost else ""),
    )


def _faulty_gpu(sample: JobSample) -> Verdict | None:
    """A board that is lost, wants a reset, or does not say what it should: that comes before any other reading."""
    told: list[str] = []
    suspects: list[Suspect] = []
    for node in sample.nodes:
        for missing in node.missing_gpus:
            told.append(f"{node.node}: {missing.text}")
            suspects.append(Suspect(node.node, missing.index))
    for ranked in sample.gpus:
        fault = ranked.gpu.fault
        if fault is not None:
            fields = sorted(name for name, reason in ranked.gpu.reasons.items() if reason is fault)
            told.append(
                f"{ranked.node} GPU {ranked.gpu.key}: {fault.value.replace('_', ' ')} ({', '.join(fields[:4])})"
            )
            suspects.append(Suspect(ranked.node, ranked.gpu.index, ranked.rank))
    if not told:
        return None
    return Verdict(
        state=PowerState.GPU_FAULT,
        confidence=0.9,
        pattern=match_pattern(sample.gpus).pattern,
        why="; ".join(told[:6]),
        advice=ADVICE[PowerState.GPU_FAULT],
        suspects=tuple(suspects),
        power_fraction=median_power_fraction(sample.gpus),
    )


def _readings_missing(sample: JobSample, progress: StepProgress | None) -> Verdict:
    """Boards answer, but power or utilisation is missing: no band, no shape."""
    if progress is StepProgress.STALLED:
        why = "Steps stand; power or utilisation cannot be read on most boards."
        return Verdict(
            PowerState.HANG, 0.7, match_pattern(sample.gpus).pattern, why, ADVICE[PowerState.HANG],
            power_fraction=median_power_fraction(sample.gpus), alternative=Alternative(PowerState.WAITING, 0.2),
        )  # fmt: skip
    gpus = [g.gpu for g in sample.gpus]
    mig = any(g.mig or g.reasons.get("utilization_percent") is ReadingStatus.MIG for g in gpus)
    free = all(g.memory_used_bytes is not None and g.memory_used_bytes < CONTEXT_BYTES for g in gpus)
    quiet = all(g.utilization_percent is not None and g.utilization_percent <= IDLE_PERCENT for g in gpus)
    no_watts = sum(valid_power_watts(g) is None for g in gpus)
    no_busy = sum(g.utilization_percent is None for g in gpus)
    picture = match_pattern(sample.gpus)
    if free and quiet and not mig:
        empty = no_process_listed(sample.nodes)
        return Verdict(
            PowerState.IDLE, NO_PROCESS_CONFIDENCE if empty else NO_CONTEXT_CONFIDENCE, picture.pattern,
            "0 % and no memory held on any board; power cannot be read.", ADVICE[PowerState.IDLE],
            power_fraction=median_power_fraction(sample.gpus), alternative=None if empty else Alternative(PowerState.HANG, 0.3),
        )  # fmt: skip
    if mig:
        why = "MIG is on: utilisation has no value for the whole board, and its power is shared by all slices."
    else:
        why = f"Power is missing on {no_watts} of {len(gpus)} boards, utilisation on {no_busy}."
    return Verdict(
        PowerState.UNKNOWN, 0.3, picture.pattern, why,
        "Give the job's progress (a log or a run directory): without power and utilisation only steps can tell.",
        power_fraction=median_power_fraction(sample.gpus), alternative=Alternative(PowerState.HANG, 0.3),
    )  # fmt: skip


def _straggler(scene: PowerFeatures) -> Verdict | None:
    """All busy, but a few draw twice what the others do: those compute, the others spin and wait for them."""
    if scene.picture.pattern is not UtilizationPattern.ALL_BUSY or len(scene.gpus) < 2 or not is_floor_known(scene):
        return None
    floor = scene.profile.floor_watts
    working = [g for g in scene.gpus if (valid_power_watts(g.gpu) or 0.0) > floor]
    waiting = [g for g in scene.gpus if (valid_power_watts(g.gpu) or 0.0) <= floor]
    if not working or not waiting or len(working) > len(waiting):
        return None
    ratio = min(valid_power_watts(g.gpu) or 0.0 for g in working) / max(
        valid_power_watts(g.gpu) or 1.0 for g in waiting
    )
    if ratio < STRAGGLER_POWER_RATIO:
        return None
    why = (
        f"{len(working)} of {len(scene.gpus)} busy boards work, at {ratio:.1f} times the power of the others, who wait"
    )
    return make_verdict(scene, PowerState.STRAGGLER, 0.6 * scene.certain, why, (PowerState.HANG, 0.3), working)


def _throttled(scene: PowerFeatures) -> Verdict | None:
    """The board itself says that heat or power supply holds it back, while it is busy."""
    slowed = [
        g
        for g in scene.gpus
        if g.gpu.throttle_reasons
        and g.gpu.throttle_reasons & SLOWDOWN_REASONS
        and (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT
    ]
    if not slowed or scene.at_floor:
        return None
    reasons = sorted(set().union(*(g.gpu.throttle_reasons or frozenset() for g in slowed)) & SLOWDOWN_REASONS)
    return make_verdict(
        scene, PowerState.THROTTLE, 0.8, f"{len(slowed)} boards report {', '.join(reasons)}", None, slowed
    )
