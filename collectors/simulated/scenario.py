"""What a simulated job does over time: data (scenarios.toml, activities.toml) and pure functions of time.

Seconds count from the start of the scenario (`SimulatedCluster.begin`); before it (negative) the job is loading.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

TOTAL_STEPS: Final = 3857  # length of the epoch in arXiv 2608.05944, section 5
TOKENS_PER_STEP: Final = 262_144


class UnknownScenario(Exception):
    """No scenario has this name; the text lists those that exist."""


@dataclass(frozen=True, slots=True)
class SimulatedActivity:
    """What one rank is doing, as its GPU and its heartbeat show it. Pairs are the lowest and highest value."""

    name: str
    power_watts: tuple[float, float]
    utilization_percent: tuple[float, float]
    memory_utilization_percent: tuple[float, float]
    phase: str  # in its heartbeat; "": it writes none any more
    step_seconds: float | None = None  # None: the step does not advance
    data_wait_ms: float = 0.0
    memory: str = "held"

    @property
    def tokens_per_second(self) -> float | None:
        return TOKENS_PER_STEP / self.step_seconds if self.step_seconds else None


@dataclass(frozen=True, slots=True)
class ScenarioPhase:
    """From `at_seconds` until the next phase. Effects happen once, when it starts; nodes are numbered from 1."""

    at_seconds: float
    activity: str
    except_ranks: Mapping[int, str] = field(default_factory=dict)
    injects: str = ""
    save_seconds: float | None = None
    kill_rank: int | None = None
    killed_by: str = "oom"
    lose_gpu: tuple[int, int] | None = None  # node, GPU
    freeze_node: int | None = None
    hang_driver_node: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedAlert:
    """One alert that phase number `phase` must cause, and what it must mention."""

    alert: str
    phase: int
    severity: str
    suspects: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # regular expressions over the alert's text, any case


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job on its own nodes."""

    name: str
    title: str
    node_prefix: str
    nodes: int
    gpus_per_node: int
    first_step: int
    duration_seconds: float
    phases: tuple[ScenarioPhase, ...]
    expected: tuple[ExpectedAlert, ...] = ()
    states: tuple[str, ...] = ()
    progress: str = "heartbeats"  # or "torchtitan": a job of another trainer, known by its log only
    total_steps: int = TOTAL_STEPS
    by_name: bool = False  # run only when requested by name

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"{self.node_prefix}-{number}" for number in range(1, self.nodes + 1))

    def node_of_rank(self, rank: int) -> str:
        return self.node_names[rank // self.gpus_per_node]


def phase_number_at(scenario: Scenario, seconds: float) -> int | None:
    """Index of the current phase; None while the job is loading."""
    begun = [number for number, phase in enumerate(scenario.phases) if phase.at_seconds <= seconds]
    return begun[-1] if begun else None


def activity_of_rank(scenario: Scenario, number: int | None, rank: int) -> SimulatedActivity:
    if number is None:
        return ACTIVITIES["load"]
    phase = scenario.phases[number]
    return ACTIVITIES[phase.except_ranks.get(rank, phase.activity)]


def step_at(scenario: Scenario, seconds: float) -> int:
    """Number of completed steps: `first_step` plus, for each phase, its duration divided by its step time."""
    steps = 0.0
    ends = [phase.at_seconds for phase in scenario.phases[1:]] + [float("inf")]
    for phase, end in zip(scenario.phases, ends, strict=True):
        pace = ACTIVITIES[phase.activity].step_seconds
        if pace is not None:
            steps += max(0.0, min(seconds, end) - phase.at_seconds) / pace
    return min(scenario.total_steps, scenario.first_step + int(steps))


def load_activities() -> Mapping[str, SimulatedActivity]:
    table = tomllib.loads((resources.files(__package__) / "activities.toml").read_text("utf-8"))
    return {name: SimulatedActivity(name=name, **lists_to_tuples(row)) for name, row in table.items()}


def load_scenarios() -> Mapping[str, Scenario]:
    """All scenarios by name, in the order of the table."""
    table = tomllib.loads((resources.files(__package__) / "scenarios.toml").read_text("utf-8"))
    return {name: parse_scenario(name, row) for name, row in table.items()}


def parse_scenario(name: str, row: Mapping[str, Any]) -> Scenario:
    fields = dict(row)
    fields["phases"] = tuple(parse_phase(phase) for phase in row["phases"])
    fields["expected"] = tuple(ExpectedAlert(**lists_to_tuples(expected)) for expected in row.get("expected", ()))
    return Scenario(name=name, **lists_to_tuples(fields))


def parse_phase(row: Mapping[str, Any]) -> ScenarioPhase:
    ranks = {int(rank): activity for rank, activity in row.get("except_ranks", {}).items()}
    return ScenarioPhase(**{**lists_to_tuples(row), "except_ranks": ranks})


def lists_to_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def get_scenario(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise UnknownScenario(f"no scenario is named {name!r}; choose one of: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


ACTIVITIES: Final = load_activities()
SCENARIOS: Final = load_scenarios()
