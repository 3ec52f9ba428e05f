"""Runs the node agent on this machine, as a node would, without SSH."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tools import DEADLINE_SECONDS
from wattwatch.watcher.diagnosis.capture.collector import CapturePlan, NodeCapturePlan, command_and_stdin
from wattwatch.watcher.diagnosis.capture.files import AgentFrame, AgentFrameReader


@dataclass(slots=True)
class Answer:
    files: dict[tuple[str, int | None], bytes] = field(default_factory=dict)  # by kind and rank
    heads: dict[tuple[str, int | None], dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    complete: bool = False

    def take(self, frame: AgentFrame) -> None:
        if "missing" in frame.header:
            self.missing.append(frame.header["missing"])
        elif "file" in frame.header:
            key = (frame.header["file"], frame.header.get("rank"))
            self.files[key], self.heads[key] = frame.data, frame.header
        self.elsewhere += frame.header.get("elsewhere", [])

    def why(self, rank: int) -> str:
        """All that is said of one rank."""
        return "; ".join(sentence for sentence in self.missing if sentence.startswith(f"rank {rank}:"))

    def ranks(self, kind: str) -> set[int | None]:
        return {rank for of, rank in self.files if of == kind}


def ask(plan: CapturePlan, node: NodeCapturePlan, path: Path | None = None) -> Answer:
    """`path`: a directory to find the node's tools in before others."""
    command, stdin = command_and_stdin(plan, node, plan.deadline_seconds)
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    done = subprocess.run(
        ["sh", "-c", command], input=stdin, capture_output=True, env=environment, timeout=DEADLINE_SECONDS
    )
    reader, answer = AgentFrameReader(plan.rank_bytes + 2**20), Answer()
    for frame in reader.feed(done.stdout):
        answer.take(frame)
    assert not done.stderr, done.stderr.decode()
    answer.complete = reader.complete
    return answer
