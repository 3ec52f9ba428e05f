"""Random histories of findings, gaps, evaluations and restarts: what receivers get is always consistent."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.watcher.alerting.fakes import ManualClock, finding, receiver, recovery
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.common.state_store import StateStore
from wattwatch.watcher.detection.model import AlertName, Finding

POSSIBLE = [
    finding(alert, scope, job, confirmed=confirmed)
    for job in ("llama", "qwen")
    for alert, scope in (
        (AlertName.JOB_HUNG, ""),
        (AlertName.JOB_SLOW, ""),
        (AlertName.NODE_UNREACHABLE, "node-02"),
        (AlertName.JOB_COMPLETED, ""),
    )
    for confirmed in (True, False)
]


class History(RuleBasedStateMachine):
    """The delivery queue is never started: the messages on disk are what would be sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.receivers = [receiver(Path(self.directory.name), 1)]
        self.unseen_since_restart: set[tuple[str, str, str]] = set()
        self.watched_seconds = 0.0
        self.open_store()

    def open_store(self) -> None:
        self.store = StateStore(Path(self.directory.name) / "state.db")
        self.manager = AlertManager(self.store, self.receivers, (), self.clock)

    @rule(
        true=st.lists(st.sampled_from(POSSIBLE), max_size=5),
        judged=st.sets(st.sampled_from(["llama", "qwen"])),
        seconds=st.sampled_from([0.3, 1.0, 5.0, 100.0, 4000.0]),
        times=st.integers(1, 4),
        running=st.sets(st.sampled_from(["llama", "qwen"])),
        nodes_ok=st.sampled_from([(), ("node-01",), ("node-01", "node-02")]),
    )
    def watch(
        self,
        true: list[Finding],
        judged: set[str],
        seconds: float,
        times: int,
        running: set[str],
        nodes_ok: tuple[str, ...],
    ) -> None:
        findings = [each for each in true if each.job in judged]
        recoveries = {job: recovery(*nodes_ok, advancing=job in running, job=job) for job in judged}
        self.unseen_since_restart -= {each.key for each in findings}
        for _ in range(times):
            self.clock.advance(seconds)
            before = {view.id for view in self.manager.episodes() if view.closed_wall_seconds is None}
            kept = {view.id for view in self.manager.episodes() if view.job not in judged} & before
            watched_before = self.watched_seconds
            self.watched_seconds += seconds
            self.manager.observe(
                findings, frozenset({"", *judged}), self.clock.monotonic(), self.clock.wall(), recoveries
            )
            after = {view.id for view in self.manager.episodes() if view.closed_wall_seconds is None}
            assert kept <= after, "an episode of a job that was not judged was closed"
            if any(each.alert is AlertName.JOB_COMPLETED for each in true) or watched_before + seconds >= 1800:
                continue
            for view in self.manager.episodes():
                if view.id in before - after and (view.job, view.alert, view.scope) in self.unseen_since_restart:
                    hung = any(f.job == view.job and f.alert is AlertName.JOB_HUNG and f.confirmed for f in findings)
                    ended = view.job in running or view.scope in nodes_ok or hung
                    ended = ended or (view.job, "JobCompleted", "") in self.unseen_since_restart
                    assert ended, "closed after a restart without evidence of recovery"

    @rule(seconds=st.sampled_from([-4000.0, -30.0, -1.0, 30.0, 4000.0]))
    def set_wall_clock(self, seconds: float) -> None:
        self.clock.wall_seconds += seconds

    @rule(kind=st.sampled_from(["stop", "kill"]))
    def restart(self, kind: str) -> None:
        waiting = [delivery.key for delivery in self.store.waiting_deliveries()]
        if kind == "stop":
            self.manager.stop()
        self.store.close()
        self.clock.seconds = 5.0
        self.open_store()
        self.watched_seconds = 0.0
        self.unseen_since_restart = {
            (view.job, view.alert, view.scope) for view in self.manager.episodes() if view.closed_wall_seconds is None
        }
        assert [delivery.key for delivery in self.store.waiting_deliveries()] == waiting

    @invariant()
    def messages_are_consistent(self) -> None:
        statuses_by_episode: dict[str, list[str]] = defaultdict(list)
        numbers: dict[str, list[int]] = defaultdict(list)
        for delivery in self.store.waiting_deliveries():
            payload = orjson.loads(delivery.payload)
            statuses_by_episode[delivery.episode_id].append(payload["status"])
            (alert,) = payload["alerts"]
            assert payload["status"] == "firing" or alert["startsAt"] <= alert["endsAt"], "ended before it began"
            numbers[delivery.episode_id].append(int(delivery.key.rpartition("-")[2]))
        for episode, statuses in statuses_by_episode.items():
            assert statuses[0] == "firing"
            assert "resolved" not in statuses[:-1], "a message was sent after the closing one"
            assert len(statuses) <= 4, "opened, confirmed, more severe, closed: more is noise"
            assert numbers[episode] == list(range(1, len(statuses) + 1))
        views = self.manager.episodes()
        for view in views:
            closing_sent = statuses_by_episode[view.id][-1:] == ["resolved"]
            assert closing_sent == (view.closed_wall_seconds is not None and bool(statuses_by_episode[view.id]))
            assert view.gpu_hours_lost >= 0
            assert view.closed_wall_seconds is None or view.opened_wall_seconds <= view.closed_wall_seconds
            assert (view.absent_since_wall_seconds is None) == (not view.kept_open)
        still = [(view.job, view.alert, view.scope) for view in views if view.closed_wall_seconds is None]
        assert len(still) == len(set(still)), "one finding has two open episodes"
        for view in views:
            if view.closed_wall_seconds is None and view.suppressed_by is None and not statuses_by_episode[view.id]:
                assert view.alert != AlertName.JOB_COMPLETED.value, (
                    "nothing explains this alert and nobody was notified of it"
                )

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
