"""One alert from its opening to its closing, and how each look moves it on. Pure: time is an argument.

An episode is one run of one finding (job, alert, scope): it gets a new id each time it opens. `decisions.py` says
whether to tell, of what was told last and what is true now; `advance` gives the episode after that decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final

from wattwatch.watcher.detection.model import AlertName, Finding, Severity, Suspect
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

# Opened again within this time: the message says so.
REOPEN_WINDOW_SECONDS: Final = 600.0

# What stops a job. It is never kept quiet without a word: whoever was told of its cause is told that it follows.
JOB_STOPPING: Final = frozenset({AlertName.JOB_HUNG, AlertName.JOB_CRASHED, AlertName.CHECKPOINT_STALLED})

SEVERITY_RANK: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class NoticeKind(StrEnum):
    """What a message announces."""

    OPENED = "opened"
    RAISED = "raised"
    DIAGNOSED = "diagnosed"
    REMINDER = "reminder"
    CLOSED = "closed"


class NotifyReason(Enum):
    """Why something was told, or was not. The value is a sentence for people."""

    OPENED = "It is new."
    OPENED_AGAIN = "It is back: it was over for less than ten minutes."
    OUTLIVED_CAUSE = "Its cause is over and it remains."
    CONFIRMED = "It was a suspicion before; now it is confirmed."
    GRAVER = "It is more severe than when it was last told."
    FOLLOWED = "Something critical follows from it since it was last told."
    CONCERNS_MORE = "Something follows from it that concerns you."
    DIAGNOSED = "It is known now who holds the job up."
    LOOKED_INTO = "It was looked into, and nothing proves yet who holds the job up."
    REMINDER_DUE = "It is still open."
    CLEARED = "The condition is no longer there."
    REPLACED = "It did not get better: another alert of the job has taken its place."
    NOT_KNOWN = "It is not known any more: since the watcher has restarted, nothing was seen that says it is over."
    JOB_ENDED = "The job has completed."
    NOT_WATCHED = "The job is no longer in the configuration; nothing is known of its state."
    UNCHANGED = "It was told and nothing changed."
    SUPPRESSED = "A root cause that is told explains it."
    CAUSE_JUST_OVER = "Its cause has just gone; it may go with it."
    CLEAR_PENDING = "It was not seen in this look, which is too short a time to call it over."
    SETTLING = "The watcher has restarted and has not yet seen that it is over."
    CLEARED_UNTOLD = "It is over and nobody had been told of it."
    NEVER_TRUE = "There is nothing and there was nothing."
    ENDED_BEFORE = "It concerns a job that has completed."


@dataclass(frozen=True, slots=True)
class EpisodeDiagnosis:
    """What was found out about an open episode, as people are told it."""

    words: str  # one sentence: who, where, in what
    conclusive: bool
    advice: str = ""  # what to do next, once this is known

    def __str__(self) -> str:
        return f"{self.words.rstrip('. ')} ({'conclusive' if self.conclusive else 'not proved'})"


@dataclass(frozen=True, slots=True)
class NotifiedState:
    """What the receivers know. None of it is taken back: an episode's severity only rises."""

    notices: int  # messages so far; numbers them
    seconds: float  # when the last one was enqueued
    severity: Severity
    confirmed: bool
    receivers: tuple[str, ...]  # who was told, and hears of the end
    suspects: tuple[Suspect, ...]  # as in the last firing message: the closing one carries the same labels
    followers: tuple[str, ...] = ()  # the grave ones that were named in any message
    diagnosis: EpisodeDiagnosis | None = None  # as in the last message
    diagnosed: bool = False  # a message of its own has told one: there is no second


