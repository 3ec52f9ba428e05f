"""Complete outputs of real hosts: golden values, and all formats agree on the same GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattwatch.collectors.samples import GpuSample, PowerSource, ReadingStatus
from wattwatch.collectors.smi import FALLBACK_QUERY_FIELDS, QUERY_FIELDS, read_gpu_output, read_query_csv

DATA = Path(__file__).parents[2] / "data" / "smi"


def board(name: str) -> GpuSample:
    report = read_gpu_output((DATA / name).read_bytes())
    assert report.detail == ""
    (gpu,) = report.snapshots[-1].gpus
    return gpu


def test_h100_under_load_all_239_columns() -> None:
    gpu = board("captures/h100.load.csv.txt")
    assert (gpu.index, gpu.name, gpu.pci_bus_id) == (0, "NVIDIA H100 80GB HBM3", "00000000:00:09.0")
    assert (gpu.power_watts, gpu.power_source, gpu.power_limit_watts) == (631.95, PowerSource.DRAW, 700.0)
    assert (gpu.utilization_percent, gpu.memory_utilization_percent) == (100.0, 11.0)
    assert (gpu.temperature_celsius, gpu.sm_clock_mhz, gpu.performance_state) == (59.0, 1980.0, "P0")
    assert gpu.throttle_reasons == frozenset()
    assert gpu.mig is False
    assert gpu.fault is None


def test_h200_in_mig_mode_has_power_and_no_utilization_in_csv_and_table() -> None:
    for kind in ("csv", "table"):
        gpu = board(f"captures/h200_mig.load.{kind}.txt")
        assert gpu.mig is True
        assert gpu.reading("utilization_percent").reason is ReadingStatus.MIG
        assert gpu.power_watts == pytest.approx(295.0, abs=1.0)
        assert gpu.fault is None


@pytest.mark.parametrize("host", ["h100.load", "h200_mig.load", "rtx2080_windows.load"])
def test_csv_table_and_dmon_agree_on_one_gpu(host: str) -> None:
    rows, table, dmon = (board(f"captures/{host}.{kind}.txt") for kind in ("csv", "table", "dmon"))
    assert rows.pci_bus_id == table.pci_bus_id
    assert rows.power_limit_watts == table.power_limit_watts
    assert rows.memory_total_bytes == table.memory_total_bytes
    assert rows.performance_state == table.performance_state
    assert rows.utilization_percent == table.utilization_percent == dmon.utilization_percent
    for gpu in (table, dmon):
        assert gpu.power_watts == pytest.approx(rows.power_watts, abs=5.0)  # seconds apart


def test_a_ghost_load_is_read_as_printed() -> None:
    gpu = board("captures/l40s.idle.csv.txt")
    assert (gpu.utilization_percent, gpu.power_watts) == (100.0, 144.97)


def test_xml_of_a_t4_has_only_an_instant_reading() -> None:
    gpu = board("xml/qx-t4.xml")
    assert (gpu.name, gpu.power_watts, gpu.power_source) == ("Tesla T4", 33.51, PowerSource.INSTANT)
    assert (gpu.power_limit_watts, gpu.throttle_reasons) == (70.0, frozenset({"gpu_idle"}))
    assert gpu.fault is None


def test_xml_of_a_lost_gpu_keeps_its_name_and_loses_every_live_reading() -> None:
    report = read_gpu_output((DATA / "xml/qx-gb200-lost.xml").read_bytes())
    sound, lost = report.snapshots[0].gpus
    assert (sound.power_watts, sound.power_source, sound.fault) == (618.35, PowerSource.AVERAGE, None)
    assert (lost.index, lost.name, lost.power_limit_watts) == (1, "NVIDIA GB200", 1000.0)
    assert lost.fault is ReadingStatus.LOST
    assert (lost.power_watts, lost.utilization_percent, lost.sm_clock_mhz) == (None, None, None)


def test_xml_expands_no_entity() -> None:
    bomb = (
        '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;"><!ENTITY f SYSTEM "file:///etc/passwd">]>'
        '<nvidia_smi_log><gpu id="00000000:01:00.0"><product_name>&b;&f;</product_name></gpu></nvidia_smi_log>'
    )
    report = read_gpu_output(bomb.encode())
    assert report.snapshots == ()
    assert report.unreadable_rows == 1


def test_xml_that_is_cut_keeps_its_complete_gpus() -> None:
    text = (DATA / "xml/qx-gb200-lost.xml").read_bytes()
    report = read_gpu_output(text[: text.rindex(b"<uuid>")])
    assert [gpu.index for gpu in report.snapshots[0].gpus] == [0]
    assert any("cut off" in warning for warning in report.warnings)


ROW = (
    "{}, GPU-{}, 00000000:1{}:00.0, NVIDIA B300 SXM6 AC, {}, 1100.00, {}, 40, 82000, 275040, 60, 1980, P0, "
    "0x0000000000000004, Disabled, 950.12, 955.00\n"
)


def test_the_probes_query_reads_the_same_by_the_fast_path_and_the_general_one() -> None:
    answer = "".join(ROW.format(i, i, i, 900 + i, 100) for i in range(8)).encode()
    quick = read_query_csv(answer)
    general = read_gpu_output(answer, columns=QUERY_FIELDS)
    assert quick.snapshots == general.snapshots
    assert len(quick.snapshots[0].gpus) == 8


def test_the_fast_path_leaves_every_unusual_answer_to_the_general_one() -> None:
    sound = ROW.format(0, 0, 0, 900, 100)
    for odd in (
        ROW.format(1, 1, 1, "[N/A]", 100),
        ROW.format(1, 1, 1, "0.00", 100),
        ROW.format(1, 1, 1, 900, "[GPU is lost]"),
        ROW.format("[GPU is lost]", 1, 1, 900, 100),
        "Unable to determine the device handle for GPU1: 0000:0A:00.0: Unknown Error\n",
        "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n",
    ):
        answer = (sound + odd).encode()
        quick, general = read_query_csv(answer), read_gpu_output(answer, columns=QUERY_FIELDS)
        assert quick.snapshots == general.snapshots
        assert quick.missing_gpus == general.missing_gpus


def test_an_unknown_field_leads_to_the_smaller_list_and_that_is_read() -> None:
    refused = read_query_csv(b'Field "clocks_event_reasons.active" is not a valid field to query.\n', b"", 2)
    assert refused.invalid_fields == ("clocks_event_reasons.active",)
    answer = b"0, GPU-0, 00000000:01:00.0, Tesla K80, 76.10, 149.00, 100, 3, 0, 11441, 56, 562, P0\n"
    (gpu,) = read_query_csv(answer, names=FALLBACK_QUERY_FIELDS).snapshots[0].gpus
    assert (gpu.name, gpu.power_watts, gpu.power_limit_watts, gpu.utilization_percent) == (
        "Tesla K80",
        76.1,
        149.0,
        100.0,
    )
