"""What the probe asks of nvidia-smi, and the fast path for the answer it usually gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from wattwatch.collectors.nvml import throttle_names
from wattwatch.collectors.samples import GPU_READINGS, NO_REASONS, GpuSample, HostStatus, PowerSource
from wattwatch.collectors.smi.columns import UNITS, columns_from_names
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells
from wattwatch.collectors.smi.read_output import read_gpu_output
from wattwatch.collectors.smi.report import GpuSnapshot, SmiReport

_OTHER_POWER: Final = ("power.draw.average", "power.draw.instant")  # for GPUs without power.draw
QUERY_FIELDS: Final = (
    "index",
    *(reading.query for reading in GPU_READINGS.values() if reading.query),
    *_OTHER_POWER,
)
"""Fields of the query `nvidia-smi --query-gpu=<fields, separated by commas> --format=csv,noheader,nounits`. If the
driver does not know one of these fields, the whole answer is empty (exit status 2, `SmiReport.invalid_fields`). In that
case, query fewer fields."""
FALLBACK_QUERY_FIELDS: Final = ("index", *(reading.old_query for reading in GPU_READINGS.values() if reading.old_query))
"""Fields that every driver since 2013 knows. The shell probe falls back to them, because it
cannot drop single columns."""
QUERY_FORMAT: Final = "csv,noheader,nounits"

_FIELDS: Final = tuple(column.field for column in columns_from_names(QUERY_FIELDS))
_UNITS: Final = tuple(column.unit for column in columns_from_names(QUERY_FIELDS))
_SLOTS: Final = {each.name: slot for slot, each in enumerate(fields(GpuSample))}  # field -> position in the class
_NUMBERS: Final = tuple(
    (
        QUERY_FIELDS.index(reading.query),
        _SLOTS[name],
        UNITS[reading.query_unit.casefold()],
        reading.lowest,
        float("inf") if reading.highest is None else reading.highest,
    )
    for name, reading in GPU_READINGS.items()
    if reading.query and reading.kind == "number"
)
_TEXTS: Final = tuple(
    (QUERY_FIELDS.index(reading.query), _SLOTS[name])
    for name, reading in GPU_READINGS.items()
    if reading.query and reading.kind == "text"
)
_UUID, _POWER, _STATE, _THROTTLE, _MIG = (
    _FIELDS.index(field) for field in ("uuid", "power_draw", "performance_state", "throttle_mask", "mig")
)
_LIMIT_SLOT, _POWER_SLOT, _SOURCE_SLOT, _STATE_SLOT, _THROTTLE_SLOT, _MIG_SLOT, _REASONS_SLOT = (
    _SLOTS[name]
    for name in (
        "power_limit_watts",
        "power_watts",
        "power_source",
        "performance_state",
        "throttle_reasons",
        "mig",
        "reasons",
    )
)


def read_query_csv(
    data: bytes, stderr: bytes = b"", exit_code: int | None = None, names: Sequence[str] = QUERY_FIELDS
) -> SmiReport:
    """Like `read_gpu_output` for rows of the columns `names`, without header and units.

    Fast where every line is such a row. Anything else in the answer (a warning, an error line, a shorter row) takes
    the general way.
    """
    if not stderr and not exit_code and tuple(names) == QUERY_FIELDS:
        gpus = _plain_gpus(data)
        if gpus:
            return SmiReport("csv", HostStatus.OK, "", (GpuSnapshot(None, gpus),))
    return read_gpu_output(data, stderr, exit_code, names)


def _plain_gpus(data: bytes) -> tuple[GpuSample, ...] | None:
    """The GPUs if every line is a row of QUERY_FIELDS with a GPU's index, else None."""
    gpus = []
    try:
        for line in data.decode("ascii").splitlines():
            cells = line.split(", ")
            try:
                gpus.append(_plain_gpu(cells))
            except ValueError:  # one absent or failed cell
                gpus.append(gpu_from_cells(dict(zip(_FIELDS, zip(cells, _UNITS, strict=True), strict=True))))
    except ValueError:  # not ASCII, not our number of cells: the general reader knows what it is
        return None
    indexes = {gpu.index for gpu in gpus}
    return tuple(gpus) if len(indexes) == len(gpus) and None not in indexes else None


def _plain_gpu(cells: Sequence[str]) -> GpuSample:
    """A row in which every reading is a plain number. Raises ValueError for any other: `gpu_from_cells` reads those."""
    if len(cells) != len(_FIELDS):
        raise ValueError(cells)
    state, watts = cells[_STATE], float(cells[_POWER])
    if cells[_MIG] != "Disabled" or state[:1] != "P" or cells[_UUID][:4] != "GPU-" or not watts > 0.0:
        raise ValueError(cells)
    values: list[Any] = [None] * len(_SLOTS)
    for place, slot in _TEXTS:
        text = values[slot] = cells[place]
        if text[:1] == "[":  # [N/A], [Unknown Error]
            raise ValueError(cells)
    for place, slot, factor, lowest, highest in _NUMBERS:
        value = values[slot] = float(cells[place]) * factor
        if not lowest <= value <= highest:
            raise ValueError(cells)
    if not values[_LIMIT_SLOT]:  # 0 W is no limit
        raise ValueError(cells)
    values[0] = int(cells[0])  # the index comes first in both
    values[_POWER_SLOT], values[_SOURCE_SLOT] = watts, PowerSource.DRAW
    values[_STATE_SLOT], values[_MIG_SLOT], values[_REASONS_SLOT] = state, False, NO_REASONS
    values[_THROTTLE_SLOT] = throttle_names(int(cells[_THROTTLE], 16))
    return GpuSample(*values)
