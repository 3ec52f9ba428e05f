"""The states of arXiv 2608.05944, section 3, as samples of 16 B300s on two nodes: power and utilization by rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class PowerExample:
    name: str
    state: str
    shape: str
    exit_code: int
    watts: tuple[float, ...]
    busy: tuple[float, ...]
    held_mib: float = 82_000.0
    suspects: list[int] = field(default_factory=list)


def near(watts: float) -> tuple[float, ...]:
    """GPUs differ by a few watts, always in the same way."""
    return tuple(watts + (rank * 7) % 11 - 5 for rank in range(16))


def all_but(rank: int) -> tuple[float, ...]:
    return tuple(0.0 if r == rank else 100.0 for r in range(16))


ALL: Final = (100.0,) * 16
POWER_EXAMPLES: Final = (
    PowerExample("compute", "compute", "all_busy", 0, near(985), ALL),
    PowerExample("communication", "communication", "all_busy", 0, near(640), ALL),
    PowerExample(
        "starvation", "starvation", "scatter", 1, near(575),
        (12, 85, 40, 97, 5, 66, 31, 74, 58, 20, 90, 47, 0, 79, 35, 62),
    ),
    PowerExample("checkpoint", "checkpoint", "rank0_low_rest_busy", 0, near(190), all_but(0)),
    PowerExample("deadlock", "hang", "one_low_rest_busy", 2, near(190), all_but(3), suspects=[3]),
    PowerExample("deadlock, all busy", "hang", "all_busy", 2, near(190), ALL),
    PowerExample("idle", "idle", "all_low", 0, near(139), (0.0,) * 16, held_mib=4.0),
)  # fmt: skip


def json_sample(picture: PowerExample) -> bytes:
    """As JSON samples: the same twice, a second apart."""
    gpus = [
        {
            "index": rank % 8, "node": f"node-{rank // 8 + 1:02}", "rank": rank, "util_pct": picture.busy[rank],
            "power_w": picture.watts[rank], "power_limit_w": 1100, "mem_used_mib": picture.held_mib,
            "mem_total_mib": 281_600, "temp_c": 50,
        }
        for rank in range(16)
    ]  # fmt: skip
    samples = [{"t_seconds": second, "gpus": gpus} for second in (0, 1)]
    return json.dumps({"gpu_model": "NVIDIA B300 SXM6 AC", "samples": samples}).encode()
