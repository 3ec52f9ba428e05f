"""One alert from opening to closing, and how each evaluation moves it on. Pure: the time is an argument.

An episode is one continuous run of one finding (job, alert, scope); each time the alert opens again it gets a new id.
`notify_policy.py` decides whether to send a message, from what receivers already know and what is true now;
`advance_episode` gives the episode after that decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Annotated, Final

from pydantic import Field

from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, Severity, Suspect
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

# An alert that fires again this soon after it closed is reported as a reopened one, and must stay absent for longer
# before it closes again. Ten minutes cover a node that reboots; the figure was chosen, not measured.
REOPEN_WINDOW_SECONDS: Final = 600.0

SEVERITY_RANK: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class NoticeKind(StrEnum):
    """What a message announces."""

    OPENED = "opened"
    RAISED = "raised"
    DIAGNOSED = "diagnosed"
    REMINDER = "reminder"
    CLOSED = "closed"


class NotifyReason(Enum):
    """Why a message was sent, or was not. The value is the sentence that people read."""

    OPENED = "New alert."
    REOPENED = "This alert is firing again, less than 10 minutes after it was resolved."
    OUTLIVED_CAUSE = "The root cause of this alert is resolved, but the problem persists."
    CONFIRMED = "This problem was only suspected before and is now confirmed."
    MORE_SEVERE = "The severity has risen since the last message."
    STOPPED_JOB = "Since the last message, this problem has caused another critical alert."
    CAUSE_CHANGED = "Since the last message, the cause has changed."
    NEW_RECEIVERS = "This problem has caused an alert that is routed to you."
    DIAGNOSED = "The diagnosis is complete and conclusive."
    DIAGNOSIS_INCONCLUSIVE = "The diagnosis is complete but not conclusive."
    REMINDER_DUE = "Reminder: this alert is still firing."
    CLEARED = "The condition has cleared."
    REPLACED = "The job has not recovered: another alert of the same job has replaced this alert."
    STATE_UNKNOWN = "State unknown: since its restart, the watcher has not seen the problem or any sign of recovery."
    JOB_COMPLETED = "The job has completed."
    JOB_REMOVED = "The job was removed from the configuration; its state is unknown."
    UNCHANGED = "This alert was already reported, and nothing has changed since."
    INHIBITED = "The root cause of this alert is reported instead."
    CAUSE_JUST_CLEARED = "The root cause of this alert has just cleared, so this alert may clear too."
    CLEAR_PENDING = "The problem is no longer detected, but has not been gone for long enough to count as resolved."
    UNVERIFIED_AFTER_RESTART = "Since its restart, the watcher has not yet seen any sign of recovery."
    CLEARED_UNREPORTED = "The problem cleared before it was reported."
    NEVER_FIRED = "There is no problem and no open alert."
    JOB_ALREADY_COMPLETED = "The job had already completed."


# Episodes are stored as JSON in the state file. An alias is the key under which a field has been stored since the first
# release: changing it would make a new version forget the open episodes of the old one.


@dataclass(frozen=True, slots=True)
class EpisodeDiagnosis:
    """What a capture found out about an open episode, as messages say it."""

    summary: Annotated[str, Field(alias="words")]  # one sentence: which rank, where, in which operation
    conclusive: bool
    advice: str = ""  # the next step, given this diagnosis

    def __str__(self) -> str:
        return f"{self.summary.rstrip('. ')} ({'conclusive' if self.conclusive else 'not conclusive'})"


@dataclass(frozen=True, slots=True)
class NotifiedState:
    """What the receivers know. Nothing is taken back while the episode is open: the reported severity only rises."""

    message_count: Annotated[int, Field(alias="notices")]  # also numbers the messages
    last_message_seconds: Annotated[float, Field(alias="seconds")]  # when the last message was enqueued
    severity: Severity
    confirmed: bool
    receivers: tuple[str, ...]  # who has received any message, and so gets the closing one
    suspects: tuple[Suspect, ...]  # of the last firing message: the closing one must carry the same labels
    reported_consequences: Annotated[tuple[str, ...], Field(alias="followers")] = ()  # job-stopping, in any message
    diagnosis: EpisodeDiagnosis | None = None  # in the last message
    causes: tuple[str, ...] = ()  # that any message has named
    diagnosis_announced: Annotated[bool, Field(alias="diagnosed")] = False  # in a separate message; at most one


@dataclass(frozen=True, slots=True)
class Episode:
    """One alert while it lasts. Seconds are of the clock that the notify policy is given, unless named wall."""

    id: str
    finding: Finding  # as last seen
    began_seconds: float  # when the condition began
    opened_wall_seconds: float
    detection_seconds: float  # from the beginning of the condition to the opening of the episode
    cost_counted_until_seconds: Annotated[float, Field(alias="counted_seconds")]
    gpu_seconds_lost: float = 0.0
    joules_lost: float = 0.0  # only of evaluations in which the finding was seen: a lower bound
    severity: Severity = Severity.INFO  # the highest so far, its own or that of an alert it caused
    confirmed: bool = False
    suppressed_by: str | None = None
    cause_cleared_seconds: Annotated[float | None, Field(alias="released_seconds")] = None  # None: has or had no cause
    absent_seconds: float | None = None  # since when the finding is absent; None while it is present
    absent_evaluations: Annotated[int, Field(alias="absent_looks")] = 0
    returned_seconds: float | None = None  # when the finding last came back after an absence; None: never absent
    new_cause_seconds: float | None = None  # since when it has had causes that no message has named; None: it has none
    unseen_since_restart: Annotated[bool, Field(alias="settling")] = False  # loaded from disk, not detected again yet
    reopenings: int = 0  # how often in a row it fired again within REOPEN_WINDOW_SECONDS
    inhibited: Annotated[tuple[str, ...], Field(alias="followers")] = ()  # labels of the alerts it inhibits
    diagnosis: EpisodeDiagnosis | None = None  # the newest
    notified: Annotated[NotifiedState | None, Field(alias="told")] = None
    closed_wall_seconds: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.finding.key

    @property
    def advice(self) -> str:
        """The next step: from the diagnosis if there is one, otherwise from the finding."""
        from_diagnosis = "" if self.diagnosis is None else self.diagnosis.advice
        return from_diagnosis or self.finding.advice

    @property
    def last_seen_seconds(self) -> float:
        """The last evaluation that showed the finding, or the first one that did not; earlier if the finding itself
        says that its condition is past. After a restart of the watcher: when it was last saved as seen."""
        seen = self.finding.seen_seconds
        if self.absent_seconds is None or self.unseen_since_restart:
            last = self.cost_counted_until_seconds
        else:
            last = self.absent_seconds
        return last if seen is None else min(last, seen)

    def shifted(self, seconds: float, now: float = float("inf")) -> Episode:
        """The same episode on another clock. No time may lie after `now`: wall clocks are sometimes set back."""

        def shift(value: float) -> float:
            return min(value + seconds, now)

        def shift_or_none(value: float | None) -> float | None:
            return None if value is None else shift(value)

        notified = self.notified
        if notified is not None:
            notified = replace(notified, last_message_seconds=shift(notified.last_message_seconds))
        return replace(
            self,
            began_seconds=shift(self.began_seconds),
            cost_counted_until_seconds=shift(self.cost_counted_until_seconds),
            cause_cleared_seconds=shift_or_none(self.cause_cleared_seconds),
            absent_seconds=shift_or_none(self.absent_seconds),
            returned_seconds=shift_or_none(self.returned_seconds),
            new_cause_seconds=shift_or_none(self.new_cause_seconds),
            finding=replace(
                self.finding,
                since_seconds=shift(self.finding.since_seconds),
                seen_seconds=shift_or_none(self.finding.seen_seconds),
            ),
            notified=notified,
        )


@dataclass(frozen=True, slots=True)
class PreviousEpisode:
    """The last reported episode of the same key: when it closed, and how often it had reopened by then."""

    closed_seconds: float
    reopenings: int


@dataclass(frozen=True, slots=True)
class EpisodeUpdate:
    """What one evaluation says about one key. Made only for jobs that were evaluated: missing data is not good news."""

    finding: Finding | None  # None: the job was evaluated and the finding is absent
    now: float
    wall: float
    cause: str | None = None  # label of the root cause that explains it
    consequences: tuple[Finding, ...] = ()  # findings it inhibits; they raise its severity to theirs
    job_completed: bool = False
    previous: PreviousEpisode | None = None
    recovery: RecoveryEvidence | None = None  # positive evidence that the job runs
    successors: tuple[Finding, ...] = ()  # if it is absent: confirmed findings that have replaced it
    diagnosis: EpisodeDiagnosis | None = None  # of the open episode, if a capture has given one
    new_receivers: tuple[str, ...] = ()  # not notified yet, although its consequences are routed to them
    reported_alone: frozenset[str] = frozenset()  # labels of consequences that have been reported on their own


@dataclass(frozen=True, slots=True)
class NotifyDecision:
    """Whether to send a message, and why. `notice` is None if none is sent."""

    reason: NotifyReason
    notice: NoticeKind | None = None
    closes: bool = False


def finding_severity(finding: Finding) -> Severity:
    """The severity to report. A suspicion is at most a warning, whatever it would be once confirmed."""
    if not finding.confirmed and SEVERITY_RANK[finding.severity] > SEVERITY_RANK[Severity.WARNING]:
        return Severity.WARNING
    return finding.severity


def effective_severity(finding: Finding, consequences: tuple[Finding, ...] = ()) -> Severity:
    """The highest of a finding and what it inhibits: a warning must not hide a critical consequence."""
    return max((finding_severity(each) for each in (finding, *consequences)), key=SEVERITY_RANK.__getitem__)


def unreported_job_stops(notified: NotifiedState | None, update: EpisodeUpdate) -> tuple[Finding, ...]:
    """Critical consequences that have stopped the job and that no message of this episode has named yet.

    They are inhibited, but never silently: nobody should learn from the bill that a job did no work.
    """
    reported = () if notified is None else notified.reported_consequences
    source = update.finding
    # A critical NodeUnreachable already says in its summary that the job has stopped; a hang adds nothing to that.
    says_job_stopped = (
        source is not None
        and source.alert is AlertName.NODE_UNREACHABLE
        and finding_severity(source) is Severity.CRITICAL
    )
    return tuple(
        each
        for each in update.consequences
        if ALERT_KINDS[each.alert].stops_job
        and finding_severity(each) is Severity.CRITICAL
        and finding_label(each) not in reported
        and finding_label(each) not in update.reported_alone
        and not (says_job_stopped and each.alert is not AlertName.JOB_CRASHED)
    )


def unreported_causes(notified: NotifiedState | None, finding: Finding) -> tuple[str, ...]:
    """Causes that no message of this episode has named. None before the first message, which names all of them."""
    # Messages of an earlier version named causes that were not stored.
    if notified is None or not notified.causes:
        return ()
    return tuple(cause for cause in finding.causes if cause not in notified.causes)


def is_reopening(update: EpisodeUpdate) -> bool:
    """Whether the previous episode of this key closed only a short while ago."""
    return update.previous is not None and update.now - update.previous.closed_seconds < REOPEN_WINDOW_SECONDS


def open_episode(identifier: str, update: EpisodeUpdate, finding: Finding) -> Episode:
    """A new episode of this finding. Its cost counts from when the condition began."""
    began = min(finding.since_seconds, update.now)
    return Episode(
        id=identifier,
        finding=finding,
        began_seconds=began,
        opened_wall_seconds=update.wall,
        detection_seconds=update.now - began,
        cost_counted_until_seconds=began,
        reopenings=update.previous.reopenings + 1 if update.previous is not None and is_reopening(update) else 0,
    )


def advance_episode(
    episode: Episode, update: EpisodeUpdate, decision: NotifyDecision, receivers: tuple[str, ...] = ()
) -> Episode:
    """The episode after an evaluation and the decision about it. `receivers`: those that this message goes to."""
    if update.finding is not None:
        after = update_present(episode, update, update.finding)
    else:
        after = update_absent(episode, update)
    after = replace(after, diagnosis=update.diagnosis or episode.diagnosis)
    if decision.notice is not None:
        before = episode.notified
        firing = decision.notice is not NoticeKind.CLOSED
        reported = () if before is None else before.reported_consequences
        known_causes = () if before is None else before.causes
        after = replace(
            after,
            new_cause_seconds=None,
            notified=NotifiedState(
                message_count=1 if before is None else before.message_count + 1,
                last_message_seconds=update.now,
                severity=after.severity if firing or before is None else before.severity,
                confirmed=after.confirmed if firing or before is None else before.confirmed,
                receivers=tuple(sorted({*receivers, *(() if before is None else before.receivers)})),
                suspects=after.finding.suspects if firing or before is None else before.suspects,
                reported_consequences=(
                    *reported,
                    *(finding_label(each) for each in unreported_job_stops(before, update)),
                ),
                diagnosis=after.diagnosis,
                causes=(*known_causes, *(each for each in after.finding.causes if each not in known_causes)),
                diagnosis_announced=decision.notice is NoticeKind.DIAGNOSED
                or (before is not None and before.diagnosis_announced),
            ),
        )
    if decision.closes:
        # Not before it opened, even if the wall clock was set back by too little to be noticed.
        after = replace(after, closed_wall_seconds=max(update.wall, after.opened_wall_seconds))
    return after


def update_present(episode: Episode, update: EpisodeUpdate, finding: Finding) -> Episode:
    """The finding is still there, and its cost continues.

    A gap in which the job was not evaluated counts as lost too: the condition held on both sides of it.
    """
    severity = effective_severity(finding, update.consequences)
    cause_cleared = None
    if update.cause is None and (episode.suppressed_by is not None or episode.cause_cleared_seconds is not None):
        cause_cleared = update.now if episode.cause_cleared_seconds is None else episode.cause_cleared_seconds
    uncounted_seconds = max(0.0, update.now - episode.cost_counted_until_seconds)
    returned = episode.absent_seconds is not None and not episode.unseen_since_restart
    new_cause = None
    if unreported_causes(episode.notified, finding):
        new_cause = update.now if episode.new_cause_seconds is None else episode.new_cause_seconds
    return replace(
        episode,
        returned_seconds=update.now if returned else episode.returned_seconds,
        new_cause_seconds=new_cause,
        finding=finding,
        gpu_seconds_lost=episode.gpu_seconds_lost + finding.gpus_idle * uncounted_seconds,
        joules_lost=episode.joules_lost + finding.idle_joules,
        cost_counted_until_seconds=max(update.now, episode.cost_counted_until_seconds),
        severity=max(severity, episode.severity, key=SEVERITY_RANK.__getitem__),
        confirmed=episode.confirmed or finding.confirmed,
        suppressed_by=update.cause,
        cause_cleared_seconds=cause_cleared,
        absent_seconds=None,
        absent_evaluations=0,
        unseen_since_restart=False,
        inhibited=tuple(finding_label(each) for each in update.consequences),
    )


def update_absent(episode: Episode, update: EpisodeUpdate) -> Episode:
    """The finding is absent, which costs nothing.

    Except after a restart: then absence may only mean that it was not detected again yet. The cost stays uncounted, so
    that it includes this time if the finding comes back.
    """
    counted_until = episode.cost_counted_until_seconds
    return replace(
        episode,
        cost_counted_until_seconds=counted_until if episode.unseen_since_restart else max(update.now, counted_until),
        absent_seconds=update.now if episode.absent_seconds is None else episode.absent_seconds,
        absent_evaluations=episode.absent_evaluations + 1,
    )


def finding_label(finding: Finding) -> str:
    """How messages mention a finding of another alert: "NodeUnreachable node-02"."""
    return f"{finding.alert.value} {finding.scope}".rstrip()
