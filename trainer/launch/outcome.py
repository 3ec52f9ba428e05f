"""How an attempt ended and what to do next. Pure: evidence in, a sentence and a decision out.

torchrun names, for each node, the ranks that it saw fail before it ended the rest. A rank states its own reason in its
exit file, unless it was killed. Neither is enough to find the rank that failed first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.trainer.formatting import format_all, format_rank_list
from wattwatch.trainer.launch.links import LostNode
from wattwatch.trainer.launch.placement import Placement
from wattwatch.trainer.launch.processes import signal_name
from wattwatch.trainer.run_directory import RankExit, RankExitCode

# A rank that is killed this long after another one failed on a collective was killed in the cleanup: torchrun sends
# SIGTERM, waits 30 s, then sends SIGKILL. If a rank is killed first, its peers notice within a second; the clocks of
# two nodes may differ by a few more.
CLEANUP_SECONDS: Final = 10.0
STOP_REASON: Final = re.compile(r"asked to stop \((.+?)\)")  # in the exit files, see wattwatch.trainer.train.loop
STOP_FILE_REASON: Final = "stop file"  # how the reason begins if it was RUN/stop, see wattwatch.trainer.train.stopping
COLLECTIVE_FAILURE: Final = re.compile(r"collective|tim(ed|e)[ -]?out", re.IGNORECASE)
MAX_RETRY_DELAY_SECONDS: Final = 600.0


class OutcomeKind(StrEnum):
    DONE = "done"  # all ranks exited with 0
    NODE_LOST = "node lost"
    TORCHRUN = "torchrun"  # torchrun itself failed, before any rank started
    HUNG = "hung"  # a rank did not respond, and the others failed waiting for it
    KILLED = "killed"
    STATED = "stated"  # the rank left its reason in its exit file
    SILENT = "silent"  # an exit code and no reason
    ENDED_BY_US = "ended by us"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that torchrun saw fail, before it ended the other ranks of the node."""

    rank: int
    exit_code: int  # or minus the signal
    pid: int
    time: int  # Unix seconds, by the node's clock


@dataclass(frozen=True, slots=True)
class TorchrunExit:
    """A torchrun that failed without naming a rank."""

    index: int  # of the node
    code: int | None  # or minus the signal; None: it did not end
    error: str | None  # the last error in its log


