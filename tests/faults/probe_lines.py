"""A simulated job's samples as the lines of a probe, which tells a heartbeat only when it changes."""

from __future__ import annotations

import json
from typing import Any

from wattwatch.collectors.samples import GpuSample, NodeSample, ProgressSample


class ProbeLines:
    """Of one node. The host is called after it, and its files lie below a home directory."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._told: dict[str, str] = {}
        self._first = True

    def line(self, sample: NodeSample) -> bytes:
        message: dict[str, Any] = {
            "v": 1, "seq": sample.sequence, "t": sample.node_seconds, "w": sample.wall_seconds,
            "gpu": {"src": "nvml", "t": sample.node_seconds, "rows": [[_row(gpu)] for gpu in sample.gpus or ()]},
            "proc": [
                [p.pid, p.started_seconds, p.state, p.name, None, list(p.gpu_indexes)] for p in sample.processes or ()
            ],
        }  # fmt: skip
        if self._first:
            self._first, message["hello"] = False, {"host": self._host, "python": "3.11", "pid": 7}
        beats = {source.source: self._beat(source) for source in sample.progress if source.format == "heartbeat"}
        changed = [path for path, text in beats.items() if self._told.get(path) != text]
        if changed:
            message["beat"] = [[path, sample.wall_seconds, beats[path]] for path in changed]
        self._told.update(beats)
        return json.dumps(message, separators=(",", ":")).encode()

    def _beat(self, source: ProgressSample) -> str:
        return json.dumps(
            {
                "step": source.step, "steps": source.total_steps, "rank": source.rank, "world": source.world,
                "pid": source.pid, "restart": source.restart, "phase": source.phase, "host": self._host,
                "loss": source.loss,
            }
        )  # fmt: skip


def _row(gpu: GpuSample) -> list[Any]:
    return [
        gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.name, round(1000 * (gpu.power_watts or 0.0)),
        round(1000 * (gpu.power_limit_watts or 0.0)), round(gpu.utilization_percent or 0.0), 0,
        round(gpu.memory_used_bytes or 0.0), round(gpu.memory_total_bytes or 0.0), 50, 1900, None, 0, 0, 0,
    ]  # fmt: skip
