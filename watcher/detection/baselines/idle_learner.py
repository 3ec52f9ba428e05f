"""Learns what idle GPUs draw: without any process, and with a context but no kernel. Which samples count, and what
proves them.

A start-up counts only where the GPU was seen empty just before, and is proved by the first kernel: a watcher that
starts during a hang at 0 % has seen no start-up, and a job that never gets to work proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.detection.baselines.baseline import BaselineKind, GpuId, LearningPhase
from wattwatch.watcher.detection.model import (
    CONTEXT_BYTES,
    IDLE_PERCENT,
    MAX_GAP_INTERVALS,
    RankGpu,
    valid_power_watts,
)

# After work a GPU is warm and its clocks are up: it draws more than it will when idle.
COOL_SECONDS: Final = 30.0
# Creating a context begins with a burst of copies. A start-up longer than START_UP_SECONDS may be a hang.
SETTLE_SECONDS: Final = 5.0
START_UP_SECONDS: Final = 300.0
# Between two steps, drivers that report a power average over the last second still include work at first.
REST_SECONDS: Final = 4.0
MIN_SECONDS: Final = 20.0  # matters where samples come faster than one per second
# Sample counts are chosen: enough for a stable median and for the steadiness test of learner.py.
MIN_START_UP_SAMPLES: Final = 20
MIN_IDLE_SAMPLES: Final = 30
MIN_BETWEEN_STEPS_SAMPLES: Final = 60
MAX_PENDING_SAMPLES: Final = 120
# Idle power follows the temperature of the room, slowly.
IDLE_AGAIN_SECONDS: Final = 60.0
# States in which clocks are up. A GPU that idles in a lower one draws far less than one that spins.
CLOCKS_UP: Final = frozenset({None, "P0", "P1", "P2"})


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Enough samples of one kind to make a value of."""

    gpu: GpuId
    kind: BaselineKind
    phase: LearningPhase
    watts: tuple[float, ...]


@dataclass(slots=True)
class IdleGpu:
    """What is being collected for one GPU."""

    empty_since: float | None = None
    empty_last: float | None = None
    idle_from: float = 0.0  # idle samples count from here on
    context_since: float | None = None
    starting: bool = False  # its context was observed to appear, and no kernel has run since
    zero_since: float | None = None
    zero_last: float = 0.0
    idle: list[float] = field(default_factory=list)
    start_up: list[float] = field(default_factory=list)
    start_up_last: float = 0.0
    pending: list[float] = field(default_factory=list)  # in the current interval between two steps
    between: list[float] = field(default_factory=list)


