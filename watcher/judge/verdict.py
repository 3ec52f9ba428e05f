"""What one picture of a job says: a state, a shape, who stands out, how sure, and why. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PowerState(StrEnum):
    """What the boards are doing, as far as one picture can tell."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    STARVATION = "starvation"
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    IDLE = "idle"
    GPU_FAULT = "gpu_fault"
    STRAGGLER = "straggler"
    THROTTLE = "throttle"
    WAITING = "waiting"
    UNKNOWN = "unknown"


class Shape(StrEnum):
    """How utilisation lies over the ranks."""

    ALL_BUSY = "all_busy"
    ONE_LOW_REST_BUSY = "one_low_rest_busy"
    RANK0_LOW_REST_BUSY = "rank0_low_rest_busy"
    TWO_GROUPS = "two_groups"
    ONE_BUSY_REST_LOW = "one_busy_rest_low"
    ALL_LOW = "all_low"
    SCATTER = "scatter"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Suspect:
    """Who stands out; what is not known of it is None."""

    node: str
    gpu: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        parts += [self.node] if self.gpu is None else [f"{self.node} GPU {self.gpu}"]
        return " on ".join(parts)


@dataclass(frozen=True, slots=True)
class Alternative:
    state: PowerState
    confidence: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One picture, judged. `why` carries the numbers that decided; `advice` the next step."""

    state: PowerState
    confidence: float  # 0..1
    shape: Shape
    why: str
    advice: str
    suspects: tuple[Suspect, ...] = ()
    power_fraction: float | None = None  # median board power / limit; None where either is unknown
    alternative: Alternative | None = None
    at_floor: bool = False  # no board draws more than idling with a context or spinning does
    settle: str | None = None  # the one observation that decides against the alternative; None: no other reading
