"""Findings from what the trackers followed, in words: summary, evidence with numbers, suspects, next step.

`PERSISTENT_RULES` are the alert kinds whose condition can be read from a single observation and must persist before it
is reported. A new one needs a row in alerts.toml and a rule here. Hangs (hang.py), the end of a job (job_exit.py) and
nodes (trackers/reachability.py) need more memory and make their own findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.classifier.input_bottleneck import find_input_bottleneck
from wattwatch.watcher.detection.model import (
    MIN_DATA_WAIT_MS,
    AlertName,
    Finding,
    PowerState,
    Severity,
    Suspect,
    UtilizationPattern,
)
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.gpu_health import FaultyGpu
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.slowdown import SlowdownTracker
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker
from wattwatch.watcher.detection.trackers.step_timeout import is_evaluating

# Steps lost against the best rate that make starvation more than a pattern of utilization. Chosen.
STARVING_LOST_SHARE: Final = 0.1
# Smaller losses are not worth mentioning.
MENTIONED_LOST_SHARE: Final = 0.05
# A counter unchanged for two of its usual intervals proves no starvation; what lasts longer contains steps.
MIN_STARVATION_STEPS: Final = 2.5
# A verdict that is no surer than this is as likely wrong as right.
UNDECIDED_CONFIDENCE: Final = 0.5
UNDECIDED_SECONDS: Final = 300.0  # as a hang without a counter (hang.py); most evaluations are shorter. Chosen
# A reported condition that was true this recently still describes the job.
CURRENT_SECONDS: Final = 5.0
CURRENT_INTERVALS: Final = 3.0
MIN_OBSERVATIONS: Final = 5  # at long sampling intervals a few samples reach the required seconds alone


@dataclass(slots=True)
class Hysteresis:
    """A condition that comes and goes: time for it adds up, time against it is subtracted twice.

    It is reported once it has held for long enough, and until it has been gone for about half as long as it had held:
    starvation varies over time too, and one busy moment is no cure. Time that was not observed changes nothing.
    """

    since: float | None = None
    seconds: float = 0.0
    observations: int = 0
    is_reported: bool = False
    is_proved: bool = False  # by more than power and utilization, at some time since it began
    suspects: tuple[Suspect, ...] = ()  # of the last observation in which it was true
    true_seconds: float | None = None  # when it was last true
    finding: Finding | None = None  # what was said then

    def update(self, condition: bool | None, observation: Observation, required_seconds: float) -> None:
        """`condition` None: this observation says nothing about it."""
        if observation.gap and not self.is_reported:
            self.clear()
        if condition is None:
            return
        unobserved = observation.gap or not any(node.fresh for node in observation.sample.nodes)
        if self.is_reported and unobserved:
            return
        if not condition:
            self.seconds -= 2 * observation.observed_seconds
            if self.seconds <= 0:
                self.clear()
            return
        self.since = observation.now if self.since is None else self.since
        self.true_seconds = observation.now
        self.suspects = observation.verdict.suspects
        # Bounded: a condition that held for hours need not be gone for hours.
        bound = max(2 * required_seconds, MIN_OBSERVATIONS * observation.observed_seconds)
        self.seconds = min(self.seconds + observation.observed_seconds, bound)
        self.observations += 1
        enough = self.observations >= MIN_OBSERVATIONS or not required_seconds
        self.is_reported = self.is_reported or (self.seconds >= required_seconds and enough)

    def clear(self) -> None:
        self.since, self.seconds, self.observations, self.is_reported, self.is_proved = None, 0.0, 0, False, False
        self.suspects, self.true_seconds, self.finding = (), None, None

    def is_current(self, observation: Observation) -> bool:
        """It is reported, and was true a moment ago: a condition that comes and goes is absent now and then."""
        if not self.is_reported or self.true_seconds is None:
            return False
        recent = max(CURRENT_SECONDS, CURRENT_INTERVALS * observation.spec.interval_seconds)
        return observation.now - self.true_seconds <= recent

    def report(self, inputs: RuleInputs, make: Callable[[RuleInputs, Hysteresis], Finding]) -> Finding:
        """The finding: made from this observation if the condition is true in it, otherwise as it was when it last was
        true, and for how long that has been over."""
        now = inputs.observation.now
        if self.true_seconds == now or self.finding is None:
            self.finding = make(inputs, self)
            return self.finding
        age = now - (self.true_seconds or now)
        return replace(
            self.finding,
            summary=f"{self.finding.summary.removesuffix('.')} (last seen {age:.0f} s ago).",
            gpus_idle=0,
            idle_joules=0.0,
            seen_seconds=self.true_seconds,
        )


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """What a rule decides on: the observation, and the trackers after it."""

    observation: Observation
    step_rate: StepRateTracker
    saves: CheckpointSaveTracker


@dataclass(frozen=True, slots=True)
class PersistentRule:
    """One alert kind: when its condition holds in an observation, and the finding once it has persisted."""

    alert: AlertName
    holds: Callable[[RuleInputs], bool | None]  # None: the observation shows it neither way
    finding: Callable[[RuleInputs, Hysteresis], Finding]
    at_least_seconds: Callable[[RuleInputs], float] | None = None  # in addition to the time in alerts.toml

    def required_seconds(self, inputs: RuleInputs) -> float:
        """How long the condition must hold; longer where no step counter can contradict it."""
        kind = ALERT_KINDS[self.alert]
        readable = inputs.observation.sample.progress.readable
        required = kind.persistence_seconds if readable else kind.persistence_seconds_without_steps
        return required if self.at_least_seconds is None else max(required, self.at_least_seconds(inputs))


# Starvation.


def _is_starving(inputs: RuleInputs) -> bool:
    """The classifier says so, or steps are lost while utilization varies as it does both in starvation and at work."""
    observation, step_rate = inputs.observation, inputs.step_rate
    if inputs.saves.blocking is not None or step_rate.is_late or is_evaluating(observation):
        return False
    shown_by_progress = (
        is_starving_by_progress(observation, step_rate) and observation.verdict.pattern is UtilizationPattern.SCATTER
    )
    return observation.verdict.state is PowerState.STARVATION or shown_by_progress


def is_starving_by_progress(observation: Observation, step_rate: StepRateTracker) -> bool:
    """Steps are lost against the job's best rate, or its ranks report that they wait for data."""
    return step_rate.lost_share >= STARVING_LOST_SHARE or is_waiting_for_data(observation)


