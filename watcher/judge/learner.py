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

from collectors.samples import GpuSample, NodeSample
from watcher.judge.finding import AlertName, Finding, JobState
from watcher.judge.job_sample import JobSample, JobSpec, RankGpu
from watcher.judge.learn_bounds import learned_of, refusal
from watcher.judge.learn_changes import Changes
from watcher.judge.learn_plateau import Plateaus
from watcher.judge.learn_rest import Batch, Rests
from watcher.judge.learned import NAMELESS, Board, JobLearned, Kind, Knowledge, Learned, Phase
from watcher.judge.look import GAP_INTERVALS
from watcher.judge.own_profiles import OwnProfile, own_profile
from watcher.judge.profiles import Profile, profile_for
from watcher.judge.rules import STARVING_WAIT_MS
from watcher.judge.verdict import PowerState, Shape, Verdict

HARMLESS: Final = frozenset({AlertName.JOB_COMPLETED, AlertName.CHECKPOINT_OVERDUE, AlertName.LOSS_NOT_FINITE})
TAKES_ITS_TIME: Final = frozenset({"save", "eval", "done"})
LOADING: Final = "load"
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

    def __init__(self, spec: JobSpec, knowledge: Knowledge, profiles: Sequence[OwnProfile] = ()) -> None:
        """`profiles`: the user's own, before the shipped ones."""
        self._spec = spec
        self._knowledge = knowledge
        self._profiles = tuple(profiles)
        self._changes = Changes(spec, knowledge)
        self._rests = Rests(spec.interval_seconds)
        self._plateaus = Plateaus()
        self._readings: dict[str, int | None] = {}
        self._last_seconds: float | None = None
        self._step: int | None = None
        self._interval_seconds = 0.0  # since the step was last counted
        self._disturbed = True  # something in this interval makes it unlike others, or it began before we looked
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._base_of: tuple[str | None, float | None] | None = None
        self._base: Profile | None = None
        self._learned_of: tuple[int, int, Profile | None] | None = None
        self._learned: JobLearned | None = None
        self.refused: dict[tuple[Board, Kind], str] = {}  # why the last batch of a kind was no value

    def learned(self, sample: JobSample) -> JobLearned | None:
        """What holds for the boards of this sample; None where nothing is learned of them."""
        base = self.base(sample)
        key = (self._knowledge.version, len(sample.gpus), base)
        if self._learned_of is None or self._learned_of[:2] != key[:2] or self._learned_of[2] is not base:
            self._learned_of = key
            self._learned = learned_of(self._knowledge, self._spec.name, sample.gpus, base)
        return self._learned

    def base(self, sample: JobSample) -> Profile:
        """The boards' profile at their limit, before anything was learned."""
        name = next((ranked.gpu.name for ranked in sample.gpus if ranked.gpu.name), None)
        limits = [ranked.gpu.power_limit_watts for ranked in sample.gpus if ranked.gpu.power_limit_watts]
        limit = statistics.median(limits) if limits else None
        if self._base is None or self._base_of != (name, limit):
            own = own_profile(self._profiles, name)
            self._base = profile_for(name, limit) if own is None else own.scaled(limit)
            self._base_of = (name, limit)
        return self._base

    @property
    def limits_moved(self) -> bool:
        """Whether a power limit was another one in this look than in the one before."""
        return self._changes.limits_moved

    def look(
        self,
        sample: JobSample,
        verdict: Verdict,
        findings: Sequence[Finding],
        state: JobState,
        now: float,
        said: Mapping[str, NodeSample],
    ) -> None:
        """One look at the job, judged. `said`: the last word of its nodes, with the processes of others."""
        void = self._changes.look(sample, said, now)
        if void:
            self._rests.forget(void)
            self._plateaus.forget(void)
        seen = None if self._last_seconds is None else now - self._last_seconds
        self._last_seconds = now
        if seen is None or seen > GAP_INTERVALS * self._spec.interval_seconds:
            self._rests.forget()
            self._forget_interval()
        phases = {source.phase for source in sample.progress.sources if source.phase}
        calm = all(finding.alert in HARMLESS for finding in findings) and not phases & TAKES_ITS_TIME
        started = self._step is not None and bool(self._intervals)
        quiet = calm and state not in UNSURE_STATES and verdict.state is not PowerState.CHECKPOINT
        if not quiet or (started and (LOADING in phases or void)):
            self._forget_interval()
        gpus = sample.gpus
        if verdict.shape is not Shape.ALL_BUSY or self._rests.starting:
            gpus = self._read_anew(sample)
            self._conclude(self._rests.look(gpus, _held(sample, said), now, quiet=quiet), sample)
            self._plateaus.another_run(self._rests.started)
        self._follow_steps(sample, seen or 0.0)
        if quiet and not self._disturbed and _works(verdict) and not _waits(sample):
            self._plateaus.look(gpus, self.base(sample), now)

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

    def _conclude(self, batches: Iterable[Batch], sample: JobSample) -> None:
        boards: dict[Board, GpuSample] | None = None
        for batch in batches:
            boards = boards or {(ranked.node, ranked.gpu.key): ranked.gpu for ranked in sample.gpus}
            gpu = boards.get(batch.board)
            if gpu is not None and gpu.key != NAMELESS:
                self._take(batch, gpu, sample)

    def _take(self, batch: Batch, gpu: GpuSample, sample: JobSample) -> None:
        value = Learned(
            *batch.board, batch.kind, self._spec.name, round(statistics.median(batch.watts), 1), len(batch.watts),
            batch.phase, sample.wall_seconds, gpu.name, gpu.power_limit_watts, gpu.energy_joules,
            next((node.driver_version for node in sample.nodes if node.node == batch.board[0]), None),
        )  # fmt: skip
        why = None if batch.kind is Kind.PLATEAU else unsteady(batch.watts)
        why = why or refusal(value, self.base(sample), self._knowledge)
        if why is not None:
            self.refused[batch.board, batch.kind] = why
            return
        self.refused.pop((batch.board, batch.kind), None)
        known = self._knowledge.get(batch.board, batch.kind, self._spec.name)
        if known is None or (_is_better(value, known) and self._plateaus.may_replace(value, known)):
            self._knowledge.put(value)
        self._plateaus.replaced(value)


