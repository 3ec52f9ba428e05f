"""The real job, as its owner would run it on two nodes: pack, gate, torchrun. Processes only: no trainer in here.

Each node's programs start with that node's host name (SimulatedNode.environment); all else of them is this machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Final

from wattwatch.collectors.simulated.cluster import SimulatedNode
from wattwatch.watcher.demo.real.data import SEQUENCE_LENGTH, JobFiles, JobSize, block_counts, write_inputs, write_job
from wattwatch.watcher.demo.runner import DemoError

REQUIRED_PACKAGES: Final = ("torch", "transformers", "datasets", "tokenizers", "safetensors")
PACK_SECONDS: Final = 120.0
GATE_SECONDS: Final = 60.0
END_SECONDS: Final = 30.0
LOOPBACK: Final = "127.0.0.1"
MAX_LINES_SHOWN: Final = 5  # of a program that failed


def missing_packages() -> tuple[str, ...]:
    """What of the trainer's extra is not installed. Imports nothing."""
    return tuple(name for name in REQUIRED_PACKAGES if util.find_spec(name) is None)


@dataclass(frozen=True, slots=True)
class GateOutput:
    """What the gate said and recorded."""

    lines: tuple[str, ...]
    level: str
    spread: int | None
    shortest_blocks: int | None
    gate_id: str


@dataclass(frozen=True, slots=True)
class DemoHeartbeat:
    """A rank's heartbeat, as far as the demo needs it."""

    rank: int
    phase: str
    step: int


