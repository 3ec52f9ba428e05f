"""What one reading of a GPU tool's output gives: the frozen types of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import GpuSample, HostStatus, MissingGpu

MAX_WARNINGS: Final = 20
"""Enough to see what is wrong; a log of a million odd lines must not fill memory with them."""


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """The boards of one host at one moment. `time_seconds`: the tool's own stamp as if it were UTC; None without."""

    time_seconds: float | None
    gpus: tuple[GpuSample, ...]


@dataclass(frozen=True, slots=True)
class SmiReport:
    """All that was read. Never raises, never empty with status OK: zero rows parsed is an error.

    `invalid_fields`: the driver does not know these columns and therefore answered nothing (exit 2): ask again with a
    smaller list. `unreadable_rows`: rows that were there and gave no board (cut off, nothing but absence, ragged).
    """

    source: str  # "csv", "table", "xml", "dmon", "list", "rocm", "wandb", "" (nothing recognised)
    status: HostStatus
    detail: str  # "" when OK; else one sentence: what was seen and what to do
    snapshots: tuple[GpuSnapshot, ...] = ()
    missing_gpus: tuple[MissingGpu, ...] = ()
    warnings: tuple[str, ...] = ()
    invalid_fields: tuple[str, ...] = ()
    unreadable_rows: int = 0


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """What a reader of one format found, before the host's status is judged. `trouble`: why there are none."""

    snapshots: tuple[GpuSnapshot, ...] = ()
    warnings: tuple[str, ...] = ()
    unreadable_rows: int = 0
    trouble: str = ""
    last_row_line: int = -1  # number of the last line that gave a row: what is said after it is the last word
