"""Where in one file another log begins: of another host, of the next job, or of a logger that was started again.

People append logs to one file and concatenate those of several hosts. Then a GPU that the next log does not list is not
broken, its readings say nothing about the GPU that had the same index before, and no time between the two was observed.
So a GPU counts as missing only within one log: the rows go on at their pace, and the GPUs that remain keep their
identity. Everything else is a new beginning, with the reason in words.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi.report import GpuRow, GpuSnapshot

# All values are chosen, not measured.
BACK_SECONDS: Final = 1.0
"""Clocks are corrected by less, and programs that write to one file at the same time mix their lines by less."""
PAUSE_SECONDS: Final = 60.0
PAUSE_INTERVALS: Final = 5.0
"""A query of a failing GPU may take long. A pause longer than both of these may as well be between two loggers."""
PAUSE_FACTOR: Final = 3.0
"""Times the longest of the last gaps between rows."""
PACE_FACTOR: Final = 10.0
PACE_STEPS: Final = 10
"""The pace has changed if samples come so many times slower or faster, and so many of them. No logger does that."""
STEADY_ROUNDS: Final = 5
"""GPUs that appear later than this were not listed before because they were not there, not because of a slow start."""
RESTARTED_ROUNDS: Final = 2
"""The same after a restart of the logger."""
MAX_ROUND_ROWS: Final = 16
"""More rows than this without any identity are not one round."""


@dataclass(frozen=True, slots=True)
class LogSection:
    """Rows that one logger wrote. `restart`: what shows that it was started where this section begins; "" if nothing
    does. `time_goes_back`: its first row is older than the last one of the section before."""

    rows: Sequence[GpuRow]
    restart: str = ""
    time_goes_back: bool = False


@dataclass(frozen=True, slots=True)
class SectionRounds:
    """The rounds of one section, or of a part of it in which rounds have the same number of rows. `counted`: its rows
    name no GPU, so each round has as many GPUs as rows, and GPUs are numbered by their order."""

    section: LogSection
    rounds: Sequence[GpuSnapshot]
    counted: bool = False


# Rows -> sections ---------------------------------------------------------------------------------------------------


def split_into_sections(rows: Sequence[GpuRow]) -> tuple[LogSection, ...]:
    """The rows, split where the time goes back, after a long pause, or at a header that is not printed each round.

    Logs of single GPUs, written to one file or concatenated, are one section in order of time.
    """
    if _go_back(rows) and _are_logs_of_single_gpus(rows):
        rows = sorted((replace(row, block=0) for row in rows), key=lambda row: row.seconds or 0.0)
    single_round = _single_round_blocks(rows)
    longest = max(PAUSE_SECONDS, PAUSE_INTERVALS * _usual_interval(rows))
    sections: list[LogSection] = []
    current: list[GpuRow] = []
    restart, back = "", False
    latest: float | None = None
    gaps: deque[float] = deque([0.0], maxlen=MAX_ROUND_ROWS)  # the last ones: a logger may become slow for good
    for row in rows:
        found = None
        since = 0.0 if latest is None or row.seconds is None else row.seconds - latest
        if since < -BACK_SECONDS:
            found = f"the time stamps go back by {duration(-since)}", True
        elif since > max(longest, PAUSE_FACTOR * max(gaps)):
            found = f"there are no samples for {duration(since)}", False
        elif (
            current
            and row.block != current[-1].block
            and not (single_round[row.block] and single_round[current[-1].block])
        ):
            found = "a new header or table begins", False
        if found is not None:
            sections.append(LogSection(current, restart, back))
            current, latest = [], None
            restart, back = found
        current.append(row)
        gaps.append(since)
        if row.seconds is not None:
            latest = row.seconds if latest is None else max(latest, row.seconds)
    sections.append(LogSection(current, restart, back))
    return tuple(sections)


def _usual_interval(rows: Sequence[GpuRow]) -> float:
    """Between two rounds, in seconds, roughly; 0 without time stamps."""
    last: dict[str | None, float] = {}
    gaps = []
    for row in rows:
        if row.seconds is not None:
            key = row_key(row.gpu)
            gaps.append(row.seconds - last.get(key, row.seconds))
            last[key] = row.seconds
    if None not in last:
        return statistics.median(gaps or [0.0])
    # Of rows that name no GPU, most may follow each other within a round.
    return sorted(gaps)[len(gaps) * (MAX_ROUND_ROWS - 1) // MAX_ROUND_ROWS]


def row_key(gpu: GpuSample) -> str | None:
    """What identifies the GPU; None if the row has no identity at all."""
    return None if gpu.key == "?" else gpu.key


def slot(gpu: GpuSample) -> int | None:
    """The index, if only one GPU of a host can have it; None for a part of a GPU (a MIG instance, a tile)."""
    is_part = gpu.mig or (gpu.uuid is not None and gpu.uuid.startswith(f"{gpu.index}/"))
    return None if is_part else gpu.index


def _go_back(rows: Sequence[GpuRow]) -> bool:
    stamps = [row.seconds for row in rows if row.seconds is not None]
    return any(after < before - BACK_SECONDS for before, after in pairwise(stamps))


def _are_logs_of_single_gpus(rows: Sequence[GpuRow]) -> bool:
    """Each GPU's own rows are in order of time, and no two GPUs have the same index."""
    last: dict[str, float] = {}
    key_of_index: dict[int, str] = {}
    for row in rows:
        key = row_key(row.gpu)
        if key is None or row.seconds is None or row.seconds < last.get(key, row.seconds):
            return False
        last[key] = row.seconds
        index = slot(row.gpu)
        if index is not None and key_of_index.setdefault(index, key) != key:
            return False
    return True


