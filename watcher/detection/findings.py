"""From what was followed to findings in words: one function a kind. Numbers first, then who, then what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.classifier.conclusion import ADVICE
from wattwatch.watcher.detection.classifier.input_bottleneck import find_input_bottleneck
from wattwatch.watcher.detection.model import AlertName, Finding, PowerState, Severity, Suspect
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.gpu_health import FaultyGpu
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.slowdown import SlowdownTracker
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

# How long a condition must persist before it is worth a message: with a readable counter, and without.
PERSISTENCE_SECONDS: Final = {
    AlertName.JOB_STARVING: (30.0, 120.0),
    AlertName.JOB_SLOW: (60.0, 60.0),
    AlertName.STRAGGLER: (60.0, 120.0),
    AlertName.GPU_THROTTLED: (60.0, 60.0),
    AlertName.LOSS_NOT_FINITE: (0.0, 0.0),
}
# What makes starvation more than a picture where there is a counter: steps lost against the best pace, or data waits.
STARVING_LOST_SHARE: Final = 0.1
STARVING_WAIT_MS: Final = 100.0
MIN_OBSERVATIONS: Final = 5  # at long intervals a few samples last as long as that
ALERT_ADVICE: Final = {
    AlertName.JOB_STARVING: ADVICE[PowerState.STARVATION],
    AlertName.STRAGGLER: ADVICE[PowerState.STRAGGLER],
    AlertName.GPU_THROTTLED: ADVICE[PowerState.THROTTLE],
    AlertName.JOB_SLOW: "Compare with the job's usual pace: links, input pipeline, throttled boards, a neighbour.",
    AlertName.LOSS_NOT_FINITE: "The run is likely lost from here: stop it, go back to a checkpoint before this step.",
}


@dataclass(slots=True)
class Hysteresis:
    """A condition that comes and goes: seconds for it add up, each look against it takes twice as many away. It is
    told once it held for long enough, and until it has gone for about half as long as it had held."""

    since: float | None = None
    seconds: float = 0.0
    looks: int = 0
    told: bool = False
    proved: bool = False  # another witness than the picture was seen meanwhile
    suspects: tuple[Suspect, ...] = ()  # of the last look on which it was true

    def update(self, true: bool, observation: Observation, enough_seconds: float) -> None:
        if observation.gap and not self.told:
            self.clear()
        if self.told and (observation.gap or not any(node.fresh for node in observation.sample.nodes)):
            return  # out of sight is no sign that it is over
        if not true:
            self.seconds -= 2 * observation.observed_seconds
            if self.seconds <= 0:
                self.clear()
            return
        self.since, self.suspects = observation.now if self.since is None else self.since, observation.verdict.suspects
        # What held for hours need not be gone for hours to be over.
        self.seconds = min(
            self.seconds + observation.observed_seconds,
            max(2 * enough_seconds, MIN_OBSERVATIONS * observation.observed_seconds),
        )
        self.looks += 1
        self.told = self.told or (
            self.seconds >= enough_seconds and (self.looks >= MIN_OBSERVATIONS or not enough_seconds)
        )

    def clear(self) -> None:
        self.since, self.seconds, self.looks, self.told, self.proved = None, 0.0, 0, False, False
        self.suspects = ()


def persistence_seconds(alert: AlertName, readable: bool) -> float:
    """How long `alert` must have held; longer where no step counter can contradict it."""
    with_counter, without = PERSISTENCE_SECONDS[alert]
    return with_counter if readable else without


def persistent_finding(
    alert: AlertName, observation: Observation, held: Hysteresis, step_rate: StepRateTracker
) -> Finding:
    """A condition that held long enough."""
    progress, lost_share = observation.sample.progress, step_rate.lost_share
    boards = observation.sample.expected_gpus or len(observation.sample.gpus)
    rate = progress.tokens_per_second
    evidence = [observation.verdict.why]
    confirmed = True
    summary = {
        AlertName.JOB_STARVING: f"{observation.spec.name} starves: its boards wait for data.",
        AlertName.STRAGGLER: f"{observation.spec.name}: a few boards hold up the rest.",
        AlertName.GPU_THROTTLED: f"{observation.spec.name}: boards are slowed down by heat or power.",
        AlertName.JOB_SLOW: f"{observation.spec.name} is slow: {rate or 0:,.0f} tokens a second.",
        AlertName.LOSS_NOT_FINITE: f"{observation.spec.name}: the loss is {progress.loss}.",
    }[alert]
    if alert is AlertName.JOB_SLOW:
        evidence = [f"{rate or 0:,.0f} tokens/s, floor {observation.spec.floor_tokens_per_second:,.0f}", *evidence]
    if alert is AlertName.LOSS_NOT_FINITE:
        evidence = [f"loss {progress.loss} at step {progress.step}"]
    if alert is AlertName.JOB_STARVING:
        waits = data_waits_ms(observation)
        if waits:
            evidence.append(f"ranks wait up to {max(waits):,.0f} ms a step for data")
        # A small model may never have looked otherwise: its counter must say that something is lost.
        held.proved = (
            held.proved or is_starving_by_progress(observation, step_rate) or not (progress.readable or step_rate.known)
        )
        confirmed = held.proved
        if not confirmed:
            summary = f"{observation.spec.name} may starve: its boards are fed unevenly."
            evidence.append("its steps come no later than before: small models look the same")
    advice = ALERT_ADVICE[alert]
    if alert in (AlertName.JOB_STARVING, AlertName.JOB_SLOW):
        advice = _with_bottleneck(alert, observation, evidence)
    if lost_share >= 0.05 and alert in (AlertName.JOB_STARVING, AlertName.JOB_SLOW):
        evidence.append(f"{lost_share:.0%} slower than the job's own best pace")
    return Finding(
        job=observation.spec.name,
        alert=alert,
        severity=ALERT_KINDS[alert].severity,
        scope="",
        summary=summary,
        evidence=tuple(evidence),
        advice=advice,
        since_seconds=observation.now if held.since is None else held.since,
        confirmed=confirmed,
        suspects=held.suspects if alert in (AlertName.STRAGGLER, AlertName.GPU_THROTTLED) else (),
        gpus_idle=round(boards * lost_share) if alert in (AlertName.JOB_STARVING, AlertName.JOB_SLOW) else 0,
    )


def _with_bottleneck(alert: AlertName, observation: Observation, evidence: list[str]) -> str:
    """Says in the evidence what lies upstream, where that is new there, and returns the next step. A slow job need not
    starve: of it only what is named is told."""
    upstream = find_input_bottleneck(observation.sample)
    starves = alert is AlertName.JOB_STARVING
    if not starves and not upstream.named:
        return ALERT_ADVICE[alert]
    if not any(upstream.words in words for words in evidence):
        evidence.append(f"upstream: {upstream.words}")
    return upstream.next_step if starves else f"{ALERT_ADVICE[alert]} {upstream.next_step}"


def data_waits_ms(observation: Observation) -> list[float]:
    """What each rank says that it waits for data in a step."""
    return [s.data_wait_ms for s in observation.sample.progress.sources if s.data_wait_ms is not None]


def is_starving_by_progress(observation: Observation, step_rate: StepRateTracker) -> bool:
    """Steps are lost against the job's best pace, or its ranks say that they wait for data."""
    return step_rate.lost_share >= STARVING_LOST_SHARE or is_waiting_for_data(observation)


