"""What to do after an attempt: pure. Exit 0 of ranks proves nothing (a rank that ran out of data and exited with 0 lost
four runs elsewhere, parcae#12): only the last step's complete checkpoint does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from trainer.launch.endings import FAILED, INTERNAL, REFUSED, STOPPED, Cause, Manner


class Next(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    RETRY = "retry"
    FAILED = "failed"


EXIT_CODES: Final = {Next.DONE: 0, Next.REFUSED: 2, Next.STOPPED: 4, Next.INTERRUPTED: 130, Next.FAILED: 5}


@dataclass(frozen=True, slots=True)
class Result:
    """An attempt, as far as it matters for what comes next. Steps are steps done."""

    cause: Cause
    began_at: int
    reached: int  # the highest step that any rank has told of
    saved: int  # of the newest complete checkpoint; 0: none
    steps: int | None  # of the whole job; None: no rank came far enough to say
    interrupted: bool  # the user would not wait for the save
    again: bool = False  # the attempt before ended in the same manner
    asked_by: str = ""  # whose stop it was, where the launcher knows; else the cause tells


@dataclass(frozen=True, slots=True)
class Decision:
    next: Next
    why: str

    @property
    def line(self) -> str:
        return f"{self.next}{' by ' if self.next is Next.STOPPED else ': '}{self.why}"


def decide(result: Result, retries_left: int) -> Decision:
    cause = result.cause
    if result.steps is not None and result.saved >= result.steps:
        note = "" if cause.manner is Manner.DONE else f"; afterwards {cause.sentence}"
        return Decision(Next.DONE, f"all {result.steps:,} steps are done and saved{note}")
    if result.interrupted:
        return Decision(Next.INTERRUPTED, f"ended at once, as asked; {_saved(result)}")
    if cause.code == REFUSED:
        return Decision(Next.REFUSED, f"{cause.sentence}; a new attempt would be refused too")
    if cause.code == STOPPED and cause.manner is Manner.SAID:
        return Decision(Next.STOPPED, _stopped(result))
    if cause.manner is Manner.DONE:
        cause = Cause(cause.manner, FAILED, f"{cause.sentence}, and the last step is not saved")
    if cause.manner is Manner.TORCHRUN and result.again:
        return Decision(Next.FAILED, f"{cause.sentence}. So did the attempt before: a new one would end the same way")
    no_step = max(result.reached, result.saved) <= result.began_at
    if no_step and (cause.manner is Manner.SILENT or cause.code == INTERNAL):
        return Decision(Next.FAILED, f"{cause.sentence}. No step was done: a new attempt would end the same way")
    if retries_left <= 0:
        return Decision(Next.FAILED, f"{cause.sentence}; no retries left, {_saved(result)}")
    return Decision(Next.RETRY, cause.sentence)


def _stopped(result: Result) -> str:
    """By whom, where, what follows: `SIGTERM at step 56 of 60, saved; the same command goes on from there`."""
    by = result.asked_by or result.cause.asked_by or "a request"
    at = f"{by} at step {result.reached:,}" + ("" if result.steps is None else f" of {result.steps:,}")
    if not result.saved:
        return f"{at}, nothing is saved; the same command begins anew"
    kept = "saved" if result.saved >= result.reached else f"saved up to step {result.saved:,}"
    return f"{at}, {kept}; the same command goes on from there"


def _saved(result: Result) -> str:
    of = "" if result.steps is None else f" of {result.steps:,}"
    return f"saved up to step {result.saved:,}{of}" if result.saved else "nothing is saved"


def wait_seconds(first: float, retry: int) -> float:
    """Before retry 1, 2, ...: doubled each time, at most ten minutes (or the first, where that is longer)."""
    return float(min(first * 2 ** min(retry - 1, 30), max(first, 600.0)))
