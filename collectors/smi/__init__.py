"""Outputs of nvidia-smi (query CSV, table, XML, dmon, -L) and rocm-smi -> typed samples."""

from __future__ import annotations
