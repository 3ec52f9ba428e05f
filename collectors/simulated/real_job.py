"""Simulated GPUs that follow a real job: each shows what the heartbeat of its rank's real process implies.

The job is real, its GPUs are not: a rank trains on CPU, and its simulated GPU draws the watts measured for the phase in
the rank's heartbeat (arXiv 2608.05944). A rank in phase "train" that makes no step waits in a collective, unless its
process wants the CPU: then it computes, slowly, on a machine that is slow or busy.
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

# A heartbeat is written once per second; steps of the demo are shorter.
NO_STEP_SECONDS: Final = 2.5
NO_STEP_FACTOR: Final = 4.0  # times the slowest step so far, where it is not known whether the process wants the CPU
# A process that computes wants the CPU all the time, one that waits in gloo hardly ever.
WANTS_CPU_SHARE: Final = 0.3
IDLE_GPU: Final = ACTIVITIES["ended"]
# phase of the heartbeat -> activity; for "train" it depends on whether the step advances
ACTIVITY_OF_PHASE: Final = {"load": "load", "eval": "compute", "barrier": "wait_in_barrier", "done": "ended"}


@dataclass(frozen=True, slots=True)
class FollowedJob:
    """A real job on simulated nodes: ranks in the order of the nodes, as torchrun assigns them."""

    name: str
    run_directory: str
    node_names: tuple[str, ...]
    gpus_per_node: int


@dataclass(slots=True)
class RankView:
    """One rank as its heartbeat shows it, and when that last changed."""

    rank: int
    path: Path
    pid: int | None = None
    phase: str = ""
    step: int = -1
    changed_seconds: float = 0.0
    slowest_seconds: float = 0.0  # longest time between two steps so far
    cpu_seconds: float | None = None  # that its main thread has used or waited for
    read_seconds: float = 0.0  # when that was read
    busy_seconds: float = 0.0  # when it was last seen to want the CPU

    def update(self, now: float) -> SimulatedGpu:
        """Read the heartbeat; the state of the GPU now. Without heartbeat or process the GPU is idle."""
        heartbeat = read_heartbeat_file(self.path)
        if heartbeat is None:
            return SimulatedGpu(IDLE_GPU, alive=False)
        self._apply(heartbeat, now)
        if self.phase == "done" or not process_is_alive(self.pid):
            return SimulatedGpu(IDLE_GPU, alive=False)
        self._follow_cpu(now)
        return SimulatedGpu(ACTIVITIES[self._activity(now)], alive=True, pid=self.pid)

    def _apply(self, heartbeat: Mapping[str, Any], now: float) -> None:
        pid, phase, step = heartbeat.get("pid"), str(heartbeat.get("phase")), heartbeat.get("step")
        if pid != self.pid:
            self.slowest_seconds, self.cpu_seconds, self.busy_seconds = 0.0, None, 0.0
        elif phase == self.phase == "train" and step != self.step and self.step > 0:
            self.slowest_seconds = max(self.slowest_seconds, now - self.changed_seconds)
        if (pid, phase, step) != (self.pid, self.phase, self.step):
            self.changed_seconds = now
        self.pid, self.phase, self.step = pid, phase, step if isinstance(step, int) else -1

    def _follow_cpu(self, now: float) -> None:
        cpu, before, elapsed = read_wanted_cpu_seconds(self.pid), self.cpu_seconds, now - self.read_seconds
        if cpu is not None and before is not None and elapsed > 0 and cpu - before >= WANTS_CPU_SHARE * elapsed:
            self.busy_seconds = now
        self.cpu_seconds, self.read_seconds = cpu, now

    def _activity(self, now: float) -> str:
        if self.phase == "save":
            return "save" if self.rank == 0 else "await_save"
        if self.phase != "train":
            return ACTIVITY_OF_PHASE.get(self.phase, "load")
        if self.cpu_seconds is None:
            limit = max(NO_STEP_SECONDS, NO_STEP_FACTOR * self.slowest_seconds)
            return "spin" if now - self.changed_seconds > limit else "compute"
        return "spin" if now - max(self.changed_seconds, self.busy_seconds) > NO_STEP_SECONDS else "compute"


def read_heartbeat_file(path: Path) -> Mapping[str, Any] | None:
    try:
        heartbeat = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return heartbeat if isinstance(heartbeat, dict) else None


def process_is_alive(pid: int | None) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def read_wanted_cpu_seconds(pid: int | None) -> float | None:
    """CPU time that the main thread of a process has used, and has waited for while others had the CPU.

    None where the kernel does not count it. https://docs.kernel.org/scheduler/sched-stats.html
    """
    try:
        used, waited, *_ = Path(f"/proc/{pid}/schedstat").read_text("utf-8").split()
        return (int(used) + int(waited)) / 1e9
    except (OSError, ValueError):
        return None


class Follower:
    """One thread that reads the heartbeats and writes the GPUs. Only in real time, as the job is real."""

    def __init__(self, jobs: Sequence[FollowedJob], nodes: Mapping[str, NodeDirectory], clock: Clock) -> None:
        self.latest_seconds = 0.0
        self._clock = clock
        self._ticks = 0
        self._stop = threading.Event()
        self._ranks_of_node = [
            (
                nodes[name],
                [create_rank_view(job, place * job.gpus_per_node + gpu) for gpu in range(job.gpus_per_node)],
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
        for node, views in self._ranks_of_node:
            node.show([view.update(now) for view in views], self._ticks)


def create_rank_view(job: FollowedJob, rank: int) -> RankView:
    return RankView(rank, Path(job.run_directory) / "heartbeat" / f"rank-{rank:05d}.json")


def set_up_nodes(
    jobs: Sequence[FollowedJob], directory: Path, tools: Path, clock: Clock, preload_pynvml: bool = True
) -> Mapping[str, NodeDirectory]:
    """Create the nodes below `directory`; `tools`: see `write_tools`. Returns them by name."""
    return {
        name: NodeDirectory(directory / "nodes" / name, name, job.gpus_per_node, clock, tools, preload_pynvml)
        for job in jobs
        for name in job.node_names
    }
