"""The result of reading a GPU tool's output: the types of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import GpuSample, HostStatus, MissingGpu

MAX_WARNINGS: Final = 20
"""A report keeps at most this many warnings. Without a limit, a log with a million unreadable lines would fill the
memory."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU as printed, its timestamp, and the block of lines it came in (a new header or table starts one)."""

    gpu: GpuSample
    seconds: float | None
    block: int = 0


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """The GPUs of one host at one moment. `time_seconds`: the tool's own timestamp, taken as UTC; None without one.

    `begins`: why another host, job or logger begins here, in a clause; "" where the log goes on. `counted_by`: how the
    GPUs were counted and numbered where the rows name none, in a clause: then their indexes are assumed.
    """

    time_seconds: float | None
    gpus: tuple[GpuSample, ...]
    begins: str = ""
    counted_by: str = ""


@dataclass(frozen=True, slots=True)
class SmiReport:
    """Everything that was read. With status OK there is at least one snapshot: an output without rows is an error.

    `invalid_fields`: columns that the driver does not know, for which it printed nothing at all (exit 2): query again
    with fewer. `unreadable_rows`: rows that contained no GPU (cut off, all cells absent, wrong number of cells).
    """

    source: (
        str  # "csv", "table", "xml", "outline", "dmon", "list", "gpustat", "rocm", "amd", "wandb", "" (not recognized)
    )
    status: HostStatus
    detail: str  # "" when OK; else one sentence: what was found and what to do
    snapshots: tuple[GpuSnapshot, ...] = ()
    missing_gpus: tuple[MissingGpu, ...] = ()
    warnings: tuple[str, ...] = ()
    invalid_fields: tuple[str, ...] = ()
    unreadable_rows: int = 0


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """What the reader of one format found, before the host's status is derived. `problem`: why there are no rows."""

    snapshots: tuple[GpuSnapshot, ...] = ()
    warnings: tuple[str, ...] = ()
    unreadable_rows: int = 0
    problem: str = ""
    last_row_line: int = -1  # line number of the last row: a message after it decides the status
