"""What a simulated job does over time, as data: activities of ranks, phases with their effects, and the job itself."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Activity:
    """What one rank is doing. `watts` names a range of the GPU; "" reads nothing."""

    name: str
    watts: str
    busy: tuple[float, float]
    memory_busy: tuple[float, float] = (0.0, 0.0)
    steps: bool = False
    phase: str = "train"
    held: bool = True
    process: bool = True
    state: str = "R"
    clock: float = 1.0
    cores: float = 1.0  # that its process uses: one that spins in a collective polls
    throttle: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """`seconds` of one thing. Effects happen as it begins; those of nodes last until it ends.

    `ranks`: who does something else; "victim" is the rank that the variant chose, "last" the last one, "group" the
    ranks of the last node.
    """

    seconds: float
    activity: str
    ranks: Mapping[str, str] = field(default_factory=dict)
    pace: float = 1.0  # times the usual step
    injects: bool = False
    # A save that begins here: its files grow for `save_seconds`; where `save_stops` they stop after that share and
    # the save never ends.
    save_seconds: float | None = None
    save_stops: float | None = None
    save_bytes: float = 62e9
    killed_by: str = ""  # kernel line about the victim: "oom", "segfault", "xid"
    xid: int | None = None  # of the victim's GPU
    restart: float | None = None  # share of the way back to the last checkpoint; new processes
    node_state: str = ""  # of the victim's node: "silent", "refused", "blind", "driver", "slow", "unnamed"
    hung_call: str = ""  # on the victim's node
    lose_board: bool = False  # the victim's GPU leaves the list
    loss: float | None = None
    limit_share: float = 1.0  # power limit, of the usual one
    scale: float = 1.0  # watts of work, of the usual ones
    mig: bool = False
    board: str = ""  # another model
    skip_seconds: float = 0.0  # the watcher itself does not look for so long, as the phase begins
    wall_jump_seconds: float = 0.0
    log: str = ""  # "rotated": gone until the next line; "torn": its last line is cut


@dataclass(frozen=True, slots=True)
class Setting:
    """The job, as a variant has it."""

    seed: int
    board: str = "b300"
    nodes: int = 2
    gpus: int = 8
    step_seconds: float = 5.0
    noise: float = 0.03
    progress: str = "heartbeat"  # "log", "none"
    log_every: int = 1
    interval_seconds: float = 1.0
    first_step: int = 1000
    total_steps: int | None = 100_000
    victim: int = 3
    announces: bool = True  # heartbeats tell phases: a log does not
    save_every_seconds: float | None = None  # told to the watcher
    floor_share: float | None = None  # throughput floor, of the usual rate
    neighbours: int = 0  # GPUs of each node that are not the job's
    work: str = "train"  # activity of its usual steps

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node-{number + 1}" for number in range(self.nodes))


def as_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def load_activities() -> Mapping[str, Activity]:
    table = tomllib.loads((HERE / "activities.toml").read_text("utf-8"))
    return {name: Activity(name=name, **as_tuples(row)) for name, row in table.items()}


ACTIVITIES: Final = load_activities()
