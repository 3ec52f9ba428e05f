"""Parses Python stacks as faulthandler prints them, and as `py-spy dump` does, text or JSON. Pure; never raises.

faulthandler prints the threads newest first, so the main thread comes last, and the most recent call first (CPython
Python/traceback.c). torch's worker server returns `dump_traceback` in this format. py-spy names the main thread
"MainThread".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from wattwatch.watcher.diagnosis.flight_recorder.model import LaunchFrame
from wattwatch.watcher.diagnosis.model import RankStacks, StackFrame, ThreadStack

MAX_TEXT_CHARACTERS: Final = 4 * 1024 * 1024  # a process with a thousand threads stays below
MAX_THREADS: Final = 1024
MAX_FRAMES_PER_THREAD: Final = 256
MAX_NAME_CHARACTERS: Final = 300

# "Thread 0x00007f99297fa6c0 [pool-1] (most recent call first):"; with the thread name since CPython 3.14
FAULTHANDLER_THREAD: Final = re.compile(
    r"(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.{0,64}?)\])? \(most recent call first\):"
)
FAULTHANDLER_FRAME: Final = re.compile(r'\s+File "(.{0,4096}?)", line (\d+|\?\?\?) in (.{0,512})')
# 'Thread 1234 (active+gil): "MainThread"', '    forward (train.py:88)', with --native '    poll (libc.so.6)'
PY_SPY_PROCESS: Final = re.compile(r"Process (\d+): ")
PY_SPY_THREAD: Final = re.compile(r'Thread (\w+) \((?:active|idle)[^)]{0,16}\)(?:: "(.{0,256})")?')
PY_SPY_FRAME: Final = re.compile(r"    (\S.{0,512}?) \((.{1,4096}?)(?::(\d+))?\)$")


def parse_stacks(text: str, rank: int, source: str) -> RankStacks | None:
    """None if no thread is recognized: the text is not a dump of Python stacks."""
    text = text[:MAX_TEXT_CHARACTERS]
    # JSON first: the text formats would find frames in its strings.
    for read in (_from_json, _from_faulthandler, _from_py_spy):
        if threads := read(text):
            return RankStacks(rank, source, threads)
    return None


def _from_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    threads: list[tuple[str, list[StackFrame]]] = []
    for line in text.splitlines():
        if found := FAULTHANDLER_THREAD.match(line):
            if len(threads) == MAX_THREADS:
                threads.pop(0)  # keep the last ones: the main thread comes last
            threads.append((found[2] or found[1], []))
        elif threads and (found := FAULTHANDLER_FRAME.match(line)) and len(threads[-1][1]) < MAX_FRAMES_PER_THREAD:
            threads[-1][1].append(_frame(found[3], found[1], found[2]))
    last = len(threads) - 1
    return tuple(
        ThreadStack(name[:MAX_NAME_CHARACTERS], tuple(frames), i == last) for i, (name, frames) in enumerate(threads)
    )


def _from_py_spy(text: str) -> tuple[ThreadStack, ...]:
    """With --subprocesses, the first process is the rank, and the others are its children, such as loader workers."""
    threads: list[tuple[str, int, list[StackFrame]]] = []
    processes = 0
    for line in text.splitlines():
        if PY_SPY_PROCESS.match(line):
            processes += 1
        elif found := PY_SPY_THREAD.match(line):
            if len(threads) < MAX_THREADS:
                threads.append((found[2] or found[1], processes, []))
        elif threads and (found := PY_SPY_FRAME.match(line)) and len(threads[-1][2]) < MAX_FRAMES_PER_THREAD:
            threads[-1][2].append(_frame(found[1], found[2], found[3]))
    return _with_main((name[:MAX_NAME_CHARACTERS], process <= 1, frames) for name, process, frames in threads)


def _from_json(text: str) -> tuple[ThreadStack, ...]:
    """`py-spy dump --json` prints a list of threads, each with its frames."""
    if not text.lstrip().startswith("["):
        return ()
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    rows = [row for row in rows if isinstance(row, dict) and isinstance(row.get("frames"), list)]
    first = rows[0].get("pid") if rows else None
    return _with_main(
        (
            str(row.get("thread_name") or row.get("thread_id"))[:MAX_NAME_CHARACTERS],
            row.get("pid") == first,
            _json_frames(row),
        )
        for row in rows[:MAX_THREADS]
    )


def _json_frames(row: dict[str, Any]) -> list[StackFrame]:
    frames = [frame for frame in row["frames"][:MAX_FRAMES_PER_THREAD] if isinstance(frame, dict)]
    return [_frame(str(f.get("name")), str(f.get("filename")), str(f.get("line"))) for f in frames]


def _with_main(threads: Iterable[tuple[str, bool, list[StackFrame]]]) -> tuple[ThreadStack, ...]:
    """Marks the main thread: the one named "MainThread", or the only one."""
    rows = list(threads)
    return tuple(
        ThreadStack(name, tuple(frames), is_rank and (name == "MainThread" or len(rows) == 1))
        for name, is_rank, frames in rows
    )


def _frame(function: str, file: str, line: str | None) -> StackFrame:
    # faulthandler prints ??? for an unknown line; a number of ten digits is no line of code.
    number = int(line) if line is not None and line.isdecimal() and len(line) < 10 else None
    return StackFrame(function.strip()[:MAX_NAME_CHARACTERS], file[-MAX_NAME_CHARACTERS:], number)


def main_thread(stacks: RankStacks) -> ThreadStack | None:
    """None if no thread is marked as the main one, or if it has no Python frame."""
    return next((thread for thread in stacks.threads if thread.main and thread.frames), None)


def displayed_frames(stacks: RankStacks) -> tuple[StackFrame, ...]:
    """The frames to show to people, innermost first: of the main thread, or of the first one if none is marked."""
    thread = next((each for each in stacks.threads if each.main), next(iter(stacks.threads), None))
    return () if thread is None else thread.frames


def format_frame(frame: StackFrame | LaunchFrame) -> str:
    """`save_checkpoint (train.py:88)`."""
    return f"{frame.function} ({frame.file}{'' if frame.line is None else f':{frame.line}'})"