@dataclass(frozen=True, slots=True)
class Episode:
    """Times in seconds of the clock that `decide` is given, unless they say wall."""

    id: str
    finding: Finding  # as it was last seen
    began_seconds: float  # when the condition began
    opened_wall_seconds: float
    detection_seconds: float  # from the beginning of the condition to the opening
    counted_seconds: float  # until when the cost is counted
    gpu_seconds_lost: float = 0.0
    joules_lost: float = 0.0  # only of looks in which it was seen: less than the seconds tell, never more
    severity: Severity = Severity.INFO  # the highest so far, of its own or of what follows from it
    confirmed: bool = False
    suppressed_by: str | None = None
    released_seconds: float | None = None  # when its root cause went; None while there is one or never was
    absent_seconds: float | None = None  # since when it was not seen; None while it is seen
    absent_looks: int = 0
    settling: bool = False  # loaded after a restart and not seen since
    reopenings: int = 0  # how often in a row it came back within AGAIN_SECONDS
    followers: tuple[str, ...] = ()  # what it keeps quiet, in words
    diagnosis: EpisodeDiagnosis | None = None  # the newest
    told: NotifiedState | None = None
    closed_wall_seconds: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.finding.key

    @property
    def advice(self) -> str:
        """What to do next: of who holds the job up, once that is known, else of the finding."""
        known = "" if self.diagnosis is None else self.diagnosis.advice
        return known or self.finding.advice

    def shifted(self, seconds: float, now: float = float("inf")) -> Episode:
        """The same on another clock. No time may lie after `now`: wall clocks are set back sometimes."""

        def shift(value: float) -> float:
            return min(value + seconds, now)

        def shift_or_none(value: float | None) -> float | None:
            return None if value is None else shift(value)

        return replace(
            self,
            began_seconds=shift(self.began_seconds),
            counted_seconds=shift(self.counted_seconds),
            released_seconds=shift_or_none(self.released_seconds),
            absent_seconds=shift_or_none(self.absent_seconds),
            finding=replace(self.finding, since_seconds=shift(self.finding.since_seconds)),
            told=None if self.told is None else replace(self.told, seconds=shift(self.told.seconds)),
        )


@dataclass(frozen=True, slots=True)
class PreviousEpisode:
    """When the same key closed last, told, and how often it had come back by then."""

    seconds: float
    reopenings: int


@dataclass(frozen=True, slots=True)
class EpisodeUpdate:
    """What one evaluation says of one key. Only for jobs that were judged: no news is not good news."""

    finding: Finding | None  # None: judged, and not there
    now: float
    wall: float
    cause: str | None = None  # the root cause that explains it, in words
    followers: tuple[Finding, ...] = ()  # what it explains: these lend it their severity
    job_ended: bool = False
    ending: PreviousEpisode | None = None  # of the last episode of the same key
    witness: RecoveryEvidence | None = None  # what is positively seen of the job
    successors: tuple[Finding, ...] = ()  # where it is not there: confirmed findings that have taken its place
    diagnosis: EpisodeDiagnosis | None = None  # of the open episode, where one has come
    newly_concerned: tuple[str, ...] = ()  # receivers not told yet, to whom its consequences would have been told


@dataclass(frozen=True, slots=True)
class NotifyDecision:
    reason: NotifyReason
    notice: NoticeKind | None = None
    closes: bool = False


def finding_severity(finding: Finding) -> Severity:
    """A suspicion is a warning at most, whatever it would be if it were confirmed."""
    if not finding.confirmed and SEVERITY_RANK[finding.severity] > SEVERITY_RANK[Severity.WARNING]:
        return Severity.WARNING
    return finding.severity


def effective_severity(finding: Finding, followers: tuple[Finding, ...] = ()) -> Severity:
    """Its own, or the gravest of what it keeps quiet: a critical consequence is never hidden behind a warning."""
    return max((finding_severity(each) for each in (finding, *followers)), key=SEVERITY_RANK.__getitem__)


def unreported_job_stops(told: NotifiedState | None, look: EpisodeUpdate) -> tuple[Finding, ...]:
    """What is critical, follows from an episode, and was said in no message of it yet."""
    named = () if told is None else told.followers
    source = look.finding
    # A silent node is critical when its job stands, and says so itself.
    says_stop = (
        source is not None
        and source.alert is AlertName.NODE_UNREACHABLE
        and finding_severity(source) is Severity.CRITICAL
    )
    return tuple(
        each
        for each in look.followers
        if each.alert in JOB_STOPPING
        and finding_severity(each) is Severity.CRITICAL
        and finding_label(each) not in named
        and not (says_stop and each.alert is not AlertName.JOB_CRASHED)
    )


