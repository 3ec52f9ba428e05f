"""GPUs by nvidia-smi: no CUDA context, which takes seconds and memory; a driver that hangs holds a child only."""

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

GPU_FIELDS: Final = "index,uuid,name,driver_version,memory.total,memory.used"
HEALTH_FIELDS: Final = (
    "ecc.errors.uncorrected.volatile.total,temperature.gpu,power.draw,power.limit,retired_pages.pending"
)
PROCESS_FIELDS: Final = "pid,gpu_uuid"
ROW_FIELDS: Final = "gpu_uuid,remapped_rows.pending"
UNKNOWN_FIELD: Final = "not a valid field"


class NvidiaSmiProbe:
    """Questions to nvidia-smi, asked at once, answered later. An older one does not know all of them."""

    def __init__(self) -> None:
        self._path = shutil.which("nvidia-smi")
        self._begun = time.monotonic()
        self._children: list[ChildProcess] = []
        if self._path:
            self._gpus = self._ask(f"--query-gpu={GPU_FIELDS},{HEALTH_FIELDS}")
            self._processes = self._ask(f"--query-compute-apps={PROCESS_FIELDS}")
            self._row_remaps = self._ask(f"--query-remapped-rows={ROW_FIELDS}")

    def _ask(self, query: str) -> ChildProcess:
        assert self._path is not None
        child = ChildProcess([self._path, query, "--format=csv,noheader,nounits"])
        self._children.append(child)
        return child

    def look(self, until: float) -> DevicesReport:
        if not self._path:
            return DevicesReport(skipped="no nvidia-smi on this node")
        try:
            code, gpus = self._answer(self._gpus, until)
            if code and UNKNOWN_FIELD in " ".join(gpus):  # one unknown field, and it answers none
                code, gpus = self._answer(self._ask(f"--query-gpu={GPU_FIELDS}"), until)
            processes_code, processes = self._answer(self._processes, until)
            rows_code, rows = self._answer(self._row_remaps, until)
        except TimeoutError as error:
            return DevicesReport(trouble=str(error))
        if code or processes_code:
            words = " ".join(gpus if code else processes)[:200]
            return DevicesReport(trouble=f"{self._path} ended with {code or processes_code}: {words}")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return parse_devices(gpus, processes, visible, [] if rows_code else rows)

    def _answer(self, child: ChildProcess, until: float) -> tuple[int | None, list[str]]:
        """(exit code, lines). Raises TimeoutError."""
        lines = child.lines(until)
        if not child.ended:
            raise TimeoutError(
                f"{self._path} gave no answer in {time.monotonic() - self._begun:.1f} s: the driver hangs"
            )
        return child.exit_code(), lines

    def close(self) -> None:
        for child in self._children:
            child.close()


def parse_devices(
    gpu_lines: list[str], process_lines: list[str], visible: str | None, row_lines: Sequence[str] = ()
) -> DevicesReport:
    """The boards that CUDA_VISIBLE_DEVICES lets the job see, and the compute processes on those."""
    gpus = []
    pending = {row[0]: _parse_flag(row[1]) for row in _csv_rows(row_lines) if len(row) == 2}
    for row in _csv_rows(gpu_lines):
        try:
            index, uuid, name, driver, total, used, *health = row
            gpu = GpuReport(int(index), uuid, name, driver, float(total), float(used), rows_pending=pending.get(uuid))
            gpus.append(_with_health(gpu, *health) if health else gpu)
        except (ValueError, TypeError):
            return DevicesReport(trouble=f"nvidia-smi said {', '.join(row)[:120]!r} where a GPU was expected")
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",")]
        gpus = [
            gpu
            for gpu in gpus
            if any(part == str(gpu.index) or (part.startswith("GPU-") and gpu.uuid.startswith(part)) for part in wanted)
        ]
    by_uuid = {gpu.uuid: gpu.index for gpu in gpus}
    processes = tuple(
        f"pid {row[0]} on GPU {by_uuid[row[1]]}"
        for row in _csv_rows(process_lines)
        if len(row) == 2 and row[1] in by_uuid
    )
    return DevicesReport(gpus=tuple(gpus), processes=processes)


def _with_health(gpu: GpuReport, errors: str, celsius: str, watts: str, limit: str, pages: str) -> GpuReport:
    count = _parse_number(errors)
    return replace(
        gpu,
        uncorrected_errors=None if count is None else int(count),
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
    """Drivers say Yes or 1, No or 0."""
    return {"yes": True, "1": True, "no": False, "0": False}.get(text.strip().lower())


def _csv_rows(lines: Sequence[str]) -> list[list[str]]:
    return [row for row in csv.reader(lines, skipinitialspace=True) if row]
