"""What is positively seen of a job: the only thing that ends what an earlier process of the watcher has found.

A detector that has just started finds nothing, and that is no news. A counter that moves, a new process that stays, and
a node whose boards are read are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.detection.model import JobSample

# Somebody's test on a board comes and goes; the processes of a job that was started again stay.
STABLE_OBSERVATIONS: Final = 10


@dataclass(frozen=True, slots=True)
class RecoveryEvidence:
    """Of one job, in one look. `advancing`: since the watcher has started, a step was seen to advance or the job to be
    started again. `nodes_ok`: nodes whose boards are part of this look."""

    job: str
    advancing: bool
    nodes_ok: frozenset[str]


class RecoveryTracker:
    """Follows one job from look to look, each source and process on its own: that one comes into sight is no step."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int | None], int] = {}
        self._here_before: dict[str, frozenset[tuple[int, float]]] = {}  # by node, when it was first seen
        self._looks_of_new: dict[tuple[str, int, float], int] = {}
        self._advancing = False

    def update(self, sample: JobSample) -> RecoveryEvidence:
        self._advancing = self._advances(sample) or self._started_again(sample) or self._advancing
        nodes_ok = frozenset(node.node for node in sample.nodes if node.status is HostStatus.OK and node.fresh)
        return RecoveryEvidence(sample.job, self._advancing, nodes_ok)

    def _advances(self, sample: JobSample) -> bool:
        """Against the look before: a run that was started again counts from a lower step."""
        before = self._steps
        now = {(each.source, each.rank): each.step for each in sample.progress.sources if each.step is not None}
        self._steps = before | now
        return any(step > before[source] for source, step in now.items() if source in before)

    def _started_again(self, sample: JobSample) -> bool:
        looks: dict[tuple[str, int, float], int] = {}
        for node in sample.nodes:
            if node.processes is None:
                continue
            here = {(p.pid, p.started_seconds): p for p in node.processes}
            before = self._here_before.setdefault(node.node, frozenset(here))
            for key in here.keys() - before:
                if here[key].rank is not None or here[key].gpu_indexes:
                    looks[node.node, *key] = self._looks_of_new.get((node.node, *key), 0) + 1
        self._looks_of_new = looks
        return any(count >= STABLE_OBSERVATIONS for count in looks.values())
