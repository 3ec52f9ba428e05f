"""A job's progress and how it was stopped, as far as its log or heartbeat says: text -> `ProgressSample`.

The formats are data: progress_formats.toml, and stop_lines.toml for logs of jobs stopped from outside. Progress bars of
evaluation and preparation are removed first (progress_bars.py), then the formats are tried, and at last the log of an
unknown trainer is read for a counter that grows steadily (progress_generic.py), which is a guess and marked as one. A
log may be cut at both ends, contain colors and progress bars that overwrite themselves, and lines of other programs in
between. What the text does not say is None, and `why` says what was found. A number at the very end of an unfinished
line may be cut off and is ignored. NaN and infinite losses are kept: they are what the job printed.
"""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from statistics import median
from typing import Final

import orjson

from wattwatch.collectors.log_values import LOSS, find_rates, line_timestamp, parse_count, parse_duration, parse_number
from wattwatch.collectors.progress_bars import Bar, BarRole, bar_rate, find_bars
from wattwatch.collectors.progress_generic import CounterSeries, guess_counter, suggest_pattern
from wattwatch.collectors.samples import ProgressSample

MAX_LINE_CHARS: Final = 8000
"""verl prints a step and all its metrics on one line of several thousand characters."""
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
LINE_END: Final = re.compile(r"[\r\n\b]+")  # Keras overwrites its bar with backspaces
USER_PATTERN_GROUPS: Final = ("step", "total", "loss", "tokens_per_second", "tokens_per_second_per_gpu", "rank")


@dataclass(frozen=True, slots=True)
class ProgressFormat:
    """How one trainer prints its progress. progress_formats.toml explains the fields."""

    name: str
    step: re.Pattern[str] | None  # None for a progress bar
    values: tuple[re.Pattern[str], ...] = ()
    hints: tuple[str, ...] = ()
    bar: re.Pattern[str] | None = None
    shape: str | None = None
    epoch_base: int | None = None
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
    text: str = ""


def read_progress(
    text: str,
    source: str = "",
    pattern: str | None = None,
    world: int | None = None,
    cut: bool = False,
    age_seconds: float | None = None,
    formats: Sequence[ProgressFormat] | None = None,
    previous: ProgressSample | None = None,
) -> ProgressSample:
    """The last progress reported in `text`. Never raises.

    `pattern`: a regex with named groups (at least `step`) to use instead of the known formats. `world`: number of GPUs
    if known, because some logs give throughput per GPU only. `cut`: the text begins in the middle of a line. `formats`:
    tried instead of all known ones; without any, only the guess is left. `previous`: what was read from the same file
    before, of which `text` is the end: it tells the training's bar from that of a long evaluation.
    """
    if pattern is not None:
        chosen = compile_user_pattern(pattern)
        if isinstance(chosen, str):
            return ProgressSample(source, "regex", None, age_seconds=age_seconds, why=chosen)
        formats = (chosen,)
    elif formats is None:
        formats = FORMATS
    clean = ANSI.sub("", text) if "\x1b" in text else text
    lines = LINE_END.split(clean)
    torn = lines.pop() if lines and lines[-1] else None  # no line end: it may be incomplete
    if cut and lines:
        lines = lines[1:]  # its beginning is missing: "step 12" may have been "step 312"
    bars: list[Bar] = []
    if previous is not None and pattern is None:
        # The format that this file had before; most logs need no more than that.
        for one in formats:
            if one.name == previous.format and one.step is not None:
                events, _ = find_progress_lines(one, lines, torn)
                if events:
                    return summarize_progress(one, events, source, world, age_seconds)
    if pattern is None:
        bars = find_bars(lines, torn, _unfinished_total(previous))
        lines, torn = without_bars(lines, torn, bars, keep=BarRole.TRAINING)
        clean = "\n".join(lines if torn is None else [*lines, torn])
    for one in formats:
        # Literal hints first: a substring search is far cheaper than 20 regexes on every line.
        if one.hints and not all(hint in clean for hint in one.hints):
            continue
        slow = False
        if one.bar is not None:
            events = find_bar_lines(one, bars, lines)
        else:
            events, slow = find_progress_lines(one, lines, torn)
        if slow:
            SLOW_PATTERNS.add(pattern or one.name)
            return ProgressSample(source, one.name, None, age_seconds=age_seconds, why=TOO_SLOW)
        if events:
            return summarize_progress(one, events, source, world, age_seconds)
    if pattern is None:
        guess = guess_counter(without_bars(lines, torn, bars, keep=None)[0])
        if guess is not None:
            return summarize_progress(*guessed_lines(guess, lines), source, world, age_seconds, guessed=True)
        events = find_bar_lines(ANY_BAR, bars, lines)
        if events:
            return summarize_progress(ANY_BAR, events, source, world, age_seconds, guessed=True)
        epochs = [bar for bar in bars if bar.role is BarRole.EPOCHS]
        if epochs:
            return summarize_progress(COUNTS_EPOCHS, [_bar_line(bar, "") for bar in epochs], source, world, age_seconds)
    return ProgressSample(source, "", None, age_seconds=age_seconds, why=_why_nothing(text, pattern, lines, torn, bars))


