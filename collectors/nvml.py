"""NVML rows sent by the node's probe -> `GpuSample`.

The probe sends numbers and return codes as NVML returned them. Their meaning is decided here, where it can be tested
and changed without touching what runs on nodes. A row is a list of values in the order of `columns`, which the line
names; a value that NVML did not return is null. Failures are sent beside it: column -> NVML return code, non-zero
only. What is read is declared in `GpuSample` (samples.py).

Two facts that caused outages elsewhere. Power read as an NVML field value from a lost GPU is 0 with nvmlReturn 15 and
raises nothing, while the same GPU still answers its name, limit and clocks. And an instant power reading aliases with
the training step, so the mean over the interval is taken from the energy counter where the GPU has one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.samples import (
    GPU_READINGS,
    NO_REASONS,
    GpuSample,
    HostStatus,
    MissingGpu,
    PowerSource,
    ReadingStatus,
)

UNNAMED_COLUMNS: Final = (
    "index",
    "uuid",
    "pci_bus_id",
    "name",
    "power_mw",
    "power_limit_mw",
    "util",
    "mem_util",
    "mem_used",
    "mem_total",
    "temp",
    "sm_clock",
    "energy_mj",
    "throttle_bitmask",
    "pstate",
    "mig",
)
"""Columns of the recordings made before release 0.2.0, in order. Their lines do not name the columns, so never change
this list."""
HANDLE_ERROR: Final = "handle"
"""This key in the errors of a row means that the GPU's handle could not be opened. The row then contains only the index
of the GPU."""

LIVE_FIELDS: Final = tuple(name for name, reading in GPU_READINGS.items() if reading.live)
"""Readings that must not be trusted once a GPU is lost: a lost GPU may still return old numbers or zeros for them."""

THROTTLE_BITS: Final = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
"""Each bit is a constant nvmlClocksEventReason* of nvml.h, and each name is a column name of nvidia-smi."""

MAX_ENERGY_INTERVAL_SECONDS: Final = 120.0
"""A mean power is computed over at most this interval. Over a longer one, the mean would describe the GPU's past, not
its present. The value is chosen, not measured: a renewed connection or a slow node causes shorter gaps."""

_NOT_AVAILABLE: Final = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})  # NVML_VALUE_NOT_AVAILABLE, 32 and 64 bits
_MAX_VALUE: Final = 1e18  # of no reading; larger numbers are garbage in memory that NVML did not fill
_UNKNOWN_CODE: Final = 999
_CODES: Final[Mapping[int, Mapping[str, str]]] = {
    int(code): entry
    for code, entry in tomllib.loads((resources.files(__package__) / "nvml_codes.toml").read_text("utf-8")).items()
}
_REASONS: Final[Mapping[int, ReadingStatus]] = {code: ReadingStatus(entry["reason"]) for code, entry in _CODES.items()}
_FIELD_OF_KEY: Final = {reading.nvml_key: name for name, reading in GPU_READINGS.items() if reading.nvml_key}
_SLOTS: Final = {each.name: slot for slot, each in enumerate(fields(GpuSample))}  # field -> position in the class


class NvmlColumns:
    """The names of the values in a row, resolved once: reading a row by name then costs no look-up.

    A column that the row does not have has the place -1, where `gpu_from_nvml` puts a None.
    """

    def __init__(self, names: Sequence[str]) -> None:
        place = {name: place for place, name in enumerate(names)}
        numbers = [
            (name, reading)
            for name, reading in GPU_READINGS.items()
            if reading.kind == "number" and reading.nvml_key in place
        ]
        self.width = len(names)
        self.identity = place.get("index", -1), place.get("pci_bus_id", -1)
        self.special = tuple(place.get(key, -1) for key in ("index", "mig", "power_mw", "throttle_bitmask", "pstate"))
        self.texts = [
            (place[reading.nvml_key], _SLOTS[name])
            for name, reading in GPU_READINGS.items()
            if reading.kind == "text" and reading.nvml_key in place
        ]
        self.numbers = [
            (
                place[reading.nvml_key],
                _SLOTS[name],
                name,
                reading.nvml_divisor,
                reading.lowest * reading.nvml_divisor,
                _MAX_VALUE if reading.highest is None else reading.highest * reading.nvml_divisor,
            )
            for name, reading in numbers
        ]
        self.number_slots = {name: _SLOTS[name] for name, _ in numbers}


@lru_cache(maxsize=32)
def nvml_columns(names: tuple[str, ...]) -> NvmlColumns:
    """The columns of a line. Cached: every line of a probe names the same ones."""
    return NvmlColumns(names)


def _code_entry(code: object) -> Mapping[str, str]:
    return _CODES.get(code if type(code) is int else _UNKNOWN_CODE, _CODES[_UNKNOWN_CODE])


def status_of_code(code: object) -> ReadingStatus:
    """What this return code says of one reading. A code that NVML adds later is unreadable until it is listed."""
    if code == 0:
        return ReadingStatus.OK
    return _REASONS.get(code, ReadingStatus.UNREADABLE) if type(code) is int else ReadingStatus.UNREADABLE


def host_status_of(code: int) -> tuple[HostStatus, str]:
    """What the return code of nvmlInit or nvmlDeviceGetCount says of the whole host, with a sentence."""
    entry = _code_entry(code)
    status = HostStatus(entry.get("host", HostStatus.DRIVER_DOWN))
    return status, f"{entry['detail']} (NVML error {code})"


def throttle_names(bitmask: int) -> frozenset[str]:
    """Names of the set bits; a bit without a name is kept as `bit_0x...` so that nothing is lost."""
    known = _KNOWN_MASKS.get(bitmask)
    if known is not None:
        return known
    names = {name for bit, name in THROTTLE_BITS if bitmask & bit}
    names |= {f"bit_{1 << place:#x}" for place in range(9, 64) if bitmask >> place & 1}
    return frozenset(names)


# Computed once: it is needed for every GPU of every line.
_KNOWN_MASKS: Final[dict[int, frozenset[str]]] = {}
_KNOWN_MASKS.update({mask: throttle_names(mask) for mask in range(0x200)})


_UNNAMED: Final = NvmlColumns(UNNAMED_COLUMNS)
_UTILIZATION, _ENERGY = _SLOTS["utilization_percent"], _SLOTS["energy_joules"]
_INDEX, _POWER, _POWER_SOURCE, _THROTTLE, _STATE, _MIG, _REASONS_SLOT = (
    _SLOTS[name]
    for name in ("index", "power_watts", "power_source", "throttle_reasons", "performance_state", "mig", "reasons")
)


def gpu_from_nvml(
    row: Sequence[Any],
    errors: Mapping[str, int] | None,
    previous_energy: tuple[float, float] | None,
    node_seconds: float,
    columns: NvmlColumns = _UNNAMED,
) -> GpuSample:
    """One GPU of one probe line.

    `errors`: column -> NVML return code, non-zero only (None or empty for a healthy GPU). `previous_energy`: this
    GPU's (node_seconds, joules) in the previous line, for mean watts; `node_seconds`: the same clock, now. `columns`:
    the names of the values in `row`; a name that this version does not know is ignored, a reading whose column is not
    there was not queried.

    Never raises on what a node may send: a value of the wrong type is unreadable. Power: the energy counter's mean
    over the interval; the instant draw where there is no counter, no interval, or the counter did not move forward.
    """
    missing = columns.width - len(row)
    row = (*row, *(None,) * (missing + 1)) if missing >= 0 else (*row[: columns.width], None)
    at_index, at_mig, at_power, at_throttle, at_state = columns.special
    reasons: dict[str, ReadingStatus] = _statuses_of_errors(errors) if errors else {}
    # Decided before MIG and the energy counter replace the status of single readings.
    lost = bool(reasons) and ReadingStatus.LOST in reasons.values()
    values: list[Any] = [None] * len(_SLOTS)
    if row[at_mig] is not None:
        values[_MIG] = row[at_mig] == 1
        if values[_MIG]:
            # Utilization of a GPU divided into MIG instances has no meaning for the whole of it, whatever NVML returns.
            reasons["utilization_percent"] = reasons["memory_utilization_percent"] = ReadingStatus.MIG
    for place, slot in columns.texts:
        text = row[place]
        if type(text) is str:
            values[slot] = text
    failed = [columns.number_slots.get(name) for name in reasons]
    for place, slot, name, divisor, lowest, highest in columns.numbers:
        value = row[place]
        kind = type(value)
        if (kind is int or kind is float) and lowest <= value <= highest and value not in _NOT_AVAILABLE:
            values[slot] = value / divisor
        elif value is not None:
            reasons.setdefault(name, _why_not_a_number(value))
    for failed_slot in failed:
        if failed_slot is not None:
            values[failed_slot] = None  # a value beside an error code is not one
    values[_POWER], values[_POWER_SOURCE] = _power(
        row[at_power], values[_UTILIZATION], values[_ENERGY], previous_energy, node_seconds, reasons
    )
    mask, state, index = row[at_throttle], row[at_state], row[at_index]
    if type(mask) is int and mask >= 0 and "throttle_reasons" not in reasons:
        values[_THROTTLE] = throttle_names(mask)
    if type(state) is int and 0 <= state < 16 and "performance_state" not in reasons:  # 32: unknown
        values[_STATE] = f"P{state}"
    if type(index) is int:
        values[_INDEX] = index
    values[_REASONS_SLOT] = reasons or NO_REASONS
    sample = GpuSample(*values)
    return discard_live_readings(sample) if lost else sample


def missing_from_nvml(
    row: Sequence[Any], errors: Mapping[str, int] | None, columns: NvmlColumns = _UNNAMED
) -> MissingGpu | None:
    """The GPU whose handle NVML would not open, else None: it counts as missing and has no sample."""
    code = (errors or {}).get(HANDLE_ERROR, 0)
    if not code:
        return None
    index, bus = (row[place] if 0 <= place < len(row) else None for place in columns.identity)
    index = index if type(index) is int else None
    gpu = "a GPU" if index is None else f"GPU {index}"
    detail = f"NVML cannot open {gpu}: {_code_entry(code)['detail']} (NVML error {code})"
    return MissingGpu(index, bus if type(bus) is str else None, status_of_code(code), detail)


def _statuses_of_errors(errors: Mapping[str, int]) -> dict[str, ReadingStatus]:
    """Field name -> status; a handle that could not be opened is the reason for every field."""
    if errors.get(HANDLE_ERROR):
        return dict.fromkeys(_FIELD_OF_KEY.values(), status_of_code(errors[HANDLE_ERROR]))
    return {_FIELD_OF_KEY[key]: status_of_code(code) for key, code in errors.items() if code and key in _FIELD_OF_KEY}


def _why_not_a_number(value: object) -> ReadingStatus:
    """NVML's "not available" is absence; a wrong type or a value out of range is a reading that failed."""
    absent = type(value) is int and value in _NOT_AVAILABLE
    return ReadingStatus.UNSUPPORTED if absent else ReadingStatus.UNREADABLE


