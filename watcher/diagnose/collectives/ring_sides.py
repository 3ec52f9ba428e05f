"""Who stands against whom where ranks wait for one another in groups that they entered in different orders. Pure."""

from __future__ import annotations

from collections import defaultdict

from watcher.diagnose.collectives.wait_graph import Standstill
from watcher.diagnose.flight.record import Group


def sides_of(ring: tuple[Standstill, ...]) -> list[tuple[Standstill, tuple[int, ...]]]:
    """Ranks in the like operation of the like group are one side; the largest first, with one standstill of each."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    shown: dict[tuple[str, str], Standstill] = {}
    for standstill in ring:
        side = (_kind_of(standstill.group, ring), standstill.operation.name)
        ranks[side] += standstill.waiters
        shown.setdefault(side, standstill)
    sides = [(shown[side], tuple(sorted(ranks[side]))) for side in ranks]
    return sorted(sides, key=lambda side: (-len(side[1]), side[1]))


def _kind_of(group: Group, ring: tuple[Standstill, ...]) -> str:
    """Groups of one description are alike where they share no member; else each is a kind of its own."""
    alike = [each.group for each in ring if each.group != group and str(each.group) == str(group)]
    return f"{group} {group.name}" if any(set(each.members) & set(group.members) for each in alike) else str(group)


def tied_of(sides: list[tuple[Standstill, tuple[int, ...]]], common: set[int]) -> tuple[tuple[int, ...], ...]:
    """Those who are in all of the groups disagree; where there is no such rank on two sides, it may be anybody."""
    inside = [both for _, ranks in sides if (both := tuple(rank for rank in ranks if rank in common))]
    return tuple(inside) if len(inside) > 1 else tuple(ranks for _, ranks in sides)
