"""Positive evidence that a job has recovered: the only thing that closes an alert of an earlier watcher process.

A detector that has just started finds nothing, and that proves nothing. A step counter that advances, new processes
that stay, and nodes whose GPUs are read again do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.detection.model import JobSample

# Somebody's test on a GPU comes and goes; the processes of a restarted job stay for longer than this.
STABLE_OBSERVATIONS: Final = 10


@dataclass(frozen=True, slots=True)
class RecoveryEvidence:
    """About one job, in one observation."""

    job: str
    advancing: bool  # since the watcher started, a step was seen to advance, or the job to be restarted
    nodes_ok: frozenset[str]  # nodes whose GPUs are part of this sample


class RecoveryTracker:
    """Follows one job, each progress source and process separately: a source that becomes readable is no step."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int | None], int] = {}
        self._first_processes: dict[str, frozenset[tuple[int, float]]] = {}  # by node, when it was first seen
        self._observations_of_new: dict[tuple[str, int, float], int] = {}
        self._advancing = False

    def update(self, sample: JobSample) -> RecoveryEvidence:
        self._advancing = self._advances(sample) or self._restarted(sample) or self._advancing
        nodes_ok = frozenset(node.node for node in sample.nodes if node.status is HostStatus.OK and node.fresh)
        return RecoveryEvidence(sample.job, self._advancing, nodes_ok)

    def _advances(self, sample: JobSample) -> bool:
        """Compared with the previous observation, since a restarted run counts from a lower step."""
        before = self._steps
        now = {(each.source, each.rank): each.step for each in sample.progress.sources if each.step is not None}
        self._steps = before | now
        return any(step > before[source] for source, step in now.items() if source in before)

    def _restarted(self, sample: JobSample) -> bool:
        observations: dict[tuple[str, int, float], int] = {}
        for node in sample.nodes:
            if node.processes is None:
                continue
            here = {(p.pid, p.started_seconds): p for p in node.processes}
            first = self._first_processes.setdefault(node.node, frozenset(here))
            for key in here.keys() - first:
                if here[key].rank is not None or here[key].gpu_indexes:
                    observations[node.node, *key] = self._observations_of_new.get((node.node, *key), 0) + 1
        self._observations_of_new = observations
        return any(count >= STABLE_OBSERVATIONS for count in observations.values())
