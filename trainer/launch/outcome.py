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

from wattwatch.trainer.launch.links import LostNode
from wattwatch.trainer.launch.placement import Placement
from wattwatch.trainer.launch.processes import signal_name
from wattwatch.trainer.ranks import format_rank_list
from wattwatch.trainer.run_directory import RankExit

EXIT_REFUSED: Final = 2  # exit codes of `wattwatch-train run`
EXIT_INTERNAL_ERROR: Final = 3
EXIT_STOPPED: Final = 4
EXIT_FAILED: Final = 5
# Between a rank that gives up and the SIGKILL of one that does not leave: torchrun waits for 30 s after SIGTERM. A rank
# that somebody else killed is missed by its peers within a second, give or take what the clocks of two nodes differ.
CLEANUP_SECONDS: Final = 10.0
STOP_REASON: Final = re.compile(r"asked to stop \((.+?)\)")
COLLECTIVE_FAILURE: Final = re.compile(r"collective|tim(ed|e)[ -]?out", re.IGNORECASE)


class OutcomeKind(StrEnum):
    DONE = "done"  # all ranks said 0
    NODE_LOST = "node lost"
    TORCHRUN = "torchrun"  # it failed itself, and no rank ever began
    HUNG = "hung"  # a rank did not answer, and the others gave up on it
    KILLED = "killed"
    SAID = "said"  # the rank left its reason
    SILENT = "silent"  # an exit code and nothing else
    ENDED_BY_US = "ended by us"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that torchrun saw fail first on its node."""

    rank: int
    exit_code: int  # minus the signal
    pid: int
    time: int  # seconds since 1970, by the node's clock


@dataclass(frozen=True, slots=True)
class TorchrunExit:
    """Of a torchrun that ended with an error, and named no rank."""

    index: int  # of the node
    code: int | None  # minus the signal
    said: str | None  # the last error in its log


@dataclass(frozen=True, slots=True)
class AttemptEvidence:
    """What an attempt has left."""

    failures: tuple[RankFailure, ...] = ()
    endings: Mapping[int, RankExit] = field(default_factory=dict)  # by rank
    lost: tuple[LostNode, ...] = ()
    beats: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (pid, step) of its last heartbeat
    logs: Mapping[int, str] = field(default_factory=dict)  # rank -> what its log says last, of silent ones
    ended_at: Mapping[int, float] = field(default_factory=dict)  # rank -> when its ending was written, Unix seconds
    torchruns: tuple[TorchrunExit, ...] = ()  # in the order of their ends
    begun: bool = True  # some rank has left a log, an ending or a heartbeat


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The first end, from which the others follow."""

    manner: OutcomeKind
    code: int | None  # of the rank, where one ended by itself
    sentence: str
    asked_by: str = ""  # of a stop: what the rank heard


def determine_outcome(traces: AttemptEvidence, places: Placement) -> AttemptOutcome:
    """A lost node before a killed rank, that before one with a reason: peers notice both within a second, and fail
    themselves. A rank that was asked to leave (SIGTERM, code 4) is never the cause while there is another."""
    if traces.lost:
        nodes = ", ".join(places.nodes[lost.index] for lost in traces.lost)
        return AttemptOutcome(
            OutcomeKind.NODE_LOST,
            None,
            f"{nodes} {'was' if len(traces.lost) == 1 else 'were'} lost: {traces.lost[0].why}",
        )
    failures = [*traces.failures, *_failures_only_in_exit_files(traces)]
    if not failures:
        return _torchrun_outcome(traces, places) or AttemptOutcome(
            OutcomeKind.DONE, 0, "all ranks ended with exit code 0"
        )
    given_up = _first_give_up_time(traces)
    first = min(
        failures, key=lambda failure: (_precedence(failure, traces.endings, given_up), failure.time, failure.rank)
    )
    if hung := _hang_outcome(first, traces, places, given_up):
        return hung
    ending = traces.endings.get(first.rank)
    who = f"rank {first.rank} on {places.node_of(first.rank)}"
    others = "; the others followed" if places.world > 1 else ""
    if ending is not None:
        if ending.code == EXIT_STOPPED:
            return AttemptOutcome(
                OutcomeKind.SAID, EXIT_STOPPED, f"stopped on request: {ending.why}", _stop_requested_by(traces.endings)
            )
        return AttemptOutcome(
            OutcomeKind.SAID,
            ending.code,
            f"{who} ended with code {ending.code}{_after_step(ending.step)}: {ending.why}{others}",
        )
    if first.exit_code < 0:
        step = _last_heartbeat_step(first, traces)
        sentence = f"{who} was killed by {signal_name(-first.exit_code)}{_after_step(step)}{others}"
        return AttemptOutcome(OutcomeKind.KILLED, None, sentence)
    said = traces.logs.get(first.rank, "its log is empty")
    return AttemptOutcome(OutcomeKind.SILENT, first.exit_code, f"{who} ended with exit code {first.exit_code}; {said}")


