"""Decides when a job is hung, and why. Where a step counter can be read, it decides, and power and utilization only
raise the suspicion and name the rank. Without a counter, they decide alone, after minutes instead of seconds.

There are four ways to a JobHung finding, tried in this order by `HangDetector.update`:

1. `_by_counter`: no step for longer than the job's own timeout (trackers/step_timeout.py, from the job's usual step
   interval in trackers/step_rate.py). Confirmed; later where all ranks are idle, which a save by all of them looks
   like too, and where power is unknown.
2. `_by_signature`: the GPUs show the pattern of a deadlock (one rank idle, or none, while the rest spin at the power
   floor) in two rounds of samples, after the job was seen to work. Suspected within seconds; the counter confirms or
   withdraws it. Without a readable counter it must last 60 s to be suspected and 300 s to be confirmed; longer, or
   never, for a pattern that the job's own healthy work has shown (`_required_seconds`).
3. `_by_endless_save`: rank 0 alone idle for longer than any save, where neither counter nor files can be read.
   Confirmed at three times that limit.
4. `_by_endless_idle`: another pattern at the power floor for 300 s, without a readable counter. Suspected only.

The reason for these durations: in 13.9 h of public logs of healthy jobs, no pattern of a hang other than rank 0 alone
idle lasted 10 s. A hang that the counter confirmed stays until something contradicts it (`_still_confirmed`). What a
single sample looks like is decided by the classifier (classifier/), and by which rank (`Verdict.suspects`).

Not detectable: a hang at the power of full work, or one that looks like a save, without a step counter.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Final

from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import (
    AlertName,
    Finding,
    PowerState,
    Severity,
    Suspect,
    UtilizationPattern,
)
from wattwatch.watcher.detection.trackers.checkpoint_save import DEFAULT_SAVE_LIMIT_SECONDS, CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.gpu_health import FaultyGpu
from wattwatch.watcher.detection.trackers.observation import HangHistory, Observation, Streak, outlier_suspects
from wattwatch.watcher.detection.trackers.step_rate import (
    KEPT_INTERVALS,
    MIN_STALL_SECONDS,
    StepRateTracker,
    repeated_stall_seconds,
)
from wattwatch.watcher.detection.trackers.step_timeout import (
    FIRST_STEP_SECONDS,
    WORKING_STATES,
    is_evaluating,
    may_be_working,
    step_timeout,
)

SUSPECT_ROUNDS: Final = 2
# Without a readable counter: at least six and thirty times as long as such a pattern ever lasted in a healthy job.
NO_COUNTER_SUSPECT_SECONDS: Final = 60.0
NO_COUNTER_CONFIRM_SECONDS: Final = 300.0
NO_COUNTER_CONFIRM_FACTOR: Final = 3.0
# Before the first step of a run: ranks that started faster wait for one that still loads, compiles or tokenizes, and
# GPUs that were warmed up above the floor prove no work. Chosen: as long as without a counter.
FIRST_STEP_SUSPECT_SECONDS: Final = 300.0
# A step that ends a signature disproves it. The next one must last this many times as long before it is suspected, but
# no more than so many seconds longer: a stall of minutes that ended by itself may have been one.
FALSE_ALARM_FACTOR: Final = 3.0
MAX_FALSE_ALARM_EXTRA_SECONDS: Final = 60.0
# Rounds above the power floor until the job counts as one that has worked.
MIN_WORKING_ROUNDS: Final = 3
# Steady work varies by a few per cent between power averages; a drop to this share is more than that.
POWER_DROP_SHARE: Final = 0.85
# Rank 0 alone idle for less than this is no save.
MIN_SAVE_SECONDS: Final = 3.0
# A signature that is missing for one round is still there.
SIGNATURE_LOST_ROUNDS: Final = 2
DEADLOCK_PATTERNS: Final = frozenset({UtilizationPattern.ALL_BUSY, UtilizationPattern.ONE_LOW_REST_BUSY})
OTHER_STALL_PATTERNS: Final = frozenset(
    {UtilizationPattern.TWO_GROUPS, UtilizationPattern.ONE_BUSY_REST_LOW, UtilizationPattern.SCATTER}
)
# A GPU may have been lost this many samples before the last step was read: logs are written and read late.
MAX_LOSS_NOTICE_INTERVALS: Final = 2.0
MAX_LOST_LISTED: Final = 4
EXCUSED_PHASES: Final = frozenset({"save", "load", "done"})


class HangDetector:
    """Follows one job from suspicion to confirmation."""

    def __init__(self) -> None:
        self._signature = Streak()
        self._signature_pattern = UtilizationPattern.UNKNOWN
        self._doubtful_rounds = 0  # observations of it that the classifier also reads as light work or a save
        # By pattern: how long it must last to be suspected, because healthy work of this job once looked like it.
        self._required_seconds: dict[UtilizationPattern, float] = {}
        self._signature_absent = Streak()
        self._other_pattern = Streak()  # at the power floor, where no counter can be read
        self._idle_seconds = self._longest_idle_seconds = 0.0  # all ranks, since the last step; the most a step ended
        self._idle_stalls: deque[float] = deque(
            maxlen=KEPT_INTERVALS
        )  # of those, the ones that were reported as a hang
        self._working_rounds = 0
        self._last_power_fraction: float | None = None
        self._suspects: tuple[Suspect, ...] = ()
        self._memory_errors: tuple[FaultyGpu, ...] = ()  # GPUs whose counter rose in the last minutes
        self._usual_step_seconds = 0.0
        self._signature_text = ""
        self._last_finding: Finding | None = None
        self._confirmed: Finding | None = None  # the last one that was confirmed, and the time of that observation
        self._confirmed_seconds = 0.0
        self._since_pause_seconds = math.inf  # since the job saved, evaluated or loaded; inf: never seen
        self._since_work_seconds = math.inf
        self._was_working = False
        self._worked_since_save = True
        self._read_seconds: float | None = None  # when power and utilization of any GPU were last read
        self._starting = False  # at the previous observation: the first step of a run has not been seen yet

    def clear(self) -> None:
        """The job was restarted."""
        self._signature.clear()
        self._required_seconds.clear()
        self._signature_absent.clear()
        self._other_pattern.clear()
        self._idle_seconds = 0.0
        self._working_rounds = 0
        self._suspects = ()
        self._last_finding = None
        self._since_pause_seconds = self._since_work_seconds = math.inf
        self._was_working, self._worked_since_save = False, True

    def history(self) -> HangHistory:
        return HangHistory(self._longest_idle_seconds, dict(self._required_seconds), self._working_rounds)

    def restore_history(self, history: HangHistory) -> None:
        """Take over what was learned before the first observation."""
        self._longest_idle_seconds, self._working_rounds = history.longest_rest_seconds, history.worked_rounds
        self._required_seconds.update(history.demand_seconds)

    def update(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        *,
        process_missing: bool,
        few_processes_compute: bool = False,
        faulty_gpus: tuple[FaultyGpu, ...] = (),
    ) -> Finding | None:
        """The hang finding now, or None. `process_missing`: a process has exited, so the others wait because of that
        and nothing is reported here; `few_processes_compute`: few of the job's processes use a CPU core."""
        verdict = observation.verdict
        lost_gpus = tuple(gpu for gpu in faulty_gpus if gpu.unusable and not gpu.answers)
        self._usual_step_seconds = step_rate.usual_interval_seconds or 0.0
        self._memory_errors = tuple(gpu for gpu in faulty_gpus if gpu.memory_error_seconds is not None)
        if observation.sample.gpus:
            self._read_seconds = observation.now
        working = verdict.state in WORKING_STATES and not verdict.at_floor
        self._working_rounds += working
        self._follow_pauses(observation, step_rate, saves, working)
        self._follow_signature(observation, step_rate, saves, process_missing)
        self._follow_other_patterns(observation, step_rate, saves, process_missing)
        self._last_power_fraction = verdict.power_fraction
        starts = step_rate.start_observed or observation.sample.progress.step == 0
        self._starting = step_rate.has_counter and step_rate.advances == 0 and starts
        if observation.spec.interval_assumed:
            return None  # a hang is a pattern that lasts; how long anything lasts is not known here
        found = (
            self._by_counter(observation, step_rate, saves, few_processes_compute, lost_gpus)
            or self._by_signature(observation, step_rate)
            or self._by_endless_save(observation, step_rate, saves)
            or self._by_endless_idle(observation)
        )
        kept = self._still_confirmed(observation, step_rate, working)
        if found is not None and found.confirmed:
            self._confirmed, self._confirmed_seconds = found, observation.now
        elif kept is not None:
            found = self._with_age(kept, observation, step_rate)
        self._last_finding = None if process_missing else found
        return self._last_finding

    def _still_confirmed(self, observation: Observation, step_rate: StepRateTracker, working: bool) -> Finding | None:
        """The previous finding if it was confirmed and nothing contradicts it. A pattern that flickers moves no
        counter, and a counter that becomes unreadable is no sign of recovery."""
        last = self._last_finding
        if last is None or not last.confirmed or not step_rate.has_counter:
            return None
        if step_rate.stalled_seconds is None:
            return None if working else last
        stalled = step_rate.stalled_seconds > 0 and not step_rate.pausing and observation.alive is not False
        return last if stalled else None

    def _with_age(self, kept: Finding, observation: Observation, step_rate: StepRateTracker) -> Finding:
        """A finding that is kept describes the observation that confirmed it: say how long ago that was."""
        now = (
            "no step has been counted since"
            if step_rate.stalled_seconds is not None
            else "the job's progress cannot be read now"
        )
        age = f"the hang was last confirmed {observation.now - self._confirmed_seconds:.0f} s ago; {now}"
        return replace(kept, evidence=(*(self._confirmed or kept).evidence, age))

    def _follow_pauses(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker, working: bool
    ) -> None:
        """Time spent in a save of two minutes, or in an evaluation, is no stall, not even after it has ended. And
        after a save the pattern proves nothing until the job was seen to work again."""
        elapsed = observation.observed_seconds
        self._since_pause_seconds = 0.0 if step_rate.pausing else self._since_pause_seconds + elapsed
        self._since_work_seconds = 0.0 if working and self._was_working else self._since_work_seconds + elapsed
        self._was_working = working
        if saves.blocking is not None and saves.blocking.seconds >= MIN_SAVE_SECONDS:
            self._worked_since_save = False
        elif working:
            self._worked_since_save = True

    def _follow_signature(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker, process_missing: bool
    ) -> None:
        verdict = observation.verdict
        # A step counted in this very observation outweighs the pattern; one counted a while ago does not.
        advanced = step_rate.stalled_seconds == 0.0
        possible = (
            verdict.pattern in DEADLOCK_PATTERNS
            and not advanced
            and observation.sample.complete
            and self._working_rounds >= MIN_WORKING_ROUNDS
            and saves.blocking is None
            and self._worked_since_save
            and not EXCUSED_PHASES & observation.phases
            and not is_evaluating(observation)
            and not process_missing
        )
        if possible and verdict.at_floor:
            self._signature_absent.clear()
            self._doubtful_rounds = 0 if self._signature.since is None else self._doubtful_rounds
            self._signature.update(True, observation)
            self._doubtful_rounds += verdict.state is not PowerState.HANG
            self._suspects, self._signature_text = verdict.suspects, verdict.why
            self._signature_pattern = verdict.pattern
            return
        if possible and self._power_drops(observation):
            self._signature.clear()
            self._signature.update(True, observation)
            return
        if self._signature.since is None:
            return
        if not (observation.sample.complete or advanced or observation.gap):
            return  # an incomplete sample neither supports a suspicion nor withdraws it
        self._signature_absent.update(True, observation)
        if observation.gap or advanced or self._signature_absent.rounds >= SIGNATURE_LOST_ROUNDS:
            # A hang that the counter confirmed was one, though it ended: it teaches no patience.
            disproved = (advanced or self._was_working) and not self._was_confirmed
            if self._signature.rounds >= SUSPECT_ROUNDS and disproved and not self._starting:
                seconds = self._signature.seconds
                required = min(FALSE_ALARM_FACTOR * seconds, seconds + MAX_FALSE_ALARM_EXTRA_SECONDS)
                known = self._required_seconds.get(self._signature_pattern, 0.0)
                self._required_seconds[self._signature_pattern] = max(required, known)
            self._signature.clear()
            self._signature_absent.clear()
            self._suspects = ()

    def _follow_other_patterns(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker, process_missing: bool
    ) -> None:
        """Patterns that are no deadlock signature. All ranks idle is a pause of any length where no counter can be
        read; two groups, or one rank that waits for all others, are none."""
        verdict = observation.verdict
        if step_rate.stalled_seconds == 0.0:
            ended = self._idle_seconds
            if self._was_confirmed:
                self._idle_stalls.append(ended)
                ended = repeated_stall_seconds(self._idle_stalls)
            self._longest_idle_seconds = max(self._longest_idle_seconds, ended)
            self._idle_seconds = 0.0
        elif verdict.pattern is UtilizationPattern.ALL_LOW:
            self._idle_seconds += observation.observed_seconds
        no_counter = (
            not step_rate.has_counter
            and self._working_rounds >= MIN_WORKING_ROUNDS
            and observation.sample.complete
            and observation.alive is not False
        )
        stalled = verdict.at_floor and verdict.pattern in OTHER_STALL_PATTERNS and saves.blocking is None
        excused = process_missing or bool(observation.phases & EXCUSED_PHASES)
        self._other_pattern.update(no_counter and stalled and not excused, observation)

    @property
    def _was_confirmed(self) -> bool:
        """At the previous observation."""
        return self._last_finding is not None and self._last_finding.confirmed

    def _power_drops(self, observation: Observation) -> bool:
        """Power fell within this round. Readings are averages over an interval, so the one in which a job stops reads
        between full power and the floor, and is the first of the two samples that show the stop."""
        before, now = self._last_power_fraction, observation.verdict.power_fraction
        return before is not None and now is not None and now <= POWER_DROP_SHARE * before

    def _by_counter(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        few_processes_compute: bool,
        lost_gpus: tuple[FaultyGpu, ...],
    ) -> Finding | None:
        """No step for too long, the processes live, and nothing is going on that takes its time."""
        stalled = step_rate.stalled_seconds
        if stalled is None or observation.alive is False or (saves.blocking and saves.is_within_limit):
            return None
        first_step = self._is_first_step(observation, step_rate)
        if first_step and not observation.alive:
            return None
        if not step_rate.pausing:
            stalled = min(stalled, self._since_pause_seconds)
        timeout = step_timeout(
            observation,
            step_rate,
            saves,
            first_step=first_step,
            longest_rest_seconds=self._longest_idle_seconds,
            few_processes_compute=few_processes_compute,
        )
        limit = timeout.suspect_seconds
        usual = step_rate.usual_interval_seconds
        # GPUs that worked a moment ago have not been stopped for long, though they may have worked on a step that never
        # ended: less than the shortest stall limit at idle power proves nothing.
        min_idle_seconds = min(MIN_STALL_SECONDS, limit) - (usual or 0.0)
        if stalled <= limit or (not may_be_working(observation) and self._since_work_seconds < min_idle_seconds):
            return None
        confirmed = stalled > timeout.confirm_seconds
        usual = usual or observation.sample.progress.line_interval_seconds
        exceeded = timeout.confirm_seconds if confirmed else limit
        rate = f", and a step usually takes {usual:.1f} s" if usual is not None else ""
        has_signature = bool(self._suspects) or self._signature.since is not None
        evidence = [
            f"no step for {stalled:.0f} s (last step {observation.sample.progress.step:,}"
            f"{observation.sample.progress.guess_note}); "
            f"the limit is {exceeded:.0f} s{rate}",
            self._signature_text if has_signature and observation.sample.gpus else observation.verdict.why,
        ]
        if not observation.sample.gpus:
            evidence += self._unread_evidence(observation, has_signature=has_signature)
        if not confirmed:
            evidence.append(
                "a checkpoint save or an evaluation can look like a hang; the hang is confirmed after "
                f"{timeout.confirm_seconds:.0f} s without a step"
            )
        since = observation.now - stalled + (usual or 0.0)
        # A rank that has lost its GPU takes no further step. One whose GPU was lost earlier was not needed for them.
        noticed_late = MAX_LOSS_NOTICE_INTERVALS * observation.spec.interval_seconds
        culprits = [gpu for gpu in lost_gpus if gpu.since_seconds >= observation.now - stalled - noticed_late]
        evidence += [
            f"{gpu.suspect} has been lost for {observation.now - gpu.since_seconds:.0f} s: {gpu.evidence[0]}"
            for gpu in culprits[:MAX_LOST_LISTED]
            if gpu.evidence
        ]
        suspects = tuple(gpu.suspect for gpu in culprits) or self._suspects or outlier_suspects(observation)
        return self._finding(observation, since, tuple(evidence), suspects, confirmed=confirmed)

    def _signature_evidence(self, observation: Observation) -> list[str]:
        if observation.sample.gpus:
            return [self._signature_text]
        return self._unread_evidence(observation, has_signature=True)

    def _unread_evidence(self, observation: Observation, *, has_signature: bool) -> list[str]:
        """What is not known while no GPU can be read, and what was seen before."""
        gpus = "its GPUs" if not observation.sample.gpu_count else format_count(observation.sample.gpu_count, "GPU")
        since = "have not been read yet"
        if self._read_seconds is not None:
            since = f"have not been read for {observation.now - self._read_seconds:.0f} s"
        unread = f"power and utilization of {gpus} {since}: whether the GPUs work now is unknown"
        return [unread, f"when they were last read: {self._signature_text}"] if has_signature else [unread]

    def _is_first_step(self, observation: Observation, step_rate: StepRateTracker) -> bool:
        """No step was observed yet: the first one may compile, or the log is of a run that has ended. A watcher that
        starts during a hang is recognized by the verdict, unless the counter is 0: then no step was made."""
        started_during_hang = (
            not step_rate.start_observed
            and observation.verdict.state is PowerState.HANG
            and bool(observation.alive)
            and observation.sample.progress.step != 0
        )
        return step_rate.advances == 0 and not started_during_hang

    @property
    def _signature_delay_seconds(self) -> float:
        """How long the signature must last to be suspected."""
        required = self._required_seconds.get(self._signature_pattern, 0.0)
        return max(required, FIRST_STEP_SUSPECT_SECONDS) if self._starting else required

    def _by_signature(self, observation: Observation, step_rate: StepRateTracker) -> Finding | None:
        signature = self._signature
        if signature.since is None or signature.rounds < SUSPECT_ROUNDS:
            return None
        if signature.seconds < self._signature_delay_seconds:
            return None
        if step_rate.stalled_seconds is None:
            if signature.seconds < NO_COUNTER_SUSPECT_SECONDS:
                return None
            evidence = (
                *self._signature_evidence(observation),
                f"this power pattern has lasted for {signature.seconds:.0f} s; the job's progress cannot be read",
            )
            limit = NO_COUNTER_CONFIRM_SECONDS
            if 2 * self._doubtful_rounds > signature.rounds:
                # It may be a save, which ends, or a slow network link, which may never.
                maybe_save = self._signature_pattern is UtilizationPattern.ONE_LOW_REST_BUSY
                limit = NO_COUNTER_CONFIRM_FACTOR * DEFAULT_SAVE_LIMIT_SECONDS if maybe_save else math.inf
            confirmed = signature.seconds >= limit
            return self._finding(observation, signature.since, evidence, self._suspects, confirmed=confirmed)
        limit = step_rate.stall_limit_seconds(observation)
        if self._is_first_step(observation, step_rate):
            limit = max(limit, FIRST_STEP_SECONDS)
        evidence = (
            *self._signature_evidence(observation),
            f"this power pattern was seen in {format_count(signature.rounds, 'sample')}; not confirmed yet: "
            "there has been no step for "
            f"{step_rate.stalled_seconds:.0f} s, and the limit is {limit:.0f} s",
        )
        return self._finding(observation, signature.since, evidence, self._suspects, confirmed=False)

    def _by_endless_save(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker
    ) -> Finding | None:
        """Rank 0 alone idle for longer than a save may take, where neither a counter nor files can be read."""
        save = saves.blocking
        limit = max(saves.save_limit_seconds, DEFAULT_SAVE_LIMIT_SECONDS)
        if save is None or save.by_heartbeat or save.entry is not None or save.seconds <= limit:
            return None
        if step_rate.has_counter or self._working_rounds < MIN_WORKING_ROUNDS:
            return None
        evidence = (
            observation.verdict.why,
            f"this power pattern has lasted for {save.seconds:.0f} s, longer than the limit of {limit:.0f} s for a "
            "checkpoint save; the job's progress and its checkpoints cannot be read",
        )
        confirmed = save.seconds > NO_COUNTER_CONFIRM_FACTOR * limit
        since = observation.now - save.seconds
        return self._finding(observation, since, evidence, outlier_suspects(observation), confirmed=confirmed)

    def _by_endless_idle(self, observation: Observation) -> Finding | None:
        """At the floor in another pattern for much longer than a pause, where no counter can be read."""
        streak = self._other_pattern
        if streak.since is None or not streak.lasted(SUSPECT_ROUNDS, NO_COUNTER_CONFIRM_SECONDS):
            return None
        evidence = (
            observation.verdict.why,
            f"this power pattern has lasted for {streak.seconds:.0f} s; the job's progress cannot be read",
        )
        return self._finding(observation, streak.since, evidence, outlier_suspects(observation), confirmed=False)

    def _finding(
        self,
        observation: Observation,
        since: float,
        evidence: tuple[str, ...],
        suspects: tuple[Suspect, ...],
        *,
        confirmed: bool,
    ) -> Finding:
        if not suspects:
            # Errors before the last step did not stop the job: it went on after them. It hung within the next step.
            noticed_late = MAX_LOSS_NOTICE_INTERVALS * observation.spec.interval_seconds + self._usual_step_seconds
            damaged = [g for g in self._memory_errors if (g.memory_error_seconds or 0.0) >= since - noticed_late]
            suspects = tuple(gpu.suspect for gpu in damaged)
            evidence += tuple(
                next(fact for fact in gpu.evidence if "memory (ECC) error" in fact) for gpu in damaged[:MAX_LOST_LISTED]
            )
        who = ", ".join(str(suspect) for suspect in suspects)
        progress = observation.sample.progress
        step, total = progress.step, progress.total_steps
        where = "" if step is None else f" at step {step:,}" + ("" if total is None else f" of {total:,}")
        if step is not None and total is not None and step >= total:
            where = f" after its last step ({step:,})"
            evidence = (
                *evidence,
                f"all {total:,} steps are done: the run may be complete, but its processes do not exit",
            )
        check = observation.verdict.deciding_check
        if not confirmed and step is None and check is not None:
            evidence = (*evidence, f"to confirm: {check[0].lower()}{check[1:]}")
        kind = ALERT_KINDS[AlertName.JOB_HUNG]
        return Finding(
            job=observation.spec.name,
            alert=kind.name,
            severity=kind.severity if confirmed else Severity.WARNING,
            scope="",
            summary=f"{observation.spec.name} {'is hung' if confirmed else 'may be hung'}{where}: "
            + (f"suspect {who}." if who else _why_no_suspect(observation)),
            evidence=evidence,
            advice=kind.advice + (f" Investigate {who} first." if who else ""),
            since_seconds=since,
            confirmed=confirmed,
            suspects=suspects,
            gpus_idle=observation.sample.gpu_count,
        )


def _why_no_suspect(observation: Observation) -> str:
    sample = observation.sample
    if not sample.gpus:
        return "the GPUs of the job cannot be read, so the rank is unknown."
    number = len(sample.gpus)
    differs = "only 1 rank can be seen" if number == 1 else f"none of the {number} ranks differs from the others"
    return f"{differs} ({sample.extent})." if sample.extent else f"{differs}."
