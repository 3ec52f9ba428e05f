"""What a probe told once and still holds: heartbeats, logs, checkpoint listings, which it ships when they change.

A recording that begins in mid-run begins with this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from collectors.probe.node_probe import TAIL_BYTES

# What a line tells only when it changes, and so must outlive the line.
LASTING: Final = (b'"hello":', b'"beat":', b'"log":', b'"ckpt":', b'"listed":', b'"fs":')


@dataclass(slots=True)
class Lasting:
    """What one node's lines have told and still holds."""

    stamp: dict[str, Any] = field(default_factory=dict)  # seq, t, w of the newest line that was folded in
    hello: Any = None
    beats: dict[str, Any] = field(default_factory=dict)  # path -> row
    logs: dict[str, Any] = field(default_factory=dict)
    directories: dict[str, dict[str, Any]] = field(default_factory=dict)
    listed: dict[str, Any] = field(default_factory=dict)
    filesystems: dict[str, Any] = field(default_factory=dict)

    def fold(self, line: bytes) -> None:
        """Takes in a line that leaves the memory. What is no line of ours is dropped, as the reader would."""
        if not any(kind in line for kind in LASTING):
            return
        try:
            self._fold(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            return

    def _fold(self, message: dict[str, Any]) -> None:
        self.stamp = {"seq": message["seq"], "t": message["t"], "w": message["w"]}
        if "hello" in message:  # a new connection tells everything anew
            self.hello = message["hello"]
            for known_before in (self.beats, self.logs, self.directories, self.listed, self.filesystems):
                known_before.clear()
        for row in message.get("beat", ()):
            _put(self.beats, row[0], row, gone=row[2] is None)
        for row in message.get("log", ()):
            known = self.logs.get(row[1])
            _put(self.logs, row[1], row if known is None else _longer(known, row), gone=row[2] is None)
        for news in message.get("ckpt", ()):
            known = self.directories.setdefault(news["dir"], {})
            entries = {**known.get("entries", {}), **news.get("entries", {})}
            known.update(news)
            names = known.get("names")
            known["entries"] = {k: v for k, v in entries.items() if names is None or k in names}
        self.listed.update(message.get("listed", ()))
        self.filesystems.update((row[0], row) for row in message.get("fs", ()))

    def lines(self) -> Iterable[bytes]:
        """Lines that a reader takes for a probe's first ones."""
        parts: list[dict[str, Any]] = [{} if self.hello is None else {"hello": self.hello}]
        parts += [{"beat": [row]} for row in self.beats.values()]
        parts += [{"log": [row]} for row in self.logs.values()]
        parts += [{"ckpt": [news]} for news in self.directories.values()]
        parts.append({"listed": list(self.listed.items()), "fs": list(self.filesystems.values())})
        if not self.stamp:
            return
        for part in parts:
            if any(part.values()):
                yield orjson.dumps({"v": 1, **self.stamp, **part})


def _put(known: dict[str, Any], key: str, row: Any, *, gone: bool) -> None:
    if gone:
        known.pop(key, None)
    else:
        known[key] = row


def _longer(known: Any, row: Any) -> Any:
    """What was appended to a log, behind what is known of it."""
    if row[2] is None or known[3] != row[2]:
        return row
    tail = (known[5] + row[5])[-TAIL_BYTES:]
    start = known[2] if len(tail) == len(known[5]) + len(row[5]) else max(1, row[3] - len(tail))
    return [row[0], row[1], start, row[3], row[4], tail]
