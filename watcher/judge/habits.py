"""What following one job over time has taught of it: how long its steps, saves and rests take. Data only.

The detector rebuilds all of it from what it sees; a recording that begins minutes before an incident carries it, so
that replay judges with what was known then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from watcher.judge.verdict import Shape


@dataclass(frozen=True, slots=True)
class PaceHabits:
    intervals: tuple[float, ...] = ()  # seconds between two changes of the counter, newest last
    best_seconds_per_step: float | None = None
    last_seconds_per_step: float | None = None
    advances: int = 0


@dataclass(frozen=True, slots=True)
class SaveHabits:
    slowest_seconds: float | None = None
    saves: int = 0  # that ended well and were seen in files or heartbeats


@dataclass(frozen=True, slots=True)
class HangHabits:
    longest_rest_seconds: float = 0.0  # of all ranks, that a step ended
    demand_seconds: Mapping[Shape, float] = field(default_factory=dict)  # how long a signature must last, by its shape
    worked_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Habits:
    pace: PaceHabits = PaceHabits()
    saves: SaveHabits = SaveHabits()
    hang: HangHabits = field(default_factory=HangHabits)
    windows: tuple[float, ...] = ()  # seconds a step, of windows that were not slow