def data_waits_ms(observation: Observation) -> list[float]:
    """What each rank reports as its wait for data, in milliseconds per step."""
    return [s.data_wait_ms for s in observation.sample.progress.sources if s.data_wait_ms is not None]


def is_waiting_for_data(observation: Observation) -> bool:
    """A rank reports that it waits for data."""
    return max(data_waits_ms(observation), default=0.0) >= MIN_DATA_WAIT_MS


def _starvation_seconds(inputs: RuleInputs) -> float:
    """An evaluation looks the same, but no step is counted in it. Ranks that report data waits need no such proof.
    Without a counter, what may be work as well must last longer than an evaluation."""
    observation, step_rate = inputs.observation, inputs.step_rate
    if is_waiting_for_data(observation):
        return 0.0
    if not (observation.sample.progress.readable or step_rate.has_counter):
        return UNDECIDED_SECONDS if observation.verdict.confidence <= UNDECIDED_CONFIDENCE else 0.0
    return MIN_STARVATION_STEPS * (step_rate.usual_interval_seconds or 0.0)


def _starvation_finding(inputs: RuleInputs, hysteresis: Hysteresis) -> Finding:
    observation, step_rate = inputs.observation, inputs.step_rate
    job, progress = observation.spec.name, observation.sample.progress
    evidence = [observation.verdict.why]
    waits = data_waits_ms(observation)
    if waits:
        evidence.append(f"ranks wait up to {max(waits):,.0f} ms per step for data")
    # The GPUs of a small model may never have looked otherwise: progress must show that something is lost.
    hysteresis.is_proved = (
        hysteresis.is_proved
        or is_starving_by_progress(observation, step_rate)
        or not (progress.readable or step_rate.has_counter)
    )
    summary = f"{job} is waiting for data: its GPUs do not get input fast enough."
    if not hysteresis.is_proved:
        summary = f"{job} may be waiting for data: its GPUs are unevenly busy."
        evidence.append("steps are not slower than before, and a healthy small model can show the same pattern")
    advice = _add_bottleneck(AlertName.JOB_STARVING, observation, evidence)
    _add_lost_share(step_rate, evidence)
    return _persistent_finding(
        AlertName.JOB_STARVING,
        observation,
        hysteresis,
        summary,
        evidence,
        advice=advice,
        confirmed=hysteresis.is_proved,
        gpus_idle=round(observation.sample.gpu_count * step_rate.lost_share),
    )