def is_reopening(look: EpisodeUpdate) -> bool:
    """The same thing closed a short while ago."""
    return look.ending is not None and look.now - look.ending.seconds < REOPEN_WINDOW_SECONDS


def open_episode(identifier: str, look: EpisodeUpdate, finding: Finding) -> Episode:
    """A new episode of this finding; the cost counts from when its condition began."""
    began = min(finding.since_seconds, look.now)
    return Episode(
        id=identifier,
        finding=finding,
        began_seconds=began,
        opened_wall_seconds=look.wall,
        detection_seconds=look.now - began,
        counted_seconds=began,
        reopenings=look.ending.reopenings + 1 if look.ending is not None and is_reopening(look) else 0,
    )


def advance_episode(
    episode: Episode, look: EpisodeUpdate, decision: NotifyDecision, receivers: tuple[str, ...] = ()
) -> Episode:
    """The episode after the look and the decision; `receivers` are those that this notice goes to."""
    after = update_present(episode, look, look.finding) if look.finding is not None else update_absent(episode, look)
    after = replace(after, diagnosis=look.diagnosis or episode.diagnosis)
    if decision.notice is not None:
        before = episode.told
        firing = decision.notice is not NoticeKind.CLOSED
        after = replace(
            after,
            told=NotifiedState(
                notices=1 if before is None else before.notices + 1,
                seconds=look.now,
                severity=after.severity if firing or before is None else before.severity,
                confirmed=after.confirmed if firing or before is None else before.confirmed,
                receivers=tuple(sorted({*receivers, *(() if before is None else before.receivers)})),
                suspects=after.finding.suspects if firing or before is None else before.suspects,
                followers=(
                    *(() if before is None else before.followers),
                    *(finding_label(each) for each in unreported_job_stops(before, look)),
                ),
                diagnosis=after.diagnosis,
                diagnosed=decision.notice is NoticeKind.DIAGNOSED or (before is not None and before.diagnosed),
            ),
        )
    if decision.closes:
        after = replace(after, closed_wall_seconds=look.wall)
    return after


def update_present(episode: Episode, look: EpisodeUpdate, finding: Finding) -> Episode:
    """Still true: its cost goes on. A gap in which the job was not judged counts, as it is true on both sides of it."""
    severity = effective_severity(finding, look.followers)
    released = None
    if look.cause is None and (episode.suppressed_by is not None or episode.released_seconds is not None):
        released = look.now if episode.released_seconds is None else episode.released_seconds
    return replace(
        episode,
        finding=finding,
        gpu_seconds_lost=episode.gpu_seconds_lost + finding.gpus_idle * max(0.0, look.now - episode.counted_seconds),
        joules_lost=episode.joules_lost + finding.idle_joules,
        counted_seconds=max(look.now, episode.counted_seconds),
        severity=max(severity, episode.severity, key=SEVERITY_RANK.__getitem__),
        confirmed=episode.confirmed or finding.confirmed,
        suppressed_by=look.cause,
        released_seconds=released,
        absent_seconds=None,
        absent_looks=0,
        settling=False,
        followers=tuple(finding_label(follower) for follower in look.followers),
    )


def update_absent(episode: Episode, look: EpisodeUpdate) -> Episode:
    """Not there: that costs nothing, unless it is only that a restarted watcher has not seen it again yet."""
    return replace(
        episode,
        counted_seconds=episode.counted_seconds if episode.settling else max(look.now, episode.counted_seconds),
        absent_seconds=look.now if episode.absent_seconds is None else episode.absent_seconds,
        absent_looks=episode.absent_looks + 1,
    )


def finding_label(finding: Finding) -> str:
    """ "NodeUnreachable node-02": how one finding is called where another one mentions it."""
    return f"{finding.alert.value} {finding.scope}".rstrip()
