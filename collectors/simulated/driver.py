"""Runs the scenarios: one thread that writes what each GPU, process, rank and checkpoint currently shows."""

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
# Nodes are sampled on whole seconds. Writing in between, no state file changes while it is read.
TICK_OFFSET_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """Reported when a phase starts. `late_seconds`: the delay caused by a slow machine."""

    scenario: str
    phase: int
    wall_seconds: float
    late_seconds: float


@dataclass(slots=True)
class RunningScenario:
    """One scenario in progress."""

    scenario: Scenario
    job: JobDirectory
    nodes: Sequence[NodeDirectory]
    phase: int | None = None
    killed: set[int] = field(default_factory=set)  # ranks
    lost: set[tuple[int, int]] = field(default_factory=set)  # node (from 0), GPU
    frozen: set[int] = field(default_factory=set)  # nodes (from 0)


class Driver:
    """Advances all scenarios by one clock. `freeze(node)` silences a node's SSH server; `report` is called when a phase
    starts."""

    def __init__(
        self,
        running: Sequence[RunningScenario],
        clock: Clock,
        freeze: Callable[[str], None],
        report: Callable[[PhaseStarted], None],
    ) -> None:
        self.latest_seconds = 0.0  # the largest delay of any tick so far, in scenario seconds
        self._running = tuple(running)
        self._clock = clock
        self._freeze = freeze
        self._report = report
        self._started: float | None = None
        self._ticks = 0
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def start(self) -> None:
        """Start the thread; the jobs are loading until `begin`."""
        self._tick()
        self._thread.start()

    def begin(self) -> None:
        """Start the first phase of every scenario."""
        self._started = self._clock.wall()
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
        """The next tick, or the start of the next phase if that is earlier."""
        ticks = math.floor((now - TICK_OFFSET_SECONDS) / TICK_SECONDS) + 1
        due = ticks * TICK_SECONDS + TICK_OFFSET_SECONDS
        if self._started is not None:
            changes = (
                self._started + phase.at_seconds
                for scenario_run in self._running
                for phase in scenario_run.scenario.phases
            )
            due = min([due, *(change for change in changes if change > now)])
        return due

    def _tick(self) -> None:
        self._ticks += 1
        now = self._clock.wall()
        seconds = -1.0 if self._started is None else now - self._started
        for scenario_run in self._running:
            number = phase_number_at(scenario_run.scenario, seconds)
            # A tick that is very late may find several phases begun: each has its effects and is reported.
            while number is not None and scenario_run.phase != number:
                scenario_run.phase = begun = 0 if scenario_run.phase is None else scenario_run.phase + 1
                phase = scenario_run.scenario.phases[begun]
                self._apply_phase(scenario_run, phase, step_at(scenario_run.scenario, seconds))
                assert self._started is not None
                late = now - self._started - phase.at_seconds
                self._report(PhaseStarted(scenario_run.scenario.name, begun, now, late))
            write_job_state(scenario_run, number, step_at(scenario_run.scenario, seconds), self._ticks)

    def _apply_phase(self, scenario_run: RunningScenario, phase: ScenarioPhase, step: int) -> None:
        """Apply the effects that happen once, when the phase starts."""
        scenario = scenario_run.scenario
        if phase.save_seconds is not None:
            scenario_run.job.begin_save(step, phase.save_seconds)
        if phase.kill_rank is not None:
            place, gpu = divmod(phase.kill_rank, scenario.gpus_per_node)
            scenario_run.killed.add(phase.kill_rank)
            if phase.killed_by == "oom":
                scenario_run.nodes[place].log_out_of_memory(scenario_run.nodes[place].pids[gpu])
        if phase.lose_gpu is not None:
            number, gpu = phase.lose_gpu
            scenario_run.lost.add((number - 1, gpu))
            scenario_run.nodes[number - 1].log_lost_gpu(gpu)
        if phase.freeze_node is not None:
            scenario_run.frozen.add(phase.freeze_node - 1)
            self._freeze(scenario_run.nodes[phase.freeze_node - 1].name)
        if phase.hang_driver_node is not None:
            node = scenario_run.nodes[phase.hang_driver_node - 1]
            node.nvml = node.smi = "hang"


def write_job_state(scenario_run: RunningScenario, number: int | None, step: int, tick: int) -> None:
    """Write the state of the whole job at one moment."""
    scenario = scenario_run.scenario
    activities = [activity_of_rank(scenario, number, rank) for rank in range(scenario.world)]
    speaking = [
        None if rank in scenario_run.killed or rank // scenario.gpus_per_node in scenario_run.frozen else activity
        for rank, activity in enumerate(activities)
    ]
    tokens_per_second = next(
        (activity.tokens_per_second for activity in activities if activity.tokens_per_second), None
    )
    # Progress first: a reader must not find an idle GPU together with a heartbeat that still says "train".
    scenario_run.job.show(step, speaking, tokens_per_second)
    for place, node in enumerate(scenario_run.nodes):
        first = place * scenario.gpus_per_node
        gpus = [
            SimulatedGpu(
                activity=activities[first + gpu],
                alive=first + gpu not in scenario_run.killed and activities[first + gpu].phase != "done",
                lost=(place, gpu) in scenario_run.lost,
            )
            for gpu in range(scenario.gpus_per_node)
        ]
        node.show(gpus, tick)


def set_up_scenarios(
    scenarios: Sequence[Scenario], directory: Path, tools: Path, clock: Clock, preload_pynvml: bool = True
) -> tuple[tuple[RunningScenario, ...], Mapping[str, NodeDirectory]]:
    """Create all files below `directory` and the nodes' programs in `tools`. Returns the scenarios and the nodes by
    name."""
    write_tools(tools)
    nodes = {
        name: NodeDirectory(directory / "nodes" / name, name, scenario.gpus_per_node, clock, tools, preload_pynvml)
        for scenario in scenarios
        for name in scenario.node_names
    }
    running = tuple(
        RunningScenario(
            scenario=scenario,
            job=JobDirectory(directory / "jobs" / scenario.name, scenario, clock),
            nodes=[nodes[name] for name in scenario.node_names],
        )
        for scenario in scenarios
    )
    return running, nodes
