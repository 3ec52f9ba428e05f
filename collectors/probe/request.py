"""What a node is asked to report. Data only; sent to the node as JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogSource:
    """Log files to read progress from: a shell pattern, and a regex where no built-in format fits."""

    path: str
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The request to one node. A node may run several jobs, so paths are lists."""

    interval_seconds: float = 1.0
    run_directories: tuple[str, ...] = ()
    logs: tuple[LogSource, ...] = ()
    checkpoint_directories: tuple[str, ...] = ()
    process_pattern: str | None = None  # regex on comm; processes with a GPU context are always reported
