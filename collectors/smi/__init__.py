"""Output of nvidia-smi (query CSV, table, XML, dmon, -L) and rocm-smi -> typed samples. This is the public API."""

from __future__ import annotations

from wattwatch.collectors.smi.query import FALLBACK_QUERY_FIELDS, QUERY_FIELDS, QUERY_FORMAT, read_query_csv
from wattwatch.collectors.smi.read_output import read_gpu_output
from wattwatch.collectors.smi.report import GpuSnapshot, SmiReport

__all__ = [
    "FALLBACK_QUERY_FIELDS",
    "QUERY_FIELDS",
    "QUERY_FORMAT",
    "GpuSnapshot",
    "SmiReport",
    "read_gpu_output",
    "read_query_csv",
]