# Below the configured throughput.


def _is_below_throughput_floor(inputs: RuleInputs) -> bool | None:
    """Only a rate that holds now counts: a job that saves or hangs makes no steps, which other alerts are about."""
    floor = inputs.observation.spec.floor_tokens_per_second
    throughput = inputs.step_rate.throughput(inputs.observation)
    if floor is None or throughput.reported is None:
        return False
    return throughput.reported < floor if throughput.is_current else None


def _low_throughput_finding(inputs: RuleInputs, hysteresis: Hysteresis) -> Finding:
    observation, step_rate = inputs.observation, inputs.step_rate
    throughput = step_rate.throughput(observation)
    rate, age = throughput.reported or 0.0, throughput.reported_age_seconds or 0.0
    floor = observation.spec.floor_tokens_per_second
    source = "calculated from the step rate at the last step," if throughput.calculated else "reported"
    evidence = [
        f"{rate:,.0f} tokens/s, {source} {age:.0f} s ago; the configured minimum is {floor:,.0f} tokens/s",
        observation.verdict.why,
    ]
    advice = _add_bottleneck(AlertName.JOB_SLOW, observation, evidence)
    _add_lost_share(step_rate, evidence)
    return _persistent_finding(
        AlertName.JOB_SLOW,
        observation,
        hysteresis,
        f"{observation.spec.name} is slow: {rate:,.0f} tokens/s.",
        evidence,
        advice=advice,
        gpus_idle=round(observation.sample.gpu_count * step_rate.lost_share),
    )


# Single GPUs.


MAX_NAMED: Final = 4  # GPUs named in one sentence


def _power_state_rule(
    alert: AlertName, state: PowerState, describe: Callable[[tuple[Suspect, ...]], str]
) -> PersistentRule:
    """A rule whose condition is the classifier's state alone; the suspects are those of its last verdict."""

    def holds(inputs: RuleInputs) -> bool:
        return inputs.observation.verdict.state is state

    def finding(inputs: RuleInputs, hysteresis: Hysteresis) -> Finding:
        observation = inputs.observation
        summary = f"{observation.spec.name}: {describe(hysteresis.suspects)}."
        evidence = [observation.verdict.why]
        return _persistent_finding(alert, observation, hysteresis, summary, evidence, suspects=hysteresis.suspects)

    return PersistentRule(alert, holds, finding)