def _power(
    power_mw: Any,
    utilization: float | None,
    energy: float | None,
    previous: tuple[float, float] | None,
    node_seconds: float,
    reasons: dict[str, ReadingStatus],
) -> tuple[float | None, PowerSource | None]:
    """Mean watts by the energy counter, else the draw; 0 W on a busy GPU is a reading that failed."""
    if energy is not None and previous is not None:
        seconds = node_seconds - previous[0]
        joules = energy - previous[1]
        # A counter that did not move, or went back (driver reloaded), measures nothing: never 0 W, never negative.
        if 0.0 < seconds <= MAX_ENERGY_INTERVAL_SECONDS and joules > 0.0:
            reasons.pop("power_watts", None)
            return joules / seconds, PowerSource.ENERGY_COUNTER
    if power_mw is None or "power_watts" in reasons:
        return None, None
    is_number = type(power_mw) is int or type(power_mw) is float
    if not (is_number and 0.0 <= power_mw <= _MAX_VALUE and power_mw not in _NOT_AVAILABLE):
        reasons["power_watts"] = _why_not_a_number(power_mw)
        return None, None
    if power_mw == 0 and utilization:
        reasons["power_watts"] = ReadingStatus.UNREADABLE
        return None, None
    return power_mw / 1000.0, PowerSource.DRAW


def discard_live_readings(sample: GpuSample) -> GpuSample:
    """A lost GPU: identity and limits stay, every live reading goes."""
    reasons = dict(sample.reasons) | dict.fromkeys(LIVE_FIELDS, ReadingStatus.LOST)
    return replace(sample, **dict.fromkeys(LIVE_FIELDS), power_source=None, performance_state=None, reasons=reasons)
