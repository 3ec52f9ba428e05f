"""Values in the lines of training logs: numbers, times, rates. What a line does not say is None."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

SUFFIX: Final = {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
CLOCK: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
TIMESTAMPS: Final = (
    re.compile(rf"(?<!\d)(?P<year>(?:20)?\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T]{CLOCK}"),
    re.compile(rf"(?<!\d)(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>(?:20)\d\d)[ T]{CLOCK}"),  # nanotron
    re.compile(rf"(?<![\d/-])(?P<month>\d\d)[-/](?P<day>\d\d) {CLOCK}"),  # detectron2, mmengine's console
    re.compile(rf"^[IWEF](?P<month>\d\d)(?P<day>\d\d) {CLOCK}"),  # absl, glog
)
YEAR_NOT_PRINTED: Final = 2000  # a leap year; only differences of such times are used

NUMBER: Final = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
LOSS: Final = re.compile(
    r"(?<![\w/])(?:train(?:ing)?[ _/]?|total[ _]?|lm[ _]|nll[ _]|avg_?|avr_|running |step_|reduced_llm_|gpt_)?loss"
    r"(?:/train/total|\(train\))?[\"']?\s*[:=,]?\s*[\"'(\[]*"
    rf"(?P<loss>{NUMBER}|-?nan\b|-?inf\b)",
    re.I,
)
_TOKENS: Final = r"(?:tokens?|toks?|words|elements)"
_SECOND: Final = r"(?:[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?)?\b)"
_GPU: Final = r"(?:[ _]?(?:/|per)[ _]?(?:gpu|device|card|chip)\b)"
TOKENS_PER_SECOND: Final = re.compile(
    rf"\b(?P<name>(?:interval_|global_)?{_TOKENS}{_SECOND}?{_GPU}?{_SECOND}?{_GPU}?|throughput/device/TPS|t[gp]s|wps)"
    rf"[\"']?\s*[:=]\s*[\"']?(?P<value>{NUMBER}[KMB]?)",
    re.I,
)
TOKENS_PER_SECOND_UNIT: Final = re.compile(
    rf"(?<![\w.,])(?P<value>{NUMBER}[KMB]?)\s*(?P<name>(?:tokens?|toks?){_SECOND}{_GPU}?)(?!\s*[:=])", re.I
)
_SAMPLES: Final = r"(?:samples?|img|imgs|images?|seqs?|sequences?|sentences|clips|frames)"
SAMPLES_PER_SECOND: Final = re.compile(
    rf"\b(?P<name>(?:interval_)?{_SAMPLES}{_SECOND}{_GPU}?)[\"']?\s*[:=]\s*[\"']?(?P<value>{NUMBER}[KMB]?)", re.I
)
SAMPLES_PER_SECOND_UNIT: Final = re.compile(
    rf"(?<![\w.,])(?P<value>{NUMBER}[KMB]?)\s*(?P<name>{_SAMPLES}{_SECOND}{_GPU}?)(?!\s*[:=])", re.I
)
_STEP: Final = r"(?:step|it|itr|iter(?:ation)?|batch|ba|update)"
SECONDS_PER_STEP: Final = re.compile(
    rf"(?<![\w.,])(?P<value>{NUMBER})\s*(?P<unit>ms|s|secs?|seconds?)\s*(?:/|per)\s*{_STEP}\b", re.I
)
STEPS_PER_SECOND: Final = re.compile(rf"(?<![\w.,])(?P<value>{NUMBER})\s*{_STEP}s?/s(?:ec)?\b", re.I)
STEP_RATE_KEY: Final = re.compile(
    rf"\b(?:train_speed\({_STEP}/s\)|(?:interval_)?steps_per_sec(?:ond)?|ups)[\"']?\s*[:=]\s*[\"']?(?P<value>{NUMBER})",
    re.I,
)
# "time: 0.412" between other values is the time of an iteration; "Data time", "Epoch time" and "total time" are others.
STEP_SECONDS_KEY: Final = re.compile(
    rf"(?:\b(?:train_speed\(s/{_STEP}\)|step_avg|iter[_ ]time|step[_ ]time|time_per_iteration_ms"
    r"|elapsed time per iteration \(ms\))|(?:^|[,;|\]\t(]|\s\s|\bbatch[ _])\s*time)"
    rf"[\"']?\s*[:=]?\s*[\"']?(?P<value>{NUMBER}[KMB]?)\s*(?P<unit>ms|s)?\b",
    re.I,
)
ETA: Final = re.compile(
    r"\b(?:eta|remaining[ _]time|remaining)[\"']?\s*[:=]\s*[\"']?"
    r"(?P<eta>(?:\d+ days?, )?\d+:\d\d(?::\d\d)?|(?:\d+d )?(?:\d+h )?(?:\d+m )?\d+s)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a job says that it is, each as its log names it."""

    tokens_per_second: float | None = None  # whole job
    tokens_per_second_per_gpu: float | None = None
    tokens_per_second_of_unknown_extent: float | None = None  # "tps 3311": of one GPU or of the whole job
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    eta_seconds: float | None = None


