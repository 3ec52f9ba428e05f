"""Bytes that RAS answered with -> RasReport, whichever form they have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from wattwatch.watcher.diagnosis.nccl_ras.model import RasCommunicator, RasPolls, RasRank, RasReport
from wattwatch.watcher.diagnosis.nccl_ras.monitor_events import describe_monitor_events, parse_monitor_events
from wattwatch.watcher.diagnosis.nccl_ras.nccl_results import IN_PROGRESS, OK
from wattwatch.watcher.diagnosis.nccl_ras.parse_text import parse_text

# A session saved whole has the server's replies to the set-up lines before the report.
_REPLIES = re.compile(r"\A(?:\s*(?:SERVER PROTOCOL[^\n]*|OK|ERROR:[^\n]*)\r?\n)+", re.IGNORECASE)


def parse_report(data: bytes, source: str = "RAS") -> RasReport:
    """Never raises: `trouble` says what is wrong. `source` names the bytes for people: a file, or a node."""
    text = data.decode("utf-8", errors="replace").lstrip("\ufeff").replace("\0", "").replace("\r", "")
    text = _REPLIES.sub("", text)
    if not text.strip():
        return RasReport(source=source, nccl_version=None, communicators=(), trouble="it is empty")
    return parse_json(text, source) if text.lstrip().startswith("{") else parse_text(text, source)


def parse_polls(
    node: str, files: Iterable[tuple[str, bytes]], apart_seconds: float | None = None, trouble: str | None = None
) -> RasPolls:
    """The reports of one node, from (name, bytes) oldest first."""
    reports = tuple(parse_report(data, name) for name, data in files)
    return RasPolls(node=node, reports=reports, apart_seconds=apart_seconds, trouble=trouble)


# RAS's JSON -> RasReport. Written by a server that may be old, broken or cut off: every field may be anything.

# NCCL 2.28.7 and 2.28.9 print no comma after the GPU of a missing rank: invalid exactly when it matters.
_MISSING_COMMA = re.compile(r'("nvml_dev"\s*:\s*-?\d+)(\s+"status")')
_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]]')
_CLOSING_BRACKET = {"{": "}", "[": "]"}


def parse_json(text: str, source: str) -> RasReport:
    """Never raises: what could not be read is said in `trouble`, and what could be is kept."""
    document, repaired, trouble = _decode_json(text)
    if not isinstance(document, dict):
        return _unreadable(source, trouble or f"its JSON is {_type_name(document)}, not an object")
    if "communicators" not in document:
        if "event" in document:
            return _unreadable(source, describe_monitor_events(parse_monitor_events(text)))
        return _unreadable(source, trouble or 'it has no "communicators": not a status report of RAS')
    listed = document["communicators"]
    if not isinstance(listed, list):
        return _unreadable(source, trouble or f'its "communicators" is {_type_name(listed)}, not a list')
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


def _decode_json(text: str) -> tuple[Any, bool, str | None]:
    """The document, whether a comma had to be put in, and what is wrong with it."""
    try:
        return orjson.loads(text), False, None
    except orjson.JSONDecodeError as error:
        first = error
    mended, commas = _MISSING_COMMA.subn(r"\1,\2", text)
    try:
        return orjson.loads(mended), commas > 0, None
    except orjson.JSONDecodeError:
        pass
    whole, closers = _cut_to_last_object(mended)
    try:
        document = orjson.loads(whole + closers)
    except orjson.JSONDecodeError:
        return None, False, f"it is not JSON: {first.msg} at line {first.lineno}"
    what = f"its JSON ends early, at byte {len(text)}: read as far as it goes"
    if not closers:
        what = f"{len(text) - len(whole)} bytes after the end of its JSON, left aside"
    return document, commas > 0, what


def _cut_to_last_object(text: str) -> tuple[str, str]:
    """The text up to its last whole object, and the brackets that close what is still open there."""
    open_brackets: list[str] = []
    end, still_open = 0, ""
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in _CLOSING_BRACKET:
            open_brackets.append(sign)
            if len(open_brackets) > 32:  # no report: do not spend time on it
                break
        elif sign in "}]":
            if not open_brackets or _CLOSING_BRACKET[open_brackets.pop()] != sign:
                break
            if sign == "}":
                end, still_open = token.end(), "".join(open_brackets)
            if not open_brackets:
                break
    return text[:end], "".join(_CLOSING_BRACKET[sign] for sign in reversed(still_open))


def _communicators(listed: list[Any], words: list[str]) -> Iterator[RasCommunicator]:
    seen: Counter[str] = Counter()
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict):
            words.append(f"communicator {index} is {_type_name(entry)}, not an object: left aside")
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


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def _unreadable(source: str, trouble: str) -> RasReport:
    return RasReport(source=source, nccl_version=None, communicators=(), trouble=trouble)
