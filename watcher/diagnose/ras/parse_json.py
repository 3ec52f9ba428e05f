"""RAS's JSON -> RasReport. Written by a server that may be old, broken or cut off: every field may be anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from watcher.diagnose.ras.events import monitor_words, read_events
from watcher.diagnose.ras.report import RasCommunicator, RasRank, RasReport
from watcher.diagnose.ras.results import IN_PROGRESS, OK

# NCCL 2.28.7 and 2.28.9 print no comma after the GPU of a missing rank: invalid exactly when it matters.
_LACKS_COMMA = re.compile(r'("nvml_dev"\s*:\s*-?\d+)(\s+"status")')
_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]]')
_CLOSER = {"{": "}", "[": "]"}


def parse_json(text: str, source: str) -> RasReport:
    """Never raises: what could not be read is said in `trouble`, and what could be is kept."""
    document, repaired, trouble = _load(text)
    if not isinstance(document, dict):
        return _unread(source, trouble or f"its JSON is {_kind(document)}, not an object")
    if "communicators" not in document:
        if "event" in document:
            return _unread(source, monitor_words(read_events(text)))
        return _unread(source, trouble or 'it has no "communicators": not a status report of RAS')
    listed = document["communicators"]
    if not isinstance(listed, list):
        return _unread(source, trouble or f'its "communicators" is {_kind(listed)}, not a list')
    words: list[str] = []
    communicators = tuple(_communicators(listed, words))
    announced = _count(document.get("communicators_count"))
    if announced is not None and announced != len(listed):
        words.append(f"it announces {announced} communicators and lists {len(listed)}")
        trouble = trouble or words[-1]
    ras = _mapping(document.get("ras"))
    version = document.get("nccl_version")
    return RasReport(
        source=source,
        nccl_version=version if isinstance(version, str) else None,
        communicators=communicators,
        collected_seconds=_seconds(ras.get("collection_time_sec")),
        timeouts=_count(ras.get("timeouts_count")),
        repaired=repaired,
        words=tuple(words),
        trouble=trouble,
    )


def _load(text: str) -> tuple[Any, bool, str | None]:
    """The document, whether a comma had to be put in, and what is wrong with it."""
    try:
        return orjson.loads(text), False, None
    except orjson.JSONDecodeError as error:
        first = error
    mended, commas = _LACKS_COMMA.subn(r"\1,\2", text)
    try:
        return orjson.loads(mended), commas > 0, None
    except orjson.JSONDecodeError:
        pass
    whole, closers = _cut_to_whole(mended)
    try:
        document = orjson.loads(whole + closers)
    except orjson.JSONDecodeError:
        return None, False, f"it is not JSON: {first.msg} at line {first.lineno}"
    what = f"its JSON ends early, at byte {len(text)}: read as far as it goes"
    if not closers:
        what = f"{len(text) - len(whole)} bytes after the end of its JSON, left aside"
    return document, commas > 0, what


def _cut_to_whole(text: str) -> tuple[str, str]:
    """The text up to its last whole object, and the brackets that close what is still open there."""
    open_brackets: list[str] = []
    end, still_open = 0, ""
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in _CLOSER:
            open_brackets.append(sign)
            if len(open_brackets) > 32:  # no report: do not spend time on it
                break
        elif sign in "}]":
            if not open_brackets or _CLOSER[open_brackets.pop()] != sign:
                break
            if sign == "}":
                end, still_open = token.end(), "".join(open_brackets)
            if not open_brackets:
                break
    return text[:end], "".join(_CLOSER[sign] for sign in reversed(still_open))


def _communicators(listed: list[Any], words: list[str]) -> Iterator[RasCommunicator]:
    seen: Counter[str] = Counter()
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict):
            words.append(f"communicator {index} is {_kind(entry)}, not an object: left aside")
            continue
        ranks = [*_ranks(entry.get("ranks"), False), *_ranks(entry.get("missing_ranks"), True)]
        identity = f"{_text(entry.get('hash')) or '?'} {_text(entry.get('secondary_hash')) or '?'}"
        seen[identity] += 1
        if seen[identity] > 1:
            identity = f"{identity} ({seen[identity]})"
        size = _count(entry.get("size"))
        missing = _count(entry.get("missing_ranks_count"))
        yield RasCommunicator(
            identity=identity,
            size=len(ranks) if size is None else size,
            ranks=tuple(ranks),
            missing_count=sum(rank.missing for rank in ranks) if missing is None else missing,
        )


def _ranks(listed: Any, missing: bool) -> Iterator[RasRank]:
    for entry in listed if isinstance(listed, list) else ():
        number = _count(entry.get("rank")) if isinstance(entry, dict) else None
        if number is None:
            continue  # nothing can be said of a rank without a number
        status = _mapping(entry.get("status"))
        host = _text(entry.get("host"))
        gpu = _count(entry.get("nvml_dev"))
        place = (number, None if host == "unknown" else host, _count(entry.get("pid")))
        if missing:
            yield RasRank(
                *place,
                gpu=gpu,
                missing=True,
                unresponsive=status.get("unresponsive") is True,
                dead=status.get("considered_dead") is True,
            )
            continue
        initialization = _count(status.get("init_state")) or OK
        yield RasRank(
            *place,
            gpu=gpu,
            counts=_counts(entry.get("collective_counts")),
            async_error=_count(status.get("async_error")) or OK,
            initialization_error=OK if initialization == IN_PROGRESS else initialization,
            finalizing=status.get("finalize_called") is True or status.get("destroy_flag") is True,
            aborted=status.get("abort_flag") is True,
            initializing=initialization == IN_PROGRESS,
        )


def _counts(value: Any) -> Mapping[str, int] | None:
    """Of every kind of operation that it lists: later versions may count more. None where it tells none."""
    if not isinstance(value, dict):
        return None
    counts = {name: count for name, entry in value.items() if (count := _count(entry)) is not None}
    return counts or None


def _count(value: Any) -> int | None:
    """Not negative: RAS writes -1 for what it does not know."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def _unread(source: str, trouble: str) -> RasReport:
    return RasReport(source=source, nccl_version=None, communicators=(), trouble=trouble)
