"""What the gate found, and whether it was this job's gate: a rank starts on nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.pack.manifest import Manifest, blocks_sha256
from trainer.refusal import Refusal
from trainer.run_directory import RunDirectory
from trainer.settings import Evenness, JobFile
from trainer.train.evenfix import StepPlan


@dataclass(frozen=True, slots=True)
class GateRecord:
    """The part of gate.json that a trainer relies on."""

    gate_id: str
    steps: int  # of one epoch at the shortest rank's count
    token_files: Mapping[int, str]  # sha256 by rank
    nodes: tuple[str, ...]

    @property
    def blocks_sha256(self) -> str:
        return blocks_sha256(self.token_files)


def read_gate(directory: RunDirectory, job: JobFile, world: int, gate_id: str | None) -> GateRecord:
    """gate.json, of this very job and this very attempt (`gate_id`, where a launcher named one). Raises Refusal."""
    path = directory.gate_json
    try:
        gate = json.loads(path.read_text())
        record = _record(gate)
        level, gate_world, config = gate["level"], gate["world"], gate["config_sha256"]
        step_blocks = gate["settings"]["micro_batch"] * gate["settings"]["accumulation"]
    except FileNotFoundError:
        raise Refusal(f"{path}: no gate was passed; start the job with `wattwatch-train launch`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path}: not a gate's record ({type(error).__name__}: {error}); pass the gate again") from None
    again = "pass the gate again"
    if level == "FAIL":
        raise Refusal(f"{path}: that gate was refused; mend what it names and {again}")
    if gate_world != world:
        raise Refusal(f"{path}: that gate was for {gate_world} ranks, this job has {world}; {again}")
    if config != job.sha256:
        raise Refusal(f"{path}: that gate was for another configuration than {job.path}; {again}")
    if step_blocks != job.settings.blocks_per_step:
        raise Refusal(f"{path}: that gate was for {step_blocks} blocks a step, this job takes "
                      f"{job.settings.blocks_per_step}; {again}")  # fmt: skip
    if gate_id and record.gate_id != gate_id:
        raise Refusal(
            f"{path}: gate {record.gate_id}, the launcher passed {gate_id}; another launch in this directory?"
        )
    return record


def _record(gate: Any) -> GateRecord:
    shards = [(shard["rank"], shard["manifest"]) for report in gate["reports"] for shard in report["shards"]]
    return GateRecord(
        gate["gate_id"],
        gate["steps"] or 0,
        {int(rank): str(manifest["sha256"]) for rank, manifest in shards if manifest},
        tuple(str(report["node"]) for report in sorted(gate["reports"], key=lambda report: min(report["ranks"]))),
    )


def check_shard(record: GateRecord, manifest: Manifest, rank: int) -> None:
    """Raises Refusal where this rank's blocks are not those that passed."""
    if record.token_files.get(rank) != manifest.sha256:
        raise Refusal(f"rank {rank}: its blocks are not those that passed the gate; pass the gate again")


def check_plan(record: GateRecord, plan: StepPlan) -> None:
    """Raises Refusal where the ranks have agreed on other steps than the gate counted."""
    if plan.evenness is Evenness.MIN and plan.steps_per_epoch != record.steps:
        raise Refusal(
            f"the ranks agree on {plan.steps_per_epoch:,} steps, the gate counted {record.steps:,}; pass the gate again"
        )
