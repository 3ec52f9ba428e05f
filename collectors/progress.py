"""A job's progress and how it was stopped, as far as its log or heartbeat says: text -> `ProgressSample`.

The formats are data: progress_formats.toml, and stop_lines.toml for logs of jobs stopped from outside. A log may be cut
at both ends, contain colors and progress bars that overwrite themselves, and lines of other programs in between. What
the text does not say is None, and `why` says what was found. A number at the very end of an unfinished line may be cut
off and is ignored. NaN and infinite losses are kept: they are what the job printed.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from statistics import median
from typing import Final

import orjson

from wattwatch.collectors.samples import ProgressSample

MAX_LINE_CHARS: Final = 2000
MAX_USER_PATTERN_LINE_CHARS: Final = 300
MAX_WILDCARDS: Final = 3
"""A regex with k wildcards such as `.*` may take time proportional to the k-th power of the line's length. A user's
pattern must not stall the watcher. Three wildcards are harmless on lines of MAX_USER_PATTERN_LINE_CHARS characters."""
USER_PATTERN_SECONDS: Final = 0.2
"""Time limit for one pattern on one text. A pattern that exceeds the limit is never used again, because a regex can
take exponential time."""

TOO_SLOW: Final = (
    f"the pattern took more than {USER_PATTERN_SECONDS} s on this log and is no longer used: simplify the pattern"
)
SLOW_PATTERNS: Final[set[str]] = set()  # not used again in this process

ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
NESTED_REPEAT: Final = re.compile(r"\((?:[^()\\]|\\.)*[+*](?:[^()\\]|\\.)*\)(?:[+*]|\{\d*,\d*\})")
WILDCARD: Final = re.compile(r"(?<!\\)\.(?:[*+]|\{\d*,\d*\})")
TIMESTAMP: Final = re.compile(
    r"(?<!\d)(?P<year>(?:20)?\d\d)-(?P<month>\d\d)-(?P<day>\d\d)[ T]"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
)
SUFFIX: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
USER_PATTERN_GROUPS: Final = ("step", "total", "loss", "tokens_per_second", "tokens_per_second_per_gpu", "rank")


@dataclass(frozen=True, slots=True)
class ProgressFormat:
    """How one trainer prints its progress. progress_formats.toml explains the fields."""

    name: str
    step: re.Pattern[str]
    values: tuple[re.Pattern[str], ...] = ()
    hints: tuple[str, ...] = ()
    bar: bool = False
    largest: bool = False
    note: str = ""
    phases: Mapping[str, str] = field(default_factory=dict)
    longest_line: int = MAX_LINE_CHARS
    seconds: float | None = None  # time limit for one text; None: our own patterns, known to be fast


@dataclass(slots=True)
class ProgressLine:
    """One line with a step, and the values that it and the following lines contain."""

    step: int
    groups: dict[str, str]
    stamp: float | None
    loss_follows: bool = False


def read_progress(
    text: str,
    source: str = "",
    pattern: str | None = None,
    world: int | None = None,
    cut: bool = False,
    age_seconds: float | None = None,
) -> ProgressSample:
    """The last progress reported in `text`. Never raises.

    `pattern`: a regex with named groups (at least `step`) to use instead of the known formats. `world`: number of GPUs
    if known, because some logs give throughput per GPU only. `cut`: the text begins in the middle of a line.
    """
    if pattern is None:
        formats: Sequence[ProgressFormat] = FORMATS
    else:
        chosen = compile_user_pattern(pattern)
        if isinstance(chosen, str):
            return ProgressSample(source, "regex", None, age_seconds=age_seconds, why=chosen)
        formats = (chosen,)
    clean = ANSI.sub("", text) if "\x1b" in text else text
    lines = re.split(r"[\r\n]+", clean)
    torn = lines.pop() if lines and lines[-1] else None  # no line end: it may be incomplete
    if cut and lines:
        lines = lines[1:]  # its beginning is missing: "step 12" may have been "step 312"
    for one in formats:
        # Literal hints first: a substring search is far cheaper than 20 regexes on every line.
        if one.hints and not any(hint in clean for hint in one.hints):
            continue
        events, slow = find_progress_lines(one, lines, torn)
        if slow:
            SLOW_PATTERNS.add(one.step.pattern)
            return ProgressSample(source, one.name, None, age_seconds=age_seconds, why=TOO_SLOW)
        if events:
            return summarize_progress(one, events, source, world, age_seconds)
    if not clean.strip():
        return ProgressSample(source, "", None, age_seconds=age_seconds, why="the file is empty")
    known = "the pattern matches no line" if pattern is not None else "no line has a known format"
    count = len(lines) + (torn is not None)
    why = f"{known} ({count} line{'' if count == 1 else 's'} read)"
    return ProgressSample(source, "", None, age_seconds=age_seconds, why=why)


def find_progress_lines(one: ProgressFormat, lines: Sequence[str], torn: str | None) -> tuple[list[ProgressLine], bool]:
    """Lines with a step, in order; True if a user's pattern exceeded its time limit."""
    events: list[ProgressLine] = []
    deadline = None if one.seconds is None else time.monotonic() + one.seconds
    pieces: Iterable[tuple[str, bool]] = [(line, False) for line in lines]
    if torn is not None:
        pieces = [*pieces, (torn, True)]
    for line, is_torn in pieces:
        if deadline is not None and time.monotonic() > deadline:
            return events, True
        line = line[: one.longest_line]  # some trainers print whole configurations on one line
        found = one.step.search(line)
        if found is not None:
            groups = untorn_groups(found, len(line) if is_torn else None)
            step = parse_count(groups.get("step"))
            if step is not None:
                events.append(ProgressLine(step, groups, line_timestamp(line, groups)))
        if not events:
            continue
        for value in one.values:
            extra = value.search(line)
            if extra is not None:
                more = untorn_groups(extra, len(line) if is_torn else None)
                events[-1].groups.update(more)
                events[-1].loss_follows |= "loss" in more
                if found is not None and events[-1].stamp is None:
                    events[-1].stamp = line_timestamp(line, more)
    return events, False