def is_waiting_for_data(observation: Observation) -> bool:
    """A rank says so."""
    return max(data_waits_ms(observation), default=0.0) >= STARVING_WAIT_MS


def slowdown_finding(observation: Observation, drift: SlowdownTracker) -> Finding:
    """Steps take longer than this run's own usual ones: because of boards that stand out, or nobody visible."""
    alert = AlertName.STRAGGLER if drift.suspects else AlertName.JOB_SLOW
    boards = observation.sample.expected_gpus or len(observation.sample.gpus)
    who = ", ".join(str(suspect) for suspect in drift.suspects)
    evidence = [
        f"a step takes {drift.seconds_per_step:.2f} s, usually {drift.usual_seconds_per_step:.2f} s in this run",
        observation.verdict.why,
    ]
    if who:
        evidence.append(f"clock or power of {who} differs from the other boards' on most looks")
    advice = ALERT_ADVICE[alert] if who else _with_bottleneck(alert, observation, evidence)
    return Finding(
        job=observation.spec.name,
        alert=alert,
        severity=ALERT_KINDS[alert].severity,
        scope="",
        summary=f"{observation.spec.name} is {drift.lost_share:.0%} slower than it was"
        + (f": {who} may hold up the rest." if who else "."),
        evidence=tuple(evidence),
        advice=advice,
        since_seconds=observation.now if drift.since is None else drift.since,
        suspects=drift.suspects,
        gpus_idle=round(boards * drift.lost_share),
    )


def gpu_fault_finding(observation: Observation, board: FaultyGpu) -> Finding:
    """One broken board, with every witness of it."""
    return Finding(
        job=observation.spec.name,
        alert=AlertName.GPU_FAULT,
        severity=ALERT_KINDS[AlertName.GPU_FAULT].severity if board.grave else Severity.WARNING,
        scope=f"{board.suspect.node}/{board.key}",
        summary=f"{board.suspect} is broken." if board.grave else f"{board.suspect} wants a reset soon.",
        evidence=board.evidence,
        advice=ADVICE[PowerState.GPU_FAULT],
        since_seconds=board.since_seconds,
        suspects=(board.suspect,),
        gpus_idle=int(board.grave),
    )


def checkpoint_stalled_finding(observation: Observation, saves: CheckpointSaveTracker) -> Finding | None:
    """A save that takes longer than its learned limit and whose files do not grow. While steps go on no board waits for
    it: that is a warning."""
    save = saves.save
    if save is None or saves.is_within_limit or not (save.by_heartbeat or save.entry is not None):
        return None
    evidence = [f"a save is under way for {save.seconds:.0f} s; the limit is {saves.limit_seconds:.0f} s"]
    if save.entry is not None:
        evidence.append(
            f"{save.entry.name}: {save.entry.bytes / 1e9:.1f} GB, no byte for {save.quiet_seconds or 0:.0f} s"
        )
    if save.background:
        evidence.append("steps go on meanwhile")
    evidence += [
        f"{node.node}: {call.call} has not returned for {call.age_seconds:.0f} s"
        for node in observation.sample.nodes
        for call in node.hung_calls
    ]
    return Finding(
        job=observation.spec.name,
        alert=AlertName.CHECKPOINT_STALLED,
        severity=Severity.WARNING if save.background else ALERT_KINDS[AlertName.CHECKPOINT_STALLED].severity,
        scope="",
        summary=f"{observation.spec.name}: the checkpoint does not get finished.",
        evidence=tuple(evidence),
        advice="Look at the file system of the checkpoint directory: space, servers, processes in state D.",
        since_seconds=observation.now - save.seconds,
        confirmed=not save.background,
        gpus_idle=0 if save.background else observation.sample.expected_gpus or len(observation.sample.gpus),
    )
