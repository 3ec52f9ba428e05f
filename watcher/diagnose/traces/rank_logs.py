"""The end of a rank's log -> its last lines, and the failure that it ends with. Pure; never raises.

A log is whatever a program printed: it is cut, and rid of what a terminal would obey, before anything else sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from watcher.diagnose.diagnosis import Cause
from watcher.diagnose.evidence import LogFailure, RankLog, StackFrame
from watcher.diagnose.traces.activity import activities
from watcher.diagnose.traces.failures import RAISED, FailureKind, failure_kinds, kind_of_words
from watcher.diagnose.traces.own_code import own_frame
from watcher.diagnose.words import one_line

TAIL_BYTES: Final = 8192  # as much as a capture brings
LINE_MOST: Final = 400  # characters
LINES_SHOWN: Final = 12
AFTER_MOST: Final = 30  # lines: whoever printed more after its failure lived on
MESSAGE_LINES: Final = 3
WORDS_MOST: Final = 240
MESSAGE_END: Final = re.compile(r"\s*$|Exception raised from|frame #\d|Original Traceback|\[[A-Z]\d{3,4} ")

ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
RANK_PREFIX: Final = re.compile(r"(?:\[(?:rank|default)\d{1,6}\]: ?)+")  # of torch's hook, of torchrun's --tee
FRAME: Final = re.compile(r'\s+File "(.{0,390}?)", line (\d{1,9}), in (.+)')
NOT_AN_END: Final = "Exception ignored in"
CHAINED: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Before the words of native code: where in its source, of which rank.
WHERE: Final = re.compile(r"(?:what\(\):|\[enforce fail at [^\]]{0,300}\]|\[[A-Z]\d{3,4} [^\]]{0,200}\]|\s)+")
OF_A_WORKER: Final = "Original Traceback"  # a loader's worker raised: what follows is the origin
IN_A_LOADER: Final = re.compile(r"in DataLoader worker|DataLoader worker \(pid")


@dataclass(slots=True)
class Traceback:
    """`frames` outermost first, as Python prints them; `line` is that of the message."""

    frames: list[StackFrame]
    message: str
    line: int
    link: str = ""  # to the one before
    counts: bool = True


def read_log(data: bytes, rank: int, source: str) -> RankLog | None:
    """None where nothing was printed."""
    lines = plain_lines(data)
    if not lines:
        return None
    return RankLog(rank, source, tuple(lines[-LINES_SHOWN:]), failure_of(lines))


def plain_lines(data: bytes) -> list[str]:
    """Without empty lines at the end, escapes of a terminal, and the rank that torch puts before each line."""
    text = ESCAPES.sub("", data[-TAIL_BYTES:].decode("utf-8", "replace"))
    lines = [_plain(RANK_PREFIX.sub("", line[: LINE_MOST + 100], count=1)) for line in re.split(r"\r\n|\n|\r", text)]
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    return lines


def _plain(line: str) -> str:
    shown = one_line(line.replace("\t", " "))
    return shown if len(shown) <= LINE_MOST else shown[:LINE_MOST] + "..."


def failure_of(lines: Sequence[str]) -> LogFailure | None:
    """What the log ends with. A failure of its own, wherever it stands, before one that may follow from another's."""
    raised = _raised(lines)
    if raised is not None and not raised.follows:
        return raised
    printed = _printed(lines)
    if printed is not None and not printed.follows:
        return printed
    return raised or printed


def _printed(lines: Sequence[str]) -> LogFailure | None:
    """A line of native code or of the kernel, which has no frames."""
    first = max(0, len(lines) - 1 - AFTER_MOST)
    for kind in failure_kinds():
        for line in lines[first:]:
            if kind.texts.search(line):
                said = line[found.end() :] if (found := WHERE.match(line)) else line
                return LogFailure(kind.name, said[:WORDS_MOST].rstrip(), kind.follows, _cause(kind))
    return None


def _raised(lines: Sequence[str]) -> LogFailure | None:
    """The last traceback. In a chain the origin decides whether it follows from another rank's end."""
    found = [each for each in tracebacks(lines) if each.counts]
    if not found or len(lines) - 1 - found[-1].line > AFTER_MOST:
        return None
    chain = [found[-1]]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=True):
        if not after.link:
            break
        chain.insert(0, before)
    origin, last = chain[0], chain[-1]
    kinds = [kind_of_words(each.message) for each in (origin, last)]
    follows = kinds[0] is not None and kinds[0].follows
    told, kind = (last, kinds[1]) if kinds[1] is None or not kinds[1].follows or follows else (origin, kinds[0])
    frame = own_frame(told.frames[::-1])
    words = told.message[:WORDS_MOST]
    if follows or kind is None:
        name = "follows" if follows else RAISED
        cause = None if follows else Cause.DATA if _in_loader(chain) else Cause.PROGRAM
        return LogFailure(name, words, follows, None if cause is None else cause.value, frame)
    return LogFailure(kind.name, words, False, _cause(kind), frame)


def _cause(kind: FailureKind) -> str | None:
    return None if kind.cause is None else kind.cause.value


def _in_loader(chain: Sequence[Traceback]) -> bool:
    """The message says so, or a frame is a loader's."""
    if any(IN_A_LOADER.search(each.message) for each in chain):
        return True
    loader = next((activity for activity in activities() if activity.name == "data"), None)
    places = (f"{frame.file}:{frame.function}".replace("\\", "/") for each in chain for frame in each.frames)
    return loader is not None and any(loader.frames.search(place) for place in places)


def tracebacks(lines: Sequence[str]) -> Iterator[Traceback]:
    """In their order. One whose head is cut off counts: frames and a message are enough."""
    frames: list[StackFrame] = []
    link, counts = "", True
    for number, line in enumerate(lines):
        if found := FRAME.fullmatch(line):
            frames.append(StackFrame(found[3], found[1], int(found[2])))
        elif line.startswith("Traceback (most recent call last)"):
            frames = []
        elif line.strip() in CHAINED or line.startswith(OF_A_WORKER):
            link, frames = line.strip(), []
        elif line.startswith(NOT_AN_END):
            counts = False
        elif frames and line.strip() and not line.startswith(" "):
            message = _message(lines[number : number + MESSAGE_LINES])
            yield Traceback(frames, message, number, link, counts)
            frames, link, counts = [], "", True


def _message(lines: Sequence[str]) -> str:
    said = [lines[0].strip()]
    for line in lines[1:]:
        if MESSAGE_END.match(line):
            break
        said.append(line.strip())
    return " ".join(said)