class RealJob:
    """One job, started once or more, each time in a new run directory. A context manager: nothing outlives it."""

    def __init__(self, name: str, shape: JobSize, files: JobFiles, nodes: Sequence[SimulatedNode]) -> None:
        self.name = name
        self.shape = shape
        self.files = files
        self._nodes = tuple(nodes)
        self._run = files.current  # the directory of the newest start
        self._launchers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RealJob:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def prepare(self) -> tuple[int, ...]:
        """Inputs and packed blocks; the block count of each rank. Raises DemoError."""
        write_inputs(self.files, self.shape)
        arguments = ["pack", str(self.files.corpus), "-o", str(self.files.blocks)]
        arguments += ["--tokenizer", str(self.files.model), "--world", str(self.shape.world)]
        arguments += ["--seq-len", str(SEQUENCE_LENGTH), "--workers", "1"]
        packed = subprocess.run(
            [*trainer_command(), *arguments], capture_output=True, text=True, timeout=PACK_SECONDS, check=False
        )
        if packed.returncode:
            raise DemoError(f"wattwatch-train pack failed: {last_lines(packed.stderr or packed.stdout)}")
        return block_counts(self.files, self.shape)

    def pass_gate(self, evenness: str) -> GateOutput:
        """Write job.toml and run the gate on both nodes at once. Raises DemoError where it refuses."""
        self._run = write_job(self.files, self.shape, self.name, evenness)
        arguments = ["gate", "--run", str(self._run), "--data", str(self.files.blocks)]
        arguments += ["--world", str(self.shape.world), "--accumulation", str(self.shape.accumulation)]
        arguments += ["--model", str(self.files.model), "--config", str(self.files.job)]
        arguments += ["--rendezvous", f"{LOOPBACK}:{free_port()}"]
        gates = [
            subprocess.Popen(
                [*trainer_command(), *arguments, "--ranks", self._ranks(place)],
                env={**os.environ, **FLIGHT_RECORDER_ENVIRONMENT, **node.environment(with_gpus=True)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place, node in enumerate(self._nodes)
        ]
        try:
            said = [gate.communicate(timeout=GATE_SECONDS) for gate in gates]
        except subprocess.TimeoutExpired:
            raise DemoError(f"the gate did not end within {GATE_SECONDS:.0f} s") from None
        finally:
            for gate in gates:
                gate.kill()
                gate.communicate()
        if any(gate.returncode not in (0, 1) for gate in gates):
            raise DemoError(f"the gate refused the job: {' / '.join(last_lines(out + err) for out, err in said)}")
        record = json.loads((self._run / "gate.json").read_text("utf-8"))
        return GateOutput(
            lines=tuple(said[0][0].splitlines()),
            level=record["level"],
            spread=record.get("spread"),
            shortest_blocks=record.get("global_min_blocks"),
            gate_id=record["gate_id"],
        )

    def start(self, gate: GateOutput) -> None:
        """torchrun on each node, and the watcher's link to the new run directory."""
        staged = self.files.directory / "next"
        staged.symlink_to(self._run)
        staged.replace(self.files.current)
        self._launchers.clear()
        port = free_port()
        names = ",".join(node.name for node in self._nodes)
        job = {
            "WATTWATCH_ATTEMPT": "1",
            "WATTWATCH_GATE_ID": gate.gate_id,
            "WATTWATCH_NODES": names,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        rank = ["wattwatch.trainer.cli", "run", str(self.files.job)]
        for place, node in enumerate(self._nodes):
            arguments = ["--nnodes", str(len(self._nodes)), "--node-rank", str(place)]
            arguments += ["--nproc-per-node", str(self.shape.ranks_per_node)]
            arguments += ["--master-addr", LOOPBACK, "--master-port", str(port)]
            with self._launcher_log(place).open("wb") as log:
                launcher = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *arguments, "-m", *rank],
                    env={
                        **os.environ,
                        **FLIGHT_RECORDER_ENVIRONMENT,
                        **job,
                        **node.environment(),
                        "WATTWATCH_NODE": node.name,
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the demo, which then ends the job
                )
            self._launchers.append(launcher)
            # Inherited by its ranks: on a large machine the steps would be over before a second sample is taken.
            os.sched_setaffinity(launcher.pid, sorted(os.sched_getaffinity(0))[-self.shape.cores :])

    def exit_codes(self) -> tuple[int | None, ...]:
        """Of the newest start's launchers; None: still running."""
        return tuple(launcher.poll() for launcher in self._launchers)

    def beats(self) -> tuple[DemoHeartbeat, ...]:
        """Heartbeats of the newest start, in order of ranks."""
        found = []
        for rank in range(self.shape.world):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                beat = json.loads((self._run / "heartbeat" / f"rank-{rank:05d}.json").read_text("utf-8"))
                found.append(DemoHeartbeat(rank, beat["phase"], beat["step"]))
        return tuple(found)

    def socket_of(self, rank: int) -> Path:
        return self._run / "worker" / f"rank-{rank:05d}.sock"

    def checkpoint(self) -> str:
        """Name of the newest complete checkpoint; "" if there is none."""
        try:
            name = (self._run / "checkpoints" / "latest").read_text("utf-8").strip()
        except OSError:
            return ""
        return name if (self._run / "checkpoints" / name / "COMPLETE.json").exists() else ""

    def end(self) -> tuple[int, ...]:
        """Kill the ranks by pid, and wait for their launchers; the pids. Does nothing where nothing runs."""
        running = [launcher for launcher in self._launchers if launcher.poll() is None]
        ranks = [pid for launcher in running for pid in child_pids(launcher.pid)]
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self._launchers:
            try:
                launcher.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        self._launchers.clear()
        return tuple(ranks)

    def last_words(self) -> str:
        """What the launchers and ranks of the newest start said last: for whoever must find out why it failed."""
        said = [self._ending(rank) for rank in range(self.shape.world)]
        words = [f"rank {rank}: {why}" for rank, why in enumerate(said) if why]
        if not words:
            words = [last_lines(self._launcher_log(place).read_text("utf-8", "replace")) for place in (0, 1)]
        return "; ".join(words)

    def _ending(self, rank: int) -> str:
        path = self._run / "logs" / "attempt-01" / f"rank-{rank:05d}.ending.json"
        try:
            ending: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return ""
        return "" if ending.get("code") == 0 else str(ending.get("why", ""))

    def _launcher_log(self, place: int) -> Path:
        return self.files.directory / f"{self._run.name}-{self._nodes[place].name}.log"

    def _ranks(self, place: int) -> str:
        first = place * self.shape.ranks_per_node
        return f"{first}-{first + self.shape.ranks_per_node - 1}"


# Kept small: 2,000 collectives of each rank. Both names, for torch before and after 2.9.
FLIGHT_RECORDER_ENVIRONMENT: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def trainer_command() -> list[str]:
    return [sys.executable, "-m", "wattwatch.trainer.cli"]


def child_pids(pid: int) -> tuple[int, ...]:
    """Processes that this one started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return tuple(found)


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-MAX_LINES_SHOWN:]) or "it said nothing"
