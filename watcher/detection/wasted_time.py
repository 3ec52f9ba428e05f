"""What trouble costs: time of boards that did no useful work, and what they drew meanwhile, by the alert that says why.

Pure. Only time that was seen counts: a gap between two looks costs nothing, as nobody knows what was drawn in it. The
watts of a board that was not read are not guessed, so energy is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from wattwatch.watcher.detection.model import AlertName, Finding, JobSample

JOULES_PER_KWH: Final = 3.6e6


@dataclass(slots=True)
class WastedTime:
    """Of one job since the watcher began. A board that two findings idle at once is counted once: for the wider one."""

    gpu_seconds: dict[str, float] = field(default_factory=dict)  # by the name of the alert
    joules: dict[str, float] = field(default_factory=dict)

    def update(self, sample: JobSample, findings: Sequence[Finding], observed_seconds: float) -> tuple[Finding, ...]:
        """The findings in their order, each with what its boards drew. `seen_seconds`: since the look before."""
        left = job_gpu_count(sample)
        costly = sorted((each for each in findings if each.gpus_idle), key=lambda each: -each.gpus_idle)
        drawn: dict[tuple[str, str, str], float] = {}
        for finding in costly:
            idle = min(finding.gpus_idle, left)
            left -= idle
            name = finding.alert.value
            drawn[finding.key] = idle_power_watts(sample, finding, idle) * observed_seconds
            self.gpu_seconds[name] = self.gpu_seconds.get(name, 0.0) + idle * observed_seconds
            self.joules[name] = self.joules.get(name, 0.0) + drawn[finding.key]
        return tuple(replace(each, idle_joules=drawn[each.key]) if drawn.get(each.key) else each for each in findings)


def job_gpu_count(sample: JobSample) -> int:
    """All that the job has, whether they were read or not."""
    return max(sample.expected_gpus or 0, len(sample.gpus))


def idle_power_watts(sample: JobSample, finding: Finding, idle: int) -> float:
    """What `idle` of the job's boards draw: a broken board's own reading, else their share of what all draw."""
    if finding.alert is AlertName.GPU_FAULT:
        suspects = {(each.node, each.gpu) for each in finding.suspects}
        own = [each.gpu.power_watts for each in sample.gpus if (each.node, each.gpu.index) in suspects]
        return sum(watts for watts in own if watts is not None) if idle else 0.0
    known = [each.gpu.power_watts for each in sample.gpus if each.gpu.power_watts is not None]
    return sum(known) * idle / max(1, job_gpu_count(sample))


def total_kilowatt_hours(joules: Mapping[str, float]) -> float:
    """Of all causes together."""
    return sum(joules.values()) / JOULES_PER_KWH
