"""A simulated cluster as the watcher uses it: start it, get its nodes and jobs, begin the scenarios.

    with SimulatedCluster([named("deadlock")], speed=5) as cluster:
        ...watch cluster.nodes with cluster.ssh_config and cluster.clock...
        cluster.begin()

The nodes are real SSH servers on loopback in one child process; from there on everything is what users run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import orjson

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.driver import PhaseStarted
from wattwatch.collectors.simulated.real_job import FollowedJob
from wattwatch.collectors.simulated.scenario import Scenario
from wattwatch.collectors.simulated.ssh_server import new_private_key, public_line, read_key, write_private_key

READY_SECONDS: Final = 90.0  # it takes 2 s on two idle cores; this only ends a start that is stuck
END_SECONDS: Final = 60.0
LOGIN: Final = "trainer"
PREFIX: Final = "wattwatch-simulated-"
MEMORY_FILES: Final = Path("/dev/shm")
ON_NODE: Final = resources.files(__package__) / "on_node"


class SimulationError(Exception):
    """The cluster could not be started, or ended unexpectedly. The text includes what it printed last."""


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """One node: an SSH server on a port of 127.0.0.1, with its files."""

    name: str
    port: int
    host_key: str  # "ssh-ed25519 AAAA..."
    directory: Path
    tools: Path

    def environment(self, with_gpus: bool = False) -> dict[str, str]:
        """Environment for a program that is started directly, not over SSH, as if on this node: it sees the node's host
        name. `with_gpus`: also the simulated GPUs, which a program must not see if it would compute on them."""
        paths = [str(ON_NODE), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "WATTWATCH_NODE_HOSTNAME": self.name}
        if with_gpus:
            variables["PATH"] = f"{self.tools}:{os.environ.get('PATH', '/usr/bin:/bin')}"
            variables["WATTWATCH_NODE_STATE"] = str(self.directory / "state.json")
        return variables


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """Where the job of one scenario writes its files."""

    scenario: Scenario
    run_directory: Path | None  # None: a job of another trainer
    logs: tuple[Path, ...]
    checkpoint_directory: Path


BUSY_LOAD_PER_CORE: Final = 1.5  # processes that run or want to, per CPU core: more slow all of them down


def describe_busy_machine() -> str:
    """How busy this machine is, if clearly more processes want a CPU core than there are; "" otherwise."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= BUSY_LOAD_PER_CORE * cores:
        return ""
    return f"1-minute load average {load:.1f} on {cores} CPU core{'s'[: cores != 1]}"


