"""Ranks of one communicator, sorted by what they have launched: who is behind, who took another way.

All ranks of a communicator launch the same operations in the same order. So the counters of a rank that is merely late
are nowhere above those of the rest. One kind above and another below cannot come from lateness: that rank launched a
different collective. This holds however far apart the ranks were asked; CUDA graphs, which are not counted, could break
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from watcher.diagnose.ras.report import RasCommunicator


@dataclass(frozen=True, slots=True)
class Launched:
    """Ranks that launched exactly the same."""

    counts: Mapping[str, int]
    size: int
    ranks: tuple[int, ...]  # those whose number is known; the text form does not name all

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def sort_by_launches(communicator: RasCommunicator) -> tuple[Launched, ...]:
    """Fewest launches first; nothing where the report does not tell enough to sort them."""
    if communicator.counts:
        return _from_text(communicator)
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in communicator.ranks:
        if rank.counts is not None and not rank.missing:
            alike.setdefault(tuple(sorted(rank.counts.items())), []).append(rank.rank)
    return _sorted([Launched(dict(counts), len(ranks), tuple(ranks)) for counts, ranks in alike.items()])


def _from_text(communicator: RasCommunicator) -> tuple[Launched, ...]:
    """The text gives each kind apart: those named in none of the smaller groups are the rest."""
    rest: dict[str, int] = {}
    size = 0
    for count in communicator.counts:
        if count.operation not in rest:  # the largest group comes first
            rest[count.operation] = count.launched
            size = max(size, sum(other.ranks for other in communicator.counts if other.operation == count.operation))
        elif len(count.named) != count.ranks:
            return ()  # a group without names: a tie, or more than RAS lists
    ways: dict[int, dict[str, int]] = {}
    for count in communicator.counts:
        for rank in count.named:
            ways.setdefault(rank, dict(rest))[count.operation] = count.launched
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, counts in ways.items():
        alike.setdefault(tuple(sorted(counts.items())), []).append(rank)
    groups = [Launched(dict(counts), len(ranks), tuple(sorted(ranks))) for counts, ranks in alike.items()]
    if size > len(ways):
        groups.append(Launched(rest, size - len(ways), ()))
    return _sorted(groups)


def _sorted(groups: list[Launched]) -> tuple[Launched, ...]:
    return tuple(sorted(groups, key=lambda group: (group.total, sorted(group.counts.items()))))


def differences(group: Launched, other: Launched) -> dict[str, int]:
    """How many more of each kind `group` has launched than `other`; kinds that are equal are left out."""
    kinds = [*group.counts, *(kind for kind in other.counts if kind not in group.counts)]
    gaps = {kind: group.counts.get(kind, 0) - other.counts.get(kind, 0) for kind in kinds}
    return {kind: gap for kind, gap in gaps.items() if gap}


def is_crossed(group: Launched, other: Launched) -> bool:
    gaps = differences(group, other).values()
    return any(gap > 0 for gap in gaps) and any(gap < 0 for gap in gaps)


def any_crossed(groups: Sequence[Launched]) -> bool:
    """In order of their sums: if each is nowhere above the next, none is crossed with any."""
    return any(is_crossed(low, high) for low, high in pairwise(groups))


def majority(groups: Sequence[Launched]) -> Launched | None:
    """The group with more than half of the ranks."""
    largest = max(groups, key=lambda group: group.size, default=None)
    return largest if largest and 2 * largest.size > sum(group.size for group in groups) else None
