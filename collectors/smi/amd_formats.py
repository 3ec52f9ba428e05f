"""AMD GPUs: rocm-smi (`GPU[0] : name: value` lines, `device,...` CSV, JSON, the concise table) and amd-smi (its table,
`monitor`, JSON; its text is read in outline.py).

An MI250 is two devices with one power reading: the second die prints "N/A (Secondary die)", or 0 in older versions. It
gets the reading of its primary, the nearest device before it, never 0 W.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from wattwatch.collectors.samples import GpuSample, PowerSource
from wattwatch.collectors.smi.columns import CUT_OFF, read_number
from wattwatch.collectors.smi.csv_format import split_cells
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuRow, GpuSnapshot, ParsedRows
from wattwatch.collectors.smi.snapshots import group_into_snapshots

_LINE: Final = re.compile(r"^\s*GPU\[(\d+)\]\s*:\s*(.+?)\s*:\s*(.*?)\s*$")
# The concise table: between temperature and the last four columns stands a different number of columns in each version.
_CONCISE: Final = re.compile(
    r"^\s*(?P<index>\d+)\s.*?\s(?P<temperature>[\d.]+°?[cC]|N/A)\s+(?P<draw>[\d.]+W|N/A)\s.*"
    r"\s(?P<cap>[\d.]+W|N/A|[Uu]nsupported)\s+(?:[\d.]+%|N/A)\s+(?P<use>[\d.]+%|N/A)\s*$"
)
# Old releases have no cap and no use, but other shares: github.com/ROCm/tensorflow-upstream/issues/156.
_OLD_CONCISE: Final = re.compile(r"^\s*(?P<index>\d+)\s+(?P<temperature>[\d.]+°?[cC]|N/A)\s+(?P<draw>[\d.]+W|N/A)\s")
_TITLE: Final = re.compile(
    r".{0,60}ROCm System Management Interface|(?:GPU|Device)\s.{0,99}PwrCap|\s*GPU\[\d+\]\s*:|\s*\"?device\"?,",
    re.IGNORECASE,
)
_POWER: Final = (
    ("average graphics package power (w)", PowerSource.AVERAGE),
    ("current socket graphics package power (w)", PowerSource.INSTANT),
    ("average socket power (w)", PowerSource.AVERAGE),
    ("current socket power (w)", PowerSource.INSTANT),
)
_FIELDS: Final = {
    "max graphics package power (w)": ("power_limit", "W"),
    "gpu use (%)": ("utilization", "%"),
    "gpu memory read/write activity (%)": ("memory_utilization", "%"),
    "vram total memory (b)": ("memory_total", "B"),
    "vram total used memory (b)": ("memory_used", "B"),
    "temperature (sensor junction) (c)": ("temperature", "C"),
    "temperature (sensor edge) (c)": ("temperature", "C"),
    "pci bus": ("pci_bus_id", ""),
    "unique id": ("uuid", ""),
    "card series": ("name", ""),
    "card model": ("name", ""),
}

RocmDevice = dict[str, str]


def looks_like_rocm(lines: Sequence[str]) -> bool:
    return any(_TITLE.match(line) for line in lines)


def parse_rocm(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """One snapshot of all devices; of a log with several snapshots, the last values."""
    devices: dict[int, RocmDevice] = {}
    header: list[str] = []
    last = -1
    for number, line in enumerate(lines):
        text = line.strip()
        if match := _LINE.match(line):
            name, value = match[2].casefold(), match[3]
            # rocm-smi prints watts with a decimal; without one, the last line is cut off.
            is_cut = number == len(lines) - 1 and name.endswith("(w)") and value.rstrip(".").isdigit()
            devices.setdefault(int(match[1]), {})[name] = CUT_OFF if is_cut else value
        elif text.casefold().startswith(("device,", '"device",')):
            header = [cell.casefold() for cell in split_cells(text)]
            continue
        elif header and (index := re.match(r"card(\d+)", text)):
            cells = split_cells(text)
            devices.setdefault(int(index[1]), {}).update(zip(header[1:], cells[1:], strict=False))
        elif match := _CONCISE.match(line) or _OLD_CONCISE.match(line):
            devices.setdefault(int(match["index"]), {}).update(_concise(match))
        else:
            if (
                text.strip("= ")
                and not messages.recognize(line, number)
                and "End of ROCm" not in text
                and text[0] not in "=-"
            ):
                messages.warn(f"line not understood: {text!r}")
            continue
        last = number
    return _rows_of_devices(devices, last)


def _rows_of_devices(devices: Mapping[int, RocmDevice], last: int) -> ParsedRows:
    gpus = _with_secondary_dies(
        [(_gpu_from_device(index, devices[index]), devices[index]) for index in sorted(devices)]
    )
    snapshots = (GpuSnapshot(None, tuple(gpus)),) if gpus else ()
    return ParsedRows(snapshots, (), 0, "rocm-smi listed no GPU", last)


def parse_rocm_documents(documents: Sequence[Any]) -> ParsedRows:
    """The devices of `rocm-smi --json`: {"card0": {name: value}}."""
    devices: dict[int, RocmDevice] = {}
    for document in documents:
        for card, values in _cards(document):
            devices.setdefault(card, {}).update({str(name).casefold(): str(value) for name, value in values.items()})
    return _rows_of_devices(devices, 0)


def _cards(document: Any) -> list[tuple[int, Mapping[str, Any]]]:
    if not isinstance(document, dict):
        return []
    return [
        (int(name[4:]), values)
        for name, values in document.items()
        if name[:4] == "card" and name[4:].isdecimal() and isinstance(values, dict)
    ]


def _concise(row: re.Match[str]) -> RocmDevice:
    """`0  35.0c  237.0W  ...  560.0W  0%  99%`: the two columns after the temperature and the last four are read."""
    device: RocmDevice = {_POWER[0][0]: row["draw"]}
    if row.re is _CONCISE:
        device |= {"max graphics package power (w)": row["cap"], "gpu use (%)": row["use"]}
    if row["temperature"] != "N/A":
        device["temperature (sensor edge) (c)"] = row["temperature"][:-1].rstrip("°")
    return device


def _gpu_from_device(index: int, device: Mapping[str, str]) -> GpuSample:
    cells = {"index": (str(index), "")}
    for name, text in device.items():
        field, unit = _FIELDS.get(name, ("", ""))
        if field and field not in cells:
            cells[field] = (text, unit)
    # The first power reading that is a number; if all are absent, the first absence.
    powers = [(device[name], source) for name, source in _POWER if name in device]
    chosen = next(((text, source) for text, source in powers if read_number(text, "W").value is not None), None)
    text, source = chosen or (powers[0] if powers else ("", None))
    if powers:
        cells["power_draw"] = (_without_remark(text), "W")
    return gpu_from_cells(cells, source)


def _without_remark(text: str) -> str:
    """`N/A (Secondary die)` -> `N/A`."""
    return text.partition("(")[0].strip()


def _with_secondary_dies(boards: Sequence[tuple[GpuSample, RocmDevice]]) -> list[GpuSample]:
    primary: GpuSample | None = None
    gpus: list[GpuSample] = []
    for gpu, device in boards:
        if primary and any("secondary die" in text.casefold() for text in device.values()):
            reasons = {name: why for name, why in gpu.reasons.items() if name != "power_watts"}
            gpu = replace(gpu, power_watts=primary.power_watts, power_source=primary.power_source, reasons=reasons)
            if primary.power_watts is None:
                gpu = replace(gpu, reasons={**reasons, "power_watts": primary.reading("power_watts").reason})
        else:
            primary = gpu
        gpus.append(gpu)
    return gpus


# amd-smi: its table ---------------------------------------------------------------------------------------------------
#
# | BDF                        GPU-Name | Mem-Uti   Temp   UEC       Power-Usage |
# | GPU  HIP-ID  OAM-ID  Partition-Mode | GFX-Uti    Fan               Mem-Usage |

_AMD_TABLE: Final = re.compile(r"AMD-SMI\s+\d|BDF\s+GPU-Name")
_AMD_FIRST: Final = re.compile(
    r"\|\s*(?P<bus>[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s+(?P<name>[^|]*?)\s*\|"
    r"\s*(?P<busy>\d+\s?%|N/A)\s+(?P<temperature>\d+\s?°?C|N/A)\s+(?P<errors>\d+|N/A)\s+"
    r"(?P<draw>\d+|N/A)(?:/(?P<cap>\d+)\s*W)?\s*\|"
)
_AMD_SECOND: Final = re.compile(
    r"\|\s*(?P<index>\d+)\s+[^|]*\|\s*(?P<use>\d+\s?%|N/A)\s+[^|]*?"
    r"\s(?P<used>\d+|N/A)/(?P<total>\d+|N/A)\s*(?P<unit>[KMGT]i?B)\s*\|"
)


def looks_like_amd_table(lines: Sequence[str]) -> bool:
    return any(_AMD_TABLE.search(line) for line in lines)


def parse_amd_table(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of the table of amd-smi. The rows of its processes are not GPUs."""
    gpus: list[dict[str, tuple[str, str]]] = []
    block, blocks, last, in_processes = 0, [], -1, False
    for number, line in enumerate(lines):
        if _AMD_TABLE.search(line):
            block, in_processes = block + 1, False
        elif "Processes:" in line:
            in_processes = True
        elif in_processes:
            continue
        elif first := _AMD_FIRST.search(line):
            gpus.append(_amd_first(first))
            blocks.append(block)
            last = number
        elif gpus and "index" not in gpus[-1] and (second := _AMD_SECOND.search(line)):
            gpus[-1] |= {
                "index": (second["index"], ""),
                "utilization": (second["use"], "%"),
                "memory_used": (second["used"], second["unit"]),
                "memory_total": (second["total"], second["unit"]),
            }
            last = number
        else:
            messages.recognize(line, number)
    rows = [GpuRow(gpu_from_cells(cells, PowerSource.TABLE), None, of) for cells, of in zip(gpus, blocks, strict=True)]
    return ParsedRows(group_into_snapshots(rows), (), 0, "the amd-smi table lists no GPU", last)