class SimulatedCluster:
    """A context manager. Use `clock` for the watcher. All files are deleted at the end: keys and programs in
    `directory`, nodes and jobs in `live_directory`.

    `preload_pynvml`: the nodes' Python loads pynvml from its compiled form, so that many nodes on one machine start
    quickly; without it, the one sent with the probe is compiled on each node, as on a real one. `followed`: real jobs
    whose ranks these nodes pretend to run, in real time.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        speed: float = 1.0,
        preload_pynvml: bool = True,
        followed: Sequence[FollowedJob] = (),
    ) -> None:
        self.scenarios = tuple(scenarios)
        self.followed = tuple(followed)
        self.clock = Clock(speed)
        self._preload_pynvml = preload_pynvml
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.live_directory = new_live_directory(self.directory)
        self.ssh_config = self.directory / "ssh_config"
        self.known_hosts = self.directory / "known_hosts"
        self.client_key = self.directory / "client_key"
        self.nodes: tuple[SimulatedNode, ...] = ()
        self.left_behind: tuple[int, ...] = ()  # pids of commands that outlived their connection; known after `stop`
        self.latest_seconds = 0.0  # largest delay of the simulation itself; known after `stop`
        self._errors = self.directory / "simulated.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._phases: list[PhaseStarted] = []
        self._ready = threading.Event()
        self._changed = threading.Condition()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def jobs(self) -> tuple[SimulatedJob, ...]:
        return tuple(self._job(scenario) for scenario in self.scenarios)

    def _job(self, scenario: Scenario) -> SimulatedJob:
        directory = self.live_directory / "jobs" / scenario.name
        foreign = scenario.progress != "heartbeats"
        return SimulatedJob(
            scenario=scenario,
            run_directory=None if foreign else directory,
            logs=(directory / "logs" / "train.log",) if foreign else (),
            checkpoint_directory=directory / "checkpoints",
        )

    def __enter__(self) -> SimulatedCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        private_key = new_private_key()
        write_private_key(self.client_key, private_key)
        setup = {
            "scenarios": [dataclasses.asdict(scenario) for scenario in self.scenarios],
            "followed": [dataclasses.asdict(job) for job in self.followed],
            "directory": str(self.directory),
            "live_directory": str(self.live_directory),
            "speed": self.clock.speed,
            "preload_pynvml": self._preload_pynvml,
            "monotonic_origin": self.clock.monotonic_origin,
            "wall_origin": self.clock.wall_origin,
            "client_key": public_line(read_key(private_key)),
        }
        with self._errors.open("wb") as errors:
            self._child = subprocess.Popen(
                # -P: a file of the working directory must not be imported instead of ours.
                [sys.executable, "-P", "-m", "wattwatch.collectors.simulated"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the watcher; the child ends when its stdin closes
            )
        threading.Thread(target=self._read_events, args=(self._child,), name="simulated cluster", daemon=True).start()
        self._send(orjson.dumps(setup, option=orjson.OPT_NON_STR_KEYS))
        if not self._ready.wait(READY_SECONDS):
            busy = describe_busy_machine()
            raise SimulationError(
                f"the simulated cluster did not start within {READY_SECONDS:.0f} s: {self._last_output()}"
                + (f". This machine is busy ({busy}): try again when it is idle" if busy else "")
            )
        if not self.nodes:
            raise SimulationError(f"the simulated cluster did not start: {self._last_output()}")
        self._write_ssh_files()

    def _write_ssh_files(self) -> None:
        self.known_hosts.write_text("".join(f"[127.0.0.1]:{n.port} {n.host_key}\n" for n in self.nodes), "utf-8")
        self.ssh_config.write_text(
            "".join(
                f"Host {node.name}\n"
                f"    HostName 127.0.0.1\n"
                f"    Port {node.port}\n"
                f"    User {LOGIN}\n"
                f"    IdentityFile {self.client_key}\n"
                f"    UserKnownHostsFile {self.known_hosts}\n"
                for node in self.nodes
            ),
            "utf-8",
        )

    def begin(self) -> None:
        """Start the first phase of every scenario; until then the jobs are loading."""
        self._send(b"begin")

    def freeze(self, node: str) -> None:
        """Silence the node; its connections stay open."""
        self._send(f"freeze {node}".encode())

    def thaw(self, node: str) -> None:
        self._send(f"thaw {node}".encode())

    def drop(self, node: str) -> None:
        """Close every connection to the node."""
        self._send(f"drop {node}".encode())

    def phases(self) -> tuple[PhaseStarted, ...]:
        """The phases that have started so far, in order."""
        with self._changed:
            return tuple(self._phases)

    def wait_for_phase(self, scenario: str, number: int, timeout_seconds: float) -> PhaseStarted:
        """Wait (real seconds) until this phase of the scenario has started. Raises SimulationError if it does not."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._find(scenario, number), timeout_seconds)
        if not found:
            raise SimulationError(f"phase {number} of scenario {scenario} did not start: {self._last_output()}")
        return found

    def _find(self, scenario: str, number: int) -> PhaseStarted | None:
        return next(
            (started for started in self._phases if (started.scenario, started.phase) == (scenario, number)), None
        )

    def stop(self) -> None:
        """End the cluster; afterwards every command on its nodes has ended or is listed in `left_behind`."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait()
        shutil.rmtree(self.live_directory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self) -> tuple[int, ...]:
        """Pids of everything that runs on the nodes now: all processes started with a node's environment."""
        marker = f"WATTWATCH_NODE_ROOT={self.live_directory}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if marker in Path(entry.path, "environ").read_bytes():
                        found.append(int(entry.name))
        return tuple(sorted(found))

    def _send(self, line: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line + b"\n")
            self._child.stdin.flush()
        except OSError:
            raise SimulationError(f"the simulated cluster has ended: {self._last_output()}") from None

    def _read_events(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                for kind, content in orjson.loads(line).items():
                    with self._changed:
                        self._handle_event(kind, content)
                        self._changed.notify_all()
        self._ready.set()

    def _handle_event(self, kind: str, content: Any) -> None:
        if kind == "ready":
            self.nodes = tuple(
                SimulatedNode(
                    *(name, row["port"], row["host_key"]),
                    directory=self.live_directory / "nodes" / name,
                    tools=self.directory / "tools",
                )
                for name, row in content.items()
            )
            self._ready.set()
        elif kind == "phase":
            self._phases.append(PhaseStarted(**content))
        elif kind == "ended":
            self.left_behind = tuple(content["left_behind"])
            self.latest_seconds = content["latest_seconds"]

    def _last_output(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._errors.read_text("utf-8", "replace").strip().splitlines()
            if lines:
                return " / ".join(lines[-3:])
        return "the simulated cluster printed nothing"


def new_live_directory(otherwise: Path) -> Path:
    """A directory in memory if the machine has one: nodes make some hundred renames a second, and ext4 flushes on each
    rename over a file, which delays the driver on a slow disk."""
    if os.access(MEMORY_FILES, os.W_OK | os.X_OK):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY_FILES))
    return otherwise / "live"
