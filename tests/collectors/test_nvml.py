"""NVML's numbers and return codes -> a GPU's readings and status."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattwatch.collectors.nvml import (
    HANDLE_ERROR,
    LIVE_FIELDS,
    UNNAMED_COLUMNS,
    NvmlColumns,
    gpu_from_nvml,
    host_status_of,
    missing_from_nvml,
    status_of_code,
    throttle_names,
)
from wattwatch.collectors.samples import HostStatus, PowerSource, ReadingStatus

SOUND: dict[str, Any] = {
    "index": 3,
    "uuid": "GPU-00000000-0000-0000-0000-000000000003",
    "pci_bus_id": "00000001:1A:00.0",
    "name": "NVIDIA B300 SXM6 AC",
    "power_mw": 951_250,
    "power_limit_mw": 1_100_000,
    "util": 100,
    "mem_util": 41,
    "mem_used": 82_000 * 2**20,
    "mem_total": 275_040 * 2**20,
    "temp": 61,
    "sm_clock": 1920,
    "energy_mj": 5_000_000_000,
    "throttle_bitmask": 0x4,
    "pstate": 0,
    "mig": 0,
}


def row(**changes: object) -> list[object]:
    return [{**SOUND, **changes}[column] for column in UNNAMED_COLUMNS]


def test_a_healthy_gpu() -> None:
    gpu = gpu_from_nvml(row(), None, None, 100.0)
    assert (gpu.index, gpu.pci_bus_id, gpu.performance_state, gpu.mig) == (3, "00000001:1A:00.0", "P0", False)
    assert (gpu.power_watts, gpu.power_source, gpu.power_limit_watts) == (951.25, PowerSource.DRAW, 1100.0)
    assert (gpu.utilization_percent, gpu.temperature_celsius, gpu.energy_joules) == (100.0, 61.0, 5_000_000.0)
    assert gpu.throttle_reasons == frozenset({"sw_power_cap"})
    assert not gpu.reasons


def test_power_is_the_energy_counters_mean_over_the_interval() -> None:
    gpu = gpu_from_nvml(row(), None, (98.0, 5_000_000.0 - 1300.0), 100.0)
    assert (gpu.power_watts, gpu.power_source) == (650.0, PowerSource.ENERGY_COUNTER)


@pytest.mark.parametrize(
    ("why", "previous"),
    [
        ("the counter went back: the driver was reloaded", (99.0, 5_000_100.0)),
        ("no time has passed", (100.0, 4_999_000.0)),
        ("the clock went back", (101.0, 4_999_000.0)),
        ("the counter stood still, which is not 0 W", (99.0, 5_000_000.0)),
        ("the gap is so long that a mean would tell of before it", (-900.0, 4_000_000.0)),
    ],
)
def test_the_instant_draw_is_used_where_the_counter_measures_nothing(why: str, previous: tuple[float, float]) -> None:
    gpu = gpu_from_nvml(row(), None, previous, 100.0)
    assert (gpu.power_watts, gpu.power_source) == (951.25, PowerSource.DRAW), why


def test_a_lost_gpu_that_still_answers_0_w_name_limit_and_clocks_is_lost() -> None:
    gpu = gpu_from_nvml(row(power_mw=0, util=None), {"power_mw": 15, "util": 15}, (99.0, 4_999_000.0), 100.0)
    assert gpu.fault is ReadingStatus.LOST
    assert [getattr(gpu, name) for name in LIVE_FIELDS] == [None] * len(LIVE_FIELDS)
    assert gpu.power_source is None
    assert (gpu.name, gpu.power_limit_watts, gpu.uuid) == (SOUND["name"], 1100.0, SOUND["uuid"])


def test_one_lost_reading_discards_the_stale_values_of_the_others() -> None:
    gpu = gpu_from_nvml(row(), {"temp": 15}, None, 100.0)
    assert gpu.reading("power_watts").reason is ReadingStatus.LOST


def test_a_lost_gpu_is_lost_although_mig_or_its_energy_counter_replaces_that_reading() -> None:
    in_mig_mode = gpu_from_nvml(row(mig=1), {"util": 15}, None, 100.0)
    with_counter = gpu_from_nvml(row(energy_mj=2_000_000), {"power_mw": 15}, (99.0, 1000.0), 100.0)
    for gpu in (in_mig_mode, with_counter):
        assert gpu.fault is ReadingStatus.LOST
        assert gpu.power_watts is gpu.temperature_celsius is None


def test_a_gpu_that_needs_a_reset_keeps_its_readings() -> None:
    gpu = gpu_from_nvml(row(util=None), {"util": 16}, None, 100.0)
    assert gpu.fault is ReadingStatus.RESET_REQUIRED
    assert gpu.memory_used_bytes == 82_000 * 2**20


def test_absent_and_unreadable_do_not_merge() -> None:
    absent = gpu_from_nvml(row(energy_mj=None, mem_total=None), {"energy_mj": 3, "mem_total": 4}, None, 1.0)
    failed = gpu_from_nvml(row(power_mw=None, energy_mj=None), {"power_mw": 999, "energy_mj": 999}, None, 1.0)
    assert absent.reading("energy_joules").reason is ReadingStatus.UNSUPPORTED
    assert absent.reading("memory_total_bytes").reason is ReadingStatus.UNSUPPORTED
    assert absent.fault is None
    assert failed.reading("power_watts").reason is ReadingStatus.UNREADABLE
    assert failed.fault is ReadingStatus.UNREADABLE


def test_0_w_on_a_busy_gpu_is_a_failed_reading() -> None:
    assert gpu_from_nvml(row(power_mw=0), None, None, 1.0).reading("power_watts").reason is ReadingStatus.UNREADABLE
    assert gpu_from_nvml(row(power_mw=0, util=0), None, None, 1.0).power_watts == 0.0


def test_a_mig_gpu_has_power_and_no_utilization() -> None:
    gpu = gpu_from_nvml(row(mig=1, util=None, mem_util=None), {"util": 3, "mem_util": 3}, None, 1.0)
    assert gpu.mig is True
    assert gpu.reading("utilization_percent").reason is ReadingStatus.MIG
    assert gpu.power_watts == 951.25
    assert gpu.fault is None


def test_sentinel_values_of_old_drivers_are_absence() -> None:
    gpu = gpu_from_nvml(row(mem_used=0xFFFFFFFFFFFFFFFF, power_limit_mw=0xFFFFFFFF), None, None, 1.0)
    assert gpu.reading("memory_used_bytes").reason is ReadingStatus.UNSUPPORTED
    assert gpu.reading("power_limit_watts").reason is ReadingStatus.UNSUPPORTED


def test_throttle_bits_have_names_and_unknown_bits_are_kept() -> None:
    assert throttle_names(0) == frozenset()
    assert throttle_names(0x49) == {"gpu_idle", "hw_slowdown", "hw_thermal_slowdown"}
    assert throttle_names(0x201) == {"gpu_idle", "bit_0x200"}


def test_a_gpu_without_a_handle_is_missing() -> None:
    nothing = [5, *[None] * (len(UNNAMED_COLUMNS) - 1)]
    missing = missing_from_nvml(nothing, {HANDLE_ERROR: 15})
    assert missing is not None
    assert (missing.index, missing.reason) == (5, ReadingStatus.LOST)
    assert missing_from_nvml(row(), {"util": 3}) is None
    assert (
        gpu_from_nvml(nothing, {HANDLE_ERROR: 999}, None, 1.0).reading("power_watts").reason is ReadingStatus.UNREADABLE
    )


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (18, HostStatus.DRIVER_DOWN, "may still be running"),
        (9, HostStatus.DRIVER_DOWN, "not loaded"),
        (999, HostStatus.DRIVER_DOWN, "may be healthy"),
        (12, HostStatus.DRIVER_DOWN, "libnvidia-ml"),
        (6, HostStatus.NO_DEVICES, "no device"),
        (10, HostStatus.SAMPLER_TIMEOUT, "did not answer"),
        (12345, HostStatus.DRIVER_DOWN, "12345"),
    ],
)
def test_the_return_code_of_nvml_init_gives_the_hosts_status(code: int, status: HostStatus, words: str) -> None:
    said, detail = host_status_of(code)
    assert said is status
    assert words in detail


def test_an_unknown_code_is_unreadable() -> None:
    assert status_of_code(0) is ReadingStatus.OK
    assert status_of_code(777) is ReadingStatus.UNREADABLE


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@given(
    st.lists(VALUES, max_size=20),
    st.dictionaries(st.sampled_from([*UNNAMED_COLUMNS, HANDLE_ERROR, "x"]), st.integers(-5, 1000), max_size=6),
    st.none() | st.tuples(st.floats(0, 200), st.floats(0, 1e9)),
)
@settings(max_examples=300, deadline=None)
def test_no_row_raises(values: list[object], errors: dict[str, int], previous: tuple[float, float] | None) -> None:
    gpu = gpu_from_nvml(values, errors, previous, 100.0)
    missing_from_nvml(values, errors)
    assert (gpu.power_watts is None) == (gpu.power_source is None)
    assert gpu.utilization_percent is None or 0.0 <= gpu.utilization_percent <= 100.0


def test_memory_error_counters_are_read_and_one_that_a_gpu_does_not_have_is_unsupported_and_not_0() -> None:
    columns = NvmlColumns(("index", "ecc_uncorrected", "ecc_uncorrected_lifetime", "repair_pending", "repair_failed"))
    gpu = gpu_from_nvml([0, 2, 9, 1, 0], None, None, 100.0, columns)
    assert (gpu.uncorrected_ecc_errors, gpu.lifetime_uncorrected_ecc_errors) == (2.0, 9.0)
    assert (gpu.memory_repair_pending, gpu.memory_repair_failed) == (1.0, 0.0)
    errors = {"ecc_uncorrected": 3, "ecc_uncorrected_lifetime": 3, "repair_pending": 3, "repair_failed": 3}
    gpu = gpu_from_nvml([0, None, None, None, None], errors, None, 100.0, columns)
    assert gpu.uncorrected_ecc_errors is None
    assert gpu.reading("uncorrected_ecc_errors").reason is ReadingStatus.UNSUPPORTED
    assert gpu.fault is None
