"""What makes a baseline invalid: another power limit, driver, GPU in the slot, or another user of the GPU.

That is a reason to learn again, never one to report that a job hangs or is slow.
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

# Each GPU is compared with what is known of it this often, and at once when a power limit changes.
COMPARE_SECONDS: Final = 4.0
DRIVER_LOST: Final = frozenset({HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES})

ProcessId = tuple[int, float]  # pid and start time: pids are reused


class BaselineInvalidator:
    """Compares the baselines of one job's GPUs with their present state, and drops invalid ones."""

    def __init__(self, spec: JobSpec, table: BaselineTable) -> None:
        self._table = table
        self._process_name = re.compile(spec.processes) if spec.processes else None
        self._job = spec.name
        self._limits: list[float | None] = []
        self._limit_of: dict[GpuId, float] = {}
        self._other_processes: dict[str, frozenset[ProcessId]] = {}
        self._compare_from = float("-inf")
        self.power_limits_changed = False  # in the last update

    def update(self, sample: JobSample, latest: Mapping[str, NodeSample], now: float) -> frozenset[GpuId]:
        """GPUs of which samples that are being collected are invalid. `latest`: the last sample of each node, with the
        processes of other jobs too."""
        self.power_limits_changed = False
        limits = [ranked.gpu.power_limit_watts for ranked in sample.gpus]
        if limits == self._limits and now < self._compare_from:
            return frozenset()
        self._limits, self._compare_from = limits, now + COMPARE_SECONDS
        invalid = {gpu for node in sample.nodes for gpu in self._of_node(node.node, node.status, sample, latest)}
        drivers = {node.node: node.driver_version for node in sample.nodes}
        for ranked in sample.gpus:
            key = (ranked.node, ranked.gpu.key)
            if self._has_changed(key, ranked.gpu, drivers.get(ranked.node)):
                invalid.add(key)
        return frozenset(invalid)

    def _has_changed(self, key: GpuId, gpu: GpuSample, driver: str | None) -> bool:
        limit = gpu.power_limit_watts
        limit_changed = limit is not None and abs(limit - self._limit_of.get(key, limit)) > LIMIT_TOLERANCE_WATTS
        if limit is not None:
            self._limit_of[key] = limit
        self.power_limits_changed = self.power_limits_changed or limit_changed
        changed = limit_changed
        for value in self._table.for_gpu(key):
            if _is_invalid(value, gpu, driver):
                self._table.drop(value)
                changed = True
        return changed

    def _of_node(
        self, node: str, status: HostStatus, sample: JobSample, latest: Mapping[str, NodeSample]
    ) -> Iterator[GpuId]:
        if status in DRIVER_LOST:
            # It may return as another version or the same one, and nothing tells which: learn everything again.
            for value in self._table.values():
                if value.node == node:
                    self._table.drop(value)
                    yield (node, value.board)
            return
        node_sample = latest.get(node)
        if node_sample is None or node_sample.processes is None:
            return
        pids = {source.pid for source in sample.progress.sources if source.pid is not None}
        others = self._others(node_sample.processes, pids)
        known = frozenset((p.pid, p.started_seconds) for p in others)
        before = self._other_processes.get(node)
        self._other_processes[node] = known
        if before is None or known == before:
            return
        in_use = {index for p in others for index in p.gpu_indexes}
        for ranked in sample.gpus:
            if ranked.node != node:
                continue
            key = (node, ranked.gpu.key)
            yield key
            for value in self._table.for_gpu(key):
                of_job = value.kind is BaselineKind.PLATEAU and value.job == self._job
                # Bare idle was learned with nobody on the GPU, and is valid again when they have left.
                if of_job or (value.kind is BaselineKind.CONTEXT and ranked.gpu.index in in_use):
                    self._table.drop(value)

    def _others(self, processes: tuple[ProcessSample, ...], pids: Set[int]) -> list[ProcessSample]:
        """GPU processes that are not the job's: by its ranks, else its configured process name, else the most common
        name."""
        on_gpus = [p for p in processes if p.gpu_indexes]
        # A heartbeat names the pid; heartbeats of another job give its processes a rank too.
        without_heartbeat = [p for p in on_gpus if p.pid not in pids and (p.rank is None or pids)]
        if self._process_name is not None:
            return [p for p in without_heartbeat if p.rank is not None or not self._process_name.search(p.name)]
        names = {p.name for p in processes if p.pid in pids or (p.rank is not None and not pids)}
        if not names and on_gpus:
            names = {Counter(p.name for p in on_gpus).most_common(1)[0][0]}
        return [p for p in without_heartbeat if p.rank is not None or p.name not in names]


def _is_invalid(value: Baseline, gpu: GpuSample, driver: str | None) -> bool:
    if value.name is not None and gpu.name is not None and value.name != gpu.name:
        return True
    # Another driver version manages clocks and idle states differently, whatever its counters say.
    if value.driver is not None and driver is not None and value.driver != driver:
        return True
    # The energy counter runs since the driver was loaded: a smaller one means a reload by an upgrade, a reset or a
    # boot.
    if value.energy_joules is not None and gpu.energy_joules is not None and gpu.energy_joules < value.energy_joules:
        return True
    limits = (value.limit_watts, gpu.power_limit_watts)
    changed = limits[0] is not None and limits[1] is not None and abs(limits[0] - limits[1]) > LIMIT_TOLERANCE_WATTS
    # Idle power is far below any limit that can be set, so only the plateau depends on it.
    return changed and value.kind is BaselineKind.PLATEAU
