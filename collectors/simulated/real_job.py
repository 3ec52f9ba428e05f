"""Boards that follow a real job: what each shows comes from the heartbeat of the true process that is its rank.

The job is real, its GPUs are not: a rank trains on CPU, and its simulated board draws the watts that the paper saw in
the phase that the rank says it is in. A rank that says "train" and makes no step waits in a collective.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.driver import TICK_OFFSET_SECONDS, TICK_SECONDS
from wattwatch.collectors.simulated.node_directory import NodeDirectory, SimulatedGpu
from wattwatch.collectors.simulated.scenario import ACTIVITIES

# A heartbeat is written once a second; steps of the demo take less.
NO_STEP_SECONDS: Final = 2.5
NO_STEP_FACTOR: Final = 4.0  # times the slowest step so far
IDLE_GPU: Final = ACTIVITIES["ended"]
# phase of the heartbeat -> activity; "train" depends on whether steps are made
ACTIVITY_OF_PHASE: Final = {"load": "load", "eval": "compute", "barrier": "wait_in_barrier", "done": "ended"}


@dataclass(frozen=True, slots=True)
class FollowedJob:
    """A real job on simulated nodes: ranks in order of nodes, as torchrun deals them."""

    name: str
    run_directory: str
    node_names: tuple[str, ...]
    gpus_per_node: int


@dataclass(slots=True)
class RankView:
    """One rank as its heartbeat shows it, and since when it shows the same."""

    rank: int
    path: Path
    pid: int | None = None
    phase: str = ""
    step: int = -1
    changed_seconds: float = 0.0
    slowest_seconds: float = 0.0  # between two changes of the step

    def look(self, now: float) -> SimulatedGpu:
        """A rank without a heartbeat, or whose process has gone, leaves a bare board."""
        beat = read_heartbeat_file(self.path)
        if beat is None:
            return SimulatedGpu(IDLE_GPU, alive=False)
        self._hear(beat, now)
        if self.phase == "done" or not process_is_alive(self.pid):
            return SimulatedGpu(IDLE_GPU, alive=False)
        return SimulatedGpu(ACTIVITIES[self._activity(now)], alive=True, pid=self.pid)

    def _hear(self, beat: Mapping[str, Any], now: float) -> None:
        pid, phase, step = beat.get("pid"), str(beat.get("phase")), beat.get("step")
        if pid != self.pid:
            self.slowest_seconds = 0.0
        elif phase == self.phase == "train" and step != self.step and self.step > 0:
            self.slowest_seconds = max(self.slowest_seconds, now - self.changed_seconds)
        if (pid, phase, step) != (self.pid, self.phase, self.step):
            self.changed_seconds = now
        self.pid, self.phase, self.step = pid, phase, step if isinstance(step, int) else -1

    def _activity(self, now: float) -> str:
        if self.phase == "save":
            return "save" if self.rank == 0 else "await_save"
        if self.phase != "train":
            return ACTIVITY_OF_PHASE.get(self.phase, "load")
        stands = now - self.changed_seconds > max(NO_STEP_SECONDS, NO_STEP_FACTOR * self.slowest_seconds)
        return "spin" if stands else "compute"


def read_heartbeat_file(path: Path) -> Mapping[str, Any] | None:
    try:
        beat = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return beat if isinstance(beat, dict) else None


def process_is_alive(pid: int | None) -> bool:
    """The process exists and is more than an exit code that nobody has fetched."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


class Follower:
    """One thread: looks at the ranks and writes their boards. Runs at the speed of life only: the job does."""

    def __init__(self, jobs: Sequence[FollowedJob], nodes: Mapping[str, NodeDirectory], clock: Clock) -> None:
        self.latest_seconds = 0.0
        self._clock = clock
        self._ticks = 0
        self._stop = threading.Event()
        self._boards = [
            (
                nodes[name],
                [create_rank_view(job, place * job.gpus_per_node + board) for board in range(job.gpus_per_node)],
            )
            for job in jobs
            for place, name in enumerate(job.node_names)
        ]
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            due = (math.floor((self._clock.wall() - TICK_OFFSET_SECONDS) / TICK_SECONDS) + 1) * TICK_SECONDS
            due += TICK_OFFSET_SECONDS
            if self._clock.wait(self._stop, due - self._clock.wall()):
                return
            self.latest_seconds = max(self.latest_seconds, self._clock.wall() - due)
            self._tick()

    def _tick(self) -> None:
        self._ticks += 1
        now = self._clock.wall()
        for node, views in self._boards:
            node.show([view.look(now) for view in views], self._ticks)


def create_rank_view(job: FollowedJob, rank: int) -> RankView:
    return RankView(rank, Path(job.run_directory) / "heartbeat" / f"rank-{rank:05d}.json")


def set_up_nodes(
    jobs: Sequence[FollowedJob], directory: Path, tools: Path, clock: Clock, preload_pynvml: bool = True
) -> Mapping[str, NodeDirectory]:
    """Lay out the nodes below `directory`; `tools`: see `write_tools`. The nodes by name."""
    return {
        name: NodeDirectory(directory / "nodes" / name, name, job.gpus_per_node, clock, tools, preload_pynvml)
        for job in jobs
        for name in job.node_names
    }
