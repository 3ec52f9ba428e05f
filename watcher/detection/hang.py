"""Does the job hang? The step counter decides; the picture suspects, within two rounds, and says who.

Two ways in. (1) The counter stands for longer than the job's own stall limit: confirmed. (2) The power and utilisation
signature of a deadlock on two rounds, after the job was seen to work: said at once as a suspicion, confirmed when the
counter agrees. Without a readable counter the signature must last: hang shapes other than rank 0 alone never lasted
10 s in 13.9 h of healthy public logs.
"""

from __future__ import annotations

import math
from typing import Final

from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, PowerState, Severity, Suspect, UtilizationPattern
from wattwatch.watcher.detection.trackers.checkpoint_save import DEFAULT_SAVE_LIMIT_SECONDS, CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.observation import HangHistory, Observation, Streak, outlier_suspects
from wattwatch.watcher.detection.trackers.step_rate import MIN_STALL_SECONDS, StepRateTracker
from wattwatch.watcher.detection.trackers.step_timeout import (
    WORKING_STATES,
    is_evaluating,
    may_be_working,
    step_timeout,
)

SUSPECT_ROUNDS: Final = 2
# Without a readable counter.
NO_COUNTER_SUSPECT_SECONDS: Final = 60.0
NO_COUNTER_CONFIRM_SECONDS: Final = 300.0
NO_COUNTER_CONFIRM_FACTOR: Final = 3.0
# Steps that end a signature refute it: the next one must last this many times as long before it is told.
FALSE_ALARM_FACTOR: Final = 3.0
# How far above the floor the boards must have been for the job to count as one that worked.
MIN_WORKING_ROUNDS: Final = 3
# Steady work varies by a few per cent from one mean to the next.
POWER_DROP_SHARE: Final = 0.85
# A picture of rank 0 alone low for a moment is no save.
MIN_SAVE_SECONDS: Final = 3.0
# A signature that flickers off for one round is still there.
SIGNATURE_LOST_ROUNDS: Final = 2
DEADLOCK_PATTERNS: Final = frozenset({UtilizationPattern.ALL_BUSY, UtilizationPattern.ONE_LOW_REST_BUSY})
OTHER_STALL_PATTERNS: Final = frozenset(
    {UtilizationPattern.TWO_GROUPS, UtilizationPattern.ONE_BUSY_REST_LOW, UtilizationPattern.SCATTER}
)
EXCUSED_PHASES: Final = frozenset({"save", "load", "done"})


