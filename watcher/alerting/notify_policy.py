"""When to tell people, and why: one pure function of what was told last and what is true now. Time is an argument.

Each branch of `decide` states its case and names its reason; whoever is told reads that reason.
"""

from __future__ import annotations

from typing import Final

from wattwatch.watcher.alerting.episode import (
    JOB_STOPPING,
    SEVERITY_RANK,
    Episode,
    EpisodeDiagnosis,
    EpisodeUpdate,
    NoticeKind,
    NotifyDecision,
    NotifyReason,
    effective_severity,
    is_reopening,
    unreported_job_stops,
)
from wattwatch.watcher.detection.model import AlertName, Finding

# A condition is over when it was missing in this many looks and for this long: one odd sample closes nothing.
CLEAR_EVALUATIONS: Final = 2
CLEAR_SECONDS: Final = 2.0
# What comes back again and again within AGAIN_SECONDS must be missing for longer before it counts as over: a rebooting
# node, a loss that is NaN at every third step. By how often it came back. What stops a job is seen to end, when steps
# advance, and each time is another stop: a minute is enough.
CLEAR_SECONDS_FLAPPING: Final = (CLEAR_SECONDS, 60.0, 600.0)
CLEAR_SECONDS_JOB_STOPPING: Final = (CLEAR_SECONDS, 60.0)
# What outlived its root cause this long is told on its own. A job needs a moment to move again once its node is back.
CAUSE_GONE_GRACE_SECONDS: Final = 10.0
# After a restart the detector starts from nothing. What it does not see yet may still be true: it is over when the
# opposite is seen (`is_refuted`). Where that takes a judgement over time, the detector gets twice the time that it
# needed before, within these bounds. What nothing was seen of for the longest of them is closed as not known.
RESTART_GRACE_MIN_SECONDS: Final = 30.0
RESTART_GRACE_MAX_SECONDS: Final = 1800.0
# The kernel says it once, and the board may answer all the same.
XID_HOLD_SECONDS: Final = 900.0


def clear_seconds(episode: Episode) -> float:
    """How long it must be missing before it is over."""
    steady = episode.finding.alert in JOB_STOPPING or episode.finding.alert is AlertName.JOB_COMPLETED
    ladder = CLEAR_SECONDS_JOB_STOPPING if steady else CLEAR_SECONDS_FLAPPING
    return ladder[min(episode.reopenings, len(ladder) - 1)]


def is_refuted(episode: Episode, look: EpisodeUpdate, missing_seconds: float) -> bool:
    """Whether the opposite of what an earlier process of the watcher has found is seen now."""
    alert, node = episode.finding.alert, episode.finding.scope.partition("/")[0]
    watched_long = missing_seconds >= restart_grace_seconds(episode)
    if not episode.finding.job:
        return watched_long  # the watcher's own: it knows itself
    witness = look.witness
    if witness is None:
        return False
    if alert in JOB_STOPPING or alert is AlertName.JOB_COMPLETED:
        return witness.advancing
    if alert in (AlertName.NODE_UNREACHABLE, AlertName.PROBE_BLIND):
        return node in witness.nodes_ok
    if alert is AlertName.GPU_FAULT:
        by_kernel = any(fact.startswith("Xid ") for fact in episode.finding.evidence)
        return node in witness.nodes_ok and (not by_kernel or look.now - episode.began_seconds >= XID_HOLD_SECONDS)
    # Slow, starving, hot, overdue: the detector would say so again of a job that runs and that it has watched.
    return watched_long and witness.advancing and (not node or node in witness.nodes_ok)


def restart_grace_seconds(episode: Episode) -> float:
    """How long a restarted watcher must have watched before it may call this episode over."""
    return min(max(RESTART_GRACE_MIN_SECONDS, 2 * episode.detection_seconds), RESTART_GRACE_MAX_SECONDS)


