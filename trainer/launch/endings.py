"""How an attempt ended: which rank was first, how, and the sentence that says so. Pure.

torchrun names for each node the ranks that it saw fail before it ended the rest; a rank names its own reason in a file,
unless it was killed. Neither alone tells the story.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from trainer.launch.links import Lost
from trainer.launch.places import Places
from trainer.launch.processes import signal_name
from trainer.ranks import ranks_in_words
from trainer.run_directory import Ending

REFUSED: Final = 2  # exit codes of `wattwatch-train run`
INTERNAL: Final = 3
STOPPED: Final = 4
FAILED: Final = 5
# Between a rank that gives up and the SIGKILL of one that does not leave: torchrun waits for 30 s after SIGTERM. A rank
# that somebody else killed is missed by its peers within a second, give or take what the clocks of two nodes differ.
CLEAN_UP_SECONDS: Final = 10.0
ASKED: Final = re.compile(r"asked to stop \((.+?)\)")
GAVE_UP: Final = re.compile(r"collective|tim(ed|e)[ -]?out", re.IGNORECASE)


class Manner(StrEnum):
    DONE = "done"  # all ranks said 0
    NODE_LOST = "node lost"
    TORCHRUN = "torchrun"  # it failed itself, and no rank ever began
    HUNG = "hung"  # a rank did not answer, and the others gave up on it
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
class TorchrunEnd:
    """Of a torchrun that ended with an error, and named no rank."""

    index: int  # of the node
    code: int | None  # minus the signal
    said: str | None  # the last error in its log


@dataclass(frozen=True, slots=True)
class Traces:
    """What an attempt has left."""

    failures: tuple[Failure, ...] = ()
    endings: Mapping[int, Ending] = field(default_factory=dict)  # by rank
    lost: tuple[Lost, ...] = ()
    beats: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (pid, step) of its last heartbeat
    logs: Mapping[int, str] = field(default_factory=dict)  # rank -> what its log says last, of silent ones
    ended_at: Mapping[int, float] = field(default_factory=dict)  # rank -> when its ending was written, Unix seconds
    torchruns: tuple[TorchrunEnd, ...] = ()  # in the order of their ends
    begun: bool = True  # some rank has left a log, an ending or a heartbeat


@dataclass(frozen=True, slots=True)
class Cause:
    """The first end, from which the others follow."""

    manner: Manner
    code: int | None  # of the rank, where one ended by itself
    sentence: str
    asked_by: str = ""  # of a stop: what the rank heard


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
        return _of_torchrun(traces, places) or Cause(Manner.DONE, 0, "all ranks ended with exit code 0")
    given_up = _given_up_at(traces)
    first = min(failures, key=lambda failure: (_weight(failure, traces.endings, given_up), failure.time, failure.rank))
    if hung := _hung(first, traces, places, given_up):
        return hung
    ending = traces.endings.get(first.rank)
    who = f"rank {first.rank} on {places.node_of(first.rank)}"
    others = "; the others followed" if places.world > 1 else ""
    if ending is not None:
        if ending.code == STOPPED:
            return Cause(Manner.SAID, STOPPED, f"stopped on request: {ending.why}", _asked_by(traces.endings))
        return Cause(
            Manner.SAID, ending.code, f"{who} ended with code {ending.code}{_after(ending.step)}: {ending.why}{others}"
        )
    if first.exit_code < 0:
        step = _beaten_step(first, traces)
        sentence = f"{who} was killed by {signal_name(-first.exit_code)}{_after(step)}{others}"
        return Cause(Manner.KILLED, None, sentence)
    said = traces.logs.get(first.rank, "its log is empty")
    return Cause(Manner.SILENT, first.exit_code, f"{who} ended with exit code {first.exit_code}; {said}")


def _asked_by(endings: Mapping[int, Ending]) -> str:
    """`SIGTERM to rank 1`: of the ranks that were asked themselves; the others heard of it from them."""
    heard = {rank: match[1] for rank, ending in sorted(endings.items()) if (match := ASKED.search(ending.why))}
    signals = {rank: why for rank, why in heard.items() if why.startswith("SIG")}
    if signals:
        first = next(iter(signals.values()))
        return f"{first} to {ranks_in_words([rank for rank, why in signals.items() if why == first])}"
    return "the stop file" if any(why.endswith("is there") for why in heard.values()) else ""


def _of_torchrun(traces: Traces, places: Places) -> Cause | None:
    """No rank is known to have failed: what the launcher's own children say."""
    if not traces.torchruns:
        return None
    first = min(traces.torchruns, key=lambda end: end.code == 128 + signal.SIGTERM)  # that one was asked to
    where, said = places.node_of(places.ranks(first.index)[0]), first.said or "its log is empty"
    if first.code is None or first.code < 0:
        how = f"was killed by {signal_name(-first.code)}" if first.code else "did not end"
        return Cause(Manner.KILLED, None, f"torchrun on {where} {how}")
    if first.code == 128 + signal.SIGTERM:
        return Cause(Manner.ENDED_BY_US, None, f"torchrun on {where} was asked to end by SIGTERM")
    if traces.begun:
        return Cause(Manner.SILENT, first.code, f"torchrun on {where} failed with exit code {first.code}: {said}")
    return Cause(Manner.TORCHRUN, first.code, f"torchrun on {where} failed before any rank: {said}")


