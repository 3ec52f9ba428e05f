"""How an attempt ended: which rank was first, how, and the sentence that says so. Pure, but for the reader of files.

torchrun names for each node the ranks that it saw fail before it ended the rest; a rank names its own reason in a file,
unless it was killed. Neither alone tells the story.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from trainer.launch.links import Lost
from trainer.launch.places import Places
from trainer.launch.processes import signal_name
from trainer.plain import NotPlain, from_plain
from trainer.ranks import ranks_in_words
from trainer.refusal import Refusal
from trainer.run_directory import Ending, RunDirectory, read_ending

REFUSED: Final = 2  # exit codes of `wattwatch-train run`
INTERNAL: Final = 3
STOPPED: Final = 4
FAILED: Final = 5


class Manner(StrEnum):
    DONE = "done"  # all ranks said 0
    NODE_LOST = "node lost"
    KILLED = "killed"
    SAID = "said"  # the rank left its reason
    SILENT = "silent"  # an exit code and nothing else
    ENDED_BY_US = "ended by us"


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that torchrun saw fail first on its node."""

    rank: int
    exit_code: int  # minus the signal
    pid: int
    time: int  # seconds since 1970, by the node's clock


@dataclass(frozen=True, slots=True)
class Traces:
    """What an attempt has left."""

    failures: tuple[Failure, ...] = ()
    endings: Mapping[int, Ending] = field(default_factory=dict)  # by rank
    lost: tuple[Lost, ...] = ()
    beats: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (pid, step) of its last heartbeat
    logs: Mapping[int, str] = field(default_factory=dict)  # rank -> what its log says last, of silent ones


@dataclass(frozen=True, slots=True)
class Cause:
    """The first end, from which the others follow."""

    manner: Manner
    code: int | None  # of the rank, where one ended by itself
    sentence: str


def first_cause(traces: Traces, places: Places) -> Cause:
    """A lost node before a killed rank, that before one with a reason: peers notice both within a second, and fail
    themselves. A rank that was asked to leave (SIGTERM, code 4) is never the cause while there is another."""
    if traces.lost:
        nodes = ", ".join(places.nodes[lost.index] for lost in traces.lost)
        return Cause(
            Manner.NODE_LOST, None, f"{nodes} {'was' if len(traces.lost) == 1 else 'were'} lost: {traces.lost[0].why}"
        )
    failures = [*traces.failures, *_unseen(traces)]
    if not failures:
        return Cause(Manner.DONE, 0, "all ranks ended with exit code 0")
    first = min(failures, key=lambda failure: (_weight(failure, traces.endings), failure.time, failure.rank))
    ending = traces.endings.get(first.rank)
    who = f"rank {first.rank} on {places.node_of(first.rank)}"
    others = "; the others followed" if places.world > 1 else ""
    if ending is not None:
        if ending.code == STOPPED:
            return Cause(Manner.SAID, STOPPED, f"stopped on request: {ending.why}")
        return Cause(
            Manner.SAID, ending.code, f"{who} ended with code {ending.code}{_after(ending.step)}: {ending.why}{others}"
        )
    if first.exit_code < 0:
        step = _beaten_step(first, traces)
        sentence = f"{who} was killed by {signal_name(-first.exit_code)}{_after(step)}{others}"
        return Cause(Manner.KILLED, None, sentence)
    said = traces.logs.get(first.rank, "its log is empty")
    return Cause(Manner.SILENT, first.exit_code, f"{who} ended with exit code {first.exit_code}; {said}")


def _unseen(traces: Traces) -> list[Failure]:
    """Ranks whose own word is all there is: their torchrun was ended itself, and reported nothing."""
    seen = {failure.rank for failure in traces.failures}
    later = max((failure.time for failure in traces.failures), default=0) + 1
    return [
        Failure(rank, ending.code, 0, later)
        for rank, ending in sorted(traces.endings.items())
        if ending.code and rank not in seen
    ]


def _weight(failure: Failure, endings: Mapping[int, Ending]) -> int:
    ending = endings.get(failure.rank)
    if ending is not None:
        return {REFUSED: 1, STOPPED: 3}.get(ending.code, 2)
    if failure.exit_code == -signal.SIGTERM:
        return 4
    return 0 if failure.exit_code < 0 else 2


def _beaten_step(failure: Failure, traces: Traces) -> int | None:
    """Of the heartbeat, where it is this very process's."""
    pid, step = traces.beats.get(failure.rank, (None, None))
    if pid == failure.pid:
        return step
    return max((ending.step for ending in traces.endings.values() if ending.step is not None), default=None)


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def read_failures(report: str) -> tuple[Failure, ...]:
    """What trainer.launch.torchrun wrote; nothing where it could not."""
    try:
        rows = json.loads(report) if report else []
        return tuple(from_plain(Failure, row) for row in rows)
    except (ValueError, NotPlain):
        return ()


def read_traces(
    run: RunDirectory, attempt: int, places: Places, failures: Sequence[Failure], lost: Sequence[Lost]
) -> tuple[Traces, tuple[str, ...]]:
    """From the run directory, and what could not be read there."""
    endings, complaints = {}, []
    for rank in range(places.world):
        try:
            if (ending := read_ending(run.ending(attempt, rank))) is not None:
                endings[rank] = ending
        except Refusal as refusal:
            complaints.append(str(refusal))
    failed = {failure.rank for failure in failures}
    beats = {rank: beat for rank in failed if (beat := _beat(run.heartbeat(rank))) is not None}
    logs = {rank: _last_said(run, attempt, rank, places.node_of(rank)) for rank in failed - set(endings)}
    return Traces(tuple(failures), endings, tuple(lost), beats, logs), tuple(complaints)


def node_log(run: RunDirectory, attempt: int, node: str) -> Path:
    """What torchrun said there, and its ranks before they had logs of their own."""
    return run.logs(attempt) / f"node-{node}.log"


def _last_said(run: RunDirectory, attempt: int, rank: int, node: str) -> str:
    if line := last_line(run.rank_log(attempt, rank)):
        return f"its log ends with: {line}"
    return f"see {node_log(run, attempt, node)}"


def _beat(path: Path) -> tuple[int, int] | None:
    try:
        data = json.loads(path.read_bytes())
        return int(data["pid"]), int(data["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_line(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return None
    return lines[-1].strip()[:300] if lines else None


def unsaid(traces: Traces, world: int) -> str:
    """Ranks of which nothing is known: no ending, no failure."""
    known = set(traces.endings) | {failure.rank for failure in traces.failures}
    missing = [rank for rank in range(world) if rank not in known]
    return ranks_in_words(missing) if missing else ""
