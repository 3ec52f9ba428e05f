"""Which failed readings mean a broken GPU, and which are only a failed reading."""

from __future__ import annotations

import pytest

from wattwatch.collectors.samples import GpuSample, ReadingStatus


@pytest.mark.parametrize(
    ("reasons", "fault"),
    [
        ({}, None),
        ({"utilization_percent": ReadingStatus.UNSUPPORTED, "power_watts": ReadingStatus.MIG}, None),
        ({"temperature_celsius": ReadingStatus.UNREADABLE}, None),
        ({"power_watts": ReadingStatus.UNREADABLE}, None),  # 0 W beside a load, or one failed query
        (
            {"power_watts": ReadingStatus.UNREADABLE, "utilization_percent": ReadingStatus.UNREADABLE},
            ReadingStatus.UNREADABLE,
        ),
        ({"ecc": ReadingStatus.UNREADABLE}, ReadingStatus.UNREADABLE),
        ({"name": ReadingStatus.UNREADABLE}, ReadingStatus.UNREADABLE),
        ({"power_watts": ReadingStatus.LOST}, ReadingStatus.LOST),
        (
            {"power_watts": ReadingStatus.RESET_REQUIRED, "sm_clock_mhz": ReadingStatus.UNREADABLE},
            ReadingStatus.RESET_REQUIRED,
        ),
    ],
)
def test_one_failed_reading_is_not_a_broken_gpu(reasons: dict[str, ReadingStatus], fault: ReadingStatus | None) -> None:
    assert GpuSample(0, reasons=reasons).fault is fault
