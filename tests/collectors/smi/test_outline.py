"""nvidia-smi -q as text, and what amd-smi prints in the same form: every reading, from whole and from partial texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.collectors.smi.pasted import COPIED_AS, MEBIBYTE, Gpu, differences, random_gpus
from wattwatch.collectors.samples import HostStatus, PowerSource, ReadingStatus
from wattwatch.collectors.smi import SmiReport, read_gpu_output

CAPTURES = Path(__file__).parents[2] / "data" / "smi" / "captures"


@pytest.mark.parametrize("host", ["h100.load", "h200_mig.load", "l40s.idle", "rtx2080_windows.load"])
def test_text_and_csv_agree_on_one_gpu(host: str) -> None:
    (rows,) = read_gpu_output((CAPTURES / f"{host}.csv.txt").read_bytes()).snapshots[-1].gpus
    (text,) = read_gpu_output((CAPTURES / f"{host}.q.txt").read_bytes()).snapshots[-1].gpus
    for name in (
        "index", "pci_bus_id", "name", "power_limit_watts", "memory_total_bytes", "performance_state", "mig",
        "uncorrected_ecc_errors", "throttle_reasons",
    ):  # fmt: skip
        assert getattr(text, name) == getattr(rows, name), name
    assert text.reading("utilization_percent") == rows.reading("utilization_percent")
    assert (text.power_watts is None) == (rows.power_watts is None)
    assert text.temperature_celsius == pytest.approx(rows.temperature_celsius, abs=10)  # seconds apart
    assert text.fault is None


def test_a_gpu_in_mig_mode_has_its_own_memory_and_not_that_of_an_instance() -> None:
    (gpu,) = read_gpu_output((CAPTURES / "h200_mig.load.q.txt").read_bytes()).snapshots[0].gpus
    assert gpu.memory_total_bytes == 143771 * MEBIBYTE
    assert gpu.reading("utilization_percent").reason is ReadingStatus.MIG


def text_of(gpus: Sequence[Gpu], second: int = 0) -> str:
    """As drivers from 535 on print it, with what surrounds and resembles the readings."""
    lines = [
        "==============NVSMI LOG==============",
        "",
        f"Timestamp                                              : Tue Jan  1 10:00:{second:02} 2030",
        "Driver Version                                         : 590.48.01",
        "",
        f"Attached GPUs                                          : {len(gpus)}",
    ]
    for gpu in gpus:
        lines += [
            f"GPU {gpu.bus}",
            f"    Product Name                                       : {gpu.name}",
            "    MIG Mode",
            f"        Current                                        : {'Enabled' if gpu.mig else 'Disabled'}",
            "        Pending                                        : Disabled",
            *(
                [
                    "    MIG Device",
                    "        Index                                          : 0",
                    "        FB Memory Usage",
                    "            Total                                      : 20096 MiB",
                    "            Used                                       : 17 MiB",
                    "        ECC Errors",
                    "            Volatile",
                    "                SRAM Uncorrectable                     : 7",
                ]
                if gpu.mig
                else []
            ),
            "    Accounting Mode                                    : Disabled",
            f"    Performance State                                  : {gpu.state}",
            "    Clocks Event Reasons",
            "        Idle                                           : Not Active",
            "        SW Power Cap                                   : Active",
            "    Clocks Event Reasons Counters",
            "        SW Power Capping                               : 1202176 us",
            "    FB Memory Usage",
            f"        Total                                          : {gpu.total} MiB",
            "        Reserved                                       : 479 MiB",
            f"        Used                                           : {gpu.used} MiB",
            "    BAR1 Memory Usage",
            "        Total                                          : 131072 MiB",
            "        Used                                           : 3 MiB",
            "    Utilization",
            f"        GPU                                            : {gpu.utilization} %",
            "        Memory                                         : 11 %",
            "        Encoder                                        : 0 %",
            "    ECC Errors",
            "        Volatile",
            "            SRAM Correctable                           : 4",
            "            SRAM Uncorrectable Parity                  : 0",
            f"            DRAM Uncorrectable                         : {gpu.ecc}",
            "        Aggregate",
            "            DRAM Uncorrectable                         : 99",
            "    Temperature",
            f"        GPU Current Temp                               : {gpu.temperature} C",
            "        GPU T.Limit Temp                               : 34 C",
            "        Memory Current Temp                            : 48 C",
            "    GPU Power Readings",
            f"        Average Power Draw                             : {gpu.watts}.00 W",
            f"        Current Power Limit                            : {gpu.limit}.00 W",
            "        Default Power Limit                            : 123.00 W",
            "    GPU Memory Power Readings",
            "        Average Power Draw                             : 43.19 W",
            "    Module Power Readings",
            "        Average Power Draw                             : 1460.00 W",
            "        Current Power Limit                            : 2900.00 W",
            "    Clocks",
            "        SM                                             : 1980 MHz",
            "    Max Clocks",
            "        SM                                             : 2100 MHz",
            "    Fabric",
            "        Health",
            "            Access Timeout Recovery                    : N/A",
            "    Processes",
            "        Process ID                                     : 4321",
            "            Name                                       : python3",
            "            Used GPU Memory                            : 15690 MiB",
            "",
        ]
    return "\n".join(lines) + "\n"


def read(text: str) -> SmiReport:
    return read_gpu_output(text.encode())


@pytest.mark.parametrize("copied_as", [name for name in COPIED_AS if name not in {"bars", "double bars"}])
def test_every_gpu_and_every_reading(copied_as: str) -> None:
    gpus = random_gpus(8, 2)
    report = read_gpu_output(COPIED_AS[copied_as](text_of(gpus)))
    assert report.source == "outline"
    assert differences(report, gpus) == []
    for gpu, sample in zip(gpus, report.snapshots[0].gpus, strict=True):
        assert sample.uncorrected_ecc_errors == gpu.ecc
        assert sample.power_source is PowerSource.AVERAGE
        assert sample.sm_clock_mhz == 1980.0
        assert sample.throttle_reasons == frozenset({"sw_power_cap"})


def test_without_its_indentation_it_says_the_same() -> None:
    gpus = [replace(gpu, mig=gpu.index == 1) for gpu in random_gpus(3, 4)]
    flat = "\n".join(" ".join(line.split()) for line in text_of(gpus).splitlines()) + "\n"
    for text in (text_of(gpus), flat):
        report = read(text)
        assert differences(report, gpus) == []
        assert [gpu.uncorrected_ecc_errors for gpu in report.snapshots[0].gpus] == [gpu.ecc for gpu in gpus]


def test_a_text_cut_anywhere_invents_nothing_and_loses_nothing_before_the_cut() -> None:
    gpus = random_gpus(2, 6)
    text = text_of(gpus)
    keys = {
        "power_watts": r"Average Power Draw +: \d+\.00 W",
        "utilization_percent": r"GPU +: \d+ %",
        "memory_used_bytes": r"Used +: \d+ MiB",
        "temperature_celsius": r"GPU Current Temp +: \d+ C",
        "power_limit_watts": r"Current Power Limit +: \d+\.00 W",
    }
    begins = [match.start() for match in re.finditer(r"\nGPU ", text)] + [len(text)]
    ends = {
        (place, field): next(match.end() for match in re.finditer(pattern, text) if match.start() > begins[place])
        for place in range(2)
        for field, pattern in keys.items()
    }
    for length in range(text.index("GPU 0000"), len(text), 3):
        report = read(text[:length])
        found = report.snapshots[-1].gpus if report.snapshots else ()
        for place, sample in enumerate(found):
            for field, value in gpus[place].truth().items():
                if field not in {"name", "pci_bus_id", "index", "performance_state"}:
                    assert getattr(sample, field) in (None, value), (length, field)
            for field in keys:
                if ends[place, field] <= length:
                    assert getattr(sample, field) == gpus[place].truth()[field], (length, field)


def test_a_loop_is_samples_with_their_times() -> None:
    texts = [text_of(random_gpus(4, 8), second) for second in (0, 5, 10)]
    report = read("".join(texts))
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [4, 4, 4]
    first, _, last = (snapshot.time_seconds or 0.0 for snapshot in report.snapshots)
    assert last - first == 10.0


def test_one_gpu_of_several_has_no_index() -> None:
    """`nvidia-smi -q -i 3`: it does not say which one it is, except by its PCI id."""
    gpus = random_gpus(8, 10)
    text = text_of(gpus[3:4]).replace("Attached GPUs                                          : 1", "Attached GPUs : 8")
    (gpu,) = read(text).snapshots[0].gpus
    assert gpu.index is None
    assert gpu.pci_bus_id == gpus[3].bus
    assert gpu.power_watts == gpus[3].watts


def test_a_part_with_nothing_but_the_name_reads_no_more() -> None:
    text = (
        "==============NVSMI LOG==============\nDriver Version        : 590.48.01\nAttached GPUs         : 1\n"
        "    Product Name      : NVIDIA H200\n    Fabric\n        State         : Completed\n"
        "        Health\n            Access Timeout Recovery : N/A\n"
    )
    report = read(text)
    assert report.status is HostStatus.OK
    (gpu,) = report.snapshots[0].gpus
    assert (gpu.name, gpu.power_watts, gpu.fault) == ("NVIDIA H200", None, None)


@pytest.mark.parametrize("word", ["GPU is lost", "[GPU is lost]"])
def test_a_lost_gpu_and_one_that_needs_a_reset(word: str) -> None:
    gpus = random_gpus(3, 12)
    _, second, third = (f"GPU {gpu.bus}" for gpu in gpus)
    text = text_of(gpus)
    lost = re.sub(r": \d[^\n]*", f": {word}", text[text.index(second) : text.index(third)].split("\n", 1)[1])
    reset = text[text.index(third) :].replace(
        "    Accounting Mode", "    GPU Recovery Action : Reset\n    Accounting Mode", 1
    )
    report = read(text[: text.index(second)] + second + "\n" + lost + reset)
    assert [gpu.fault for gpu in report.snapshots[0].gpus] == [None, ReadingStatus.LOST, ReadingStatus.RESET_REQUIRED]


def test_old_drivers_name_power_and_memory_errors_differently() -> None:
    """Driver 450, as in github.com/MatthiasSchinzel/sysmon/issues/12, with a place that counts errors."""
    text = """
