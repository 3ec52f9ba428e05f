"""NVML rows sent by the node's probe -> `GpuSample`.

The probe on the node sends numbers and return codes as NVML gave them; every meaning is given here, where it can be
tested and changed without touching what runs on nodes. A row is a list in the order of `ROW_COLUMNS`; a value that
NVML did not give is null. Failures travel beside it as a dict, column name -> NVML return code, non-zero only.

Two facts that cost others an outage. Power read as a field value from a lost GPU is 0 with nvmlReturn 15 and raises
nothing; the same GPU still answers its name, limit and clocks. And an instant power reading aliases with the
training step, so the mean over the interval is taken from the energy counter where the board has one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Final

from wattwatch.collectors.samples import NO_REASONS, GpuSample, HostStatus, MissingGpu, PowerSource, ReadingStatus

ROW_COLUMNS: Final = (
    "index",  # int, as NVML enumerates
    "uuid",  # str "GPU-..."
    "pci_bus_id",  # str, the 8-digit domain form of nvmlPciInfo.busId
    "name",  # str
    "power_mw",  # int, nvmlDeviceGetPowerUsage
    "power_limit_mw",  # int, nvmlDeviceGetEnforcedPowerLimit
    "util",  # int 0..100, nvmlDeviceGetUtilizationRates().gpu
    "mem_util",  # int 0..100, the same call's .memory
    "mem_used",  # int bytes
    "mem_total",  # int bytes
    "temp",  # int degrees Celsius
    "sm_clock",  # int MHz
    "energy_mj",  # int millijoules since the driver was loaded
    "throttle_bitmask",  # int, nvmlDeviceGetCurrentClocksEventReasons
    "pstate",  # int 0..15 (32 = unknown), nvmlDeviceGetPerformanceState
    "mig",  # 1 enabled, 0 disabled, null where the board cannot
)
HANDLE_ERROR: Final = "handle"
"""Key in the errors of a board whose handle could not be opened: the row then holds its index and nothing else."""

FIELD_OF_COLUMN: Final[Mapping[str, str]] = {
    "uuid": "uuid",
    "pci_bus_id": "pci_bus_id",
    "name": "name",
    "power_mw": "power_watts",
    "power_limit_mw": "power_limit_watts",
    "util": "utilization_percent",
    "mem_util": "memory_utilization_percent",
    "mem_used": "memory_used_bytes",
    "mem_total": "memory_total_bytes",
    "temp": "temperature_celsius",
    "sm_clock": "sm_clock_mhz",
    "energy_mj": "energy_joules",
    "throttle_bitmask": "throttle_reasons",
    "pstate": "performance_state",
    "mig": "mig",
}
LIVE_FIELDS: Final = (
    "power_watts",
    "utilization_percent",
    "memory_utilization_percent",
    "memory_used_bytes",
    "temperature_celsius",
    "sm_clock_mhz",
    "energy_joules",
    "throttle_reasons",
)
"""What may not be believed of a lost board: it goes on answering some of them, with old numbers or zeros."""

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
"""nvml.h, nvmlClocksEventReason*; the names are those of nvidia-smi's columns."""

MAX_ENERGY_INTERVAL_SECONDS: Final = 120.0
"""A mean over a longer gap (a reconnect) would say what the board did before it, not what it does now."""

_NOT_AVAILABLE: Final = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})  # NVML_VALUE_NOT_AVAILABLE, 32 and 64 bits
_MAX_VALUE: Final = 1e18
_UNKNOWN_CODE: Final = 999
_CODES: Final[Mapping[int, Mapping[str, str]]] = {
    int(code): entry
    for code, entry in tomllib.loads((resources.files(__package__) / "nvml_codes.toml").read_text("utf-8")).items()
}
_REASONS: Final[Mapping[int, ReadingStatus]] = {code: ReadingStatus(entry["reason"]) for code, entry in _CODES.items()}


def _code_entry(code: object) -> Mapping[str, str]:
    return _CODES.get(code if type(code) is int else _UNKNOWN_CODE, _CODES[_UNKNOWN_CODE])


def status_of_code(code: object) -> ReadingStatus:
    """What this return code says of one reading. A code that NVML adds later is unreadable until it is listed."""
    if code == 0:
        return ReadingStatus.OK
    return _REASONS.get(code, ReadingStatus.UNREADABLE) if type(code) is int else ReadingStatus.UNREADABLE


def host_status_of(code: int) -> tuple[HostStatus, str]:
    """What nvmlInit's or nvmlDeviceGetCount's return code says of the whole machine, with a sentence."""
    entry = _code_entry(code)
    status = HostStatus(entry.get("host", HostStatus.DRIVER_DOWN))
    return status, f"{entry['detail']} (NVML {code})"


def throttle_names(bitmask: int) -> frozenset[str]:
    """Names of the set bits; a bit without a name is kept as `bit_0x...` so that nothing is lost."""
    known = _KNOWN_MASKS.get(bitmask)
    if known is not None:
        return known
    names = {name for bit, name in THROTTLE_BITS if bitmask & bit}
    names |= {f"bit_{1 << place:#x}" for place in range(9, 64) if bitmask >> place & 1}
    return frozenset(names)


_KNOWN_MASKS: Final[dict[int, frozenset[str]]] = {}
_KNOWN_MASKS.update({mask: throttle_names(mask) for mask in range(0x200)})


