"""Verdicts over time -> what is wrong with a job. Pure: the time is an argument, nothing is read or written.

Progress decides whether, power and shape decide what kind and who. All is counted in rounds of new samples and seconds
that were seen: a gap proves nothing. The detector repeats each finding for as long as it is true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from wattwatch.watcher.detection import findings as rules
from wattwatch.watcher.detection.hang import HangDetector
from wattwatch.watcher.detection.job_exit import JobExitTracker
from wattwatch.watcher.detection.model import (
    MAX_GAP_INTERVALS,
    AlertName,
    Finding,
    JobSample,
    JobSpec,
    JobState,
    PowerState,
    UtilizationPattern,
    Verdict,
)
from wattwatch.watcher.detection.trackers.checkpoint_overdue import OverdueCheckpointTracker
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.gpu_health import GpuHealthTracker
from wattwatch.watcher.detection.trackers.observation import JobHistory, Observation
from wattwatch.watcher.detection.trackers.processes import ProcessTracker
from wattwatch.watcher.detection.trackers.reachability import ReachabilityTracker
from wattwatch.watcher.detection.trackers.slowdown import SlowdownTracker
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker
from wattwatch.watcher.detection.trackers.step_timeout import is_evaluating
from wattwatch.watcher.detection.wasted_time import WastedTime

STATE_ROUNDS: Final = 2
# A counter that stands for two of its usual intervals tells no starvation: what lasts longer has steps in it.
MIN_STARVATION_STEPS: Final = 2.5
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
    """Holds what must be remembered of one job between looks. `observe` is the only way in."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._last_seconds: float | None = None
        self._step_rate = StepRateTracker()
        self._drift = SlowdownTracker()
        self._saves = CheckpointSaveTracker()
        self._processes = ProcessTracker()
        self._boards = GpuHealthTracker()
        self._sight = ReachabilityTracker()
        self._hang = HangDetector()
        self._persistent: dict[AlertName, rules.Hysteresis] = {}
        self._ending = JobExitTracker()
        self._overdue = OverdueCheckpointTracker()
        self._cost = WastedTime()
        self._next_state: JobState | None = None
        self._state_rounds = 0
        self.state = JobState.UNKNOWN
        self.state_since = 0.0
        self.reason = "not looked at yet"

    @property
    def wasted_gpu_seconds(self) -> Mapping[str, float]:
        """Seconds of boards that did no useful work, by the alert that says why; only time that was seen."""
        return self._cost.gpu_seconds

    @property
    def wasted_joules(self) -> Mapping[str, float]:
        """What those boards drew meanwhile; of those that were read."""
        return self._cost.joules

    def observe(self, verdict: Verdict, job_sample: JobSample, now: float) -> tuple[Finding, ...]:
        """Everything that is wrong with the job at `now` (control host's monotonic seconds, never going back)."""
        observation = self._look(verdict, job_sample, now)
        self._saves.update(observation)
        self._processes.update(observation)
        self._step_rate.update(
            observation, pausing=bool(PAUSE_PHASES & observation.phases) or self._saves.blocking is not None
        )
        self._ending.watch(observation, self._step_rate)
        if self._step_rate.restarted or self._processes.job_restarted or self._ending.memory_returned:
            self._begin_new_run()
            if not self._step_rate.restarted:
                self._step_rate.begin_new_run(observation)
        slower = self._drift.update(observation, self._step_rate)
        findings = self._cost.update(job_sample, self._findings(observation, slower), observation.observed_seconds)
        self._set_state(observation, findings)
        return findings

    def history(self) -> JobHistory:
        """What it has learned of this job, for a recording of what comes next."""
        return JobHistory(self._step_rate.history(), self._saves.history(), self._hang.history(), self._drift.windows())

    def restore_history(self, history: JobHistory) -> None:
        """What was learned before the first look."""
        self._step_rate.restore_history(history.pace)
        self._saves.restore_history(history.saves)
        self._hang.restore_history(history.hang)
        self._drift.restore_history(history.windows)

    def power_limits_changed(self) -> None:
        """Somebody set another power limit: the pace of before is no measure of the one from here on."""
        self._drift.clear()
        self._step_rate.forget_best_rate()

    def _look(self, verdict: Verdict, sample: JobSample, now: float) -> Observation:
        since = None if self._last_seconds is None else now - self._last_seconds
        self._last_seconds = now
        gap = since is not None and since > MAX_GAP_INTERVALS * self._spec.interval_seconds
        return Observation(self._spec, verdict, sample, now, 0.0 if since is None or gap else since, gap)

    def _begin_new_run(self) -> None:
        """The job was started again: what was wrong with the run before is history."""
        self._hang.clear()
        self._drift.clear()
        self._saves.clear()
        self._ending.clear()
        self._overdue.clear()
        for held in self._persistent.values():
            held.clear()

    def _findings(self, observation: Observation, slower: bool) -> tuple[Finding, ...]:
        found: list[Finding] = [*self._sight.update(observation, self._step_rate)]
        found += [rules.gpu_fault_finding(observation, board) for board in self._boards.update(observation)]
        ended = self._ending.update(observation, self._step_rate, self._saves, self._processes)
        if ended is not None:
            return (*found, ended)
        process_missing = self._processes.any_missing
        hang = self._hang.update(
            observation,
            self._step_rate,
            self._saves,
            suppressed=process_missing,
            few_processes_compute=self._processes.few_processes_compute,
        )
        stalled_save = rules.checkpoint_stalled_finding(observation, self._saves)
        if stalled_save is not None:
            found.append(stalled_save)
        if stalled_save is not None and stalled_save.confirmed:
            pass  # the boards wait for the save: that is no hang of its own
        elif hang is not None:
            found.append(hang)
        else:
            found += self._slow_findings(observation)
            alerts = {finding.alert for finding in found}
            if slower and not alerts & {AlertName.JOB_SLOW, AlertName.STRAGGLER}:
                found.append(rules.slowdown_finding(observation, self._drift))
        overdue = self._overdue.update(observation, self._step_rate, self._saves)
        if overdue is not None:
            found.append(overdue)
        return tuple(found)

    def _slow_findings(self, observation: Observation) -> list[Finding]:
        """Conditions that must persist before they are worth a message."""
        progress = observation.sample.progress
        floor = self._spec.floor_tokens_per_second
        rate = progress.tokens_per_second
        loss = progress.loss
        conditions = {
            AlertName.JOB_STARVING: self._starves(observation),
            AlertName.JOB_SLOW: floor is not None and rate is not None and rate < floor,
            AlertName.STRAGGLER: observation.verdict.state is PowerState.STRAGGLER,
            AlertName.GPU_THROTTLED: observation.verdict.state is PowerState.THROTTLE,
            AlertName.LOSS_NOT_FINITE: loss is not None and not math.isfinite(loss),
        }
        return [
            rules.persistent_finding(alert, observation, held, self._step_rate)
            for alert, true in conditions.items()
            if (held := self._persist(alert, true, observation)) is not None
        ]

    def _starves(self, observation: Observation) -> bool:
        """By the picture; or by another witness, while utilisation scatters as it does in starvation and at work."""
        if self._saves.blocking is not None or self._step_rate.is_late or is_evaluating(observation):
            return False
        told = (
            rules.is_starving_by_progress(observation, self._step_rate)
            and observation.verdict.pattern is UtilizationPattern.SCATTER
        )
        return observation.verdict.state is PowerState.STARVATION or told

    def _persist(self, alert: AlertName, true: bool, observation: Observation) -> rules.Hysteresis | None:
        """Most of the recent looks, not each: starvation scatters over time as well, and one busy moment is no cure."""
        held = self._persistent.setdefault(alert, rules.Hysteresis())
        enough = rules.persistence_seconds(alert, observation.sample.progress.readable)
        if alert is AlertName.JOB_STARVING and not rules.is_waiting_for_data(observation):
            # An evaluation that nobody announces looks the same, but no step is counted in it.
            enough = max(enough, MIN_STARVATION_STEPS * (self._step_rate.usual_interval_seconds or 0.0))
        held.update(true, observation, enough)
        return held if held.told else None

    def _set_state(self, observation: Observation, findings: tuple[Finding, ...]) -> None:
        """What a finding says counts at once; what only the picture says must be seen on two rounds."""
        state, reason = self._state_of(observation, {finding.alert: finding for finding in findings})
        if state is self.state:
            self._next_state = None
            self.reason = reason
            return
        self._state_rounds = self._state_rounds + 1 if state is self._next_state else 1
        self._next_state = state
        if state in IMMEDIATE_STATES or self.state is JobState.UNKNOWN or self._state_rounds >= STATE_ROUNDS:
            self.state, self.state_since, self.reason, self._next_state = state, observation.now, reason, None

    def _state_of(self, observation: Observation, found: Mapping[AlertName, Finding]) -> tuple[JobState, str]:
        for alert, state in (
            (AlertName.JOB_COMPLETED, JobState.COMPLETED),
            (AlertName.JOB_CRASHED, JobState.CRASHED),
            (AlertName.CHECKPOINT_STALLED, JobState.CHECKPOINTING),
        ):
            if alert in found and found[alert].confirmed:
                return state, found[alert].summary
        hung = found.get(AlertName.JOB_HUNG)
        if hung is not None and hung.confirmed:
            return JobState.HUNG, hung.summary
        if self._saves.blocking is not None:
            return JobState.CHECKPOINTING, f"a checkpoint is being written since {self._saves.blocking.seconds:.0f} s"
        if is_evaluating(observation) and observation.verdict.state is PowerState.STARVATION:
            return JobState.COMPUTING, "its ranks say that they evaluate"
        if AlertName.JOB_STARVING in found:
            return JobState.STARVING, found[AlertName.JOB_STARVING].summary
        if not observation.sample.gpus and not observation.sample.progress.readable:
            return JobState.UNKNOWN, observation.verdict.why
        if observation.alive is False and not observation.sample.progress.readable:
            return JobState.IDLE, "no process of the job is on any node that answers"
        expected = self._spec.run_directory is not None or bool(self._spec.logs)
        if expected and self._step_rate.advances == 0 and observation.verdict.state in NOT_YET_WORKING:
            return JobState.STARTING, "no step seen yet"
        return self._state_of_power(observation)

    def _state_of_power(self, observation: Observation) -> tuple[JobState, str]:
        state = STATE_BY_POWER.get(observation.verdict.state)
        usual, stalled = self._step_rate.usual_interval_seconds, self._step_rate.stalled_seconds
        moving = usual is not None and stalled is not None and not self._step_rate.is_late
        if moving and state not in (JobState.COMPUTING, JobState.COMMUNICATING, JobState.STARVING):
            # Light work near the floor, or boards that cannot be read: the counter is the better witness.
            return JobState.COMPUTING, f"steps advance, one change in {usual:.1f} s at most; {observation.verdict.why}"
        if observation.verdict.state is PowerState.IDLE and not observation.alive:
            return JobState.IDLE, observation.verdict.why
        return state or JobState.UNKNOWN, observation.verdict.why
