"""Does the job hang? The step counter decides; the picture suspects, within two rounds, and says who.

Two ways in. (1) The counter stands for longer than the job's own stall limit: confirmed. (2) The power and utilisation
signature of a deadlock on two rounds, after the job was seen to work: said at once as a suspicion, confirmed when the
counter agrees. Without a readable counter the signature must last: hang shapes other than rank 0 alone never lasted
10 s in 13.9 h of healthy public logs.
"""

from __future__ import annotations

import math
from typing import Final

from wattwatch.watcher.detection.model import (
    DEFAULT_SEVERITY,
    AlertName,
    Finding,
    PowerState,
    Severity,
    Suspect,
    UtilizationPattern,
)
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

    def habits(self) -> HangHistory:
        return HangHistory(self._longest_rest_seconds, dict(self._demand_seconds), self._worked)

    def restore_history(self, habits: HangHistory) -> None:
        """What was learned before the first look."""
        self._longest_rest_seconds, self._worked = habits.longest_rest_seconds, habits.worked_rounds
        self._demand_seconds.update(habits.demand_seconds)

    def look(
        self,
        look: Observation,
        pace: StepRateTracker,
        saving: CheckpointSaveTracker,
        *,
        suppressed: bool,
        few_compute: bool = False,
    ) -> Finding | None:
        """`suppressed`: a process is missing, so what the others do is its consequence. `few_compute`: few of the
        job's processes use a core."""
        works = look.verdict.state in WORKING_STATES and not look.verdict.at_floor
        self._worked += works
        self._follow_excuses(look, pace, saving, works)
        self._follow_signature(look, pace, saving, suppressed)
        self._follow_rest(look, pace, saving, suppressed)
        self._last_fraction = look.verdict.power_fraction
        found = (
            self._by_counter(look, pace, saving, few_compute)
            or self._by_signature(look, pace)
            or self._by_endless_save(look, pace, saving)
            or self._by_endless_rest(look)
        )
        proof = self._proof(look, pace, works)
        if proof is not None and not (found and found.confirmed):
            found = proof
        self._told = None if suppressed else found
        return self._told

    def _proof(self, look: Observation, pace: StepRateTracker, works: bool) -> Finding | None:
        """The confirmed hang of the look before, as long as nothing contradicts it: a picture that flickers moves no
        counter, and a counter that is out of sight is no sign that it is over."""
        if self._told is None or not self._told.confirmed or not pace.known:
            return None
        if pace.stalled_seconds is None:
            return None if works else self._told
        stands = pace.stalled_seconds > 0 and not pace.pausing and look.alive is not False
        return self._told if stands else None

    def _follow_excuses(
        self, look: Observation, pace: StepRateTracker, saving: CheckpointSaveTracker, works: bool
    ) -> None:
        """What takes its time is no stall, and the time it took is none afterwards either: a save of two minutes, an
        evaluation at full power. After a save the picture proves nothing until the job was seen to work again."""
        self._since_pause_seconds = 0.0 if pace.pausing else self._since_pause_seconds + look.seen_seconds
        working = works and self._works_before
        self._since_work_seconds = 0.0 if working else self._since_work_seconds + look.seen_seconds
        self._works_before = works
        if saving.blocks is not None and saving.blocks.seconds >= MIN_SAVE_SECONDS:
            self._worked_since_save = False
        elif works:
            self._worked_since_save = True

    def _follow_signature(
        self, look: Observation, pace: StepRateTracker, saving: CheckpointSaveTracker, suppressed: bool
    ) -> None:
        # A step that was just counted outweighs the picture; one that was counted a while ago does not.
        advanced = pace.stalled_seconds == 0.0
        shaped = (
            look.verdict.shape in DEADLOCK_PATTERNS
            and not advanced
            and look.sample.complete
            and self._worked >= MIN_WORKING_ROUNDS
            and saving.blocks is None
            and self._worked_since_save
            and not EXCUSED_PHASES & look.phases
            and not is_evaluating(look)
            and not suppressed
        )
        if shaped and look.verdict.at_floor:
            self._away.clear()
            self._doubts = 0 if self._signature.since is None else self._doubts
            self._signature.look(True, look)
            self._doubts += look.verdict.state is not PowerState.HANG
            self._suspects, self._picture, self._shape = look.verdict.suspects, look.verdict.why, look.verdict.shape
            return
        if shaped and self._falls(look):
            self._signature.clear()
            self._signature.look(True, look)
            return
        if self._signature.since is None:
            return
        if not (look.sample.complete or advanced or look.gap):
            return  # half a picture neither holds a suspicion nor withdraws it
        self._away.look(True, look)
        if look.gap or advanced or self._away.rounds >= SIGNATURE_LOST_ROUNDS:
            if self._signature.rounds >= SUSPECT_ROUNDS and (advanced or self._works_before):
                needed = FALSE_ALARM_FACTOR * self._signature.seconds
                self._demand_seconds[self._shape] = max(needed, self._demand_seconds.get(self._shape, 0.0))
            self._signature.clear()
            self._away.clear()
            self._suspects = ()

    def _follow_rest(
        self, look: Observation, pace: StepRateTracker, saving: CheckpointSaveTracker, suppressed: bool
    ) -> None:
        """Pictures that are no signature. All ranks at rest is a pause of any length, where no counter can tell; two
        groups, or one that waits for all others, are none."""
        if pace.stalled_seconds == 0.0:
            self._longest_rest_seconds = max(self._longest_rest_seconds, self._rest_seconds)
            self._rest_seconds = 0.0
        elif look.verdict.shape is UtilizationPattern.ALL_LOW:
            self._rest_seconds += look.seen_seconds
        blind = (
            not pace.known and self._worked >= MIN_WORKING_ROUNDS and look.sample.complete and look.alive is not False
        )
        other = look.verdict.at_floor and look.verdict.shape in OTHER_STALL_PATTERNS and saving.blocks is None
        self._at_rest.look(blind and other and not suppressed and not look.phases & EXCUSED_PHASES, look)

    def _falls(self, look: Observation) -> bool:
        """Power fell within this very round. Watts are means over an interval: the one in which a job stops reads
        between the plateau and the floor, and is the first of the two samples that show it."""
        before, now = self._last_fraction, look.verdict.power_fraction
        return before is not None and now is not None and now <= POWER_DROP_SHARE * before

    def _by_counter(
        self, look: Observation, pace: StepRateTracker, saving: CheckpointSaveTracker, few_compute: bool
    ) -> Finding | None:
        """The counter stands too long, the processes live, and nothing that takes its time is going on."""
        stalled = pace.stalled_seconds
        if stalled is None or look.alive is False or (saving.blocks and saving.within_limit):
            return None
        late = not pace.start_seen and look.verdict.state is PowerState.HANG and look.alive
        # Not one step seen: the first may compile. Or the watcher came late, to a log of a run that has ended; late to
        # a hang it is only where the picture says so.
        first_step = pace.advances == 0 and not late
        if first_step and not look.alive:
            return None
        working = may_be_working(look)
        if not pace.pausing:
            stalled = min(stalled, self._since_pause_seconds)
        patience = step_timeout(
            look, pace, saving, first_step=first_step, rest_seconds=self._longest_rest_seconds, few_compute=few_compute
        )
        limit = patience.suspect_seconds
        # Boards that worked a moment ago have not stopped for long; they may have worked on a step that never ended.
        at_rest = min(MIN_STALL_SECONDS, limit) - (pace.usual_seconds or 0.0)
        if stalled <= limit or (not working and self._since_work_seconds < at_rest):
            return None
        confirmed = stalled > patience.confirm_seconds
        step = look.sample.progress.step
        usual = pace.usual_seconds or look.sample.progress.line_interval_seconds
        pace_words = f"; a step usually shows every {usual:.1f} s" if usual is not None else ""
        evidence = [
            f"step {step:,} stands for {stalled:.0f} s, longer than the limit of "
            f"{patience.confirm_seconds if confirmed else limit:.0f} s{pace_words}",
            self._picture if self._suspects or self._signature.since is not None else look.verdict.why,
        ]
        if not confirmed:
            evidence.append(
                f"a save by all ranks or an evaluation may look the same: a hang after {patience.confirm_seconds:.0f} s"
            )
        suspects = self._suspects or outlier_suspects(look)
        since = look.now - stalled + (usual or 0.0)
        return self._finding(look, since, tuple(evidence), suspects, confirmed=confirmed)

    def _by_signature(self, look: Observation, pace: StepRateTracker) -> Finding | None:
        signature = self._signature
        if signature.since is None or signature.rounds < SUSPECT_ROUNDS:
            return None
        if signature.seconds < self._demand_seconds.get(self._shape, 0.0):
            return None
        if pace.stalled_seconds is None:
            if signature.seconds < NO_COUNTER_SUSPECT_SECONDS:
                return None
            evidence = (self._picture, f"for {signature.seconds:.0f} s; the job's progress cannot be read")
            limit = NO_COUNTER_CONFIRM_SECONDS
            if 2 * self._doubts > signature.rounds:  # it may be a save, which ends, or a poor link, which need not
                low = self._shape is UtilizationPattern.ONE_LOW_REST_BUSY
                limit = NO_COUNTER_CONFIRM_FACTOR * DEFAULT_SAVE_LIMIT_SECONDS if low else math.inf
            confirmed = signature.seconds >= limit
            return self._finding(look, signature.since, evidence, self._suspects, confirmed=confirmed)
        evidence = (
            self._picture,
            f"on {signature.rounds} rounds of samples; not confirmed yet: the step counter stands for "
            f"{pace.stalled_seconds:.0f} s, the limit is {pace.limit_seconds(look):.0f} s",
        )
        return self._finding(look, signature.since, evidence, self._suspects, confirmed=False)

    def _by_endless_save(
        self, look: Observation, pace: StepRateTracker, saving: CheckpointSaveTracker
    ) -> Finding | None:
        """Rank 0 alone low for longer than a save may take, where neither a counter nor files can tell."""
        save = saving.blocks
        limit = max(saving.limit_seconds, DEFAULT_SAVE_LIMIT_SECONDS)
        if save is None or save.by_heartbeat or save.entry is not None or save.seconds <= limit:
            return None
        if pace.known or self._worked < MIN_WORKING_ROUNDS:
            return None
        evidence = (
            look.verdict.why,
            f"for {save.seconds:.0f} s, longer than the {limit:.0f} s that a save may take; neither the "
            "job's progress nor its checkpoints can be read",
        )
        confirmed = save.seconds > NO_COUNTER_CONFIRM_FACTOR * limit
        return self._finding(look, look.now - save.seconds, evidence, outlier_suspects(look), confirmed=confirmed)

    def _by_endless_rest(self, look: Observation) -> Finding | None:
        """At the floor in a shape that is no signature for much longer than a pause, where no counter can tell."""
        rest = self._at_rest
        if rest.since is None or not rest.for_at_least(SUSPECT_ROUNDS, NO_COUNTER_CONFIRM_SECONDS):
            return None
        evidence = (look.verdict.why, f"for {rest.seconds:.0f} s; the job's progress cannot be read")
        return self._finding(look, rest.since, evidence, outlier_suspects(look), confirmed=False)

    def _finding(
        self,
        look: Observation,
        since: float,
        evidence: tuple[str, ...],
        suspects: tuple[Suspect, ...],
        *,
        confirmed: bool,
    ) -> Finding:
        boards = look.sample.expected_gpus or len(look.sample.gpus)
        who = ", ".join(str(suspect) for suspect in suspects) or "nobody stands out"
        step, total = look.sample.progress.step, look.sample.progress.total_steps
        where = "" if step is None else f" at step {step:,}" + _of_total(total)
        if step is not None and total is not None and step >= total:
            where = f" after its last step, {step:,}"
            evidence = (*evidence, "all steps are done: the run may be complete, and its processes do not leave")
        if not confirmed and step is None and look.verdict.settle is not None:
            evidence = (*evidence, f"what would settle it: {look.verdict.settle}")
        return Finding(
            job=look.spec.name,
            alert=AlertName.JOB_HUNG,
            severity=DEFAULT_SEVERITY[AlertName.JOB_HUNG] if confirmed else Severity.WARNING,
            scope="",
            summary=f"{look.spec.name} {'hangs' if confirmed else 'may hang'}{where}: {who}.",
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
