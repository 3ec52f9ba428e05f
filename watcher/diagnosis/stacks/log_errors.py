"""The end of a rank's log: its last lines, and the error that it ends with. Pure; never raises.

A log is whatever the program printed. It is cut to a bounded size, and terminal escape sequences are removed, before
anything else reads it. log_errors.toml says what known messages mean.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from wattwatch.watcher.common.formatting import single_line
from wattwatch.watcher.diagnosis.model import HangCause, LogError, RankLog, StackFrame
from wattwatch.watcher.diagnosis.stacks.activity import activity_rules
from wattwatch.watcher.diagnosis.stacks.user_code import innermost_user_frame

UNCLASSIFIED_EXCEPTION: Final = "raised"  # a Python exception that matches no row
SIZE_MISMATCH: Final = "sizes"


@dataclass(frozen=True, slots=True)
class LogErrorKind:
    """A row of log_errors.toml, where the fields are explained."""

    name: str
    words: str
    cause: HangCause | None
    is_consequence: bool  # "follows" in the table
    texts: re.Pattern[str]


@cache
def log_error_kinds() -> tuple[LogErrorKind, ...]:
    rows = tomllib.loads(resources.files(__package__).joinpath("log_errors.toml").read_text("utf-8"))["failure"]
    return tuple(
        LogErrorKind(
            row["name"],
            row["words"],
            HangCause(row["cause"]) if "cause" in row else None,
            row.get("follows", False),
            re.compile("|".join(row["texts"])),
        )
        for row in rows
    )


def log_error_kind(name: str) -> LogErrorKind | None:
    return next((kind for kind in log_error_kinds() if kind.name == name), None)


def classify_message(message: str) -> LogErrorKind | None:
    """The first row that matches; the message may have several lines."""
    return next((kind for kind in log_error_kinds() if kind.texts.search(message)), None)


# Reading a log

MAX_TAIL_BYTES: Final = 8192  # what the node agent fetches of a log
MAX_LINE_CHARACTERS: Final = 400
MAX_LINES: Final = 12  # kept for the report
MAX_MESSAGE_CHARACTERS: Final = 240
MAX_MESSAGE_LINES: Final = 3
# A rank that printed more lines than this after an error has survived the error. Chosen, not measured.
MAX_LINES_AFTER_ERROR: Final = 30

ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
RANK_PREFIX: Final = re.compile(r"(?:\[(?:rank|default)\d{1,6}\]: ?)+")  # torch's exception hook, torchrun --tee
TRACEBACK_FRAME: Final = re.compile(r'\s+File "(.{0,390}?)", line (\d{1,9}), in (.+)')
MESSAGE_END: Final = re.compile(r"\s*$|Exception raised from|frame #\d|Original Traceback|\[[A-Z]\d{3,4} ")
IGNORED_EXCEPTION: Final = "Exception ignored in"  # raised in a destructor at exit, never the reason of the exit
CHAINED: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
WORKER_TRACEBACK: Final = "Original Traceback"  # printed before the traceback of a data loader worker
LOADER_MESSAGE: Final = re.compile(r"in DataLoader worker|DataLoader worker \(pid")
# Native code puts its source location and the rank before the message.
NATIVE_ERROR_PREFIX: Final = re.compile(
    r"(?:what\(\):|\[enforce fail at [^\]]{0,300}\]|\[[A-Z]\d{3,4} [^\]]{0,200}\]|\s)+"
)


@dataclass(slots=True)
class ParsedTraceback:
    frames: list[StackFrame]  # outermost first, as Python prints them
    message: str
    line: int  # index of the line of the message
    link: str = ""  # the line that chains it to the traceback before it
    counts: bool = True  # False: an ignored exception


def parse_rank_log(data: bytes, rank: int, source: str) -> RankLog | None:
    """`data`: the end of a log. Returns None if it has no text."""
    lines = plain_lines(data)
    if not lines:
        return None
    return RankLog(rank, source, tuple(lines[-MAX_LINES:]), find_log_error(lines))


def plain_lines(data: bytes) -> list[str]:
    """Lines without terminal escapes and without torch's rank prefix; leading and trailing empty lines are dropped."""
    text = ESCAPES.sub("", data[-MAX_TAIL_BYTES:].decode("utf-8", "replace"))
    lines = [
        _plain_line(RANK_PREFIX.sub("", line[: MAX_LINE_CHARACTERS + 100], count=1))
        # A progress bar rewrites its line with a carriage return.
        for line in re.split(r"\r\n|\n|\r", text)
    ]
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    return lines