class IdleLearner:
    """Follows the GPUs of one job."""

    def __init__(self, interval_seconds: float) -> None:
        self._gap_seconds = MAX_GAP_INTERVALS * interval_seconds
        self._next_sample_seconds = 1.5 * interval_seconds
        self._gpus: dict[GpuId, IdleGpu] = {}
        self.starting: set[GpuId] = set()
        self.started: set[GpuId] = set()  # a context appeared in this update: a new run begins on them

    def update(
        self, gpus: Iterable[RankGpu], in_use: Set[tuple[str, int | None]], now: float, *, quiet: bool
    ) -> Iterator[SampleBatch]:
        """Batches that are complete. `gpus`: queried anew since the last update; `in_use`: (node, index) of GPUs that
        any process holds; `quiet`: nothing is wrong, and no save or evaluation is going on."""
        self.started = set()
        for ranked in gpus:
            gpu = ranked.gpu
            watts, busy, memory = valid_power_watts(gpu), gpu.utilization_percent, gpu.memory_used_bytes
            if watts is None or busy is None or memory is None or gpu.mig:
                continue
            key = (ranked.node, gpu.key)
            state = self._gpus.setdefault(key, IdleGpu())
            if memory < CONTEXT_BYTES and (ranked.node, gpu.index) not in in_use:
                yield from self._empty(key, state, watts, busy, now)
                continue
            self._with_context(key, state, now)
            if busy > IDLE_PERCENT:
                state.zero_since = None
                if state.starting:
                    yield from self._first_kernel(key, state)
            elif busy <= 0 and quiet and gpu.performance_state in CLOCKS_UP:
                self._at_zero(state, watts, now)
            else:
                state.zero_since = None

    def step_completed(self, *, proved: bool) -> Iterator[SampleBatch]:
        """A step was counted, so every start-up is over, and GPUs that were idle since the previous step were idle
        between steps. `proved`: that interval was one of the job's usual ones."""
        for key in tuple(self.starting):
            yield from self._first_kernel(key, self._gpus[key])
        for key, state in self._gpus.items():
            if not state.pending:
                continue
            if proved:
                state.between += state.pending
                if len(state.between) >= MIN_BETWEEN_STEPS_SAMPLES:
                    yield SampleBatch(key, BaselineKind.CONTEXT, LearningPhase.BETWEEN_STEPS, tuple(state.between))
                    state.between = []
            state.pending = []

    def discard_interval(self) -> None:
        """Drop the samples of the current interval between two steps."""
        for state in self._gpus.values():
            state.pending.clear()

    def discard(self, gpus: Iterable[GpuId] | None = None) -> None:
        """Drop all unproved samples of these GPUs, or of all GPUs."""
        for key in tuple(self._gpus) if gpus is None else gpus:
            self._gpus.pop(key, None)
            self.starting.discard(key)

    def _empty(self, key: GpuId, state: IdleGpu, watts: float, busy: float, now: float) -> Iterator[SampleBatch]:
        if state.empty_since is None:
            state.empty_since, state.idle_from, state.idle = now, now + COOL_SECONDS, []
            state.context_since, state.zero_since, state.start_up, state.pending = None, None, [], []
            self._end_start_up(key, state)
        state.empty_last = now
        # Utilization without any process is a false reading (persistence mode off), and power with it is not idle
        # power.
        if busy <= 0 and now >= state.idle_from:
            state.idle.append(watts)
            if len(state.idle) >= MIN_IDLE_SAMPLES and now - state.idle_from >= MIN_SECONDS:
                yield SampleBatch(key, BaselineKind.IDLE, LearningPhase.EMPTY, tuple(state.idle))
                state.idle, state.idle_from = [], now + IDLE_AGAIN_SECONDS

    def _with_context(self, key: GpuId, state: IdleGpu, now: float) -> None:
        if state.context_since is None:
            state.context_since, state.empty_since, state.idle = now, None, []
            if state.empty_last is not None and now - state.empty_last <= self._gap_seconds:
                state.starting = True
                self.starting.add(key)
                self.started.add(key)
        elif state.starting and now - state.context_since > START_UP_SECONDS:
            state.start_up = []
            self._end_start_up(key, state)

    def _at_zero(self, state: IdleGpu, watts: float, now: float) -> None:
        if state.starting:
            if now - (state.context_since or now) >= SETTLE_SECONDS:
                state.start_up.append(watts)
                state.start_up_last = now
            return
        if state.zero_since is None or now - state.zero_last > self._next_sample_seconds:
            state.zero_since = now  # it worked in between: `update` is not called while all GPUs are busy
        state.zero_last = now
        if now - state.zero_since >= REST_SECONDS and len(state.pending) < MAX_PENDING_SAMPLES:
            state.pending.append(watts)

    def _first_kernel(self, key: GpuId, state: IdleGpu) -> Iterator[SampleBatch]:
        lasted = state.start_up_last - (state.context_since or 0.0) - SETTLE_SECONDS
        if len(state.start_up) >= MIN_START_UP_SAMPLES and lasted >= MIN_SECONDS - 1.0:
            yield SampleBatch(key, BaselineKind.CONTEXT, LearningPhase.START_UP, tuple(state.start_up))
        state.start_up = []
        self._end_start_up(key, state)

    def _end_start_up(self, key: GpuId, state: IdleGpu) -> None:
        state.starting = False
        self.starting.discard(key)
