"""Rows of a log -> snapshots: all GPUs of one moment, each with the index it had.

A snapshot ends where a GPU appears again. Rows without any identity are separated by time: the rows of one burst are
GPU 0..n-1. A row of a lost GPU in which even the index is lost gets its identity from the last complete snapshot.
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

BURST_SECONDS: Final = 0.05  # GPUs of one query are printed about 3 ms apart
_TICK: Final = 0.001  # resolution of nvidia-smi's timestamps
_CLEAR_JUMP: Final = 3.0
ORDERED_SHARE: Final = 0.9
"""In an ordered log, the GPU index decreases only when a new round begins with the first GPU. A log counts as ordered
if at least this share of all decreases go back to the first GPU. Chosen, not measured."""
MAX_UNNAMED_GPUS: Final = 16
"""If more rows than this have no GPU identity, they are a log of one GPU, not a snapshot of many GPUs."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU as printed, its timestamp, and the block of lines it came in (a new header or table starts one)."""

    gpu: GpuSample
    seconds: float | None
    block: int = 0


def _key(gpu: GpuSample) -> str | None:
    return None if gpu.key == "?" else gpu.key


def group_into_snapshots(rows: Sequence[GpuRow], number_bursts: bool = False) -> tuple[GpuSnapshot, ...]:
    """Snapshots in the order of the rows, indexes as printed; a GPU that is only briefly missing is filled in.

    `number_bursts`: where no row has any identity, the rows of one burst become GPU 0..n-1 (CSV prints all GPUs in
    order; a fragment of a table does not).
    """
    if not rows:
        return ()
    if not number_bursts or any(_key(row.gpu) for row in rows):
        snapshots = _by_key(rows)
        return fill_unproven_gaps([GpuSnapshot(group[0].seconds, gpus) for group, gpus in _recovered(snapshots)])
    counted = not any("index" in row.gpu.reasons for row in rows)  # queried and not returned: do not invent one
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
    gpu_count, repeats = len(times), max(times.values(), default=0) > 1
    first = _first_of_a_round(rows) if repeats else None
    groups: list[list[GpuRow]] = [[]]
    seen: set[str] = set()
    for row in rows:
        key = _key(row.gpu)
        current = groups[-1]
        if current and (
            key in seen or _comes_down_to(first, current[-1], row) if key else _begins(current, row, gpu_count, repeats)
        ):
            groups.append([])
            seen = set()
        groups[-1].append(row)
        if key:
            seen.add(key)
    return groups


def _first_of_a_round(rows: Sequence[GpuRow]) -> int | None:
    """The index with which rounds begin, if GPUs are listed in order of their index; else None.

    Without it, a log that begins in the middle of a round would be split into rounds with rows of two moments each.
    """
    indexes = [row.gpu.index for row in rows if row.gpu.index is not None]
    lands = Counter(after for before, after in pairwise(indexes) if after < before)
    if not lands or len(indexes) < len(rows):
        return None
    index, times = lands.most_common(1)[0]
    return index if index == min(indexes) and times > 1 and times >= ORDERED_SHARE * lands.total() else None


def _comes_down_to(first: int | None, before: GpuRow, row: GpuRow) -> bool:
    last, index = before.gpu.index, row.gpu.index
    return first is not None and last is not None and index is not None and index < last


def _begins(current: Sequence[GpuRow], row: GpuRow, gpu_count: int, repeats: bool) -> bool:
    """Whether a row without identity begins a new snapshot: by its timestamp, else by the log's number of GPUs."""
    before = current[-1].seconds
    if before is not None and row.seconds is not None and abs(row.seconds - before) > BURST_SECONDS * 4:
        return True
    return repeats and len(current) >= gpu_count


def _recovered(groups: Sequence[list[GpuRow]]) -> list[tuple[list[GpuRow], tuple[GpuSample, ...]]]:
    """A row without identity is the GPU that the last complete snapshot has and this one lacks, if the counts match."""
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
    # Fast sampling of one GPU looks like one endless burst: then every row is a moment of its own.
    if size > MAX_UNNAMED_GPUS or max(sizes) > 2 * max(size, 8) or times * 2 < len(groups):
        return [[row] for row in rows]
    return groups


def _burst_limit(rows: Sequence[GpuRow]) -> float:
    """The gap that separates bursts: at the widest jump in the sorted gaps, if there is a clear one."""
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


# GPUs that a round of a log does not list ---------------------------------------------------------------------------
#
# A log may begin or end in the middle of a round (head, tail, a copy while it is written), a line may be lost, and the
# rows of GPUs that are queried one by one come in any order. So a round repeats a GPU's last row as long as the missing
# row proves nothing; a GPU that is missing from several complete rounds is absent.

ABSENT_AFTER_ROUNDS: Final = 3.0
"""A GPU that normally appears in every round counts as absent after this many rounds without it. If it normally appears
in every fifth round, five times as many rounds are needed. Chosen, not measured."""


def fill_unproven_gaps(snapshots: Sequence[GpuSnapshot]) -> tuple[GpuSnapshot, ...]:
    """The same log without incomplete rounds at its ends, and with briefly missing GPUs filled in. GPUs without any
    identity are left unchanged."""
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
                last = next(gpu for gpu in rounds[before].gpus if gpu.key == key)
                for number in range(before + 1, after):
                    held.setdefault(number, []).append(last)
    return tuple(
        replace(each, gpus=_in_order((*each.gpus, *held[number]))) if number in held else each
        for number, each in enumerate(rounds)
    )


def drop_cut_rounds(snapshots: Sequence[GpuSnapshot]) -> Sequence[GpuSnapshot]:
    """Without a first or last round that lists only some of the GPUs of the round next to it."""
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
