"""What the gate says: six checks, each with its numbers, and whether the job may start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Level(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


SEVERITY: Final = {Level.PASS: 0, Level.WARN: 1, Level.FAIL: 2}
MAX_SHOWN: Final = 16  # of a check's problems, on a terminal


@dataclass(frozen=True, slots=True)
class Problem:
    level: Level
    text: str  # what, where, and what to do


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    problems: tuple[Problem, ...]
    summary: str  # the numbers, on one line

    @property
    def level(self) -> Level:
        return max((problem.level for problem in self.problems), key=SEVERITY.__getitem__, default=Level.PASS)


@dataclass(frozen=True, slots=True)
class Evenness:
    """Block counts over ranks. Every rank stops after `steps`: the shortest rank decides (or, where shorter ones are
    padded, the longest), or the job hangs."""

    global_min_blocks: int
    max_blocks: int
    shortest_rank: int
    longest_rank: int
    steps: int  # whole optimizer steps of an epoch, the same on every rank
    lost_share: float  # of all blocks, those that no step reaches
    blocks: dict[str, int] = field(default_factory=dict)  # by rank

    @property
    def spread(self) -> int:
        return self.max_blocks - self.global_min_blocks


@dataclass(frozen=True, slots=True)
class GateVerdict:
    checks: tuple[Check, ...]
    evenness: Evenness | None  # None where a rank's count is not known

    @property
    def level(self) -> Level:
        return max((check.level for check in self.checks), key=SEVERITY.__getitem__)

    def exit_code(self, strict: bool) -> int:
        """0 pass, 1 warnings, 2 refused; strict refuses on warnings too."""
        code = SEVERITY[self.level]
        return 2 if strict and code else code

    def lines(self) -> list[str]:
        """For people: one line a check, and one below it for each problem."""
        out = []
        for number, check in enumerate(self.checks, 1):
            out.append(f"gate {number}/{len(self.checks)} {check.name:<10} {check.level}  {check.summary}".rstrip())
            worst_first = sorted(check.problems, key=lambda problem: -SEVERITY[problem.level])
            out += [f"         {problem.level}  {problem.text}" for problem in worst_first[:MAX_SHOWN]]
            if (more := len(check.problems) - MAX_SHOWN) > 0:
                out.append(f"         and {more} more, all of them in gate.json")
        return out
