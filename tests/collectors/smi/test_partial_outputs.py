"""Rows and documents that are cut, wrapped or of another tool, and texts that are no output of GPUs at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collectors.smi.pasted import MEBIBYTE, random_gpus, wrapped
from wattwatch.collectors.samples import HostStatus, ReadingStatus
from wattwatch.collectors.smi import SmiReport, read_gpu_output

DATA = Path(__file__).parents[2] / "data" / "smi"


def read(text: str) -> SmiReport:
    return read_gpu_output(text.encode())


# Intel's xpu-smi dump: github.com/intel/xpumanager/issues/98 and /7

XPU = (
    "Timestamp, DeviceId, GPU Utilization (%), GPU Power (W), GPU Frequency (MHz), "
    "GPU Core Temperature (Celsius Degree), GPU Memory Temperature (Celsius Degree), GPU Memory Utilization (%)\n"
)


def xpu_rows(start: int, rounds: int, devices: int = 6) -> str:
    return "".join(
        f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}.81{7 + device % 3}, {device:>4},  N/A, "
        f"{280 + device}.13, 1600.00, {35 + device}.50, 31.50,  N/A\n"
        for second in range(start, start + rounds)
        for device in range(devices)
    )


@pytest.mark.parametrize("start", [8 * 3600, 24 * 3600 - 2])
def test_xpu_smi_names_a_device_in_each_row_and_has_times_without_a_date(start: int) -> None:
    report = read(XPU + xpu_rows(start, 4))
    assert [[gpu.index for gpu in snapshot.gpus] for snapshot in report.snapshots] == [list(range(6))] * 4
    times = [snapshot.time_seconds or 0.0 for snapshot in report.snapshots]
    assert [round(time - times[0], 3) for time in times] == [0.0, 1.0, 2.0, 3.0]
    gpu = report.snapshots[0].gpus[5]
    assert (gpu.power_watts, gpu.temperature_celsius, gpu.sm_clock_mhz, gpu.fault) == (285.13, 40.5, 1600.0, None)
    assert gpu.reading("utilization_percent").reason is ReadingStatus.UNSUPPORTED


def test_the_tiles_of_one_device_are_not_two_moments_of_it() -> None:
    head = "Timestamp, DeviceId, TileId, GPU Utilization (%), GPU Power (W)\n"
    rows = "".join(
        f"2022-07-13T20:41:4{second}.046Z,{device},{tile},97.00,{100 + 10 * device + tile}.00\n"
        for second in range(3)
        for device in range(2)
        for tile in range(2)
    )
    report = read(head + rows)
    assert [[gpu.power_watts for gpu in snapshot.gpus] for snapshot in report.snapshots] == [
        [100.0, 101.0, 110.0, 111.0]
    ] * 3
    assert len({gpu.key for gpu in report.snapshots[0].gpus}) == 4


# CSV rows that a terminal wrapped


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("trimmed", [False, True])
def test_csv_rows_wrapped_at_the_width_of_a_terminal(width: int, trimmed: bool) -> None:
    gpus = random_gpus(8, 21)
    head = (
        "timestamp, index, name, pci.bus_id, power.draw [W], enforced.power.limit [W], utilization.gpu [%], "
        "memory.used [MiB], memory.total [MiB], temperature.gpu"
    )
    rows = [
        f"2026/01/01 10:00:00.{gpu.index:03}, {gpu.index}, {gpu.name}, {gpu.bus}, {gpu.watts}.00 W, {gpu.limit}.00 W, "
        f"{gpu.utilization} %, {gpu.used} MiB, {gpu.total} MiB, {gpu.temperature}"
        for gpu in gpus
    ]
    lines = wrapped([head, *rows], width)
    report = read("\n".join(line.rstrip() if trimmed else line for line in lines) + "\n")
    for sample, gpu in zip(report.snapshots[0].gpus, gpus, strict=True):
        for name, value in gpu.truth().items():
            assert name == "performance_state" or getattr(sample, name) == value, (width, name)


# XML cut within a GPU


def test_a_document_cut_anywhere_keeps_what_is_whole_and_invents_nothing() -> None:
    text = (DATA / "xml" / "qx-t4.xml").read_text("utf-8")
    (whole,) = read(text).snapshots[0].gpus
    fields = {
        "power_watts": "</instant_power_draw>",
        "utilization_percent": "</gpu_util>",
        "temperature_celsius": "</gpu_temp>",
        "memory_used_bytes": "</used>",
    }
    begin = text.index("<gpu ")
    for length in range(begin, text.index("</gpu>"), 7):
        report = read(text[:length])
        found = report.snapshots[0].gpus if report.snapshots else ()
        for gpu in found:
            for name in ("name", "uuid", *fields, "power_limit_watts", "memory_total_bytes"):
                assert getattr(gpu, name) in (None, getattr(whole, name)), (length, name)
            for name, tag in fields.items():
                if begin < text.index(tag, begin) + len(tag) <= length:
                    assert getattr(gpu, name) == getattr(whole, name), (length, name)
        if not found:
            assert "cut off before the first reading of GPU 0" in report.detail


def test_a_document_cut_before_any_reading_says_how_many_gpus_there_are() -> None:
    text = "<nvidia_smi_log><attached_gpus>8</attached_gpus><gpu id='00000000:1A:00.0'><product_name>NVIDIA H100"
    report = read(text)
    assert report.status is HostStatus.PARSE_ERROR
    assert report.detail.endswith("is cut off before the first reading of GPU 0 (8 GPUs are attached)")


def test_a_document_that_a_web_page_escaped() -> None:
    text = (DATA / "xml" / "qx-t4.xml").read_text("utf-8")
    (whole,) = read(text).snapshots[0].gpus
    for escaped in (
        text.replace("<", "&lt;").replace(">", "&gt;"),
        text.replace(">", "&gt;").replace("\t", "&nbsp; &nbsp; "),
    ):
        assert read(escaped).snapshots[0].gpus == (whole,)


def test_a_document_about_one_gpu_of_several_does_not_number_it() -> None:
    text = (DATA / "xml" / "qx-t4.xml").read_text("utf-8").replace("<attached_gpus>1<", "<attached_gpus>4<")
    assert "<attached_gpus>4<" in text
    (gpu,) = read(text).snapshots[0].gpus
    assert gpu.index is None
    assert gpu.pci_bus_id is not None


def test_memory_errors_of_a_document_are_counted_and_those_of_the_past_are_not() -> None:
    gpu = (
        "<gpu id='0000:0A:00.0'><ecc_errors><volatile><sram_uncorrectable_parity>1</sram_uncorrectable_parity>"
        "<sram_uncorrectable_secded>N/A</sram_uncorrectable_secded><dram_correctable>9</dram_correctable>"
        "<dram_uncorrectable>5</dram_uncorrectable></volatile><aggregate><dram_uncorrectable>80</dram_uncorrectable>"
        "</aggregate></ecc_errors></gpu>"
    )
    (read_gpu,) = read(f"<nvidia_smi_log>{gpu}</nvidia_smi_log>").snapshots[0].gpus
    assert read_gpu.uncorrected_ecc_errors == 6.0


# Values of a query


def test_memory_errors_of_a_query() -> None:
    head = "index, power.draw [W], ecc.errors.corrected.volatile.total, ecc.errors.uncorrected.aggregate.total"
    gpus = read(f"{head}\n0, 600.00 W, 7, 8\n").snapshots[0].gpus
    assert gpus[0].uncorrected_ecc_errors is None
    head += ", ecc.errors.uncorrected.volatile.total"
    gpus = read(f"{head}\n0, 600.00 W, 7, 8, 2\n1, 600.00 W, 0, 0, [N/A]\n").snapshots[0].gpus
    assert [gpu.uncorrected_ecc_errors for gpu in gpus] == [2.0, None]
    assert [gpu.fault for gpu in gpus] == [None, None]


@pytest.mark.parametrize("cell", ["12 kJ", "busy", "..."])
def test_a_form_that_is_not_known_is_no_evidence_of_a_fault(cell: str) -> None:
    gpus = read(f"index, power.draw [W], utilization.gpu [%]\n0, {cell}, {cell}\n1, 600.00 W, 99 %\n").snapshots[0].gpus
    assert gpus[0].fault is None
    assert gpus[0].reading("power_watts").reason is ReadingStatus.UNPARSED
    assert gpus[1].power_watts == 600.0


def test_a_gpu_whose_cells_all_require_a_reset() -> None:
    rows = "0, NVIDIA H100, 588.00 W, 99 %\n" + ", ".join(["[GPU requires reset]"] * 4) + "\n"
    sound, broken = read("index, name, power.draw [W], utilization.gpu [%]\n" + rows).snapshots[0].gpus
    assert (sound.power_watts, sound.fault) == (588.0, None)
    assert broken.fault is ReadingStatus.RESET_REQUIRED


@pytest.mark.parametrize("action", ["Reset", "Reboot", "Drain and Reset"])
def test_a_gpu_that_must_recover_first(action: str) -> None:
    gpus = (
        read(f"index, gpu_recovery_action, power.draw [W]\n0, None, 70.00 W\n1, {action}, 70.00 W\n").snapshots[0].gpus
    )
    assert [gpu.fault for gpu in gpus] == [None, ReadingStatus.RESET_REQUIRED]


# Texts without readings


TOPOLOGY = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\tPIX\t0-63\t0\nGPU1\tNV18\t X \tSYS\t0-63\t0\n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the interconnect between NUMA nodes\n"
)
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
HELP = (
    "NVIDIA System Management Interface -- v590.48.01\n\nnvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...\n"
    "    -d,   --display=            Display only selected information: MEMORY,\n"
    "                                    UTILIZATION, ECC, TEMPERATURE, POWER, CLOCK,\n"
    "                                Flags can be combined with comma e.g. ECC,POWER.\n"
    '"power.draw [W]"\nThe last measured power draw for the entire board, in watts, if available.\n'
    '"index"\nZero based, 1 in\n'
)


@pytest.mark.parametrize(("text", "what"), [(TOPOLOGY, "topo -m"), (HELP, "help text")])
def test_what_has_no_reading_is_said_to_be_what_it_is(text: str, what: str) -> None:
    report = read(text)
    assert report.snapshots == ()
    assert report.status is HostStatus.PARSE_ERROR
    assert what in report.detail


def test_a_topology_beside_readings_does_not_hide_them() -> None:
    rows = (
        "index, name, power.draw [W], utilization.gpu [%]\n0, NVIDIA H100, 588.00 W, 99 %\n"
        "1, NVIDIA H100, 590.00 W, 99 %\n"
    )
    assert [gpu.power_watts for gpu in read(rows + TOPOLOGY).snapshots[0].gpus] == [588.0, 590.0]


def test_lines_of_prose_below_a_header_are_no_gpus() -> None:
    text = "index, name\nThis index counts from zero, and may change\n0, NVIDIA H100 80GB HBM3\n"
    report = read(text)
    assert [gpu.name for gpu in report.snapshots[0].gpus] == ["NVIDIA H100 80GB HBM3"]
    assert report.unreadable_rows == 1


@pytest.mark.parametrize(
    "line",
    [
        "            Access Timeout Recovery                    : N/A",
        "NCCL_IB_TIMEOUT=22",
        "timeout = 600",
        "query timeout: 30 s",
        "| timeout | 600 |",
        "Route Recovery in progress, timeout recovery : False",
    ],
)
def test_a_setting_with_a_timeout_in_its_name_is_no_hung_query(line: str) -> None:
    assert read(line + "\n").status is not HostStatus.SAMPLER_TIMEOUT


@pytest.mark.parametrize(
    "line",
    [
        "nvidia-smi timed out after 10 seconds",
        "Timed out",
        "command timed out: nvidia-smi --query-gpu=index",
        "timeout: sending signal TERM to command 'nvidia-smi'",
        "ERROR: query of GPU 3 timed out",
        "# no output; process in uninterruptible sleep (state D)",
        "rpc error: code = DEADLINE_EXCEEDED",
    ],
)
def test_a_query_that_did_not_return_is_one(line: str) -> None:
    assert read(line + "\n").status is HostStatus.SAMPLER_TIMEOUT


def test_memory_of_a_device_is_in_mebibytes() -> None:
    head = "gpu,gfx_activity,socket_power,used_vram,total_vram\n"  # amd-smi metric --csv
    (gpu,) = read(head + "0,97,640,150283,196592\n").snapshots[0].gpus
    assert (gpu.power_watts, gpu.utilization_percent, gpu.memory_used_bytes) == (640.0, 97.0, 150283 * MEBIBYTE)


READ = {"power_watts": 300.25, "utilization_percent": 95.0, "memory_used_bytes": 70123 * 2.0**20}
WITH_UNITS = ("timestamp, index, name, power.draw [W], utilization.gpu [%], memory.used [MiB]", " W", " %", " MiB")
WITHOUT_UNITS = ("timestamp, index, name, memory.used [MiB], utilization.gpu [%], power.draw [W]", "", "", "")


@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("units", [WITH_UNITS, WITHOUT_UNITS])
def test_rows_cut_anywhere_lose_no_gpu_and_shorten_no_number(units: tuple[str, ...], count: int) -> None:
    header, watts, percent, mib = units
    cells = {
        "power.draw [W]": f"300.25{watts}",
        "utilization.gpu [%]": f"95{percent}",
        "memory.used [MiB]": f"70123{mib}",
    }
    rows = [
        ", ".join(
            {"timestamp": "2026/01/01 00:00:00.000", "index": str(index), "name": "NVIDIA H100"}.get(name)
            or cells[name]
            for name in header.split(", ")
        )
        for index in range(count)
    ]
    text = "\n".join([header, *rows]) + "\n"
    for end in range(len(header) + 1, len(text)):
        whole = text[:end].count("\n") - 1
        named = text[:end].rpartition("\n")[2].count(",") >= 2
        gpus = [gpu for snapshot in read_gpu_output(text[:end].encode()).snapshots for gpu in snapshot.gpus]
        assert [gpu.index for gpu in gpus] == list(range(whole + named))
        for gpu in gpus:
            values = {name: getattr(gpu, name) for name in READ}
            assert all(value in (None, READ[name]) for name, value in values.items()), text[:end][-60:]
            missing = {name for name, value in values.items() if value is None}
            assert all(gpu.reasons[name] is ReadingStatus.UNPARSED for name in missing)
            assert not missing or gpu.index == whole


def test_a_cut_row_of_a_gpu_that_was_read_before_is_dropped() -> None:
    log = "timestamp, index, power.draw [W]\n2026/01/01 00:00:00, 0, 99.25 W\n2026/01/01 00:00:01, 0, 98."
    report = read_gpu_output(log.encode())
    assert [gpu.power_watts for snapshot in report.snapshots for gpu in snapshot.gpus] == [99.25]
    assert report.unreadable_rows == 1