==============NVSMI LOG==============
Timestamp                                 : Sat Oct 10 17:02:53 2020
Attached GPUs                             : 1
GPU 00000000:01:00.0
    Product Name                          : Tesla V100-SXM2-16GB
    Clocks Throttle Reasons
        Idle                              : Active
    Utilization
        Gpu                               : 31 %
    Ecc Errors
        Volatile
            Single Bit
                Total                     : 5
            Double Bit
                Device Memory             : 2
                Total                     : 2
        Aggregate
            Double Bit
                Total                     : 9
    Power Readings
        Power Draw                        : 44.50 W
        Power Limit                       : 250.00 W
        Enforced Power Limit              : 240.00 W
"""
    (gpu,) = read(text).snapshots[0].gpus
    assert (gpu.power_watts, gpu.power_source, gpu.power_limit_watts) == (44.5, PowerSource.DRAW, 240.0)
    assert (gpu.utilization_percent, gpu.uncorrected_ecc_errors) == (31.0, 2.0)
    assert gpu.throttle_reasons == frozenset({"gpu_idle"})


def test_the_memory_of_processes_stands_in_only_where_the_gpu_has_none() -> None:
    gpus = random_gpus(2, 14)
    text = text_of(gpus)
    assert differences(read(text), gpus) == []
    shared = re.sub(r"(        (?:Total|Used) +): \d+ MiB", r"\1: N/A", text)
    used = [gpu.memory_used_bytes for gpu in read(shared).snapshots[0].gpus]
    assert used == [15690 * MEBIBYTE] * 2


AMD_TEXT = """
GPU: 0
    USAGE:
        GFX_ACTIVITY: 97 %
        UMC_ACTIVITY: 41 %
    POWER:
        SOCKET_POWER: 640 W
        GFX_VOLTAGE: N/A
    CLOCK:
        GFX_0:
            CLK: 2100 MHz
            MIN_CLK: 500 MHz
    TEMPERATURE:
        EDGE: N/A
        HOTSPOT: 61 °C
        MEM: 55 °C
    ECC:
        TOTAL_CORRECTABLE_COUNT: 4
        TOTAL_UNCORRECTABLE_COUNT: 2
    MEM_USAGE:
        TOTAL_VRAM: 196592 MB
        USED_VRAM: 150283 MB
