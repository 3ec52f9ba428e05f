"""What each node is asked to report: everything that any of its jobs needs."""

from __future__ import annotations

from collections.abc import Sequence

from collectors.probe.request import LogSource, ProbeRequest
from watcher.judge.job_sample import JobSpec


def request_for(specs: Sequence[JobSpec], node: str) -> ProbeRequest:
    """One request for one node; the shortest interval of its jobs serves them all."""
    mine = [spec for spec in specs if node in spec.nodes]
    patterns = [spec.processes for spec in mine if spec.processes]
    return ProbeRequest(
        interval_seconds=min((spec.interval_seconds for spec in mine), default=1.0),
        run_directories=tuple(dict.fromkeys(s.run_directory for s in mine if s.run_directory)),
        logs=tuple(dict.fromkeys(LogSource(path, s.log_pattern) for s in mine for path in s.logs)),
        checkpoint_directories=tuple(dict.fromkeys(s.checkpoint_directory for s in mine if s.checkpoint_directory)),
        process_pattern="|".join(f"(?:{pattern})" for pattern in patterns) or None,
    )
