"""rocm-smi on AMD GPUs: `GPU[0] : name: value` lines, `device,...` CSV, JSON, and the concise table.

An MI250 is two devices with one power reading: the second die prints "N/A (Secondary die)", or 0 in older versions. It
gets the reading of its primary, the nearest device before it, never 0 W.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.collectors.samples import GpuSample, PowerSource
from wattwatch.collectors.smi.columns import read_number
from wattwatch.collectors.smi.csv_format import split_cells
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuSnapshot, ParsedRows

_LINE: Final = re.compile(r"^\s*GPU\[(\d+)\]\s*:\s*(.+?)\s*:\s*(.*?)\s*$")
_CONCISE: Final = re.compile(r"^\s*(\d+)\s+.*%\s*$")
_TITLE: Final = re.compile(
    r".{0,60}ROCm System Management Interface|(?:GPU|Device)\s.{0,99}PwrCap"
    r"|\s*GPU\[\d+\]\s*:|\s*\"?device\"?,|\s*\{\"card\d",
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
        if text.startswith('{"card'):
            for card, values in _from_json(text).items():
                devices.setdefault(card, {}).update(values)
        elif match := _LINE.match(line):
            devices.setdefault(int(match[1]), {})[match[2].casefold()] = match[3]
        elif text.casefold().startswith(("device,", '"device",')):
            header = [cell.casefold() for cell in split_cells(text)]
            continue
        elif header and (index := re.match(r"card(\d+)", text)):
            cells = split_cells(text)
            devices.setdefault(int(index[1]), {}).update(zip(header[1:], cells[1:], strict=False))
        elif match := _CONCISE.match(line):
            devices.setdefault(int(match[1]), {}).update(_concise(text.split()))
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
    gpus = _with_secondary_dies(
        [(_gpu_from_device(index, devices[index]), devices[index]) for index in sorted(devices)]
    )
    snapshots = (GpuSnapshot(None, tuple(gpus)),) if gpus else ()
    return ParsedRows(snapshots, (), 0, "rocm-smi listed no GPU", last)


def _from_json(text: str) -> dict[int, RocmDevice]:
    """`rocm-smi --json`: {"card0": {name: value}}; {} if it is cut off."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {
        int(card[4:]): {str(name).casefold(): str(value) for name, value in values.items()}
        for card, values in document.items()
        if card[:4] == "card" and card[4:].isdecimal() and isinstance(values, dict)
    }


def _concise(words: Sequence[str]) -> RocmDevice:
    """`0  35.0c  237.0W  ...  560.0W  0%  99%`: first watts: draw, last watts: cap, last percentage: utilization."""
    device: RocmDevice = {}
    watts = [word for word in words if re.fullmatch(r"[\d.]+W", word)]
    percent = [word for word in words if word.endswith("%")]
    if watts:
        device[_POWER[0][0]] = watts[0]
    if len(watts) > 1:
        device["max graphics package power (w)"] = watts[-1]
    if percent:
        device["gpu use (%)"] = percent[-1]
    celsius = next((word[:-1].rstrip("°") for word in words if re.fullmatch(r"[\d.]+°?[cC]", word)), None)
    if celsius:
        device["temperature (sensor edge) (c)"] = celsius
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
