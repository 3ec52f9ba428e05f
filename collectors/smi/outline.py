"""Outputs that are lists of `label : value` under headings: `nvidia-smi -q`, and `amd-smi metric` as text or as JSON.

Which label under which heading is which reading is a table (outline.toml). The nearest heading counts, so that a paste
that lost its indentation is read as well.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.samples import ReadingStatus
from wattwatch.collectors.smi.columns import IDENTITY_FIELDS, parse_timestamps, status_of_text
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells, sum_of_process_memory
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuRow, ParsedRows
from wattwatch.collectors.smi.snapshots import group_into_snapshots

Place = tuple[str, str]  # heading and label, in lower case


@dataclass(frozen=True, slots=True)
class _Reading:
    """Where a reading stands in the table: of several rows for one field, the first that has a value counts."""

    priority: int
    field: str
    unit: str


def _readings(tool: str) -> Mapping[Place, _Reading]:
    rows = tomllib.loads((resources.files(__package__) / "outline.toml").read_text("utf-8"))[tool]
    return {(heading, label): _Reading(n, name, unit) for n, (heading, label, name, unit) in enumerate(rows)}


_NVIDIA: Final = _readings("nvidia_smi")
_AMD: Final = _readings("amd_smi")
_ANY: Final = "*"  # every label under this heading
_LABELS: Final = frozenset(label for heading, label in (*_NVIDIA, *_AMD) if heading and label != _ANY)

_LOG_TITLE: Final = re.compile(r"=+\s*NVSMI LOG\s*=+")
_NVIDIA_GPU: Final = re.compile(r"^\s*GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
_AMD_GPU: Final = re.compile(r"^\s*GPU:\s*(\d{1,4})\s*$")
_BEGINNING: Final = re.compile(
    "|".join(rf"(?:{each.pattern})" for each in (re.compile(r"\s*" + _LOG_TITLE.pattern), _NVIDIA_GPU, _AMD_GPU))
)
_LINE: Final = re.compile(r"^(?P<indent>\s*)(?P<label>[A-Za-z][^:]{0,60}?)\s*(?::(?:\s+(?P<value>.*?))?)?\s*$")
_SCOPES: Final = frozenset({"volatile", "aggregate"})
_SUB_SCOPES: Final = frozenset({"single bit", "double bit"})
_SLICE: Final = "mig device"
_AFTER_SLICES: Final = frozenset({"accounting mode", "serial number", "gpu uuid"})


@dataclass(slots=True)
class _Gpu:
    """One GPU of the text while it is read: field -> (priority, text, unit)."""

    values: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    places: set[Place] = field(default_factory=set)
    process_memory: list[str] = field(default_factory=list)
    document: int = 0
    timestamp: str = ""

    def add(self, reading: _Reading, text: str) -> None:
        if reading.field == "process_memory":
            self.process_memory.append(text)
            return
        known = self.values.get(reading.field)
        absent = status_of_text(text) is ReadingStatus.UNSUPPORTED
        if known is not None:
            known_absent = status_of_text(known[1]) is ReadingStatus.UNSUPPORTED
            if (known_absent, known[0]) <= (absent, reading.priority):
                return
        self.values[reading.field] = (reading.priority, text, reading.unit)

    def cells(self) -> dict[str, tuple[str, str]]:
        cells = {name: (text, unit) for name, (_, text, unit) in self.values.items()}
        if memory := sum_of_process_memory(self.process_memory):
            cells["process_memory"] = memory
        return cells


def looks_like_outline(lines: Sequence[str]) -> bool:
    if any(_BEGINNING.match(line) for line in lines):
        return True
    known = {
        match["label"].casefold() for line in lines if (match := _LINE.match(line)) and match["value"] is not None
    } & _LABELS
    return len(known) > 1


def parse_outline(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of all samples of `nvidia-smi -q` or `amd-smi metric`."""
    reader = _TextReader(any(line[:1].isspace() and ":" in line for line in lines))
    last = -1
    for number, line in enumerate(lines):
        if reader.read(line):
            last = number
        elif ":" not in line or line[:1].isalpha():
            messages.recognize(line, number)
    return _rows(reader.gpus, last, reader.attached)


