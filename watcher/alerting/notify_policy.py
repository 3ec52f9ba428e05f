"""Whether to send a message about an alert, and why: one pure function of what receivers already know and what is
true now. The time is an argument.

Each branch of `decide_notification` describes its case and returns a named reason; receivers read that reason.
"""

from __future__ import annotations

from typing import Final

from wattwatch.watcher.alerting.episode import (
    SEVERITY_RANK,
    Episode,
    EpisodeDiagnosis,
    EpisodeUpdate,
    NoticeKind,
    NotifyDecision,
    NotifyReason,
    effective_severity,
    is_reopening,
    unreported_causes,
    unreported_job_stops,
)
from wattwatch.watcher.common.formatting import format_duration, format_utc_time
from wattwatch.watcher.detection.alerts import ALERT_KINDS, Recovery
from wattwatch.watcher.detection.model import AlertName, Finding

# An alert is resolved once it was absent in this many evaluations and for this long: one odd sample closes nothing.
CLEAR_EVALUATIONS: Final = 2
CLEAR_SECONDS: Final = 2.0
# An alert that keeps coming back within REOPEN_WINDOW_SECONDS (a rebooting node, a loss that is NaN at every third
# step) must be absent for longer each time, indexed by how often it has reopened. Without this, a flapping alert sends
# two messages a minute all night.
CLEAR_SECONDS_FLAPPING: Final = (CLEAR_SECONDS, 60.0, 600.0)
# A job that stops again has really stopped again: its steps were seen to advance in between. A minute is enough.
CLEAR_SECONDS_JOB_STOPPING: Final = (CLEAR_SECONDS, 60.0)
# An alert that persists this long after its root cause cleared is reported separately. A job needs a moment to make a
# step once its node is back.
CAUSE_CLEARED_GRACE_SECONDS: Final = 10.0
# After a restart the detector has no history, so what it does not detect may still be true. An open episode then closes
# only on positive evidence (`has_recovered`). For a condition that takes time to detect, the evidence is that the
# detector has watched for twice the time it needed before, within these bounds. After the upper bound without any
# evidence, the episode closes with its state unknown.
RESTART_GRACE_MIN_SECONDS: Final = 30.0
RESTART_GRACE_MAX_SECONDS: Final = 1800.0
# A new cause is reported once it has lasted this long. Where the problem never went away, it must also replace every
# cause that was reported: a second symptom of the same fault often follows within seconds, and is no news.
CAUSE_SECONDS_AFTER_RETURN: Final = 5.0
CAUSE_SECONDS: Final = 30.0
# The kernel logs an Xid once, and the GPU may answer queries afterwards: after a restart, believe the log line for
# 15 minutes.
XID_HOLD_SECONDS: Final = 900.0


def clear_seconds(episode: Episode) -> float:
    """How long the finding must be absent before the alert is resolved."""
    ends_with_a_step = ALERT_KINDS[episode.finding.alert].recovery is Recovery.STEPS
    by_reopenings = CLEAR_SECONDS_JOB_STOPPING if ends_with_a_step else CLEAR_SECONDS_FLAPPING
    return by_reopenings[min(episode.reopenings, len(by_reopenings) - 1)]


def kept_open_reason(episode: Episode, now: float, wall: float) -> str:
    """Since when the finding of an open episode is absent, and why it is open all the same; "" while it is present."""
    if episode.absent_seconds is None or episode.closed_wall_seconds is not None:
        return ""
    since = format_utc_time(wall - (now - episode.absent_seconds))
    if episode.unseen_since_restart:
        return f"not seen since the watcher restarted ({since}); kept open because there is no sign of recovery yet"
    seconds = clear_seconds(episode)
    because = "because this problem comes and goes, " if seconds > CLEAR_SECONDS else ""
    return (
        f"back to normal since {since}; kept open {because}until the problem has been absent for "
        f"{format_duration(seconds)}"
    )


