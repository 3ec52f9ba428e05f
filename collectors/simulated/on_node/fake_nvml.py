"""A fake libnvidia-ml.so.1 for simulated nodes: NVML's C entry points, answered from the node's state file.

Each function has the name, arguments and behavior of the C function (nvml.h): it fills what the pointer refers to and
returns a code. The real pynvml runs on top of it. Behavior that has caused outages elsewhere is reproduced:

- the first, sizing call for the process list returns INSUFFICIENT_SIZE with the count;
- nvmlDeviceGetFieldValues succeeds as a whole and reports failure per field in `nvmlReturn`, with a value of 0;
- energy counts millijoules since the driver was loaded;
- a lost GPU still returns its name, limit and identity, and GPU_IS_LOST for every live reading;
- a driver that hangs does not return at all.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
LIB_RM_VERSION_MISMATCH = 18
GPU_IS_LOST = 15
UNKNOWN = 999

FIRST_HANDLE = 0x5A000001
POLL_SECONDS = 0.2

FIELD_ENERGY, FIELD_POWER_AVERAGE, FIELD_POWER_INSTANT = 83, 185, 186
VALUE_TYPE_UNSIGNED_INT, VALUE_TYPE_UNSIGNED_LONG_LONG = 1, 3

Gpu = dict[str, Any]
Entry = Callable[..., int]
ENTRIES: dict[str, Entry] = {}


class State:
    """The node's state file; read again only after it was replaced."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.initialized = False
        self._stamp: tuple[int, int] = (0, 0)
        self._content: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """The current content; empty once the node is gone."""
        try:
            status = os.stat(self.path)
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp != self._stamp:
                with open(self.path, encoding="utf-8") as file:
                    self._content = json.load(file)
                self._stamp = stamp
        except (OSError, ValueError):
            return {}
        return self._content


def load_library(state_file: str) -> Library:
    state = State(state_file)
    if state.now().get("nvml") == "absent":
        raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")
    return Library(state)