def _name_gpus(suspects: tuple[Suspect, ...]) -> str:
    more = len(suspects) - MAX_NAMED
    names = ", ".join(str(suspect) for suspect in suspects[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return names or "a GPU"


def _describe_straggler(suspects: tuple[Suspect, ...]) -> str:
    return f"the other GPUs are waiting for {_name_gpus(suspects)}"


def _describe_throttling(suspects: tuple[Suspect, ...]) -> str:
    verb = "are" if len(suspects) > 1 else "is"
    return f"{_name_gpus(suspects)} {verb} throttled by heat or power supply"


# The loss.


def _is_loss_not_finite(inputs: RuleInputs) -> bool:
    observation = inputs.observation
    loss = observation.sample.progress.loss
    return loss is not None and not math.isfinite(loss)


def _loss_finding(inputs: RuleInputs, hysteresis: Hysteresis) -> Finding:
    observation = inputs.observation
    progress = observation.sample.progress
    return _persistent_finding(
        AlertName.LOSS_NOT_FINITE,
        observation,
        hysteresis,
        f"{observation.spec.name}: the loss is {progress.loss}.",
        [f"loss {progress.loss} at step {progress.step}"],
    )


PERSISTENT_RULES: Final = (
    PersistentRule(AlertName.JOB_STARVING, _is_starving, _starvation_finding, _starvation_seconds),
    PersistentRule(AlertName.JOB_SLOW, _is_below_throughput_floor, _low_throughput_finding),
    _power_state_rule(AlertName.STRAGGLER, PowerState.STRAGGLER, _describe_straggler),
    _power_state_rule(AlertName.GPU_THROTTLED, PowerState.THROTTLE, _describe_throttling),
    PersistentRule(AlertName.LOSS_NOT_FINITE, _is_loss_not_finite, _loss_finding),
)


def _persistent_finding(
    alert: AlertName,
    observation: Observation,
    hysteresis: Hysteresis,
    summary: str,
    evidence: Sequence[str],
    *,
    advice: str | None = None,
    confirmed: bool = True,
    suspects: tuple[Suspect, ...] = (),
    gpus_idle: int = 0,
) -> Finding:
    kind = ALERT_KINDS[alert]
    return Finding(
        job=observation.spec.name,
        alert=alert,
        severity=kind.severity,
        scope="",
        summary=summary,
        evidence=tuple(evidence),
        advice=kind.advice if advice is None else advice,
        since_seconds=observation.now if hysteresis.since is None else hysteresis.since,
        confirmed=confirmed,
        suspects=suspects,
        gpus_idle=gpus_idle,
    )


def _add_bottleneck(alert: AlertName, observation: Observation, evidence: list[str]) -> str:
    """Adds the input bottleneck to `evidence` unless it is there already, and returns the advice. A slow job need not
    be starving, so there only an identified bottleneck is mentioned."""
    bottleneck = find_input_bottleneck(observation.sample)
    advice = ALERT_KINDS[alert].advice
    starving = alert is AlertName.JOB_STARVING
    if not starving and not bottleneck.is_named:
        return advice
    if not any(bottleneck.description in text for text in evidence):
        sentence = bottleneck.sentence
        evidence.append(f"{sentence[0].lower()}{sentence[1:]}")
    return bottleneck.next_step if starving else f"{advice} {bottleneck.next_step}"


def _add_lost_share(step_rate: StepRateTracker, evidence: list[str]) -> None:
    if step_rate.lost_share >= MENTIONED_LOST_SHARE:
        evidence.append(f"the step rate is {step_rate.lost_share:.0%} below the best step rate of this job")


# Findings whose trackers have already decided that they are due.


def slowdown_finding(observation: Observation, slowdown: SlowdownTracker, step_rate: StepRateTracker) -> Finding:
    """Steps take longer than usual in this run: because of GPUs that stand out, or for no visible reason. While no step
    is counted nobody knows how slow the job is, and the time costs nothing here."""
    stepping = step_rate.stalled_seconds is not None and not step_rate.is_late
    kind = ALERT_KINDS[AlertName.STRAGGLER if slowdown.suspects else AlertName.JOB_SLOW]
    who = ", ".join(str(suspect) for suspect in slowdown.suspects)
    evidence = [
        f"a step takes {slowdown.seconds_per_step:.2f} s; in this run it usually takes "
        f"{slowdown.usual_seconds_per_step:.2f} s",
        observation.verdict.why,
    ]
    if not stepping and slowdown.measured is not None:
        stalled = step_rate.stalled_seconds
        since = "the step counter cannot be read now" if stalled is None else f"no step for {stalled:.0f} s"
        evidence.append(f"the step time was measured {observation.now - slowdown.measured:.0f} s ago; {since}")
    if who:
        evidence.append(f"the clock or power of {who} differed from that of the other GPUs in most samples")
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=kind.severity,
        scope="",
        summary=f"{observation.spec.name} is {slowdown.lost_share:.0%} slower than before"
        + (f": {who} may be slowing down the others." if who else "."),
        evidence=tuple(evidence),
        advice=kind.advice if who else _add_bottleneck(kind.name, observation, evidence),
        since_seconds=observation.now if slowdown.since is None else slowdown.since,
        suspects=slowdown.suspects,
        gpus_idle=round(observation.sample.gpu_count * slowdown.lost_share) if stepping else 0,
    )


def gpu_fault_finding(observation: Observation, gpu: FaultyGpu) -> Finding:
    """One faulty GPU, with all evidence."""
    kind = ALERT_KINDS[AlertName.GPU_FAULT]
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=kind.severity if gpu.unusable else Severity.WARNING,
        scope=f"{gpu.suspect.node}/{gpu.key}",
        summary=_describe_gpu_fault(gpu),
        evidence=gpu.evidence,
        advice=kind.advice,
        since_seconds=gpu.since_seconds,
        suspects=(gpu.suspect,),
        gpus_idle=int(gpu.unusable and not gpu.answers),
        causes=gpu.causes,
    )