GPU: 1
    USAGE:
        GFX_ACTIVITY: N/A
    POWER:
        SOCKET_POWER: 140 W
"""


def test_amd_smi_metric_as_text() -> None:
    """The layout of docs/how-to of ROCm's amd-smi, release 7.1."""
    busy, other = read(AMD_TEXT).snapshots[0].gpus
    assert (busy.index, busy.power_watts, busy.utilization_percent) == (0, 640.0, 97.0)
    assert (busy.memory_used_bytes, busy.memory_total_bytes) == (150283 * MEBIBYTE, 196592 * MEBIBYTE)
    assert (busy.temperature_celsius, busy.sm_clock_mhz, busy.uncorrected_ecc_errors) == (61.0, 2100.0, 2.0)
    assert (other.index, other.power_watts, other.utilization_percent, other.fault) == (1, 140.0, None, None)


def test_amd_smi_metric_and_static_are_one_sample_and_a_loop_is_several() -> None:
    static = "GPU: 0\n    ASIC:\n        MARKET_NAME: AMD Instinct MI300X\n    LIMIT:\n        SOCKET_POWER: 750 W\n"
    report = read(AMD_TEXT + static)
    assert len(report.snapshots) == 1
    assert (report.snapshots[0].gpus[0].name, report.snapshots[0].gpus[0].power_limit_watts) == (
        "AMD Instinct MI300X",
        750.0,
    )
    assert [len(snapshot.gpus) for snapshot in read(AMD_TEXT * 3).snapshots] == [2, 2, 2]
