"""One job sample -> one verdict: what the GPUs are doing, how sure that is, and why. No clock, memory or disk.

`classify` asks in this order: can the GPUs be read; is one broken; does any hold a context; do steps stall (then it is
a hang, whatever the power); does one rank keep the rest waiting; is a GPU throttled. Only then do power and
utilization decide: idle_power.py where all GPUs are at the power floor, active_power.py above it. Power alone decides
nothing, since bare idle, a checkpoint and a deadlock draw the same (arXiv 2608.05944, section 3). Where a sample
allows two readings, the more likely one is returned with low confidence and the other as its alternative.

A confidence is a fraction of cases: what it rests on is said where it is set, and `wattwatch backtest` counts over
labeled public cases how often verdicts of that confidence are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from wattwatch.collectors.samples import GpuSample, HostStatus, ReadingStatus
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.baselines.baseline import JobBaseline
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, highest_communication_watts
from wattwatch.watcher.detection.classifier.active_power import (
    MOSTLY_BUSY_PERCENT,
    STRAGGLER_POWER_RATIO,
    classify_active_power,
)
from wattwatch.watcher.detection.classifier.ambiguity import with_deciding_check
from wattwatch.watcher.detection.classifier.conclusion import ADVICE, GIVE_BOTH, PROVIDE_PROGRESS, make_verdict
from wattwatch.watcher.detection.classifier.features import (
    ChosenProfile,
    PowerFeatures,
    StepProgress,
    choose_profile,
    extract_features,
    holds_contexts,
    job_gpus,
    match_pattern,
    median_power_fraction,
)
from wattwatch.watcher.detection.classifier.idle_power import (
    NO_PROCESS_CONFIDENCE,
    ONE_WITHOUT_CONTEXT_CONFIDENCE,
    advancing_verdict,
    classify_idle_power,
    no_context_verdict,
    no_process_listed,
    stalled_verdict,
)
from wattwatch.watcher.detection.classifier.input_bottleneck import find_input_bottleneck
from wattwatch.watcher.detection.model import (
    BUSY_PERCENT,
    Alternative,
    JobSample,
    NodeState,
    PowerState,
    RankGpu,
    Suspect,
    UtilizationPattern,
    Verdict,
    valid_power_watts,
)

UNKNOWN_CONFIDENCE: Final = 0.3  # of a verdict that claims nothing: no state is surer than that
# Where readings are missing a verdict is at most this sure: as sure as it would be with the least favorable readings in
# their place.
MAX_PARTIAL_CONFIDENCE: Final = 0.55  # a GPU is not read, or does not show whether it is the job's
MAX_INFERRED_CONFIDENCE: Final = 0.55  # power stands for utilization, or its range is in doubt
MAX_WITHOUT_MEMORY_CONFIDENCE: Final = 0.5
SURE_CONFIDENCE: Final = 0.85
SLOWDOWN_REASONS: Final = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}
)
MAX_LISTED: Final = 6  # nodes or GPUs named in one sentence
# docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt: an uncontained error needs a reset before new work; a contained one
# ends the process that read it, and its row is remapped at the next reset.
NOT_GIVEN: Final = " (not given in the input)"
MEMORY_ERROR_ADVICE: Final = (
    "Look for Xid 48, 63, 64, 94 and 95 in the kernel log: they show when the memory errors occurred and "
    "which process was affected. Results that were computed from then on may be wrong. Reset the GPU as "
    "soon as the job can be stopped."
)


def classify(
    sample: JobSample,
    profile: PowerProfile | None = None,
    progress: StepProgress | None = None,
    learned: JobBaseline | None = None,
) -> Verdict:
    """The verdict on one sample. `profile` replaces the GPU model's own, `learned` both; `progress` is what the user
    knows of the job's steps, and no verdict or alternative contradicts it."""
    verdict = _classify(sample, profile, progress, learned)
    if progress is StepProgress.ADVANCING:
        verdict = _without_contradicting_alternative(verdict, len(sample.gpus))
    if verdict.state is PowerState.STARVATION:
        bottleneck = find_input_bottleneck(sample)
        verdict = replace(
            verdict,
            why=f"{verdict.why} {bottleneck.sentence}.",
            advice=bottleneck.next_step,
        )
    verdict = _with_memory_errors(verdict, sample)
    model_known = profile is not None or learned is not None
    verdict = with_deciding_check(verdict, sample, steps_reported=progress is not None, model_known=model_known)
    return with_extent(verdict, sample, 1.0 if progress is StepProgress.STALLED else MAX_PARTIAL_CONFIDENCE)


