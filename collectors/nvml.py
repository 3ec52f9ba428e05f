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
from importlib import resources
from typing import Final

from collectors.samples import NO_REASONS, GpuSample, HostStatus, PowerSource, Reason

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
HANDLE: Final = "handle"
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

LONGEST_ENERGY_INTERVAL_SECONDS: Final = 120.0
"""A mean over a longer gap (a reconnect) would say what the board did before it, not what it does now."""

_NOT_AVAILABLE: Final = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})  # NVML_VALUE_NOT_AVAILABLE, 32 and 64 bits
_TOO_BIG: Final = 1e18
_UNKNOWN_CODE: Final = 999
_CODES: Final[Mapping[int, Mapping[str, str]]] = {
    int(code): entry
    for code, entry in tomllib.loads((resources.files(__package__) / "nvml_codes.toml").read_text("utf-8")).items()
}
_REASONS: Final[Mapping[int, Reason]] = {code: Reason(entry["reason"]) for code, entry in _CODES.items()}


def reason_of(code: int) -> Reason:
    """What this return code says of one reading. A code that NVML adds later is unreadable until it is listed."""
    return _REASONS.get(code, Reason.UNREADABLE) if code else Reason.OK


def host_status_of(code: int) -> tuple[HostStatus, str]:
    """What nvmlInit's or nvmlDeviceGetCount's return code says of the whole machine, with a sentence."""
    entry = _CODES.get(code, _CODES[_UNKNOWN_CODE])
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