def _given_up_at(traces: Traces) -> float | None:
    """When the first rank said that a collective failed; by whichever clock told of it first."""
    seen = {failure.rank: failure.time for failure in traces.failures}
    times = [
        min(time for time in (traces.ended_at.get(rank), seen.get(rank)) if time is not None)
        for rank, ending in traces.endings.items()
        if _gave_up(ending) and (rank in traces.ended_at or rank in seen)
    ]
    return min(times, default=None)


def _gave_up(ending: Ending) -> bool:
    return ending.follows or (ending.code == FAILED and GAVE_UP.search(ending.why) is not None)


def _ended_late(failure: Failure, given_up: float | None) -> bool:
    """Killed so long after another gave up, that it was the clean-up: by torchrun or by the node program."""
    return failure.exit_code == -signal.SIGKILL and given_up is not None and failure.time > given_up + CLEAN_UP_SECONDS


def _hung(first: Failure, traces: Traces, places: Places, given_up: float | None) -> Cause | None:
    """Where `first` gave up on others, and these neither said a word nor left before they were killed."""
    ending = traces.endings.get(first.rank)
    if ending is None or not _gave_up(ending):
        return None
    seen = {failure.rank: failure for failure in traces.failures}
    hung = [
        rank
        for rank in range(places.world)
        if rank not in traces.endings and (rank not in seen or _ended_late(seen[rank], given_up))
    ]
    if not hung:
        return None
    known = [step for rank in hung if (step := traces.beats.get(rank, (0, None))[1]) is not None]
    who = ranks_in_words(hung)
    where = f"{who} on {places.node_of(hung[0])} does" if len(hung) == 1 else f"{who} do"
    had = f"{who} had to be ended"
    return Cause(
        Manner.HUNG,
        FAILED,
        f"{where} not answer (hung{_after(min(known, default=None))}); rank {first.rank} gave up on "
        f"{'it' if len(hung) == 1 else 'them'}: {ending.why}; {had}",
    )


def _unseen(traces: Traces) -> list[Failure]:
    """Ranks whose own word is all there is: their torchrun was ended itself, and reported nothing."""
    seen = {failure.rank for failure in traces.failures}
    later = max((failure.time for failure in traces.failures), default=0) + 1
    return [
        Failure(rank, ending.code, 0, int(traces.ended_at.get(rank, later)))
        for rank, ending in sorted(traces.endings.items())
        if ending.code and rank not in seen
    ]


def _weight(failure: Failure, endings: Mapping[int, Ending], given_up: float | None) -> int:
    ending = endings.get(failure.rank)
    if ending is not None:
        return {REFUSED: 1, STOPPED: 4}.get(ending.code, 3 if ending.follows else 2)
    if failure.exit_code == -signal.SIGTERM or _ended_late(failure, given_up):
        return 5
    return 0 if failure.exit_code < 0 else 2


def _beaten_step(failure: Failure, traces: Traces) -> int | None:
    """Of the heartbeat, where it is this very process's."""
    pid, step = traces.beats.get(failure.rank, (None, None))
    if pid == failure.pid:
        return step
    return max((ending.step for ending in traces.endings.values() if ending.step is not None), default=None)


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def unsaid(traces: Traces, world: int) -> str:
    """Ranks of which nothing is known: no ending, no failure."""
    known = set(traces.endings) | {failure.rank for failure in traces.failures}
    missing = [rank for rank in range(world) if rank not in known]
    return ranks_in_words(missing) if missing else ""