def with_extent(verdict: Verdict, sample: JobSample, most_confidence: float) -> Verdict:
    """The verdict on a part of the job, named as such. A GPU that is not seen does the same as the others or it does
    not, and nothing says which: it counts half, and it may be the idle one or the only one that works. A fault of one
    GPU is a fault, however many are seen. `most_confidence`: of a verdict on a part."""
    if sample.seen_share >= 1.0 and all(
        (g.gpu.power_watts or 0.0) > 0.0 and g.gpu.utilization_percent is not None for g in sample.gpus
    ):
        return verdict  # as nearly always: a job may have thousands of GPUs
    seen, judged = len(sample.gpus), len(_readable_gpus(sample))
    if not judged or verdict.state is PowerState.GPU_FAULT:
        return verdict
    share = sample.seen_share * judged / seen
    if share >= 1.0:
        return verdict
    extent = sample.extent
    if judged < seen:
        verb = "has" if judged == 1 else "have"
        total = format_count(max(seen, round(seen / sample.seen_share)), "GPU")
        extent = f"{judged} of {total} {verb} valid power and utilization"
    factor = (1.0 + share) / 2.0
    other = verdict.alternative
    return replace(
        verdict,
        confidence=round(min(most_confidence, verdict.confidence * factor), 2),
        why=f"Only {extent}. {verdict.why}",
        alternative=None if other is None else replace(other, confidence=round(other.confidence * factor, 2)),
    )


def _readable_gpus(sample: JobSample) -> tuple[RankGpu, ...]:
    return tuple(
        g for g in sample.gpus if valid_power_watts(g.gpu) is not None and g.gpu.utilization_percent is not None
    )


def _with_memory_errors(verdict: Verdict, sample: JobSample) -> Verdict:
    """The verdict with the GPUs whose memory had errors that could not be corrected: whatever the job does now, its
    results may be wrong, and the next such error ends it. They are no suspects: the errors may be weeks old."""
    damaged = [g for g in sample.gpus if g.gpu.uncorrected_ecc_errors]
    if not damaged:
        return verdict
    counts = [
        f"{g.node} GPU {g.gpu.key if g.gpu.index is None else g.gpu.index} counts "
        f"{format_count(int(g.gpu.uncorrected_ecc_errors or 0), 'uncorrected memory (ECC) error')}"
        for g in damaged
    ]
    more = f", and {len(counts) - MAX_LISTED} more GPUs count such errors" if len(counts) > MAX_LISTED else ""
    why = f"{', '.join(counts[:MAX_LISTED])} since the driver was loaded{more}; the counter does not show when"
    advice = verdict.advice.removeprefix(ADVICE[PowerState.COMPUTE]).strip()
    return replace(
        verdict,
        why=f"{verdict.why.removesuffix('.')}. {why}.",
        advice=f"{advice} {MEMORY_ERROR_ADVICE}".strip(),
    )


