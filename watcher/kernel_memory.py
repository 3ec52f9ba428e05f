"""What the kernels of a job's nodes have said lately: the kernel says a thing once, and a hang shows minutes later."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from watcher.diagnose.seen import NodeEvent
from watcher.judge.job_sample import JobSample

KERNEL_SECONDS: Final = 900.0  # what was said within this time before is evidence
LINES_MOST: Final = 200  # a job


@dataclass(slots=True)
class KernelMemory:
    """By job. Times are the watcher's monotonic seconds."""

    _lines: dict[str, dict[tuple[str, str], tuple[float, NodeEvent]]] = field(default_factory=dict)

    def add(self, sample: JobSample, now: float) -> None:
        lines = self._lines.setdefault(sample.job, {})
        for node in sample.nodes:
            for event in node.kernel_events:
                lines.setdefault((node.node, event.text), (now, NodeEvent(node.node, event, event.age_seconds)))
        for key in [key for key, (heard, _) in lines.items() if now - heard > KERNEL_SECONDS]:
            del lines[key]
        while len(lines) > LINES_MOST:
            del lines[next(iter(lines))]

    def events(self, job: str, now: float) -> tuple[NodeEvent, ...]:
        """Those that were written within KERNEL_SECONDS; where the node does not tell when, heard within them."""
        found = []
        for heard, event in self._lines.get(job, {}).values():
            age = None if event.age_seconds is None else event.age_seconds + now - heard
            if (now - heard if age is None else age) <= KERNEL_SECONDS:
                found.append(replace(event, age_seconds=age))
        return tuple(found)
