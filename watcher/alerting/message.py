"""What people read, in plain words, the same for every receiver. Pure: receivers only lay it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wattwatch.watcher.alerting.episode import Episode, NoticeKind, NotifyReason, finding_label
from wattwatch.watcher.common.formatting import duration, format_energy, format_hours
from wattwatch.watcher.detection.model import Finding, Severity, Suspect
from wattwatch.watcher.detection.wasted_time import JOULES_PER_KWH

HEADLINE: Final = {
    NoticeKind.OPENED: "{severity}",
    NoticeKind.RAISED: "RAISED to {severity}",
    NoticeKind.DIAGNOSED: "DIAGNOSED",
    NoticeKind.REMINDER: "STILL {severity}",
    NoticeKind.CLOSED: "OVER",
}


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """One notice of one episode. Wall seconds are Unix time."""

    notice: NoticeKind
    title: str  # "CRITICAL JobHung llama-30b"
    summary: str
    evidence: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    advice: str
    cost: str  # "4.3 GPU-hours lost so far"; "" where no board stands idle because of it
    timing: str  # since when, or how long it was
    reason: str  # why this is told now
    diagnosis: str  # who holds the job up, and whether that is proved; "" where it is not known
    followers: tuple[str, ...]  # what it keeps quiet
    link: str | None
    # The same for machines.
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
    def is_over(self) -> bool:
        return self.notice is NoticeKind.CLOSED

    @property
    def text(self) -> str:
        """All of it as plain text, the most important first: whoever cuts it cuts the end."""
        lines = [self.title, self.summary]
        if self.diagnosis:
            lines.append("Diagnosis: " + self.diagnosis)
        if self.suspects:
            lines.append("Suspect: " + join_suspects(self.suspects))
        lines += [f"- {fact}" for fact in self.evidence]
        lines += [line for line in (self.cost, self.timing, self.reason) if line]
        if self.followers:
            lines.append("Follows from it and is not told on its own: " + ", ".join(self.followers))
        if self.advice and not self.is_over:
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
    news: tuple[Finding, ...] = (),
) -> AlertMessage:
    """The message about this episode as it is after the decision (`Episode.told` is set).

    `news`: other findings that are the reason for it, told in this message and nowhere else.
    """
    finding = episode.finding
    assert episode.told is not None
    severity = episode.told.severity
    headline = HEADLINE[notice].format(severity=severity.value.upper())
    over = notice is NoticeKind.CLOSED
    return AlertMessage(
        notice=notice,
        title=f"{headline} {finding.alert.value} {message_subject(finding.job, finding.scope)}".rstrip(),
        summary=finding.summary if episode.confirmed or over else f"{finding.summary} (not confirmed yet)",
        evidence=finding.evidence,
        suspects=episode.told.suspects,
        advice=episode.advice,
        cost=cost_sentence(episode, over),
        timing=timing_sentence(episode, over, now),
        reason=" ".join((reason.value, *(f"{finding_label(each)}: {each.summary}" for each in news))),
        diagnosis="" if episode.told.diagnosis is None else str(episode.told.diagnosis),
        followers=episode.followers,
        link=external_url,
        episode_id=episode.id,
        alert=finding.alert.value,
        job=finding.job,
        scope=finding.scope,
        severity=severity,
        confirmed=episode.told.confirmed,
        gpu_hours_lost=episode.gpu_seconds_lost / 3600,
        kilowatt_hours_lost=episode.joules_lost / JOULES_PER_KWH,
        opened_wall_seconds=episode.opened_wall_seconds,
        closed_wall_seconds=wall if over else None,
    )


def message_subject(job: str, scope: str) -> str:
    """The job and the place within it. An alert without a job is about the watcher itself."""
    return " ".join(part for part in (job or "the watcher", scope) if part)


def join_suspects(suspects: tuple[Suspect, ...]) -> str:
    return ", ".join(str(suspect) for suspect in suspects)


def cost_sentence(episode: Episode, over: bool) -> str:
    if episode.gpu_seconds_lost <= 0 and not episode.finding.gpus_idle:
        return ""
    lost = f"{format_hours(episode.gpu_seconds_lost / 3600)} GPU-hours lost"
    if episode.joules_lost > 0:
        drawn = format_energy(episode.joules_lost / JOULES_PER_KWH)
        lost = f"{format_hours(episode.gpu_seconds_lost / 3600)} GPU-hours and {drawn} lost"
    if over:
        return f"{lost}."
    boards = episode.finding.gpus_idle
    return f"{lost} so far ({boards} GPU{'' if boards == 1 else 's'} without useful work)."


def timing_sentence(episode: Episode, over: bool, now: float) -> str:
    if over:
        end = now if episode.absent_seconds is None else episode.absent_seconds
        return f"It lasted {duration(end - episode.began_seconds)}."
    return f"It began {duration(now - episode.began_seconds)} ago."