def _unfinished_total(previous: ProgressSample | None) -> int | None:
    """The total of the training's bar, if the run goes on."""
    if previous is None or previous.step is None or previous.phase == "done":
        return None
    step, total = previous.step, previous.total_steps
    if previous.epoch_step is not None:
        step, total = previous.epoch_step, previous.epoch_steps
    return total if total is not None and step < total else None


def continue_progress(sample: ProgressSample, previous: ProgressSample | None) -> ProgressSample:
    """The sample in the light of the one read from the same file before.

    Other output may have pushed the last step out of the text: it is still the last step. A counter that starts again
    in each epoch, whose length the log does not print, goes on from where it was.
    """
    if previous is None or previous.step is None:
        return sample
    if sample.step is None:
        return previous
    if sample.format != previous.format or sample.epoch_steps is not None:
        return sample
    step, before = sample.step, previous.step if previous.epoch_step is None else previous.epoch_step
    counted = previous.step - before  # in earlier epochs
    if step < before:
        next_epoch = sample.epoch is not None and previous.epoch is not None and sample.epoch > previous.epoch
        total = sample.total_steps
        next_bar = sample.epoch is None and total is not None and total == previous.total_steps and before >= total - 1
        if not (next_epoch or next_bar):
            return sample  # another run
        counted = previous.step
    if not counted:
        return sample
    why = f"{sample.why}; counted over all epochs since the log was first read, this is step {step + counted}"
    return replace(sample, step=step + counted, total_steps=None, epoch_step=step, why=why)


def _why_nothing(text: str, pattern: str | None, lines: Sequence[str], torn: str | None, bars: Sequence[Bar]) -> str:
    if not text.strip():
        return "the file is empty"
    known = "the pattern matches no line" if pattern is not None else "no line has a known format"
    count = len(lines) + (torn is not None)
    why = f"{known} ({count} line{'' if count == 1 else 's'} read)"
    suggested = suggest_pattern(lines)
    if suggested is not None and suggested != pattern:
        tried = read_progress("\n".join([*lines, ""]), pattern=suggested)
        if tried.step is not None:
            why = f"{why}; with log_pattern = '{suggested}', wattwatch would read step {tried.step}"
    other = next((bar for bar in reversed(bars) if bar.role in (BarRole.EVALUATION, BarRole.PREPARATION)), None)
    if other is None:
        return why
    label = f" {other.label.rstrip(': ')[-60:]!r}" if other.label.rstrip(": ") else ""
    return f"{why}; the last progress bar{label} belongs to {other.role}, not to training"


def without_bars(
    lines: Sequence[str], torn: str | None, bars: Sequence[Bar], keep: BarRole | None
) -> tuple[list[str], str | None]:
    """The lines without progress bars, except for those of one role."""
    kept = [*lines, *([] if torn is None else [torn])]
    for bar in bars:
        if bar.role is not keep:
            kept[bar.line] = ""
    return (kept, None) if torn is None else (kept[:-1], kept[-1])


def find_bar_lines(one: ProgressFormat, bars: Sequence[Bar], lines: Sequence[str]) -> list[ProgressLine]:
    """Drawings of the training's progress bar, with the values that follow them."""
    assert one.bar is not None
    events: list[ProgressLine] = []
    position = 0
    for bar in bars:
        found = one.bar.search(bar.label) if bar.role is BarRole.TRAINING and bar.step >= 0 else None
        if found is None or (one.shape is not None and bar.shape != one.shape):
            continue
        if events:
            _add_values(one, events[-1], lines[position : bar.line])
        groups = {name: text for name, text in found.groupdict().items() if text is not None}
        events.append(_bar_line(bar, lines[bar.line] if bar.line < len(lines) else "", groups))
        position = bar.line
    if events:
        _add_values(one, events[-1], lines[position:])
    # Another total is another run, or a bar of another length in an earlier epoch.
    return [event for event in events if event.groups.get("total") == events[-1].groups.get("total")]


