"""The probe's own question to nvidia-smi, and the quick way to read its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wattwatch.collectors.nvml import throttle_names
from wattwatch.collectors.samples import NO_REASONS, GpuSample, HostStatus, PowerSource
from wattwatch.collectors.smi.columns import columns_from_names
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells
from wattwatch.collectors.smi.read_output import read_gpu_output
from wattwatch.collectors.smi.report import GpuSnapshot, SmiReport

QUERY_FIELDS: Final = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "power.draw",
    "enforced.power.limit",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "clocks.sm",
    "pstate",
    "clocks_event_reasons.active",
    "mig.mode.current",
    "power.draw.average",
    "power.draw.instant",
)
"""What to ask for: `nvidia-smi --query-gpu=<these, with commas> --format=csv,noheader,nounits`. One field that the
driver does not know empties the whole answer (exit 2, `SmiReport.invalid_fields`): then ask for the shorter list."""
FALLBACK_QUERY_FIELDS: Final = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "power.draw",
    "power.limit",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "clocks.sm",
    "pstate",
)
"""Known to every driver since 2013."""
QUERY_FORMAT: Final = "csv,noheader,nounits"

_MEBIBYTE: Final = 2.0**20
_COLUMNS: Final = tuple(column.field for column in columns_from_names(QUERY_FIELDS))
_UNITS: Final = tuple(column.unit for column in columns_from_names(QUERY_FIELDS))


def read_query_csv(
    data: bytes, stderr: bytes = b"", exit_code: int | None = None, fields: Sequence[str] = QUERY_FIELDS
) -> SmiReport:
    """Like `read_gpu_output` for rows of `fields` without header and units; quick where every line is such a row.

    Anything else in the answer (a warning, an error line, a shorter row) takes the general way.
    """
    if fields is QUERY_FIELDS and not stderr and not exit_code:
        gpus = _plain_gpus(data)
        if gpus:
            return SmiReport("csv", HostStatus.OK, "", (GpuSnapshot(None, gpus),))
    return read_gpu_output(data, stderr, exit_code, fields)


def _plain_gpus(data: bytes) -> tuple[GpuSample, ...] | None:
    """The boards if every line is a row of ours with a board's number, else None."""
    gpus = []
    try:
        for line in data.decode("ascii").splitlines():
            cells = line.split(", ")
            try:
                gpus.append(_plain_gpu(cells))
            except ValueError:  # one absent or failed cell
                gpus.append(gpu_from_cells(dict(zip(_COLUMNS, zip(cells, _UNITS, strict=True), strict=True))))
    except ValueError:  # not ASCII, not our number of cells: the general reader knows what it is
        return None
    indexes = {gpu.index for gpu in gpus}
    return tuple(gpus) if len(indexes) == len(gpus) and None not in indexes else None


def _plain_gpu(cells: Sequence[str]) -> GpuSample:
    (
        index, uuid, bus, name, draw, limit, utilization, memory_utilization, used, total, temperature, clock, state,
        throttle, mig, _, _,
    ) = cells  # fmt: skip
    watts, load, memory_load = float(draw), float(utilization), float(memory_utilization)
    in_range = 0.0 <= load <= 100.0 and 0.0 <= memory_load <= 100.0 and watts > 0.0 and float(limit) > 0.0
    if not in_range or mig != "Disabled" or state[:1] != "P" or name[:1] == "[" or uuid[:4] != "GPU-":
        raise ValueError(cells)
    return GpuSample(
        int(index),
        uuid,
        bus,
        name,
        watts,
        PowerSource.DRAW,
        float(limit),
        load,
        memory_load,
        float(used) * _MEBIBYTE,
        float(total) * _MEBIBYTE,
        float(temperature),
        float(clock),
        None,
        throttle_names(int(throttle, 16)),
        state,
        False,
        NO_REASONS,
    )
