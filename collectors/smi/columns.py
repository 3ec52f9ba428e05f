"""Headers of any age and hand -> our field names and units."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

_NAMES: Final[dict[str, list[str]]] = tomllib.loads((resources.files(__package__) / "columns.toml").read_text("utf-8"))
FIELD_OF_NAME: Final[Mapping[str, str]] = {name: field for field, names in _NAMES.items() for name in names}
DEFAULT_UNITS: Final[Mapping[str, str]] = {"memory_used": "MiB", "memory_total": "MiB"}
READINGS: Final = frozenset(
    {"power_draw", "power_average", "power_instant", "utilization", "memory_used", "memory_utilization", "temperature"}
)
"""A table without any of these and without a board's identity says nothing of GPUs."""
IDENTITY: Final = frozenset({"index", "uuid", "pci_bus_id", "name"})
NEEDED: Final = "timestamp, index, power.draw, utilization.gpu, memory.used, enforced.power.limit"
"""What to ask for, in words for people."""

_UNIT: Final = re.compile(r"\s*[\[(]\s*([^\])]*?)\s*[\])]\s*$")
_TRAILING_UNIT: Final = re.compile(r"\.(mib|mb|w|watts|mw|gb|gib|bytes|b)$")
_SEPARATORS: Final = re.compile(r"[\s._\-]+")
_THROTTLE: Final = re.compile(r"clocks\.(?:event|throttle)\.reasons\.(?!active$|supported$)([a-z.]+)$")
_WORDS: Final = re.compile(r"[A-Za-z][\w .\-/]*(\s*[\[(][^\])]*[\])])?$")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the field it fills ("" for one that is not read) and the unit of cells that name none."""

    field: str
    unit: str
    printed: str


def read_column(printed: str) -> Column:
    """`power.draw [W]` -> ("power_draw", "W"). Also `power_draw`, `Power Draw (W)`, `memory_used_mb`."""
    text = printed.strip().strip('"')
    found = _UNIT.search(text)
    unit = found[1] if found else ""
    name = _SEPARATORS.sub(".", (text[: found.start()] if found else text).casefold()).strip(".")
    if throttle := _THROTTLE.match(name):
        return Column(f"throttle {throttle[1].replace('.', '_')}", unit, text)
    if name.startswith("ecc.errors."):
        return Column("ecc", unit, text)
    field = FIELD_OF_NAME.get(name, "")
    if not unit and (trailing := _TRAILING_UNIT.search(name)):
        unit = trailing[1]
    if name.endswith(".ms") and field == "timestamp":
        unit = "ms"
    return Column(field, unit or DEFAULT_UNITS.get(field, ""), text)


def read_header(cells: Sequence[str]) -> tuple[Column, ...] | None:
    """The columns if this line is a header, else None. A header is made of words, and knows one of our columns."""
    if not all(
        not cell or (len(cell) < 100 and _WORDS.match(cell)) for cell in cells
    ):  # pandas leaves the name of its own index empty
        return None
    columns = tuple(read_column(cell) for cell in cells)
    known = [column for column in columns if column.field]
    if not known or (len(cells) == 1 and known[0].field in {"timestamp"}):
        return None
    return columns


def columns_of(names: Sequence[str]) -> tuple[Column, ...]:
    """Columns that the caller tells, in nvidia-smi's or our own names."""
    return tuple(
        Column(name, DEFAULT_UNITS.get(name, ""), name) if name in _NAMES else read_column(name) for name in names
    )