def has_recovered(episode: Episode, update: EpisodeUpdate, absent_seconds: float) -> bool:
    """Whether there is positive evidence against a finding that an earlier watcher process reported."""
    kind, node = ALERT_KINDS[episode.finding.alert], episode.finding.scope.partition("/")[0]
    watched_long_enough = absent_seconds >= restart_grace_seconds(episode)
    if not episode.finding.job:
        return watched_long_enough  # an alert about the watcher itself: this process knows its own state
    recovery = update.recovery
    if recovery is None:
        return False
    if kind.recovery is Recovery.STEPS:
        return recovery.advancing
    if kind.recovery is Recovery.NODE:
        return node in recovery.nodes_ok
    if kind.recovery is Recovery.GPU:
        from_kernel_log = any(fact.startswith("Xid ") for fact in episode.finding.evidence)
        is_recent = update.now - episode.began_seconds < XID_HOLD_SECONDS
        return node in recovery.nodes_ok and not (from_kernel_log and is_recent)
    # Slow, starving, throttled, overdue: the detector would have reported it again by now, as the job runs and has been
    # watched for long enough.
    return watched_long_enough and recovery.advancing and (not node or node in recovery.nodes_ok)


def restart_grace_seconds(episode: Episode) -> float:
    """How long a restarted watcher must watch before the absence of this finding counts as evidence."""
    return min(max(RESTART_GRACE_MIN_SECONDS, 2 * episode.detection_seconds), RESTART_GRACE_MAX_SECONDS)


def decide_notification(
    episode: Episode | None, update: EpisodeUpdate, reminder_seconds: float | None = None
) -> NotifyDecision:
    """Send a message, and why; or send none, and why not. `episode`: the open one of this key, if any."""
    finding = update.finding
    if finding is None:
        return decide_absent_finding(episode, update)
    if update.job_completed and finding.alert is not AlertName.JOB_COMPLETED:
        # A completed job has no further problems: nobody is paged for a released node that no longer answers.
        if episode is None:
            return NotifyDecision(NotifyReason.JOB_ALREADY_COMPLETED)
        return close_episode(episode, NotifyReason.JOB_COMPLETED)
    if episode is None:
        # A reported root cause explains it: open an episode for the page and the API, and send nothing.
        if update.cause is not None:
            return NotifyDecision(NotifyReason.INHIBITED)
        # The same alert closed a short while ago. Say so, to distinguish flapping from a new problem.
        if is_reopening(update):
            return NotifyDecision(NotifyReason.REOPENED, NoticeKind.OPENED)
        return NotifyDecision(NotifyReason.OPENED, NoticeKind.OPENED)
    if update.cause is not None:
        # Reported before its cause was known, or never reported: either way the root cause is reported instead now.
        return NotifyDecision(NotifyReason.INHIBITED)
    notified = episode.notified
    if notified is None:
        # Its root cause cleared a moment ago. A hang needs a step to clear, so wait before reporting it separately.
        cleared = update.now if episode.cause_cleared_seconds is None else episode.cause_cleared_seconds
        if update.now - cleared < CAUSE_CLEARED_GRACE_SECONDS:
            return NotifyDecision(NotifyReason.CAUSE_JUST_CLEARED)
        return NotifyDecision(NotifyReason.OUTLIVED_CAUSE, NoticeKind.OPENED)
    if SEVERITY_RANK[effective_severity(finding, update.consequences)] > SEVERITY_RANK[notified.severity]:
        # More severe than receivers know: progress has confirmed it, or it has caused something critical.
        if finding.confirmed and not notified.confirmed:
            return NotifyDecision(NotifyReason.CONFIRMED, NoticeKind.RAISED)
        return NotifyDecision(NotifyReason.MORE_SEVERE, NoticeKind.RAISED)
    if finding.confirmed and not notified.confirmed:
        # Confirmed at the same severity: receivers should know that it is no longer a suspicion.
        return NotifyDecision(NotifyReason.CONFIRMED, NoticeKind.RAISED)
    if unreported_job_stops(notified, update):
        # As severe as before, but the job has now stopped because of it. The alert that says so is inhibited, so this
        # message is the only one that can.
        return NotifyDecision(NotifyReason.STOPPED_JOB, NoticeKind.RAISED)
    if has_changed_cause(episode, update, finding):
        # Whoever fixes the first cause would not look for the second one.
        return NotifyDecision(NotifyReason.CAUSE_CHANGED, NoticeKind.RAISED)
    if update.new_receivers:
        # It inhibits an alert that is routed to receivers not notified of this cause yet. Only they get this message.
        return NotifyDecision(NotifyReason.NEW_RECEIVERS, NoticeKind.RAISED)
    if is_new_diagnosis(update.diagnosis, episode, finding):
        # Which rank blocks the job is the first thing that whoever was paged would have to find out. One message per
        # episode, however often the job is diagnosed.
        conclusive = update.diagnosis is not None and update.diagnosis.conclusive
        reason = NotifyReason.DIAGNOSED if conclusive else NotifyReason.DIAGNOSIS_INCONCLUSIVE
        return NotifyDecision(reason, NoticeKind.DIAGNOSED)
    if reminder_seconds is not None and update.now - notified.last_message_seconds >= reminder_seconds:
        return NotifyDecision(NotifyReason.REMINDER_DUE, NoticeKind.REMINDER)
    # Firing, reported, unchanged. Less severe or unconfirmed again counts as unchanged: nothing is taken back before
    # the alert closes.
    return NotifyDecision(NotifyReason.UNCHANGED)


