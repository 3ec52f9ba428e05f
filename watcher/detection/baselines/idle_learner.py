"""Boards at rest: empty, or with a context and no kernel. Which of their samples may teach, and what proves them.

A start-up counts only where the board was seen empty just before, and is proved by the first kernel: a watcher that
comes late to a hang at 0 % has seen no start-up, and one that never gets to work proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.detection.baselines.baseline import BaselineKind, GpuId, LearningPhase
from wattwatch.watcher.detection.model import CONTEXT_BYTES, IDLE_PERCENT, MAX_GAP_INTERVALS, RankGpu, valid_power_watts

# After work a board is warm and its clocks are up: what it draws then is not what it idles at.
COOL_SECONDS: Final = 30.0
# A context comes with a burst of copying; a start-up that takes longer than this may be one that hangs.
SETTLE_SECONDS: Final = 5.0
START_UP_SECONDS: Final = 300.0
# Between two steps the mean of the last second still holds work at first.
REST_SECONDS: Final = 4.0
MIN_SECONDS: Final = 20.0  # where samples come faster than one a second
MIN_START_UP_SAMPLES: Final = 20
MIN_IDLE_SAMPLES: Final = 30
MIN_BETWEEN_STEPS_SAMPLES: Final = 60
MAX_PENDING_SAMPLES: Final = 120
# What a board idles at changes with the air around it, slowly.
IDLE_AGAIN_SECONDS: Final = 60.0
# States in which clocks are up; a board that rests in a lower one draws far less than one that spins.
CLOCKS_UP: Final = frozenset({None, "P0", "P1", "P2"})


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Enough samples of one kind, to be concluded."""

    board: GpuId
    kind: BaselineKind
    phase: LearningPhase
    watts: tuple[float, ...]


@dataclass(slots=True)
class IdleGpu:
    """One board as it was followed."""

    empty_since: float | None = None
    empty_last: float | None = None
    idle_from: float = 0.0  # idle samples count from here on
    context_since: float | None = None
    starting: bool = False  # its context came under our eyes, and no kernel ran since
    zero_since: float | None = None
    zero_last: float = 0.0
    idle: list[float] = field(default_factory=list)
    start_up: list[float] = field(default_factory=list)
    start_up_last: float = 0.0
    pending: list[float] = field(default_factory=list)  # in this interval between two steps
    between: list[float] = field(default_factory=list)


class IdleLearner:
    """Follows the boards of one job."""

    def __init__(self, interval_seconds: float) -> None:
        self._gap_seconds = MAX_GAP_INTERVALS * interval_seconds
        self._next_look_seconds = 1.5 * interval_seconds
        self._boards: dict[GpuId, IdleGpu] = {}
        self.starting: set[GpuId] = set()
        self.started: set[GpuId] = set()  # a context came to them in this look: another run

    def update(
        self, gpus: Iterable[RankGpu], held: Set[tuple[str, int | None]], now: float, *, quiet: bool
    ) -> Iterator[SampleBatch]:
        """`gpus`: read anew in this look; `held`: (node, index) that any process holds; `quiet`: nothing is wrong, and
        nothing is going on that takes its time."""
        self.started = set()
        for ranked in gpus:
            gpu = ranked.gpu
            watts, busy, memory = valid_power_watts(gpu), gpu.utilization_percent, gpu.memory_used_bytes
            if watts is None or busy is None or memory is None or gpu.mig:
                continue
            board = (ranked.node, gpu.key)
            rest = self._boards.setdefault(board, IdleGpu())
            if memory < CONTEXT_BYTES and (ranked.node, gpu.index) not in held:
                yield from self._empty(board, rest, watts, busy, now)
                continue
            self._with_context(board, rest, now)
            if busy > IDLE_PERCENT:
                rest.zero_since = None
                if rest.starting:
                    yield from self._worked(board, rest)
            elif busy <= 0 and quiet and gpu.performance_state in CLOCKS_UP:
                self._at_zero(rest, watts, now)
            else:
                rest.zero_since = None

    def stepped(self, *, proved: bool) -> Iterator[SampleBatch]:
        """A step was counted: every start-up is over, and what was at rest since the one before rested between steps;
        `proved`: that interval was one of the job's usual ones."""
        for board in tuple(self.starting):
            yield from self._worked(board, self._boards[board])
        for board, rest in self._boards.items():
            if not rest.pending:
                continue
            if proved:
                rest.between += rest.pending
                if len(rest.between) >= MIN_BETWEEN_STEPS_SAMPLES:
                    yield SampleBatch(board, BaselineKind.CONTEXT, LearningPhase.BETWEEN_STEPS, tuple(rest.between))
                    rest.between = []
            rest.pending = []

    def forget_interval(self) -> None:
        for rest in self._boards.values():
            rest.pending.clear()

    def forget(self, boards: Iterable[GpuId] | None = None) -> None:
        """What waits to be proved is void; of all boards where none are named."""
        for board in tuple(self._boards) if boards is None else boards:
            self._boards.pop(board, None)
            self.starting.discard(board)

    def _empty(self, board: GpuId, rest: IdleGpu, watts: float, busy: float, now: float) -> Iterator[SampleBatch]:
        if rest.empty_since is None:
            rest.empty_since, rest.idle_from, rest.idle = now, now + COOL_SECONDS, []
            rest.context_since, rest.zero_since, rest.start_up, rest.pending = None, None, [], []
            self._end_start_up(board, rest)
        rest.empty_last = now
        # 100 % with nobody on the board is a ghost; its watts are real, and those of what?
        if busy <= 0 and now >= rest.idle_from:
            rest.idle.append(watts)
            if len(rest.idle) >= MIN_IDLE_SAMPLES and now - rest.idle_from >= MIN_SECONDS:
                yield SampleBatch(board, BaselineKind.IDLE, LearningPhase.EMPTY, tuple(rest.idle))
                rest.idle, rest.idle_from = [], now + IDLE_AGAIN_SECONDS

    def _with_context(self, board: GpuId, rest: IdleGpu, now: float) -> None:
        if rest.context_since is None:
            rest.context_since, rest.empty_since, rest.idle = now, None, []
            if rest.empty_last is not None and now - rest.empty_last <= self._gap_seconds:
                rest.starting = True
                self.starting.add(board)
                self.started.add(board)
        elif rest.starting and now - rest.context_since > START_UP_SECONDS:
            rest.start_up = []
            self._end_start_up(board, rest)

    def _at_zero(self, rest: IdleGpu, watts: float, now: float) -> None:
        if rest.starting:
            if now - (rest.context_since or now) >= SETTLE_SECONDS:
                rest.start_up.append(watts)
                rest.start_up_last = now
            return
        if rest.zero_since is None or now - rest.zero_last > self._next_look_seconds:
            rest.zero_since = now  # it worked meanwhile: nobody looks here while all are busy
        rest.zero_last = now
        if now - rest.zero_since >= REST_SECONDS and len(rest.pending) < MAX_PENDING_SAMPLES:
            rest.pending.append(watts)

    def _worked(self, board: GpuId, rest: IdleGpu) -> Iterator[SampleBatch]:
        lasted = rest.start_up_last - (rest.context_since or 0.0) - SETTLE_SECONDS
        if len(rest.start_up) >= MIN_START_UP_SAMPLES and lasted >= MIN_SECONDS - 1.0:
            yield SampleBatch(board, BaselineKind.CONTEXT, LearningPhase.START_UP, tuple(rest.start_up))
        rest.start_up = []
        self._end_start_up(board, rest)

    def _end_start_up(self, board: GpuId, rest: IdleGpu) -> None:
        rest.starting = False
        self.starting.discard(board)
