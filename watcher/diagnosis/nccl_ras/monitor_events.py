"""Output of RAS's monitor mode (NCCL 2.29.2 and later), text or JSON, in files that were saved from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from wattwatch.watcher.common.formatting import format_count

MAX_EVENTS_DESCRIBED: Final = 4
# Parts of the names of events that report a failing peer. PEER_NEW, PEER_CONNECTED and the like do not.
FAILURE_EVENTS: Final = ("DEAD", "UNRESPONSIVE", "STUCK", "TIMEOUT")

_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] (\w{1,40}): (.*)")
_PEER = re.compile(
    r"Process (\d{1,18}) on node (\S+)(?: managing GPUs? (\d{1,4}(?:,\d{1,4})*)(?: \(NVML (\d{1,4}(?:,\d{1,4})*)\))?)?"
)


@dataclass(frozen=True, slots=True)
class RasEvent:
    """A peer appeared, disappeared, or stopped answering. None: the event does not say."""

    local_time: str  # "2025-12-19 13:07:07", in the clock and time zone of the node
    event: str  # PEER_NEW, PEER_DEAD, PEER_UNRESPONSIVE, PEER_RECOVERED, ...
    host: str | None
    pid: int | None
    gpus: tuple[int, ...]  # NVML indices
    details: str


def parse_monitor_events(text: str) -> tuple[RasEvent, ...]:
    """All events, in order; anything else is skipped. Raises nothing for what is in the text."""
    return tuple(_from_json(text) if text.lstrip().startswith("{") else _from_text(text))


def describe_monitor_events(events: Sequence[RasEvent]) -> str:
    """The problem of such a file when it was read as a status report, with the newest failures that it contains."""
    failures = [each for each in events if any(part in each.event for part in FAILURE_EVENTS)]
    described = [
        f"{each.event} {_describe_peer(each)} at {each.local_time}".strip() for each in failures[-MAX_EVENTS_DESCRIBED:]
    ]
    content = "; ".join(described) if described else f"{format_count(len(events), 'event')}, but no failure events"
    return f"this is output of the monitor mode of RAS, not a status report: {content}"


def _describe_peer(event: RasEvent) -> str:
    process = "a peer" if event.pid is None else f"process {event.pid}"
    host = "" if event.host is None else f" on {event.host}"
    gpus = f" (GPU {', '.join(map(str, event.gpus))})" if event.gpus else ""
    return f"{process}{host}{gpus}"


def _from_text(text: str) -> Iterator[RasEvent]:
    for line in text.splitlines():
        found = _LINE.match(line.strip())
        if not found:
            continue
        peer = _PEER.match(found[3])
        gpus = tuple(int(gpu) for gpu in (peer[4] or peer[3] or "").split(",") if gpu) if peer else ()
        yield RasEvent(
            local_time=found[1],
            event=found[2],
            host=peer[2] if peer else None,
            pid=int(peer[1]) if peer else None,
            gpus=gpus,
            details=(found[3][peer.end() :] if peer else found[3]).strip(),
        )


def _from_json(text: str) -> Iterator[RasEvent]:
    """Concatenated objects without a separator, each from a line "{" to a line "}", or on one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("{"):
            lines = []  # an object that began before this line is broken: it must not hide this one
        lines.append(line)
        if line.startswith("}") or (line.startswith("{") and line.rstrip().endswith("}")):
            try:
                entry = orjson.loads("\n".join(lines))
            except orjson.JSONDecodeError:
                entry = None
            lines = []
            if isinstance(entry, dict) and isinstance(entry.get("event"), str):
                yield _event(entry)


def _event(entry: dict[str, Any]) -> RasEvent:
    peer = entry["peer"] if isinstance(entry.get("peer"), dict) else {}
    host, pid, gpus = peer.get("host", peer.get("addr")), peer.get("pid"), peer.get("nvml_devs")
    return RasEvent(
        local_time=_string(entry.get("timestamp")),
        event=entry["event"],
        host=host.split("<")[0] if isinstance(host, str) else None,
        pid=pid if isinstance(pid, int) and not isinstance(pid, bool) and pid >= 0 else None,
        gpus=tuple(gpu for gpu in gpus if type(gpu) is int) if isinstance(gpus, list) else (),
        details=_string(entry.get("details")),
    )


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
