"""Learns what GPUs draw while the steps of their job advance: the job's own full compute power (plateau).

Within a run it only rises: a job that becomes slow must not teach that slow is normal. Another run may be another
model, and its first batch replaces what was known.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.detection.baselines.baseline import Baseline, BaselineKind, GpuId, LearningPhase
from wattwatch.watcher.detection.baselines.idle_learner import SampleBatch
from wattwatch.watcher.detection.baselines.profiles import PowerProfile
from wattwatch.watcher.detection.model import BUSY_PERCENT, RankGpu, valid_power_watts

EVERY_SECONDS: Final = 4.0  # a plateau takes minutes: more samples cost CPU and add nothing
MIN_SAMPLES: Final = 30
MIN_SECONDS: Final = 120.0
MIN_STEPS: Final = 3
MAX_PENDING: Final = 250  # samples in one interval between steps: bounds memory
# Within a run, only a value higher by this ratio replaces the known one.
MIN_RISE: Final = 1.03


@dataclass(slots=True)
class PlateauSamples:
    """What is being collected for one GPU."""

    watts: list[float] = field(default_factory=list)
    since: float = 0.0
    steps: int = 0


class PlateauLearner:
    """Follows the GPUs of one job."""

    def __init__(self) -> None:
        self._gpus: dict[GpuId, PlateauSamples] = {}
        self._pending: list[list[tuple[GpuId, float]]] = []
        self._next_seconds = float("-inf")
        self._now = 0.0
        self._new_run: set[GpuId] = set()  # another run began on them, so their plateau is of the previous run

    def update(self, gpus: Sequence[RankGpu], base: PowerProfile, now: float) -> None:
        """Take samples of GPUs of which all work."""
        if now < self._next_seconds or len(self._pending) >= MAX_PENDING:
            return
        self._next_seconds, self._now = now + EVERY_SECONDS, now
        taken = [
            ((ranked.node, ranked.gpu.key), watts)
            for ranked in gpus
            if (watts := valid_power_watts(ranked.gpu)) is not None
            and (ranked.gpu.utilization_percent or 0.0) >= BUSY_PERCENT
        ]
        if taken and not is_in_measured_band(statistics.median([watts for _, watts in taken]), base):
            self._pending.append(taken)

    def step_completed(self, *, proved: bool) -> Iterator[SampleBatch]:
        """A step was counted: batches that are complete. `proved`: the interval before it was one of the job's usual
        ones."""
        pending, self._pending = self._pending, []
        if not proved:
            return
        stepped: set[GpuId] = set()
        for taken in pending:
            for gpu, watts in taken:
                samples = self._gpus.setdefault(gpu, PlateauSamples())
                if not samples.watts:
                    samples.since = self._now
                samples.watts.append(watts)
                if gpu not in stepped:
                    stepped.add(gpu)
                    samples.steps += 1
        for gpu in stepped:
            samples = self._gpus[gpu]
            if (
                len(samples.watts) >= MIN_SAMPLES
                and samples.steps >= MIN_STEPS
                and self._now - samples.since >= MIN_SECONDS - EVERY_SECONDS
            ):
                batch = SampleBatch(gpu, BaselineKind.PLATEAU, LearningPhase.ADVANCING, tuple(samples.watts))
                samples.watts, samples.steps = [], 0
                yield batch

    def may_replace(self, value: Baseline, known: Baseline) -> bool:
        gpu = (value.node, value.board)
        return value.kind is not BaselineKind.PLATEAU or gpu in self._new_run or value.watts > MIN_RISE * known.watts

    def replaced(self, value: Baseline) -> None:
        if value.kind is BaselineKind.PLATEAU:
            self._new_run.discard((value.node, value.board))

    def discard_interval(self) -> None:
        """Drop the samples of the current interval between two steps."""
        self._pending.clear()

    def discard(self, gpus: Iterable[GpuId]) -> None:
        """Drop what was collected for these GPUs."""
        self._pending.clear()
        for gpu in gpus:
            self._gpus.pop(gpu, None)

    def begin_new_run(self, gpus: Set[GpuId]) -> None:
        """The job was started again on these GPUs."""
        if gpus:
            self.discard(gpus)
            self._new_run |= gpus


def is_in_measured_band(watts: float, base: PowerProfile) -> bool:
    """Where this very model was measured to communicate or starve: not what its compute should draw."""
    if base.bands_from:
        return False
    bands = (base.communication, base.starvation)
    return any(band is not None and watts in band for band in bands)
