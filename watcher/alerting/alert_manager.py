"""Findings in, messages out: which alert episodes are open, who is notified, and one commit that saves both.

To follow the data, read `AlertManager.observe`:

1. `inhibition.py` finds which finding explains which other one.
2. `notify_policy.py` decides for each (job, alert, scope) whether to send a message, with a named reason.
3. `message.py` writes the text; the receiver's module in `receivers/` lays it out; the routes choose the receivers.
4. The state store saves the changed episodes and the messages in one commit. From here on, kill -9 loses nothing.
5. `delivery_queue.py` delivers.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from pydantic import TypeAdapter, ValidationError

from wattwatch.collectors.clock import Clock, WallClockSteps
from wattwatch.watcher.alerting.delivery_queue import DeliveryQueue
from wattwatch.watcher.alerting.episode import (
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
from wattwatch.watcher.alerting.notify_policy import CLEAR_SECONDS, decide_notification, kept_open_reason
from wattwatch.watcher.alerting.receivers.base import find_receiver
from wattwatch.watcher.common.state_store import Delivery, EpisodeRow, StateStore, StateStoreError
from wattwatch.watcher.config.settings import ReceiverSection, RouteSection
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, Severity
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
from wattwatch.watcher.detection.wasted_time import JOULES_PER_KWH
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView

log = logging.getLogger("wattwatch.alerting")

MAX_CLOSED_EPISODES_SHOWN: Final = 100
FORGET_EVERY_SECONDS: Final = 3600.0
# The evidence and cost of an open episode change every second. Saving them that often would wear the disk; after a
# crash they may be this old.
SAVE_EVERY_SECONDS: Final = 60.0

NO_RECOVERY_EVIDENCE: Final[Mapping[str, RecoveryEvidence]] = MappingProxyType({})
EPISODE_ADAPTER: Final = TypeAdapter(Episode)


@dataclass(frozen=True, slots=True)
class AppliedDecision:
    """One decision, applied to its episode in memory and not yet saved."""

    episode: Episode
    decision: NotifyDecision
    deliveries: tuple[Delivery, ...]
    is_new: bool = False
    has_new_diagnosis: bool = False


class AlertManager:
    """Loads the open episodes when created. One thread calls `observe`, after each evaluation; any may call `stats`."""

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
        """`jobs`: the configured ones. Open episodes of any other job are closed: nothing will evaluate it again."""
        self._store = store
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._routes = tuple(routes)
        self._clock = clock
        self._reminder_seconds = reminder_seconds
        self._external_url = external_url
        self._open: dict[EpisodeKey, Episode] = {}
        self._closed: deque[Episode] = deque(maxlen=MAX_CLOSED_EPISODES_SHOWN)
        self._previous: dict[EpisodeKey, PreviousEpisode] = {}
        self._announced: set[EpisodeKey] = set()  # open ones that a message about their cause has named
        self._diagnoses: dict[str, EpisodeDiagnosis] = {}  # by the id of the open episode
        self._loaded: dict[str, Episode] = {}  # by id, as saved by an earlier process: dated by its wall clock
        self._clock_steps = WallClockSteps()
        self._unsaved: dict[str, Episode] = {}
        self._unsaved_deliveries: list[Delivery] = []
        self._saved_seconds = self._forgot_seconds = clock.monotonic()
        self.save_error: str | None = None  # why the state cannot be saved now; messages are sent all the same
        self._load()
        self._queue = DeliveryQueue(store, receivers, clock)
        self._views = self._make_views(clock.monotonic(), clock.wall())
        if jobs is not None:
            self._close_removed_jobs(frozenset(jobs) | {""})

    def start(self) -> None:
        self._queue.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Save and deliver what is due. Open episodes stay open: a stopped watcher is no sign of recovery.

        The store is left open for its owner to close.
        """
        self._save([], self._clock.monotonic(), self._clock.wall(), everything=True)
        self._queue.stop(timeout_seconds)

    def episodes(self) -> tuple[EpisodeView, ...]:
        """The open ones, oldest first, then the last closed ones, newest first."""
        return self._views

    def stats(self) -> DeliveryStats:
        return self._queue.stats()

    def add_diagnosis(self, episode_id: str, diagnosis: EpisodeDiagnosis) -> None:
        """Attach a diagnosis to an open episode; it is reported with the next evaluation. Same thread as `observe`."""
        self._diagnoses[episode_id] = diagnosis

    def observe(
        self,
        findings: Iterable[Finding],
        evaluated_jobs: Collection[str],
        now: float,
        wall: float,
        recoveries: Mapping[str, RecoveryEvidence] = NO_RECOVERY_EVIDENCE,
    ) -> None:
        """Take all findings of one evaluation. Episodes of jobs that were not evaluated stay as they are.

        `recoveries`, by job: positive evidence that it runs. It closes what was found before the watcher restarted.
        """
        step = self._clock_steps.update(now, wall)
        if step:
            self._date_again(step, now, wall)
        found = {known.key: known for known in map(self._with_known_scope, findings)}
        updates = self._updates(found, evaluated_jobs, now, wall, recoveries)
        open_ids = {episode.id for episode in self._open.values()}
        self._diagnoses = {each: diagnosis for each, diagnosis in self._diagnoses.items() if each in open_ids}
        applied = [
            each for key, update in updates if (each := self._decide_and_apply(self._open.get(key), update)) is not None
        ]
        self._save(applied, now, wall)
        self._queue.enqueue([delivery for each in applied for delivery in each.deliveries])
        if applied or step:
            self._views = self._make_views(now, wall)

    def _date_again(self, step_seconds: float, now: float, wall: float) -> None:
        """The wall clock was set. Episodes of this process keep their distance from now, which the monotonic clock has
        measured. Those of an earlier process keep their dates: only that process knew the distance."""
        log.warning("the wall clock was changed by %+.0f s: alerts now use the new time", step_seconds)
        for key, episode in self._open.items():
            loaded = self._loaded.get(episode.id)
            opened, began = episode.opened_wall_seconds + step_seconds, episode.began_seconds
            if loaded is not None:
                again = on_this_clock(loaded, now, wall)
                opened, began = again.opened_wall_seconds, again.began_seconds
            self._open[key] = self._unsaved[episode.id] = replace(
                episode, opened_wall_seconds=opened, began_seconds=began
            )
        for place, episode in enumerate(self._closed):
            if episode.id not in self._loaded:
                closed = episode.closed_wall_seconds
                self._closed[place] = replace(
                    episode,
                    opened_wall_seconds=episode.opened_wall_seconds + step_seconds,
                    closed_wall_seconds=None if closed is None else closed + step_seconds,
                )

    def _updates(
        self,
        found: dict[EpisodeKey, Finding],
        evaluated_jobs: Collection[str],
        now: float,
        wall: float,
        recoveries: Mapping[str, RecoveryEvidence],
    ) -> list[tuple[EpisodeKey, EpisodeUpdate]]:
        """What this evaluation says about each key, causes before their consequences."""
        active = {key: episode.finding for key, episode in self._open.items() if still_inhibits(episode, now)} | found
        causes = root_causes(map(self._with_first_time, active.values()), self._earlier_causes())
        completed = {finding.job for finding in active.values() if finding.alert is AlertName.JOB_COMPLETED}
        keys = [key for key in {**self._open, **found} if key[0] in evaluated_jobs or key in found]
        keys.sort(key=lambda key: (cause_order(found[key] if key in found else self._open[key].finding), key))
        updates = []
        for key in keys:
            cause = causes.get(key)
            finding = found.get(key)
            consequences: tuple[Finding, ...] = ()
            if finding is not None and takes_consequence_severity(finding):
                consequences = tuple(
                    found[other] for other, source in causes.items() if source.key == key and other in found
                )
            episode = self._open.get(key)
            new_receivers: tuple[str, ...] = ()
            reported_alone = frozenset(
                finding_label(each) for each in consequences if self._is_known_as_critical(each.key)
            )
            if episode is not None and episode.notified is not None:
                new_receivers = tuple(sorted(self._receivers_for(consequences) - set(episode.notified.receivers)))
            update = EpisodeUpdate(
                finding=finding,
                now=now,
                wall=wall,
                cause=None if cause is None else finding_label(cause),
                consequences=consequences,
                job_completed=key[0] in completed,
                previous=self._previous.get(key),
                recovery=recoveries.get(key[0]),
                successors=() if finding is not None else find_successors(self._open[key].finding, found.values()),
                diagnosis=None if episode is None else self._diagnoses.get(episode.id),
                new_receivers=new_receivers,
                reported_alone=reported_alone,
            )
            updates.append((key, update))
        return updates

    def _with_known_scope(self, finding: Finding) -> Finding:
        """A GPU that no query returns has only its index. If an open alert names the same GPU by its PCI id, as an
        earlier watcher process saw it, this is that alert and no new one."""
        if finding.key in self._open or not finding.scope or not finding.suspects:
            return finding
        suspect = finding.suspects[0]
        for job, alert, scope in self._open:
            if (job, alert) != (finding.job, finding.alert.value) or "/" not in scope or suspect.gpu is None:
                continue
            known = self._open[job, alert, scope].finding.suspects
            if any((each.node, each.gpu) == (suspect.node, suspect.gpu) for each in known):
                return replace(finding, scope=scope)
        return finding

    def _with_first_time(self, finding: Finding) -> Finding:
        """A cause began with its episode, even if a restarted detector dates it later.

        A job-stopping finding keeps the time it gives itself: a job can stop, run on, and stop again within an episode.
        """
        episode = self._open.get(finding.key)
        if episode is None or ALERT_KINDS[finding.alert].stops_job:
            return finding
        return replace(finding, since_seconds=min(finding.since_seconds, episode.began_seconds))

    def _is_known_as_critical(self, key: EpisodeKey) -> bool:
        """Whether people know of this open episode, from a message of its own or one about its cause: another message
        in the same words would be no news."""
        episode = self._open.get(key)
        if episode is not None and key in self._announced:
            return True
        return episode is not None and episode.notified is not None and episode.notified.severity is Severity.CRITICAL

    def _earlier_causes(self) -> dict[EpisodeKey, str]:
        """Causes of what was inhibited in the last evaluation and present since, or was so before a restart."""
        return {
            key: episode.suppressed_by
            for key, episode in self._open.items()
            if episode.suppressed_by is not None and (episode.absent_seconds is None or episode.unseen_since_restart)
        }

    def _decide_and_apply(self, episode: Episode | None, update: EpisodeUpdate) -> AppliedDecision | None:
        """Decide one key and apply it in memory; None if no episode is open and none opens."""
        decision = decide_notification(episode, update, self._reminder_seconds)
        if episode is not None:
            return self._apply(episode, update, decision)
        if update.finding is None or decision.reason is NotifyReason.JOB_ALREADY_COMPLETED:
            return None
        episode = open_episode(uuid.uuid4().hex[:16], update, update.finding)
        return replace(self._apply(episode, update, decision), is_new=True)

    def _apply(self, episode: Episode, update: EpisodeUpdate, decision: NotifyDecision) -> AppliedDecision:
        receivers = self._receivers_of(episode, update, decision)
        after = advance_episode(episode, update, decision, receivers)
        deliveries: tuple[Delivery, ...] = ()
        if decision.notice is not None:
            job_stops = unreported_job_stops(episode.notified, update)
            self._announced |= {each.key for each in job_stops}
            related = (*job_stops, *update.successors)
            message = compose_message(
                after, decision.notice, decision.reason, update.now, update.wall, self._external_url, related
            )
            deliveries = tuple(self._delivery(name, message, after, update.wall) for name in receivers)
            if decision.notice is NoticeKind.CLOSED:
                deliveries = tuple(d for d in deliveries if self._receivers[d.receiver].send_resolved)
        if decision.closes:
            self._open.pop(after.key, None)
            self._announced.discard(after.key)
            self._closed.append(after)
            if after.notified is not None:
                self._previous[after.key] = PreviousEpisode(update.now, after.reopenings)
        else:
            self._open[after.key] = after
        return AppliedDecision(after, decision, deliveries, has_new_diagnosis=after.diagnosis != episode.diagnosis)

    def _receivers_of(self, episode: Episode, update: EpisodeUpdate, decision: NotifyDecision) -> tuple[str, ...]:
        """Receivers that the routes choose now, and those already notified, who must learn how it continues."""
        notified = set() if episode.notified is None else self._receivers.keys() & set(episode.notified.receivers)
        if decision.reason is NotifyReason.NEW_RECEIVERS:
            return update.new_receivers
        if decision.notice is NoticeKind.DIAGNOSED:
            return tuple(sorted(notified))
        if decision.reason is NotifyReason.STOPPED_JOB:
            # The receivers of the inhibited alert. If it is routed to none, those that already know about its cause.
            job_stops = unreported_job_stops(episode.notified, update)
            return tuple(sorted(self._receivers_for(job_stops) or notified))
        if decision.notice is NoticeKind.CLOSED or update.finding is None:
            return tuple(sorted(notified))
        severity = effective_severity(update.finding, update.consequences)
        routed = matching_receivers(update.finding, severity, self._routes, self._receivers)
        return tuple(sorted(notified | routed | self._receivers_for(update.consequences)))

    def _receivers_for(self, consequences: Sequence[Finding]) -> frozenset[str]:
        """Receivers that the inhibited findings are routed to: they are notified of the cause instead."""
        routed = (
            matching_receivers(each, finding_severity(each), self._routes, self._receivers) for each in consequences
        )
        return frozenset[str]().union(*routed)

    def _delivery(self, receiver_name: str, message: AlertMessage, episode: Episode, wall: float) -> Delivery:
        """Rendered once, here: a message that is delivered late must describe the state at the time it was written
        (https://github.com/prometheus/alertmanager/issues/2510)."""
        assert episode.notified is not None
        receiver = find_receiver(self._receivers[receiver_name].type)
        return Delivery(
            receiver=receiver_name,
            key=f"{episode.id}-{episode.notified.message_count}",
            episode_id=episode.id,
            payload=receiver.render(message, receiver_name),
            enqueued_wall_seconds=wall,
        )

    def _save(self, applied: Sequence[AppliedDecision], now: float, wall: float, everything: bool = False) -> None:
        """One commit of the changed episodes and the messages about them.

        If the disk fails, messages are sent all the same, and what could not be saved is retried with the next commit:
        a full disk on the control host must not hide a hung job.
        """
        self._unsaved |= {each.episode.id: each.episode for each in applied if must_be_saved_now(each)}
        if self._unsaved_deliveries:
            # What was delivered meanwhile needs no saving: a restart would send it again.
            pending = {(delivery.receiver, delivery.key) for delivery in self._queue.pending()}
            self._unsaved_deliveries = [d for d in self._unsaved_deliveries if (d.receiver, d.key) in pending]
        self._unsaved_deliveries += [delivery for each in applied for delivery in each.deliveries]
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
                self._forget_old_episodes(now)
            self.save_error = None
        except StateStoreError as error:
            if self.save_error is None:
                log.error("alerts and messages cannot be saved: %s", error)
            self.save_error = str(error)

    def _forget_old_episodes(self, now: float) -> None:
        """An old closing says nothing about flapping. Rows on disk are pruned by the daemon's maintenance task."""
        self._previous = {
            key: previous
            for key, previous in self._previous.items()
            if now - previous.closed_seconds < REOPEN_WINDOW_SECONDS
        }

    def _load(self) -> None:
        """Open episodes of an earlier process, on this one's clock. They close only on evidence of recovery."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        for row in self._store.open_episodes():
            saved = episode_from_row(row)
            self._loaded[saved.id] = saved
            episode = on_this_clock(saved, now, wall)
            self._open[episode.key] = replace(
                episode, unseen_since_restart=True, absent_seconds=None, absent_evaluations=0
            )
        for row in self._store.closed_episodes(MAX_CLOSED_EPISODES_SHOWN):
            episode = episode_from_row(row)
            self._loaded[episode.id] = episode
            self._closed.append(episode)
            assert episode.closed_wall_seconds is not None
            closed_seconds = now - max(0.0, wall - episode.closed_wall_seconds)
            if episode.notified is not None:
                self._previous[episode.key] = PreviousEpisode(closed_seconds, episode.reopenings)

    def _close_removed_jobs(self, jobs: frozenset[str]) -> None:
        now, wall = self._clock.monotonic(), self._clock.wall()
        applied = []
        for episode in [episode for episode in self._open.values() if episode.finding.job not in jobs]:
            update = EpisodeUpdate(finding=None, now=now, wall=wall)
            notice = None if episode.notified is None else NoticeKind.CLOSED
            applied.append(self._apply(episode, update, NotifyDecision(NotifyReason.JOB_REMOVED, notice, closes=True)))
        self._save(applied, now, wall)
        self._queue.enqueue([delivery for each in applied for delivery in each.deliveries])
        self._views = self._make_views(now, wall)

    def _make_views(self, now: float, wall: float) -> tuple[EpisodeView, ...]:
        still_open = sorted(self._open.values(), key=lambda episode: (episode.opened_wall_seconds, episode.key))
        return tuple(episode_view(episode, now, wall) for episode in (*still_open, *reversed(self._closed)))


def matching_receivers(
    finding: Finding, severity: Severity, routes: Sequence[RouteSection], receivers: Iterable[str]
) -> frozenset[str]:
    """Names of the receivers with a matching route; all of them if no routes are configured."""
    names = frozenset(receivers)
    if not routes:
        return names
    return names & {route.receiver for route in routes if route_matches(route, finding, severity)}


def route_matches(route: RouteSection, finding: Finding, severity: Severity) -> bool:
    """An absent list matches everything. `severity` is the one to be reported, raised by consequences if any."""
    return (
        (not route.severities or severity in route.severities)
        and (not route.alerts or finding.alert in route.alerts)
        and (not route.jobs or finding.job in route.jobs)
    )


def still_inhibits(episode: Episode, now: float) -> bool:
    """Whether an open episode whose finding is absent may still explain other findings.

    While it flickers, it may. After a restart, only a completed job may: anything else may have recovered meanwhile and
    must hide nothing new. Nor may an episode that stays open only because it flaps.
    """
    if episode.unseen_since_restart:
        return episode.finding.alert is AlertName.JOB_COMPLETED
    return episode.absent_seconds is None or now - episode.absent_seconds < CLEAR_SECONDS


def must_be_saved_now(applied: AppliedDecision) -> bool:
    """Everything except the latest cost and numbers, which are saved every SAVE_EVERY_SECONDS."""
    decision = applied.decision
    return decision.notice is not None or applied.has_new_diagnosis or decision.closes or applied.is_new


def on_this_clock(saved: Episode, now: float, wall: float) -> Episode:
    """An episode as an earlier process saved it, in this process's monotonic seconds. It cannot have opened in the
    future: if it seems so, the wall clock was set back since."""
    episode = saved.shifted(now - wall, now)
    return replace(episode, opened_wall_seconds=min(episode.opened_wall_seconds, wall))


def episode_to_row(episode: Episode, wall_minus_now: float) -> EpisodeRow:
    """On disk all times are wall time: a monotonic clock is meaningless to the next process."""
    finding = episode.finding
    return EpisodeRow(
        id=episode.id,
        job=finding.job,
        alert=finding.alert.value,
        scope=finding.scope,
        opened_wall_seconds=episode.opened_wall_seconds,
        closed_wall_seconds=episode.closed_wall_seconds,
        content=EPISODE_ADAPTER.dump_json(episode.shifted(wall_minus_now), by_alias=True),
    )


def episode_from_row(row: EpisodeRow) -> Episode:
    """Raises StateStoreError if the row was not written by a compatible version."""
    try:
        return EPISODE_ADAPTER.validate_json(row.content)
    except ValidationError:
        raise StateStoreError(
            f"alert {row.alert} of {row.job or 'the watcher'} (id {row.id}) in the state file cannot be read: "
            "another version of wattwatch may have written it"
        ) from None


def episode_view(episode: Episode, now: float, wall: float) -> EpisodeView:
    """`now`: monotonic seconds, and `wall`: Unix time, of the same moment."""
    finding = episode.finding
    closed = episode.closed_wall_seconds
    absent_since = None if closed is not None else episode.absent_seconds
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
        closed_wall_seconds=closed,
        gpu_hours_lost=episode.gpu_seconds_lost / 3600,
        suppressed_by=episode.suppressed_by,
        kilowatt_hours_lost=episode.joules_lost / JOULES_PER_KWH,
        diagnosis="" if episode.diagnosis is None else str(episode.diagnosis),
        last_seen_wall_seconds=None if closed is not None else wall - max(0.0, now - episode.last_seen_seconds),
        absent_since_wall_seconds=None if absent_since is None else wall - (now - absent_since),
        kept_open=kept_open_reason(episode, now, wall),
        notified_causes=() if episode.notified is None else episode.notified.causes,
    )