def _bar_line(bar: Bar, line: str, labeled: Mapping[str, str] | None = None) -> ProgressLine:
    groups = {**bar.groups, **(labeled or {})}
    seconds = bar_rate(bar.groups)
    if seconds is not None:
        groups["seconds_per_step"] = str(seconds)
    return ProgressLine(parse_count(groups.get("step")) or 0, groups, line_timestamp(line, groups), line)


def _add_values(one: ProgressFormat, event: ProgressLine, lines: Sequence[str]) -> None:
    for line in lines:
        if not line:
            continue
        for value in one.values:
            found = value.search(line[: one.longest_line])
            if found is not None:
                event.groups.update({name: text for name, text in found.groupdict().items() if text is not None})


def guessed_lines(guess: CounterSeries, lines: Sequence[str]) -> tuple[ProgressFormat, list[ProgressLine]]:
    """The guessed counter as a format and its lines."""
    events = [
        ProgressLine(value.step, dict(value.groups), value.stamp, lines[value.line][:MAX_LINE_CHARS])
        for value in guess.values
    ]
    epochs = [parse_count(event.groups.get("epoch")) for event in events]
    totals = {parse_count(event.groups.get("epochs")) for event in events} - {None}
    base = None
    if guess.restarts_each_epoch:
        base = 1 if (totals and 0 not in epochs) or (epochs and epochs[-1] in totals) else 0
    note = f"the step is a guess: it is the number after {guess.label!r}, which grows steadily"
    if guess.key == "epoch":
        note = "the step counts epochs"
    return ProgressFormat("generic", None, epoch_base=base, note=note), events


def find_progress_lines(one: ProgressFormat, lines: Sequence[str], torn: str | None) -> tuple[list[ProgressLine], bool]:
    """Lines with a step, in order; True if a user's pattern exceeded its time limit."""
    assert one.step is not None
    events: list[ProgressLine] = []
    before = ProgressLine(0, {}, None)  # values on lines before the first step
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
                events.append(ProgressLine(step, groups, line_timestamp(line, groups), line))
        for value in one.values:
            extra = value.search(line)
            if extra is not None:
                more = untorn_groups(extra, len(line) if is_torn else None)
                event = events[-1] if events else before
                event.groups.update(more)
                if found is not None and event.stamp is None:
                    event.stamp = line_timestamp(line, more)
    if events:
        events[0].groups = {**before.groups, **events[0].groups}
    return events, False


def untorn_groups(found: re.Match[str], end: int | None) -> dict[str, str]:
    """Named groups that matched, without those that touch the end of an unfinished line (they may be cut off)."""
    return {
        name: text
        for name, text in found.groupdict().items()
        if text is not None and (end is None or found.end(name) < end)
    }