@dataclass(frozen=True, slots=True)
class AttemptEvidence:
    """Everything that an attempt left behind."""

    failures: tuple[RankFailure, ...] = ()
    exits: Mapping[int, RankExit] = field(default_factory=dict)  # exit files, by rank
    lost: tuple[LostNode, ...] = ()
    heartbeats: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (pid, step) of its last heartbeat
    logs: Mapping[int, str] = field(default_factory=dict)  # rank -> end of its log, for ranks without an exit file
    exit_times: Mapping[int, float] = field(default_factory=dict)  # rank -> Unix time of its exit file
    torchruns: tuple[TorchrunExit, ...] = ()  # in the order in which they ended
    begun: bool = True  # at least one rank left a log, an exit file or a heartbeat


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The first failure, of which the others are consequences."""

    kind: OutcomeKind
    code: int | None  # of the rank, if one exited by itself
    sentence: str
    stopped_by: str = ""  # for a stop on request: what the ranks were asked by


def determine_outcome(evidence: AttemptEvidence, placement: Placement) -> AttemptOutcome:
    """The outcome in one sentence.

    A lost node comes before a killed rank, and that before a rank with a reason: the peers of the first two fail within
    a second themselves. A rank that was asked to exit (by SIGTERM, code 4) is the cause only if there is no other.
    """
    if evidence.lost:
        nodes = ", ".join(placement.nodes[lost.index] for lost in evidence.lost)
        verb = "was" if len(evidence.lost) == 1 else "were"
        return AttemptOutcome(OutcomeKind.NODE_LOST, None, f"{nodes} {verb} lost: {evidence.lost[0].why}")
    failures = [*evidence.failures, *_failures_only_in_exit_files(evidence)]
    if not failures:
        return _torchrun_outcome(evidence, placement) or AttemptOutcome(
            OutcomeKind.DONE, 0, "all ranks exited with code 0"
        )
    peer_failure_time = _first_peer_failure_time(evidence)
    first = min(
        failures,
        key=lambda failure: (_precedence(failure, evidence.exits, peer_failure_time), failure.time, failure.rank),
    )
    if hang := _hang_outcome(first, evidence, placement, peer_failure_time):
        return hang
    rank_exit = evidence.exits.get(first.rank)
    rank = f"rank {first.rank} on {placement.node_of(first.rank)}"
    others = "; the other ranks failed as a result" if placement.world > 1 else ""
    if rank_exit is not None:
        if rank_exit.code == RankExitCode.STOPPED:
            sentence = f"stopped on request: {rank_exit.why}"
            return AttemptOutcome(
                OutcomeKind.STATED, RankExitCode.STOPPED, sentence, _stop_requested_by(evidence.exits)
            )
        sentence = f"{rank} exited with code {rank_exit.code}{_after_step(rank_exit.step)}: {rank_exit.why}{others}"
        return AttemptOutcome(OutcomeKind.STATED, rank_exit.code, sentence)
    if first.exit_code < 0:
        step = _last_heartbeat_step(first, evidence)
        sentence = f"{rank} was killed by {signal_name(-first.exit_code)}{_after_step(step)}{others}"
        return AttemptOutcome(OutcomeKind.KILLED, None, sentence)
    log = evidence.logs.get(first.rank, "its log is empty")
    return AttemptOutcome(OutcomeKind.SILENT, first.exit_code, f"{rank} exited with code {first.exit_code}; {log}")


def _stop_requested_by(exits: Mapping[int, RankExit]) -> str:
    """`SIGTERM to rank 1`. The other ranks only state that another rank was asked."""
    reasons = {rank: match[1] for rank, each in sorted(exits.items()) if (match := STOP_REASON.search(each.why))}
    signals = {rank: reason for rank, reason in reasons.items() if reason.startswith("SIG")}
    if signals:
        first = next(iter(signals.values()))
        return f"{first} to {format_rank_list([rank for rank, reason in signals.items() if reason == first])}"
    return "the stop file" if any(reason.startswith(STOP_FILE_REASON) for reason in reasons.values()) else ""


def _torchrun_outcome(evidence: AttemptEvidence, placement: Placement) -> AttemptOutcome | None:
    """No rank is known to have failed: how the torchruns ended."""
    if not evidence.torchruns:
        return None
    # Our torchrun exits with this code when it was terminated; it is then a consequence, if any other one failed.
    sigterm_code = 128 + signal.SIGTERM
    first = min(evidence.torchruns, key=lambda each: each.code == sigterm_code)  # that one was terminated by us
    node, error = placement.node_of(placement.ranks(first.index)[0]), first.error or "its log is empty"
    if first.code is None or first.code < 0:
        how = f"was killed by {signal_name(-first.code)}" if first.code else "did not end"
        return AttemptOutcome(OutcomeKind.KILLED, None, f"torchrun on {node} {how}")
    if first.code == sigterm_code:
        return AttemptOutcome(OutcomeKind.ENDED_BY_US, None, f"torchrun on {node} was terminated by SIGTERM")
    if evidence.begun:
        sentence = f"torchrun on {node} failed with exit code {first.code}: {error}"
        return AttemptOutcome(OutcomeKind.SILENT, first.code, sentence)
    sentence = f"torchrun on {node} failed before any rank started: {error}"
    return AttemptOutcome(OutcomeKind.TORCHRUN, first.code, sentence)


def _first_peer_failure_time(evidence: AttemptEvidence) -> float | None:
    """When the first rank reported that a collective failed: the earlier of its exit file's and torchrun's time."""
    seen = {failure.rank: failure.time for failure in evidence.failures}
    times = [
        min(time for time in (evidence.exit_times.get(rank), seen.get(rank)) if time is not None)
        for rank, rank_exit in evidence.exits.items()
        if _blames_peer(rank_exit) and (rank in evidence.exit_times or rank in seen)
    ]
    return min(times, default=None)


def _blames_peer(rank_exit: RankExit) -> bool:
    """The rank failed on a collective, so the cause is probably another rank."""
    return rank_exit.follows or (
        rank_exit.code == RankExitCode.FAILED and COLLECTIVE_FAILURE.search(rank_exit.why) is not None
    )


def _killed_in_cleanup(failure: RankFailure, peer_failure_time: float | None) -> bool:
    """Killed so long after a peer failed that it was torchrun or the node program who killed it."""
    return (
        failure.exit_code == -signal.SIGKILL
        and peer_failure_time is not None
        and failure.time > peer_failure_time + CLEANUP_SECONDS
    )


def _hang_outcome(
    first: RankFailure, evidence: AttemptEvidence, placement: Placement, peer_failure_time: float | None
) -> AttemptOutcome | None:
    """`first` failed waiting for other ranks, and some of them neither left an exit file nor exited by themselves."""
    rank_exit = evidence.exits.get(first.rank)
    if rank_exit is None or not _blames_peer(rank_exit):
        return None
    seen = {failure.rank: failure for failure in evidence.failures}
    hung = [
        rank
        for rank in range(placement.world)
        if rank not in evidence.exits and (rank not in seen or _killed_in_cleanup(seen[rank], peer_failure_time))
    ]
    if not hung:
        return None
    steps = [step for rank in hung if (step := evidence.heartbeats.get(rank, (0, None))[1]) is not None]
    ranks = format_rank_list(hung)
    on_node = f" on {placement.node_of(hung[0])}" if len(hung) == 1 else ""
    return AttemptOutcome(
        OutcomeKind.HUNG,
        RankExitCode.FAILED,
        f"{ranks}{on_node} hung{_after_step(min(steps, default=None))} and had to be killed; rank {first.rank} failed "
        f"while waiting for {'it' if len(hung) == 1 else 'them'}: {rank_exit.why}",
    )


def _failures_only_in_exit_files(evidence: AttemptEvidence) -> list[RankFailure]:
    """Ranks with an error in their exit file whose torchrun did not report them: it was ended itself."""
    seen = {failure.rank for failure in evidence.failures}
    # Without a time of its own a rank comes after those that torchrun saw fail.
    later = max((failure.time for failure in evidence.failures), default=0) + 1
    return [
        RankFailure(rank, rank_exit.code, 0, int(evidence.exit_times.get(rank, later)))
        for rank, rank_exit in sorted(evidence.exits.items())
        if rank_exit.code and rank not in seen
    ]


def _precedence(failure: RankFailure, exits: Mapping[int, RankExit], peer_failure_time: float | None) -> int:
    """Lower is more likely the first failure. Times alone do not decide: the nodes' clocks differ.

    0 killed; 1 refused; 2 failed by itself; 3 failed on a collective; 4 asked to stop; 5 ended by torchrun or by us.
    """
    rank_exit = exits.get(failure.rank)
    if rank_exit is not None:
        by_code: dict[int, int] = {RankExitCode.REFUSED: 1, RankExitCode.STOPPED: 4}
        return by_code.get(rank_exit.code, 3 if rank_exit.follows else 2)
    if failure.exit_code == -signal.SIGTERM or _killed_in_cleanup(failure, peer_failure_time):
        return 5
    return 0 if failure.exit_code < 0 else 2


def _last_heartbeat_step(failure: RankFailure, evidence: AttemptEvidence) -> int | None:
    """From the heartbeat, if this very process wrote it; else the highest step that any exit file names."""
    pid, step = evidence.heartbeats.get(failure.rank, (None, None))
    if pid == failure.pid:
        return step
    return max((each.step for each in evidence.exits.values() if each.step is not None), default=None)


def _after_step(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def ranks_without_evidence(evidence: AttemptEvidence, world: int) -> str:
    """Ranks that left no exit file and were not reported by torchrun, as text; "" if there are none."""
    known = set(evidence.exits) | {failure.rank for failure in evidence.failures}
    missing = [rank for rank in range(world) if rank not in known]
    return format_rank_list(missing) if missing else ""


# What to do next


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
    NextAction.FAILED: 5,
    NextAction.INTERRUPTED: 130,
}


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The facts that decide what comes next. Steps are numbers of steps done."""

    outcome: AttemptOutcome
    began_at: int
    reached: int  # the highest step in any exit file
    saved: int  # step of the newest complete checkpoint; 0: none
    steps: int | None  # of the whole job; None: no rank got far enough to record it
    interrupted: bool  # the user did not wait for the save
    same_as_before: bool = False  # the previous attempt had an outcome of the same kind
    stopped_by: str = ""  # who requested the stop, if the launcher knows; else the outcome may say


