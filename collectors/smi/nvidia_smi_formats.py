"""Output formats of nvidia-smi other than CSV: the default table, XML (-q -x), dmon and the listing (-L)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree import ElementTree

from wattwatch.collectors.samples import GpuSample, PowerSource
from wattwatch.collectors.smi.columns import REQUIRED_COLUMNS, is_timestamp, parse_timestamps
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuSnapshot, ParsedRows
from wattwatch.collectors.smi.snapshots import GpuRow, drop_cut_rounds, group_into_snapshots

# The default table --------------------------------------------------------------------------------------------------
#
# A GPU is two lines: identity (index, name, PCI id, ECC) and readings (fan, temperature, state, power, memory,
# utilization); drivers since R450 add a third line with the MIG mode. Lines are recognized by their content, not by
# borders or widths: GPUs of 1000 W and more, 4-digit PCI domains and pasted tables shift every column.

_BUS: Final = re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f](?![0-9A-Za-z])")
_NUMBERED: Final = re.compile(r"(?:^|[|\s])(\d{1,4})\.?\s+([A-Za-z?].*)")
_MODES: Final = frozenset(
    {"On", "Off", "N/A", "ERR!", "WDDM", "TCC", "MCDM", "Enabled", "Disabled"}
)  # persistence, driver
_READINGS_LINE: Final = re.compile(
    r"(?:^|[|\s])(?P<fan>\d+\s?%|N/A|ERR!)\s+(?P<temp>\d+\s?C|N/A|ERR!)\s+(?P<perf>P\d+|N/A|ERR!|Unknown)\s+"
    r"(?P<draw>\d+(?:\.\d+)?\s?W|N/A|ERR!|Unknown)\s*/\s*(?P<limit>\d+(?:\.\d+)?\s?W|N/A|ERR!|Unknown)"
    r"(?:[\s|]+(?:\d+%\s+)?(?P<used>\d+\s?Mi?B|N/A|ERR!)\s*/\s*(?P<total>\d+\s?Mi?B|N/A|ERR!))?"
    r"(?:[\s|]+(?P<util>\d+\s?%|N/A|ERR!))?"
)
_MIG_LINE: Final = re.compile(r"^[^|]*\|\s*\|\s*\|\s*(?P<mig>Enabled\*?|Disabled\*?|N/A|ERR!)\s*\|?\s*$")
_MAX_TABLE_WIDTH: Final = 300  # a table is about 90 wide; a longer line is not one, and searching it would be slow
_NEW_TABLE: Final = re.compile(r"NVIDIA-SMI\s+\d")


def looks_like_table(lines: Sequence[str]) -> bool:
    return any(
        _READINGS_LINE.search(line[:_MAX_TABLE_WIDTH]) or _identity_cells(line[:_MAX_TABLE_WIDTH]) for line in lines
    )


def parse_table(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of all tables. A second line without its first (a pasted fragment) is a GPU without an index."""
    gpus: list[tuple[dict[str, tuple[str, str]], int, str]] = []
    block, timestamp, last, in_slices, open_gpu = 0, "", -1, False, False
    for number, whole in enumerate(lines):
        line = whole[:_MAX_TABLE_WIDTH]
        if _NEW_TABLE.search(line):
            block, in_slices, open_gpu = block + 1, False, False
        elif "MIG devices:" in line or "Processes:" in line:
            in_slices, open_gpu = True, False  # the rows below look like GPUs but are MIG instances or processes
        elif identity := _identity_cells(line):
            in_slices, open_gpu, last = False, True, number
            gpus.append((identity, block, timestamp))
        elif in_slices:
            continue
        elif readings := _READINGS_LINE.search(line):
            if not open_gpu or "power_draw" in gpus[-1][0]:
                gpus.append(({}, block, timestamp))
            gpus[-1][0].update(_reading_cells(readings))
            open_gpu, last = True, number
        elif open_gpu and (mig := _MIG_LINE.match(line)):
            gpus[-1][0]["mig"] = (mig["mig"].rstrip("*"), "")
            open_gpu = False
        elif is_timestamp(line):
            timestamp, block = line.strip(), block + 1
        elif not _is_border(line) and not messages.recognize(line, number):
            messages.warn(f"line not understood: {line.strip()!r}")
    seconds = parse_timestamps([timestamp for _, _, timestamp in gpus])
    rows = [
        GpuRow(gpu_from_cells(cells, PowerSource.TABLE), second, block)
        for (cells, block, _), second in zip(gpus, seconds, strict=True)
    ]
    return ParsedRows(group_into_snapshots(rows), (), 0, "", last)


def _is_border(line: str) -> bool:
    text = line.strip()
    return not text or text[0] in "|+-=" or text.startswith(("Fan ", "GPU "))


