"""Plays the scenarios: one thread that, by one clock, writes what each board, process, rank and checkpoint shows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.job_directory import JobDirectory
from wattwatch.collectors.simulated.node_directory import NodeDirectory, SimulatedGpu, write_tools
from wattwatch.collectors.simulated.scenario import Scenario, ScenarioPhase, activity_of_rank, phase_number_at, step_at

TICK_SECONDS: Final = 0.5
# Nodes are sampled on whole seconds: written between them, no state file changes while it is read.
TICK_OFFSET_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """What the driver reports when a phase begins. `late_seconds`: how late the machine let it happen."""

    scenario: str
    phase: int
    wall_seconds: float
    late_seconds: float


@dataclass(slots=True)
class RunningScenario:
    """One scenario under way."""

    scenario: Scenario
    job: JobDirectory
    nodes: Sequence[NodeDirectory]
    phase: int | None = None
    killed: set[int] = field(default_factory=set)  # ranks
    lost: set[tuple[int, int]] = field(default_factory=set)  # node (from 0), board
    frozen: set[int] = field(default_factory=set)  # nodes (from 0)


class Driver:
    """`freeze(node)` is asked to silence a node's SSH server; `report` hears each phase as it begins."""

    def __init__(
        self,
        plays: Sequence[RunningScenario],
        clock: Clock,
        freeze: Callable[[str], None],
        report: Callable[[PhaseStarted], None],
    ) -> None:
        self.latest_seconds = 0.0  # the worst lateness of any tick so far, in scenario seconds
        self._plays = tuple(plays)
        self._clock = clock
        self._freeze = freeze
        self._report = report
        self._began: float | None = None
        self._ticks = 0
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def start(self) -> None:
        """The jobs are loading until `begin`."""
        self._tick()
        self._thread.start()

    def begin(self) -> None:
        """The first phase of every scenario starts now."""
        self._began = self._clock.wall()
        self._changed.set()

    def stop(self) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            due = self._next_due(self._clock.wall())
            self._changed.clear()
            if self._clock.wait(self._changed, due - self._clock.wall()):
                due = self._clock.wall()
            if self._stop.is_set():
                return
            self.latest_seconds = max(self.latest_seconds, self._clock.wall() - due)
            self._tick()

    def _next_due(self, now: float) -> float:
        """The next tick, or the next beginning of a phase if that is earlier."""
        ticks = math.floor((now - TICK_OFFSET_SECONDS) / TICK_SECONDS) + 1
        due = ticks * TICK_SECONDS + TICK_OFFSET_SECONDS
        if self._began is not None:
            changes = (self._began + phase.at_seconds for play in self._plays for phase in play.scenario.phases)
            due = min([due, *(change for change in changes if change > now)])
        return due

    def _tick(self) -> None:
        self._ticks += 1
        now = self._clock.wall()
        seconds = -1.0 if self._began is None else now - self._began
        for play in self._plays:
            number = phase_number_at(play.scenario, seconds)
            if number is not None and number != play.phase:
                play.phase = number
                phase = play.scenario.phases[number]
                self._begin_phase(play, phase, step_at(play.scenario, seconds))
                assert self._began is not None
                late = now - self._began - phase.at_seconds
                self._report(PhaseStarted(play.scenario.name, number, now, late))
            write_job_state(play, number, step_at(play.scenario, seconds), self._ticks)

    def _begin_phase(self, play: RunningScenario, phase: ScenarioPhase, step: int) -> None:
        """The effects that happen once."""
        scenario = play.scenario
        if phase.save_seconds is not None:
            play.job.begin_save(step, phase.save_seconds)
        if phase.kill_rank is not None:
            place, board = divmod(phase.kill_rank, scenario.gpus_per_node)
            play.killed.add(phase.kill_rank)
            if phase.killed_by == "oom":
                play.nodes[place].log_out_of_memory(play.nodes[place].pids[board])
        if phase.lose_gpu is not None:
            number, board = phase.lose_gpu
            play.lost.add((number - 1, board))
            play.nodes[number - 1].log_lost_gpu(board)
        if phase.freeze_node is not None:
            play.frozen.add(phase.freeze_node - 1)
            self._freeze(play.nodes[phase.freeze_node - 1].name)
        if phase.hang_driver_node is not None:
            node = play.nodes[phase.hang_driver_node - 1]
            node.nvml = node.smi = "hang"


def write_job_state(play: RunningScenario, number: int | None, step: int, tick: int) -> None:
    """One picture of the whole job."""
    scenario = play.scenario
    activities = [activity_of_rank(scenario, number, rank) for rank in range(scenario.world)]
    speaks = [
        None if rank in play.killed or rank // scenario.gpus_per_node in play.frozen else activity
        for rank, activity in enumerate(activities)
    ]
    pace = next((activity.tokens_per_second for activity in activities if activity.tokens_per_second), None)
    # Progress first: who reads both must not meet a board at rest beside a heartbeat that still says "train".
    play.job.show(step, speaks, pace)
    for place, node in enumerate(play.nodes):
        first = place * scenario.gpus_per_node
        moments = [
            SimulatedGpu(
                activity=activities[first + board],
                alive=first + board not in play.killed and activities[first + board].phase != "done",
                lost=(place, board) in play.lost,
            )
            for board in range(scenario.gpus_per_node)
        ]
        node.show(moments, tick)


def set_up_scenarios(
    scenarios: Sequence[Scenario], directory: Path, tools: Path, clock: Clock, preload_pynvml: bool = True
) -> tuple[tuple[RunningScenario, ...], Mapping[str, NodeDirectory]]:
    """Lay out all files below `directory` and the nodes' programs in `tools`; the nodes by name."""
    write_tools(tools)
    nodes = {
        name: NodeDirectory(directory / "nodes" / name, name, scenario.gpus_per_node, clock, tools, preload_pynvml)
        for scenario in scenarios
        for name in scenario.node_names
    }
    plays = tuple(
        RunningScenario(
            scenario=scenario,
            job=JobDirectory(directory / "jobs" / scenario.name, scenario, clock),
            nodes=[nodes[name] for name in scenario.node_names],
        )
        for scenario in scenarios
    )
    return plays, nodes
