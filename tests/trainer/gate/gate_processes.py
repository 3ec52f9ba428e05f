"""Real gate processes on loopback, with small packed files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.tools import DEADLINE_SECONDS
from tests.trainer.gate.reports import manifest
from wattwatch.trainer.pack.manifest import manifest_file, manifest_text, take_samples, token_file

SEQ_LEN = 16


def write_shard(directory: Path, rank: int, world: int, blocks: int, **changes: Any) -> Path:
    """A small shard with a correct manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = array("i", [(rank + place) % 100 for place in range(blocks * SEQ_LEN)])
    data = ids.tobytes()
    packed = replace(
        manifest(rank, world, blocks),
        seq_len=SEQ_LEN,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        samples=take_samples(lambda offset, length: data[offset : offset + length], len(data)),
        max_token_id=99,
        vocab_size=100,
    )
    path = Path(token_file(str(directory), rank))
    path.write_bytes(data)
    Path(manifest_file(str(directory), rank)).write_text(manifest_text(replace(packed, **changes)))
    return path


def write_job(directory: Path, blocks: Sequence[int]) -> Path:
    for rank, count in enumerate(blocks):
        write_shard(directory, rank, len(blocks), count)
    return directory


def change_manifest(directory: Path, rank: int, **changes: Any) -> None:
    path = Path(manifest_file(str(directory), rank))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@dataclass(frozen=True, slots=True)
class FinishedGate:
    exit_code: int
    out: str
    err: str

    @property
    def problems(self) -> list[str]:
        return [line.strip() for line in self.out.splitlines() if line.startswith("         ")]


class Gates:
    """Gate processes of one job; every one is ended with the test."""

    def __init__(self, directory: Path) -> None:
        self.run = directory / "run"
        self._processes: list[subprocess.Popen[str]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self, data: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        return self.command("--data", data, "--run", self.run, *arguments, **environment)

    def command(self, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "wattwatch.trainer.cli", "gate", *arguments]
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "SLURM", "RANK"))}
        process = subprocess.Popen(
            [str(part) for part in command],
            env=keep | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def member(self, data: Path, ranks: str, world: int, *arguments: object, **environ: str) -> subprocess.Popen[str]:
        place = (
            "--rendezvous",
            f"127.0.0.1:{self.port}",
            "--world",
            world,
            "--ranks",
            ranks,
            "--node",
            f"node-{ranks}",
        )
        return self.start(data, *place, *arguments, **environ)

    def alone(self, data: Path, world: int, *arguments: object) -> FinishedGate:
        return finish(self.start(data, "--world", world, *arguments))

    @property
    def record(self) -> Any:
        return json.loads((self.run / "gate.json").read_text())

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def finish(process: subprocess.Popen[str]) -> FinishedGate:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return FinishedGate(process.returncode, out, err)
