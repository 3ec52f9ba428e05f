"""Learns what the GPUs of one job draw: without a process, idle with a context, and while its steps advance.

Only what is safe is learned. Samples wait until later events prove them: those of a start-up until the GPU works,
those of an interval between steps until the next step is counted. A hang, a save, an interval far longer than the
job's steps, or an unreadable step counter leaves them unproved, and they are dropped. Never learned: values that vary
too much, that are implausible for the model, or that leave no gap between floor and plateau.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from wattwatch.collectors.samples import GpuSample, NodeSample
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.baselines.baseline import (
    UNIDENTIFIED_GPU,
    Baseline,
    BaselineKind,
    BaselineTable,
    GpuId,
    JobBaseline,
    LearningPhase,
    find_job_baseline,
    implausible_reason,
)
from wattwatch.watcher.detection.baselines.idle_learner import IdleLearner, SampleBatch
from wattwatch.watcher.detection.baselines.invalidation import BaselineInvalidator
from wattwatch.watcher.detection.baselines.plateau_learner import PlateauLearner
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, UserProfile, profile_for, user_profile_for
from wattwatch.watcher.detection.model import (
    MAX_GAP_INTERVALS,
    MIN_DATA_WAIT_MS,
    Finding,
    JobSample,
    JobSpec,
    JobState,
    PowerState,
    RankGpu,
    UtilizationPattern,
    Verdict,
)

PAUSE_PHASES: Final = frozenset({"save", "eval", "done"})
LOAD_PHASE: Final = "load"
UNSURE_STATES: Final = frozenset({JobState.CHECKPOINTING, JobState.HUNG, JobState.CRASHED, JobState.COMPLETED})
KEPT_INTERVALS: Final = 20
# An interval longer than this many usual ones contains more than a step. Idle GPUs must be stricter: a pause looks like
# the time between two steps.
BUSY_FACTOR: Final = 6.0
REST_FACTOR: Final = 2.0
MIN_INTERVALS: Final = 3
LONGEST_INTERVAL_SECONDS: Final = 900.0
# The samples between the first and last decile must lie this close together: a floor that varies is none.
SPREAD_SHARE: Final = 0.15
SPREAD_WATTS: Final = 6.0
# Smaller differences from the known value are not worth writing.
SAME_SHARE: Final = 0.02
SAME_WATTS: Final = 2.0


class JobLearner:
    """Follows one job. All jobs of a watcher share one table of baselines."""

    def __init__(self, spec: JobSpec, table: BaselineTable, profiles: Sequence[UserProfile] = ()) -> None:
        """`profiles`: the user's own, used before the shipped ones."""
        self._spec = spec
        self._table = table
        self._profiles = tuple(profiles)
        self._invalidator = BaselineInvalidator(spec, table)
        self._idle = IdleLearner(spec.interval_seconds)
        self._plateaus = PlateauLearner()
        self._readings: dict[str, int | None] = {}
        self._last_seconds: float | None = None
        self._step: int | None = None
        self._interval_seconds = 0.0  # since a step was last counted
        self._disturbed = True  # this interval is unlike others, or began before the watcher started
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._base_for: tuple[str | None, float | None] | None = None
        self._base: PowerProfile | None = None
        self._learned_for: tuple[int, int, PowerProfile | None] | None = None
        self._learned: JobBaseline | None = None
        self.rejected: dict[tuple[GpuId, BaselineKind], str] = {}  # why the last batch of a kind gave no value

    def learned(self, sample: JobSample) -> JobBaseline | None:
        """What was learned about the GPUs of this sample; None: nothing."""
        base = self.base(sample)
        key = (self._table.version, len(sample.gpus), base)
        if self._learned_for is None or self._learned_for[:2] != key[:2] or self._learned_for[2] is not base:
            self._learned_for = key
            self._learned = find_job_baseline(self._table, self._spec.name, sample.gpus, base)
        return self._learned

    def base(self, sample: JobSample) -> PowerProfile:
        """The GPUs' profile at their power limit, before anything was learned."""
        name = next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None)
        limits = [ranked.gpu.power_limit_watts for ranked in sample.gpus if ranked.gpu.power_limit_watts]
        limit = statistics.median(limits) if limits else None
        if self._base is None or self._base_for != (name, limit):
            own = user_profile_for(self._profiles, name)
            self._base = profile_for(name, limit) if own is None else own.scaled(limit)
            self._base_for = (name, limit)
        return self._base

    @property
    def power_limits_changed(self) -> bool:
        """A power limit differs from the previous update."""
        return self._invalidator.power_limits_changed

    def update(
        self,
        sample: JobSample,
        verdict: Verdict,
        findings: Sequence[Finding],
        state: JobState,
        now: float,
        latest: Mapping[str, NodeSample],
    ) -> None:
        """Learn from one evaluated sample. `latest`: the last sample of each node, with the processes of other jobs."""
        invalid = self._invalidator.update(sample, latest, now)
        if invalid:
            self._idle.discard(invalid)
            self._plateaus.discard(invalid)
        elapsed = None if self._last_seconds is None else now - self._last_seconds
        self._last_seconds = now
        if elapsed is None or elapsed > MAX_GAP_INTERVALS * self._spec.interval_seconds:
            self._idle.discard()
            self._discard_interval()
        phases = {source.phase for source in sample.progress.sources if source.phase}
        calm = all(ALERT_KINDS[finding.alert].allows_learning for finding in findings) and not phases & PAUSE_PHASES
        started = self._step is not None and bool(self._intervals)
        quiet = calm and state not in UNSURE_STATES and verdict.state is not PowerState.CHECKPOINT
        if not quiet or (started and (LOAD_PHASE in phases or invalid)):
            self._discard_interval()
        gpus = sample.gpus
        if verdict.pattern is not UtilizationPattern.ALL_BUSY or self._idle.starting:
            gpus = self._queried_anew(sample)
            self._take_batches(self._idle.update(gpus, _gpus_in_use(sample, latest), now, quiet=quiet), sample)
            self._plateaus.begin_new_run(self._idle.started)
        self._follow_steps(sample, elapsed or 0.0)
        if quiet and not self._disturbed and _is_working(verdict) and not _is_waiting_for_data(sample):
            self._plateaus.update(gpus, self.base(sample), now)

    def _queried_anew(self, sample: JobSample) -> tuple[RankGpu, ...]:
        """GPUs that were queried since the last update: a slow query repeats its answer in several lines."""
        readings = {node.node: node.reading for node in sample.nodes}
        fresh = {node for node, reading in readings.items() if reading is None or reading != self._readings.get(node)}
        self._readings = readings
        return sample.gpus if len(fresh) == len(readings) else tuple(g for g in sample.gpus if g.node in fresh)

    def _follow_steps(self, sample: JobSample, elapsed: float) -> None:
        step, before = sample.progress.step, self._step
        self._interval_seconds += elapsed
        if step is None:
            self._discard_interval()  # the counter cannot be read, so it is unknown when it changes
            return
        self._step = step
        if self._interval_seconds > LONGEST_INTERVAL_SECONDS:
            self._discard_interval()
        if before is None or step == before:
            return
        if step < before:
            self._intervals.clear()
            self._discard_interval()
            self._plateaus.begin_new_run({(ranked.node, ranked.gpu.key) for ranked in sample.gpus})
        else:
            self._end_interval(sample)
        self._interval_seconds, self._disturbed = 0.0, False

    def _end_interval(self, sample: JobSample) -> None:
        """A step was counted: its interval was a usual one, which proves the samples taken in it, or it was not."""
        interval = self._interval_seconds
        usual = statistics.median(self._intervals) if len(self._intervals) >= MIN_INTERVALS else None
        usual = None if usual is None else max(usual, self._spec.interval_seconds)
        idle_proved = not self._disturbed and usual is not None and interval <= REST_FACTOR * usual
        plateau_proved = not self._disturbed and (usual is None or interval <= BUSY_FACTOR * usual)
        if not self._disturbed:
            self._intervals.append(interval)
        self._take_batches(self._idle.step_completed(proved=idle_proved), sample)
        self._take_batches(self._plateaus.step_completed(proved=plateau_proved), sample)

    def _discard_interval(self) -> None:
        self._disturbed = True
        self._plateaus.discard_interval()
        self._idle.discard_interval()

    def _take_batches(self, batches: Iterable[SampleBatch], sample: JobSample) -> None:
        gpus: dict[GpuId, GpuSample] | None = None
        for batch in batches:
            gpus = gpus or {(ranked.node, ranked.gpu.key): ranked.gpu for ranked in sample.gpus}
            gpu = gpus.get(batch.gpu)
            if gpu is not None and gpu.key != UNIDENTIFIED_GPU:
                self._take(batch, gpu, sample)

    def _take(self, batch: SampleBatch, gpu: GpuSample, sample: JobSample) -> None:
        node, key = batch.gpu
        value = Baseline(
            node=node,
            board=key,
            kind=batch.kind,
            job=self._spec.name,
            watts=round(statistics.median(batch.watts), 1),
            samples=len(batch.watts),
            phase=batch.phase,
            wall_seconds=sample.wall_seconds,
            name=gpu.name,
            limit_watts=gpu.power_limit_watts,
            energy_joules=gpu.energy_joules,
            driver=next((state.driver_version for state in sample.nodes if state.node == node), None),
        )
        reason = None if batch.kind is BaselineKind.PLATEAU else unsteady_reason(batch.watts)
        reason = reason or implausible_reason(value, self.base(sample), self._table)
        if reason is not None:
            self.rejected[batch.gpu, batch.kind] = reason
            return
        self.rejected.pop((batch.gpu, batch.kind), None)
        known = self._table.get(batch.gpu, batch.kind, self._spec.name)
        if known is None or (_is_better(value, known) and self._plateaus.may_replace(value, known)):
            self._table.put(value)
        self._plateaus.replaced(value)