def _single_round_blocks(rows: Sequence[GpuRow]) -> Mapping[int, bool]:
    """Whether the rows under one header may be one round: then the header is printed each time, and shows nothing."""
    found = {}
    for block, group in groupby(rows, key=lambda row: row.block):
        mine = list(group)
        keys = [row_key(row.gpu) for row in mine]
        named = [key for key in keys if key is not None]
        found[block] = len(named) == len(set(named)) and len(mine) <= (MAX_ROUND_ROWS if not named else len(mine))
    return found


def duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "5 min", "3 h 9 min": for people."""
    if seconds < 90:
        return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minutes} min"


# Rounds -> the same, with the reason where another log begins ---------------------------------------------------------


def mark_beginnings(sections: Sequence[SectionRounds]) -> tuple[GpuSnapshot, ...]:
    """All rounds in order; `begins` is set on the first round of each log but the first."""
    marked: list[GpuSnapshot] = []
    known: dict[str, GpuSample] = {}  # all GPUs of this log, as last listed
    count = 0  # rounds of this log
    before: GpuSnapshot | None = None
    counted_before = False
    usual_before = 0.0
    for part in sections:
        rounds = with_distinct_stamps(part.rounds)
        usual = _usual_seconds(rounds)
        new_paces = _new_paces([each.time_seconds for each in rounds])
        if _is_other_pace(usual, usual_before) and min(len(rounds), count) > STEADY_ROUNDS:
            new_paces[0] = _pace_text(usual, usual_before)
        for number, each in enumerate(rounds):
            restart = part.section.restart if number == 0 else ""
            back = part.section.time_goes_back and number == 0
            why = new_paces.get(number, "")
            if before is not None and not why:
                counted = part.counted or counted_before
                if restart or _identities(before) != _identities(each):
                    why = _why_another_log(before, each, known, restart, back, counted, count)
            if why:
                known, count = {}, 0
            marked.append(replace(each, begins=why) if why else each)
            if before is None or why or _identities(before) != _identities(each):
                known |= {gpu.key: gpu for gpu in each.gpus}
            before, counted_before = each, part.counted
            count += 1
        usual_before = usual
    return tuple(marked)


def with_distinct_stamps(rounds: Sequence[GpuSnapshot]) -> Sequence[GpuSnapshot]:
    """Rounds that have the same time stamp, because it has no fractions of a second, spread evenly over that second."""
    stamps = [each.time_seconds for each in rounds]
    if not any(a is not None and a == b for a, b in pairwise(stamps)):
        return rounds
    found = sorted({stamp for stamp in stamps if stamp is not None})
    steps = [after - before for before, after in pairwise(found)]
    resolution = 1.0 if all(stamp == int(stamp) for stamp in found) else min(steps, default=0.0)
    spread: list[GpuSnapshot] = []
    start = 0
    for stamp, group in groupby(stamps):
        count = len(list(group))
        for i in range(start, start + count):
            moved = None if stamp is None else stamp + (i - start) * resolution / count
            spread.append(rounds[i] if i == start else replace(rounds[i], time_seconds=moved))
        start += count
    return spread


def _new_paces(stamps: Sequence[float | None]) -> dict[int, str]:
    """Number of each sample with which samples begin to come at quite another pace, for good -> why, in a clause."""
    steps = [0.0 if a is None or b is None else b - a for a, b in pairwise(stamps)]
    found: dict[int, str] = {}
    start = 0
    for i, step in enumerate(steps):
        recent = steps[max(start, i - PACE_STEPS) : i]
        if len(recent) < STEADY_ROUNDS or not _is_other_pace(step, statistics.median(recent)):
            continue
        ahead, usual = steps[i : i + PACE_STEPS], statistics.median(recent)
        now = statistics.median(ahead)
        if len(ahead) >= STEADY_ROUNDS and _is_other_pace(now, usual) and (now > usual) == (step > usual):
            # The step that leads to a faster sample is still a slow one.
            found[i + 1] = _pace_text(now, usual)
            start = i + 1
    return found


def _pace_text(now: float, before: float) -> str:
    return f"the time between samples changes from {duration(before)} to {duration(now)}"


def _is_other_pace(step: float, usual: float) -> bool:
    return usual > 0 and (step > PACE_FACTOR * usual or 0 < step < usual / PACE_FACTOR)


def _usual_seconds(rounds: Sequence[GpuSnapshot]) -> float:
    stamps = [each.time_seconds for each in rounds if each.time_seconds is not None]
    return statistics.median([after - before for before, after in pairwise(stamps)] or [0.0])


def _identities(snapshot: GpuSnapshot) -> list[tuple[int | None, str | None, str | None, str | None]]:
    return [(gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.name) for gpu in snapshot.gpus]


def _why_another_log(
    before: GpuSnapshot,
    after: GpuSnapshot,
    known: Mapping[str, GpuSample],
    restart: str,
    back: bool,
    counted: bool,
    rounds: int,
) -> str:
    """Why `after` begins another log, in a clause; "" if it continues the one of `before`."""

    def because(what: str) -> str:
        return f"{restart}, and {what}" if restart else what

    now = {gpu.key: gpu for gpu in after.gpus if gpu.key != "?"}
    listed = {gpu.key: gpu for gpu in before.gpus if gpu.key != "?"}
    if counted and len(after.gpus) != len(before.gpus):
        return because(f"the size of each round changes from {_rows(len(before.gpus))} to {_rows(len(after.gpus))}")
    if other := next(_other_gpus(known, after.gpus), ""):
        return because(other)
    missing = [gpu for key, gpu in listed.items() if key not in now]
    new = [gpu for key, gpu in now.items() if key not in known]
    if missing and not set(now) & set(listed):
        return because(f"{named(new or after.gpus)} {_are(new or after.gpus)} listed instead of {named(missing)}")
    if missing and (restart or counted or new or _looks_like_another_host(list(now.values()), missing)):
        return because(f"{named(missing)} {_are(missing)} no longer listed")
    if new and rounds >= (RESTARTED_ROUNDS if restart else STEADY_ROUNDS):
        return because(f"{named(new)} {_are(new)} listed for the first time")
    # The same GPUs, by an index that every host has.
    if back and not any(gpu.uuid or gpu.pci_bus_id for gpu in after.gpus):
        return restart
    return ""


def _other_gpus(known: Mapping[str, GpuSample], gpus: Sequence[GpuSample]) -> Iterator[str]:
    """For each index that is another GPU now: which, and which it was."""
    by_slot = {index: gpu for gpu in known.values() if (index := slot(gpu)) is not None}
    for gpu in gpus:
        index = slot(gpu)
        was = None if index is None else by_slot.get(index)
        if was is None:
            continue
        pairs = ((gpu.uuid, was.uuid), (gpu.pci_bus_id, was.pci_bus_id), (gpu.name, was.name))
        if any(_differ(one, other) for one, other in pairs):
            yield f"GPU {gpu.index} changes from {_described(was)} to {_described(gpu)}"


def _differ(a: str | None, b: str | None) -> bool:
    """Whether two values contradict each other. At the cut of a log, a cell may hold only the beginning of a name."""
    return a is not None and b is not None and not a.startswith(b) and not b.startswith(a)


def _described(gpu: GpuSample) -> str:
    place = gpu.pci_bus_id or gpu.uuid
    return " at ".join(text for text in (gpu.name, place) if text) or "another GPU"


def _looks_like_another_host(remaining: Sequence[GpuSample], missing: Sequence[GpuSample]) -> bool:
    """GPUs known only by their index, of which the first ones remain and half or more are gone: what a host with fewer
    GPUs prints. GPUs fail one by one, or all on one board together."""
    if any(gpu.uuid or gpu.pci_bus_id for gpu in (*remaining, *missing)):
        return False
    indexes = sorted(gpu.index for gpu in remaining if gpu.index is not None)
    return len(missing) >= len(remaining) and indexes == list(range(len(indexes)))


def named(gpus: Sequence[GpuSample]) -> str:
    """ "GPU 3", "GPUs 0 to 3, 6" or "4 GPUs"."""
    indexes = sorted(gpu.index for gpu in gpus if gpu.index is not None)
    if len(indexes) < len(gpus):
        return "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    spans: list[list[int]] = []
    for index in indexes:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    parts = [f"{span[0]} to {span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(parts)}"


def _are(gpus: Sequence[GpuSample]) -> str:
    return "are" if len(gpus) > 1 else "is"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
