"""Verdicts over time -> what is wrong with a job, and its state.

`JobDetector.observe` updates the trackers with one observation and asks the rules in order: nodes, GPUs, the end of
the job, hang and stalled checkpoint, slow and starving, overdue checkpoint. Progress decides whether something is
wrong; power and utilization decide what kind and which rank. Time counts only in rounds of new samples and observed
seconds, so a gap proves nothing. Each finding is repeated for as long as it is true. No clock, network or disk: time
is an argument.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.findings import (
    PERSISTENT_RULES,
    Hysteresis,
    RuleInputs,
    checkpoint_stalled_finding,
    gpu_fault_finding,
    slowdown_finding,
)
from wattwatch.watcher.detection.hang import HangDetector
from wattwatch.watcher.detection.job_exit import JobExitTracker
from wattwatch.watcher.detection.model import (
    MAX_GAP_INTERVALS,
    AlertName,
    Finding,
    JobProgress,
    JobSample,
    JobSpec,
    JobState,
    JobThroughput,
    PowerState,
    Verdict,
    valid_power_watts,
)
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker, OverdueCheckpointTracker
from wattwatch.watcher.detection.trackers.gpu_health import GpuHealthTracker
from wattwatch.watcher.detection.trackers.observation import JobHistory, Observation
from wattwatch.watcher.detection.trackers.processes import ProcessTracker
from wattwatch.watcher.detection.trackers.reachability import ReachabilityTracker
from wattwatch.watcher.detection.trackers.slowdown import SlowdownTracker
from wattwatch.watcher.detection.trackers.step_rate import LATE_FACTOR, StepRateTracker
from wattwatch.watcher.detection.trackers.step_timeout import is_evaluating
from wattwatch.watcher.detection.wasted_time import WastedTime

# A state that only the classifier's verdict supports must be seen in two rounds at least a second apart; one sample may
# catch a moment in between. With every state that did not last, twice as many rounds are needed. All chosen.
STATE_ROUNDS: Final = 2
ROUND_SECONDS: Final = 1.0  # rounds that come faster count together
STATE_SHARE: Final = 0.75  # of the rounds must show the new state
MAX_STATE_ROUNDS: Final = 32
SHORT_STATE_SECONDS: Final = 10.0  # a state did not last if it was shorter than this and than five intervals
SHORT_STATE_INTERVALS: Final = 5.0
LONG_GAP_SECONDS: Final = 10.0
REMEMBERED_SECONDS: Final = 300.0
REMEMBERED_INTERVALS: Final = 60.0
# Readings this close to those that led to the present state are the same picture, whichever side of a threshold of the
# classifier they are on: the power of steady work varies by some per cent from sample to sample.
SAME_POWER_SHARE: Final = 0.1
SAME_UTILIZATION_PERCENT: Final = 15.0
SAME_PICTURE_SECONDS: Final = 60.0  # another verdict on the same picture must last for this long, and this many rounds
SAME_PICTURE_ROUNDS: Final = 20
PICTURE_WEIGHT: Final = 0.1  # of a new sample in the mean picture of a state
IMMEDIATE_STATES: Final = frozenset({JobState.HUNG, JobState.CRASHED, JobState.COMPLETED})
PAUSE_PHASES: Final = frozenset({"save", "eval", "load"})
NOT_YET_WORKING: Final = frozenset({PowerState.IDLE, PowerState.CHECKPOINT, PowerState.WAITING, PowerState.UNKNOWN})
STATE_BY_POWER: Final = {
    PowerState.COMPUTE: JobState.COMPUTING,
    PowerState.COMMUNICATION: JobState.COMMUNICATING,
    PowerState.STARVATION: JobState.STARVING,
    PowerState.CHECKPOINT: JobState.CHECKPOINTING,
    PowerState.WAITING: JobState.WAITING,
    PowerState.IDLE: JobState.WAITING,
    PowerState.HANG: JobState.WAITING,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """What steady work shows: median power and mean utilization of the GPUs; None where it cannot be read."""

    watts: float | None
    utilization_percent: float | None

    def is_near(self, other: Picture) -> bool:
        """Whether both are of the same steady work."""
        if None in (self.watts, other.watts):
            same_power = self.watts is other.watts
        else:
            same_power = abs((self.watts or 0.0) - (other.watts or 0.0)) <= SAME_POWER_SHARE * (other.watts or 0.0)
        if None in (self.utilization_percent, other.utilization_percent):
            return same_power and self.utilization_percent is other.utilization_percent
        difference = (self.utilization_percent or 0.0) - (other.utilization_percent or 0.0)
        return same_power and abs(difference) <= SAME_UTILIZATION_PERCENT

    def blended(self, new: Picture) -> Picture:
        """The mean that slowly follows new samples."""
        return Picture(_blend(self.watts, new.watts), _blend(self.utilization_percent, new.utilization_percent))


class StateFilter:
    """Decides when a job's state changes, so that one steady picture has one state and noise does not change it.

    A verdict near a threshold differs from sample to sample, and readings of an uneven load differ by themselves. So
    the present state is kept while the readings stay those that led to it, and states that did not last make the next
    change need more rounds.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, JobState]] = deque(maxlen=1000)
        self._short_states: deque[float] = deque(maxlen=64)  # when a state ended that did not last
        self._present = JobState.UNKNOWN  # the state that the following are of
        self._since: float | None = None  # when the verdict led to the present state; None: something else did
        self._picture: Picture | None = None  # of the present state
        self._held: tuple[float, int] | None = None  # since when, and for how many rounds, it was kept for its picture

    def update(self, present: JobState, state: JobState, observation: Observation, *, by_verdict: bool) -> bool:
        """Take one observation, which shows `state`; whether the job's state changes to it. `by_verdict`: only the
        verdict on this sample leads to the state, not steps, processes, saves or findings."""
        now = observation.now
        if present is not self._present:  # a finding led to it
            self._present = present
            self._since = self._picture = self._held = None
        # After a long gap nothing is known of the present state: the first sample decides.
        long_gap = observation.gap and bool(self._rounds) and now - self._rounds[-1][0] > LONG_GAP_SECONDS
        if long_gap:
            self._rounds.clear()
            self._held = self._since = None
        picture = _picture(observation.sample) if by_verdict else None
        if state is present:
            self._held = None
            self._picture = picture if self._picture is None or picture is None else self._picture.blended(picture)
            self._rounds.append((now, state))
            return False
        if self._is_held(state, picture, observation):
            self._rounds.append((now, present))
            return False
        self._rounds.append((now, state))
        first_reading = present is JobState.UNKNOWN and self._picture is None
        if (
            not first_reading
            and not long_gap
            and not self._persists(state, observation, damped=by_verdict and self._since is not None)
        ):
            return False
        interval = observation.spec.interval_seconds
        if self._since is not None and by_verdict:
            lasted = now - self._since
            if lasted < max(SHORT_STATE_SECONDS, SHORT_STATE_INTERVALS * interval):
                self._short_states.append(now)
        # How long the first state has lasted is not known.
        self._since = now if by_verdict and not first_reading else None
        self._present, self._picture, self._held = state, picture, None
        return True

    def _is_held(self, state: JobState, picture: Picture | None, observation: Observation) -> bool:
        """Whether the readings are still those that led to the present state. A hang is never held back."""
        if self._picture is None or picture is None or observation.verdict.state is PowerState.HANG:
            return False
        if not picture.is_near(self._picture):
            self._held = None
            return False
        since, rounds = self._held or (observation.now, 0)
        self._held = since, rounds + 1
        # That a sample alone does not show the state is no evidence against it.
        lasting = observation.now - since >= SAME_PICTURE_SECONDS and rounds >= SAME_PICTURE_ROUNDS
        return state is JobState.UNKNOWN or not lasting

    def _persists(self, state: JobState, observation: Observation, *, damped: bool) -> bool:
        """Whether enough of the last rounds show the state."""
        memory = max(REMEMBERED_SECONDS, REMEMBERED_INTERVALS * observation.spec.interval_seconds)
        short = sum(observation.now - seconds <= memory for seconds in self._short_states) if damped else 0
        required = min(MAX_STATE_ROUNDS, STATE_ROUNDS * 2**short)
        start = observation.now - (required - 1) * ROUND_SECONDS
        recent = [shown for seconds, shown in self._rounds if seconds >= start]
        if len(recent) < required:
            recent = [shown for _, shown in self._rounds][-required:]
        return len(recent) >= required and recent.count(state) >= STATE_SHARE * len(recent)