@dataclass(frozen=True, slots=True)
class LaunchDecision:
    action: NextAction
    why: str

    @property
    def line(self) -> str:
        return f"{self.action}{' by ' if self.action is NextAction.STOPPED else ': '}{self.why}"


def decide_next(result: AttemptResult, retries_left: int) -> LaunchDecision:
    """The first rule that applies decides; the reason goes to the user."""
    outcome = result.outcome
    # Done is the last step's complete checkpoint, never the ranks' exit codes: ranks that ran out of data and exited
    # with 0 have cost others four runs (parcae#12). Nor does a crash after that checkpoint undo the work.
    if result.steps is not None and result.saved >= result.steps:
        note = "" if outcome.kind is OutcomeKind.DONE else f"; after that: {outcome.sentence}"
        return LaunchDecision(NextAction.DONE, f"{format_all(result.steps, 'step')} done and saved{note}")
    if result.interrupted:
        why = f"the ranks were ended without another save, as requested; {_saved_summary(result)}"
        return LaunchDecision(NextAction.INTERRUPTED, why)
    if outcome.code == RankExitCode.REFUSED:
        return LaunchDecision(NextAction.REFUSED, f"{outcome.sentence}; a new attempt would be refused too")
    if outcome.code == RankExitCode.STOPPED and outcome.kind is OutcomeKind.STATED:
        return LaunchDecision(NextAction.STOPPED, _stop_summary(result))
    if outcome.kind is OutcomeKind.DONE:
        sentence = f"{outcome.sentence}, but the last step is not saved"
        outcome = AttemptOutcome(outcome.kind, RankExitCode.FAILED, sentence)
    # Once more may help, since a port may be in use for a moment; twice the same will not change by itself.
    if outcome.kind is OutcomeKind.TORCHRUN and result.same_as_before:
        why = f"{outcome.sentence}. The previous attempt failed in the same way, so another attempt would fail too"
        return LaunchDecision(NextAction.FAILED, why)
    # A bug or a bad installation that ends a rank before its first step does so in every attempt.
    no_step = max(result.reached, result.saved) <= result.began_at
    if no_step and (outcome.kind is OutcomeKind.SILENT or outcome.code == RankExitCode.INTERNAL_ERROR):
        why = f"{outcome.sentence}. No step was completed, so another attempt would probably fail in the same way"
        return LaunchDecision(NextAction.FAILED, why)
    if retries_left <= 0:
        return LaunchDecision(NextAction.FAILED, f"{outcome.sentence}; no retries are left; {_saved_summary(result)}")
    return LaunchDecision(NextAction.RETRY, outcome.sentence)


def _stop_summary(result: AttemptResult) -> str:
    """`SIGTERM at step 56 of 60, which is saved; run the same command to continue`."""
    by = result.stopped_by or result.outcome.stopped_by or "a request"
    at = f"{by} at step {result.reached:,}" + ("" if result.steps is None else f" of {result.steps:,}")
    if not result.saved:
        return f"{at}; nothing is saved, so the same command will start from the beginning"
    saved = "which is saved" if result.saved >= result.reached else f"but the last saved step is {result.saved:,}"
    return f"{at}, {saved}; run the same command to continue"


def _saved_summary(result: AttemptResult) -> str:
    of = "" if result.steps is None else f" of {result.steps:,}"
    return f"the last saved step is {result.saved:,}{of}" if result.saved else "nothing is saved"


def retry_delay_seconds(first: float, retry: int) -> float:
    """Delay before retry 1, 2, ...: doubled each time, up to ten minutes (or `first`, if that is longer)."""
    return float(min(first * 2 ** min(retry - 1, 30), max(first, MAX_RETRY_DELAY_SECONDS)))
