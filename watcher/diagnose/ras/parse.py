"""Bytes that RAS answered with -> RasReport, whichever form they have."""

from __future__ import annotations

import re
from collections.abc import Iterable

from watcher.diagnose.ras.parse_json import parse_json
from watcher.diagnose.ras.parse_text import parse_text
from watcher.diagnose.ras.report import RasPolls, RasReport

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
