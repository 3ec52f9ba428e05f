"""What a job file tells the gate, so that the gate asks for the very job that is launched."""

from __future__ import annotations

import os
from typing import Any

from trainer.launch.places import Places, joined, places
from trainer.ranks import WORLD_VARIABLES
from trainer.refusal import Refusal
from trainer.settings import JobFile


def option_defaults(job: JobFile) -> dict[str, Any]:
    """Values of the command's options, by their names, where nobody gives them. Raises Refusal."""
    said, here = job.settings, places(job.settings.launch, os.environ)
    for name in WORLD_VARIABLES:
        if os.environ.get(name, str(here.world)) != str(here.world):
            raise Refusal(
                f"{job.path}: {len(here.nodes)} nodes of {here.ranks_per_node} ranks are a world of {here.world}, the "
                f"environment says {name}={os.environ[name]}: correct launch.nodes or launch.ranks_per_node"
            )
    return {
        "run": said.run,
        "data": said.data,
        "model": said.model,
        "config": job.path,
        "world": here.world,
        "rendezvous": joined(here.address, here.port + 1),
        "micro_batch": said.train.micro_batch,
        "accumulation": said.train.accumulation,
        "keep": said.checkpoint.keep,
        "wait": said.launch.gate_wait_seconds,
        "strict": said.launch.strict,
    }


def more_settings(job: JobFile) -> dict[str, Any]:
    """Fields of GateSettings for which there are no options."""
    train, checkpoint = job.settings.train, job.settings.checkpoint
    return {
        "epochs": train.epochs,
        "evenness": train.evenness,
        "document_mask": train.document_mask,
        "optimizer": checkpoint.optimizer,
        "random_weights": train.random_weights,
        "file_bytes": round(checkpoint.file_gigabytes * 1e9),
        "save_timeout_seconds": float(checkpoint.timeout_seconds),
    }


def ranks_on(job: JobFile, node: str) -> tuple[int, ...]:
    """Those that the job places on `node`. Raises Refusal where it names no such node."""
    here = places(job.settings.launch, os.environ)
    if len(here.nodes) == 1:
        return tuple(here.ranks(0))
    return tuple(here.ranks(_index(here, node, job.path)))


def _index(here: Places, node: str, path: str) -> int:
    for name in (node, node.partition(".")[0]):
        if name in here.nodes:
            return here.nodes.index(name)
    shown = ", ".join(here.nodes[:4]) + (", ..." if len(here.nodes) > 4 else "")
    raise Refusal(f"{path}: this node, {node}, is none of launch.nodes, {shown}: say which with --node or --ranks")