def untorn_groups(found: re.Match[str], end: int | None) -> dict[str, str]:
    """Named groups that matched, without those that touch the end of an unfinished line (they may be cut off)."""
    return {
        name: text
        for name, text in found.groupdict().items()
        if text is not None and (end is None or found.end(name) < end)
    }


def summarize_progress(
    one: ProgressFormat, events: list[ProgressLine], source: str, world: int | None, age_seconds: float | None
) -> ProgressSample:
    if one.bar:
        events = select_training_bar(events)
    last = max(events, key=lambda event: event.step) if one.largest else events[-1]

    def latest(name: str) -> str | None:
        return next((event.groups[name] for event in reversed(events) if name in event.groups), None)

    total = parse_count(latest("total"))
    loss = parse_number(latest("loss"))
    whole = parse_number(latest("tokens_per_second"))
    per_gpu = parse_number(latest("tokens_per_second_per_gpu"))
    # Never report a per-GPU figure as the job's: it would be wrong by a factor of the world size.
    if whole is None and per_gpu is not None and world:
        whole = per_gpu * world
    phase = latest("phase")
    if phase is not None and one.phases.get(phase) == "done" and "phase" not in events[-1].groups:
        phase = None  # a step after the end belongs to another run
    found = [f"{one.name}: step {last.step}" + (f" of {total}" if total else "")]
    if per_gpu is not None:
        found.append(
            f"{per_gpu:.0f} tokens/s per GPU"
            + ("" if whole is not None else "; the total is unknown, because the number of GPUs is unknown")
        )
    if phase is not None:
        found.append(f"in {phase}")
    if one.note:
        found.append(one.note)
    return ProgressSample(
        source=source,
        format=one.name,
        step=last.step,
        total_steps=total or None,
        loss=loss,
        tokens_per_second=whole,
        line_interval_seconds=line_interval(events),
        age_seconds=age_seconds,
        rank=parse_count(latest("rank")),
        world=world,
        pid=parse_count(latest("pid")),
        phase=None if phase is None else one.phases.get(phase, "train"),
        why="; ".join(found),
    )