def _picture(sample: JobSample) -> Picture | None:
    """None where no GPU can be read."""
    watts = [value for ranked in sample.gpus if (value := valid_power_watts(ranked.gpu)) is not None]
    busy = [value for ranked in sample.gpus if (value := ranked.gpu.utilization_percent) is not None]
    if not watts and not busy:
        return None
    return Picture(statistics.median(watts) if watts else None, statistics.fmean(busy) if busy else None)


def _blend(mean: float | None, new: float | None) -> float | None:
    return mean if mean is None or new is None else mean + PICTURE_WEIGHT * (new - mean)


class JobDetector:
    """Holds what must be remembered about one job between observations."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._last_seconds: float | None = None
        self._step_rate = StepRateTracker()
        self._slowdown = SlowdownTracker()
        self._saves = CheckpointSaveTracker()
        self._overdue = OverdueCheckpointTracker()
        self._processes = ProcessTracker()
        self._gpu_health = GpuHealthTracker()
        self._reachability = ReachabilityTracker()
        self._hang = HangDetector()
        self._job_exit = JobExitTracker()
        self._hysteresis = {rule.alert: Hysteresis() for rule in PERSISTENT_RULES}
        self._wasted_time = WastedTime()
        self._state_filter = StateFilter()
        self.state = JobState.UNKNOWN
        self.state_since = 0.0  # of the first observation while the job has been in no other state
        self.state_began_unseen = True  # `state_since` is only when the watcher began to see the job
        self.reason = "not evaluated yet"
        self.throughput = JobThroughput()  # at the last observation

    @property
    def wasted_gpu_seconds(self) -> Mapping[str, float]:
        """Observed GPU-seconds without useful work, by the name of the alert that explains them."""
        return self._wasted_time.gpu_seconds

    @property
    def wasted_joules(self) -> Mapping[str, float]:
        """Energy those GPUs used meanwhile, as far as their power was read."""
        return self._wasted_time.joules

    def observe(self, verdict: Verdict, job_sample: JobSample, now: float) -> tuple[Finding, ...]:
        """All findings at `now` (control host's monotonic clock in seconds, never going back)."""
        observation = self._next_observation(verdict, job_sample, now)
        self._saves.update(observation)
        self._processes.update(observation)
        pausing = bool(PAUSE_PHASES & observation.phases) or self._saves.blocking is not None
        self._step_rate.update(observation, pausing=pausing)
        self.throughput = self._step_rate.throughput(observation)
        self._job_exit.observe_run(observation, self._step_rate)
        if self._step_rate.restarted or self._processes.job_restarted or self._job_exit.memory_returned:
            self._begin_new_run()
            if not self._step_rate.restarted:
                self._step_rate.begin_new_run(observation)
        is_slow = self._slowdown.update(observation, self._step_rate)
        findings = self._wasted_time.update(
            job_sample, self._findings(observation, is_slow), observation.observed_seconds
        )
        self._set_state(observation, findings)
        return findings

    def history(self) -> JobHistory:
        """What it has learned about this job, for a recording of what comes next."""
        return JobHistory(
            self._step_rate.history(), self._saves.history(), self._hang.history(), self._slowdown.windows()
        )

    def restore_history(self, history: JobHistory) -> None:
        """Take over what was learned before the first observation."""
        self._step_rate.restore_history(history.pace)
        self._saves.restore_history(history.saves)
        self._hang.restore_history(history.hang)
        self._slowdown.restore_history(history.windows)

    def power_limits_changed(self) -> None:
        """A power limit was changed: earlier step rates are no measure of later ones."""
        self._slowdown.clear()
        self._step_rate.forget_best_rate()

    def _next_observation(self, verdict: Verdict, sample: JobSample, now: float) -> Observation:
        elapsed = None if self._last_seconds is None else now - self._last_seconds
        if elapsed is None:
            self.state_since = now
        self._last_seconds = now
        gap = elapsed is not None and elapsed > MAX_GAP_INTERVALS * self._spec.interval_seconds
        return Observation(self._spec, verdict, sample, now, 0.0 if elapsed is None or gap else elapsed, gap)

    def _begin_new_run(self) -> None:
        """The job was restarted: what was wrong with the previous run is over."""
        self._hang.clear()
        self._slowdown.clear()
        self._saves.clear()
        self._job_exit.clear()
        self._overdue.clear()
        for hysteresis in self._hysteresis.values():
            hysteresis.clear()

    def _findings(self, observation: Observation, is_slow: bool) -> tuple[Finding, ...]:
        found: list[Finding] = [*self._reachability.update(observation, self._step_rate)]
        faulty = self._gpu_health.update(observation)
        found += [gpu_fault_finding(observation, gpu) for gpu in faulty]
        job_end = self._job_exit.update(observation, self._step_rate, self._saves, self._processes)
        if job_end is not None:
            return (*found, job_end)
        hang = self._hang.update(
            observation,
            self._step_rate,
            self._saves,
            process_missing=self._processes.any_missing,
            few_processes_compute=self._processes.few_processes_compute,
            faulty_gpus=faulty,
        )
        stalled_save = checkpoint_stalled_finding(observation, self._saves)
        if stalled_save is not None:
            found.append(stalled_save)
        if stalled_save is not None and stalled_save.confirmed:
            pass  # the GPUs wait for the save, which is reported: no separate hang
        elif hang is not None:
            found.append(hang)
        else:
            found += self._persistent_findings(observation)
            alerts = {finding.alert for finding in found}
            if is_slow and not alerts & {AlertName.JOB_SLOW, AlertName.STRAGGLER}:
                found.append(slowdown_finding(observation, self._slowdown, self._step_rate))
        overdue = self._overdue.update(observation, self._step_rate, self._saves)
        if overdue is not None:
            found.append(overdue)
        return tuple(found)

    def _persistent_findings(self, observation: Observation) -> list[Finding]:
        inputs = RuleInputs(observation, self._step_rate, self._saves)
        findings = []
        for rule in PERSISTENT_RULES:
            hysteresis = self._hysteresis[rule.alert]
            hysteresis.update(rule.holds(inputs), observation, rule.required_seconds(inputs))
            if hysteresis.is_reported:
                findings.append(hysteresis.report(inputs, rule.finding))
        return findings

    def _set_state(self, observation: Observation, findings: tuple[Finding, ...]) -> None:
        """A state that a finding supports counts at once; one that only the verdict supports must persist."""
        state, reason = self._state_of(observation, {finding.alert: finding for finding in findings})
        by_verdict = reason == observation.verdict.why
        changes = self._state_filter.update(self.state, state, observation, by_verdict=by_verdict)
        if state is self.state:
            self.reason = reason
        elif changes or state in IMMEDIATE_STATES or any(each.alert is AlertName.JOB_HUNG for each in findings):
            self.state_began_unseen = self.state is JobState.UNKNOWN
            self.state, self.state_since, self.reason = state, observation.now, reason

    def _state_of(self, observation: Observation, found: Mapping[AlertName, Finding]) -> tuple[JobState, str]:
        """State and reason, a clause or sentence with numbers."""
        sample, verdict = observation.sample, observation.verdict
        for alert, state in (
            (AlertName.JOB_COMPLETED, JobState.COMPLETED),
            (AlertName.JOB_CRASHED, JobState.CRASHED),
            (AlertName.CHECKPOINT_STALLED, JobState.CHECKPOINTING),
            (AlertName.JOB_HUNG, JobState.HUNG),
        ):
            if alert in found and found[alert].confirmed:
                return state, found[alert].summary
        if self._saves.blocking is not None:
            seconds = self._saves.blocking.seconds
            return JobState.CHECKPOINTING, f"a checkpoint save has been running for {seconds:.0f} s"
        if AlertName.JOB_HUNG in found:
            # Only suspected, so the job is not called hung; but a job that may be hung is not called computing either.
            return JobState.WAITING, found[AlertName.JOB_HUNG].summary
        if is_evaluating(observation) and verdict.state is PowerState.STARVATION:
            return JobState.COMPUTING, "ranks report that they are evaluating"
        if AlertName.JOB_STARVING in found and self._hysteresis[AlertName.JOB_STARVING].is_current(observation):
            return JobState.STARVING, found[AlertName.JOB_STARVING].summary
        if not sample.gpus and not sample.progress.readable:
            return JobState.UNKNOWN, verdict.why
        if observation.alive is False and not sample.progress.readable:
            answering = format_count(sum(node.fresh for node in sample.nodes), "node")
            return JobState.IDLE, f"no process of the job is running on the {answering} that can be read"
        not_yet_working = self._step_rate.advances == 0 and verdict.state in NOT_YET_WORKING
        if self._spec.has_progress_source and not_yet_working and not _is_stepping(sample.progress):
            return JobState.STARTING, _describe_start(sample.progress)
        return self._state_by_power(observation)

    def _state_by_power(self, observation: Observation) -> tuple[JobState, str]:
        verdict = observation.verdict
        state = STATE_BY_POWER.get(verdict.state)
        usual, stalled = self._step_rate.usual_interval_seconds, self._step_rate.stalled_seconds
        advancing = usual is not None and stalled is not None and not self._step_rate.is_late
        if advancing and state not in (JobState.COMPUTING, JobState.COMMUNICATING, JobState.STARVING):
            # Light work near the power floor, or GPUs that cannot be read: the step counter is the better source.
            last = f"the last step was counted {stalled:.0f} s ago; a step usually takes at most {usual:.1f} s"
            return JobState.COMPUTING, f"{last}; {verdict.why}"
        if verdict.state is PowerState.IDLE and not observation.alive:
            return JobState.IDLE, verdict.why
        return state or JobState.UNKNOWN, verdict.why


def _is_stepping(progress: JobProgress) -> bool:
    """Its own time stamps say that steps advance, though none was counted since the watcher looks."""
    interval, age = progress.line_interval_seconds, progress.age_seconds
    return progress.step is not None and interval is not None and age is not None and age <= LATE_FACTOR * interval


def _describe_start(progress: JobProgress) -> str:
    if progress.step is None:
        return "no step has been seen yet"
    age = "" if progress.age_seconds is None else f", reached {progress.age_seconds:.0f} s ago"
    return (
        f"the step has not advanced since the watcher started: the log or heartbeat shows step {progress.step:,}{age}"
    )
