"""GPUs by nvidia-smi: no CUDA context, which takes seconds and memory; a driver that hangs holds a child only."""

from __future__ import annotations

import csv
import os
import shutil
import time
from typing import Final

from trainer.gate.child import Child
from trainer.gate.report import DevicesLook, Gpu

GPU_FIELDS: Final = "index,uuid,name,driver_version,memory.total,memory.used"
PROCESS_FIELDS: Final = "pid,gpu_uuid"


class DevicesProbe:
    """Two questions to nvidia-smi, asked at once, answered later."""

    def __init__(self) -> None:
        self._path = shutil.which("nvidia-smi")
        self._children: list[Child] = []
        if self._path:
            for query in (f"--query-gpu={GPU_FIELDS}", f"--query-compute-apps={PROCESS_FIELDS}"):
                self._children.append(Child([self._path, query, "--format=csv,noheader,nounits"]))

    def look(self, until: float) -> DevicesLook:
        if not self._children:
            return DevicesLook(skipped="no nvidia-smi on this node")
        begun = time.monotonic()
        answers = []
        for child in self._children:
            lines = child.lines(until)
            if not child.ended:
                waited = time.monotonic() - begun
                return DevicesLook(trouble=f"{self._path} gave no answer in {waited:.1f} s: the driver hangs")
            if code := child.exit_code():
                return DevicesLook(trouble=f"{self._path} ended with {code}: {' '.join(lines)[:200]}")
            answers.append(lines)
        return read_devices(answers[0], answers[1], os.environ.get("CUDA_VISIBLE_DEVICES"))

    def close(self) -> None:
        for child in self._children:
            child.close()


def read_devices(gpu_lines: list[str], process_lines: list[str], visible: str | None) -> DevicesLook:
    """The boards that CUDA_VISIBLE_DEVICES lets the job see, and the compute processes on those."""
    gpus = []
    for row in _rows(gpu_lines):
        try:
            index, uuid, name, driver, total, used = row
            gpus.append(Gpu(int(index), uuid, name, driver, float(total), float(used)))
        except ValueError:
            return DevicesLook(trouble=f"nvidia-smi said {', '.join(row)[:120]!r} where a GPU was expected")
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",")]
        gpus = [
            gpu
            for gpu in gpus
            if any(part == str(gpu.index) or (part.startswith("GPU-") and gpu.uuid.startswith(part)) for part in wanted)
        ]
    by_uuid = {gpu.uuid: gpu.index for gpu in gpus}
    processes = tuple(
        f"pid {row[0]} on GPU {by_uuid[row[1]]}" for row in _rows(process_lines) if len(row) == 2 and row[1] in by_uuid
    )
    return DevicesLook(gpus=tuple(gpus), processes=processes)


def _rows(lines: list[str]) -> list[list[str]]:
    return [row for row in csv.reader(lines, skipinitialspace=True) if row]
