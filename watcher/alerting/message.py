"""The text of a message about an alert, the same for every receiver. Pure: receivers only choose the layout."""

from __future__ import annotations

from dataclasses import dataclass

from wattwatch.watcher.alerting.episode import Episode, NoticeKind, NotifyReason, finding_label
from wattwatch.watcher.common.formatting import format_duration, format_energy, format_hours, format_utc_time
from wattwatch.watcher.detection.model import Finding, Severity, Suspect
from wattwatch.watcher.detection.wasted_time import JOULES_PER_KWH


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """One message about one episode. Wall seconds are Unix time."""

    notice: NoticeKind
    title: str  # "CRITICAL JobHung llama-30b"
    summary: str
    evidence: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    advice: str
    cost: str  # "4.3 GPU-hours lost so far ..."; "" if it keeps no GPU from working
    timing: str  # when it started, or how long it lasted, and of which time the message is: it may be delivered late
    reason: str  # why this message is sent now
    diagnosis: str  # which rank blocks the job, and whether that is conclusive; "" if not known
    inhibited: tuple[str, ...]  # labels of the alerts that it explains and that are not sent separately
    link: str | None
    # The same facts for programs:
    episode_id: str
    alert: str
    job: str
    scope: str
    severity: Severity
    confirmed: bool
    gpu_hours_lost: float
    kilowatt_hours_lost: float
    opened_wall_seconds: float
    closed_wall_seconds: float | None

    @property
    def is_closed(self) -> bool:
        return self.notice is NoticeKind.CLOSED

    @property
    def inhibited_sentence(self) -> str:
        if not self.inhibited or self.is_closed:
            return ""
        them = "it" if len(self.inhibited) == 1 else "them"
        return f"This alert also explains {', '.join(self.inhibited)}, so no separate messages are sent for {them}."

    @property
    def text(self) -> str:
        """The whole message as plain text, most important first: a receiver that truncates loses the least."""
        lines = [self.title, self.summary]
        if self.diagnosis:
            lines.append("Diagnosis: " + self.diagnosis)
        if self.suspects:
            lines.append("Suspect: " + join_suspects(self.suspects))
        lines += [f"- {fact}" for fact in self.evidence]
        lines += [line for line in (self.cost, self.timing, self.reason, self.inhibited_sentence) if line]
        if self.advice and not self.is_closed:
            lines.append("What to do: " + self.advice)
        if self.link:
            lines.append(self.link)
        return "\n".join(lines)


def compose_message(
    episode: Episode,
    notice: NoticeKind,
    reason: NotifyReason,
    now: float,
    wall: float,
    external_url: str | None,
    related: tuple[Finding, ...] = (),
) -> AlertMessage:
    """The message about an episode as it is after the decision (`Episode.notified` is set).

    `related`: other findings that are the reason for this message; it is the only one that names them.
    """
    finding = episode.finding
    assert episode.notified is not None
    severity = episode.notified.severity
    is_closed = notice is NoticeKind.CLOSED
    subject = f"{finding.alert.value} {message_subject(finding.job, finding.scope)}".rstrip()
    return AlertMessage(
        notice=notice,
        title=f"{title_prefix(notice, reason, severity)} {subject}",
        summary=summary_sentence(episode, is_closed),
        evidence=finding.evidence,
        suspects=episode.notified.suspects,
        advice=episode.advice,
        cost=cost_sentence(episode, is_closed),
        timing=timing_sentence(episode, reason, is_closed, now, wall),
        reason=" ".join((reason.value, *(f"{finding_label(each)}: {each.summary}" for each in related))),
        diagnosis="" if episode.notified.diagnosis is None else str(episode.notified.diagnosis),
        inhibited=episode.inhibited,
        link=external_url,
        episode_id=episode.id,
        alert=finding.alert.value,
        job=finding.job,
        scope=finding.scope,
        severity=severity,
        confirmed=episode.notified.confirmed,
        gpu_hours_lost=episode.gpu_seconds_lost / 3600,
        kilowatt_hours_lost=episode.joules_lost / JOULES_PER_KWH,
        opened_wall_seconds=episode.opened_wall_seconds,
        closed_wall_seconds=episode.closed_wall_seconds if is_closed else None,
    )


def summary_sentence(episode: Episode, is_closed: bool) -> str:
    """What is wrong; in a closing message what was, since "node-02 does not answer" is no longer true."""
    if is_closed:
        return f"Before: {episode.finding.summary}"
    return episode.finding.summary if episode.confirmed else f"{episode.finding.summary} (unconfirmed)"


def title_prefix(notice: NoticeKind, reason: NotifyReason, severity: Severity) -> str:
    """The first words of the title."""
    level = severity.value.upper()
    if notice is NoticeKind.CLOSED:
        # Closed without a recovery must not read like one.
        return "RESOLVED" if reason in (NotifyReason.CLEARED, NotifyReason.JOB_COMPLETED) else "CLOSED"
    if notice is NoticeKind.DIAGNOSED:
        return "DIAGNOSED"
    if notice is NoticeKind.REMINDER:
        return f"STILL {level}"
    if notice is NoticeKind.RAISED:
        return {NotifyReason.MORE_SEVERE: f"RAISED to {level}", NotifyReason.CONFIRMED: f"CONFIRMED {level}"}.get(
            reason, f"UPDATE {level}"
        )
    if reason is NotifyReason.REOPENED:
        return f"{level} AGAIN"
    if reason is NotifyReason.OUTLIVED_CAUSE:
        return f"STILL {level}"
    return level


def message_subject(job: str, scope: str) -> str:
    """The job, and the node or GPU within it. An alert without a job is about the watcher itself."""
    return " ".join(part for part in (job or "the watcher", scope) if part)


def join_suspects(suspects: tuple[Suspect, ...]) -> str:
    return ", ".join(str(suspect) for suspect in suspects)


def cost_sentence(episode: Episode, is_closed: bool) -> str:
    """GPU-hours and energy lost to this alert; "" if it keeps no GPU from working."""
    if episode.gpu_seconds_lost <= 0 and not episode.finding.gpus_idle:
        return ""
    lost = f"{format_hours(episode.gpu_seconds_lost / 3600)} GPU-hours"
    if episode.joules_lost > 0:
        lost += f" and {format_energy(episode.joules_lost / JOULES_PER_KWH)}"
    if is_closed:
        return f"{lost} lost."
    gpus = episode.finding.gpus_idle
    return f"{lost} lost so far ({gpus} GPU{'' if gpus == 1 else 's'} doing no useful work)."


def timing_sentence(episode: Episode, reason: NotifyReason, is_closed: bool, now: float, wall: float) -> str:
    if is_closed:
        end = min(episode.last_seen_seconds, now)
        lasted, ended = format_duration(end - episode.began_seconds), format_utc_time(wall - (now - end))
        if reason in (NotifyReason.STATE_UNKNOWN, NotifyReason.JOB_REMOVED):
            return f"Lasted at least {lasted}; not monitored after {ended}."
        return f"Lasted {lasted}, until {ended}."
    return f"Started {format_duration(now - episode.began_seconds)} ago, as of {format_utc_time(wall)}."
