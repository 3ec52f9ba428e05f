"""Rows of a log -> snapshots: all GPUs of one moment, each with the index it had.

A snapshot ends where a GPU appears again. Rows without any identity are counted: every round of one logger has as many
rows as there are GPUs, however long it pauses between two of them. A row of a lost GPU in which even the index is lost
gets its identity from the last complete snapshot. Rows before and after the beginning of another log (beginnings.py)
never form one round, and no GPU is missing because another log does not list it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi.beginnings import (
    MAX_ROUND_ROWS,
    PAUSE_SECONDS,
    LogSection,
    SectionRounds,
    mark_beginnings,
    row_key,
    slot,
    split_into_sections,
)
from wattwatch.collectors.smi.columns import IDENTITY_FIELDS
from wattwatch.collectors.smi.report import GpuRow, GpuSnapshot

BURST_SECONDS: Final = 0.05  # GPUs of one query are printed about 3 ms apart
_TICK: Final = 0.001  # resolution of nvidia-smi's timestamps
_CLEAR_JUMP: Final = 3.0
ORDERED_SHARE: Final = 0.9
"""In an ordered log, the GPU index decreases only when a new round begins with the first GPU. A log counts as ordered
if at least this share of all decreases go back to the first GPU. Chosen, not measured."""


def group_into_snapshots(rows: Sequence[GpuRow], number_bursts: bool = False) -> tuple[GpuSnapshot, ...]:
    """Snapshots in the order of the rows, indexes as printed; a GPU that is only briefly missing is filled in.

    `number_bursts`: where no row has any identity, the rows of one round become GPU 0..n-1 (CSV prints all GPUs in
    order; a fragment of a table does not).
    """
    if not rows:
        return ()
    parts: list[SectionRounds] = []
    for section in split_into_sections(rows):
        if number_bursts and not any(row_key(row.gpu) for row in section.rows):
            parts += _counted(section)
        else:
            rounds = _recovered(_by_key(section.rows))
            parts.append(
                SectionRounds(
                    section, fill_unproven_gaps([GpuSnapshot(group[0].seconds, gpus) for group, gpus in rounds])
                )
            )
    return mark_beginnings(_without_fragments(parts))


def _without_fragments(parts: Sequence[SectionRounds]) -> list[SectionRounds]:
    """Without sections of a few rows that name no GPU, fewer than a round of the sections beside it has: a log that was
    cut within a round."""
    kept: list[SectionRounds] = []
    for number, part in enumerate(parts):
        others = [*parts[max(0, number - 1) : number], *parts[number + 1 : number + 2]]
        most = max((len(other.rounds[0].gpus) for other in others if other.rounds), default=0)
        if part.counted and len(part.rounds) == 1 and len(part.rounds[0].gpus) < most:
            continue
        kept.append(part)
    return kept


def _by_key(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    times = Counter(key for row in rows if (key := row_key(row.gpu)))
    gpu_count, repeats = len(times), max(times.values(), default=0) > 1
    first = _first_of_a_round(rows) if repeats else None
    groups: list[list[GpuRow]] = [[]]
    seen: set[str] = set()
    taken: set[int] = set()
    for row in rows:
        key, index = row_key(row.gpu), slot(row.gpu)
        current = groups[-1]
        if key is None:
            ends = bool(current) and _begins(current, row, gpu_count, repeats)
        else:
            # No two GPUs of one host have the same index: here follows another host's output.
            ends = bool(current) and (key in seen or index in taken or _comes_down_to(first, current[-1], row))
        if ends:
            groups.append([])
            seen, taken = set(), set()
        groups[-1].append(row)
        if key is not None:
            seen.add(key)
        if index is not None:
            taken.add(index)
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
        keys = {row_key(row.gpu) for row in group}
        keyless = [row for row in group if row_key(row.gpu) is None]
        absent = [gpu for key, gpu in known.items() if key not in keys]
        gpus = tuple(row.gpu for row in group)
        if keyless and len(keyless) == len(absent):
            names = iter(absent)
            gpus = tuple(_named_as(gpu, next(names)) if row_key(gpu) is None else gpu for gpu in gpus)
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


# Rows without identity ----------------------------------------------------------------------------------------------

MAX_FRAGMENTS: Final = 4
"""A round may be printed in this many bursts: a query that pauses at the same GPU each time."""
ALIGNED_SHARE: Final = 0.6
"""Of the rounds of the right size, at least this share begin where a burst begins. Chosen."""
LONGER_SHARE: Final = 0.05
DIVIDING_SHARE: Final = 0.9
"""Of the bursts, at least this share must be whole rounds where several rounds may be one burst. Chosen."""
SIZE_WINDOW: Final = 12
"""The size of the bursts has changed for good if most of so many have the other size. Chosen."""
MIN_WINDOW: Final = 6  # at the end of a log
EXAMINED_BURSTS: Final = 500
CLEARLY_ALIKE: Final = 0.5
"""Rows that differ by less than this share of what neighboring rows differ by are readings of the same GPU. Chosen."""


MAX_UNLIKENESS: Final = 100.0
DIFFERENT_PAUSE_SHARE: Final = 0.05
MAX_PAUSE_SECONDS: Final = 2.5
"""Longer pauses within each round are not expected of a query."""


def _counted(section: LogSection) -> Iterator[SectionRounds]:
    """The rounds of rows without identity: bursts, or fragments of bursts, that add up to the number of GPUs."""
    queried = any("index" in row.gpu.reasons for row in section.rows)  # and not returned: do not invent one
    pending = section
    for bursts in _of_one_size(_bursts(section.rows)):
        size, how = _rows_in_a_round(bursts)
        rounds = [
            GpuSnapshot(
                group[0].seconds,
                tuple(row.gpu if queried else replace(row.gpu, index=number) for number, row in enumerate(group)),
                counted_by=how,
            )
            for group in _filled_up(bursts, size)
        ]
        if rounds:
            yield SectionRounds(pending, rounds, counted=True)
            pending = LogSection(())


def _bursts(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    """Rows of one block that were printed together."""
    bursts: list[list[GpuRow]] = []
    limit = _burst_limit(rows)
    for row in rows:
        joins = bool(bursts) and bursts[-1][-1].block == row.block
        if joins and row.seconds is not None:
            before = bursts[-1][-1].seconds
            joins = before is not None and abs(row.seconds - before) <= limit
        if joins:
            bursts[-1].append(row)
        else:
            bursts.append([row])
    return bursts


def _of_one_size(bursts: Sequence[list[GpuRow]]) -> Iterator[Sequence[list[GpuRow]]]:
    """The bursts, split where their usual size changes for good: the log of another host follows."""
    sizes = [len(burst) for burst in bursts]
    start, usual = 0, _mode(sizes[:SIZE_WINDOW])
    interrupted = 0  # the size of fragments that were found to be those of rounds of the usual size
    for i, size in enumerate(sizes):
        if size in (usual, interrupted) or i == start:
            continue
        window = sizes[i : i + SIZE_WINDOW]
        if len(window) < MIN_WINDOW or 3 * window.count(size) < 2 * len(window):
            continue
        if _are_fragments(bursts[max(start, i - SIZE_WINDOW) : i], bursts[i : i + SIZE_WINDOW], usual, size):
            interrupted = size
            continue
        yield bursts[start:i]
        start, usual, interrupted = i, size, 0
    yield bursts[start:]


def _are_fragments(before: Sequence[list[GpuRow]], after: Sequence[list[GpuRow]], usual: int, fragment: int) -> bool:
    """Whether bursts are fragments of rounds of the usual size rather than rounds of a host with fewer GPUs: they add
    up, come at no slower pace, and GPUs that could be told apart before still can. Where they could not, the pauses
    within rounds must differ from those between them."""
    pace = max(MAX_PAUSE_SECONDS, _usual_pause(before))
    if _usual_pause(after) > pace or _usual_pause([before[-1], after[0]]) > max(pace, PAUSE_SECONDS):
        return False
    if usual > MAX_FRAGMENTS * fragment or _fit([len(burst) for burst in after], usual) < ALIGNED_SHARE:
        return False
    told_before, told_after = _unlikeness(before, usual, fragment), _unlikeness(after, usual, fragment)
    if told_before > 1 / CLEARLY_ALIKE:
        return told_after * told_after >= told_before
    return _pauses_alternate(after, max(2, usual // fragment))


def _pauses_alternate(bursts: Sequence[list[GpuRow]], count: int) -> bool:
    """Whether each `count`-th pause is alike, and unlike the others."""
    stamps = [burst[0].seconds for burst in bursts if burst[0].seconds is not None]
    pauses = [after - before for before, after in pairwise(stamps)]
    if len(pauses) < 2 * count:
        return False
    means = [statistics.fmean(pauses[start::count]) for start in range(count)]
    spread = statistics.fmean(abs(pause - means[i % count]) for i, pause in enumerate(pauses))
    return max(means) - min(means) > max(3 * spread, DIFFERENT_PAUSE_SHARE * statistics.fmean(pauses))


def _usual_pause(bursts: Sequence[list[GpuRow]]) -> float:
    """Between two bursts, in seconds; 0 without time stamps."""
    stamps = [burst[0].seconds for burst in bursts if burst[0].seconds is not None]
    return statistics.median([after - before for before, after in pairwise(stamps)] or [0.0])


def _unlikeness(bursts: Sequence[list[GpuRow]], same: int, other: int) -> float:
    """How much more the readings `other` rows apart differ than those `same` rows apart, which are of one GPU: the
    most of any reading. At least 1."""
    gpus = [row.gpu for burst in bursts for row in burst]
    found = [1.0]
    for name in ("memory_used_bytes", "temperature_celsius", "power_watts"):
        values = [value for gpu in gpus if (value := getattr(gpu, name)) is not None]
        if len(values) == len(gpus) > max(same, other):
            steps = _mean_step(values, other), _mean_step(values, same)
            found.append(steps[0] / steps[1] if steps[1] else MAX_UNLIKENESS if steps[0] else 1.0)
    return min(MAX_UNLIKENESS, max(found))


def _mode(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0]


def _rows_in_a_round(bursts: Sequence[list[GpuRow]]) -> tuple[int, str]:
    """The number of GPUs, and how it is known: rounds of the right size begin where bursts begin and use all rows."""
    sizes = [len(burst) for burst in bursts[:EXAMINED_BURSTS]]
    possible = {
        total
        for count in range(1, MAX_FRAGMENTS + 1)
        for i in range(len(sizes) - count + 1)
        if (total := sum(sizes[i : i + count])) <= MAX_ROUND_ROWS
    }
    if _are_whole_seconds(bursts):
        # Several rounds within a second look like one burst, so the number of GPUs divides nearly all bursts.
        dividing = [size for size in possible if _share(size, sizes) >= DIVIDING_SHARE]
        size = max(dividing, default=1)
        fits = {size: 1.0}
    else:
        # Without coarse time stamps no two rounds are one burst.
        fits = {size: _fit(sizes, size) for size in sorted(possible) if _share_longer(sizes, size) <= LONGER_SHARE}
        size = max(fits, key=lambda size: (round(fits[size], 2), -size), default=0)
        if size and fits[size] >= ALIGNED_SHARE:
            size = _size_by_readings(bursts[:EXAMINED_BURSTS], size)
            fits.setdefault(size, 1.0)
    if size and fits[size] >= ALIGNED_SHARE:
        return size, "" if size == 1 else f"{size} GPUs, numbered in the order of the rows of each round"
    size = _period([row.gpu for burst in bursts for row in burst])
    if size > 1:
        return size, f"{size} GPUs, numbered in the order of the rows, because the values repeat every {size} rows"
    return 1, "1 GPU, because the values do not repeat after a fixed number of rows"


def _size_by_readings(bursts: Sequence[list[GpuRow]], size: int) -> int:
    """The number of GPUs where time alone misleads: rows that come slowly may be of one GPU, and a round that always
    pauses at the same GPU comes in several bursts. What tells GPUs apart decides."""
    stamps = [[row.seconds for row in burst if row.seconds is not None] for burst in bursts]
    gaps = [after - before for burst in stamps for before, after in pairwise(burst)]
    if gaps and statistics.median(gaps) > BURST_SECONDS and _unlikeness(bursts, size, 1) <= 1 / CLEARLY_ALIKE:
        return 1
    for count in range(2, MAX_FRAGMENTS + 1):
        whole = size * count
        differ = whole <= MAX_ROUND_ROWS and _unlikeness(bursts, whole, size) > 1 / CLEARLY_ALIKE
        if differ and _pauses_alternate(bursts, count):
            return whole
    return size


def _are_whole_seconds(bursts: Sequence[list[GpuRow]]) -> bool:
    """Whether the time stamps have no fractions of a second, and are of several seconds."""
    stamps = {burst[0].seconds for burst in bursts[:EXAMINED_BURSTS]}
    return len(stamps) > 1 and all(seconds is not None and seconds == int(seconds) for seconds in stamps)


def _share_longer(sizes: Sequence[int], size: int) -> float:
    return sum(each > size for each in sizes) / len(sizes)


def _share(size: int, sizes: Sequence[int]) -> float:
    return sum(each % size == 0 for each in sizes) / len(sizes)


def _fit(sizes: Sequence[int], size: int) -> float:
    """Share of the rounds of this size that begin with a burst, times the share of rows in a round."""
    aligned = rounds = used = 0
    for first, length in _round_places(sizes, size):
        aligned += first
        rounds += 1
        used += length
    return aligned / rounds * used / sum(sizes) if rounds else 0.0


def _round_places(sizes: Sequence[int], size: int) -> Iterator[tuple[bool, int]]:
    """For each round: whether it begins with a burst, and its rows."""
    left = 0
    for length in sizes:
        if left and left + length > size and (left + length) % size:
            left = 0
        rounds, rest = divmod(left + length, size)
        for number in range(rounds):
            yield number == 0, size
        left = rest


def _filled_up(bursts: Sequence[list[GpuRow]], size: int) -> Iterator[list[GpuRow]]:
    """Rounds of `size` rows: whole bursts, fragments of one that was interrupted, parts of one that has several rounds.
    Rows that do not add up (a line was lost, a log was cut) are left out."""
    left: list[GpuRow] = []
    for burst in bursts:
        if left and (
            (len(left) + len(burst) > size and (len(left) + len(burst)) % size) or _is_old(left[-1], burst[0])
        ):
            left = []
        rows = left + burst
        end = len(rows) - len(rows) % size
        for start in range(0, end, size):
            yield rows[start : start + size]
        left = rows[end:]


def _is_old(before: GpuRow, after: GpuRow) -> bool:
    """Whether the pause between two rows is too long for one round."""
    return before.seconds is not None and after.seconds is not None and after.seconds - before.seconds > PAUSE_SECONDS


def _period(gpus: Sequence[GpuSample]) -> int:
    """After how many rows the same GPU follows: where memory or temperature are clearly more alike than in neighboring
    rows. Power and utilization are not compared: those of one GPU may be periodic themselves."""
    if len(gpus) < 4 * MAX_ROUND_ROWS:
        return 1
    shares = [1.0] * (MAX_ROUND_ROWS + 1)
    for name in ("memory_used_bytes", "temperature_celsius"):
        values = [value for gpu in gpus if (value := getattr(gpu, name)) is not None]
        neighbors = _mean_step(values, 1) if len(values) == len(gpus) else 0.0
        if neighbors:
            shares = [min(s, _mean_step(values, lag) / neighbors) if lag else 1.0 for lag, s in enumerate(shares)]
    best = min(range(1, len(shares)), key=lambda lag: (round(shares[lag], 2), lag))
    return best if shares[best] < CLEARLY_ALIKE else 1


def _mean_step(values: Sequence[float], lag: int) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(values, values[lag:], strict=False))


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
    slots = [{slot(gpu) for gpu in each.gpus} - {None} for each in rounds]
    for key, numbers in seen.items():
        gaps = [after - before for before, after in pairwise(numbers)]
        usual = statistics.median(gaps) if gaps else 1
        for before, after in zip(numbers, [*numbers[1:], len(rounds)], strict=True):
            if 1 < after - before <= math.ceil(ABSENT_AFTER_ROUNDS * usual):
                last = next(gpu for gpu in rounds[before].gpus if gpu.key == key)
                for number in range(before + 1, after):
                    if slot(last) in slots[number]:
                        break  # its index is another GPU's now
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
