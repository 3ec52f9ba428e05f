"""What each node is asked to report: everything that any of its jobs needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from collectors.probe.request import LogSource, ProbeRequest
from watcher.judge.job_sample import JobSpec

LEADING_FLAGS: Final = re.compile(r"\(\?([aimsux]+)\)")


def request_for(specs: Sequence[JobSpec], node: str) -> ProbeRequest:
    """One request for one node; the shortest interval of its jobs serves them all."""
    mine = [spec for spec in specs if node in spec.nodes]
    patterns = [spec.processes for spec in mine if spec.processes]
    return ProbeRequest(
        interval_seconds=min((spec.interval_seconds for spec in mine), default=1.0),
        run_directories=tuple(dict.fromkeys(s.run_directory for s in mine if s.run_directory)),
        logs=tuple(dict.fromkeys(LogSource(path, s.log_pattern) for s in mine for path in s.logs)),
        checkpoint_directories=tuple(dict.fromkeys(s.checkpoint_directory for s in mine if s.checkpoint_directory)),
        process_pattern="|".join(dict.fromkeys(map(_as_part, patterns))) or None,
    )


def _as_part(pattern: str) -> str:
    """A pattern that may stand beside others. Flags at its start hold for it alone: elsewhere they are an error."""
    flags = LEADING_FLAGS.match(pattern)
    return f"(?:{pattern})" if flags is None else f"(?{flags[1]}:{pattern[flags.end() :]})"