def gpu_from_nvml(
    row: Sequence[object],
    errors: Mapping[str, int] | None,
    previous_energy: tuple[float, float] | None,
    node_seconds: float,
) -> GpuSample:
    """One board of one probe line.

    `errors`: column -> NVML return code, non-zero only (None or empty for a sound board). `previous_energy`: this
    board's (node_seconds, joules) of the line before, for mean watts; `node_seconds`: the same clock, now. Never
    raises on what a node may send: a value of the wrong type is unreadable. Power: the energy counter's mean over the
    interval; the instant draw where there is no counter, no interval, or the counter stood still or went back.
    """
    if len(row) != len(ROW_COLUMNS):
        row = (*row[: len(ROW_COLUMNS)], *(None,) * (len(ROW_COLUMNS) - len(row)))
    (
        index,
        uuid,
        bus,
        name,
        power_mw,
        limit_mw,
        util,
        mem_util,
        used,
        total,
        temp,
        clock,
        energy_mj,
        mask,
        pstate,
        mig,
    ) = row
    reasons: dict[str, ReadingStatus] = {}
    if errors:
        reasons = _statuses_of_errors(errors)
    lost = ReadingStatus.LOST in reasons.values()
    sliced = None if mig is None else mig == 1
    if sliced:
        # The utilisation of a sliced board has no meaning for the whole of it, whatever the call returned.
        util = mem_util = None
        reasons["utilization_percent"] = reasons["memory_utilization_percent"] = ReadingStatus.MIG

    utilization = _number(util, "utilization_percent", reasons, top=100.0)
    energy = _number(energy_mj, "energy_joules", reasons, scale=1000.0)
    power, source = _power(power_mw, utilization, energy, previous_energy, node_seconds, reasons)
    sample = GpuSample(
        index if type(index) is int else None,
        uuid if type(uuid) is str else None,
        bus if type(bus) is str else None,
        name if type(name) is str else None,
        power,
        source,
        _number(limit_mw, "power_limit_watts", reasons, scale=1000.0),
        utilization,
        _number(mem_util, "memory_utilization_percent", reasons, top=100.0),
        _number(used, "memory_used_bytes", reasons),
        _number(total, "memory_total_bytes", reasons),
        _number(temp, "temperature_celsius", reasons, bottom=-100.0),
        _number(clock, "sm_clock_mhz", reasons),
        energy,
        throttle_names(mask) if type(mask) is int and mask >= 0 and "throttle_reasons" not in reasons else None,
        f"P{pstate}" if type(pstate) is int and 0 <= pstate < 16 and "performance_state" not in reasons else None,
        sliced,
        reasons or NO_REASONS,
    )
    return discard_live_readings(sample) if lost else sample


def missing_from_nvml(row: Sequence[object], errors: Mapping[str, int] | None) -> MissingGpu | None:
    """The board whose handle NVML would not give, else None: it counts as missing, not as a row."""
    code = (errors or {}).get(HANDLE_ERROR, 0)
    if not code:
        return None
    index = row[0] if row and type(row[0]) is int else None
    bus = row[2] if len(row) > 2 and type(row[2]) is str else None
    detail = _code_entry(code)["detail"]
    return MissingGpu(index, bus, status_of_code(code), f"NVML gave no handle for GPU {index}: {detail} (NVML {code})")


def _statuses_of_errors(errors: Mapping[str, int]) -> dict[str, ReadingStatus]:
    """Field name -> reason; a handle that could not be opened is the reason of every field."""
    if errors.get(HANDLE_ERROR):
        return dict.fromkeys(FIELD_OF_COLUMN.values(), status_of_code(errors[HANDLE_ERROR]))
    return {
        FIELD_OF_COLUMN[column]: status_of_code(code)
        for column, code in errors.items()
        if code and column in FIELD_OF_COLUMN
    }


def _number(
    value: object,
    name: str,
    reasons: dict[str, ReadingStatus],
    scale: float = 1.0,
    bottom: float = 0.0,
    top: float = _MAX_VALUE,
) -> float | None:
    """The value in our unit, or None with its reason in `reasons`. A value beside an error code is not one."""
    if value is None or (reasons and name in reasons):
        return None
    if (type(value) is int or type(value) is float) and bottom <= value <= top and value not in _NOT_AVAILABLE:
        return value / scale
    absent = type(value) is int and value in _NOT_AVAILABLE
    reasons[name] = ReadingStatus.UNSUPPORTED if absent else ReadingStatus.UNREADABLE
    return None


def _power(
    power_mw: object,
    utilization: float | None,
    energy: float | None,
    previous: tuple[float, float] | None,
    node_seconds: float,
    reasons: dict[str, ReadingStatus],
) -> tuple[float | None, PowerSource | None]:
    """Mean watts by the energy counter, else the draw; 0 W beside a busy board is a reading that failed."""
    if energy is not None and previous is not None:
        seconds = node_seconds - previous[0]
        joules = energy - previous[1]
        # A counter that stood still or went back (driver reloaded) measures nothing: never 0 W, never negative.
        if 0.0 < seconds <= MAX_ENERGY_INTERVAL_SECONDS and joules > 0.0:
            reasons.pop("power_watts", None)
            return joules / seconds, PowerSource.ENERGY_COUNTER
    watts = _number(power_mw, "power_watts", reasons, scale=1000.0)
    if watts is None:
        return None, None
    if watts == 0.0 and utilization:
        reasons["power_watts"] = ReadingStatus.UNREADABLE
        return None, None
    return watts, PowerSource.DRAW


def discard_live_readings(sample: GpuSample) -> GpuSample:
    """A lost board: who it was and its limits stay, every live reading goes."""
    reasons = dict(sample.reasons) | dict.fromkeys(LIVE_FIELDS, ReadingStatus.LOST)
    return replace(sample, **dict.fromkeys(LIVE_FIELDS), power_source=None, performance_state=None, reasons=reasons)
