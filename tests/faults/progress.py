"""What advances in a simulated job: its step counter, with the noise of its steps, and its checkpoints."""

from __future__ import annotations

import random
from dataclasses import dataclass

from wattwatch.collectors.samples import CheckpointEntry


@dataclass(slots=True)
class Save:
    """A checkpoint under way or done."""

    step: int
    began: float
    seconds: float
    bytes: float
    stops: float | None
    changed: float = 0.0
    complete: bool = False

    def at(self, now: float) -> CheckpointEntry:
        share = min(1.0, (now - self.began) / self.seconds) if self.seconds > 0 else 1.0
        if self.stops is not None:
            share = min(share, self.stops)
        growing = share < (1.0 if self.stops is None else self.stops)
        if growing:
            self.changed = now
        self.complete = self.complete or (share >= 1.0 and self.stops is None)
        return CheckpointEntry(
            f"step-{self.step}", self.step, self.complete, int(share * self.bytes), now - self.changed, ""
        )


@dataclass(slots=True)
class Counter:
    """Steps with their noise. A step that is under way when the work stops goes on when it starts again."""

    step: int
    left_seconds: float
    changed: float

    def run(self, seconds: float, now: float, draw: random.Random, step_seconds: float, noise: float) -> int:
        """Lets the job work for `seconds` that end at `now`; the steps done."""
        done = 0
        while seconds >= self.left_seconds:
            seconds -= self.left_seconds
            self.step, self.changed = self.step + 1, now - seconds
            self.left_seconds = step_seconds * max(0.3, draw.lognormvariate(0.0, noise))
            done += 1
        self.left_seconds -= seconds
        return done