def decide_notification(
    episode: Episode | None, look: EpisodeUpdate, reminder_seconds: float | None = None
) -> NotifyDecision:
    """Tell, and why; or do not tell, and why not. `episode` is the open one of this key, if there is one."""
    if look.finding is None:
        return decide_without_finding(episode, look)
    if look.job_ended and look.finding.alert is not AlertName.JOB_COMPLETED:
        # The end of the job ends its troubles: a released node that no longer answers is nobody's page.
        if episode is None:
            return NotifyDecision(NotifyReason.ENDED_BEFORE)
        return close_decision(episode, NotifyReason.JOB_ENDED)
    if episode is None:
        # Explained by something that is told: open it for the page and the API, and keep quiet.
        if look.cause is not None:
            return NotifyDecision(NotifyReason.SUPPRESSED)
        # The same thing closed a short while ago. People are told, and told that it comes and goes.
        if is_reopening(look):
            return NotifyDecision(NotifyReason.OPENED_AGAIN, NoticeKind.OPENED)
        return NotifyDecision(NotifyReason.OPENED, NoticeKind.OPENED)
    if look.cause is not None:
        # Told before its cause was known, or never told: either way the cause speaks for it now.
        return NotifyDecision(NotifyReason.SUPPRESSED)
    if episode.told is None:
        # Its cause went a moment ago. A hang needs a step to be over: wait before it becomes a message of its own.
        released = look.now if episode.released_seconds is None else episode.released_seconds
        if look.now - released < CAUSE_GONE_GRACE_SECONDS:
            return NotifyDecision(NotifyReason.CAUSE_JUST_OVER)
        return NotifyDecision(NotifyReason.OUTLIVED_CAUSE, NoticeKind.OPENED)
    if SEVERITY_RANK[effective_severity(look.finding, look.followers)] > SEVERITY_RANK[episode.told.severity]:
        # Graver than what people know: confirmed by progress, or something critical now follows from it.
        if look.finding.confirmed and not episode.told.confirmed:
            return NotifyDecision(NotifyReason.CONFIRMED, NoticeKind.RAISED)
        return NotifyDecision(NotifyReason.GRAVER, NoticeKind.RAISED)
    if look.finding.confirmed and not episode.told.confirmed:
        # Confirmed at the same severity: people should know that it is no suspicion any more.
        return NotifyDecision(NotifyReason.CONFIRMED, NoticeKind.RAISED)
    if unreported_job_stops(episode.told, look):
        # As severe as before, and still news: the job has stopped, and nobody else will say so.
        return NotifyDecision(NotifyReason.FOLLOWED, NoticeKind.RAISED)
    if look.newly_concerned:
        # A consequence is kept quiet whose receivers have not heard of its cause: they alone are told now.
        return NotifyDecision(NotifyReason.CONCERNS_MORE, NoticeKind.RAISED)
    if is_new_diagnosis(look.diagnosis, episode, look.finding):
        # Who it is: what whoever was paged would find out next. One message of it, however often it is looked into.
        proved = look.diagnosis is not None and look.diagnosis.conclusive
        return NotifyDecision(NotifyReason.DIAGNOSED if proved else NotifyReason.LOOKED_INTO, NoticeKind.DIAGNOSED)
    if reminder_seconds is not None and look.now - episode.told.seconds >= reminder_seconds:
        return NotifyDecision(NotifyReason.REMINDER_DUE, NoticeKind.REMINDER)
    # True, told, unchanged. Milder or unconfirmed again counts as unchanged: nothing is taken back before the end.
    return NotifyDecision(NotifyReason.UNCHANGED)


def decide_without_finding(episode: Episode | None, look: EpisodeUpdate) -> NotifyDecision:
    """The job was judged and the finding is not there."""
    if episode is None:
        return NotifyDecision(NotifyReason.NEVER_TRUE)
    if look.job_ended and episode.finding.alert is not AlertName.JOB_COMPLETED:
        return close_decision(episode, NotifyReason.JOB_ENDED)
    since = look.now if episode.absent_seconds is None else episode.absent_seconds
    # After a restart, and nothing seen that ends it. The detector may need long to see it again, or may never.
    if episode.settling and not look.successors and not is_refuted(episode, look, look.now - since):
        # What a completed job has reached stays true until it runs again.
        if look.now - since < RESTART_GRACE_MAX_SECONDS or episode.finding.alert is AlertName.JOB_COMPLETED:
            return NotifyDecision(NotifyReason.SETTLING)
        return close_decision(episode, NotifyReason.NOT_KNOWN)
    # One look without it, or looks too close together: a flicker would close it and open the next one.
    if episode.absent_looks + 1 < CLEAR_EVALUATIONS or look.now - since < clear_seconds(episode):
        return NotifyDecision(NotifyReason.CLEAR_PENDING)
    return close_decision(episode, NotifyReason.REPLACED if look.successors else NotifyReason.CLEARED)


def close_decision(episode: Episode, reason: NotifyReason) -> NotifyDecision:
    """Who was told of the opening is told of the end; who was not hears nothing."""
    if episode.told is None:
        return NotifyDecision(NotifyReason.CLEARED_UNTOLD, closes=True)
    return NotifyDecision(reason, NoticeKind.CLOSED, closes=True)


def is_new_diagnosis(diagnosis: EpisodeDiagnosis | None, episode: Episode, finding: Finding) -> bool:
    """Whether a diagnosis is worth a message of its own. Of a suspicion only a proof is: it may be gone in a moment."""
    if diagnosis is None or episode.told is None or episode.told.diagnosed or diagnosis == episode.told.diagnosis:
        return False
    return diagnosis.conclusive or finding.confirmed
