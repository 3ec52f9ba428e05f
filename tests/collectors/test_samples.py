"""What makes a board broken, and what is only a reading that failed."""

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
def test_one_failed_reading_is_no_broken_board(reasons: dict[str, ReadingStatus], fault: ReadingStatus | None) -> None:
    assert GpuSample(0, reasons=reasons).fault is fault