class HangDetector:
    """Follows one job's suspicion and its confirmation."""

    def __init__(self) -> None:
        self._signature = Streak()
        self._shape = UtilizationPattern.UNKNOWN  # of the signature
        self._doubts = 0  # its looks on which the picture itself allows for light work or a save
        self._demand_seconds: dict[
            UtilizationPattern, float
        ] = {}  # by shape: what healthy work of this job looked like
        self._away = Streak()
        self._at_rest = Streak()  # at the floor in another shape, where no counter can tell
        self._rest_seconds = self._longest_rest_seconds = 0.0  # all ranks low since the last step; the most that ended
        self._worked = 0
        self._last_fraction: float | None = None
        self._suspects: tuple[Suspect, ...] = ()
        self._picture = ""
        self._told: Finding | None = None  # at the look before
        self._since_pause_seconds = math.inf  # since the job saved, evaluated or loaded; inf: never seen to
        self._since_work_seconds = math.inf
        self._works_before = False
        self._worked_since_save = True

    def clear(self) -> None:
        self._signature.clear()
        self._demand_seconds.clear()
        self._away.clear()
        self._at_rest.clear()
        self._rest_seconds = 0.0
        self._worked = 0
        self._suspects = ()
        self._told = None
        self._since_pause_seconds = self._since_work_seconds = math.inf
        self._works_before, self._worked_since_save = False, True

    def history(self) -> HangHistory:
        return HangHistory(self._longest_rest_seconds, dict(self._demand_seconds), self._worked)

    def restore_history(self, history: HangHistory) -> None:
        """What was learned before the first look."""
        self._longest_rest_seconds, self._worked = history.longest_rest_seconds, history.worked_rounds
        self._demand_seconds.update(history.demand_seconds)

    def update(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        *,
        suppressed: bool,
        few_processes_compute: bool = False,
    ) -> Finding | None:
        """`suppressed`: a process is missing, so what the others do is its consequence. `few_compute`: few of the
        job's processes use a core."""
        works = observation.verdict.state in WORKING_STATES and not observation.verdict.at_floor
        self._worked += works
        self._follow_excuses(observation, step_rate, saves, works)
        self._follow_signature(observation, step_rate, saves, suppressed)
        self._follow_rest(observation, step_rate, saves, suppressed)
        self._last_fraction = observation.verdict.power_fraction
        found = (
            self._by_counter(observation, step_rate, saves, few_processes_compute)
            or self._by_signature(observation, step_rate)
            or self._by_endless_save(observation, step_rate, saves)
            or self._by_endless_rest(observation)
        )
        proof = self._proof(observation, step_rate, works)
        if proof is not None and not (found and found.confirmed):
            found = proof
        self._told = None if suppressed else found
        return self._told

    def _proof(self, observation: Observation, step_rate: StepRateTracker, works: bool) -> Finding | None:
        """The confirmed hang of the look before, as long as nothing contradicts it: a picture that flickers moves no
        counter, and a counter that is out of sight is no sign that it is over."""
        if self._told is None or not self._told.confirmed or not step_rate.known:
            return None
        if step_rate.stalled_seconds is None:
            return None if works else self._told
        is_late = step_rate.stalled_seconds > 0 and not step_rate.pausing and observation.alive is not False
        return self._told if is_late else None

    def _follow_excuses(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker, works: bool
    ) -> None:
        """What takes its time is no stall, and the time it took is none afterwards either: a save of two minutes, an
        evaluation at full power. After a save the picture proves nothing until the job was seen to work again."""
        self._since_pause_seconds = (
            0.0 if step_rate.pausing else self._since_pause_seconds + observation.observed_seconds
        )
        working = works and self._works_before
        self._since_work_seconds = 0.0 if working else self._since_work_seconds + observation.observed_seconds
        self._works_before = works
        if saves.blocking is not None and saves.blocking.seconds >= MIN_SAVE_SECONDS:
            self._worked_since_save = False
        elif works:
            self._worked_since_save = True

    def _follow_signature(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker, suppressed: bool
    ) -> None:
        # A step that was just counted outweighs the picture; one that was counted a while ago does not.
        advanced = step_rate.stalled_seconds == 0.0
        shaped = (
            observation.verdict.pattern in DEADLOCK_PATTERNS
            and not advanced
            and observation.sample.complete
            and self._worked >= MIN_WORKING_ROUNDS
            and saves.blocking is None
            and self._worked_since_save
            and not EXCUSED_PHASES & observation.phases
            and not is_evaluating(observation)
            and not suppressed
        )
        if shaped and observation.verdict.at_floor:
            self._away.clear()
            self._doubts = 0 if self._signature.since is None else self._doubts
            self._signature.update(True, observation)
            self._doubts += observation.verdict.state is not PowerState.HANG
            self._suspects, self._picture, self._shape = (
                observation.verdict.suspects,
                observation.verdict.why,
                observation.verdict.pattern,
            )
            return
        if shaped and self._falls(observation):
            self._signature.clear()
            self._signature.update(True, observation)
            return
        if self._signature.since is None:
            return
        if not (observation.sample.complete or advanced or observation.gap):
            return  # half a picture neither holds a suspicion nor withdraws it
        self._away.update(True, observation)
        if observation.gap or advanced or self._away.rounds >= SIGNATURE_LOST_ROUNDS:
            if self._signature.rounds >= SUSPECT_ROUNDS and (advanced or self._works_before):
                needed = FALSE_ALARM_FACTOR * self._signature.seconds
                self._demand_seconds[self._shape] = max(needed, self._demand_seconds.get(self._shape, 0.0))
            self._signature.clear()
            self._away.clear()
            self._suspects = ()

    def _follow_rest(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker, suppressed: bool
    ) -> None:
        """Pictures that are no signature. All ranks at rest is a pause of any length, where no counter can tell; two
        groups, or one that waits for all others, are none."""
        if step_rate.stalled_seconds == 0.0:
            self._longest_rest_seconds = max(self._longest_rest_seconds, self._rest_seconds)
            self._rest_seconds = 0.0
        elif observation.verdict.pattern is UtilizationPattern.ALL_LOW:
            self._rest_seconds += observation.observed_seconds
        blind = (
            not step_rate.known
            and self._worked >= MIN_WORKING_ROUNDS
            and observation.sample.complete
            and observation.alive is not False
        )
        other = (
            observation.verdict.at_floor
            and observation.verdict.pattern in OTHER_STALL_PATTERNS
            and saves.blocking is None
        )
        self._at_rest.update(
            blind and other and not suppressed and not observation.phases & EXCUSED_PHASES, observation
        )

    def _falls(self, observation: Observation) -> bool:
        """Power fell within this very round. Watts are means over an interval: the one in which a job stops reads
        between the plateau and the floor, and is the first of the two samples that show it."""
        before, now = self._last_fraction, observation.verdict.power_fraction
        return before is not None and now is not None and now <= POWER_DROP_SHARE * before

    def _by_counter(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        few_processes_compute: bool,
    ) -> Finding | None:
        """The counter stands too long, the processes live, and nothing that takes its time is going on."""
        stalled = step_rate.stalled_seconds
        if stalled is None or observation.alive is False or (saves.blocking and saves.is_within_limit):
            return None
        late = not step_rate.start_observed and observation.verdict.state is PowerState.HANG and observation.alive
        # Not one step seen: the first may compile. Or the watcher came late, to a log of a run that has ended; late to
        # a hang it is only where the picture says so.
        first_step = step_rate.advances == 0 and not late
        if first_step and not observation.alive:
            return None
        working = may_be_working(observation)
        if not step_rate.pausing:
            stalled = min(stalled, self._since_pause_seconds)
        patience = step_timeout(
            observation,
            step_rate,
            saves,
            first_step=first_step,
            rest_seconds=self._longest_rest_seconds,
            few_processes_compute=few_processes_compute,
        )
        limit = patience.suspect_seconds
        # Boards that worked a moment ago have not stopped for long; they may have worked on a step that never ended.
        at_rest = min(MIN_STALL_SECONDS, limit) - (step_rate.usual_interval_seconds or 0.0)
        if stalled <= limit or (not working and self._since_work_seconds < at_rest):
            return None
        confirmed = stalled > patience.confirm_seconds
        step = observation.sample.progress.step
        usual = step_rate.usual_interval_seconds or observation.sample.progress.line_interval_seconds
        pace_words = f"; a step usually shows every {usual:.1f} s" if usual is not None else ""
        evidence = [
            f"step {step:,} stands for {stalled:.0f} s, longer than the limit of "
            f"{patience.confirm_seconds if confirmed else limit:.0f} s{pace_words}",
            self._picture if self._suspects or self._signature.since is not None else observation.verdict.why,
        ]
        if not confirmed:
            evidence.append(
                f"a save by all ranks or an evaluation may look the same: a hang after {patience.confirm_seconds:.0f} s"
            )
        suspects = self._suspects or outlier_suspects(observation)
        since = observation.now - stalled + (usual or 0.0)
        return self._finding(observation, since, tuple(evidence), suspects, confirmed=confirmed)

    def _by_signature(self, observation: Observation, step_rate: StepRateTracker) -> Finding | None:
        signature = self._signature
        if signature.since is None or signature.rounds < SUSPECT_ROUNDS:
            return None
        if signature.seconds < self._demand_seconds.get(self._shape, 0.0):
            return None
        if step_rate.stalled_seconds is None:
            if signature.seconds < NO_COUNTER_SUSPECT_SECONDS:
                return None
            evidence = (self._picture, f"for {signature.seconds:.0f} s; the job's progress cannot be read")
            limit = NO_COUNTER_CONFIRM_SECONDS
            if 2 * self._doubts > signature.rounds:  # it may be a save, which ends, or a poor link, which need not
                low = self._shape is UtilizationPattern.ONE_LOW_REST_BUSY
                limit = NO_COUNTER_CONFIRM_FACTOR * DEFAULT_SAVE_LIMIT_SECONDS if low else math.inf
            confirmed = signature.seconds >= limit
            return self._finding(observation, signature.since, evidence, self._suspects, confirmed=confirmed)
        evidence = (
            self._picture,
            f"on {signature.rounds} rounds of samples; not confirmed yet: the step counter stands for "
            f"{step_rate.stalled_seconds:.0f} s, the limit is {step_rate.limit_seconds(observation):.0f} s",
        )
        return self._finding(observation, signature.since, evidence, self._suspects, confirmed=False)

    def _by_endless_save(
        self, observation: Observation, step_rate: StepRateTracker, saves: CheckpointSaveTracker
    ) -> Finding | None:
        """Rank 0 alone low for longer than a save may take, where neither a counter nor files can tell."""
        save = saves.blocking
        limit = max(saves.limit_seconds, DEFAULT_SAVE_LIMIT_SECONDS)
        if save is None or save.by_heartbeat or save.entry is not None or save.seconds <= limit:
            return None
        if step_rate.known or self._worked < MIN_WORKING_ROUNDS:
            return None
        evidence = (
            observation.verdict.why,
            f"for {save.seconds:.0f} s, longer than the {limit:.0f} s that a save may take; neither the "
            "job's progress nor its checkpoints can be read",
        )
        confirmed = save.seconds > NO_COUNTER_CONFIRM_FACTOR * limit
        return self._finding(
            observation, observation.now - save.seconds, evidence, outlier_suspects(observation), confirmed=confirmed
        )

    def _by_endless_rest(self, observation: Observation) -> Finding | None:
        """At the floor in a shape that is no signature for much longer than a pause, where no counter can tell."""
        rest = self._at_rest
        if rest.since is None or not rest.lasted(SUSPECT_ROUNDS, NO_COUNTER_CONFIRM_SECONDS):
            return None
        evidence = (observation.verdict.why, f"for {rest.seconds:.0f} s; the job's progress cannot be read")
        return self._finding(observation, rest.since, evidence, outlier_suspects(observation), confirmed=False)

    def _finding(
        self,
        observation: Observation,
        since: float,
        evidence: tuple[str, ...],
        suspects: tuple[Suspect, ...],
        *,
        confirmed: bool,
    ) -> Finding:
        boards = observation.sample.expected_gpus or len(observation.sample.gpus)
        who = ", ".join(str(suspect) for suspect in suspects) or "nobody stands out"
        step, total = observation.sample.progress.step, observation.sample.progress.total_steps
        where = "" if step is None else f" at step {step:,}" + _of_total(total)
        if step is not None and total is not None and step >= total:
            where = f" after its last step, {step:,}"
            evidence = (*evidence, "all steps are done: the run may be complete, and its processes do not leave")
        if not confirmed and step is None and observation.verdict.deciding_check is not None:
            evidence = (*evidence, f"what would settle it: {observation.verdict.deciding_check}")
        return Finding(
            job=observation.spec.name,
            alert=AlertName.JOB_HUNG,
            severity=ALERT_KINDS[AlertName.JOB_HUNG].severity if confirmed else Severity.WARNING,
            scope="",
            summary=f"{observation.spec.name} {'hangs' if confirmed else 'may hang'}{where}: {who}.",
            evidence=evidence,
            advice="Leave the job as it is for a moment: `wattwatch serve` collects its flight records and stacks by "
            "itself, unless its configuration says `capture = false`; then collect them before the watchdog or anybody "
            "ends the job. After that restart from the last checkpoint."
            + (f" Look first at {who}." if suspects else ""),
            since_seconds=since,
            confirmed=confirmed,
            suspects=suspects,
            gpus_idle=boards,
        )


def _of_total(total: int | None) -> str:
    return "" if total is None else f" of {total:,}"
