"""Rows without a header: columns by a known layout, else by the shape of their cells where only one reading fits.

Bare integers are left alone: 64 may be a temperature, a load or a fan. Whoever needs them tells the columns.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Final

from collectors.smi.cells import reason_of_text, unit_of
from collectors.smi.columns import DEFAULT_UNITS, Column
from collectors.smi.stamps import is_stamp

_UUID: Final = re.compile(r"GPU-[0-9a-zA-Z\-]+$")
_BUS: Final = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
_STATE: Final = re.compile(r"P\d{1,2}$")
_INTEGER: Final = re.compile(r"\d{1,7}$")
_DECIMALS: Final = re.compile(r"\d+\.\d\d$")  # without units nvidia-smi prints two decimals for watts alone
_NAME: Final = re.compile(
    r"(NVIDIA|GeForce|Tesla|Quadro|TITAN|GRID|Orin|Xavier|Thor|Jetson|RTX|GTX|GB?\d{2,3}0?\b|[ABHLVTP]\d{1,3}\b|DGX)",
    re.IGNORECASE,
)
_LAYOUTS: Final = tomllib.loads((resources.files(__package__) / "layouts.toml").read_text("utf-8"))["layout"]
_SHAPES: Final[dict[str, Callable[[str], bool]]] = {
    "absent": lambda _: False,  # a token of absence always fits; nothing else does here
    "index": lambda cell: bool(_INTEGER.match(cell)) and int(cell) < 64,
    "integer": lambda cell: bool(_INTEGER.match(cell)),
    "uuid": lambda cell: bool(_UUID.match(cell)),
    "name": lambda cell: bool(_NAME.search(cell)) and not _UUID.match(cell),
    "pstate": lambda cell: bool(_STATE.match(cell)),
    "percent": lambda cell: unit_of(cell) == "%",
    "watts": lambda cell: unit_of(cell) == "W",
    "mhz": lambda cell: unit_of(cell) == "MHz",
}


def is_row(cells: Sequence[str]) -> bool:
    """Could this headerless line be a row of a query? At least one cell must be of a kind that only rows have."""
    filled = [cell for cell in cells if cell]
    if len(cells) == 1:
        return bool(filled) and bool(_UUID.match(filled[0]) or _BUS.match(filled[0]))
    return len(filled) * 2 > len(cells) and any(
        is_stamp(cell)
        or _UUID.match(cell)
        or _BUS.match(cell)
        or reason_of_text(cell) is not None
        or _INTEGER.match(cell)
        or unit_of(cell) in {"W", "%", "MiB", "MHz"}
        for cell in filled
    )


def infer_columns(rows: Sequence[Sequence[str]]) -> tuple[Column, ...]:
    """The columns of rows of equal length; an empty field where more than one reading fits."""
    for layout in _LAYOUTS:
        if len(layout["columns"]) == len(rows[0]) and all(_fits(row, layout["shapes"]) for row in rows):
            return tuple(_column(name) for name in layout["columns"])
    kinds = [_kind([row[place] for row in rows]) for place in range(len(rows[0]))]
    fields = [
        kind if kind in {"timestamp", "uuid", "pci_bus_id", "name", "performance_state"} else "" for kind in kinds
    ]
    _infer_index(rows, kinds, fields)
    _first(rows, kinds, fields, "watts", ("power_draw", "power_limit"))
    _first(rows, kinds, fields, "percent", ("utilization", "memory_utilization"))
    _memory(rows, kinds, fields)
    if "watts" not in kinds and kinds.count("decimals") == 1:
        fields[kinds.index("decimals")] = "power_draw"
    return tuple(_column(name) for name in fields)


def _column(name: str) -> Column:
    field = "" if name.startswith("-") else name
    return Column(field, DEFAULT_UNITS.get(field, ""), field or "?")


def _fits(row: Sequence[str], shapes: Sequence[str]) -> bool:
    return all(
        reason_of_text(cell) is not None or _SHAPES[shape](cell) for cell, shape in zip(row, shapes, strict=True)
    )


def _kind(cells: Sequence[str]) -> str:
    """What all cells of a column are, absent ones left out; "" for a mixture or nothing but absence."""
    kinds = {_kind_of_cell(cell) for cell in cells if reason_of_text(cell) is None}
    if kinds == {"integer", "decimals"}:
        kinds = {"number"}
    return kinds.pop() if len(kinds) == 1 else ""


def _kind_of_cell(cell: str) -> str:
    if is_stamp(cell):
        return "timestamp"
    if _UUID.match(cell):
        return "uuid"
    if _BUS.match(cell):
        return "pci_bus_id"
    if _STATE.match(cell):
        return "performance_state"
    if _INTEGER.match(cell):
        return "integer"
    if _DECIMALS.match(cell):
        return "decimals"
    by_unit = {"W": "watts", "%": "percent", "MiB": "memory", "MHz": "mhz"}
    if unit := by_unit.get(unit_of(cell)):
        return unit
    return "name" if _NAME.search(cell) else ""


def _infer_index(rows: Sequence[Sequence[str]], kinds: Sequence[str], fields: list[str]) -> None:
    """The first column, or the one after the stamp, if it counts boards: small numbers from 0, or a name beside it."""
    place = 1 if kinds and kinds[0] == "timestamp" else 0
    if place >= len(kinds) or kinds[place] != "integer":
        return
    values = {int(row[place]) for row in rows if _INTEGER.match(row[place])}
    beside_identity = any(kind in {"name", "uuid", "pci_bus_id"} for kind in kinds[place + 1 : place + 2])
    if max(values) < 64 and (beside_identity or (0 in values and max(values) < 2 * len(values) + 8)):
        fields[place] = "index"


def _first(
    rows: Sequence[Sequence[str]], kinds: Sequence[str], fields: list[str], kind: str, names: Sequence[str]
) -> None:
    """Draw stands before limit and board load before memory load in every query that we have seen.

    A lone percentage just before or after the performance state is a fan, not a load.
    """
    places = [place for place, found in enumerate(kinds) if found == kind]
    state = kinds.index("performance_state") if "performance_state" in kinds else -2
    if kind == "percent" and len(places) == 1 and abs(state - places[0]) == 1:
        return
    if kind == "percent" and len(places) > 1 and places[1] != places[0] + 1:
        places = places[:1]
    if kind == "watts" and len(places) == 2:
        first, second = ({row[place] for row in rows} for place in places)
        if len(first) == 1 < len(second):
            places.reverse()  # of two, the one that stands still while the other moves is the limit
    for place, name in zip(places, names, strict=False):
        fields[place] = name


def _memory(rows: Sequence[Sequence[str]], kinds: Sequence[str], fields: list[str]) -> None:
    """One amount is the used one. Of two, the total is the one that stands still while the other moves."""
    places = [place for place, kind in enumerate(kinds) if kind == "memory"]
    if len(places) == 1:
        fields[places[0]] = "memory_used"
    if len(places) != 2:
        return
    first, second = ({row[place] for row in rows} for place in places)
    if len(first) > 1 and len(second) == 1:
        fields[places[0]], fields[places[1]] = "memory_used", "memory_total"
    elif len(second) > 1 and len(first) == 1:
        fields[places[0]], fields[places[1]] = "memory_total", "memory_used"
