"""The node's GPUs from nvidia-smi.

Not through CUDA: a context takes seconds, and memory on the GPU. Not through NVML in this process: a driver that hangs
would hang the gate; so it hangs only a child.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from wattwatch.trainer.gate.child_process import ChildProcess
from wattwatch.trainer.gate.model import DevicesReport, GpuReport

# Names from `nvidia-smi --help-query-gpu`, `--help-query-compute-apps` and `--help-query-remapped-rows`.
GPU_FIELDS: Final = "index,uuid,name,driver_version,memory.total,memory.used"
HEALTH_FIELDS: Final = (
    "ecc.errors.uncorrected.volatile.total,temperature.gpu,power.draw,power.limit,retired_pages.pending"
)
PROCESS_FIELDS: Final = "pid,gpu_uuid"
ROW_FIELDS: Final = "gpu_uuid,remapped_rows.pending"
UNKNOWN_FIELD: Final = "not a valid field"  # in nvidia-smi's message about a field that this version does not have


class NvidiaSmiProbe:
    """Starts all nvidia-smi queries at once; `report` collects the answers."""

    def __init__(self) -> None:
        self._path = shutil.which("nvidia-smi")
        self._begun = time.monotonic()
        self._children: list[ChildProcess] = []
        if self._path:
            self._gpus = self._start(f"--query-gpu={GPU_FIELDS},{HEALTH_FIELDS}")
            self._processes = self._start(f"--query-compute-apps={PROCESS_FIELDS}")
            self._row_remaps = self._start(f"--query-remapped-rows={ROW_FIELDS}")

    def _start(self, query: str) -> ChildProcess:
        assert self._path is not None
        child = ChildProcess([self._path, query, "--format=csv,noheader,nounits"])
        self._children.append(child)
        return child

    def report(self, until: float) -> DevicesReport:
        """What nvidia-smi said by `until` (time.monotonic())."""
        if not self._path:
            return DevicesReport(skipped="nvidia-smi was not found on this node")
        try:
            code, gpus = self._answer(self._gpus, until)
            # An older nvidia-smi answers nothing at all if it does not know one of the fields.
            if code and UNKNOWN_FIELD in " ".join(gpus):
                code, gpus = self._answer(self._start(f"--query-gpu={GPU_FIELDS}"), until)
            processes_code, processes = self._answer(self._processes, until)
            rows_code, rows = self._answer(self._row_remaps, until)
        except TimeoutError as error:
            return DevicesReport(trouble=str(error))
        if code or processes_code:
            output = " ".join(gpus if code else processes)[:200]
            return DevicesReport(trouble=f"{self._path} exited with code {code or processes_code}: {output}")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # The query of remapped rows fails on drivers before it existed; that alone is not a problem.
        return parse_devices(gpus, processes, visible, [] if rows_code else rows)

    def _answer(self, child: ChildProcess, until: float) -> tuple[int | None, list[str]]:
        """(exit code, lines). Raises TimeoutError."""
        lines = child.lines(until)
        if not child.ended:
            raise TimeoutError(
                f"{self._path} gave no answer in {time.monotonic() - self._begun:.1f} s: the driver may be hanging"
            )
        return child.exit_code(), lines

    def close(self) -> None:
        for child in self._children:
            child.close()


def parse_devices(
    gpu_lines: list[str], process_lines: list[str], visible: str | None, row_lines: Sequence[str] = ()
) -> DevicesReport:
    """The GPUs that CUDA_VISIBLE_DEVICES (`visible`) lets the job use, and the compute processes on them.

    GPU lines have the columns of GPU_FIELDS, optionally followed by those of HEALTH_FIELDS.
    """
    gpus = []
    pending = {row[0]: _parse_flag(row[1]) for row in _csv_rows(row_lines) if len(row) == 2}
    for row in _csv_rows(gpu_lines):
        try:
            index, uuid, name, driver, total, used, *health = row
            gpu = GpuReport(int(index), uuid, name, driver, float(total), float(used), rows_pending=pending.get(uuid))
            gpus.append(_with_health(gpu, *health) if health else gpu)
        except (ValueError, TypeError):
            return DevicesReport(
                trouble=f"nvidia-smi printed a row that does not describe a GPU: {', '.join(row)[:120]!r}"
            )
    if visible is not None:
        # CUDA accepts indices, and UUIDs shortened to a unique prefix.
        allowed = [part.strip() for part in visible.split(",")]
        gpus = [
            gpu
            for gpu in gpus
            if any(
                part == str(gpu.index) or (part.startswith("GPU-") and gpu.uuid.startswith(part)) for part in allowed
            )
        ]
    index_by_uuid = {gpu.uuid: gpu.index for gpu in gpus}
    processes = tuple(
        f"pid {row[0]} on GPU {index_by_uuid[row[1]]}"
        for row in _csv_rows(process_lines)
        if len(row) == 2 and row[1] in index_by_uuid
    )
    return DevicesReport(gpus=tuple(gpus), processes=processes)


def _with_health(gpu: GpuReport, errors: str, celsius: str, watts: str, limit: str, pages: str) -> GpuReport:
    error_count = _parse_number(errors)
    return replace(
        gpu,
        uncorrected_errors=None if error_count is None else int(error_count),
        temperature_celsius=_parse_number(celsius),
        power_watts=_parse_number(watts),
        power_limit_watts=_parse_number(limit),
        pages_pending=_parse_flag(pages),
    )


def _parse_number(text: str) -> float | None:
    """None for [N/A], [Unknown Error] and the like."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _parse_flag(text: str) -> bool | None:
    """Some driver versions print Yes and No, others 1 and 0."""
    return {"yes": True, "1": True, "no": False, "0": False}.get(text.strip().lower())


def _csv_rows(lines: Sequence[str]) -> list[list[str]]:
    return [row for row in csv.reader(lines, skipinitialspace=True) if row]
