"""What a node is asked to report. Data only; travels to the node as JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogSource:
    """Log files to read progress from: a shell pattern, and a regex where the built-in formats do not fit."""

    path: str
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Asked of one node; a node may serve several jobs, so each field is a list."""

    interval_seconds: float = 1.0
    run_directories: tuple[str, ...] = ()
    logs: tuple[LogSource, ...] = ()
    checkpoint_directories: tuple[str, ...] = ()
    process_pattern: str | None = None  # regex on comm; processes that hold a GPU are reported in any case
