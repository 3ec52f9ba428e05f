"""What following one job over time has taught of it: how long its steps, saves and rests take. Data only.

The detector rebuilds all of it from what it sees; a recording that begins minutes before an incident carries it, so
that replay judges with what was known then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.detection.classifier.features import (
    CONTEXT_BYTES,
    SINGLE_OUTLIER_PATTERNS,
    job_gpus,
    match_pattern,
)
from wattwatch.watcher.detection.model import JobSample, JobSpec, Suspect, UtilizationPattern, Verdict


@dataclass(frozen=True, slots=True)
class StepRateHistory:
    intervals: tuple[float, ...] = ()  # seconds between two changes of the counter, newest last
    best_seconds_per_step: float | None = None
    last_seconds_per_step: float | None = None
    advances: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointSaveHistory:
    slowest_seconds: float | None = None
    saves: int = 0  # that ended well and were seen in files or heartbeats


@dataclass(frozen=True, slots=True)
class HangHistory:
    longest_rest_seconds: float = 0.0  # of all ranks, that a step ended
    demand_seconds: Mapping[UtilizationPattern, float] = field(
        default_factory=dict
    )  # how long a signature must last, by its shape
    worked_rounds: int = 0


@dataclass(frozen=True, slots=True)
class JobHistory:
    pace: StepRateHistory = StepRateHistory()
    saves: CheckpointSaveHistory = CheckpointSaveHistory()
    hang: HangHistory = field(default_factory=HangHistory)
    windows: tuple[float, ...] = ()  # seconds a step, of windows that were not slow


# One look of the detector at a job, and how long a condition has been seen. Time is counted only while it was seen.

# A look later than this after the one before is a gap: nothing is known of what lay between.
GAP_INTERVALS: Final = 3.5


@dataclass(frozen=True, slots=True)
class Observation:
    """A verdict on a sample at a time. `seen_seconds`: since the look before; 0 where a gap lies between."""

    spec: JobSpec
    verdict: Verdict
    sample: JobSample
    now: float
    seen_seconds: float
    gap: bool

    @property
    def phases(self) -> frozenset[str]:
        """What the heartbeats say the ranks are in; empty where nobody says."""
        return frozenset(s.phase for s in self.sample.progress.sources if s.phase)

    @property
    def alive(self) -> bool | None:
        """Whether any process of the job was seen; None where no node could list them.

        An empty list beside boards that hold memory is no list: in a container, or under another user, the driver
        names no process although they run.
        """
        told = [n.processes for n in self.sample.nodes if n.processes is not None]
        if any(told):
            return True
        held = any((g.gpu.memory_used_bytes or 0.0) >= CONTEXT_BYTES for g in self.sample.gpus)
        return None if held or not told else False

    @property
    def readings(self) -> Mapping[str, int]:
        """How often the boards of each node in sight were read."""
        return {n.node: n.reading for n in self.sample.nodes if n.fresh and n.reading is not None}


@dataclass(slots=True)
class Streak:
    """How long, and over how many rounds of new samples, a condition has held without a gap."""

    since: float | None = None
    rounds: int = 0
    seconds: float = 0.0
    _readings: Mapping[str, int] = field(default_factory=dict)

    def look(self, true: bool, look: Observation, node: str | None = None) -> None:
        """A round counts once: the boards of every node in sight must have been read anew since the round before. A
        node that drops out says nothing for or against; a round on which no node was read is none. `node`: the
        condition is about this one alone."""
        if not true:
            self.clear()
            return
        if look.gap:
            self.clear()
        after = look.readings if node is None else {n: r for n, r in look.readings.items() if n == node}
        if self.since is None:
            self.since, self.rounds, self.seconds, self._readings = look.now, 1, 0.0, after
            return
        self.seconds += look.seen_seconds
        before = self._readings
        if after and all(before.get(node) != reading for node, reading in after.items()):
            self.rounds += 1
            self._readings = {**before, **after}

    def clear(self) -> None:
        self.since, self.rounds, self.seconds, self._readings = None, 0, 0.0, {}

    def for_at_least(self, rounds: int, seconds: float = 0.0) -> bool:
        return self.rounds >= rounds and self.seconds >= seconds


def outlier_suspects(look: Observation) -> tuple[Suspect, ...]:
    """Who stands out at the power floor: one rank, or a group of at most a quarter of the boards."""
    members = job_gpus(look.sample.gpus)
    picture = match_pattern(members)
    few = 4 * len(picture.outliers) <= len(members) or picture.shape in SINGLE_OUTLIER_PATTERNS
    if not (look.verdict.at_floor and look.sample.complete and few):
        return ()
    return tuple(Suspect(g.node, g.gpu.index, g.rank) for g in picture.outliers)
