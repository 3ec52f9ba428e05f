"""GPUs as they are simulated: watts at rest, spinning and at work, from the sources of the shipped profiles.

These numbers are drawn from reports, not from the profiles themselves: idle and context differ by site, so a seed moves
them by some per cent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Board:
    """Pairs are the lowest and highest watts of that kind."""

    name: str
    limit_watts: float
    memory_bytes: float
    clock_mhz: float
    watts: dict[str, tuple[float, float]]


BOARDS: Final = {
    # arXiv 2608.05944 s3 and s5; idle of public tables.
    "b300": Board(
        "NVIDIA B300 SXM6 AC", 1100.0, 275e9, 1920.0,
        {
            "bare": (135, 142), "context": (183, 190), "spin": (187, 197), "link": (625, 655), "work": (940, 1040),
            "light": (390, 430), "starve": (400, 750), "slowed": (560, 620),
        },
    ),
    # Spinning 116-152 W, idle 67-71 W, burn 632 W in public captures.
    "h100": Board(
        "NVIDIA H100 80GB HBM3", 700.0, 80e9, 1980.0,
        {
            "bare": (67, 71), "context": (112, 118), "spin": (122, 140), "link": (300, 350), "work": (560, 660),
            "light": (310, 380), "starve": (180, 480), "slowed": (340, 380),
        },
    ),
    # Spinning 75-100 W of 400 W, idle 52-60 W.
    "a100": Board(
        "NVIDIA A100-SXM4-80GB", 400.0, 80e9, 1410.0,
        {
            "bare": (52, 60), "context": (66, 72), "spin": (78, 96), "link": (180, 205), "work": (320, 385),
            "light": (180, 230), "starve": (110, 290), "slowed": (200, 225),
        },
    ),
}  # fmt: skip