def _stop_requested_by(endings: Mapping[int, RankExit]) -> str:
    """`SIGTERM to rank 1`: of the ranks that were asked themselves; the others heard of it from them."""
    heard = {rank: match[1] for rank, ending in sorted(endings.items()) if (match := STOP_REASON.search(ending.why))}
    signals = {rank: why for rank, why in heard.items() if why.startswith("SIG")}
    if signals:
        first = next(iter(signals.values()))
        return f"{first} to {format_rank_list([rank for rank, why in signals.items() if why == first])}"
    return "the stop file" if any(why.endswith("is there") for why in heard.values()) else ""


def _torchrun_outcome(traces: AttemptEvidence, places: Placement) -> AttemptOutcome | None:
    """No rank is known to have failed: what the launcher's own children say."""
    if not traces.torchruns:
        return None
    first = min(traces.torchruns, key=lambda end: end.code == 128 + signal.SIGTERM)  # that one was asked to
    where, said = places.node_of(places.ranks(first.index)[0]), first.said or "its log is empty"
    if first.code is None or first.code < 0:
        how = f"was killed by {signal_name(-first.code)}" if first.code else "did not end"
        return AttemptOutcome(OutcomeKind.KILLED, None, f"torchrun on {where} {how}")
    if first.code == 128 + signal.SIGTERM:
        return AttemptOutcome(OutcomeKind.ENDED_BY_US, None, f"torchrun on {where} was asked to end by SIGTERM")
    if traces.begun:
        return AttemptOutcome(
            OutcomeKind.SILENT, first.code, f"torchrun on {where} failed with exit code {first.code}: {said}"
        )
    return AttemptOutcome(OutcomeKind.TORCHRUN, first.code, f"torchrun on {where} failed before any rank: {said}")


def _first_give_up_time(traces: AttemptEvidence) -> float | None:
    """When the first rank said that a collective failed; by whichever clock told of it first."""
    seen = {failure.rank: failure.time for failure in traces.failures}
    times = [
        min(time for time in (traces.ended_at.get(rank), seen.get(rank)) if time is not None)
        for rank, ending in traces.endings.items()
        if _blames_peer(ending) and (rank in traces.ended_at or rank in seen)
    ]
    return min(times, default=None)


def _blames_peer(ending: RankExit) -> bool:
    return ending.follows or (ending.code == EXIT_FAILED and COLLECTIVE_FAILURE.search(ending.why) is not None)


def _killed_in_cleanup(failure: RankFailure, given_up: float | None) -> bool:
    """Killed so long after another gave up, that it was the clean-up: by torchrun or by the node program."""
    return failure.exit_code == -signal.SIGKILL and given_up is not None and failure.time > given_up + CLEANUP_SECONDS


def _hang_outcome(
    first: RankFailure, traces: AttemptEvidence, places: Placement, given_up: float | None
) -> AttemptOutcome | None:
    """Where `first` gave up on others, and these neither said a word nor left before they were killed."""
    ending = traces.endings.get(first.rank)
    if ending is None or not _blames_peer(ending):
        return None
    seen = {failure.rank: failure for failure in traces.failures}
    hung = [
        rank
        for rank in range(places.world)
        if rank not in traces.endings and (rank not in seen or _killed_in_cleanup(seen[rank], given_up))
    ]
    if not hung:
        return None
    known = [step for rank in hung if (step := traces.beats.get(rank, (0, None))[1]) is not None]
    who = format_rank_list(hung)
    where = f"{who} on {places.node_of(hung[0])} does" if len(hung) == 1 else f"{who} do"
    had = f"{who} had to be ended"
    return AttemptOutcome(
        OutcomeKind.HUNG,
        EXIT_FAILED,
        f"{where} not answer (hung{_after_step(min(known, default=None))}); rank {first.rank} gave up on "
        f"{'it' if len(hung) == 1 else 'them'}: {ending.why}; {had}",
    )


def _failures_only_in_exit_files(traces: AttemptEvidence) -> list[RankFailure]:
    """Ranks whose own word is all there is: their torchrun was ended itself, and reported nothing."""
    seen = {failure.rank for failure in traces.failures}
    later = max((failure.time for failure in traces.failures), default=0) + 1
    return [
        RankFailure(rank, ending.code, 0, int(traces.ended_at.get(rank, later)))
        for rank, ending in sorted(traces.endings.items())
        if ending.code and rank not in seen
    ]


def _precedence(failure: RankFailure, endings: Mapping[int, RankExit], given_up: float | None) -> int:
    ending = endings.get(failure.rank)
    if ending is not None:
        return {EXIT_REFUSED: 1, EXIT_STOPPED: 4}.get(ending.code, 3 if ending.follows else 2)
    if failure.exit_code == -signal.SIGTERM or _killed_in_cleanup(failure, given_up):
        return 5
    return 0 if failure.exit_code < 0 else 2


