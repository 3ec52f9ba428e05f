"""What an attempt has left in the run directory, and what torchrun reports, as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainer.launch.endings import Failure, TorchrunEnd, Traces
from trainer.launch.links import Lost
from trainer.launch.places import Places
from trainer.plain import NotPlain, from_plain
from trainer.refusal import Refusal
from trainer.run_directory import RunDirectory, read_ending

ERROR_LINE: Final = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def read_failures(report: str) -> tuple[Failure, ...]:
    """What trainer.launch.torchrun wrote; nothing where it could not."""
    try:
        rows = json.loads(report) if report else []
        return tuple(from_plain(Failure, row) for row in rows)
    except (ValueError, NotPlain):
        return ()


def read_traces(
    run: RunDirectory,
    attempt: int,
    places: Places,
    failures: Sequence[Failure],
    lost: Sequence[Lost],
    codes: Mapping[int, int | None],
) -> tuple[Traces, tuple[str, ...]]:
    """From the run directory, and what could not be read there. `codes` are torchrun's, by node."""
    endings, ended_at, complaints = {}, {}, []
    for rank in range(places.world):
        path = run.ending(attempt, rank)
        try:
            if (ending := read_ending(path)) is not None:
                endings[rank], ended_at[rank] = ending, path.stat().st_mtime
        except (Refusal, OSError) as trouble:
            complaints.append(str(trouble))
    failed = {failure.rank for failure in failures}
    silent = set(range(places.world)) - set(endings)
    beats = {rank: beat for rank in failed | silent if (beat := _beat(run.heartbeat(rank), attempt)) is not None}
    named = {rank // places.ranks_per_node for rank in failed}
    torchruns = tuple(
        TorchrunEnd(index, code, _torchrun_said(node_log(run, attempt, places.nodes[index])))
        for index, code in codes.items()
        if code != 0 and index not in named
    )
    begun = bool(failed or endings or beats) or any(run.logs(attempt).glob("rank-*.log"))
    logs = {rank: _last_said(run, attempt, rank, places.node_of(rank)) for rank in failed - set(endings)}
    traces = Traces(tuple(failures), endings, tuple(lost), beats, logs, ended_at, torchruns, begun)
    return traces, tuple(complaints)


def node_log(run: RunDirectory, attempt: int, node: str) -> Path:
    """What torchrun said there, and its ranks before they had logs of their own."""
    return run.logs(attempt) / f"node-{node}.log"


def _last_said(run: RunDirectory, attempt: int, rank: int, node: str) -> str:
    if line := last_line(run.rank_log(attempt, rank)):
        return f"its log ends with: {line}"
    return f"see {node_log(run, attempt, node)}"


def _beat(path: Path, attempt: int) -> tuple[int, int] | None:
    """An earlier attempt's says nothing of this one."""
    try:
        data = json.loads(path.read_bytes())
        return (int(data["pid"]), int(data["step"])) if data["restart"] == attempt - 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_line(path: Path) -> str | None:
    lines = _last_lines(path)
    return lines[-1].strip()[:300] if lines else None


def _torchrun_said(path: Path) -> str | None:
    """The error that ended it, which warnings of what it tidies up may follow; else the last line."""
    lines = _last_lines(path)
    return next((line[:300] for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1][:300] if lines else None)


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []
