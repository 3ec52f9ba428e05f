"""AMD's tools: JSON in one line or pretty-printed and cut anywhere, the concise tables, and amd-smi monitor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.collectors.smi.pasted import COPIED_AS, MEBIBYTE, Gpu, random_gpus
from wattwatch.collectors.samples import GpuSample, HostStatus
from wattwatch.collectors.smi import SmiReport, read_gpu_output

FIELDS = ("power_watts", "utilization_percent", "memory_used_bytes", "memory_total_bytes", "temperature_celsius")


def amd_smi(gpus: Sequence[Gpu], wrapped: bool) -> Any:
    """The shape of `amd-smi metric --json`: a list up to release 6, an object since 7."""
    entries = [
        {
            "gpu": gpu.index,
            "usage": {
                "gfx_activity": {"value": gpu.utilization, "unit": "%"},
                "umc_activity": {"value": 3, "unit": "%"},
                "vcn_activity": [{"value": 0, "unit": "%"}, "N/A"],
            },
            "power": {"socket_power": {"value": gpu.watts, "unit": "W"}, "gfx_voltage": "N/A"},
            "temperature": {
                "edge": "N/A",
                "hotspot": {"value": gpu.temperature, "unit": "C"},
                "mem": {"value": 99, "unit": "C"},
            },
            "mem_usage": {
                "total_vram": {"value": gpu.total, "unit": "MB"},
                "used_vram": {"value": gpu.used, "unit": "MB"},
                "used_gtt": {"value": 13, "unit": "MB"},
            },
            "ecc": {"total_uncorrectable_count": gpu.ecc},
        }
        for gpu in gpus
    ]
    return {"gpu_data": entries} if wrapped else entries


def rocm_smi(gpus: Sequence[Gpu]) -> Any:
    return {
        **{
            f"card{gpu.index}": {
                "Temperature (Sensor junction) (C)": f"{gpu.temperature}.0",
                "Average Graphics Package Power (W)": f"{gpu.watts}.0",
                "Max Graphics Package Power (W)": f"{gpu.limit}.0",
                "GPU use (%)": str(gpu.utilization),
                "VRAM Total Memory (B)": str(int(gpu.total * MEBIBYTE)),
                "VRAM Total Used Memory (B)": str(int(gpu.used * MEBIBYTE)),
            }
            for gpu in gpus
        },
        "system": {"Driver version": "6.10.5"},
    }


def documents(gpus: Sequence[Gpu]) -> dict[str, Any]:
    return {"list": amd_smi(gpus, False), "object": amd_smi(gpus, True), "rocm": rocm_smi(gpus)}


def read(text: str) -> SmiReport:
    return read_gpu_output(text.encode())


def values(sample: GpuSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in FIELDS}


@pytest.mark.parametrize("indent", [None, 1, 2, 4])
@pytest.mark.parametrize("kind", ["list", "object", "rocm"])
def test_json_in_one_line_and_in_many(kind: str, indent: int | None) -> None:
    gpus = random_gpus(8, 3)
    report = read(json.dumps(documents(gpus)[kind], indent=indent))
    assert [values(gpu) for gpu in report.snapshots[0].gpus] == [
        {name: gpu.truth()[name] for name in FIELDS} for gpu in gpus
    ]
    if kind != "rocm":
        assert [gpu.uncorrected_ecc_errors for gpu in report.snapshots[0].gpus] == [gpu.ecc for gpu in gpus]


@pytest.mark.parametrize("kind", ["list", "object", "rocm"])
@pytest.mark.parametrize("copied_as", ["fence", "quoted", "page", "crlf", "utf-16", "entities"])
def test_json_from_anywhere(kind: str, copied_as: str) -> None:
    gpus = random_gpus(4, 5)
    text = "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n" + json.dumps(documents(gpus)[kind], indent=4)
    report = read_gpu_output(COPIED_AS[copied_as](text + "\n"))
    assert [gpu.power_watts for gpu in report.snapshots[0].gpus] == [gpu.watts for gpu in gpus]


@pytest.mark.parametrize("kind", ["list", "object", "rocm"])
@pytest.mark.parametrize("indent", [None, 4])
def test_json_cut_anywhere_invents_nothing_and_keeps_the_gpus_before_the_cut(kind: str, indent: int | None) -> None:
    gpus = random_gpus(3, 7)
    text = json.dumps(documents(gpus)[kind], indent=indent)
    second = text.index('"card1"') if kind == "rocm" else text.index('"gpu": 1')
    for length in range(0, len(text), 5):
        report = read(text[:length])
        found = report.snapshots[0].gpus if report.snapshots else ()
        for sample, gpu in zip(found, gpus, strict=False):
            for name in FIELDS:
                assert getattr(sample, name) in (None, gpu.truth()[name]), (length, name)
        if length > second:
            assert values(found[0]) == {name: gpus[0].truth()[name] for name in FIELDS}


def test_json_of_a_loop_is_several_samples_and_metric_and_static_are_one() -> None:
    gpus = random_gpus(2, 9)
    one = json.dumps(amd_smi(gpus, True), indent=4)
    assert [len(snapshot.gpus) for snapshot in read("\n".join([one] * 3)).snapshots] == [2, 2, 2]
    static = {"gpu_data": [{"gpu": gpu.index, "limit": {"ppt0": {"socket_power_limit": 1400}}} for gpu in gpus]}
    report = read(one + "\n" + json.dumps(static))
    assert len(report.snapshots) == 1
    assert [gpu.power_limit_watts for gpu in report.snapshots[0].gpus] == [1400.0, 1400.0]


def test_absent_values_are_absent_and_no_fault() -> None:
    """As amd-smi prints them for a GPU that sleeps: github.com/ROCm/rocm-systems/pull/2720."""
    report = read('[{"gpu": 0, "usage": "N/A", "power": {"socket_power": "N/A"}, "mem_usage": "N/A"}]')
    (gpu,) = report.snapshots[0].gpus
    assert (gpu.index, gpu.power_watts, gpu.utilization_percent, gpu.fault) == (0, None, None, None)


def test_other_json_is_said_to_be_that() -> None:
    report = read('{"jobs": [{"name": "a", "state": "RUNNING"}]}')
    assert report.status is HostStatus.PARSE_ERROR
    assert "this JSON contains no GPU readings" in report.detail


def gpustat(gpus: Sequence[Gpu]) -> Any:
    """The keys of gpustat --json: those of nvidia-smi --query-gpu."""
    return {
        "hostname": "dgx",
        "query_time": "2026-01-01T10:00:00.123456",
        "gpus": [
            {
                "index": gpu.index,
                "uuid": f"GPU-{gpu.index}",
                "name": gpu.name,
                "temperature.gpu": gpu.temperature,
                "fan.speed": None,
                "utilization.gpu": gpu.utilization,
                "power.draw": gpu.watts,
                "enforced.power.limit": gpu.limit,
                "memory.used": gpu.used,
                "memory.total": gpu.total,
                "processes": [{"username": "user", "gpu_memory_usage": 17, "pid": 4321}],
            }
            for gpu in gpus
        ],
    }


@pytest.mark.parametrize("indent", [None, 4])
def test_gpustat_json(indent: int | None) -> None:
    gpus = random_gpus(4, 11)
    report = read(json.dumps(gpustat(gpus), indent=indent))
    assert [values(gpu) for gpu in report.snapshots[0].gpus] == [
        {name: gpu.truth()[name] for name in FIELDS} for gpu in gpus
    ]


def test_rows_of_a_query_that_a_script_made_json_of() -> None:
    records = [
        {"timestamp": f"2026/01/01 10:00:0{second}.000", "index": str(index), "power.draw [W]": f"{300 + index}.00 W",
         "utilization.gpu [%]": "97 %"}
        for second in range(3)
        for index in range(2)
    ]  # fmt: skip
    report = read(json.dumps(records))
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [2, 2, 2]
    assert [gpu.power_watts for gpu in report.snapshots[2].gpus] == [300.0, 301.0]
    lines = "\n".join(json.dumps(record) for record in records)
    assert read(lines).snapshots == report.snapshots


CONCISE = """
===================================== ROCm System Management Interface =====================================
Device  Node  IDs              Temp    Power   Partitions     SCLK     MCLK     Fan  Perf    PwrCap   VRAM%  GPU%
              (DID,     GUID)  (Junc)  (Socket)
