"""A job on loopback: packed blocks, model files, JOB.toml, and a launch of it with ranks that do not need torch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.trainer.gate.gate_processes import write_job
from tests.trainer.launch.rank_program import CONFIG, WEIGHTS, Plan
from wattwatch.trainer.launch.attempt import InterruptCount
from wattwatch.trainer.launch.launcher import JobLauncher, LaunchOptions
from wattwatch.trainer.run_directory import RunDirectory
from wattwatch.trainer.settings import JobFile, read_job_file

ROOT = Path(__file__).parents[3]
RANK_PROGRAM = Path(__file__).parent / "rank_program.py"
QUICK = "tests.trainer.launch.quick_torchrun"


def rank_program(job: JobFile, resume: str | None, smoke: str | None) -> tuple[str, ...]:
    return (sys.executable, str(RANK_PROGRAM), job.path, *(("--resume", resume) if resume else ()))


def free_ports() -> int:
    """The first of two consecutive free ports."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


@dataclass
class MadeJob:
    """Its fields can be changed until it is launched."""

    directory: Path
    ranks: int = 2
    nodes: int = 1
    blocks: int = 32
    plan: Plan = field(default_factory=Plan)
    launch: dict[str, Any] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.directory / "run")

    @property
    def file(self) -> Path:
        return self.directory / "job.toml"

    def write(self) -> Path:
        """Blocks, model and JOB.toml."""
        model = self.directory / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_bytes(CONFIG)
        (model / "model.safetensors").write_bytes(WEIGHTS)
        write_job(self.directory / "data", [self.blocks] * (self.ranks * self.nodes))
        # the tests' programs are imported from this checkout, whatever directory they start in
        environment = {"RANK_PLAN": json.dumps(asdict(self.plan)), "PYTHONPATH": str(ROOT)}
        table = {"ranks_per_node": self.ranks, "port": free_ports(), "retry_wait_seconds": 0.1, **self.launch}
        lines = [f"{name} = {json.dumps(str(self.directory / name))}" for name in ("run", "data", "model")]
        lines += ["[launch]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
        lines += ["[launch.environment]", *(f"{name} = {json.dumps(value)}" for name, value in environment.items())]
        self.file.write_text("\n".join(lines) + "\n")
        return self.file

    def start(
        self, torchrun: str = QUICK, on_line: Callable[[str, InterruptCount], None] | None = None, fresh: bool = False
    ) -> int:
        """Runs the launch in this process. `on_line` is called with every line of output, and may interrupt."""
        interrupts = InterruptCount()

        def print_line(line: str) -> None:
            self.output.append(line)
            if on_line is not None:
                on_line(line, interrupts)

        options = LaunchOptions(None, fresh, rank_program, torchrun, grace_seconds=2.0)
        return JobLauncher(read_job_file(str(self.file)), options, interrupts, print_line).run()

    def printed(self, *parts: str) -> bool:
        """Whether a line of the output contains all of `parts`."""
        return any(all(part in line for part in parts) for line in self.output)

    def left_running(self) -> list[str]:
        """Command lines of processes that name this directory: everything that a launch started."""
        return left_running(str(self.directory))


def left_running(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:80]!r}")
    return found


__all__ = ["QUICK", "MadeJob", "Plan", "left_running"]
