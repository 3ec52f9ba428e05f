"""Learns what the boards of one job draw: with nobody on them, at rest with a context, and while its steps advance.

Only what is safe teaches. Samples wait until what follows proves them: those of a start-up until the board works,
those of a step's interval until the next step is counted. A hang, a save, an interval far longer than the job's steps
take, or a counter that is out of sight leaves them unproved, and they are thrown away.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from wattwatch.collectors.samples import GpuSample, NodeSample
from wattwatch.watcher.detection.baselines.baseline import (
    UNIDENTIFIED_GPU,
    Baseline,
    BaselineKind,
    BaselineTable,
    GpuId,
    JobBaseline,
    LearningPhase,
)
from wattwatch.watcher.detection.baselines.idle_learner import IdleLearner, SampleBatch
from wattwatch.watcher.detection.baselines.invalidation import BaselineInvalidator
from wattwatch.watcher.detection.baselines.plateau_learner import PlateauLearner
from wattwatch.watcher.detection.baselines.plausibility import find_job_baseline, implausible_reason
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, UserProfile, profile_for, user_profile_for
from wattwatch.watcher.detection.findings import STARVING_WAIT_MS
from wattwatch.watcher.detection.model import (
    MAX_GAP_INTERVALS,
    AlertName,
    Finding,
    JobSample,
    JobSpec,
    JobState,
    PowerState,
    RankGpu,
    UtilizationPattern,
    Verdict,
)

HARMLESS: Final = frozenset({AlertName.JOB_COMPLETED, AlertName.CHECKPOINT_OVERDUE, AlertName.LOSS_NOT_FINITE})
PAUSE_PHASES: Final = frozenset({"save", "eval", "done"})
LOAD_PHASE: Final = "load"
UNSURE_STATES: Final = frozenset({JobState.CHECKPOINTING, JobState.HUNG, JobState.CRASHED, JobState.COMPLETED})
KEPT_INTERVALS: Final = 20
# An interval this many times the usual one holds more than a step: for busy boards, and for boards at rest.
BUSY_FACTOR: Final = 6.0
REST_FACTOR: Final = 2.0
LEAST_INTERVALS: Final = 3
LONGEST_INTERVAL_SECONDS: Final = 900.0
# Tenths of the samples must lie this close together: a floor that scatters is none.
SPREAD_SHARE: Final = 0.15
SPREAD_WATTS: Final = 6.0
# Smaller differences from what is known are not worth a write.
SAME_SHARE: Final = 0.02
SAME_WATTS: Final = 2.0


class JobLearner:
    """Follows one job. All jobs of a watcher share the knowledge of boards."""

    def __init__(self, spec: JobSpec, knowledge: BaselineTable, profiles: Sequence[UserProfile] = ()) -> None:
        """`profiles`: the user's own, before the shipped ones."""
        self._spec = spec
        self._knowledge = knowledge
        self._profiles = tuple(profiles)
        self._changes = BaselineInvalidator(spec, knowledge)
        self._rests = IdleLearner(spec.interval_seconds)
        self._plateaus = PlateauLearner()
        self._readings: dict[str, int | None] = {}
        self._last_seconds: float | None = None
        self._step: int | None = None
        self._interval_seconds = 0.0  # since the step was last counted
        self._disturbed = True  # something in this interval makes it unlike others, or it began before we looked
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._base_of: tuple[str | None, float | None] | None = None
        self._base: PowerProfile | None = None
        self._learned_of: tuple[int, int, PowerProfile | None] | None = None
        self._learned: JobBaseline | None = None
        self.refused: dict[tuple[GpuId, BaselineKind], str] = {}  # why the last batch of a kind was no value

    def learned(self, sample: JobSample) -> JobBaseline | None:
        """What holds for the boards of this sample; None where nothing is learned of them."""
        base = self.base(sample)
        key = (self._knowledge.version, len(sample.gpus), base)
        if self._learned_of is None or self._learned_of[:2] != key[:2] or self._learned_of[2] is not base:
            self._learned_of = key
            self._learned = find_job_baseline(self._knowledge, self._spec.name, sample.gpus, base)
        return self._learned

    def base(self, sample: JobSample) -> PowerProfile:
        """The boards' profile at their limit, before anything was learned."""
        name = next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None)
        limits = [ranked.gpu.power_limit_watts for ranked in sample.gpus if ranked.gpu.power_limit_watts]
        limit = statistics.median(limits) if limits else None
        if self._base is None or self._base_of != (name, limit):
            own = user_profile_for(self._profiles, name)
            self._base = profile_for(name, limit) if own is None else own.scaled(limit)
            self._base_of = (name, limit)
        return self._base

    @property
    def power_limits_changed(self) -> bool:
        """Whether a power limit was another one in this look than in the one before."""
        return self._changes.power_limits_changed

    def update(
        self,
        sample: JobSample,
        verdict: Verdict,
        findings: Sequence[Finding],
        state: JobState,
        now: float,
        said: Mapping[str, NodeSample],
    ) -> None:
        """One look at the job, judged. `said`: the last word of its nodes, with the processes of others."""
        void = self._changes.update(sample, said, now)
        if void:
            self._rests.forget(void)
            self._plateaus.forget(void)
        seen = None if self._last_seconds is None else now - self._last_seconds
        self._last_seconds = now
        if seen is None or seen > MAX_GAP_INTERVALS * self._spec.interval_seconds:
            self._rests.forget()
            self._forget_interval()
        phases = {source.phase for source in sample.progress.sources if source.phase}
        calm = all(finding.alert in HARMLESS for finding in findings) and not phases & PAUSE_PHASES
        started = self._step is not None and bool(self._intervals)
        quiet = calm and state not in UNSURE_STATES and verdict.state is not PowerState.CHECKPOINT
        if not quiet or (started and (LOAD_PHASE in phases or void)):
            self._forget_interval()
        gpus = sample.gpus
        if verdict.pattern is not UtilizationPattern.ALL_BUSY or self._rests.starting:
            gpus = self._read_anew(sample)
            self._conclude(self._rests.update(gpus, _gpus_in_use(sample, said), now, quiet=quiet), sample)
            self._plateaus.another_run(self._rests.started)
        self._follow_steps(sample, seen or 0.0)
        if quiet and not self._disturbed and _is_working(verdict) and not _is_waiting_for_data(sample):
            self._plateaus.update(gpus, self.base(sample), now)

    def _read_anew(self, sample: JobSample) -> tuple[RankGpu, ...]:
        """Boards whose reading is not the one of the look before: a slow query's answer stands in several lines."""
        readings = {node.node: node.reading for node in sample.nodes}
        fresh = {node for node, reading in readings.items() if reading is None or reading != self._readings.get(node)}
        self._readings = readings
        return sample.gpus if len(fresh) == len(readings) else tuple(g for g in sample.gpus if g.node in fresh)

    def _follow_steps(self, sample: JobSample, seen: float) -> None:
        step, before = sample.progress.step, self._step
        self._interval_seconds += seen
        if step is None:
            self._forget_interval()  # out of sight: nobody knows when it moved
            return
        self._step = step
        if self._interval_seconds > LONGEST_INTERVAL_SECONDS:
            self._forget_interval()
        if before is None or step == before:
            return
        if step < before:
            self._intervals.clear()
            self._forget_interval()
            self._plateaus.another_run({(ranked.node, ranked.gpu.key) for ranked in sample.gpus})
        else:
            self._prove(sample)
        self._interval_seconds, self._disturbed = 0.0, False

    def _prove(self, sample: JobSample) -> None:
        """A step was counted: the interval before it was a usual one, or it was not."""
        interval = self._interval_seconds
        usual = statistics.median(self._intervals) if len(self._intervals) >= LEAST_INTERVALS else None
        usual = None if usual is None else max(usual, self._spec.interval_seconds)
        rested = not self._disturbed and usual is not None and interval <= REST_FACTOR * usual
        worked = not self._disturbed and (usual is None or interval <= BUSY_FACTOR * usual)
        if not self._disturbed:
            self._intervals.append(interval)
        self._conclude(self._rests.stepped(proved=rested), sample)
        self._conclude(self._plateaus.stepped(proved=worked), sample)

    def _forget_interval(self) -> None:
        self._disturbed = True
        self._plateaus.forget_interval()
        self._rests.forget_interval()

    def _conclude(self, batches: Iterable[SampleBatch], sample: JobSample) -> None:
        boards: dict[GpuId, GpuSample] | None = None
        for batch in batches:
            boards = boards or {(ranked.node, ranked.gpu.key): ranked.gpu for ranked in sample.gpus}
            gpu = boards.get(batch.board)
            if gpu is not None and gpu.key != UNIDENTIFIED_GPU:
                self._take(batch, gpu, sample)

    def _take(self, batch: SampleBatch, gpu: GpuSample, sample: JobSample) -> None:
        value = Baseline(
            *batch.board, batch.kind, self._spec.name, round(statistics.median(batch.watts), 1), len(batch.watts),
            batch.phase, sample.wall_seconds, gpu.name, gpu.power_limit_watts, gpu.energy_joules,
            next((node.driver_version for node in sample.nodes if node.node == batch.board[0]), None),
        )  # fmt: skip
        why = None if batch.kind is BaselineKind.PLATEAU else unsteady_reason(batch.watts)
        why = why or implausible_reason(value, self.base(sample), self._knowledge)
        if why is not None:
            self.refused[batch.board, batch.kind] = why
            return
        self.refused.pop((batch.board, batch.kind), None)
        known = self._knowledge.get(batch.board, batch.kind, self._spec.name)
        if known is None or (_is_better(value, known) and self._plateaus.may_replace(value, known)):
            self._knowledge.put(value)
        self._plateaus.replaced(value)