def unsteady(watts: Sequence[float]) -> str | None:
    """Why these samples are no floor; None where nine tenths of them lie together."""
    tenths = statistics.quantiles(watts, n=10)
    if tenths[-1] - tenths[0] <= max(SPREAD_WATTS, SPREAD_SHARE * statistics.median(watts)):
        return None
    return f"power is not steady: {tenths[0]:.0f} to {tenths[-1]:.0f} W"


def _is_better(value: Learned, known: Learned) -> bool:
    """A start-up tells more surely than pauses between steps; what hardly differs is not written again."""
    if value.phase is Phase.BETWEEN_STEPS and known.phase is Phase.START_UP:
        return False
    return abs(value.watts - known.watts) > max(SAME_WATTS, SAME_SHARE * known.watts)


def _works(verdict: Verdict) -> bool:
    """All ranks work, and evenly: scatter is starvation, and one rank at the power of two holds up the rest."""
    return (
        verdict.state in (PowerState.COMPUTE, PowerState.COMMUNICATION)
        and verdict.shape is Shape.ALL_BUSY
        and not verdict.at_floor
    )


def _waits(sample: JobSample) -> bool:
    """Ranks say that they wait for data."""
    return any((source.data_wait_ms or 0.0) >= STARVING_WAIT_MS for source in sample.progress.sources)


def _held(sample: JobSample, said: Mapping[str, NodeSample]) -> frozenset[tuple[str, int | None]]:
    """(node, index) of boards that any process holds, of this job or another."""
    heard = {node.node: (said[node.node].processes if node.node in said else node.processes) for node in sample.nodes}
    return frozenset(
        (node, index)
        for node, processes in heard.items()
        for process in processes or ()
        for index in process.gpu_indexes
    )