def find_rates(line: str) -> Rates:
    """The rates in one line of a log."""
    whole = per_gpu = unknown = None
    for pattern in (TOKENS_PER_SECOND, TOKENS_PER_SECOND_UNIT):
        for found in pattern.finditer(line):
            name, value = found["name"].lower(), parse_number(found["value"])
            if not re.search(r"t[gp]s|wps|/ ?s|per[ _]?s", name):
                continue  # an amount of tokens
            if name == "tgs" or re.search(_GPU, name, re.I) or "device" in name:
                per_gpu = value
            elif name in ("tps", "wps"):
                unknown = value
            else:
                whole = value
    samples = SAMPLES_PER_SECOND.search(line) or SAMPLES_PER_SECOND_UNIT.search(line)
    eta = ETA.search(line)
    return Rates(
        whole,
        per_gpu,
        unknown,
        None if samples is None else parse_number(samples["value"]),
        find_seconds_per_step(line),
        None if eta is None else parse_duration(eta["eta"]),
    )


def find_seconds_per_step(line: str) -> float | None:
    """Seconds for one step as the line states them: "4.95s/it", "1.62 it/s", "step_avg:97.31ms", "time: 0.412"."""
    found = SECONDS_PER_STEP.search(line)
    if found is not None:
        return _seconds(found["value"], found["unit"])
    found = STEPS_PER_SECOND.search(line) or STEP_RATE_KEY.search(line)
    if found is not None:
        rate = parse_number(found["value"])
        return 1.0 / rate if rate else None
    found = STEP_SECONDS_KEY.search(line)
    if found is None:
        return None
    unit = "ms" if "ms" in found.group().lower() else "s"
    return _seconds(found["value"], unit)


def _seconds(value: str, unit: str) -> float | None:
    number = parse_number(value)
    return None if number is None else number / 1e3 if unit.lower() == "ms" else number


def parse_duration(text: str) -> float | None:
    """ "1:02:03" "3 days, 4:11:05" "4h 36m 38s" "00:49" -> seconds; None if it is not a duration."""
    text = text.strip()
    units = re.fullmatch(r"(?:(\d+)d ?)?(?:(\d+)h ?)?(?:(\d+)m ?)?(?:(\d+(?:\.\d+)?)s)?", text)
    if text and units is not None and any(units.groups()):
        days, hours, minutes, rest = (float(part or 0) for part in units.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    found = re.fullmatch(r"(?:(\d+) days?,? ?)?(\d+):(\d\d)(?::(\d\d(?:\.\d+)?))?", text)
    if found is None:
        return None
    first, second, third = float(found[2]), float(found[3]), found[4]
    clock = first * 60 + second if third is None else (first * 60 + second) * 60 + float(third)
    return float(found[1] or 0) * 86400 + clock


def line_timestamp(line: str, groups: Mapping[str, str]) -> float | None:
    """Seconds on the clock that the line shows: a date and time, or a progress bar's elapsed time.

    Lines without a year count from the same year; use differences only.
    """
    if "microseconds" in groups:
        return int(groups["microseconds"]) / 1e6
    if groups.get("elapsed") is not None:
        return parse_duration(groups["elapsed"])
    for pattern in TIMESTAMPS:
        found = pattern.search(line)
        if found is not None:
            break
    else:
        return None
    part = found.groupdict()
    year = int(part.get("year") or YEAR_NOT_PRINTED)
    date = (int(part["month"]), int(part["day"]), int(part["hour"]), int(part["minute"]), int(part["second"]))
    try:
        moment = datetime(year + (2000 if year < 100 else 0), *date, tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float("0." + (part["fraction"] or "0"))


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
