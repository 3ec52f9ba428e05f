"""One look of the detector at a job, and how long a condition has been seen. Time is counted only while it was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from watcher.judge.job_sample import JobSample, JobSpec
from watcher.judge.verdict import Verdict

# A look later than this after the one before is a gap: nothing is known of what lay between.
GAP_INTERVALS: Final = 3.5


@dataclass(frozen=True, slots=True)
class Look:
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
        """Whether any process of the job was seen; None where no node could list them."""
        told = [n.processes for n in self.sample.nodes if n.processes is not None]
        return any(told) if told else None

    @property
    def sequences(self) -> Mapping[str, int]:
        return {n.node: n.sequence for n in self.sample.nodes if n.fresh and n.sequence is not None}


@dataclass(slots=True)
class Held:
    """How long, and over how many rounds of new samples, a condition has held without a gap."""

    since: float | None = None
    rounds: int = 0
    seconds: float = 0.0
    _sequences: Mapping[str, int] | None = None

    def look(self, true: bool, look: Look) -> None:
        """A round counts once: every node that answers must have sent a new sample since the round before."""
        if not true:
            self.clear()
            return
        if look.gap:
            self.clear()
        if self.since is None:
            self.since, self.rounds, self.seconds, self._sequences = look.now, 1, 0.0, look.sequences
            return
        self.seconds += look.seen_seconds
        before, after = self._sequences or {}, look.sequences
        if not before or all(after.get(node, -1) != sequence for node, sequence in before.items()):
            self.rounds += 1
            self._sequences = after

    def clear(self) -> None:
        self.since, self.rounds, self.seconds, self._sequences = None, 0, 0.0, None

    def for_at_least(self, rounds: int, seconds: float = 0.0) -> bool:
        return self.rounds >= rounds and self.seconds >= seconds
