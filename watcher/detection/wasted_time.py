"""What problems cost: GPU time without useful work and the energy used meanwhile, by the alert that explains it.

Only observed time counts: a gap costs nothing, since nobody knows what happened in it. The power of a GPU that was not
read is not guessed, so energy is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from wattwatch.watcher.detection.model import AlertName, Finding, JobSample

JOULES_PER_KWH: Final = 3.6e6


@dataclass(slots=True)
class WastedTime:
    """Of one job since the watcher started. A GPU made idle by two findings counts once, for the wider one."""

    gpu_seconds: dict[str, float] = field(default_factory=dict)  # by the name of the alert
    joules: dict[str, float] = field(default_factory=dict)

    def update(self, sample: JobSample, findings: Sequence[Finding], observed_seconds: float) -> tuple[Finding, ...]:
        """The findings in their order, each with the energy its idle GPUs used. `observed_seconds`: since the previous
        observation."""
        remaining = job_gpu_count(sample)
        costly = sorted((each for each in findings if each.gpus_idle), key=lambda each: -each.gpus_idle)
        used: dict[tuple[str, str, str], float] = {}
        for finding in costly:
            idle = min(finding.gpus_idle, remaining)
            remaining -= idle
            name = finding.alert.value
            used[finding.key] = idle_power_watts(sample, finding, idle) * observed_seconds
            self.gpu_seconds[name] = self.gpu_seconds.get(name, 0.0) + idle * observed_seconds
            self.joules[name] = self.joules.get(name, 0.0) + used[finding.key]
        return tuple(replace(each, idle_joules=used[each.key]) if used.get(each.key) else each for each in findings)


def job_gpu_count(sample: JobSample) -> int:
    """All GPUs of the job, whether they were read or not."""
    return max(sample.expected_gpus or 0, len(sample.gpus))


def idle_power_watts(sample: JobSample, finding: Finding, idle: int) -> float:
    """Power of `idle` of the job's GPUs: a faulty GPU's own reading, otherwise their share of the total."""
    if finding.alert is AlertName.GPU_FAULT:
        suspects = {(each.node, each.gpu) for each in finding.suspects}
        own = [each.gpu.power_watts for each in sample.gpus if (each.node, each.gpu.index) in suspects]
        return sum(watts for watts in own if watts is not None) if idle else 0.0
    known = [each.gpu.power_watts for each in sample.gpus if each.gpu.power_watts is not None]
    return sum(known) * idle / max(1, job_gpu_count(sample))


def total_kilowatt_hours(joules: Mapping[str, float]) -> float:
    """Of all alerts together."""
    return sum(joules.values()) / JOULES_PER_KWH