def unsteady_reason(watts: Sequence[float]) -> str | None:
    """Why these samples are no floor; None where all between the first and last decile lie close together."""
    deciles = statistics.quantiles(watts, n=10)
    if deciles[-1] - deciles[0] <= max(SPREAD_WATTS, SPREAD_SHARE * statistics.median(watts)):
        return None
    return f"power is not steady: {deciles[0]:.0f} to {deciles[-1]:.0f} W"


def _is_better(value: Baseline, known: Baseline) -> bool:
    """A start-up is a better source than pauses between steps; a value that hardly differs is not written again."""
    if value.phase is LearningPhase.BETWEEN_STEPS and known.phase is LearningPhase.START_UP:
        return False
    return abs(value.watts - known.watts) > max(SAME_WATTS, SAME_SHARE * known.watts)


def _is_working(verdict: Verdict) -> bool:
    """All ranks work evenly. Uneven utilization is starvation, and one rank at twice the power is a straggler."""
    return (
        verdict.state in (PowerState.COMPUTE, PowerState.COMMUNICATION)
        and verdict.pattern is UtilizationPattern.ALL_BUSY
        and not verdict.at_floor
    )


def _is_waiting_for_data(sample: JobSample) -> bool:
    return any((source.data_wait_ms or 0.0) >= MIN_DATA_WAIT_MS for source in sample.progress.sources)


def _gpus_in_use(sample: JobSample, latest: Mapping[str, NodeSample]) -> frozenset[tuple[str, int | None]]:
    """(node, index) of GPUs that any process holds, of this job or another."""
    processes = {
        node.node: (latest[node.node].processes if node.node in latest else node.processes) for node in sample.nodes
    }
    return frozenset(
        (node, index) for node, listed in processes.items() for process in listed or () for index in process.gpu_indexes
    )
