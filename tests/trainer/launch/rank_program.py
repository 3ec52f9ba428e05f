"""A rank without torch: real logs, heartbeats, checkpoints and exit files. It ends as its plan says.

`python rank_program.py JOB.toml [--resume DIR]`; RANK_PLAN in the environment is a Plan as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.tools import DEADLINE_SECONDS
from wattwatch.trainer.atomic_files import atomic_write_text
from wattwatch.trainer.checkpoint.complete import Completion, FileRecord, completion_text, read_completion
from wattwatch.trainer.dataclass_json import parse_dataclass
from wattwatch.trainer.run_directory import RankExit, RunDirectory, RunRecord, write_run_record
from wattwatch.trainer.settings import read_job_file
from wattwatch.trainer.train.heartbeat import HeartbeatRecord, replace_file

WEIGHTS_HEADER = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
WEIGHTS = len(WEIGHTS_HEADER).to_bytes(8, "little") + WEIGHTS_HEADER + b"1234"
CONFIG = b'{"vocab_size": 100}'


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of steps; and on which rank, after which step, up to which attempt, what happens."""

    steps: int = 4
    save_every: int = 2
    step_seconds: float = 0.02
    rank: int = 0
    at: int = -1
    until_attempt: int = 0
    act: str = ""  # kill, code:N (with an exit file), exit:N (without)
    children: bool = False  # each rank starts one that ignores SIGTERM


def main() -> None:
    job, rank, world = read_job_file(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt, plan = int(os.environ["WATTWATCH_ATTEMPT"]), parse_dataclass(Plan, json.loads(os.environ["RANK_PLAN"]))
    run = RunDirectory(Path(job.settings.run))
    log = os.open(run.rank_log(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    gate = json.loads(run.gate_json.read_bytes())
    assert gate["gate_id"] == os.environ["WATTWATCH_GATE_ID"]
    state: dict[str, Any] = {"step": 0}

    def end(code: int, why: str) -> None:
        atomic_write_text(str(run.exit_file(attempt, rank)), json.dumps(asdict(RankExit(code, why, state["step"]))))
        sys.exit(code)

    signal.signal(signal.SIGTERM, lambda *_: end(4, "SIGTERM"))
    resume = Path(sys.argv[sys.argv.index("--resume") + 1]) if "--resume" in sys.argv else None
    state["step"] = read_completion(resume).step if resume else 0
    if plan.children:
        import subprocess

        ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
    if rank == 0:
        gate_id, nodes = gate["gate_id"], tuple(os.environ["WATTWATCH_NODES"].split(","))
        write_run_record(
            run, RunRecord(1, "made", world, nodes, plan.steps, 1, 2, 16, gate_id, attempt, None, time.time())
        )
    write_line(f"node {os.environ['WATTWATCH_NODE']} rank {rank} begins at step {state['step']}")
    while True:
        beat(run, rank, world, state["step"], plan)
        if (rank, state["step"]) == (plan.rank, plan.at) and attempt <= plan.until_attempt:
            act(plan, run, end)
        if state["step"] >= plan.steps:
            end(0, "all steps done")
        if not may_continue(run, rank, state["step"]):
            save(run, rank, world, state["step"], plan, gate)
            end(4, "stop file")
        time.sleep(plan.step_seconds)
        state["step"] += 1
        beat(run, rank, world, state["step"], plan)
        if rank == 0:
            write_line(f"step {state['step']}/{plan.steps} loss 1.0")
        if state["step"] % plan.save_every == 0 or state["step"] == plan.steps:
            save(run, rank, world, state["step"], plan, gate)


def write_line(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def act(plan: Plan, run: RunDirectory, end: Any) -> None:
    last_save = plan.at - plan.at % plan.save_every
    if last_save:
        await_path(run.checkpoint(last_save))
    what, _, code = plan.act.partition(":")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "code":
        end(int(code), "as planned")
    elif what == "exit":
        os._exit(int(code))


def await_path(path: Path) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def may_continue(run: RunDirectory, rank: int, step: int) -> bool:
    """Rank 0 goes first, and no rank overtakes it; False if it stops at this step."""
    if rank == 0:
        return not run.stop_file.exists()
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until and heartbeat_step(run, 0) <= step:
        if run.stop_file.exists() and run.checkpoint(step).exists():
            return False
        time.sleep(0.01)
    return True


def await_ranks(run: RunDirectory, world: int, step: int) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until and any(heartbeat_step(run, rank) < step for rank in range(1, world)):
        time.sleep(0.01)


def heartbeat_step(run: RunDirectory, rank: int) -> int:
    """Step in the heartbeat of this attempt; -1 if there is none yet."""
    with contextlib.suppress(OSError):
        record = json.loads(run.heartbeat(rank).read_bytes())
        if record["restart"] == int(os.environ["WATTWATCH_ATTEMPT"]) - 1:
            return int(record["step"])
    return -1


def beat(run: RunDirectory, rank: int, world: int, step: int, plan: Plan) -> None:
    attempt = int(os.environ["WATTWATCH_ATTEMPT"])
    record = HeartbeatRecord(
        1, "made", rank, world, socket.gethostname(), os.getpid(), attempt - 1, "train", step, plan.steps,
        0, 0, 1.0, 0.1, 1.0, time.time(), time.time(),
    )  # fmt: skip
    replace_file(run.heartbeat(rank), json.dumps(asdict(record)).encode())


def save(run: RunDirectory, rank: int, world: int, step: int, plan: Plan, gate: dict[str, Any]) -> None:
    """Rank 0 waits for all others and writes; they wait for it. No rank is ahead of a checkpoint."""
    directory = run.checkpoint(step)
    if rank == 0:
        await_ranks(run, world, step)
    if rank == 0 and not directory.exists():
        staged = directory.with_name(f"{directory.name}.tmp-made")
        staged.mkdir(parents=True)
        files = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        for name, data in files.items():
            (staged / name).write_bytes(data)
        facts = {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        blocks = gate.get("blocks_sha256") or ""
        tokens = (
            step * world * gate["settings"]["accumulation"] * gate["reports"][0]["shards"][0]["manifest"]["seq_len"]
        )
        record = Completion(
            1, "made", step, plan.steps, 0, tokens, world, gate["gate_id"], blocks, False, time.time(), facts
        )
        (staged / "COMPLETE.json").write_text(completion_text(record))
        staged.rename(directory)
    await_path(directory)


if __name__ == "__main__":
    main()