def decide_absent_finding(episode: Episode | None, update: EpisodeUpdate) -> NotifyDecision:
    """The job was evaluated and the finding is absent."""
    if episode is None:
        return NotifyDecision(NotifyReason.NEVER_FIRED)
    if update.job_completed and episode.finding.alert is not AlertName.JOB_COMPLETED:
        return close_episode(episode, NotifyReason.JOB_COMPLETED)
    absent_since = update.now if episode.absent_seconds is None else episode.absent_seconds
    absent_seconds = update.now - absent_since
    # After a restart, without evidence of recovery: the detector may need long to detect it again, or may never.
    if episode.unseen_since_restart and not update.successors and not has_recovered(episode, update, absent_seconds):
        # A completed job stays completed until it is seen to run again.
        if absent_seconds < RESTART_GRACE_MAX_SECONDS or episode.finding.alert is AlertName.JOB_COMPLETED:
            return NotifyDecision(NotifyReason.UNVERIFIED_AFTER_RESTART)
        return close_episode(episode, NotifyReason.STATE_UNKNOWN)
    # Absent in a single evaluation, or in several close together: a flicker would close it and open the next one.
    if episode.absent_evaluations + 1 < CLEAR_EVALUATIONS or absent_seconds < clear_seconds(episode):
        return NotifyDecision(NotifyReason.CLEAR_PENDING)
    return close_episode(episode, NotifyReason.REPLACED if update.successors else NotifyReason.CLEARED)


def close_episode(episode: Episode, reason: NotifyReason) -> NotifyDecision:
    """Receivers of the opening message get the closing one; if nothing was reported, nothing is sent."""
    if episode.notified is None:
        return NotifyDecision(NotifyReason.CLEARED_UNREPORTED, closes=True)
    return NotifyDecision(reason, NoticeKind.CLOSED, closes=True)


def has_changed_cause(episode: Episode, update: EpisodeUpdate, finding: Finding) -> bool:
    """Whether the problem has a cause that no message has named, for long enough to be reported.

    Each cause is reported once in an episode: a node that alternates between two of them is no news after that.
    """
    notified, since = episode.notified, episode.new_cause_seconds
    if notified is None or since is None or not unreported_causes(notified, finding):
        return False
    lasted = update.now - since
    if episode.returned_seconds is not None and episode.returned_seconds >= notified.last_message_seconds:
        return lasted >= CAUSE_SECONDS_AFTER_RETURN
    return lasted >= CAUSE_SECONDS and not set(finding.causes) & set(notified.causes)


def is_new_diagnosis(diagnosis: EpisodeDiagnosis | None, episode: Episode, finding: Finding) -> bool:
    """Whether a diagnosis is worth a separate message.

    While the alert is only suspected, an inconclusive diagnosis is not: the alert may clear in a moment.
    """
    notified = episode.notified
    if diagnosis is None or notified is None or notified.diagnosis_announced or diagnosis == notified.diagnosis:
        return False
    return diagnosis.conclusive or finding.confirmed
