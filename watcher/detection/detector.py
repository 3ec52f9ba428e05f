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
from wattwatch.watcher.detection.trackers.observation import GAP_INTERVALS, JobHistory, Observation
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
        self._pace = StepRateTracker()
        self._drift = SlowdownTracker()
        self._saving = CheckpointSaveTracker()
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
        look = self._look(verdict, job_sample, now)
        self._saving.look(look)
        self._processes.look(look)
        self._pace.look(look, pausing=bool(PAUSE_PHASES & look.phases) or self._saving.blocks is not None)
        self._ending.watch(look, self._pace)
        if self._pace.restarted or self._processes.renewed or self._ending.came_back:
            self._start_again()
            if not self._pace.restarted:
                self._pace.start_again(look)
        slower = self._drift.look(look, self._pace)
        findings = self._cost.look(job_sample, self._findings(look, slower), look.seen_seconds)
        self._set_state(look, findings)
        return findings

    def habits(self) -> JobHistory:
        """What it has learned of this job, for a recording of what comes next."""
        return JobHistory(self._pace.habits(), self._saving.habits(), self._hang.habits(), self._drift.windows())

    def restore_history(self, habits: JobHistory) -> None:
        """What was learned before the first look."""
        self._pace.restore_history(habits.pace)
        self._saving.restore_history(habits.saves)
        self._hang.restore_history(habits.hang)
        self._drift.restore_history(habits.windows)

    def power_limits_changed(self) -> None:
        """Somebody set another power limit: the pace of before is no measure of the one from here on."""
        self._drift.clear()
        self._pace.forget_best()

    def _look(self, verdict: Verdict, sample: JobSample, now: float) -> Observation:
        since = None if self._last_seconds is None else now - self._last_seconds
        self._last_seconds = now
        gap = since is not None and since > GAP_INTERVALS * self._spec.interval_seconds
        return Observation(self._spec, verdict, sample, now, 0.0 if since is None or gap else since, gap)

    def _start_again(self) -> None:
        """The job was started again: what was wrong with the run before is history."""
        self._hang.clear()
        self._drift.clear()
        self._saving.clear()
        self._ending.clear()
        self._overdue.clear()
        for held in self._persistent.values():
            held.clear()

    def _findings(self, look: Observation, slower: bool) -> tuple[Finding, ...]:
        found: list[Finding] = [*self._sight.look(look, self._pace)]
        found += [rules.gpu_fault_finding(look, board) for board in self._boards.look(look)]
        ended = self._ending.look(look, self._pace, self._saving, self._processes)
        if ended is not None:
            return (*found, ended)
        somebody_missing = self._processes.just_gone
        hang = self._hang.look(
            look,
            self._pace,
            self._saving,
            suppressed=somebody_missing,
            few_compute=self._processes.few_compute,
        )
        stalled_save = rules.checkpoint_stalled_finding(look, self._saving)
        if stalled_save is not None:
            found.append(stalled_save)
        if stalled_save is not None and stalled_save.confirmed:
            pass  # the boards wait for the save: that is no hang of its own
        elif hang is not None:
            found.append(hang)
        else:
            found += self._slow_findings(look)
            alerts = {finding.alert for finding in found}
            if slower and not alerts & {AlertName.JOB_SLOW, AlertName.STRAGGLER}:
                found.append(rules.slowdown_finding(look, self._drift))
        overdue = self._overdue.look(look, self._pace, self._saving)
        if overdue is not None:
            found.append(overdue)
        return tuple(found)

    def _slow_findings(self, look: Observation) -> list[Finding]:
        """Conditions that must persist before they are worth a message."""
        progress = look.sample.progress
        floor = self._spec.floor_tokens_per_second
        rate = progress.tokens_per_second
        loss = progress.loss
        conditions = {
            AlertName.JOB_STARVING: self._starves(look),
            AlertName.JOB_SLOW: floor is not None and rate is not None and rate < floor,
            AlertName.STRAGGLER: look.verdict.state is PowerState.STRAGGLER,
            AlertName.GPU_THROTTLED: look.verdict.state is PowerState.THROTTLE,
            AlertName.LOSS_NOT_FINITE: loss is not None and not math.isfinite(loss),
        }
        return [
            rules.persistent_finding(alert, look, held, self._pace)
            for alert, true in conditions.items()
            if (held := self._persist(alert, true, look)) is not None
        ]

    def _starves(self, look: Observation) -> bool:
        """By the picture; or by another witness, while utilisation scatters as it does in starvation and at work."""
        if self._saving.blocks is not None or self._pace.stands or is_evaluating(look):
            return False
        told = rules.is_starving_by_progress(look, self._pace) and look.verdict.shape is UtilizationPattern.SCATTER
        return look.verdict.state is PowerState.STARVATION or told

    def _persist(self, alert: AlertName, true: bool, look: Observation) -> rules.Hysteresis | None:
        """Most of the recent looks, not each: starvation scatters over time as well, and one busy moment is no cure."""
        held = self._persistent.setdefault(alert, rules.Hysteresis())
        enough = rules.persistence_seconds(alert, look.sample.progress.readable)
        if alert is AlertName.JOB_STARVING and not rules.is_waiting_for_data(look):
            # An evaluation that nobody announces looks the same, but no step is counted in it.
            enough = max(enough, MIN_STARVATION_STEPS * (self._pace.usual_seconds or 0.0))
        held.look(true, look, enough)
        return held if held.told else None

    def _set_state(self, look: Observation, findings: tuple[Finding, ...]) -> None:
        """What a finding says counts at once; what only the picture says must be seen on two rounds."""
        state, reason = self._state_of(look, {finding.alert: finding for finding in findings})
        if state is self.state:
            self._next_state = None
            self.reason = reason
            return
        self._state_rounds = self._state_rounds + 1 if state is self._next_state else 1
        self._next_state = state
        if state in IMMEDIATE_STATES or self.state is JobState.UNKNOWN or self._state_rounds >= STATE_ROUNDS:
            self.state, self.state_since, self.reason, self._next_state = state, look.now, reason, None

    def _state_of(self, look: Observation, found: Mapping[AlertName, Finding]) -> tuple[JobState, str]:
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
        if self._saving.blocks is not None:
            return JobState.CHECKPOINTING, f"a checkpoint is being written since {self._saving.blocks.seconds:.0f} s"
        if is_evaluating(look) and look.verdict.state is PowerState.STARVATION:
            return JobState.COMPUTING, "its ranks say that they evaluate"
        if AlertName.JOB_STARVING in found:
            return JobState.STARVING, found[AlertName.JOB_STARVING].summary
        if not look.sample.gpus and not look.sample.progress.readable:
            return JobState.UNKNOWN, look.verdict.why
        if look.alive is False and not look.sample.progress.readable:
            return JobState.IDLE, "no process of the job is on any node that answers"
        expected = self._spec.run_directory is not None or bool(self._spec.logs)
        if expected and self._pace.advances == 0 and look.verdict.state in NOT_YET_WORKING:
            return JobState.STARTING, "no step seen yet"
        return self._state_of_power(look)

    def _state_of_power(self, look: Observation) -> tuple[JobState, str]:
        state = STATE_BY_POWER.get(look.verdict.state)
        usual, stalled = self._pace.usual_seconds, self._pace.stalled_seconds
        moving = usual is not None and stalled is not None and not self._pace.stands
        if moving and state not in (JobState.COMPUTING, JobState.COMMUNICATING, JobState.STARVING):
            # Light work near the floor, or boards that cannot be read: the counter is the better witness.
            return JobState.COMPUTING, f"steps advance, one change in {usual:.1f} s at most; {look.verdict.why}"
        if look.verdict.state is PowerState.IDLE and not look.alive:
            return JobState.IDLE, look.verdict.why
        return state or JobState.UNKNOWN, look.verdict.why