def _plain_line(line: str) -> str:
    shown = single_line(line.replace("\t", " "))
    return shown if len(shown) <= MAX_LINE_CHARACTERS else shown[:MAX_LINE_CHARACTERS] + "..."


def find_log_error(lines: Sequence[str]) -> LogError | None:
    """The error that the log ends with. An error of the rank's own is preferred to one that another rank caused, even
    if the latter comes last: losing the other ranks during shutdown hides the original error."""
    raised = _find_exception(lines)
    if raised is not None and not raised.is_consequence:
        return raised
    printed = _find_printed_error(lines)
    if printed is not None and not printed.is_consequence:
        return printed
    return raised or printed


def _find_printed_error(lines: Sequence[str]) -> LogError | None:
    """A message of native code or of the kernel, which has no traceback."""
    first = max(0, len(lines) - 1 - MAX_LINES_AFTER_ERROR)
    for kind in log_error_kinds():
        for line in lines[first:]:
            if kind.texts.search(line):
                message = line[found.end() :] if (found := NATIVE_ERROR_PREFIX.match(line)) else line
                message = message[:MAX_MESSAGE_CHARACTERS].rstrip()
                return LogError(kind.name, message, kind.is_consequence, _cause_value(kind))
    return None


def _find_exception(lines: Sequence[str]) -> LogError | None:
    """The last traceback. In a chain of exceptions, the first one decides whether another rank caused it."""
    found = [each for each in tracebacks(lines) if each.counts]
    if not found or len(lines) - 1 - found[-1].line > MAX_LINES_AFTER_ERROR:
        return None
    chain = [found[-1]]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=True):
        if not after.link:
            break
        chain.insert(0, before)
    origin, last = chain[0], chain[-1]
    origin_kind, last_kind = classify_message(origin.message), classify_message(last.message)
    is_consequence = origin_kind is not None and origin_kind.is_consequence
    # An exception while cleaning up ("connection closed by peer") must not replace the original one.
    cleanup_failed = last_kind is not None and last_kind.is_consequence and not is_consequence
    reported, kind = (origin, origin_kind) if cleanup_failed else (last, last_kind)
    frame = innermost_user_frame(reported.frames[::-1])
    message = reported.message[:MAX_MESSAGE_CHARACTERS]
    if is_consequence or kind is None:
        name = "follows" if is_consequence else UNCLASSIFIED_EXCEPTION
        cause = None if is_consequence else HangCause.DATA if _raised_in_loader(chain) else HangCause.PROGRAM
        return LogError(name, message, is_consequence, None if cause is None else cause.value, frame)
    return LogError(kind.name, message, False, _cause_value(kind), frame)


def _cause_value(kind: LogErrorKind) -> str | None:
    return None if kind.cause is None else kind.cause.value


def _raised_in_loader(chain: Sequence[ParsedTraceback]) -> bool:
    """Whether a message names a data loader worker, or a frame is of a data loader."""
    if any(LOADER_MESSAGE.search(each.message) for each in chain):
        return True
    loader = next((rule for rule in activity_rules() if rule.name == "data"), None)
    places = (f"{frame.file}:{frame.function}".replace("\\", "/") for each in chain for frame in each.frames)
    return loader is not None and any(loader.frames.search(place) for place in places)


def tracebacks(lines: Sequence[str]) -> Iterator[ParsedTraceback]:
    """In the order of the log. The first line may be cut off: frames and a message are enough."""
    frames: list[StackFrame] = []
    link, counts = "", True
    for number, line in enumerate(lines):
        if found := TRACEBACK_FRAME.fullmatch(line):
            frames.append(StackFrame(found[3], found[1], int(found[2])))
        elif line.startswith("Traceback (most recent call last)"):
            frames = []
        elif line.strip() in CHAINED or line.startswith(WORKER_TRACEBACK):
            link, frames = line.strip(), []
        elif line.startswith(IGNORED_EXCEPTION):
            counts = False
        elif frames and line.strip() and not line.startswith(" "):
            message = _join_message(lines[number : number + MAX_MESSAGE_LINES])
            yield ParsedTraceback(frames, message, number, link, counts)
            frames, link, counts = [], "", True


def _join_message(lines: Sequence[str]) -> str:
    parts = [lines[0].strip()]
    for line in lines[1:]:
        if MESSAGE_END.match(line):
            break
        parts.append(line.strip())
    return " ".join(parts)
