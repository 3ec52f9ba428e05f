"""What makes a board broken, and what is only a reading that failed."""

from __future__ import annotations

import pytest

from collectors.samples import GpuSample, Reason


@pytest.mark.parametrize(
    ("reasons", "fault"),
    [
        ({}, None),
        ({"utilization_percent": Reason.UNSUPPORTED, "power_watts": Reason.MIG}, None),
        ({"temperature_celsius": Reason.UNREADABLE}, None),
        ({"power_watts": Reason.UNREADABLE}, None),  # 0 W beside a load, or one failed query
        ({"power_watts": Reason.UNREADABLE, "utilization_percent": Reason.UNREADABLE}, Reason.UNREADABLE),
        ({"ecc": Reason.UNREADABLE}, Reason.UNREADABLE),
        ({"name": Reason.UNREADABLE}, Reason.UNREADABLE),
        ({"power_watts": Reason.LOST}, Reason.LOST),
        ({"power_watts": Reason.RESET_REQUIRED, "sm_clock_mhz": Reason.UNREADABLE}, Reason.RESET_REQUIRED),
    ],
)
def test_one_failed_reading_is_no_broken_board(reasons: dict[str, Reason], fault: Reason | None) -> None:
    assert GpuSample(0, reasons=reasons).fault is fault
