"""One evaluation of a job (`Observation`), how long a condition has held (`Streak`), and what a detector has learned.

Time counts only while it was observed: a gap between two observations proves nothing, in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.detection.classifier.features import SINGLE_OUTLIER_PATTERNS, job_gpus, match_pattern
from wattwatch.watcher.detection.model import (
    CONTEXT_BYTES,
    JobSample,
    JobSpec,
    Suspect,
    UtilizationPattern,
    Verdict,
)

# A few ranks that stand out are named; where more than this share does, the job is split and nobody is to blame.
MAX_OUTLIER_SHARE: Final = 0.25

# What following one job has taught the detector: how long its steps, saves and idle periods take. The detector rebuilds
# all of it from what it observes. A recording that begins minutes before an incident carries it, so that a replay
# reaches the same conclusions. Field names are part of the recording format.


@dataclass(frozen=True, slots=True)
class StepRateHistory:
    intervals: tuple[float, ...] = ()  # seconds between two changes of the step counter, newest last
    best_seconds_per_step: float | None = None
    last_seconds_per_step: float | None = None
    advances: int = 0
    stalls: tuple[float, ...] = ()  # intervals that were longer than the stall limit, seconds


@dataclass(frozen=True, slots=True)
class CheckpointSaveHistory:
    slowest_seconds: float | None = None
    saves: int = 0  # completed ones that files or heartbeats showed


@dataclass(frozen=True, slots=True)
class HangHistory:
    longest_rest_seconds: float = 0.0  # longest time all ranks were idle before a step ended it
    # By pattern: how long it must last to be suspected again, after steps disproved an earlier suspicion.
    demand_seconds: Mapping[UtilizationPattern, float] = field(default_factory=dict)
    worked_rounds: int = 0


@dataclass(frozen=True, slots=True)
class JobHistory:
    pace: StepRateHistory = StepRateHistory()
    saves: CheckpointSaveHistory = CheckpointSaveHistory()
    hang: HangHistory = field(default_factory=HangHistory)
    windows: tuple[float, ...] = ()  # seconds per step in windows that were not slow


@dataclass(frozen=True, slots=True)
class Observation:
    """One evaluation: the sample, its verdict, and the time. `observed_seconds` is the time since the previous
    observation, 0 where a gap lies between."""

    spec: JobSpec
    verdict: Verdict
    sample: JobSample
    now: float
    observed_seconds: float
    gap: bool

    @property
    def phases(self) -> frozenset[str]:
        """The phases that heartbeats report; empty where none does."""
        return frozenset(s.phase for s in self.sample.progress.sources if s.phase)

    @property
    def alive(self) -> bool | None:
        """Whether any process of the job exists on the nodes that answer; None where that is unknown.

        "None exists" takes a list of every node whose GPUs are read, and no memory in use on them: in a container, or
        under another user, the driver lists no process although they run.
        """
        listed = [n.processes for n in self.sample.nodes if n.processes is not None]
        if any(listed):
            return True
        unlisted = any(n.fresh and n.processes is None for n in self.sample.nodes)
        memory_in_use = any((g.gpu.memory_used_bytes or 0.0) >= CONTEXT_BYTES for g in self.sample.gpus)
        return None if memory_in_use or unlisted or not listed else False

    @property
    def gpu_readings(self) -> Mapping[str, int]:
        """By fresh node: how many times its GPUs have been queried."""
        return {n.node: n.reading for n in self.sample.nodes if n.fresh and n.reading is not None}


@dataclass(slots=True)
class Streak:
    """For how long, and over how many rounds of new GPU readings, a condition has held without a gap."""

    since: float | None = None
    rounds: int = 0
    seconds: float = 0.0
    _readings: Mapping[str, int] = field(default_factory=dict)

    def update(self, condition: bool, observation: Observation, node: str | None = None) -> None:
        """Count one observation.

        A round counts once the GPUs of every fresh node were queried anew: a slow query repeats its answer in several
        lines. A node that drops out counts neither for nor against. `node`: the condition concerns this node only.
        """
        if not condition:
            self.clear()
            return
        if observation.gap:
            self.clear()
        after = observation.gpu_readings
        if node is not None:
            after = {name: reading for name, reading in after.items() if name == node}
        if self.since is None:
            self.since, self.rounds, self.seconds, self._readings = observation.now, 1, 0.0, after
            return
        self.seconds += observation.observed_seconds
        before = self._readings
        if after and all(before.get(name) != reading for name, reading in after.items()):
            self.rounds += 1
            self._readings = {**before, **after}

    def clear(self) -> None:
        self.since, self.rounds, self.seconds, self._readings = None, 0, 0.0, {}

    def lasted(self, rounds: int, seconds: float = 0.0) -> bool:
        return self.rounds >= rounds and self.seconds >= seconds


def outlier_suspects(observation: Observation) -> tuple[Suspect, ...]:
    """The ranks that stand out while all GPUs are at the power floor: one rank, or a group of at most a quarter."""
    members = job_gpus(observation.sample.gpus)
    match = match_pattern(members)
    few = len(match.outliers) <= MAX_OUTLIER_SHARE * len(members) or match.pattern in SINGLE_OUTLIER_PATTERNS
    if not (observation.verdict.at_floor and observation.sample.complete and few):
        return ()
    return tuple(Suspect(g.node, g.gpu.index, g.rank) for g in match.outliers)
