"""Output formats of nvidia-smi with one reader each: XML (-q -x), dmon and the listing (-L); dcgmi dmon and gpustat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final
from xml.etree import ElementTree

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi.columns import REQUIRED_COLUMNS, parse_timestamps
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells, sum_of_process_memory
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuRow, GpuSnapshot, ParsedRows
from wattwatch.collectors.smi.snapshots import drop_cut_rounds, group_into_snapshots

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
        "gpu_power_readings/gpu_ceiling_power_limit/current_power_limit",
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
    "ecc uncorrected.volatile.total": ("ecc_errors/volatile/double_bit/total",),
    "ecc uncorrected.volatile.dram": ("ecc_errors/volatile/dram_uncorrectable",),
    "ecc uncorrected.volatile.sram": ("ecc_errors/volatile/sram_uncorrectable",),
    "ecc uncorrected.volatile.sram.parity": ("ecc_errors/volatile/sram_uncorrectable_parity",),
    "ecc uncorrected.volatile.sram.secded": ("ecc_errors/volatile/sram_uncorrectable_secded",),
    "reset_required": ("gpu_reset_status/reset_required",),
    "recovery_action": ("gpu_recovery_action",),
}
_XML_ATTACHED: Final = re.compile(r"<attached_gpus>\s*(\d+)\s*<")
_XML_CUT_END_TAG: Final = re.compile(r"<(\w+)>([^<>]*)</\w*$")
_LIVE: Final = ("power_watts", "utilization_percent", "memory_used_bytes", "temperature_celsius")
_XML_THROTTLE: Final = re.compile(r"clocks_(?:event|throttle)_reasons?_(\w+)$")


def parse_xml(text: str, messages: MessageLog) -> ParsedRows:
    """All GPUs of all documents in the text. Of a document that is cut off, also the readings before the cut."""
    snapshots, warnings, unreadable = [], [], 0
    cut, problem = False, "the output of nvidia-smi -q -x has no readable GPU"
    for document in _XML_DOCUMENT.finditer(text):
        elements = list(_gpu_elements(document[0]))
        cut = not document[0].rstrip().endswith(">") or "</nvidia_smi_log" not in document[0]
        attached = _XML_ATTACHED.search(document[0])
        # `nvidia-smi -q -x -i 3` lists one GPU of several: which one is not said.
        numbered = cut or attached is None or int(attached[1]) <= len(elements)
        gpus: list[GpuSample] = []
        for number, element in enumerate(elements):
            try:
                gpus.append(_gpu_from_xml(_parse_element(element), number if numbered else None))
            except ElementTree.ParseError as error:
                unreadable += 1
                warnings.append(f"GPU element {number} of the XML document cannot be read: {error}")
        if cut:
            unreadable += 1
            rest = _gpu_before_the_cut(document[0], len(elements))
            if rest is not None and any(getattr(rest, name) is not None for name in _LIVE):
                gpus.append(rest)
            count = f" ({attached[1]} GPUs are attached)" if attached else ""
            problem = (
                f"the output of nvidia-smi -q -x is cut off before the first reading of GPU {len(elements)}{count}"
            )
            of_all = f" of {attached[1]}" if attached else ""
            warnings.append(f"the XML document is cut off after {len(elements)}{of_all} GPUs")
        timestamp = _XML_TIMESTAMP.search(document[0])
        if gpus:
            snapshots.append(GpuSnapshot(parse_timestamps([timestamp[1] if timestamp else ""])[0], tuple(gpus)))
    _log_text_outside_xml(text, messages)
    # A complete document proves that a GPU it does not list is missing; one that is cut off does not.
    rounds = tuple(drop_cut_rounds(snapshots) if cut else snapshots)
    return ParsedRows(rounds, tuple(warnings), unreadable, "" if rounds else problem, 0)


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


def _gpu_before_the_cut(document: str, number: int) -> GpuSample | None:
    """The GPU within which a document ends, from the values that are whole; None if there is none."""
    start = _XML_GPU.search(document, document.rfind("</gpu>") + 1)
    if start is None:
        return None
    text = _XML_CUT_END_TAG.sub(r"<\1>\2</\1>", document[start.start() :])
    parser: Any = ElementTree.XMLPullParser(("start",))  # its events are typed as of any kind
    try:
        parser.feed(text)
        element = next((each for _, each in parser.read_events()), None)
    except ElementTree.ParseError:
        return None
    return _gpu_from_xml(element, number) if isinstance(element, ElementTree.Element) else None


def _gpu_from_xml(gpu: ElementTree.Element, number: int | None) -> GpuSample:
    cells = {} if number is None else {"index": (str(number), "")}
    for field, paths in _XML_PATHS.items():
        text = next((found for path in paths if (found := gpu.findtext(path)) is not None), None)
        if text is not None:
            cells[field] = (text.strip(), "")
    if memory := sum_of_process_memory(each.text or "" for each in gpu.iterfind("processes/process_info/used_memory")):
        cells["process_memory"] = memory
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

DMON_HEADER: Final = re.compile(r"^\s*\\?#\s*(?:Date[\s,]+)?(?:Time[\s,]+)?gpu[\s,]+\S", re.IGNORECASE)
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
            names = line.replace("\\", " ").replace("#", " ").replace(",", " ").casefold().split()
            if "pid" in names:
                return ParsedRows(
                    (),
                    (),
                    0,
                    f"nvidia-smi pmon lists processes, not GPUs; required columns: {REQUIRED_COLUMNS}",
                    -1,
                )
        elif not cells or line.lstrip(" \\").startswith("#"):
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


# `dcgmi dmon -e ...`: the same with DCGM's short names (dcgmi dmon -l), and `GPU 0` begins a row ---------------------

_DCGMI_HEADER: Final = re.compile(r"^\s*#\s*Entity\s+\S", re.IGNORECASE)
_DCGMI_ROW: Final = re.compile(r"^\s*GPU (\d{1,3})\s+(\S.*)$")
_DCGMI_FIELDS: Final = {
    "POWER": ("power_draw", "W"),
    "PMLMT": ("power_limit", "W"),
    "TMPTR": ("temperature", "C"),
    "GPUTL": ("utilization", "%"),
    "MCUTL": ("memory_utilization", "%"),
    "FBUSD": ("memory_used", "MiB"),
    "FBTTL": ("memory_total", "MiB"),
    "SMCLK": ("sm_clock", "MHz"),
}


def looks_like_dcgmi(lines: Sequence[str]) -> bool:
    return any(_DCGMI_HEADER.match(line) for line in lines)


def parse_dcgmi(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of all rounds. Rows of MIG instances (GPU-I, GPU-CI) are not GPUs."""
    names: list[str] = []
    rows: list[GpuRow] = []
    unreadable, last = 0, -1
    for number, line in enumerate(lines):
        if _DCGMI_HEADER.match(line):
            names = line.replace("#", " ").split()[1:]
        elif row := _DCGMI_ROW.match(line):
            values = row[2].split()
            if len(values) != len(names):
                unreadable += 1
                messages.warn(f"line {number + 1}: {len(values)} values, expected {len(names)}: {line.strip()!r}")
                continue
            cells = {_DCGMI_FIELDS[name][0]: (value, _DCGMI_FIELDS[name][1])
                     for name, value in zip(names, values, strict=True) if name in _DCGMI_FIELDS}  # fmt: skip
            rows.append(GpuRow(gpu_from_cells({"index": (row[1], ""), **cells}), None))
            last = number
        else:
            messages.recognize(line, number)
    return ParsedRows(group_into_snapshots(rows), (), unreadable, "there are no rows below the dcgmi dmon header", last)


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