def _last_heartbeat_step(failure: RankFailure, traces: AttemptEvidence) -> int | None:
    """Of the heartbeat, where it is this very process's."""
    pid, step = traces.beats.get(failure.rank, (None, None))
    if pid == failure.pid:
        return step
    return max((ending.step for ending in traces.endings.values() if ending.step is not None), default=None)


def _after_step(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def ranks_without_evidence(traces: AttemptEvidence, world: int) -> str:
    """Ranks of which nothing is known: no ending, no failure."""
    known = set(traces.endings) | {failure.rank for failure in traces.failures}
    missing = [rank for rank in range(world) if rank not in known]
    return format_rank_list(missing) if missing else ""


# What to do after an attempt: pure. Exit 0 of ranks proves nothing (a rank that ran out of data and exited with 0 lost
# four runs elsewhere, parcae#12): only the last step's complete checkpoint does.


class NextAction(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    RETRY = "retry"
    FAILED = "failed"


EXIT_CODES: Final = {
    NextAction.DONE: 0,
    NextAction.REFUSED: 2,
    NextAction.STOPPED: 4,
    NextAction.INTERRUPTED: 130,
    NextAction.FAILED: 5,
}


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """An attempt, as far as it matters for what comes next. Steps are steps done."""

    cause: AttemptOutcome
    began_at: int
    reached: int  # the highest step that any rank has told of
    saved: int  # of the newest complete checkpoint; 0: none
    steps: int | None  # of the whole job; None: no rank came far enough to say
    interrupted: bool  # the user would not wait for the save
    again: bool = False  # the attempt before ended in the same manner
    asked_by: str = ""  # whose stop it was, where the launcher knows; else the cause tells


@dataclass(frozen=True, slots=True)
class LaunchDecision:
    next: NextAction
    why: str

    @property
    def line(self) -> str:
        return f"{self.next}{' by ' if self.next is NextAction.STOPPED else ': '}{self.why}"


def decide_next(result: AttemptResult, retries_left: int) -> LaunchDecision:
    cause = result.cause
    if result.steps is not None and result.saved >= result.steps:
        note = "" if cause.manner is OutcomeKind.DONE else f"; afterwards {cause.sentence}"
        return LaunchDecision(NextAction.DONE, f"all {result.steps:,} steps are done and saved{note}")
    if result.interrupted:
        return LaunchDecision(NextAction.INTERRUPTED, f"ended at once, as asked; {_saved_summary(result)}")
    if cause.code == EXIT_REFUSED:
        return LaunchDecision(NextAction.REFUSED, f"{cause.sentence}; a new attempt would be refused too")
    if cause.code == EXIT_STOPPED and cause.manner is OutcomeKind.SAID:
        return LaunchDecision(NextAction.STOPPED, _stop_summary(result))
    if cause.manner is OutcomeKind.DONE:
        cause = AttemptOutcome(cause.manner, EXIT_FAILED, f"{cause.sentence}, and the last step is not saved")
    if cause.manner is OutcomeKind.TORCHRUN and result.again:
        return LaunchDecision(
            NextAction.FAILED, f"{cause.sentence}. So did the attempt before: a new one would end the same way"
        )
    no_step = max(result.reached, result.saved) <= result.began_at
    if no_step and (cause.manner is OutcomeKind.SILENT or cause.code == EXIT_INTERNAL_ERROR):
        return LaunchDecision(
            NextAction.FAILED, f"{cause.sentence}. No step was done: a new attempt would end the same way"
        )
    if retries_left <= 0:
        return LaunchDecision(NextAction.FAILED, f"{cause.sentence}; no retries left, {_saved_summary(result)}")
    return LaunchDecision(NextAction.RETRY, cause.sentence)


def _stop_summary(result: AttemptResult) -> str:
    """By whom, where, what follows: `SIGTERM at step 56 of 60, saved; the same command goes on from there`."""
    by = result.asked_by or result.cause.asked_by or "a request"
    at = f"{by} at step {result.reached:,}" + ("" if result.steps is None else f" of {result.steps:,}")
    if not result.saved:
        return f"{at}, nothing is saved; the same command begins anew"
    kept = "saved" if result.saved >= result.reached else f"saved up to step {result.saved:,}"
    return f"{at}, {kept}; the same command goes on from there"


def _saved_summary(result: AttemptResult) -> str:
    of = "" if result.steps is None else f" of {result.steps:,}"
    return f"saved up to step {result.saved:,}{of}" if result.saved else "nothing is saved"


def retry_delay_seconds(first: float, retry: int) -> float:
    """Before retry 1, 2, ...: doubled each time, at most ten minutes (or the first, where that is longer)."""
    return float(min(first * 2 ** min(retry - 1, 30), max(first, 600.0)))