============================================================================================================
0       2     0x75a0,   24959  60.0°C  319.0W  NPS1, DPX, 0   2203Mhz  1900Mhz  0%   manual  1000.0W  98%    100%
1       3     0x75a0,   20862  N/A     N/A     N/A, N/A, 1    N/A      N/A      0%   n/a     N/A      0%     N/A
2       4     0x75a0,   44402  62.0°C  N/A     NPS1, DPX, 0   2186Mhz  1900Mhz  0%   manual  1000.0W  0%     7%
"""


def test_the_concise_table_has_no_power_where_it_prints_none() -> None:
    """The layout of github.com/ROCm/rocm-systems/pull/1508: a cap in watts is no draw, a share of memory no load."""
    first, second, third = read(CONCISE).snapshots[0].gpus
    assert (first.power_watts, first.power_limit_watts, first.utilization_percent) == (319.0, 1000.0, 100.0)
    assert (second.power_watts, second.power_limit_watts, second.utilization_percent) == (None, None, None)
    assert (third.power_watts, third.power_limit_watts, third.utilization_percent) == (None, 1000.0, 7.0)
    assert [gpu.fault for gpu in (first, second, third)] == [None, None, None]


AMD_TABLE = """
+------------------------------------------------------------------------------+
| AMD-SMI 26.2.2+97f5574fe2    amdgpu version: 6.16.13  ROCm version: 7.2.4    |
| VBIOS version: 00123529                                                      |
| Platform: Linux Guest                                                        |
|-------------------------------------+----------------------------------------|
| BDF                        GPU-Name | Mem-Uti   Temp   UEC       Power-Usage |
| GPU  HIP-ID  OAM-ID  Partition-Mode | GFX-Uti    Fan               Mem-Usage |
|=====================================+========================================|
| 0000:83:00.0 AMD Instinct MI300X VF | 11 %     37 °C   3           160/750 W |
|   0       0       3        SPX/NPS1 | 96 %       N/A        149820/196288 MB |
|-------------------------------------+----------------------------------------|
| 0000:93:00.0 ...Instinct MI300X OAM | N/A        N/A   0           N/A/750 W |
|   1       1       1        SPX/NPS1 | N/A        N/A           283/196288 MB |
+-------------------------------------+----------------------------------------+
+------------------------------------------------------------------------------+
| Processes:                                                                   |
|  GPU        PID  Process Name          GTT_MEM  VRAM_MEM  MEM_USAGE     CU % |
|==============================================================================|
|    0      36750  python3.12             2.0 MB    9.3 GB     9.5 GB  N/A     |
+------------------------------------------------------------------------------+
"""


@pytest.mark.parametrize("copied_as", ["as printed", "bars", "entities", "quoted", "colors"])
def test_the_table_of_amd_smi(copied_as: str) -> None:
    first, second = read_gpu_output(COPIED_AS[copied_as](AMD_TABLE)).snapshots[0].gpus
    assert (first.index, first.name, first.pci_bus_id) == (0, "AMD Instinct MI300X VF", "0000:83:00.0")
    assert (first.power_watts, first.power_limit_watts, first.utilization_percent) == (160.0, 750.0, 96.0)
    assert (first.memory_used_bytes, first.uncorrected_ecc_errors) == (149820 * MEBIBYTE, 3.0)
    assert (second.index, second.power_watts, second.power_limit_watts) == (1, None, 750.0)
    assert (second.utilization_percent, second.fault) == (None, None)


MONITOR = """
GPU  POWER  GPU_TEMP  MEM_TEMP  GFX_UTIL  GFX_CLOCK  MEM_UTIL  MEM_CLOCK  ENC_UTIL  ENC_CLOCK     THROTTLE  SINGLE_ECC  DOUBLE_ECC  VRAM_USED  VRAM_TOTAL   PCIE_BW
  0   11 W     43 °C     58 °C      84 %   1814 MHz       1 %     96 MHz       N/A    812 MHz  UNTHROTTLED           5           2     227 MB    25476 MB  N/A Mb/s
  1    N/A       N/A       N/A       N/A        N/A       N/A        N/A       N/A        N/A          N/A           0           0     229 MB    25476 MB  N/A Mb/s
"""  # noqa: E501


def test_amd_smi_monitor() -> None:
    """The layout of github.com/Azure/azhpc-images docs for the V710; columns differ by options and release."""
    first, second = read(MONITOR).snapshots[0].gpus
    assert (first.power_watts, first.temperature_celsius, first.utilization_percent) == (11.0, 43.0, 84.0)
    assert (first.memory_used_bytes, first.uncorrected_ecc_errors) == (227 * MEBIBYTE, 2.0)
    assert (second.index, second.power_watts, second.utilization_percent, second.fault) == (1, None, None, None)
    newer = "GPU  XCP  POWER  PWR_CAP  GPU_T  MEM_T  GFX%  MEM%  VRAM_USAGE\n"
    rows = "  0    0  640 W    750 W  61 °C  50 °C  99 %   4 %  12.5/192.0 GB\n" * 2
    report = read(newer + rows)
    assert len(report.snapshots) == 2
    (gpu,) = report.snapshots[0].gpus
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.utilization_percent) == (640.0, 750.0, 99.0)
    assert gpu.memory_used_bytes == 12.5 * 2**30
