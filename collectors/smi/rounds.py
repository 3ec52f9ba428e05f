"""What a log proves of boards that a round of it does not list.

A log may begin or end within a round (head, tail, a copy while it is written), a line may be lost, and the rows of
boards that are asked one by one come in any order. So a round lists a board by its newest row as long as its absence
proves nothing; a board that stays away over several whole rounds is absent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from collectors.samples import GpuSample
from collectors.smi.report import GpuSnapshot

AWAY_ROUNDS: Final = 3.0
"""A board that comes in every round, and is missing from as many, is gone. One that comes in each fifth: five times
as many."""


def proven_rounds(snapshots: Sequence[GpuSnapshot]) -> tuple[GpuSnapshot, ...]:
    """The same log without a round that was cut, and without absences that prove nothing. Boards without any identity
    are left as they are."""
    rounds = uncut_rounds(snapshots)
    if len(rounds) < 2 or len({frozenset(_keys(each)) for each in rounds}) == 1:
        return tuple(rounds)
    seen: dict[str, list[int]] = {}
    for number, each in enumerate(rounds):
        for gpu in each.gpus:
            if gpu.key != "?":
                seen.setdefault(gpu.key, []).append(number)
    held: dict[int, list[GpuSample]] = {}
    for key, numbers in seen.items():
        gaps = [after - before for before, after in pairwise(numbers)]
        usual = statistics.median(gaps) if gaps else 1
        for before, after in zip(numbers, [*numbers[1:], len(rounds)], strict=True):
            if 1 < after - before <= math.ceil(AWAY_ROUNDS * usual):
                board = next(gpu for gpu in rounds[before].gpus if gpu.key == key)
                for number in range(before + 1, after):
                    held.setdefault(number, []).append(board)
    return tuple(
        replace(each, gpus=_in_order((*each.gpus, *held[number]))) if number in held else each
        for number, each in enumerate(rounds)
    )


def uncut_rounds(snapshots: Sequence[GpuSnapshot]) -> Sequence[GpuSnapshot]:
    """Without a first or last round that lists only some of the boards of the round beside it."""
    rounds = list(snapshots)
    if len(rounds) > 1 and _keys(rounds[-1]) < _keys(rounds[-2]):
        rounds.pop()
    if len(rounds) > 1 and _keys(rounds[0]) < _keys(rounds[1]):
        rounds.pop(0)
    return rounds


def _keys(snapshot: GpuSnapshot) -> set[str]:
    return {gpu.key for gpu in snapshot.gpus if gpu.key != "?"}


def _in_order(gpus: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
    return tuple(sorted(gpus, key=lambda gpu: math.inf if gpu.index is None else gpu.index))