# gpustat: a line per GPU, `[0] Tesla V100 | 66'C,  99 %, 250 / 300 W | 28888 / 32510 MB | user(...)` -----------------

_GPUSTAT_LINE: Final = re.compile(
    r"^\s*\[(?P<index>\d{1,3})\]\s+(?P<name>[^|]+?)\s*\|\s*(?P<temperature>\d+|\?\?)\s?['°]?C,(?P<middle>[^|]*)"
    r"\|\s*(?P<used>\d+|\?\?)\s*/\s*(?P<total>\d+|\?\?)\s*(?P<unit>[MG]i?B)"
)
_GPUSTAT_PERCENT: Final = re.compile(r"(\d+|\?\?)\s*%")
_GPUSTAT_WATTS: Final = re.compile(r"(\d+|\?\?)\s*(?:/\s*(\d+|\?\?)\s*)?W")


def looks_like_gpustat(lines: Sequence[str]) -> bool:
    return any(_GPUSTAT_LINE.match(line) for line in lines)


def parse_gpustat(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of all samples; the date stands behind the name of the host above them."""
    found: list[tuple[dict[str, tuple[str, str]], str, int]] = []
    timestamp, block, last = "", 0, -1
    for number, line in enumerate(lines):
        if match := _GPUSTAT_LINE.match(line):
            found.append((_gpustat_cells(match), timestamp, block))
            last = number
        elif date := _DATE_OF_GPUSTAT.search(line):
            timestamp, block = date[0], block + 1
        elif line.strip() and not messages.recognize(line, number):
            messages.warn(f"line not understood: {line.strip()!r}")
    seconds = parse_timestamps([timestamp for _, timestamp, _ in found])
    rows = [GpuRow(gpu_from_cells(cells), second, of) for (cells, _, of), second in zip(found, seconds, strict=True)]
    return ParsedRows(group_into_snapshots(rows), (), 0, "", last)


_DATE_OF_GPUSTAT: Final = re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d{2}:\d{2}:\d{2} \d{4}")


def _gpustat_cells(line: re.Match[str]) -> dict[str, tuple[str, str]]:
    cells = {name: (line[name], "") for name in ("index", "name")}
    cells["temperature"] = (line["temperature"], "C")
    cells["memory_used"], cells["memory_total"] = (line["used"], line["unit"]), (line["total"], line["unit"])
    # The fan's share comes before the utilization, those of the video engines behind it.
    before_engines = re.split(r"[ED]:", line["middle"])[0]
    if percents := _GPUSTAT_PERCENT.findall(before_engines):
        cells["utilization"] = (percents[-1], "%")
    if watts := _GPUSTAT_WATTS.search(line["middle"]):
        cells["power_draw"] = (watts[1], "W")
        if watts[2]:
            cells["power_limit"] = (watts[2], "W")
    return {name: ("N/A" if text == "??" else text, unit) for name, (text, unit) in cells.items()}