def select_training_bar(events: list[ProgressLine]) -> list[ProgressLine]:
    """Lines of the training's progress bar only: evaluation and data loading draw bars too.

    Bars are told apart by their totals. The training bar is the one followed by a loss, else the one with the largest
    total.
    """
    followed = [event for event in events if event.loss_follows]
    totals = [parse_number(event.groups.get("total")) or 0.0 for event in (followed or events)]
    total = totals[-1] if followed else max(totals)
    kept = [event for event in events if (parse_number(event.groups.get("total")) or 0.0) == total]
    return kept or events


def line_interval(events: list[ProgressLine]) -> float | None:
    """Median seconds between lines of different steps, by the lines' own timestamps; None if they have none."""
    gaps: list[float] = []
    before: ProgressLine | None = None
    for event in events:
        # A bar repeats the same step, and a restart goes back: neither is an interval between steps.
        if event.stamp is None or (before is not None and event.step == before.step):
            continue
        if before is not None and before.stamp is not None and event.stamp > before.stamp and event.step > before.step:
            gaps.append(event.stamp - before.stamp)
        before = event
    return round(median(gaps), 3) if gaps else None


def line_timestamp(line: str, groups: Mapping[str, str]) -> float | None:
    """Seconds on the clock that the line shows: a date and time, or a progress bar's elapsed time."""
    if "microseconds" in groups:
        return int(groups["microseconds"]) / 1e6
    elapsed = groups.get("elapsed")
    if elapsed is not None:
        seconds = 0.0
        for part in re.split(r"[:\s]+", elapsed.replace("days,", ":").replace("day,", ":")):
            if not part.isdigit():
                return None
            seconds = seconds * 60 + int(part)
        return seconds
    found = TIMESTAMP.search(line)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(found[i]) for i in range(1, 7))
    try:
        moment = datetime(year + (2000 if year < 100 else 0), month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float("0." + (found["fraction"] or "0"))


def parse_number(text: str | None) -> float | None:
    """ "3,311" "53K" "'1.569'" "8.37E-01" "nan" "-inf" -> float; None if it is not a number."""
    if text is None:
        return None
    text = text.strip("'\" ").replace(",", "").replace("_", "")
    scale = SUFFIX.get(text[-1:], 1.0)
    try:
        return float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        return None


def parse_count(text: str | None) -> int | None:
    """A count, or None: also for nan, inf and absurdly large values."""
    value = parse_number(text)
    return int(value) if value is not None and abs(value) < 1e15 else None


def compile_user_pattern(pattern: str) -> ProgressFormat | str:
    """The user's regex as a format, or a sentence that says what is wrong with it."""
    if pattern in SLOW_PATTERNS:
        return TOO_SLOW
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        return f"the pattern is not a valid regular expression: {error}"
    if "step" not in compiled.groupindex:
        return r"the pattern has no group named step: write the number as (?P<step>\d+)"
    unknown = sorted(set(compiled.groupindex) - set(USER_PATTERN_GROUPS))
    if unknown:
        return f"the pattern has an unknown group {unknown[0]!r}; known groups are {', '.join(USER_PATTERN_GROUPS)}"
    if NESTED_REPEAT.search(pattern):
        return (
            "the pattern contains a nested repetition such as (a+)+, which may never finish: "
            "remove one of the two repetitions"
        )
    if len(WILDCARD.findall(pattern)) > MAX_WILDCARDS:
        return (
            f"the pattern has more than {MAX_WILDCARDS} wildcards (.* or .+): "
            "use something more specific, such as [^|]*"
        )
    return ProgressFormat("regex", compiled, longest_line=MAX_USER_PATTERN_LINE_CHARS, seconds=USER_PATTERN_SECONDS)


def read_heartbeat(text: str, source: str, age_seconds: float | None = None) -> ProgressSample:
    """One RUN/heartbeat/rank-*.json. Never raises: what is missing or has the wrong type is None; `why` says so."""
    try:
        heartbeat = orjson.loads(text)
    except orjson.JSONDecodeError:
        # A trainer may write a loss of NaN, which is not valid JSON.
        try:
            heartbeat = orjson.loads(re.sub(r":\s*(-?(?:NaN|Infinity))\b", r':"\1"', text))
        except orjson.JSONDecodeError:
            return ProgressSample(source, "heartbeat", None, age_seconds=age_seconds, why="not valid JSON")
    if not isinstance(heartbeat, dict):
        return ProgressSample(source, "heartbeat", None, age_seconds=age_seconds, why="not a JSON object")

    def whole(name: str) -> int | None:
        value = heartbeat.get(name)
        return value if type(value) is int else None

    def real(name: str) -> float | None:
        value = heartbeat.get(name)
        if type(value) is str:
            return parse_number(value)
        return float(value) if type(value) is int or type(value) is float else None

    step, phase = whole("step"), heartbeat.get("phase")
    total = whole("steps")
    if step is None:
        why = "heartbeat without a step"
    else:
        why = f"heartbeat: step {step}" + (f" of {total}" if total else "") + (f", {phase}" if phase else "")
    return ProgressSample(
        source,
        "heartbeat",
        step,
        total,
        real("loss"),
        real("tokens_per_second"),
        None,
        age_seconds,
        whole("rank"),
        whole("world"),
        whole("pid"),
        whole("restart"),
        phase if type(phase) is str else None,
        real("data_wait_ms"),
        why,
    )


def _load_formats() -> tuple[ProgressFormat, ...]:
    entries = tomllib.loads((resources.files(__package__) / "progress_formats.toml").read_text("utf-8"))["formats"]
    return tuple(
        ProgressFormat(
            entry["name"],
            re.compile(entry["step"]),
            tuple(re.compile(value) for value in entry.get("values", [])),
            tuple(entry[key] for key in ("hint", "also_hint") if key in entry),
            entry.get("bar", False),
            entry.get("newest") == "largest",
            entry.get("note", ""),
            entry.get("phases", {}),
        )
        for entry in entries
    )


FORMATS: Final = _load_formats()


# External stops: preempted, requeued, out of time, canceled ---------------------------------------------------------

MAX_STOP_LINE_CHARS: Final = 2000
MAX_QUOTE_CHARS: Final = 160


@dataclass(frozen=True, slots=True)
class StopMessage:
    """One kind of line that reports a stop; see stop_lines.toml."""

    hint: str
    line: re.Pattern[str]
    says: str
    sure: bool


@dataclass(frozen=True, slots=True)
class ExternalStop:
    """`description`: what happened and the line that says so; `after`: the text after that line."""

    description: str
    after: str


@cache
def load_stop_messages() -> tuple[tuple[StopMessage, ...], re.Pattern[str]]:
    """The kinds of stop in the order of the file, and a pattern that matches any failure."""
    table = tomllib.loads(resources.files(__package__).joinpath("stop_lines.toml").read_text("utf-8"))
    stops = tuple(StopMessage(s["hint"], re.compile(s["line"]), s["says"], s["sure"]) for s in table["stops"])
    return stops, re.compile("|".join(table["failures"]["lines"]))


def find_external_stop(text: str) -> ExternalStop | None:
    """The last line of the most certain kind that reports a stop; None if there is none or a failure explains it."""
    stops, failure = load_stop_messages()
    for stop in stops:
        if stop.hint not in text:
            continue
        found = [m for m in re.finditer(r"[^\r\n]+", text) if stop.line.search(m.group()[:MAX_STOP_LINE_CHARS])]
        if not found or (not stop.sure and failure.search(text)):
            continue
        quote = found[-1].group().strip()
        description = f"{stop.says}: {quote[-MAX_QUOTE_CHARS:]}"
        return ExternalStop(description, text[found[-1].end() :])
    return None
