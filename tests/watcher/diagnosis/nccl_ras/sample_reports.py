"""Reports for tests: the samples in tests/data/ras, and generated ones in RAS's JSON format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.model import RasAnalysis
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls

DATA = Path(__file__).parents[3] / "data" / "ras"
GPUS_PER_NODE = 8


def sample(name: str) -> bytes:
    return (DATA / name).read_bytes()


def analyze_samples(*names: str, interval_seconds: float | None = 10.0) -> RasAnalysis:
    """Reports of one node, oldest first."""
    interval = interval_seconds if len(names) > 1 else None
    return analyze_ras([parse_polls("node-01", [(name, sample(name)) for name in names], interval)])


def analyze_reports(*reports: bytes, interval_seconds: float | None = 10.0) -> RasAnalysis:
    files = [(f"report {number}", data) for number, data in enumerate(reports, 1)]
    return analyze_ras([parse_polls("node-01", files, interval_seconds if len(reports) > 1 else None)])


@dataclass
class Communicator:
    """`members`: ranks of the job. `counts`: by rank of the job; all other ranks have those of `usual`."""

    members: Sequence[int]
    usual: Mapping[str, int] = field(default_factory=lambda: {"AllGather": 100, "ReduceScatter": 50, "AllReduce": 7})
    counts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    status: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    missing: Mapping[int, Mapping[str, bool]] = field(default_factory=dict)

    def document(self, number: int) -> dict[str, Any]:
        ranks, missing = [], []
        for rank, member in enumerate(self.members):
            node, gpu = divmod(member, GPUS_PER_NODE)
            place = {"rank": rank, "host": f"10.0.0.{node + 1}", "pid": 4000 + member, "cuda_dev": gpu, "nvml_dev": gpu}
            if member in self.missing:
                missing.append({**place, "status": self.missing[member]})
                continue
            status = {"init_state": 0, "async_error": 0, "finalize_called": False, **self.status.get(member, {})}
            counts = {**self.usual, **self.counts.get(member, {})}
            ranks.append({**place, "status": status, "collective_counts": counts})
        return {
            "hash": f"0x{number:x}",
            "secondary_hash": "0x1:0x2",
            "size": len(self.members),
            "ranks_count": len(ranks),
            "missing_ranks_count": len(missing),
            "ranks": ranks,
            "missing_ranks": missing,
        }


def report(*communicators: Communicator) -> bytes:
    return json.dumps(
        {
            "nccl_version": "2.30.3",
            "communicators_count": len(communicators),
            "communicators": [entry.document(number) for number, entry in enumerate(communicators, 0xA0)],
            "ras": {"collection_time_sec": 0.003, "timeouts_count": 0},
        }
    ).encode()
