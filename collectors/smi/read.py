"""Any output of a GPU tool -> `SmiReport`: find the format, read the rows, then judge what the whole of it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from collectors.samples import HostStatus
from collectors.smi import dmon
from collectors.smi.columns import NEEDED, columns_of
from collectors.smi.listing import looks_like_listing, read_listing
from collectors.smi.messages import Said, exit_meaning
from collectors.smi.query_csv import read_csv
from collectors.smi.query_xml import read_xml
from collectors.smi.report import Rows, SmiReport
from collectors.smi.rocm import looks_like_rocm, read_rocm
from collectors.smi.table import looks_like_table, read_table
from collectors.smi.text import read_lines
from collectors.smi.wandb import looks_like_wandb, read_wandb

_WIDEST: Final = 4000  # rocm-smi --json writes all boards of a node in one line
_INFOROM: Final = 14  # "infoROM is corrupted": harmless beside rows


def read_gpu_output(
    data: bytes, stderr: bytes = b"", exit_code: int | None = None, columns: Sequence[str] | None = None
) -> SmiReport:
    """Read what a tool printed, or what a person pasted of it. Never raises.

    `columns`: names for rows without a header (nvidia-smi's or ours). `exit_code`: a witness where nothing was
    printed (124 and 137 mean that the query hung); rows are believed whatever it is. The last word counts: a log that
    ends with "Failed to initialize NVML" has rows and the status driver_down.
    """
    lines, cut = read_lines(data)
    said, heard = Said(), Said()
    for line in read_lines(stderr)[0]:
        if line.strip() and not heard.listen(line):
            heard.warn(f"stderr: {line.strip()!r}")
    source, rows = _read(lines, cut, said, columns)
    if not rows.snapshots and said.status is None:
        said.status, said.detail = heard.status, heard.detail
    elif heard.status:
        heard.warn(heard.detail)
    said.missing.extend(board for board in heard.missing if board not in said.missing)
    said.invalid_fields.extend(heard.invalid_fields)
    for warning in (*rows.warnings, *heard.warnings):
        said.warn(warning)
    empty = not any(line.strip() for line in lines) and not stderr.strip()
    return _report(source, rows, said, exit_code, empty)


def _read(lines: list[str], cut: bool, said: Said, columns: Sequence[str] | None) -> tuple[str, Rows]:
    text = "\n".join(lines)
    if "<nvidia_smi_log" in text:
        return "xml", read_xml(text, said)
    short = [line[:_WIDEST] for line in lines]  # garbage without line ends must not make a pattern search for minutes
    if looks_like_rocm(short):
        return "rocm", read_rocm(lines, said)
    if any(dmon.HEADER.match(line) for line in short):
        return "dmon", dmon.read_dmon(short, said)
    if looks_like_table(short):
        return "table", read_table(short, said)
    if looks_like_listing(short):
        return "list", read_listing(short, said)
    if looks_like_wandb(text):
        return "wandb", read_wandb(lines)
    rows = read_csv(lines, cut, said, columns_of(columns) if columns else None)
    return ("csv" if rows.snapshots or rows.trouble else ""), rows


def _report(source: str, rows: Rows, said: Said, exit_code: int | None, empty: bool) -> SmiReport:
    ended = exit_meaning(exit_code)
    status, detail = HostStatus.OK, ""
    if rows.snapshots:
        if said.status and said.status_line > rows.last_row_line >= 0:
            status, detail = said.status, f"after the last row: {said.detail}"
        elif said.status:
            said.warn(said.detail)
        if ended:
            said.warn(f"nvidia-smi ended with {exit_code} beside readable rows: {ended.text}")
    elif said.invalid_fields:
        names = ", ".join(repr(name) for name in said.invalid_fields)
        status, detail = HostStatus.PARSE_ERROR, f"this driver does not know the field {names}: ask for fewer fields"
    elif said.status:
        status, detail = said.status, said.detail
    elif said.missing:
        named = "; ".join(board.text for board in said.missing[:4])
        status, detail = (
            HostStatus.DRIVER_DOWN,
            f"nvidia-smi stopped at a board it cannot open, and lists none: {named}",
        )
    elif ended and (empty or exit_code != _INFOROM):
        status, detail = ended.status, f"nvidia-smi ended with {exit_code} and no rows: {ended.text}"
    else:
        status, detail = HostStatus.PARSE_ERROR, _why_nothing(rows, said, empty)
    return SmiReport(
        source if rows.snapshots or source else "",
        status,
        detail,
        rows.snapshots,
        tuple(said.missing),
        tuple(said.warnings),
        tuple(said.invalid_fields),
        rows.unreadable_rows,
    )


def _why_nothing(rows: Rows, said: Said, empty: bool) -> str:
    if empty:
        return "no output at all: the query printed nothing, or never returned"
    if rows.trouble:
        return rows.trouble
    if rows.unreadable_rows:
        return f"{rows.unreadable_rows} rows and no board in them: every cell is absent, or cells are missing"
    first = f"; it begins with {said.warnings[0]}" if said.warnings else ""
    return f"not one GPU row in it{first}. Needed: nvidia-smi --query-gpu={NEEDED.replace(', ', ',')} --format=csv"