class _TextReader:
    """Reads line by line. `indented`: indentation shows where a heading ends; otherwise the next one ends it."""

    def __init__(self, indented: bool) -> None:
        self.gpus: list[_Gpu] = []
        self.attached: dict[int, int] = {}  # document -> number of GPUs in it
        self._indented = indented
        self._document, self._timestamp = 0, ""
        self._headings: list[tuple[int, str]] = []  # (indentation, heading) from the outermost to the nearest
        self._scope = ""
        self._slice_depth: int | None = None
        self._open = False

    def read(self, line: str) -> bool:
        """Whether the line is part of the outline."""
        if _LOG_TITLE.search(line):
            self._document, self._timestamp, self._open = self._document + 1, "", False
        elif gpu := _NVIDIA_GPU.match(line):
            self._begin(_Reading(-1, "pci_bus_id", ""), gpu[1])
        elif gpu := _AMD_GPU.match(line):
            self._begin(_Reading(-1, "index", ""), gpu[1])
        elif match := _LINE.match(line):
            return self._read_label(len(match["indent"]), match["label"].strip().casefold(), match["value"])
        else:
            return False
        return True

    def _begin(self, reading: _Reading | None, text: str = "") -> None:
        gpu = _Gpu(document=self._document, timestamp=self._timestamp)
        if reading is not None:
            gpu.add(reading, text)
        self.gpus.append(gpu)
        self._headings, self._slice_depth, self._open = [], None, True

    def _read_label(self, indent: int, label: str, value: str | None) -> bool:
        if self._slice_depth is not None:
            # A MIG instance has a memory of its own, and is not a GPU.
            if label not in _AFTER_SLICES and (not self._indented or indent > self._slice_depth):
                return True
            self._slice_depth = None
        while self._indented and self._headings and indent <= self._headings[-1][0]:
            self._headings.pop()
        if not value:
            self._begin_heading(indent, label)
            return True
        if not self._open and label == "timestamp":
            self._timestamp = value
        elif not self._open and label == "attached gpus" and value.isdecimal():
            self.attached[self._document] = int(value)
        else:
            return self._add(label, value)
        return True

    def _begin_heading(self, indent: int, label: str) -> None:
        if label == _SLICE:
            self._slice_depth = indent
        self._scope = label if label in _SCOPES else self._scope
        self._headings.append((indent, f"{self._scope} {label}" if label in _SUB_SCOPES else label))

    def _add(self, label: str, value: str) -> bool:
        known = _NVIDIA if not self.gpus or "index" not in self.gpus[-1].values else _AMD
        reading, place = _reading_at(known, self._headings[-1][1] if self._headings else "", label)
        if reading is None:
            return True
        # A part of an output, without the line that begins a GPU: what comes again is of the next one.
        unnamed = self._open and not {"pci_bus_id", "index"} & set(self.gpus[-1].values)
        repeated = place in self.gpus[-1].places and reading.field != "process_memory" if self._open else False
        if not self._open or (unnamed and repeated):
            headings = self._headings
            self._begin(None)
            self._headings = headings
        self.gpus[-1].places.add(place)
        self.gpus[-1].add(reading, value)
        return True


def _reading_at(known: Mapping[Place, _Reading], heading: str, label: str) -> tuple[_Reading | None, Place]:
    if (heading, _ANY) in known:
        name = "gpu_idle" if label == "idle" else label.replace(" ", "_")
        return _Reading(0, f"throttle {name}", ""), (heading, label)
    if heading == "vgpu software licensed product":  # has a product name that is not the GPU's
        return None, ("", "")
    place = (heading, label) if (heading, label) in known else ("", label)
    return known.get(place), place


def _rows(gpus: Sequence[_Gpu], last: int, attached: Mapping[int, int]) -> ParsedRows:
    merged = list(_merged(gpus))
    seconds = parse_timestamps([gpu.timestamp for gpu in merged])
    listed: dict[int, int] = {}
    rows = []
    for gpu, second in zip(merged, seconds, strict=True):
        place = listed[gpu.document] = listed.get(gpu.document, -1) + 1
        count = sum(other.document == gpu.document for other in merged)
        # `nvidia-smi -q -i 3` lists one GPU of several: which one is not said.
        if "index" not in gpu.values and (count > 1 or attached.get(gpu.document, 1) == 1) and _is_numbered(gpu):
            gpu.values["index"] = (0, str(place), "")
        rows.append(GpuRow(gpu_from_cells(gpu.cells()), second, gpu.document))
    problem = "" if rows else "no GPU readings were recognized in this output"
    return ParsedRows(group_into_snapshots(rows), (), 0, problem, last)