def unsteady_reason(watts: Sequence[float]) -> str | None:
    """Why these samples are no floor; None where nine tenths of them lie together."""
    tenths = statistics.quantiles(watts, n=10)
    if tenths[-1] - tenths[0] <= max(SPREAD_WATTS, SPREAD_SHARE * statistics.median(watts)):
        return None
    return f"power is not steady: {tenths[0]:.0f} to {tenths[-1]:.0f} W"


def _is_better(value: Baseline, known: Baseline) -> bool:
    """A start-up tells more surely than pauses between steps; what hardly differs is not written again."""
    if value.phase is LearningPhase.BETWEEN_STEPS and known.phase is LearningPhase.START_UP:
        return False
    return abs(value.watts - known.watts) > max(SAME_WATTS, SAME_SHARE * known.watts)


def _is_working(verdict: Verdict) -> bool:
    """All ranks work, and evenly: scatter is starvation, and one rank at the power of two holds up the rest."""
    return (
        verdict.state in (PowerState.COMPUTE, PowerState.COMMUNICATION)
        and verdict.pattern is UtilizationPattern.ALL_BUSY
        and not verdict.at_floor
    )


def _is_waiting_for_data(sample: JobSample) -> bool:
    """Ranks say that they wait for data."""
    return any((source.data_wait_ms or 0.0) >= STARVING_WAIT_MS for source in sample.progress.sources)


def _gpus_in_use(sample: JobSample, said: Mapping[str, NodeSample]) -> frozenset[tuple[str, int | None]]:
    """(node, index) of boards that any process holds, of this job or another."""
    heard = {node.node: (said[node.node].processes if node.node in said else node.processes) for node in sample.nodes}
    return frozenset(
        (node, index)
        for node, processes in heard.items()
        for process in processes or ()
        for index in process.gpu_indexes
    )
