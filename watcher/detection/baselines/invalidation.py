"""What makes a learned value void: another limit, another driver, another board in the slot, somebody else on the node.

That is a reason to learn anew and never one to say that a job hangs or is slow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Final

from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample, ProcessSample
from wattwatch.watcher.detection.baselines.baseline import (
    LIMIT_TOLERANCE_WATTS,
    Baseline,
    BaselineKind,
    BaselineTable,
    GpuId,
)
from wattwatch.watcher.detection.model import JobSample, JobSpec

# Each board is compared with what is known of it this often, and at once where a limit moves.
COMPARE_SECONDS: Final = 4.0
DRIVER_GONE: Final = frozenset({HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES})

Process = tuple[int, float]  # pid and start


class BaselineInvalidator:
    """Compares what is known of the boards of one job with what they are now, and drops what is void."""

    def __init__(self, spec: JobSpec, knowledge: BaselineTable) -> None:
        self._knowledge = knowledge
        self._mine = re.compile(spec.processes) if spec.processes else None
        self._job = spec.name
        self._limits: list[float | None] = []
        self._limit_of: dict[GpuId, float] = {}
        self._strangers: dict[str, frozenset[Process]] = {}
        self._compare_from = float("-inf")
        self.power_limits_changed = False  # in the last look

    def update(self, sample: JobSample, said: Mapping[str, NodeSample], now: float) -> frozenset[GpuId]:
        """Boards of which nothing that is being gathered holds any more. `said`: the last word of each node, with the
        processes of other jobs."""
        self.power_limits_changed = False
        limits = [ranked.gpu.power_limit_watts for ranked in sample.gpus]
        if limits == self._limits and now < self._compare_from:
            return frozenset()
        self._limits, self._compare_from = limits, now + COMPARE_SECONDS
        void = {board for node in sample.nodes for board in self._of_node(node.node, node.status, sample, said)}
        drivers = {node.node: node.driver_version for node in sample.nodes}
        for ranked in sample.gpus:
            board = (ranked.node, ranked.gpu.key)
            if self._is_another(board, ranked.gpu, drivers.get(ranked.node)):
                void.add(board)
        return frozenset(void)

    def _is_another(self, board: GpuId, gpu: GpuSample, driver: str | None) -> bool:
        limit = gpu.power_limit_watts
        moved = limit is not None and abs(limit - self._limit_of.get(board, limit)) > LIMIT_TOLERANCE_WATTS
        if limit is not None:
            self._limit_of[board] = limit
        self.power_limits_changed = self.power_limits_changed or moved
        changed = moved
        for value in self._knowledge.of_board(board):
            if _is_invalid(value, gpu, driver):
                self._knowledge.drop(value)
                changed = True
        return changed

    def _of_node(
        self, node: str, status: HostStatus, sample: JobSample, said: Mapping[str, NodeSample]
    ) -> Iterator[GpuId]:
        if status in DRIVER_GONE:
            # It comes back as another one, or as the same: nobody tells, so all is learned anew.
            for value in self._knowledge.values():
                if value.node == node:
                    self._knowledge.drop(value)
                    yield (node, value.board)
            return
        heard = said.get(node)
        if heard is None or heard.processes is None:
            return
        pids = {source.pid for source in sample.progress.sources if source.pid is not None}
        others = self._others(heard.processes, pids)
        known = frozenset((p.pid, p.started_seconds) for p in others)
        before = self._strangers.get(node)
        self._strangers[node] = known
        if before is None or known == before:
            return
        held = {index for p in others for index in p.gpu_indexes}
        for ranked in sample.gpus:
            if ranked.node != node:
                continue
            board = (node, ranked.gpu.key)
            yield board
            for value in self._knowledge.of_board(board):
                of_job = value.kind is BaselineKind.PLATEAU and value.job == self._job
                # Bare idle was learned with nobody there, and holds when they have left.
                if of_job or (value.kind is BaselineKind.CONTEXT and ranked.gpu.index in held):
                    self._knowledge.drop(value)

    def _others(self, processes: tuple[ProcessSample, ...], pids: Set[int]) -> list[ProcessSample]:
        """Those on a board that are not the job's: by its ranks, its configured name, else by the commonest name."""
        on_boards = [p for p in processes if p.gpu_indexes]
        # A heartbeat names the pid; one of another job gives its processes a rank too.
        unnamed = [p for p in on_boards if p.pid not in pids and (p.rank is None or pids)]
        if self._mine is not None:
            return [p for p in unnamed if p.rank is not None or not self._mine.search(p.name)]
        names = {p.name for p in processes if p.pid in pids or (p.rank is not None and not pids)}
        if not names and on_boards:
            names = {Counter(p.name for p in on_boards).most_common(1)[0][0]}
        return [p for p in unnamed if p.rank is not None or p.name not in names]


def _is_invalid(value: Baseline, gpu: GpuSample, driver: str | None) -> bool:
    if value.name is not None and gpu.name is not None and value.name != gpu.name:
        return True
    # Another version sets clocks and idle states in its own way, whatever its counters say.
    if value.driver is not None and driver is not None and value.driver != driver:
        return True
    # The counter runs since the driver was loaded: it was loaded anew, by an upgrade, a reset or a boot.
    if value.energy_joules is not None and gpu.energy_joules is not None and gpu.energy_joules < value.energy_joules:
        return True
    limits = (value.limit_watts, gpu.power_limit_watts)
    moved = limits[0] is not None and limits[1] is not None and abs(limits[0] - limits[1]) > LIMIT_TOLERANCE_WATTS
    # What a board draws at rest lies far below any limit that it can be set to.
    return moved and value.kind is BaselineKind.PLATEAU
