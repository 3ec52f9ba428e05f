"""Rows of a log -> snapshots: all boards of one moment, each with the index it had.

A snapshot ends where a board comes again. Rows without any identity are told apart by time: the rows of one burst are
GPU 0..n-1. A row that is lost so wholly that even its index is gone gets its identity from the last good snapshot.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi.columns import IDENTITY_FIELDS
from wattwatch.collectors.smi.report import GpuSnapshot

BURST_SECONDS: Final = 0.05  # boards of one query are printed some 3 ms apart
_TICK: Final = 0.001  # resolution of nvidia-smi's stamps
_CLEAR_JUMP: Final = 3.0
ORDERED_SHARE: Final = 0.9
"""Of the rows whose index is lower than the one before: as many are the first board's in a log in order."""
MAX_UNNAMED_GPUS: Final = 16
"""More rows than this without any identity are a log of one board, not one moment of many."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One board as printed, its stamp, and the block of lines it came in (a new header or table starts one)."""

    gpu: GpuSample
    seconds: float | None
    block: int = 0


def _key(gpu: GpuSample) -> str | None:
    return None if gpu.key == "?" else gpu.key


def group_into_snapshots(rows: Sequence[GpuRow], number_bursts: bool = False) -> tuple[GpuSnapshot, ...]:
    """Snapshots in the order of the rows, indices as printed. Absences that prove nothing are none (`rounds.py`).

    `number_bursts`: where no row has any identity, the rows of one burst become GPU 0..n-1 (CSV prints all boards in
    order; a scrap of a table does not).
    """
    if not rows:
        return ()
    if not number_bursts or any(_key(row.gpu) for row in rows):
        snapshots = _by_key(rows)
        return fill_unproven_gaps([GpuSnapshot(group[0].seconds, gpus) for group, gpus in _recovered(snapshots)])
    counted = not any("index" in row.gpu.reasons for row in rows)  # asked for and not said: do not make one up
    bursts = [
        GpuSnapshot(
            group[0].seconds,
            tuple(replace(row.gpu, index=number) if counted else row.gpu for number, row in enumerate(group)),
        )
        for group in _by_burst(rows)
    ]
    return fill_unproven_gaps(bursts)


