"""The bytes of a RAS report to a RasReport, whichever format they have. The JSON format; for text, see `parse_text.py`.

The server may be old, broken, or cut off in the middle: every field may be anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import orjson

from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.diagnosis.nccl_ras.model import RasCommunicator, RasPolls, RasRank, RasReport
from wattwatch.watcher.diagnosis.nccl_ras.monitor_events import describe_monitor_events, parse_monitor_events
from wattwatch.watcher.diagnosis.nccl_ras.nccl_results import IN_PROGRESS, OK
from wattwatch.watcher.diagnosis.nccl_ras.parse_text import parse_text

# A session that was saved as a whole has the server's replies to the setup commands before the report.
_SETUP_REPLIES: Final = re.compile(r"\A(?:\s*(?:SERVER PROTOCOL[^\n]*|OK|ERROR:[^\n]*)\r?\n)+", re.IGNORECASE)
# NCCL 2.28.7 and 2.28.9 print no comma after the GPU of a missing rank: invalid JSON exactly when it matters.
_MISSING_COMMA: Final = re.compile(r'("nvml_dev"\s*:\s*-?\d+)(\s+"status")')
_TOKENS: Final = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]]')
_CLOSING_BRACKET: Final = {"{": "}", "[": "]"}
_MAX_NESTING: Final = 32  # a report nests 6 levels; deeper input is not one, and not worth the time


def parse_report(data: bytes, source: str = "RAS") -> RasReport:
    """Raises nothing for what is in the data: `problem` says what is wrong. `source` names the data for people."""
    # A byte order mark, zero bytes and carriage returns come with files that were copied through Windows or a terminal.
    text = data.decode("utf-8", errors="replace").lstrip("\ufeff").replace("\0", "").replace("\r", "")
    text = _SETUP_REPLIES.sub("", text)
    if not text.strip():
        return RasReport(source=source, nccl_version=None, communicators=(), problem="the report is empty")
    return parse_json(text, source) if text.lstrip().startswith("{") else parse_text(text, source)


def parse_polls(
    node: str, files: Iterable[tuple[str, bytes]], interval_seconds: float | None = None, problem: str | None = None
) -> RasPolls:
    """The reports of one node, from (name, bytes), oldest first."""
    reports = tuple(parse_report(data, name) for name, data in files)
    return RasPolls(node=node, reports=reports, interval_seconds=interval_seconds, problem=problem)


def parse_json(text: str, source: str) -> RasReport:
    """Keeps whatever can be read; `problem` says what could not. Raises nothing for what is in the text."""
    document, repaired, problem = _decode_json(text)
    if not isinstance(document, dict):
        return _unreadable(source, problem or f"the JSON is {_type_name(document)}, not an object")
    if "communicators" not in document:
        if "event" in document:
            return _unreadable(source, describe_monitor_events(parse_monitor_events(text)))
        return _unreadable(source, problem or 'the JSON has no "communicators": this is not a status report of RAS')
    listed = document["communicators"]
    if not isinstance(listed, list):
        return _unreadable(source, problem or f'the value of "communicators" is {_type_name(listed)}, not a list')
    remarks: list[str] = []
    communicators = tuple(_communicators(listed, remarks))
    announced = _count(document.get("communicators_count"))
    if announced is not None and announced != len(listed):
        remarks.append(
            f"the report lists {len(listed)} of the {format_count(announced, 'communicator')} that it announces"
        )
        problem = problem or remarks[-1]
    ras = _mapping(document.get("ras"))
    version = document.get("nccl_version")
    return RasReport(
        source=source,
        nccl_version=version if isinstance(version, str) else None,
        communicators=communicators,
        collected_seconds=_seconds(ras.get("collection_time_sec")),
        timeouts=_count(ras.get("timeouts_count")),
        repaired=repaired,
        remarks=tuple(remarks),
        problem=problem,
    )


def _decode_json(text: str) -> tuple[Any, bool, str | None]:
    """The document, whether a missing comma was added, and what is wrong with it."""
    try:
        return orjson.loads(text), False, None
    except orjson.JSONDecodeError as error:
        first_error = error
    repaired, commas = _MISSING_COMMA.subn(r"\1,\2", text)
    try:
        return orjson.loads(repaired), commas > 0, None
    except orjson.JSONDecodeError:
        pass
    # Cut off by a deadline or a size limit: most of a large report is still worth reading.
    complete, closing = _cut_to_last_object(repaired)
    try:
        document = orjson.loads(complete + closing)
    except orjson.JSONDecodeError:
        return None, False, f"the report is not valid JSON: {first_error.msg} at line {first_error.lineno}"
    problem = f"the JSON is cut off at byte {len(text)}; the part before that was used"
    if not closing:
        problem = f"wattwatch ignored {format_count(len(text) - len(complete), 'byte')} after the end of the JSON"
    return document, commas > 0, problem


def _cut_to_last_object(text: str) -> tuple[str, str]:
    """The text up to its last complete object, and the brackets that close what is still open there."""
    open_brackets: list[str] = []
    end, still_open = 0, ""
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in _CLOSING_BRACKET:
            open_brackets.append(sign)
            if len(open_brackets) > _MAX_NESTING:
                break
        elif sign in "}]":
            if not open_brackets or _CLOSING_BRACKET[open_brackets.pop()] != sign:
                break
            if sign == "}":
                end, still_open = token.end(), "".join(open_brackets)
            if not open_brackets:
                break
    return text[:end], "".join(_CLOSING_BRACKET[sign] for sign in reversed(still_open))


def _communicators(listed: list[Any], remarks: list[str]) -> Iterator[RasCommunicator]:
    seen: Counter[str] = Counter()
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict):
            remarks.append(f"communicator {index} is {_type_name(entry)}, not an object, and was ignored")
            continue
        ranks = [*_ranks(entry.get("ranks"), False), *_ranks(entry.get("missing_ranks"), True)]
        identity = f"{_string(entry.get('hash')) or '?'} {_string(entry.get('secondary_hash')) or '?'}"
        # Hashes are not unique. Numbering them keeps two communicators of one report apart.
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
            continue  # a rank without a number cannot be reported
        status = _mapping(entry.get("status"))
        host = _string(entry.get("host"))
        gpu = _count(entry.get("nvml_dev"))
        location = (number, None if host == "unknown" else host, _count(entry.get("pid")))
        if missing:
            yield RasRank(
                *location,
                gpu=gpu,
                missing=True,
                unresponsive=status.get("unresponsive") is True,
                dead=status.get("considered_dead") is True,
            )
            continue
        initialization = _count(status.get("init_state")) or OK
        yield RasRank(
            *location,
            gpu=gpu,
            counts=_counts(entry.get("collective_counts")),
            async_error=_count(status.get("async_error")) or OK,
            initialization_error=OK if initialization == IN_PROGRESS else initialization,
            finalizing=status.get("finalize_called") is True or status.get("destroy_flag") is True,
            aborted=status.get("abort_flag") is True,
            initializing=initialization == IN_PROGRESS,
        )


def _counts(value: Any) -> Mapping[str, int] | None:
    """Every kind of operation that is listed: later versions may count more kinds. None: none is listed."""
    if not isinstance(value, dict):
        return None
    counts = {name: count for name, entry in value.items() if (count := _count(entry)) is not None}
    return counts or None


def _count(value: Any) -> int | None:
    """A non-negative integer: RAS writes -1 for unknown."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _unreadable(source: str, problem: str) -> RasReport:
    return RasReport(source=source, nccl_version=None, communicators=(), problem=problem)