def _identity_cells(line: str) -> dict[str, tuple[str, str]]:
    """Index, name, PCI id and ECC from the first line of a GPU; {} for any other line."""
    bus = _BUS.search(line)
    before = line[: bus.start()].rstrip(" |\t") if bus else ""
    numbered = _NUMBERED.search(before)
    if bus is None or numbered is None or "," in before:  # a comma: a CSV row of "RTX 2080 Ti"
        return {}
    words = numbered[2].replace("|", " ").split()
    if len(words) > 1 and words[-1] in _MODES:
        words.pop()
    cells = {"index": (numbered[1], ""), "name": (" ".join(words), ""), "pci_bus_id": (bus[0], "")}
    behind = line[bus.end() :].split("|")
    if len(behind) > 1 and behind[1].strip():
        cells["ecc"] = (behind[1].strip(), "")
    return cells


def _reading_cells(match: re.Match[str]) -> dict[str, tuple[str, str]]:
    cells = {
        "temperature": (match["temp"], "C"),
        "performance_state": (match["perf"], ""),
        "power_draw": (match["draw"], "W"),
        "power_limit": (match["limit"], "W"),
        "memory_used": (match["used"], "MiB"),
        "memory_total": (match["total"], "MiB"),
        "utilization": (match["util"], "%"),
    }
    return {field: (text, unit) for field, (text, unit) in cells.items() if text is not None}


# `nvidia-smi -q -x`: one XML document per sample --------------------------------------------------------------------
#
# Entities are never expanded; the index is the order of the GPUs. Newer documents nest power under gpu_power_readings,
# older ones under power_readings; module_power_readings on Grace parts include the CPU and are never read.

_XML_DOCUMENT: Final = re.compile(r"<nvidia_smi_log\b.*?(?:</nvidia_smi_log\s*>|\Z)", re.DOTALL)
_XML_GPU: Final = re.compile(r"<gpu[\s>]")
_XML_TIMESTAMP: Final = re.compile(r"<timestamp>([^<]*)</timestamp>")
_XML_PATHS: Final[dict[str, tuple[str, ...]]] = {
    "uuid": ("uuid",),
    "pci_bus_id": ("pci/pci_bus_id",),
    "name": ("product_name",),
    "power_draw": ("gpu_power_readings/power_draw", "power_readings/power_draw"),
    "power_average": ("gpu_power_readings/average_power_draw", "power_readings/average_power_draw"),
    "power_instant": ("gpu_power_readings/instant_power_draw", "power_readings/instant_power_draw"),
    "power_limit_enforced": (
        "gpu_power_readings/current_power_limit",
        "gpu_power_readings/enforced_power_limit",
        "power_readings/current_power_limit",
        "power_readings/enforced_power_limit",
    ),
    "power_limit": ("gpu_power_readings/power_limit", "power_readings/power_limit"),
    "utilization": ("utilization/gpu_util",),
    "memory_utilization": ("utilization/memory_util",),
    "memory_used": ("fb_memory_usage/used",),
    "memory_total": ("fb_memory_usage/total",),
    "temperature": ("temperature/gpu_temp",),
    "sm_clock": ("clocks/sm_clock",),
    "performance_state": ("performance_state",),
    "mig": ("mig_mode/current_mig",),
    "ecc": ("ecc_errors/volatile/dram_uncorrectable", "ecc_errors/volatile/double_bit/total"),
}
_XML_THROTTLE: Final = re.compile(r"clocks_(?:event|throttle)_reasons?_(\w+)$")


def parse_xml(text: str, messages: MessageLog) -> ParsedRows:
    """All GPUs of all documents in the text; a document that is cut off keeps the GPUs that are complete."""
    snapshots, warnings, unreadable = [], [], 0
    cut = False
    for document in _XML_DOCUMENT.finditer(text):
        gpus: list[GpuSample] = []
        for number, element in enumerate(_gpu_elements(document[0])):
            try:
                gpus.append(_gpu_from_xml(_parse_element(element), number))
            except ElementTree.ParseError as error:
                unreadable += 1
                warnings.append(f"GPU element {number} of the XML document cannot be read: {error}")
        cut = not document[0].rstrip().endswith(">") or "</nvidia_smi_log" not in document[0]
        if cut:
            unreadable += 1
            warnings.append("the XML document is cut off: only complete GPU elements were read")
        timestamp = _XML_TIMESTAMP.search(document[0])
        if gpus:
            snapshots.append(GpuSnapshot(parse_timestamps([timestamp[1] if timestamp else ""])[0], tuple(gpus)))
    _log_text_outside_xml(text, messages)
    problem = "" if snapshots else "the output of nvidia-smi -q -x contains no complete GPU; it may be cut off"
    # A complete document proves that a GPU it does not list is missing; one that is cut off does not.
    return ParsedRows(tuple(drop_cut_rounds(snapshots) if cut else snapshots), tuple(warnings), unreadable, problem, 0)


def _gpu_elements(document: str) -> Iterator[str]:
    end = 0
    while start := _XML_GPU.search(document, end):
        end = document.find("</gpu>", start.start())
        if end < 0:
            return
        end += len("</gpu>")
        yield document[start.start() : end]


def _parse_element(element: str) -> ElementTree.Element:
    """One GPU element alone: without a document type no entity can be declared, so none can be expanded."""
    return ElementTree.fromstring(element)