def _classify(
    sample: JobSample, profile: PowerProfile | None, progress: StepProgress | None, learned: JobBaseline | None
) -> Verdict:
    if not sample.gpus and not any(node.missing_gpus for node in sample.nodes):
        return _no_readable_gpu(sample)
    faulty = _faulty_gpu(sample)
    if faulty is not None:
        return faulty
    gpus = job_gpus(sample.gpus)
    readable = sum(valid_power_watts(g.gpu) is not None and g.gpu.utilization_percent is not None for g in gpus)
    if readable < max(1, (len(gpus) + 1) // 2):
        return _readings_missing(sample, gpus, choose_profile(gpus, profile, learned), progress)
    features = extract_features(sample, gpus, profile, progress, learned)
    return _limited_by_what_was_read(_judge(features, sample), features)


def _judge(features: PowerFeatures, sample: JobSample) -> Verdict:
    stalled = stalled_verdict(features)
    if stalled is not None:
        return stalled
    slowed = _straggler(features) or _throttled(features) or advancing_verdict(features)
    if slowed is not None:
        return slowed
    advancing = features.progress_is_reported and features.progress is StepProgress.ADVANCING
    if features.has_contexts is False and not advancing and not any(node.processes for node in sample.nodes):
        return no_context_verdict(features, sample.nodes)
    return classify_idle_power(features) or classify_active_power(features)


def _limited_by_what_was_read(verdict: Verdict, features: PowerFeatures) -> Verdict:
    """What is missing may contradict what was read, so no verdict is surer than it would be with it. What steps or a
    GPU itself say is not limited: it does not rest on the other readings."""
    state = verdict.state
    if state in (PowerState.UNKNOWN, PowerState.THROTTLE) or features.progress is StepProgress.STALLED:
        return verdict
    most = 1.0
    pattern = features.match.pattern
    unnamed = not features.profile_known and pattern is not UtilizationPattern.ALL_LOW
    if unnamed and state is not PowerState.COMPUTE:
        most = min(most, MAX_INFERRED_CONFIDENCE)
    if not features.memory_read and pattern is UtilizationPattern.ALL_BUSY and state is PowerState.HANG:
        most = min(most, MAX_WITHOUT_MEMORY_CONFIDENCE, 0.8 * verdict.confidence)  # GPUs without a context do not hang
    even = pattern in (UtilizationPattern.ALL_BUSY, UtilizationPattern.ALL_LOW) and state is not PowerState.STRAGGLER
    if not features.memory_read and not even:
        most = min(most, MAX_PARTIAL_CONFIDENCE)  # the GPUs that differ may be none of the job's
    limit_unread = features.profile_known and not features.limit_read
    if limit_unread and pattern is not UtilizationPattern.ALL_LOW and not _is_surely_computing(verdict):
        most = min(most, MAX_INFERRED_CONFIDENCE)
    if verdict.confidence <= most:
        return verdict
    other = verdict.alternative
    if other is not None:
        other = replace(other, confidence=round(other.confidence * most / verdict.confidence, 2))
    return replace(verdict, confidence=round(most, 2), alternative=other)


def _is_surely_computing(verdict: Verdict) -> bool:
    """Far into the range of compute, so that another power limit would not change it."""
    return verdict.state is PowerState.COMPUTE and verdict.confidence >= SURE_CONFIDENCE


# States that steps which advance rule out, and what an alternative then is instead.
RULED_OUT_BY_STEPS: Final = frozenset({PowerState.HANG, PowerState.IDLE, PowerState.UNKNOWN})
ALTERNATIVE_WHILE_ADVANCING: Final = {
    PowerState.COMPUTE: PowerState.COMMUNICATION,
    PowerState.COMMUNICATION: PowerState.COMPUTE,
    PowerState.STARVATION: PowerState.COMPUTE,
    PowerState.CHECKPOINT: PowerState.STARVATION,
    PowerState.STRAGGLER: PowerState.COMMUNICATION,
}


def _without_contradicting_alternative(verdict: Verdict, gpu_count: int) -> Verdict:
    other = verdict.alternative
    if other is None or other.state not in RULED_OUT_BY_STEPS:
        return verdict
    state = ALTERNATIVE_WHILE_ADVANCING.get(verdict.state)
    if verdict.state is PowerState.COMPUTE and gpu_count == 1:
        state = PowerState.STARVATION
    return replace(verdict, alternative=None if state is None else Alternative(state, other.confidence))


def _no_readable_gpu(sample: JobSample) -> Verdict:
    reasons = [f"{node.node}: {_why_no_reading(node)}" for node in sample.nodes]
    return Verdict(
        state=PowerState.UNKNOWN,
        confidence=UNKNOWN_CONFIDENCE,
        pattern=UtilizationPattern.UNKNOWN,
        why=f"No GPU could be read on {format_count(len(reasons), 'node')}: " + _listed(reasons, "more node"),
        advice="The job itself may be fine. Run nvidia-smi on the node to see whether its GPUs respond.",
    )


def _listed(texts: Sequence[str], more: str) -> str:
    """The first of them, and how many more there are."""
    rest = len(texts) - MAX_LISTED
    return "; ".join([*texts[:MAX_LISTED], *([f"and {format_count(rest, more)}"] if rest > 0 else [])])


def _why_no_reading(node: NodeState) -> str:
    if node.status is not HostStatus.OK:
        return node.unreadable_reason_in_full
    return "no data yet" if node.age_seconds is None else f"no data for {node.age_seconds:.0f} s"


def _faulty_gpu(sample: JobSample) -> Verdict | None:
    """A GPU that is lost, needs a reset, or returns errors comes before any other reading of the sample."""
    faults: list[str] = []
    suspects: list[Suspect] = []
    for node in sample.nodes:
        for missing in node.missing_gpus:
            faults.append(f"{node.node}: {missing.text}")
            suspects.append(sample.missing_suspect(node.node, missing))
    for ranked in sample.gpus:
        fault = ranked.gpu.fault
        if fault is not None:
            faults.append(f"{ranked.node} GPU {ranked.gpu.key}: {_fault_text(ranked.gpu, fault)}")
            suspects.append(Suspect(ranked.node, ranked.gpu.index, ranked.rank))
    if not faults:
        return None
    return Verdict(
        state=PowerState.GPU_FAULT,
        confidence=0.9,
        pattern=match_pattern(sample.gpus).pattern,
        why=_listed(faults, "more faulty GPU"),
        advice=ADVICE[PowerState.GPU_FAULT],
        suspects=tuple(suspects),
        power_fraction=median_power_fraction(sample.gpus),
    )


def _fault_text(gpu: GpuSample, fault: ReadingStatus) -> str:
    """The fault; of a GPU that returns errors, for which readings. A lost GPU has none, asked for or not."""
    text = fault.value.replace("_", " ")
    if fault is not ReadingStatus.UNREADABLE:
        return text
    fields = sorted(name for name, reason in gpu.reasons.items() if reason is fault)
    more = f", and {len(fields) - MAX_LISTED} more" if len(fields) > MAX_LISTED else ""
    return f"{text} ({', '.join(fields[:MAX_LISTED])}{more})"


def _readings_missing(
    sample: JobSample, gpus: tuple[RankGpu, ...], chosen: ChosenProfile, progress: StepProgress | None
) -> Verdict:
    """The GPUs answer, but most without power or without utilization. Each says something without the other: full power
    is work, and 0 % on every GPU is none."""
    pattern, fraction = match_pattern(gpus).pattern, median_power_fraction(gpus)
    total = format_count(len(gpus), "GPU")
    missing = _what_is_missing(gpus)
    if ignored := len(sample.gpus) - len(gpus):
        missing = f"{missing} Ignored: {format_count(ignored, 'GPU')} without allocated memory."

    def verdict(
        state: PowerState,
        confidence: float,
        why: str,
        alternative: tuple[PowerState, float] | None,
        advice: str | None = None,
    ) -> Verdict:
        other = None if alternative is None else Alternative(*alternative)
        return Verdict(
            state,
            confidence,
            pattern,
            f"{why} {missing}".strip(),
            advice or ADVICE[state],
            (),
            fraction,
            alternative=other,
        )

    if progress is StepProgress.STALLED:
        return verdict(PowerState.HANG, 0.7, "Steps have stopped.", (PowerState.WAITING, 0.2))
    watts = [w for g in gpus if (w := valid_power_watts(g.gpu)) is not None]
    percents = [g.gpu.utilization_percent for g in gpus if g.gpu.utilization_percent is not None]
    work_watts = chosen.profile.compute_watts if chosen.known else highest_communication_watts()
    all_work = len(watts) == len(gpus) and min(watts) >= work_watts
    if progress is StepProgress.ADVANCING and (watts or percents):
        if pattern in (UtilizationPattern.ALL_LOW, UtilizationPattern.SCATTER):
            why = "Steps advance, and the utilization that was read is low or uneven: the GPUs are waiting for data."
            return verdict(PowerState.STARVATION, 0.5, why, (PowerState.COMPUTE, 0.3))
        why = "Steps advance, and the GPUs draw compute-level power." if all_work else "Steps advance."
        confidence = 0.6 if all_work else 0.4
        return verdict(PowerState.COMPUTE, confidence, why, (PowerState.COMMUNICATION, 0.3))
    mig = _has_mig(gpus)
    if all_work and not percents and not mig:
        why = f"Power is at the compute level on {total}, and an idle GPU does not draw that much."
        return verdict(PowerState.COMPUTE, MAX_INFERRED_CONFIDENCE, why, (PowerState.COMMUNICATION, 0.3))
    contexts = holds_contexts(gpus)
    if len(percents) == len(gpus) and not watts and not mig:
        if pattern is UtilizationPattern.ALL_LOW and contexts is False:
            no_process = no_process_listed(sample.nodes)
            why = f"Utilization is near 0 % on {total}, and no job has memory allocated there."
            other = None if no_process else (PowerState.HANG, 0.3)
            confidence = NO_PROCESS_CONFIDENCE if no_process else ONE_WITHOUT_CONTEXT_CONFIDENCE
            return verdict(PowerState.IDLE, confidence, why, other)
        if pattern is UtilizationPattern.ALL_LOW:
            why = f"Utilization is near 0 % on {total}: the job may be starting up, pausing or hung."
            return verdict(PowerState.IDLE, 0.4, why, (PowerState.HANG, 0.35))
        uneven = pattern is UtilizationPattern.SCATTER and len(gpus) > 1 and min(percents) < MOSTLY_BUSY_PERCENT
        if uneven and contexts is not False:
            why = "Utilization varies widely between the ranks, as in jobs that wait for input."
            return verdict(PowerState.STARVATION, 0.4, why, (PowerState.COMPUTE, 0.3))
    advice = f"{GIVE_BOTH}."
    if progress is None:
        advice = (
            f"{f'{advice} ' if NOT_GIVEN in missing else ''}{PROVIDE_PROGRESS}: when power or utilization cannot be "
            "read, only the step counter shows whether the job is working."
        )
    return verdict(PowerState.UNKNOWN, UNKNOWN_CONFIDENCE, "", (PowerState.HANG, 0.3), advice)


def _has_mig(gpus: Sequence[RankGpu]) -> bool:
    return any(g.gpu.mig or g.gpu.reasons.get("utilization_percent") is ReadingStatus.MIG for g in gpus)


def _what_is_missing(gpus: Sequence[RankGpu]) -> str:
    """One sentence about the readings that are not there, counted over the job's GPUs."""
    if _has_mig(gpus):
        return "MIG is enabled: nvidia-smi reports power only for the whole GPU and does not report utilization."
    total = format_count(len(gpus), "GPU")
    no_power = [g for g in gpus if valid_power_watts(g.gpu) is None]
    no_utilization = [g for g in gpus if g.gpu.utilization_percent is None]
    power, utilization = _why_missing("power_watts", no_power), _why_missing("utilization_percent", no_utilization)
    if no_power == no_utilization and power == utilization:
        return f"Power and utilization cannot be read on {len(no_power)} of {total}{power}."
    parts = (("Power", no_power, power), ("Utilization", no_utilization, utilization))
    return "; ".join(f"{name} cannot be read on {len(of)} of {total}{why}" for name, of, why in parts if of) + "."


def _why_missing(name: str, gpus: Sequence[RankGpu]) -> str:
    """Why a reading is missing of these GPUs, in brackets; "" where the tool itself gives no value, or where the
    reasons differ. Live, each reading that is missing has a reason."""
    values = [getattr(g.gpu, name) for g in gpus]
    reasons = {g.gpu.reasons.get(name) for g in gpus}
    if reasons == {ReadingStatus.UNPARSED}:
        return " (cut off, or in an unknown form)"
    return NOT_GIVEN if reasons == {None} and values.count(None) == len(values) else ""


def _straggler(features: PowerFeatures) -> Verdict | None:
    """All GPUs are busy, but a few draw twice the power of the others: those compute, the others spin and wait."""
    gpus = features.gpus
    if features.match.pattern is not UtilizationPattern.ALL_BUSY or len(gpus) < 2 or not features.floor_known:
        return None
    floor = features.profile.floor_watts
    working = [g for g in gpus if (valid_power_watts(g.gpu) or 0.0) > floor]
    waiting = [g for g in gpus if (valid_power_watts(g.gpu) or 0.0) <= floor]
    if not working or not waiting or len(working) > len(waiting):
        return None
    ratio = min(valid_power_watts(g.gpu) or 0.0 for g in working) / max(
        valid_power_watts(g.gpu) or 1.0 for g in waiting
    )
    if ratio < STRAGGLER_POWER_RATIO:
        return None
    why = (
        f"{len(working)} of {format_count(len(gpus), 'GPU')} {'is' if len(working) == 1 else 'are'} computing at "
        f"{ratio:.1f} times the "
        "power of the others, and the others are only waiting"
    )
    confidence = 0.6 * features.floor_confidence
    return make_verdict(features, PowerState.STRAGGLER, confidence, why, (PowerState.HANG, 0.3), working)


def _throttled(features: PowerFeatures) -> Verdict | None:
    """A busy GPU reports that heat or power supply slows it down."""
    slowed = [
        g
        for g in features.gpus
        if g.gpu.throttle_reasons
        and g.gpu.throttle_reasons & SLOWDOWN_REASONS
        and (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT
    ]
    if not slowed or features.at_floor:
        return None
    reasons = sorted(set().union(*(g.gpu.throttle_reasons or frozenset() for g in slowed)) & SLOWDOWN_REASONS)
    why = f"{len(slowed)} GPU{'s' if len(slowed) > 1 else ''} report{'' if len(slowed) > 1 else 's'} throttling: "
    return make_verdict(features, PowerState.THROTTLE, 0.9, why + ", ".join(reasons), None, slowed)
