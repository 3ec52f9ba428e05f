"""gpustat, nvitop, dmon and old rocm-smi, as people paste them."""

from __future__ import annotations

import pytest

from wattwatch.collectors.smi import SmiReport, read_gpu_output

MEBIBYTE = 2.0**20


def read(text: str) -> SmiReport:
    return read_gpu_output(text.encode())


@pytest.mark.parametrize(
    ("middle", "utilization", "watts", "limit"),
    [
        ("  99 %", 99.0, None, None),
        (" 100 %, 250 / 300 W", 100.0, 250.0, 300.0),
        ("  36 %,   7 %, 61 W", 7.0, 61.0, None),  # with the fan
        ("  97 % (E:   3 %  D:   0 %), 310 / 400 W", 97.0, 310.0, 400.0),
        (" ?? %,   ?? /  ?? W", None, None, None),
    ],
)
def test_gpustat(middle: str, utilization: float | None, watts: float | None, limit: float | None) -> None:
    """The layout of github.com/wookayin/gpustat/issues/97, with the columns of its options."""
    text = "".join(
        f"dgx-1  Mon Mar 11 09:31:{second:02} 2019  535.1\n"
        + "".join(
            f"[{index}] Tesla V100-SXM2-32GB | 6{index}'C,{middle} | 28888 / 32510 MB | user(28000M) root(4M)\n"
            for index in range(3)
        )
        for second in (0, 5)
    )
    report = read(text)
    assert report.source == "gpustat"
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [3, 3]
    first, second = (snapshot.time_seconds or 0.0 for snapshot in report.snapshots)
    assert second - first == 5.0
    gpu = report.snapshots[0].gpus[2]
    assert (gpu.index, gpu.name, gpu.temperature_celsius) == (2, "Tesla V100-SXM2-32GB", 62.0)
    assert (gpu.utilization_percent, gpu.power_watts, gpu.power_limit_watts) == (utilization, watts, limit)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (28888 * MEBIBYTE, 32510 * MEBIBYTE)
    assert gpu.fault is None


DCGMI = """
#Entity   TMPTR                       POWER                       GPUTL                       FBUSD
ID        C                           W                           %                           MB
GPU 0     33                          67.892                      97                          61000
GPU 1     34                          N/A                         N/A                         61001
GPU-I 0   N/A                         N/A                         12                          17
GPU 0     33                          68.112                      98                          61000
GPU 1     34                          70.001                      99                          61001
"""


def test_dcgmi_dmon() -> None:
    """Short names of `dcgmi dmon -l`, as listed in github.com/guilbaults/slurm-job-exporter/issues/4."""
    report = read(DCGMI)
    assert report.source == "dcgmi"
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [2, 2]
    first, second = report.snapshots[0].gpus
    assert (first.index, first.power_watts, first.utilization_percent) == (0, 67.892, 97.0)
    assert (first.memory_used_bytes, first.temperature_celsius) == (61000 * MEBIBYTE, 33.0)
    assert (second.index, second.power_watts, second.fault) == (1, None, None)


NVITOP = """
╒═════════════════════════════════════════════════════════════════════════════╕
│ NVITOP 1.0.0       Driver Version: 525.60.11      CUDA Driver Version: 12.0 │
├───────────────────────────────┬──────────────────────┬──────────────────────┤
│ GPU  Name        Persistence-M│ Bus-Id        Disp.A │ Volatile Uncorr. ECC │
│ Fan  Temp  Perf  Pwr:Usage/Cap│         Memory-Usage │ GPU-Util  Compute M. │
╞═══════════════════════════════╪══════════════════════╪══════════════════════╪═══════════════════╕
│   0  A100-SXM4-80GB      On   │ 00000000:07:00.0 Off │                    0 │ MEM: ██▋    62.1% │
│ N/A   33C    P0    61W / 400W │  49.70GiB / 80.00GiB │     99%      Default │ UTL: ██▉    99%   │
├───────────────────────────────┼──────────────────────┼──────────────────────┼───────────────────┤
│   1  A100-SXM4-80GB      On   │ 00000000:0F:00.0 Off │                    0 │ MEM: ▏       0.0% │
│ N/A   32C    P0    58W / 400W │   512KiB / 80.00GiB  │      0%      Default │ UTL: ▏         0% │
╘═══════════════════════════════╧══════════════════════╧══════════════════════╧═══════════════════╛
│ Processes:                                               user@host           │
│   0  3421 C      user  49.60GiB  99  101.1   3.3  1:10:22  python train.py    │
"""


def test_nvitop() -> None:
    first, second = read(NVITOP).snapshots[0].gpus
    assert (first.index, first.power_watts, first.utilization_percent) == (0, 61.0, 99.0)
    assert first.memory_used_bytes == pytest.approx(49.7 * 2**30)
    assert first.memory_total_bytes == 80 * 2**30
    assert (second.index, second.power_watts, second.memory_used_bytes) == (1, 58.0, 512 * 2**10)


def test_dmon_with_the_escapes_of_a_quoted_comment() -> None:
    """As in github.com/mozilla/DeepSpeech/issues/178."""
    text = (
        "> \\# gpu   pwr  temp    sm   mem    fb\n> \\# Idx     W     C     %     %    MB\n"
        ">     0   111    83    25     7 11651\n>     1   112    80    24     7 11653\n"
    )
    first, second = read(text).snapshots[0].gpus
    assert (first.index, first.power_watts, first.utilization_percent) == (0, 111.0, 25.0)
    assert (second.index, second.memory_used_bytes) == (1, 11653 * MEBIBYTE)


def test_an_old_concise_table_has_no_utilization() -> None:
    """The last columns of github.com/ROCm/tensorflow-upstream/issues/156 are overdrives, not shares of use."""
    text = (
        "====================    ROCm System Management Interface    ====================\n"
        " GPU  Temp    AvgPwr   SCLK     MCLK     Fan      Perf    SCLK OD    MCLK OD\n"
        "  0   35c     73.68W   1411Mhz  300Mhz   0.0%     auto      0%         0%\n"
    )
    (gpu,) = read(text).snapshots[0].gpus
    assert (gpu.power_watts, gpu.temperature_celsius) == (73.68, 35.0)
    assert (gpu.utilization_percent, gpu.power_limit_watts) == (None, None)
