"""What RAS's MONITOR prints (NCCL 2.29.2 on), as text or JSON -> events. For files that a job kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class RasEvent:
    """A peer came, went, or fell silent. None: not told."""

    local_time: str  # "2025-12-19 13:07:07", by the clock and the zone of the node
    event: str  # PEER_NEW, PEER_DEAD, PEER_UNRESPONSIVE, PEER_RECOVERED, ...
    host: str | None
    pid: int | None
    gpus: tuple[int, ...]  # NVML indices
    details: str


_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] (\w{1,40}): (.*)")
_PEER = re.compile(
    r"Process (\d{1,18}) on node (\S+)(?: managing GPUs? (\d{1,4}(?:,\d{1,4})*)(?: \(NVML (\d{1,4}(?:,\d{1,4})*)\))?)?"
)


def read_events(data: bytes) -> tuple[RasEvent, ...]:
    """In order; what is no event is skipped. Never raises."""
    text = data.decode("utf-8", errors="replace").replace("\r", "")
    return tuple(_from_json(text) if text.lstrip().startswith("{") else _from_text(text))


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
    """Objects one after another with nothing between them, each from a line "{" to a line "}", or on one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("{"):
            lines = []  # what began before is broken
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
        local_time=_text(entry.get("timestamp")),
        event=entry["event"],
        host=host.split("<")[0] if isinstance(host, str) else None,
        pid=pid if isinstance(pid, int) and not isinstance(pid, bool) and pid >= 0 else None,
        gpus=tuple(gpu for gpu in gpus if type(gpu) is int) if isinstance(gpus, list) else (),
        details=_text(entry.get("details")),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
