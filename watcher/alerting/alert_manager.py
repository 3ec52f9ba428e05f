"""Which receivers a finding concerns. Pure."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from pydantic import TypeAdapter, ValidationError

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.alerting.delivery_queue import DeliveryQueue
from wattwatch.watcher.alerting.episode import (
    JOB_STOPPING,
    REOPEN_WINDOW_SECONDS,
    Episode,
    EpisodeDiagnosis,
    EpisodeUpdate,
    NoticeKind,
    NotifyDecision,
    NotifyReason,
    PreviousEpisode,
    advance_episode,
    effective_severity,
    finding_label,
    finding_severity,
    open_episode,
    unreported_job_stops,
)
from wattwatch.watcher.alerting.inhibition import (
    EpisodeKey,
    cause_order,
    find_successors,
    root_causes,
    takes_consequence_severity,
)
from wattwatch.watcher.alerting.message import AlertMessage, compose_message
from wattwatch.watcher.alerting.notify_policy import CLEAR_SECONDS, decide_notification
from wattwatch.watcher.alerting.receivers.slack import slack_payload
from wattwatch.watcher.alerting.receivers.webhook import webhook_payload
from wattwatch.watcher.common.state_store import Delivery, EpisodeRow, StateStore, StateStoreError
from wattwatch.watcher.config.settings import ReceiverSection, RouteSection
from wattwatch.watcher.detection.model import AlertName, Finding, Severity
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
from wattwatch.watcher.detection.wasted_time import JOULES_PER_KWH
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView


def matching_receivers(
    finding: Finding, severity: Severity, routes: Sequence[RouteSection], receivers: Iterable[str]
) -> frozenset[str]:
    """Names of those with a route that matches; all of them where there is no route at all."""
    names = frozenset(receivers)
    if not routes:
        return names
    return names & {route.receiver for route in routes if route_matches(route, finding, severity)}


def route_matches(route: RouteSection, finding: Finding, severity: Severity) -> bool:
    """A list that is absent matches everything. `severity` is the one it is told with, which may be lent."""
    return (
        (not route.severities or severity in route.severities)
        and (not route.alerts or finding.alert in route.alerts)
        and (not route.jobs or finding.job in route.jobs)
    )


# Findings in, messages out: the episodes that are open, who is told, and the commit that makes both last.

log = logging.getLogger("wattwatch.tell")

CLOSED_SHOWN: Final = 100
FORGET_EVERY_SECONDS: Final = 3600.0
# Evidence and cost of an open episode change each second; on disk they may be this old.
SAVE_EVERY_SECONDS: Final = 60.0

NO_RECOVERY_SIGNALS: Final[Mapping[str, RecoveryEvidence]] = MappingProxyType({})
EPISODE_ADAPTER: Final = TypeAdapter(Episode)


@dataclass(frozen=True, slots=True)
class AppliedDecision:
    """One decision, carried out."""

    episode: Episode
    decision: NotifyDecision
    deliveries: tuple[Delivery, ...]
    is_new: bool = False
    learned: bool = False  # a diagnosis has come


class AlertManager:
    """`observe` is called by one thread, after each evaluation; `stats` by any. Loads what is open on construction."""

    def __init__(
        self,
        store: StateStore,
        receivers: Sequence[ReceiverSection],
        routes: Sequence[RouteSection],
        clock: Clock,
        *,
        jobs: Collection[str] | None = None,
        reminder_seconds: float | None = None,
        external_url: str | None = None,
    ) -> None:
        """`jobs`: those that are watched; open episodes of others are closed, as nobody will judge them again."""
        self._store = store
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._routes = tuple(routes)
        self._clock = clock
        self._reminder_seconds = reminder_seconds
        self._external_url = external_url
        self._open: dict[EpisodeKey, Episode] = {}
        self._closed: deque[Episode] = deque(maxlen=CLOSED_SHOWN)
        self._endings: dict[EpisodeKey, PreviousEpisode] = {}
        self._diagnoses: dict[str, EpisodeDiagnosis] = {}  # by the id of the open episode
        self._unsaved: dict[str, Episode] = {}
        self._unsaved_deliveries: list[Delivery] = []
        self._saved_seconds = self._forgot_seconds = clock.monotonic()
        self.trouble: str | None = None  # why nothing can be saved just now; messages go out all the same
        self._load()
        self._outbox = DeliveryQueue(store, receivers, clock)
        self._views = self._make_views()
        if jobs is not None:
            self._close_unwatched(frozenset(jobs) | {""})

    def start(self) -> None:
        self._outbox.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Silence is not health: nothing is closed. The store is left open for its owner to close."""
        self._save([], self._clock.monotonic(), self._clock.wall(), everything=True)
        self._outbox.stop(timeout_seconds)

    def episodes(self) -> tuple[EpisodeView, ...]:
        """Open ones, oldest first, then those that closed last."""
        return self._views

    def stats(self) -> DeliveryStats:
        return self._outbox.stats()

    def diagnosed(self, episode_id: str, diagnosis: EpisodeDiagnosis) -> None:
        """What was found out about an open episode; told with the next evaluation. For the thread of `observe`."""
        self._diagnoses[episode_id] = diagnosis

    def observe(
        self,
        findings: Iterable[Finding],
        judged_jobs: Collection[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, RecoveryEvidence] = NO_RECOVERY_SIGNALS,
    ) -> None:
        """All findings of one evaluation. Episodes of jobs that were not judged stay as they are.

        `witnesses`, by job: what is positively seen of it. It ends what was found before the watcher restarted.
        """
        found = {finding.key: finding for finding in findings}
        looks = self._looks(found, judged_jobs, now, wall, witnesses)
        still_open = {episode.id for episode in self._open.values()}
        self._diagnoses = {each: found for each, found in self._diagnoses.items() if each in still_open}
        steps = [step for key, look in looks if (step := self._step(self._open.get(key), look)) is not None]
        self._save(steps, now, wall)
        self._outbox.enqueue([delivery for step in steps for delivery in step.deliveries])
        if steps:
            self._views = self._make_views()

    def _looks(
        self,
        found: dict[EpisodeKey, Finding],
        judged_jobs: Collection[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, RecoveryEvidence],
    ) -> list[tuple[EpisodeKey, EpisodeUpdate]]:
        """What this evaluation says of each key, causes before consequences."""
        active = {key: episode.finding for key, episode in self._open.items() if still_inhibits(episode, now)} | found
        causes = root_causes(map(self._as_begun, active.values()), self._explained())
        ended = {finding.job for finding in active.values() if finding.alert is AlertName.JOB_COMPLETED}
        keys = [key for key in {**self._open, **found} if key[0] in judged_jobs or key in found]
        keys.sort(key=lambda key: (cause_order(found[key] if key in found else self._open[key].finding), key))
        looks = []
        for key in keys:
            cause = causes.get(key)
            finding = found.get(key)
            followers: tuple[Finding, ...] = ()
            if finding is not None and takes_consequence_severity(finding):
                followers = tuple(
                    found[other] for other, source in causes.items() if source.key == key and other in found
                )
            episode = self._open.get(key)
            told = None if episode is None else episode.told
            looks.append(
                (
                    key,
                    EpisodeUpdate(
                        finding=finding,
                        now=now,
                        wall=wall,
                        cause=None if cause is None else finding_label(cause),
                        followers=followers,
                        job_ended=key[0] in ended,
                        ending=self._endings.get(key),
                        witness=witnesses.get(key[0]),
                        successors=()
                        if finding is not None
                        else find_successors(self._open[key].finding, found.values()),
                        diagnosis=None if episode is None else self._diagnoses.get(episode.id),
                        newly_concerned=()
                        if told is None
                        else tuple(sorted(self._concerned_by(followers) - set(told.receivers))),
                    ),
                )
            )
        return looks

    def _as_begun(self, finding: Finding) -> Finding:
        """A cause began with its episode, whatever a restarted detector makes of it; a stop began when it says so."""
        episode = self._open.get(finding.key)
        if episode is None or finding.alert in JOB_STOPPING:
            return finding
        return replace(finding, since_seconds=min(finding.since_seconds, episode.began_seconds))

    def _explained(self) -> dict[EpisodeKey, str]:
        """What was explained at the last look and has been true since, or was before a restart."""
        return {
            key: episode.suppressed_by
            for key, episode in self._open.items()
            if episode.suppressed_by is not None and (episode.absent_seconds is None or episode.settling)
        }

    def _step(self, episode: Episode | None, look: EpisodeUpdate) -> AppliedDecision | None:
        """Decide one key and carry it out in memory; None where nothing is open and nothing opens."""
        decision = decide_notification(episode, look, self._reminder_seconds)
        if episode is not None:
            return self._carry_out(episode, look, decision)
        if look.finding is None or decision.reason is NotifyReason.ENDED_BEFORE:
            return None
        episode = open_episode(uuid.uuid4().hex[:16], look, look.finding)
        return replace(self._carry_out(episode, look, decision), is_new=True)

    def _carry_out(self, episode: Episode, look: EpisodeUpdate, decision: NotifyDecision) -> AppliedDecision:
        receivers = self._receivers_of(episode, look, decision)
        after = advance_episode(episode, look, decision, receivers)
        deliveries: tuple[Delivery, ...] = ()
        if decision.notice is not None:
            news = (*unreported_job_stops(episode.told, look), *look.successors)
            message = compose_message(
                after, decision.notice, decision.reason, look.now, look.wall, self._external_url, news
            )
            deliveries = tuple(self._delivery(name, message, after, look.wall) for name in receivers)
            if decision.notice is NoticeKind.CLOSED:
                deliveries = tuple(d for d in deliveries if self._receivers[d.receiver].send_resolved)
        if decision.closes:
            self._open.pop(after.key, None)
            self._closed.append(after)
            if after.told is not None:
                self._endings[after.key] = PreviousEpisode(look.now, after.reopenings)
        else:
            self._open[after.key] = after
        return AppliedDecision(after, decision, deliveries, learned=after.diagnosis != episode.diagnosis)

    def _receivers_of(self, episode: Episode, look: EpisodeUpdate, decision: NotifyDecision) -> tuple[str, ...]:
        """Those it concerns now, and whoever was told before: they hear how it goes on."""
        before = set() if episode.told is None else self._receivers.keys() & set(episode.told.receivers)
        if decision.reason is NotifyReason.CONCERNS_MORE:
            return look.newly_concerned
        if decision.notice is NoticeKind.DIAGNOSED:
            return tuple(sorted(before))
        if decision.reason is NotifyReason.FOLLOWED:
            # Those who would have been told of it; where its own alert is routed to nobody, those who know its cause.
            news = unreported_job_stops(episode.told, look)
            return tuple(sorted(self._concerned_by(news) or before))
        if decision.notice is NoticeKind.CLOSED or look.finding is None:
            return tuple(sorted(before))
        severity = effective_severity(look.finding, look.followers)
        concerned = matching_receivers(look.finding, severity, self._routes, self._receivers)
        return tuple(sorted(before | concerned | self._concerned_by(look.followers)))

    def _concerned_by(self, followers: Sequence[Finding]) -> frozenset[str]:
        """Whoever would have been told of a consequence is told of its cause instead."""
        concerned = (
            matching_receivers(each, finding_severity(each), self._routes, self._receivers) for each in followers
        )
        return frozenset[str]().union(*concerned)

    def _delivery(self, name: str, message: AlertMessage, episode: Episode, wall: float) -> Delivery:
        """Laid out now and never again: a message says what was true when it was written (alertmanager#2510)."""
        assert episode.told is not None
        slack = self._receivers[name].type == "slack"
        return Delivery(
            receiver=name,
            key=f"{episode.id}-{episode.told.notices}",
            episode_id=episode.id,
            payload=slack_payload(message) if slack else webhook_payload(message, name),
            enqueued_wall_seconds=wall,
        )

    def _save(self, steps: Sequence[AppliedDecision], now: float, wall: float, everything: bool = False) -> None:
        """One commit of what changed and of the messages about it.

        Where the disk refuses, people are told all the same, and what could not be saved is tried again next time.
        """
        self._unsaved |= {step.episode.id: step.episode for step in steps if must_be_saved_now(step)}
        if self._unsaved_deliveries:
            waiting = {(delivery.receiver, delivery.key) for delivery in self._outbox.waiting()}
            self._unsaved_deliveries = [d for d in self._unsaved_deliveries if (d.receiver, d.key) in waiting]
        self._unsaved_deliveries += [delivery for step in steps for delivery in step.deliveries]
        if everything or now - self._saved_seconds >= SAVE_EVERY_SECONDS:
            self._saved_seconds = now
            self._unsaved |= {episode.id: episode for episode in self._open.values()}
        try:
            if self._unsaved or self._unsaved_deliveries:
                rows = [episode_to_row(episode, wall - now) for episode in self._unsaved.values()]
                self._store.record(rows, self._unsaved_deliveries)
                self._unsaved.clear()
                self._unsaved_deliveries.clear()
            if now - self._forgot_seconds >= FORGET_EVERY_SECONDS:
                self._forgot_seconds = now
                self._forget(now)
            self.trouble = None
        except StateStoreError as error:
            if self.trouble is None:
                log.error("episodes and messages are not saved: %s", error)
            self.trouble = str(error)

    def _forget(self, now: float) -> None:
        """Old closings are of no use for telling a flap; what is on disk is pruned by the service's slow task."""
        self._endings = {key: end for key, end in self._endings.items() if now - end.seconds < REOPEN_WINDOW_SECONDS}

    def _load(self) -> None:
        """Open episodes of an earlier process, on this one's clock. They must be seen again before they can close."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        for row in self._store.open_episodes():
            episode = episode_from_row(row).shifted(now - wall, now)
            self._open[episode.key] = replace(episode, settling=True, absent_seconds=None, absent_looks=0)
        for row in self._store.closed_episodes(CLOSED_SHOWN):
            episode = episode_from_row(row)
            self._closed.append(episode)
            assert episode.closed_wall_seconds is not None
            ended = now - max(0.0, wall - episode.closed_wall_seconds)
            if episode.told is not None:
                self._endings[episode.key] = PreviousEpisode(ended, episode.reopenings)

    def _close_unwatched(self, jobs: frozenset[str]) -> None:
        now, wall = self._clock.monotonic(), self._clock.wall()
        steps = []
        for episode in [episode for episode in self._open.values() if episode.finding.job not in jobs]:
            look = EpisodeUpdate(finding=None, now=now, wall=wall)
            notice = None if episode.told is None else NoticeKind.CLOSED
            steps.append(self._carry_out(episode, look, NotifyDecision(NotifyReason.NOT_WATCHED, notice, closes=True)))
        self._save(steps, now, wall)
        self._outbox.enqueue([delivery for step in steps for delivery in step.deliveries])
        self._views = self._make_views()

    def _make_views(self) -> tuple[EpisodeView, ...]:
        still = sorted(self._open.values(), key=lambda episode: (episode.opened_wall_seconds, episode.key))
        return tuple(episode_view(episode) for episode in (*still, *reversed(self._closed)))


def still_inhibits(episode: Episode, now: float) -> bool:
    """Whether an open episode may explain others while it is not seen itself.

    Over a flicker it does. After a restart only the end of a job does: what else was true before may have gone, and
    must hide nothing new; nor may what is kept open only because it comes and goes.
    """
    if episode.settling:
        return episode.finding.alert is AlertName.JOB_COMPLETED
    return episode.absent_seconds is None or now - episode.absent_seconds < CLEAR_SECONDS


def must_be_saved_now(step: AppliedDecision) -> bool:
    """Everything but the cost and the latest numbers, which are saved now and then."""
    return step.decision.notice is not None or step.learned or step.decision.closes or step.is_new


def episode_to_row(episode: Episode, wall_minus_now: float) -> EpisodeRow:
    """On disk all times are wall time: a monotonic clock ends with its process."""
    finding = episode.finding
    return EpisodeRow(
        id=episode.id,
        job=finding.job,
        alert=finding.alert.value,
        scope=finding.scope,
        opened_wall_seconds=episode.opened_wall_seconds,
        closed_wall_seconds=episode.closed_wall_seconds,
        content=EPISODE_ADAPTER.dump_json(episode.shifted(wall_minus_now)),
    )


def episode_from_row(row: EpisodeRow) -> Episode:
    try:
        return EPISODE_ADAPTER.validate_json(row.content)
    except ValidationError:
        raise StateStoreError(
            f"episode {row.id} ({row.alert} of {row.job or 'the watcher'}) in the state file cannot be read: "
            "was it written by another version?"
        ) from None


def episode_view(episode: Episode) -> EpisodeView:
    finding = episode.finding
    return EpisodeView(
        id=episode.id,
        job=finding.job,
        alert=finding.alert.value,
        scope=finding.scope,
        severity=episode.severity,
        confirmed=episode.confirmed,
        summary=finding.summary,
        evidence=finding.evidence,
        advice=episode.advice,
        suspects=finding.suspects,
        opened_wall_seconds=episode.opened_wall_seconds,
        closed_wall_seconds=episode.closed_wall_seconds,
        gpu_hours_lost=episode.gpu_seconds_lost / 3600,
        suppressed_by=episode.suppressed_by,
        kilowatt_hours_lost=episode.joules_lost / JOULES_PER_KWH,
        diagnosis="" if episode.diagnosis is None else str(episode.diagnosis),
    )
