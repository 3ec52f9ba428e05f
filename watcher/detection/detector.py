"""Verdicts over time -> what is wrong with a job, and its state.

`JobDetector.observe` updates the trackers with one observation and asks the rules in order: nodes, GPUs, the end of
the job, hang and stalled checkpoint, slow and starving, overdue checkpoint. Progress decides whether something is
wrong; power and utilization decide what kind and which rank. Time counts only in rounds of new samples and observed
seconds, so a gap proves nothing. Each finding is repeated for as long as it is true. No clock, network or disk: time
is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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

# A state that only the classifier's verdict supports must be seen in two rounds; one sample may catch a moment in
# between.
STATE_ROUNDS: Final = 2
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
        self._next_state: JobState | None = None
        self._state_rounds = 0
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
            lost_gpus=tuple(gpu for gpu in faulty if gpu.unusable and not gpu.answers),
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
        """A state that a finding supports counts at once; one that only the verdict supports takes two rounds."""
        state, reason = self._state_of(observation, {finding.alert: finding for finding in findings})
        if state is self.state:
            self._next_state = None
            self.reason = reason
            return
        self._state_rounds = self._state_rounds + 1 if state is self._next_state else 1
        self._next_state = state
        supported = state in IMMEDIATE_STATES or any(each.alert is AlertName.JOB_HUNG for each in findings)
        if supported or self.state is JobState.UNKNOWN or self._state_rounds >= STATE_ROUNDS:
            self.state_began_unseen = self.state is JobState.UNKNOWN
            self.state, self.state_since, self.reason, self._next_state = state, observation.now, reason, None

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
            return JobState.IDLE, "no process of the job is running on the nodes that answer"
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
            last = f"the last step was counted {stalled:.0f} s ago, and one usually takes at most {usual:.1f} s"
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
    age = "" if progress.age_seconds is None else f", and the last change was {progress.age_seconds:.0f} s ago"
    return f"no new step has been counted yet: the log or heartbeat shows step {progress.step:,}{age}"
