"""`nvidia-smi -q -x`: one XML document a sample. Entities are never expanded; the index is the order of the boards.

Newer documents nest power under gpu_power_readings, older ones under power_readings; module_power_readings on Grace
parts include the CPU and are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree import ElementTree

from collectors.samples import GpuSample
from collectors.smi.board import read_board
from collectors.smi.messages import Said
from collectors.smi.report import GpuSnapshot, Rows
from collectors.smi.rounds import uncut_rounds
from collectors.smi.stamps import read_stamps

_DOCUMENT: Final = re.compile(r"<nvidia_smi_log\b.*?(?:</nvidia_smi_log\s*>|\Z)", re.DOTALL)
_GPU: Final = re.compile(r"<gpu[\s>]")
_STAMP: Final = re.compile(r"<timestamp>([^<]*)</timestamp>")
_PATHS: Final[dict[str, tuple[str, ...]]] = {
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
_THROTTLE: Final = re.compile(r"clocks_(?:event|throttle)_reasons?_(\w+)$")


def read_xml(text: str, said: Said) -> Rows:
    """All boards of all documents in the text; a document that is cut keeps the boards that are whole."""
    snapshots, warnings, unreadable = [], [], 0
    cut = False
    for document in _DOCUMENT.finditer(text):
        gpus: list[GpuSample] = []
        for number, element in enumerate(_gpu_elements(document[0])):
            try:
                gpus.append(_board(_parse(element), number))
            except ElementTree.ParseError as error:
                unreadable += 1
                warnings.append(f"GPU element {number} cannot be read: {error}")
        cut = not document[0].rstrip().endswith(">") or "</nvidia_smi_log" not in document[0]
        if cut:
            unreadable += 1
            warnings.append("the XML document is cut off: only whole GPU elements were read")
        stamp = _STAMP.search(document[0])
        if gpus:
            snapshots.append(GpuSnapshot(read_stamps([stamp[1] if stamp else ""])[0], tuple(gpus)))
    _listen(text, said)
    trouble = "" if snapshots else "nvidia-smi -q -x lists no GPU"
    # A document is whole, and proves what it does not list; only one that is cut does not.
    return Rows(tuple(uncut_rounds(snapshots) if cut else snapshots), tuple(warnings), unreadable, trouble, 0)


def _gpu_elements(document: str) -> Iterator[str]:
    end = 0
    while start := _GPU.search(document, end):
        end = document.find("</gpu>", start.start())
        if end < 0:
            return
        end += len("</gpu>")
        yield document[start.start() : end]


def _parse(element: str) -> ElementTree.Element:
    """One GPU element on its own: no document type travels with it, so no entity can be declared or expanded."""
    return ElementTree.fromstring(element)


def _board(gpu: ElementTree.Element, number: int) -> GpuSample:
    cells = {"index": (str(number), "")}
    for field, paths in _PATHS.items():
        text = next((found for path in paths if (found := gpu.findtext(path)) is not None), None)
        if text is not None:
            cells[field] = (text.strip(), "")
    if "pci_bus_id" not in cells and gpu.get("id"):
        cells["pci_bus_id"] = (gpu.get("id", ""), "")
    for reasons in (gpu.find("clocks_event_reasons"), gpu.find("clocks_throttle_reasons")):
        for reason in () if reasons is None else reasons:
            if match := _THROTTLE.match(reason.tag):
                cells[f"throttle {match[1]}"] = ((reason.text or "").strip(), "")
    return read_board(cells)


def _listen(text: str, said: Said) -> None:
    outside: Sequence[str] = _DOCUMENT.sub("", text).splitlines()
    for line in outside:
        if line.strip() and not line.lstrip().startswith("<"):
            said.listen(line)