def _amd_first(row: re.Match[str]) -> dict[str, tuple[str, str]]:
    cells = {
        "pci_bus_id": (row["bus"], ""),
        "memory_utilization": (row["busy"], "%"),
        "temperature": (row["temperature"], "C"),
        "power_draw": (row["draw"], "W"),
        "ecc uncorrected.volatile.total": (row["errors"], ""),
    }
    if row["cap"]:
        cells["power_limit"] = (row["cap"], "W")
    if row["name"] and not row["name"].startswith("0x"):
        cells["name"] = (row["name"].lstrip("."), "")  # a long name lacks its beginning
    return cells


# amd-smi monitor: a header and a row per GPU, with units apart from their numbers -------------------------------------

_MONITOR_HEADER: Final = re.compile(
    r"^\s*(?:TIMESTAMP\s+)?GPU\s+(?:[A-Z][A-Z_0-9%]*\s+)*(?:POWER|GFX%|GFX_UTIL|VRAM_USED)(?=\s|$)"
)
_MONITOR_CELL: Final = re.compile(
    r"[\d.]+/[\d.]+\s?[KMGT]i?B|(?:[\d.]+|N/A)\s?(?:W|°?C|MHz|%|[KMGT]i?B|[KMGT]b/s)(?=\s|$)|\S+"
)
_MONITOR_FIELDS: Final = {
    "power": "power_draw",
    "pwr_cap": "power_limit",
    "gpu_t": "temperature",
    "gpu_temp": "temperature",
    "gfx%": "utilization",
    "gfx_util": "utilization",
    "mem%": "memory_utilization",
    "mem_util": "memory_utilization",
    "vram_used": "memory_used",
    "vram_total": "memory_total",
    "gfx_clk": "graphics_clock",
    "gfx_clock": "graphics_clock",
    "double_ecc": "ecc uncorrected.volatile.total",
}


