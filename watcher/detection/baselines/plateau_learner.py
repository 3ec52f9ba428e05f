"""What a board draws while the steps of its job advance: the job's own plateau.

Within a run it only rises: a job that is slow from some moment on must not teach that this is how it works. Another run
may be another model, and its first batch replaces what was known.
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

EVERY_SECONDS: Final = 4.0
MIN_SAMPLES: Final = 30
MIN_SECONDS: Final = 120.0
MIN_STEPS: Final = 3
MAX_PENDING: Final = 250  # looks into one interval
# Within a run, only what lies this much higher replaces what is known.
MIN_RISE: Final = 1.03


@dataclass(slots=True)
class PlateauSamples:
    """What is being gathered of one board."""

    watts: list[float] = field(default_factory=list)
    since: float = 0.0
    steps: int = 0


class PlateauLearner:
    def __init__(self) -> None:
        self._boards: dict[GpuId, PlateauSamples] = {}
        self._pending: list[list[tuple[GpuId, float]]] = []
        self._next_seconds = float("-inf")
        self._now = 0.0
        self._anew: set[GpuId] = set()  # boards on which another run began, and whose plateau is of the run before

    def update(self, gpus: Sequence[RankGpu], base: PowerProfile, now: float) -> None:
        """All ranks work. Each few seconds is enough: a plateau is made of minutes."""
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

    def stepped(self, *, proved: bool) -> Iterator[SampleBatch]:
        """A step was counted; `proved`: the interval before it was one of the job's usual ones."""
        pending, self._pending = self._pending, []
        if not proved:
            return
        stepped: set[GpuId] = set()
        for taken in pending:
            for board, watts in taken:
                work = self._boards.setdefault(board, PlateauSamples())
                if not work.watts:
                    work.since = self._now
                work.watts.append(watts)
                if board not in stepped:
                    stepped.add(board)
                    work.steps += 1
        for board in stepped:
            work = self._boards[board]
            if (
                len(work.watts) >= MIN_SAMPLES
                and work.steps >= MIN_STEPS
                and self._now - work.since >= MIN_SECONDS - EVERY_SECONDS
            ):
                batch = SampleBatch(board, BaselineKind.PLATEAU, LearningPhase.ADVANCING, tuple(work.watts))
                work.watts, work.steps = [], 0
                yield batch

    def may_replace(self, value: Baseline, known: Baseline) -> bool:
        board = (value.node, value.board)
        return value.kind is not BaselineKind.PLATEAU or board in self._anew or value.watts > MIN_RISE * known.watts

    def replaced(self, value: Baseline) -> None:
        if value.kind is BaselineKind.PLATEAU:
            self._anew.discard((value.node, value.board))

    def forget_interval(self) -> None:
        self._pending.clear()

    def forget(self, boards: Iterable[GpuId]) -> None:
        """What was gathered of these is void."""
        self._pending.clear()
        for board in boards:
            self._boards.pop(board, None)

    def another_run(self, boards: Set[GpuId]) -> None:
        """The job starts anew on them."""
        if boards:
            self.forget(boards)
            self._anew |= boards


def is_in_measured_band(watts: float, base: PowerProfile) -> bool:
    """Where this very board was measured to communicate or to starve: not what its work should draw."""
    if base.bands_from:
        return False
    bands = (base.communication, base.starvation)
    return any(band is not None and watts in band for band in bands)
