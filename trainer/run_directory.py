"""Every name in a run directory (DESIGN: the run directory), and run.json: what a watcher reads of a job.

Standard library only: launcher, gate and ranks share it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from trainer.plain import NotPlain, from_plain
from trainer.publish import publish_text
from trainer.refusal import Refusal

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths below RUN. `attempt` counts from 1; step directories are named by steps done."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def gate_json(self) -> Path:
        return self.path / "gate.json"

    @property
    def stop_file(self) -> Path:
        """Who makes this file asks the job to save and end."""
        return self.path / "stop"

    @property
    def launch_lock(self) -> Path:
        """Held by the one launch that is at work."""
        return self.path / "launch.lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def latest(self) -> Path:
        """A file that holds the name of the newest complete checkpoint."""
        return self.checkpoints / "latest"

    def heartbeat(self, rank: int) -> Path:
        return self.path / "heartbeat" / f"rank-{rank:05d}.json"

    def worker_socket(self, rank: int) -> Path:
        return self.path / "worker" / f"rank-{rank:05d}.sock"

    @property
    def flight(self) -> Path:
        """Flight-recorder dumps of all attempts."""
        return self.path / "flight"

    def flight_records(self, attempt: int) -> Path:
        """`torchfrtrace` reads a directory of one attempt."""
        return self.flight / f"attempt-{attempt:02d}"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt:02d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Standard output and error of a rank."""
        return self.logs(attempt) / f"rank-{rank:05d}.log"

    def ending(self, attempt: int, rank: int) -> Path:
        """How a rank ended, in its own words; absent where it was killed."""
        return self.logs(attempt) / f"rank-{rank:05d}.ending.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json"""

    v: int
    run: str
    world: int
    nodes: tuple[str, ...]
    steps: int
    tokens_per_step: int
    save_every: int
    seq_len: int
    gate_id: str
    attempt: int
    resumed_from: str | None
    t_wall: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended. Codes are those of `wattwatch-train run`."""

    code: int
    why: str
    step: int | None = None  # steps done
    follows: bool = False  # it may well be that another rank's end was the cause


def publish_run(directory: RunDirectory, record: RunRecord) -> None:
    publish_text(str(directory.run_json), json.dumps(asdict(record), indent=1) + "\n")


def read_ending(path: Path) -> Ending | None:
    """None where the rank left none: it was killed, or its node has gone. Raises Refusal for one that is not ours."""
    try:
        return from_plain(Ending, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, NotPlain) as error:
        raise Refusal(f"{path}: {error}") from None