def _by_key(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    times = Counter(key for row in rows if (key := _key(row.gpu)))
    boards, repeats = len(times), max(times.values(), default=0) > 1
    first = _first_of_a_round(rows) if repeats else None
    groups: list[list[GpuRow]] = [[]]
    seen: set[str] = set()
    for row in rows:
        key = _key(row.gpu)
        current = groups[-1]
        if current and (
            key in seen or _comes_down_to(first, current[-1], row) if key else _begins(current, row, boards, repeats)
        ):
            groups.append([])
            seen = set()
        groups[-1].append(row)
        if key:
            seen.add(key)
    return groups


def _first_of_a_round(rows: Sequence[GpuRow]) -> int | None:
    """The index that rounds begin with, where boards are listed in order of their index; None where they are not.

    A log that begins within a round would else be cut into rounds that hold the rows of two moments each.
    """
    told = [row.gpu.index for row in rows if row.gpu.index is not None]
    lands = Counter(after for before, after in pairwise(told) if after < before)
    if not lands or len(told) < len(rows):
        return None
    index, times = lands.most_common(1)[0]
    return index if index == min(told) and times > 1 and times >= ORDERED_SHARE * lands.total() else None


def _comes_down_to(first: int | None, before: GpuRow, row: GpuRow) -> bool:
    last, index = before.gpu.index, row.gpu.index
    return first is not None and last is not None and index is not None and index < last


def _begins(current: Sequence[GpuRow], row: GpuRow, boards: int, repeats: bool) -> bool:
    """Does a row without identity begin a new snapshot? Its stamp says so, else the log's number of boards."""
    before = current[-1].seconds
    if before is not None and row.seconds is not None and abs(row.seconds - before) > BURST_SECONDS * 4:
        return True
    return repeats and len(current) >= boards


def _recovered(groups: Sequence[list[GpuRow]]) -> list[tuple[list[GpuRow], tuple[GpuSample, ...]]]:
    """A keyless row is the board that the last complete snapshot had and this one lacks, if the counts agree."""
    known: dict[str, GpuSample] = {}
    result: list[tuple[list[GpuRow], tuple[GpuSample, ...]]] = []
    for group in groups:
        keys = {_key(row.gpu) for row in group}
        keyless = [row for row in group if _key(row.gpu) is None]
        absent = [gpu for key, gpu in known.items() if key not in keys]
        gpus = tuple(row.gpu for row in group)
        if keyless and len(keyless) == len(absent):
            names = iter(absent)
            gpus = tuple(_named_as(gpu, next(names)) if _key(gpu) is None else gpu for gpu in gpus)
        if not keyless:
            known = {gpu.key: gpu for gpu in gpus}
        result.append((group, gpus))
    return result


def _named_as(gpu: GpuSample, before: GpuSample) -> GpuSample:
    return replace(
        gpu,
        index=before.index,
        uuid=before.uuid,
        pci_bus_id=before.pci_bus_id,
        name=gpu.name or before.name,
        reasons={name: why for name, why in gpu.reasons.items() if name not in IDENTITY_FIELDS},
    )


def _by_burst(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    groups: list[list[GpuRow]] = []
    limit = _burst_limit(rows)
    for row in rows:
        joins = bool(groups) and groups[-1][-1].block == row.block
        if joins and row.seconds is not None:
            before = groups[-1][-1].seconds
            joins = before is not None and abs(row.seconds - before) <= limit
        if joins:
            groups[-1].append(row)
        else:
            groups.append([row])
    sizes = Counter(len(group) for group in groups)
    size, times = sizes.most_common(1)[0]
    # Fast sampling of one board looks like one endless burst: then every row is its own moment.
    if size > MAX_UNNAMED_GPUS or max(sizes) > 2 * max(size, 8) or times * 2 < len(groups):
        return [[row] for row in rows]
    return groups


def _burst_limit(rows: Sequence[GpuRow]) -> float:
    """The gap that parts bursts: where the sorted gaps make their widest jump, if they make one at all."""
    pairs = pairwise(rows)
    gaps = sorted(
        abs(after.seconds - before.seconds)
        for before, after in pairs
        if before.seconds is not None and after.seconds is not None
    )
    jumps = [
        ((right + _TICK) / (left + _TICK), left, right) for left, right in pairwise(gaps) if left <= BURST_SECONDS * 4
    ]
    ratio, left, right = max(jumps, default=(0.0, 0.0, 0.0))
    return (left + right) / 2 if ratio >= _CLEAR_JUMP else BURST_SECONDS


# What a log proves of boards that a round of it does not list.
#
# A log may begin or end within a round (head, tail, a copy while it is written), a line may be lost, and the rows of
# boards that are asked one by one come in any order. So a round lists a board by its newest row as long as its absence
# proves nothing; a board that stays away over several whole rounds is absent.

ABSENT_AFTER_ROUNDS: Final = 3.0
"""A board that comes in every round, and is missing from as many, is gone. One that comes in each fifth: five times
as many."""


def fill_unproven_gaps(snapshots: Sequence[GpuSnapshot]) -> tuple[GpuSnapshot, ...]:
    """The same log without a round that was cut, and without absences that prove nothing. Boards without any identity
    are left as they are."""
    rounds = drop_cut_rounds(snapshots)
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
            if 1 < after - before <= math.ceil(ABSENT_AFTER_ROUNDS * usual):
                board = next(gpu for gpu in rounds[before].gpus if gpu.key == key)
                for number in range(before + 1, after):
                    held.setdefault(number, []).append(board)
    return tuple(
        replace(each, gpus=_in_order((*each.gpus, *held[number]))) if number in held else each
        for number, each in enumerate(rounds)
    )


def drop_cut_rounds(snapshots: Sequence[GpuSnapshot]) -> Sequence[GpuSnapshot]:
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