class Library:
    """The loaded library. A missing entry point is an AttributeError, as with ctypes."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __getattr__(self, name: str) -> functools.partial[int]:
        if name not in ENTRIES:
            raise AttributeError(f"undefined symbol: {name}")
        return functools.partial(call_driver, ENTRIES[name], self._state)


def call_driver(entry: Entry, state: State, *arguments: Any) -> int:
    """Call an entry point; does not return while the driver hangs."""
    content = state.now()
    while content.get("nvml") == "hang":
        time.sleep(POLL_SECONDS)
        content = state.now()
    return entry(state, *arguments) if content else UNKNOWN


def entry(*names: str) -> Callable[[Entry], Entry]:
    def register(function: Entry) -> Entry:
        ENTRIES.update(dict.fromkeys(names, function))
        return function

    return register


def gpu_entry(*names: str, fails_if_lost: bool = True) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """An entry point whose first argument is a device handle."""

    def register(function: Callable[..., int]) -> Callable[..., int]:
        def with_gpu(state: State, handle: Any, *arguments: Any) -> int:
            if not state.initialized:
                return UNINITIALIZED
            gpu = gpu_of(state, handle)
            if gpu is None:
                return INVALID_ARGUMENT
            if gpu.get("lost") and fails_if_lost:
                return GPU_IS_LOST
            return function(gpu, *arguments)

        entry(*names)(with_gpu)
        return function

    return register


def gpu_of(state: State, handle: Any) -> Gpu | None:
    gpus: list[Gpu] = state.now().get("gpus", [])
    place = (ctypes.c_void_p.from_buffer(handle).value or 0) - FIRST_HANDLE
    return gpus[place] if 0 <= place < len(gpus) else None


def pointee(argument: Any) -> Any:
    """The object to which `byref(x)` or `pointer(x)` points."""
    return argument._obj if hasattr(argument, "_obj") else argument.contents


def write(argument: Any, value: int) -> int:
    pointee(argument).value = value
    return SUCCESS


def write_text(buffer: Any, text: str) -> int:
    buffer.value = text.encode()
    return SUCCESS


def write_handle(argument: Any, place: int) -> int:
    ctypes.c_void_p.from_buffer(pointee(argument)).value = FIRST_HANDLE + place
    return SUCCESS


def number_of(argument: Any) -> int:
    return int(getattr(argument, "value", argument))


# Library and host


@entry("nvmlInit_v2", "nvmlInitWithFlags")
def nvml_init(state: State, *_flags: Any) -> int:
    if state.now().get("nvml") == "mismatch":
        return LIB_RM_VERSION_MISMATCH
    state.initialized = True
    return SUCCESS


@entry("nvmlShutdown")
def nvml_shutdown(state: State) -> int:
    state.initialized = False
    return SUCCESS


@entry("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
def nvml_driver_version(state: State, buffer: Any, _size: Any) -> int:
    return write_text(buffer, state.now()["driver"])


@entry("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")
def nvml_count(state: State, count: Any) -> int:
    return write(count, len(state.now()["gpus"])) if state.initialized else UNINITIALIZED


@entry("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
def nvml_handle_by_index(state: State, index: Any, handle: Any) -> int:
    if not state.initialized:
        return UNINITIALIZED
    place = number_of(index)
    return write_handle(handle, place) if place < len(state.now()["gpus"]) else INVALID_ARGUMENT


@entry("nvmlDeviceGetHandleByUUID")
def nvml_handle_by_uuid(state: State, uuid: Any, handle: Any) -> int:
    return handle_by(state, "uuid", uuid, handle)


@entry("nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId")
def nvml_handle_by_bus(state: State, bus: Any, handle: Any) -> int:
    return handle_by(state, "bus", bus, handle)


def handle_by(state: State, key: str, wanted: Any, handle: Any) -> int:
    text = getattr(wanted, "value", wanted)
    places = [i for i, gpu in enumerate(state.now()["gpus"]) if gpu[key].encode() == text]
    return write_handle(handle, places[0]) if places else NOT_FOUND


# Readings that a lost GPU still returns


@gpu_entry("nvmlDeviceGetName", fails_if_lost=False)
def nvml_name(gpu: Gpu, buffer: Any, _size: Any) -> int:
    return write_text(buffer, gpu["name"])


@gpu_entry("nvmlDeviceGetUUID", fails_if_lost=False)
def nvml_uuid(gpu: Gpu, buffer: Any, _size: Any) -> int:
    return write_text(buffer, gpu["uuid"])


@gpu_entry("nvmlDeviceGetIndex", "nvmlDeviceGetMinorNumber", fails_if_lost=False)
def nvml_index(gpu: Gpu, index: Any) -> int:
    return write(index, gpu["index"])


@gpu_entry("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", fails_if_lost=False)
def nvml_pci_info(gpu: Gpu, argument: Any) -> int:
    info = pointee(argument)
    domain, bus, device = gpu["bus"].split(".")[0].split(":")
    info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(device, 16)
    info.busId = gpu["bus"].encode()
    info.busIdLegacy = gpu["bus"][4:].encode()
    return SUCCESS


@gpu_entry(
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    fails_if_lost=False,
)
def nvml_power_limit(gpu: Gpu, milliwatts: Any) -> int:
    return write(milliwatts, gpu["limit_mw"])


# Live readings


@gpu_entry("nvmlDeviceGetPowerUsage")
def nvml_power(gpu: Gpu, milliwatts: Any) -> int:
    return write(milliwatts, gpu["power_mw"])


@gpu_entry("nvmlDeviceGetTotalEnergyConsumption")
def nvml_energy(gpu: Gpu, millijoules: Any) -> int:
    return write(millijoules, energy_now(gpu))


def energy_now(gpu: Gpu) -> int:
    """The counter also advances between two writes of the state file."""
    return int(gpu["energy_mj"] + gpu["power_mw"] * max(0.0, time.time() - gpu["energy_at"]))


@gpu_entry("nvmlDeviceGetUtilizationRates")
def nvml_utilization(gpu: Gpu, argument: Any) -> int:
    rates = pointee(argument)
    rates.gpu, rates.memory = gpu["util"], gpu["mem_util"]
    return SUCCESS


@gpu_entry("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
def nvml_memory(gpu: Gpu, argument: Any) -> int:
    memory = pointee(argument)
    memory.total, memory.used = gpu["mem_total"], gpu["mem_used"]
    memory.free = gpu["mem_total"] - gpu["mem_used"]
    return SUCCESS


@gpu_entry("nvmlDeviceGetTemperature")
def nvml_temperature(gpu: Gpu, _sensor: Any, celsius: Any) -> int:
    return write(celsius, gpu["temp"])


@gpu_entry("nvmlDeviceGetTemperatureV")
def nvml_temperature_v(gpu: Gpu, argument: Any) -> int:
    pointee(argument).temperature = gpu["temp"]
    return SUCCESS


@gpu_entry("nvmlDeviceGetClockInfo")
def nvml_clock(gpu: Gpu, _kind: Any, megahertz: Any) -> int:
    return write(megahertz, gpu["sm_clock"])


@gpu_entry("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
def nvml_event_reasons(gpu: Gpu, mask: Any) -> int:
    return write(mask, gpu["throttle"])


@gpu_entry("nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerState")
def nvml_performance_state(gpu: Gpu, state: Any) -> int:
    return write(state, gpu["pstate"])


@gpu_entry("nvmlDeviceGetPersistenceMode")
def nvml_persistence(_gpu: Gpu, mode: Any) -> int:
    return write(mode, 1)


@gpu_entry("nvmlDeviceGetMigMode")
def nvml_mig(_gpu: Gpu, current: Any, pending: Any) -> int:
    write(pending, 0)
    return write(current, 0)


@gpu_entry("nvmlDeviceGetTotalEccErrors")
def nvml_ecc_errors(gpu: Gpu, kind: Any, counter: Any, count: Any) -> int:
    """Uncorrected ones (kind 1) since the driver was loaded (counter 0) or ever (1)."""
    errors: int | None = gpu.get("ecc_errors", 0)
    if errors is None:  # a GPU without ECC
        return NOT_SUPPORTED
    before = gpu.get("ecc_errors_before", 0) if number_of(counter) == 1 else 0
    return write(count, errors + before if number_of(kind) == 1 else 0)


@gpu_entry("nvmlDeviceGetRemappedRows")
def nvml_remapped_rows(gpu: Gpu, corrected: Any, uncorrected: Any, pending: Any, failed: Any) -> int:
    if gpu.get("ecc_errors", 0) is None:
        return NOT_SUPPORTED
    write(corrected, 0)
    write(uncorrected, 0)
    write(failed, 0)
    return write(pending, int(gpu.get("repair_pending", 0)))


@gpu_entry("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
def nvml_processes(gpu: Gpu, count: Any, rows: Any) -> int:
    pids: list[int] = gpu["pids"]
    capacity = pointee(count).value
    pointee(count).value = len(pids)
    if capacity < len(pids):
        return INSUFFICIENT_SIZE
    for row, pid in zip(rows or (), pids, strict=False):
        row.pid, row.usedGpuMemory = pid, gpu["mem_used"] // max(1, len(pids))
        row.gpuInstanceId = row.computeInstanceId = 0xFFFFFFFF
    return SUCCESS


@gpu_entry("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")
def nvml_graphics_processes(_gpu: Gpu, count: Any, _rows: Any) -> int:
    return write(count, 0)


@gpu_entry("nvmlDeviceGetFieldValues", fails_if_lost=False)
def nvml_field_values(gpu: Gpu, count: Any, argument: Any) -> int:
    for field in pointee(argument)[: number_of(count)]:
        field.timestamp = int(time.time() * 1e6)
        field.nvmlReturn, field.valueType, field.value.ullVal = SUCCESS, VALUE_TYPE_UNSIGNED_INT, 0
        if gpu.get("lost"):
            field.nvmlReturn = GPU_IS_LOST
        elif field.fieldId == FIELD_ENERGY:
            field.valueType, field.value.ullVal = VALUE_TYPE_UNSIGNED_LONG_LONG, energy_now(gpu)
        elif field.fieldId in (FIELD_POWER_INSTANT, FIELD_POWER_AVERAGE):
            field.value.uiVal = gpu["power_mw"]
        else:
            field.nvmlReturn = NOT_SUPPORTED
    return SUCCESS
