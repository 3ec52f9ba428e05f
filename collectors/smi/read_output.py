"""Any output of a GPU tool -> `SmiReport`: detect the format, read the rows, derive the host's status."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.smi.amd_formats import (
    looks_like_amd_table,
    looks_like_monitor,
    looks_like_rocm,
    parse_amd_table,
    parse_monitor,
    parse_rocm,
    parse_rocm_documents,
)
from wattwatch.collectors.smi.columns import REQUIRED_COLUMNS, columns_from_names
from wattwatch.collectors.smi.csv_format import parse_csv, parse_records
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells
from wattwatch.collectors.smi.lines import decode_lines, text_of_html
from wattwatch.collectors.smi.messages import MessageLog, explain_exit_code, other_output
from wattwatch.collectors.smi.nvidia_smi_formats import (
    DMON_HEADER,
    looks_like_dcgmi,
    looks_like_gpustat,
    looks_like_listing,
    parse_dcgmi,
    parse_dmon,
    parse_gpustat,
    parse_listing,
    parse_xml,
)
from wattwatch.collectors.smi.outline import (
    json_documents,
    looks_like_outline,
    parse_amd_documents,
    parse_outline,
)
from wattwatch.collectors.smi.report import GpuSnapshot, ParsedRows, SmiReport
from wattwatch.collectors.smi.table import looks_like_table, parse_table

_MAX_PROBED_WIDTH: Final = 4000  # rocm-smi --json prints all GPUs of a node in one line
_INFOROM: Final = 14  # exit status "infoROM is corrupted": harmless if there are rows


def read_gpu_output(
    data: bytes, stderr: bytes = b"", exit_code: int | None = None, columns: Sequence[str] | None = None
) -> SmiReport:
    """Read what a tool printed, or the part of it that a person pasted. Never raises.

    `columns`: names for rows without a header (nvidia-smi's or ours). `exit_code`: used only where nothing was printed
    (124 and 137 mean that the query hung); readable rows are trusted whatever it is. The last message decides: a log
    that ends with "Failed to initialize NVML" has rows and the status driver_down.
    """
    lines, cut = decode_lines(data)
    messages, stderr_messages = MessageLog(), MessageLog()
    for line in decode_lines(stderr)[0]:
        if line.strip() and not stderr_messages.recognize(line):
            stderr_messages.warn(f"stderr: {line.strip()!r}")
    source, rows = _parse_any(lines, cut, messages, columns)
    if not rows.snapshots and messages.status is None:
        messages.status, messages.detail = stderr_messages.status, stderr_messages.detail
    elif stderr_messages.status:
        stderr_messages.warn(stderr_messages.detail)
    messages.missing.extend(gpu for gpu in stderr_messages.missing if gpu not in messages.missing)
    messages.invalid_fields.extend(stderr_messages.invalid_fields)
    for warning in (*rows.warnings, *stderr_messages.warnings):
        messages.warn(warning)
    empty = not any(line.strip() for line in lines) and not stderr.strip()
    return _build_report(source, rows, messages, exit_code, empty)


def _parse_any(
    lines: list[str], cut: bool, messages: MessageLog, columns: Sequence[str] | None
) -> tuple[str, ParsedRows]:
    text = "\n".join(lines)
    # The order matters: each test is specific enough not to match the formats after it.
    if "<nvidia_smi_log" in text:
        rows = parse_xml(text, messages)
        # A page that shows the document may have escaped a part of it.
        return "xml", rows if rows.snapshots or "&gt;" not in text else parse_xml(text_of_html(text), messages)
    may_be_json = len(text) <= _MAX_JSON_CHARS and any(mark in text for mark in _JSON_MARKS)
    if may_be_json and (found := _parse_json(text)) is not None:
        return found
    short = [
        line[:_MAX_PROBED_WIDTH] for line in lines
    ]  # garbage without line ends must not keep a pattern busy for minutes
    for source, looks_like, parse in _READERS:
        if looks_like(short):
            return source, parse(short, messages)
    if looks_like_wandb(text):
        return "wandb", parse_wandb(lines)
    rows = parse_csv(lines, cut, messages, columns_from_names(columns) if columns else None)
    if not _reads_more_than_one_value(rows) and (what := other_output(short) or _what_json(text)):
        rows = replace(rows, snapshots=(), problem=what)
    return ("csv" if rows.snapshots or rows.problem else ""), rows


def _parse_json(text: str) -> tuple[str, ParsedRows] | None:
    """JSON in one line or many: amd-smi, rocm-smi, or rows whose keys are columns (gpustat --json, a converted CSV)."""
    documents = list(json_documents(text))
    for source, parse in (("amd", parse_amd_documents), ("rocm", parse_rocm_documents), ("json", parse_records)):
        rows = parse(documents)
        if rows is not None and rows.snapshots:
            return source, rows
    return None


_MAX_JSON_CHARS: Final = 32 << 20  # a document is read into memory; a longer text is a log of something else
_JSON_MARKS: Final = ('"card', '"gfx_', '_power"', '_vram"', '"gpu_data"', '"power', '"utilization', '"memory', '"temp')
_READERS: Final[tuple[tuple[str, Callable[[Sequence[str]], bool], Callable[..., ParsedRows]], ...]] = (
    ("rocm", looks_like_rocm, parse_rocm),
    ("dmon", lambda lines: any(DMON_HEADER.match(line) for line in lines), parse_dmon),
    ("dcgmi", looks_like_dcgmi, parse_dcgmi),
    ("amd", looks_like_amd_table, parse_amd_table),
    ("amd", looks_like_monitor, parse_monitor),
    ("table", looks_like_table, parse_table),
    ("gpustat", looks_like_gpustat, parse_gpustat),
    ("list", looks_like_listing, parse_listing),
    ("outline", looks_like_outline, parse_outline),
)


def _reads_more_than_one_value(rows: ParsedRows) -> bool:
    """Whether this is an output of readings, not prose in which one word looks like a column and one like its value."""
    live = ("power_watts", "utilization_percent", "memory_used_bytes", "temperature_celsius")
    values = (getattr(gpu, name) for snapshot in rows.snapshots for gpu in snapshot.gpus for name in live)
    return len(tuple(itertools.islice((value for value in values if value is not None), 2))) > 1


def _what_json(text: str) -> str:
    if text.lstrip()[:1] not in ("{", "[") or not any(True for _ in json_documents(text)):
        return ""
    return "this JSON contains no GPU readings in a known format (rocm-smi, amd-smi metric, gpustat)"


def _build_report(source: str, rows: ParsedRows, messages: MessageLog, exit_code: int | None, empty: bool) -> SmiReport:
    ended = explain_exit_code(exit_code)
    status, detail = HostStatus.OK, ""
    if rows.snapshots:
        # A message before the rows was transient; one after them is the current state.
        if messages.status and messages.status_line > rows.last_row_line >= 0:
            status, detail = messages.status, f"after the last row, nvidia-smi reported: {messages.detail}"
        elif messages.status:
            messages.warn(messages.detail)
        if ended:
            messages.warn(f"nvidia-smi exited with status {exit_code} but printed readable rows: {ended.text}")
    elif messages.invalid_fields:
        noun = "field" if len(messages.invalid_fields) == 1 else "fields"
        names = ", ".join(repr(name) for name in messages.invalid_fields)
        status, detail = HostStatus.PARSE_ERROR, f"this driver does not know the {noun} {names}: query fewer fields"
    elif messages.status:
        status, detail = messages.status, messages.detail
    elif messages.missing:
        named = "; ".join(gpu.text for gpu in messages.missing[:4])
        status, detail = (
            HostStatus.DRIVER_DOWN,
            f"nvidia-smi stopped at a GPU that it could not open, and listed no GPU: {named}",
        )
    elif ended and (empty or exit_code != _INFOROM):
        status, detail = ended.status, f"nvidia-smi exited with status {exit_code} and printed no rows: {ended.text}"
    else:
        status, detail = HostStatus.PARSE_ERROR, _why_nothing(rows, messages, empty)
    return SmiReport(
        source if rows.snapshots or source else "",
        status,
        detail,
        rows.snapshots,
        tuple(messages.missing),
        tuple(messages.warnings),
        tuple(messages.invalid_fields),
        rows.unreadable_rows,
    )


def _why_nothing(rows: ParsedRows, messages: MessageLog, empty: bool) -> str:
    if empty:
        return "the query printed nothing or did not return"
    if rows.problem:
        return rows.problem
    if rows.unreadable_rows:
        noun = "row" if rows.unreadable_rows == 1 else "rows"
        return f"no GPU could be read from {rows.unreadable_rows} {noun}: cells are missing or contain no value"
    first = f"; first problem: {messages.warnings[0]}" if messages.warnings else ""
    query = REQUIRED_COLUMNS.replace(", ", ",")
    return f"no GPU row found{first}. Use this query: nvidia-smi --query-gpu={query} --format=csv"


# Keys of run loggers (Weights & Biases), `system.gpu.0.powerWatts=123`, also as JSON --------------------------------

_WANDB_KEY: Final = re.compile(r"system[./]gpu\.(\d{1,3})\.(\w+)[\"']?\s*[=:,\s]\s*(-?[\d.]+(?:[eE][+-]?\d+)?)")
_WANDB_FIELDS: Final = {
    "gpu": ("utilization", "%"),
    "memory": ("memory_utilization", "%"),
    "memoryAllocatedBytes": ("memory_used", "B"),
    "temp": ("temperature", "C"),
    "powerWatts": ("power_draw", "W"),
    "enforcedPowerLimitWatts": ("power_limit_enforced", "W"),
    "smClock": ("sm_clock", "MHz"),
}


def looks_like_wandb(text: str) -> bool:
    return bool(_WANDB_KEY.search(text))


def parse_wandb(lines: Sequence[str]) -> ParsedRows:
    """The last value of each key, as one snapshot; error counters alone are not a GPU reading."""
    gpus: dict[int, dict[str, tuple[str, str]]] = {}
    others: set[str] = set()
    for line in lines:
        for index, key, value in _WANDB_KEY.findall(line):
            if key in _WANDB_FIELDS:
                field, unit = _WANDB_FIELDS[key]
                gpus.setdefault(int(index), {"index": (index, "")})[field] = (value, unit)
            else:
                others.add(key)
    if not gpus:
        found = ", ".join(sorted(others)[:10])
        return ParsedRows(problem=f"this logger recorded only {found}; required keys: powerWatts, gpu, temp")
    return ParsedRows((GpuSnapshot(None, tuple(gpu_from_cells(gpus[index]) for index in sorted(gpus))),))
