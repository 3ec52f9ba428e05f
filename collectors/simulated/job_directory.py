"""The files of one simulated job, shared by its nodes: heartbeats or a log of another trainer, and checkpoints.

The run directory has the layout of wattwatch-train; the log imitates torchtitan. Modification times are the scenario's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.node_directory import FIRST_PID, replace_bytes, replace_text
from wattwatch.collectors.simulated.scenario import TOKENS_PER_STEP, Scenario, SimulatedActivity

SHARDS: Final = 13
SHARD_BYTES: Final = 62 * 10**9 // SHARDS  # about 62 GB in total
LOG_EVERY_STEPS: Final = 2


class JobDirectory:
    """Writes one job's progress and checkpoints over time. `show` may be called at any rate."""

    def __init__(self, directory: Path, scenario: Scenario, clock: Clock) -> None:
        self.directory = directory
        self.scenario = scenario
        self.checkpoints = directory / "checkpoints"
        self.log = directory / "logs" / "train.log"
        self._clock = clock
        self._shown: list[tuple[int, str] | None] = [None] * scenario.world
        self._logged_step = scenario.first_step
        self._saving: tuple[Path, int, float, float] | None = None  # staged, step, started, seconds
        for folder in ("heartbeat", "checkpoints", "logs"):
            (directory / folder).mkdir(parents=True)
        if scenario.progress == "heartbeats":
            self._write_run()
        else:
            self._log("Training starts at step 1")
        self._write_checkpoint(scenario.first_step // 500 * 500, clock.wall() - 1800.0)

    def _write_run(self) -> None:
        scenario = self.scenario
        run = {
            "schema": 1,
            "run": scenario.name,
            "world": scenario.world,
            "nodes": list(scenario.node_names),
            "steps": scenario.total_steps,
            "tokens_per_step": TOKENS_PER_STEP,
            "save_every": 500,
            "seq_len": 2048,
            "gate_id": f"simulated-{scenario.name}",
        }
        replace_bytes(self.directory / "run.json", orjson.dumps(run))

    def show(self, step: int, activities: Sequence[SimulatedActivity | None], tokens_per_second: float | None) -> None:
        """Write the progress of each rank. None: no more heartbeats (its process or its node is gone)."""
        now = self._clock.wall()
        if self.scenario.progress == "torchtitan":
            self._show_log(step, tokens_per_second)
        else:
            for rank, activity in enumerate(activities):
                if activity is None or not activity.phase or self._shown[rank] == (step, activity.phase):
                    continue
                self._shown[rank] = (step, activity.phase)
                self._write_heartbeat(rank, step, activity, now)
        self._advance_checkpoint(now)

    def _write_heartbeat(self, rank: int, step: int, activity: SimulatedActivity, now: float) -> None:
        scenario = self.scenario
        heartbeat = {
            "v": 1,
            "run": scenario.name,
            "rank": rank,
            "world": scenario.world,
            "host": scenario.node_of_rank(rank),
            "pid": FIRST_PID + rank % scenario.gpus_per_node,
            "restart": 0,
            "phase": activity.phase,
            "step": step,
            "steps": scenario.total_steps,
            "micro": 0,
            "blocks_left": 8 * (scenario.total_steps - step),
            "tokens_per_second": activity.tokens_per_second,
            "data_wait_ms": activity.data_wait_ms,
            "loss": loss_at(step),
            "t_wall": now,
            "t_step": now,
        }
        replace_bytes(self.directory / "heartbeat" / f"rank-{rank:05d}.json", orjson.dumps(heartbeat), now)

    def _show_log(self, step: int, tokens_per_second: float | None) -> None:
        if tokens_per_second is None or step < self._logged_step + LOG_EVERY_STEPS:
            return
        self._logged_step = step - step % LOG_EVERY_STEPS
        # torchtitan prints it per GPU; format of the line: torchtitan/components/metrics.py
        per_gpu = tokens_per_second / self.scenario.world
        self._log(
            f"step: {self._logged_step:2}  loss: {loss_at(step):8.5f}  grad_norm: {0.75:7.4f}  "
            f"memory: 82.31GiB(30.75%)  tps: {per_gpu:,.0f}  tflops: 650.76  mfu: 28.92%"
        )

    def _log(self, text: str) -> None:
        now = self._clock.wall()
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"[rank0]:[titan] {stamp} - root - INFO - {text}\n")
        os.utime(self.log, (now, now))

    def begin_save(self, step: int, seconds: float) -> None:
        """Let a checkpoint grow under a temporary name for `seconds`; then it gets its marker and its name."""
        staged = self.checkpoints / f"step-{step:08d}.tmp-5eed"
        staged.mkdir()
        self._saving = (staged, step, self._clock.wall(), seconds)

    def _advance_checkpoint(self, now: float) -> None:
        if self._saving is None:
            return
        staged, step, began, seconds = self._saving
        share = min(1.0, (now - began) / seconds)
        done = share * SHARDS * SHARD_BYTES
        for number in range(SHARDS):
            size = int(max(0.0, min(SHARD_BYTES, done - number * SHARD_BYTES)))
            if size:
                write_shard(staged, number, size, now)
        os.utime(staged, (now, now))
        if share >= 1.0:
            self._saving = None
            self._publish(staged, step, now)

    def _write_checkpoint(self, step: int, changed_seconds: float) -> None:
        """A checkpoint that was complete before the scenario."""
        staged = self.checkpoints / f"step-{step:08d}.tmp-5eed"
        staged.mkdir()
        for number in range(SHARDS):
            write_shard(staged, number, SHARD_BYTES, changed_seconds)
        self._publish(staged, step, changed_seconds)

    def _publish(self, staged: Path, step: int, changed_seconds: float) -> None:
        """Write the marker, then rename, then update the pointer: the order of our trainer."""
        sizes = {path.name: path.stat().st_size for path in sorted(staged.iterdir())}
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {f"w{i}": n for i, n in enumerate(sizes)},
        }
        replace_bytes(staged / "model.safetensors.index.json", orjson.dumps(index), changed_seconds)
        complete = {"step": step, "tokens": step * TOKENS_PER_STEP, "files": sizes, "config": "simulated"}
        replace_bytes(staged / "COMPLETE.json", orjson.dumps(complete), changed_seconds)
        final = self.checkpoints / f"step-{step:08d}"
        if final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        os.utime(final, (changed_seconds, changed_seconds))
        replace_text(self.checkpoints / "latest", final.name + "\n", changed_seconds)


def write_shard(folder: Path, number: int, size: int, changed_seconds: float) -> None:
    """A safetensors file with a real header and a hole instead of tensors: 4.8 GB that use no disk space."""
    path = folder / f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
    if not path.exists():
        head = orjson.dumps({f"w{number}": {"dtype": "BF16", "shape": [1], "data_offsets": [0, SHARD_BYTES]}})
        head = head.ljust(-(-len(head) // 8) * 8)
        tensor_bytes = SHARD_BYTES - 8 - len(head)
        head = head.replace(str(SHARD_BYTES).encode(), str(tensor_bytes).encode().ljust(len(str(SHARD_BYTES))))
        path.write_bytes(len(head).to_bytes(8, "little") + head)
    if size > path.stat().st_size:
        os.truncate(path, size)
        os.utime(path, (changed_seconds, changed_seconds))


def loss_at(step: int) -> float:
    """Loss curve as in arXiv 2608.05944: 1.60 at the start, then 0.74, then 0.68."""
    return round(0.66 + 0.94 / (1 + step / 120), 4)