def summarize_progress(
    one: ProgressFormat,
    events: list[ProgressLine],
    source: str,
    world: int | None,
    age_seconds: float | None,
    guessed: bool = False,
) -> ProgressSample:
    last = max(events, key=lambda event: event.step) if one.largest else events[-1]

    def latest(name: str) -> str | None:
        return next((event.groups[name] for event in reversed(events) if name in event.groups), None)

    step, total = last.step, parse_count(latest("total"))
    epoch, epochs = parse_count(latest("epoch")), parse_count(latest("epochs"))
    last_epoch = parse_count(latest("last_epoch"))
    if last_epoch is not None:
        epochs = last_epoch + 1
    epoch_step = epoch_steps = None
    base = one.epoch_base
    if base is None and one.bar is not None and epochs is not None:
        base = 1  # "Epoch 3/10", then a bar without a description
    if base is not None and epoch is not None and total is not None:
        # The counter starts again in each epoch: one count over all epochs, as far as the log says how many there are.
        epoch_step, epoch_steps = step, total
        step += max(0, epoch - base) * total
        total = None if epochs is None else epochs * epoch_steps
    loss = parse_number(latest("loss"))
    stated = find_rates(last.text)
    whole = _first(parse_number(latest("tokens_per_second")), stated.tokens_per_second if guessed else None)
    per_gpu = _first(
        parse_number(latest("tokens_per_second_per_gpu")), stated.tokens_per_second_per_gpu if guessed else None
    )
    # Never report a per-GPU figure as the job's: it would be wrong by a factor of the world size.
    if whole is None and per_gpu is not None and world:
        whole = per_gpu * world
    phase = latest("phase")
    if phase is not None and one.phases.get(phase) == "done" and "phase" not in events[-1].groups:
        phase = None  # a step after the end belongs to another run
    if epoch_step is not None:
        of_epochs = f" of {epochs}" if epochs else ""
        found = [f"{one.name}: epoch {epoch}{of_epochs}, step {epoch_step} of {epoch_steps} in this epoch"]
        found.append(f"step {step}" + (f" of {total}" if total else "") + " in the whole run")
    else:
        found = [f"{one.name}: step {step}" + (f" of {total}" if total else "")]
        found[0] += f" (epoch {epoch})" if epoch is not None else ""
    if per_gpu is not None:
        found.append(
            f"{per_gpu:.0f} tokens/s per GPU"
            + ("" if whole is not None else "; the total is unknown, because the number of GPUs is unknown")
        )
    if guessed and stated.tokens_per_second_of_unknown_extent is not None and whole is None:
        rate = stated.tokens_per_second_of_unknown_extent
        found.append(f"{rate:.0f} tokens/s; the log does not say whether this is for one GPU or for the whole job")
    if phase is not None:
        found.append(f"in {phase}")
    if one.note:
        found.append(one.note)
    return ProgressSample(
        source=source,
        format=one.name,
        step=step,
        total_steps=total or None,
        loss=loss if loss is not None or not guessed else guessed_loss(last.text),
        tokens_per_second=whole,
        line_interval_seconds=line_interval(events),
        age_seconds=age_seconds,
        rank=parse_count(latest("rank")),
        world=world,
        pid=parse_count(latest("pid")),
        phase=None if phase is None else one.phases.get(phase, "train"),
        why="; ".join(found),
        epoch=epoch,
        epochs=epochs,
        epoch_step=epoch_step,
        epoch_steps=epoch_steps,
        samples_per_second=_first(parse_number(latest("samples_per_second")), stated.samples_per_second),
        seconds_per_step=seconds_per_step(events, latest, stated.seconds_per_step),
        eta_seconds=_first(parse_duration(latest("eta") or ""), stated.eta_seconds),
        guessed=guessed,
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def guessed_loss(line: str) -> float | None:
    """The first loss in a line of an unknown trainer."""
    found = LOSS.search(line)
    return None if found is None else parse_number(found["loss"])


def seconds_per_step(
    events: Sequence[ProgressLine], latest: Callable[[str], str | None], stated: float | None
) -> float | None:
    """Seconds for one step: as the format states it, else between the lines' timestamps, else as the line states it."""
    named = parse_number(latest("seconds_per_step"))
    milliseconds, rate = parse_number(latest("milliseconds_per_step")), parse_number(latest("steps_per_second"))
    if named is None and milliseconds is not None:
        named = milliseconds / 1e3
    if named is None and rate:
        named = 1.0 / rate
    measured = [
        (after.stamp - before.stamp) / (after.step - before.step)
        for before, after in pairwise(events)
        if before.stamp is not None and after.stamp is not None
        if after.step > before.step and after.stamp > before.stamp
    ]
    value = named if named is not None else median(measured) if measured else stated
    return None if value is None or not math.isfinite(value) or value <= 0 else round(value, 6)


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
            why = "the heartbeat is not valid JSON"
            return ProgressSample(source, "heartbeat", None, age_seconds=age_seconds, why=why)
    if not isinstance(heartbeat, dict):
        why = "the heartbeat is not a JSON object"
        return ProgressSample(source, "heartbeat", None, age_seconds=age_seconds, why=why)

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
        why = "the heartbeat has no step"
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
            re.compile(entry["step"]) if "step" in entry else None,
            tuple(re.compile(value) for value in entry.get("values", [])),
            tuple(entry[key] for key in ("hint", "also_hint") if key in entry),
            re.compile(entry["bar"]) if "bar" in entry else None,
            entry.get("shape"),
            entry.get("epoch_base"),
            entry.get("newest") == "largest",
            entry.get("note", ""),
            entry.get("phases", {}),
        )
        for entry in entries
    )


ANY_BAR: Final = ProgressFormat("generic", None, bar=re.compile(""), note="step of the progress bar")
COUNTS_EPOCHS: Final = ProgressFormat("tqdm", None, note="the progress bar counts epochs")
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