def _gpu_from_xml(gpu: ElementTree.Element, number: int) -> GpuSample:
    cells = {"index": (str(number), "")}
    for field, paths in _XML_PATHS.items():
        text = next((found for path in paths if (found := gpu.findtext(path)) is not None), None)
        if text is not None:
            cells[field] = (text.strip(), "")
    if "pci_bus_id" not in cells and gpu.get("id"):
        cells["pci_bus_id"] = (gpu.get("id", ""), "")
    for reasons in (gpu.find("clocks_event_reasons"), gpu.find("clocks_throttle_reasons")):
        for reason in () if reasons is None else reasons:
            if match := _XML_THROTTLE.match(reason.tag):
                cells[f"throttle {match[1]}"] = ((reason.text or "").strip(), "")
    return gpu_from_cells(cells)


def _log_text_outside_xml(text: str, messages: MessageLog) -> None:
    outside: Sequence[str] = _XML_DOCUMENT.sub("", text).splitlines()
    for line in outside:
        if line.strip() and not line.lstrip().startswith("<"):
            messages.recognize(line)


# `nvidia-smi dmon`: a line per GPU and second under a header `# gpu pwr gtemp ...`; "-" is absence ------------------

DMON_HEADER: Final = re.compile(r"^#\s*(?:Date[\s,]+)?(?:Time[\s,]+)?gpu[\s,]+\S", re.IGNORECASE)
_DMON_FIELDS: Final = {
    "gpu": ("index", ""),
    "pwr": ("power_draw", "W"),
    "gtemp": ("temperature", "C"),
    "temp": ("temperature", "C"),  # drivers before memory temperatures
    "sm": ("utilization", "%"),
    "mem": ("memory_utilization", "%"),
    "fb": ("memory_used", "MiB"),
    "pclk": ("sm_clock", "MHz"),
}


def parse_dmon(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of all seconds. A row with fewer cells than its header was cut off and is ignored."""
    names: list[str] = []
    found: list[tuple[dict[str, tuple[str, str]], str]] = []
    unreadable, last = 0, -1
    for number, line in enumerate(lines):
        cells = line.replace(",", " ").split()
        if DMON_HEADER.match(line):
            names = line.replace("#", " ").replace(",", " ").casefold().split()
            if "pid" in names:
                return ParsedRows(
                    (),
                    (),
                    0,
                    f"nvidia-smi pmon lists processes, not GPUs; required columns: {REQUIRED_COLUMNS}",
                    -1,
                )
        elif not cells or line.startswith("#"):
            continue
        elif len(cells) == len(names) and cells[names.index("gpu")].isdigit():
            timestamp = " ".join(cell for cell, name in zip(cells, names, strict=True) if name in {"date", "time"})
            named = {
                _DMON_FIELDS[name][0]: (cell, _DMON_FIELDS[name][1])
                for cell, name in zip(cells, names, strict=True)
                if name in _DMON_FIELDS
            }
            if re.match(r"\d{8} ", timestamp):  # dmon -o D prints 20260131
                timestamp = f"{timestamp[:4]}/{timestamp[4:6]}/{timestamp[6:]}"
            found.append((named, timestamp))
            last = number
        elif not messages.recognize(line, number):
            unreadable += 1
            messages.warn(f"line {number + 1} is not a dmon row: {line.strip()!r}")
    seconds = parse_timestamps([timestamp for _, timestamp in found])
    rows = [GpuRow(gpu_from_cells(named), second) for (named, _), second in zip(found, seconds, strict=True)]
    return ParsedRows(group_into_snapshots(rows), (), unreadable, "there are no rows below the dmon header", last)


# `nvidia-smi -L`: names of GPUs. Lost ones remain in it: it says nothing about their health -------------------------

_LISTED_GPU: Final = re.compile(r"^\s*GPU (?P<index>\d+): (?P<name>.*?)\s*\(UUID: (?P<uuid>[^)]*)\)")
_LISTED_SLICE: Final = re.compile(r"^\s+MIG\s+\S+\s+Device\s+\d+:")


def looks_like_listing(lines: Sequence[str]) -> bool:
    return any(_LISTED_GPU.match(line) for line in lines)


def parse_listing(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """GPUs with index, name and UUID and no readings. MIG instances listed below a GPU mean that it is divided."""
    found: list[dict[str, tuple[str, str]]] = []
    last = -1
    for number, line in enumerate(lines):
        if match := _LISTED_GPU.match(line):
            found.append({field: (match[field], "") for field in ("index", "name", "uuid")})
            last = number
        elif _LISTED_SLICE.match(line) and found:
            found[-1]["mig"] = ("Enabled", "")
        elif line.strip() and not messages.recognize(line, number):
            messages.warn(f"line not understood: {line.strip()!r}")
    messages.warn("nvidia-smi -L also lists lost GPUs, so its output does not show whether a GPU works")
    return ParsedRows(group_into_snapshots([GpuRow(gpu_from_cells(cells), None) for cells in found]), (), 0, "", last)
