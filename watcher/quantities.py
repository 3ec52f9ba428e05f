"""Amounts and times in words, as messages and reports write them."""

from __future__ import annotations

from itertools import pairwise


def amount(hours: float) -> str:
    """Three digits are enough to decide on."""
    return f"{hours:.2f}" if hours < 10 else f"{hours:.1f}" if hours < 100 else f"{hours:.0f}"


def energy(kilowatt_hours: float) -> str:
    """ "48 Wh", "2.25 kWh"."""
    return f"{kilowatt_hours * 1000:.0f} Wh" if kilowatt_hours < 1 else f"{amount(kilowatt_hours)} kWh"


def duration(seconds: float) -> str:
    """ "42 s", "12 min 5 s", "3 h 20 min", "2 d 4 h": the two largest units."""
    whole = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, size), (smaller_name, smaller) in pairwise(units):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"
