"""What a line at the end of a rank's log means, from failures.toml. Pure."""

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

UNCLASSIFIED_EXCEPTION: Final = "raised"  # a Python exception that no row fits
SIZE_MISMATCH: Final = "sizes"


@dataclass(frozen=True, slots=True)
class LogErrorKind:
    """`cause` None: the words do not tell. `follows`: another rank's end may be the reason."""

    name: str
    words: str  # after "rank 3"
    cause: HangCause | None
    follows: bool
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


def classify_message(words: str) -> LogErrorKind | None:
    """Of a message of one or more lines."""
    return next((kind for kind in log_error_kinds() if kind.texts.search(words)), None)


# The end of a rank's log -> its last lines, and the failure that it ends with. Pure; never raises.
#
# A log is whatever a program printed: it is cut, and rid of what a terminal would obey, before anything else sees it.

MAX_TAIL_BYTES: Final = 8192  # as much as a capture brings
MAX_LINE_CHARACTERS: Final = 400  # characters
MAX_LINES: Final = 12
MAX_LINES_AFTER_ERROR: Final = 30  # lines: whoever printed more after its failure lived on
MESSAGE_LINES: Final = 3
MAX_MESSAGE_CHARACTERS: Final = 240
MESSAGE_END: Final = re.compile(r"\s*$|Exception raised from|frame #\d|Original Traceback|\[[A-Z]\d{3,4} ")

ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
RANK_PREFIX: Final = re.compile(r"(?:\[(?:rank|default)\d{1,6}\]: ?)+")  # of torch's hook, of torchrun's --tee
TRACEBACK_FRAME: Final = re.compile(r'\s+File "(.{0,390}?)", line (\d{1,9}), in (.+)')
IGNORED_EXCEPTION: Final = "Exception ignored in"
CHAINED: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Before the words of native code: where in its source, of which rank.
NATIVE_ERROR_PREFIX: Final = re.compile(
    r"(?:what\(\):|\[enforce fail at [^\]]{0,300}\]|\[[A-Z]\d{3,4} [^\]]{0,200}\]|\s)+"
)
WORKER_TRACEBACK: Final = "Original Traceback"  # a loader's worker raised: what follows is the origin
LOADER_MESSAGE: Final = re.compile(r"in DataLoader worker|DataLoader worker \(pid")


@dataclass(slots=True)
class ParsedTraceback:
    """`frames` outermost first, as Python prints them; `line` is that of the message."""

    frames: list[StackFrame]
    message: str
    line: int
    link: str = ""  # to the one before
    counts: bool = True


def parse_rank_log(data: bytes, rank: int, source: str) -> RankLog | None:
    """None where nothing was printed."""
    lines = plain_lines(data)
    if not lines:
        return None
    return RankLog(rank, source, tuple(lines[-MAX_LINES:]), find_log_error(lines))


def plain_lines(data: bytes) -> list[str]:
    """Without empty lines at the end, escapes of a terminal, and the rank that torch puts before each line."""
    text = ESCAPES.sub("", data[-MAX_TAIL_BYTES:].decode("utf-8", "replace"))
    lines = [
        _plain(RANK_PREFIX.sub("", line[: MAX_LINE_CHARACTERS + 100], count=1))
        for line in re.split(r"\r\n|\n|\r", text)
    ]
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    return lines


def _plain(line: str) -> str:
    shown = single_line(line.replace("\t", " "))
    return shown if len(shown) <= MAX_LINE_CHARACTERS else shown[:MAX_LINE_CHARACTERS] + "..."


def find_log_error(lines: Sequence[str]) -> LogError | None:
    """What the log ends with. A failure of its own, wherever it stands, before one that may follow from another's."""
    raised = _find_exception(lines)
    if raised is not None and not raised.follows:
        return raised
    printed = _find_printed_error(lines)
    if printed is not None and not printed.follows:
        return printed
    return raised or printed


def _find_printed_error(lines: Sequence[str]) -> LogError | None:
    """A line of native code or of the kernel, which has no frames."""
    first = max(0, len(lines) - 1 - MAX_LINES_AFTER_ERROR)
    for kind in log_error_kinds():
        for line in lines[first:]:
            if kind.texts.search(line):
                said = line[found.end() :] if (found := NATIVE_ERROR_PREFIX.match(line)) else line
                return LogError(kind.name, said[:MAX_MESSAGE_CHARACTERS].rstrip(), kind.follows, _cause_value(kind))
    return None


def _find_exception(lines: Sequence[str]) -> LogError | None:
    """The last traceback. In a chain the origin decides whether it follows from another rank's end."""
    found = [each for each in tracebacks(lines) if each.counts]
    if not found or len(lines) - 1 - found[-1].line > MAX_LINES_AFTER_ERROR:
        return None
    chain = [found[-1]]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=True):
        if not after.link:
            break
        chain.insert(0, before)
    origin, last = chain[0], chain[-1]
    kinds = [classify_message(each.message) for each in (origin, last)]
    follows = kinds[0] is not None and kinds[0].follows
    told, kind = (last, kinds[1]) if kinds[1] is None or not kinds[1].follows or follows else (origin, kinds[0])
    frame = innermost_user_frame(told.frames[::-1])
    words = told.message[:MAX_MESSAGE_CHARACTERS]
    if follows or kind is None:
        name = "follows" if follows else UNCLASSIFIED_EXCEPTION
        cause = None if follows else HangCause.DATA if _in_loader(chain) else HangCause.PROGRAM
        return LogError(name, words, follows, None if cause is None else cause.value, frame)
    return LogError(kind.name, words, False, _cause_value(kind), frame)


def _cause_value(kind: LogErrorKind) -> str | None:
    return None if kind.cause is None else kind.cause.value


def _in_loader(chain: Sequence[ParsedTraceback]) -> bool:
    """The message says so, or a frame is a loader's."""
    if any(LOADER_MESSAGE.search(each.message) for each in chain):
        return True
    loader = next((activity for activity in activity_rules() if activity.name == "data"), None)
    places = (f"{frame.file}:{frame.function}".replace("\\", "/") for each in chain for frame in each.frames)
    return loader is not None and any(loader.frames.search(place) for place in places)


def tracebacks(lines: Sequence[str]) -> Iterator[ParsedTraceback]:
    """In their order. One whose head is cut off counts: frames and a message are enough."""
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
            message = _message(lines[number : number + MESSAGE_LINES])
            yield ParsedTraceback(frames, message, number, link, counts)
            frames, link, counts = [], "", True


def _message(lines: Sequence[str]) -> str:
    said = [lines[0].strip()]
    for line in lines[1:]:
        if MESSAGE_END.match(line):
            break
        said.append(line.strip())
    return " ".join(said)