def looks_like_monitor(lines: Sequence[str]) -> bool:
    return any(_MONITOR_HEADER.match(line) for line in lines)


def parse_monitor(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All rounds of `amd-smi monitor`. A row with another number of cells than its header is ignored."""
    names: list[str] = []
    rows: list[GpuRow] = []
    unreadable, block, last = 0, 0, -1
    for number, line in enumerate(lines):
        if _MONITOR_HEADER.match(line):
            names, block = line.casefold().split(), block + 1
            continue
        values = _MONITOR_CELL.findall(line)
        if names and values and values[names.index("gpu") if "gpu" in names else 0].isdigit():
            if len(values) != len(names):
                unreadable += 1
                messages.warn(f"line {number + 1}: {len(values)} cells, expected {len(names)}: {line.strip()!r}")
                continue
            rows.append(GpuRow(gpu_from_cells(_monitor_cells(dict(zip(names, values, strict=True)))), None, block))
            last = number
        else:
            messages.recognize(line, number)
    problem = "there are no rows below the amd-smi monitor header"
    return ParsedRows(group_into_snapshots(rows), (), unreadable, problem, last)


def _monitor_cells(row: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    absent = ("N/A", "")
    cells = {
        field: absent if row[name].startswith("N/A") else (row[name], "-")
        for name, field in _MONITOR_FIELDS.items()
        if name in row
    }
    cells["index"] = (row["gpu"], "")
    if usage := re.fullmatch(r"([\d.]+)/([\d.]+)\s?([KMGT]i?B)", row.get("vram_usage", "")):
        cells |= {"memory_used": (usage[1], usage[3]), "memory_total": (usage[2], usage[3])}
    return cells