def _is_numbered(gpu: _Gpu) -> bool:
    """Whether GPUs are listed in the order of their index: a whole output begins each with its PCI id."""
    return "pci_bus_id" in gpu.values


def _merged(gpus: Sequence[_Gpu]) -> Iterator[_Gpu]:
    """Two lists of the same GPU with different readings (metric and static) are one sample of it."""
    current: dict[str, _Gpu] = {}
    done: list[_Gpu] = []
    for gpu in gpus:
        key = next((gpu.values[name][1] for name in ("index", "pci_bus_id") if name in gpu.values), "")
        known = current.get(key) if key else None
        if known is not None and known.timestamp == gpu.timestamp:
            if not (set(known.values) & set(gpu.values)) - IDENTITY_FIELDS:
                known.values.update({**gpu.values, **known.values})
                continue
            current = {}
        current[key] = gpu
        done.append(gpu)
    yield from done


# JSON ---------------------------------------------------------------------------------------------------------------

_JSON_START: Final = re.compile(r"(?:^|\n)[ \t]*([{\[])(?=\s*[\"{\[\]}])")
_JSON_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')
_MAX_ATTEMPTS: Final = 20  # beginnings of a document that are tried in a text without one
_MAX_DEPTH: Final = 100


def json_documents(text: str) -> Iterator[Any]:
    """The JSON objects and lists in a text, each at the beginning of a line. Of one that is cut off, what is whole."""
    decoder = json.JSONDecoder()
    place, attempts = 0, 0
    while (start := _next_start(text, place)) is not None and attempts < _MAX_ATTEMPTS:
        try:
            document, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            attempts += 1
            document = _whole_part(text[start:]) if attempts == 1 else None
            place = start + 1 if document is None else len(text)
            if document is None:
                continue
        yield document


def _next_start(text: str, place: int) -> int | None:
    match = _JSON_START.search(text, place)
    return match.start(1) if match else None


def _whole_part(text: str) -> Any:
    """The values of a document that ends too early; None if it is no JSON up to there."""
    still_open, whole, closing = "", 0, ""  # the brackets that would close what is open, the innermost first
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token in "{[":
            still_open = ("}" if token == "{" else "]") + still_open
            if len(still_open) > _MAX_DEPTH:
                return None
        elif token in "}]":
            if still_open[:1] != token:
                return None
            still_open = still_open[1:]
            whole, closing = match.end(), still_open
        elif token == ",":
            whole, closing = match.start(), still_open
    try:
        return json.loads(text[:whole] + closing) if whole else None
    except (ValueError, RecursionError):
        return None


def parse_amd_documents(documents: Sequence[Any]) -> ParsedRows:
    """The GPUs of `amd-smi metric --json`: a list of GPUs, or an object that contains one."""
    gpus = []
    for number, document in enumerate(documents):
        for entry in gpu_entries(document):
            gpu = _Gpu(document=number)
            gpu.add(_Reading(-1, "index", ""), str(entry["gpu"]))
            for heading, label, text in _flattened("", entry):
                if label == "timestamp" and not heading:
                    gpu.timestamp = text
                reading, _ = _reading_at(_AMD, heading, label)
                if reading is not None:
                    gpu.add(reading, text)
            gpus.append(gpu)
    return _rows(gpus, 0, {})


def gpu_entries(document: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The objects with a number under "gpu", at most two levels down."""
    if isinstance(document, dict):
        number = document.get("gpu")
        if isinstance(number, int) and not isinstance(number, bool):
            yield document
            return
        document = list(document.values())
    if isinstance(document, list) and depth < 3:
        for each in document:
            yield from gpu_entries(each, depth + 1)


def _flattened(heading: str, node: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, value in node.items():
        label = str(key).casefold()
        if isinstance(value, dict):
            if "value" in value:
                yield heading, label, f"{_text(value['value'])} {value.get('unit') or ''}".strip()
            else:
                yield from _flattened(label, value)
        elif not isinstance(value, list):
            yield heading, label, _text(value)


def _text(value: object) -> str:
    return "N/A" if value is None else str(value)
