"""The real pynvml on the fake NVML, with the behavior of NVML that has caused outages."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.nvml import NvmlColumns, gpu_from_nvml
from wattwatch.collectors.probe.node_probe import NvmlReader
from wattwatch.collectors.probe.payload import NVML_READINGS
from wattwatch.collectors.samples import GpuSample, ReadingStatus
from wattwatch.collectors.simulated.driver import set_up_scenarios, write_job_state
from wattwatch.collectors.simulated.on_node import fake_nvml
from wattwatch.collectors.simulated.scenario import get_scenario

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node of eight GPUs in a deadlock; its directory."""
    plays, _ = set_up_scenarios([get_scenario("deadlock")], tmp_path / "live", tmp_path / "tools", Clock())
    write_job_state(plays[0], 1, 3850, tick=1)
    return plays[0].nodes[0].directory


@pytest.fixture
def pynvml(node: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The installed pynvml, loaded afresh, on the stand-in instead of libnvidia-ml.so.1."""
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    spec.loader.exec_module(module)
    module.CDLL = lambda _: fake_nvml.load_library(str(node / "state.json"))  # type: ignore[attr-defined]  # its seam
    return module


def change(node: Path, how: Change) -> None:
    path = node / "state.json"
    state = json.loads(path.read_text())
    how(state)
    staged = node / "state.new"
    staged.write_text(json.dumps(state))
    staged.rename(path)


def handle(pynvml: ModuleType, index: int) -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def test_a_gpu_answers_as_a_b300_does(pynvml: ModuleType) -> None:
    third = handle(pynvml, 3)
    assert pynvml.nvmlDeviceGetCount() == 8
    assert pynvml.nvmlDeviceGetName(third) == "NVIDIA B300 SXM6 AC"
    assert pynvml.nvmlDeviceGetUUID(third).startswith("GPU-")
    assert pynvml.nvmlDeviceGetPciInfo(third).busId == "00000000:DB:00.0"
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(third) == 1_100_000
    assert 180_000 < pynvml.nvmlDeviceGetPowerUsage(third) < 190_000
    rates = pynvml.nvmlDeviceGetUtilizationRates(third)
    assert (rates.gpu, rates.memory) == (0, 0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(third, pynvml.nvmlMemory_v2)
    assert (memory.used, memory.total) == (82 * 10**9, 275_040 << 20)
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(third) == pynvml.nvmlClocksEventReasonGpuIdle
    assert pynvml.nvmlDeviceGetMigMode(third) == [0, 0]


def test_handles_are_found_by_uuid_and_by_bus_id(pynvml: ModuleType) -> None:
    uuid = pynvml.nvmlDeviceGetUUID(handle(pynvml, 5))
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 5
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId("00000001:69:00.0")) == 5
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-none")


def test_the_probe_reads_memory_errors_every_few_seconds_and_not_each_time(pynvml: ModuleType, node: Path) -> None:
    keys = ("ecc_uncorrected", "ecc_uncorrected_lifetime", "repair_pending", "repair_failed")
    reader = NvmlReader(pynvml, [reading for reading in NVML_READINGS if reading[0] in keys])

    def read(now: float) -> GpuSample:
        values, *errors = reader.row(3, now)
        return gpu_from_nvml(values, errors[0] if errors else None, None, now, NvmlColumns(reader.columns))

    assert (read(0.0).uncorrected_ecc_errors, read(0.0).memory_repair_pending) == (0.0, 0.0)
    counters = {"ecc_errors": 2, "ecc_errors_before": 7, "repair_pending": 1}
    change(node, lambda state: state["gpus"][3].update(counters))
    assert read(1.0).uncorrected_ecc_errors == 0.0, "read once in DISCOVERY_SECONDS"
    gpu = read(20.0)
    assert (gpu.uncorrected_ecc_errors, gpu.lifetime_uncorrected_ecc_errors) == (2.0, 9.0)
    assert (gpu.memory_repair_pending, gpu.memory_repair_failed) == (1.0, 0.0)
    change(node, lambda state: state["gpus"][3].update(ecc_errors=None))
    gpu = read(40.0)
    assert (gpu.uncorrected_ecc_errors, gpu.memory_repair_failed, gpu.fault) == (None, None, None)
    assert gpu.reasons["uncorrected_ecc_errors"] is ReadingStatus.UNSUPPORTED


def test_the_process_list_is_asked_twice_first_for_its_size(pynvml: ModuleType) -> None:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle(pynvml, 2))
    assert [(process.pid, process.usedGpuMemory) for process in processes] == [(41003, 82 * 10**9)]


def test_a_gpu_without_processes_has_an_empty_list(pynvml: ModuleType, node: Path) -> None:
    change(node, lambda state: state["gpus"][2].update(pids=[]))
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle(pynvml, 2)) == []


def test_energy_counts_on_between_two_writes_of_the_state(pynvml: ModuleType, node: Path) -> None:
    gpu = handle(pynvml, 0)
    before = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    change(node, lambda state: state["gpus"][0].update(energy_at=state["gpus"][0]["energy_at"] - 10.0))
    gained = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before
    assert gained >= 10 * 180_000  # millijoules of ten more seconds at the floor


def test_a_lost_gpu_returns_its_identity_and_no_live_reading(pynvml: ModuleType, node: Path) -> None:
    gpu = handle(pynvml, 4)
    change(node, lambda state: state["gpus"][4].update(lost=True))
    assert pynvml.nvmlDeviceGetName(gpu) == "NVIDIA B300 SXM6 AC"
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) == 1_100_000
    for question in ("PowerUsage", "UtilizationRates", "MemoryInfo", "TotalEnergyConsumption"):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            getattr(pynvml, f"nvmlDeviceGet{question}")(gpu)
    assert pynvml.nvmlDeviceGetPowerUsage(handle(pynvml, 3)) > 0


def test_field_values_of_a_lost_gpu_fail_one_by_one_and_raise_nothing(pynvml: ModuleType, node: Path) -> None:
    gpu = handle(pynvml, 4)
    fields = [pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION]
    sound = pynvml.nvmlDeviceGetFieldValues(gpu, [*fields, 1])
    assert [field.nvmlReturn for field in sound] == [0, 0, pynvml.NVML_ERROR_NOT_SUPPORTED]
    assert sound[0].value.uiVal > 180_000
    change(node, lambda state: state["gpus"][4].update(lost=True))
    lost = pynvml.nvmlDeviceGetFieldValues(gpu, fields)
    assert [(field.nvmlReturn, field.value.uiVal) for field in lost] == [(15, 0), (15, 0)]


def test_an_entry_point_that_the_driver_lacks_is_function_not_found(pynvml: ModuleType) -> None:
    gpu = handle(pynvml, 0)
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetEncoderUtilization(gpu)


def test_a_driver_that_was_upgraded_under_us_refuses_to_start(pynvml: ModuleType, node: Path) -> None:
    change(node, lambda state: state.update(nvml="mismatch"))
    with pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
        pynvml.nvmlInit()


def test_a_machine_without_nvml_has_no_library(pynvml: ModuleType, node: Path) -> None:
    change(node, lambda state: state.update(nvml="absent"))
    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()


def test_a_hung_driver_does_not_return_until_it_recovers(pynvml: ModuleType, node: Path) -> None:
    gpu = handle(pynvml, 0)
    change(node, lambda state: state.update(nvml="hang"))
    came_back = threading.Event()

    def ask() -> None:
        pynvml.nvmlDeviceGetPowerUsage(gpu)
        came_back.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert not came_back.wait(0.3)
    change(node, lambda state: state.update(nvml="ok"))
    assert came_back.wait(DEADLINE_SECONDS)
    asking.join(DEADLINE_SECONDS)