def _describe_gpu_fault(gpu: FaultyGpu) -> str:
    if not gpu.unusable and gpu.xid is None:
        repair = " and needs a reset" if "memory repair pending" in gpu.causes else ""
        if "uncorrected ECC errors" in gpu.causes:
            return f"{gpu.suspect} has uncorrected memory errors{repair}."
        return f"{gpu.suspect} has damaged memory{repair}."
    if not gpu.unusable:
        return f"{gpu.suspect} needs a reset soon (Xid {gpu.xid})."
    if gpu.xid is None:
        return f"{gpu.suspect} has failed."
    if gpu.answers:
        return f"{gpu.suspect} answers, but the kernel log reports that it has failed (Xid {gpu.xid})."
    return f"{gpu.suspect} has failed (Xid {gpu.xid})."


def checkpoint_stalled_finding(observation: Observation, saves: CheckpointSaveTracker) -> Finding | None:
    """A save that takes longer than its learned limit and whose files do not grow; None otherwise. While steps advance
    no GPU waits for it, and it is a warning."""
    save = saves.save
    if save is None or saves.is_within_limit or not (save.by_heartbeat or save.entry is not None):
        return None
    limit = saves.save_limit_seconds
    evidence = [f"the save has been running for {save.seconds:.0f} s; the limit is {limit:.0f} s"]
    if save.entry is not None:
        size, quiet = save.entry.bytes / 1e9, save.quiet_seconds or 0
        evidence.append(f"{save.entry.name}: {size:.1f} GB, nothing written for {quiet:.0f} s")
    if save.background:
        evidence.append("steps still advance during the save")
    evidence += [
        f"{node.node}: `{call.call}` has not returned for {call.age_seconds:.0f} s"
        for node in observation.sample.nodes
        for call in node.hung_calls
    ]
    kind = ALERT_KINDS[AlertName.CHECKPOINT_STALLED]
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=Severity.WARNING if save.background else kind.severity,
        scope="",
        summary=f"{observation.spec.name}: the checkpoint save does not finish.",
        evidence=tuple(evidence),
        advice=kind.advice,
        since_seconds=observation.now - save.seconds,
        confirmed=not save.background,
        gpus_idle=0 if save.background else observation.sample.gpu_count,
    )
