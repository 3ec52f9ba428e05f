"""Stress for GPU logs: `python -m tests.watcher.recordings.log_stress DIRECTORY [--seeds N] [--limit ROUNDS]`.

Makes logs as people have them (log_variations.py) from the healthy ones in a directory, and replays each. Whatever it
reports about a broken GPU, a crash or a hang is untrue, and so is a wrong number of GPUs, a wrong duration, or another
log's beginning that is not said. Exit code 1 if anything untrue was reported.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.watcher.recordings.log_variations import (
    Format,
    Rounds,
    at_full_rate,
    csv_text,
    cut,
    read_rounds,
    table_text,
    with_pauses,
    without_lines,
)
from wattwatch.watcher.recordings.inputs import GpuLog, read_input
from wattwatch.watcher.recordings.replay import ReplayResult, replay
from wattwatch.watcher.recordings.triage import triage_source

NEVER = frozenset({"GpuFault", "JobCrashed", "JobHung"})


@dataclass(frozen=True, slots=True)
class Variation:
    """A log, and what is known of it: how many GPUs each of its parts has, and how long it is. None: the text does not
    show it."""

    name: str
    text: str
    gpus: tuple[int, ...] | None
    rounds: int
    seconds: float | None = None
    cut: bool = False  # its ends are missing
    new_logs: int = 0  # at least so many beginnings can be told


def raw(rounds: Rounds, limit: int, chance: random.Random) -> Rounds:
    return at_full_rate(rounds, chance.choice((0.1, 0.13, 0.25)), limit, chance)


def span(rounds: Rounds) -> float:
    return rounds[-1].seconds - rounds[0].seconds


def variations(rounds: Rounds, chance: random.Random, limit: int) -> Iterator[Variation]:
    """One log -> the ways in which people have it."""
    fast = raw(rounds, limit, chance)
    slow = rounds[:limit]
    paused, late = with_pauses(fast, chance), with_pauses(slow, chance)
    gpus = (len(rounds[0].gpus),)
    bare, unnamed = Format(header=False), Format(index=False)
    unnamed_bare = Format(index=False, header=False)

    def plain(name: str, made: Rounds, text: str) -> Variation:
        return Variation(name, text, gpus, len(made), span(made), "cut" in name)

    for name, printed in (("", Format()), (", no header", bare), (", no index", unnamed)):
        yield plain(f"full rate{name}", fast, csv_text(fast, printed))
    yield plain("full rate, no index, no header", fast, csv_text(fast, unnamed_bare))
    for name, printed in (("", Format()), (", no header", bare), (", no index", unnamed)):
        text = csv_text(paused, printed)
        yield plain(f"pauses{name}", paused, text)
        yield plain(f"pauses{name}, cut", paused, cut(text, chance))
        yield plain(f"pauses{name}, lost lines", paused, without_lines(text, 0.003, chance))
    yield plain("pauses, no index, no header", paused, csv_text(paused, unnamed_bare))
    yield plain("header each round", late, csv_text(late, Format(header_every=1)))
    yield plain("header each round, no index", late, csv_text(late, Format(header_every=1, index=False)))
    yield plain("whole seconds", late, csv_text(late, Format(millisecond=False)))
    # Several rounds within one second cannot be told from one round of more GPUs.
    coarse = csv_text(late, Format(millisecond=False, index=False))
    fast_rounds = span(late) < len(late)
    yield Variation("whole seconds, no index", coarse, None if fast_rounds else gpus, len(late), None)
    yield Variation("no stamps", csv_text(slow, Format(stamp=False)), gpus, len(slow))
    yield Variation("no stamps, no index", csv_text(slow, Format(stamp=False, index=False)), None, len(slow))
    # The logger, or the job, was started again: at once, after a while, after the clock was set back.
    half = len(paused) // 2
    for words, pause in (("soon", 0.3), ("later", 4000.0), ("clock back", -3000.0)):
        again = tuple(each.moved(pause) for each in paused[half:])
        for name, printed in (("", Format()), (", no index", unnamed), (", no index, no header", unnamed_bare)):
            before, after = csv_text(paused[:half], printed), csv_text(again, printed)
            torn = before[: -chance.randrange(1, 80)] + "\n" + after
            yield Variation(f"restarted {words}{name}", torn, gpus, len(paused), None, False, int(pause < 0))
    some = slow[:: max(1, len(slow) // 150)]
    yield plain("tables", some, table_text(some, processes=False))
    yield plain("tables with processes", some, table_text(some))
    yield Variation("tables without dates", table_text(some, dates=False), gpus, len(some))
    two = table_text(some[: len(some) // 2]) + table_text(some[len(some) // 2 :], 0x5A)
    yield Variation("tables of two jobs", two, gpus, len(some), None, False, 1)


def concatenations(
    logs: Sequence[tuple[str, Rounds]], chance: random.Random, limit: int, count: int
) -> Iterator[Variation]:
    """Logs of several hosts or jobs in one file, in any order."""
    for _ in range(count):
        chosen = [chance.choice(logs) for _ in range(chance.choice((2, 2, 3, 4)))]
        printed = Format(index=chance.random() < 0.6, header=chance.random() < 0.6)
        tables = chance.random() < 0.3
        text, at, total, new = "", 0.0, 0, 0
        before = 0
        for number, (_, rounds) in enumerate(chosen):
            most = limit // len(chosen)
            part = raw(rounds, most, chance) if chance.random() < 0.6 else rounds[:most]
            if tables:
                part = part[:: max(1, len(part) // 60)]
            elif chance.random() < 0.5:
                part = with_pauses(part, chance)
            pause = chance.choice((-5000.0, 0.2, 30.0, 4000.0, 90000.0))
            part = tuple(each.moved(at + pause - part[0].seconds) for each in part)
            at = part[-1].seconds
            gpus = len(part[0].gpus)
            # The same number of GPUs, known by index only, or fewer at the same pace, may be the same host.
            told = tables or pause < 0 or (gpus != before and (printed.header or not printed.index))
            new += number > 0 and told
            before = gpus
            total += len(part)
            text += table_text(part, 0x1A + 0x20 * (number % 4)) if tables else csv_text(part, printed)
        names = " + ".join(name for name, _ in chosen)
        counts = tuple(len(rounds[0].gpus) for _, rounds in chosen)
        yield Variation(f"{names} ({'tables' if tables else printed})", text, counts, total, None, False, new)


@dataclass(frozen=True, slots=True)
class Outcome:
    untrue: tuple[str, ...]  # what it says of a broken GPU, a crash or a hang, and what it has read wrongly
    result: ReplayResult


def judge(variation: Variation) -> Outcome:
    source = read_input("log", variation.text.encode())
    assert isinstance(source, GpuLog)
    result = replay("log", source)
    untrue = [f"{e.severity.value} {e.alert}: {e.summary} {e.evidence}" for e in result.episodes if e.alert in NEVER]
    untrue += [
        f"triage: {each.verdict.state.value}: {each.verdict.why}"
        for each in triage_source("log", source, None)
        if each.verdict.state == "gpu_fault"
    ]
    return Outcome((*untrue, *misread(variation, source, result)), result)


def misread(variation: Variation, source: GpuLog, result: ReplayResult) -> Iterator[str]:
    counts = [len(event.sample.gpus or ()) for event in source.events if event.sample]
    if variation.gpus is not None and set(counts) != set(variation.gpus):
        yield f"read: samples of {sorted(set(counts))} GPUs; there are {sorted(set(variation.gpus))}"
    if (
        variation.gpus is not None
        and not (0.5 if variation.cut else 0.85) * variation.rounds <= len(counts) <= variation.rounds
    ):
        yield f"read: {len(counts)} samples; there are {variation.rounds}"
    tolerance = 0.5 if variation.cut else 0.05
    if variation.seconds is not None and abs(result.seconds - variation.seconds) > tolerance * variation.seconds + 3:
        yield f"read: {result.seconds:.0f} s; it is {variation.seconds:.0f} s long"
    if (
        variation.seconds is None
        and variation.new_logs == 0
        and not result.assumptions
        and source.specs[0].interval_assumed
    ):
        yield "read: the pace is assumed, and not said so"
    found = [f"{each.at_seconds:.0f} s: {each.reason}" for each in result.beginnings]
    others = [
        each for each in result.beginnings if "the time between samples changes from " not in each.reason
    ]  # the pace did change
    if len(found) < variation.new_logs or (variation.seconds is not None and others):
        yield f"read: {len(found)} beginnings {found}; there are {variation.new_logs}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--limit", type=int, default=800)
    parser.add_argument("--keep", type=Path, help="write each log with an untrue statement to this directory")
    parser.add_argument("--changes", type=int, default=25, help="list logs with more changes of state")
    options = parser.parse_args()
    logs = read_logs(options.directory)
    failed = made = 0
    for seed in range(options.first, options.first + options.seeds):
        for name, variation in all_variations(logs, seed, options.limit):
            outcome = judge(variation)
            result, changes = outcome.result, len(outcome.result.changes)
            made += 1
            failed += bool(outcome.untrue)
            if outcome.untrue or changes > options.changes:
                head = f"{seed} {name}: {variation.name}: {changes} changes of state in {result.seconds:.0f} s\n"
                sys.stdout.write(head + "".join(f"    {text[:300]}\n" for text in outcome.untrue[:3]))
            if outcome.untrue and options.keep:
                (options.keep / f"{seed}_{name}_{made}.txt").write_text(variation.text)
    sys.stdout.write(f"{failed} of {made} logs with an untrue statement\n")
    return 1 if failed else 0


def read_logs(directory: Path) -> list[tuple[str, Rounds]]:
    """The clean logs with GPU readings in a directory."""
    return [(path.stem, rounds) for path in sorted(directory.glob("*.csv")) if (rounds := read_rounds(path))]


def all_variations(
    logs: Sequence[tuple[str, Rounds]], seed: int, limit: int, count: int = 40
) -> Iterator[tuple[str, Variation]]:
    """Each way of each log, and `count` files of several of them."""
    chance = random.Random(seed)
    for name, rounds in logs:
        yield from ((name, variation) for variation in variations(rounds, chance, limit))
    yield from (("several", variation) for variation in concatenations(logs, chance, limit, count))


if __name__ == "__main__":
    sys.exit(main())
