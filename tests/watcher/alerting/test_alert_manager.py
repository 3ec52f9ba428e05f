"""Findings in, posts out: which messages receivers get, over root causes, routes, restarts and a full disk."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.alerting.fakes import (
    FakeReceiver,
    ManualClock,
    fake_receiver,
    finding,
    receiver,
    recovery,
    wait_until,
)
from wattwatch.watcher.alerting.alert_manager import AlertManager, episode_from_row, episode_to_row
from wattwatch.watcher.alerting.episode import EpisodeDiagnosis
from wattwatch.watcher.alerting.notify_policy import RESTART_GRACE_MAX_SECONDS
from wattwatch.watcher.common.formatting import format_utc_time
from wattwatch.watcher.common.state_store import EpisodeRow, StateStore, StateStoreError
from wattwatch.watcher.config.settings import ReceiverSection, RouteSection
from wattwatch.watcher.detection.model import AlertName, Finding, Severity, Suspect
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

NODE_DOWN = finding(AlertName.NODE_UNREACHABLE, "node-02", gpus_idle=8)
HUNG = finding()
PROOF = EpisodeDiagnosis("Rank 3 on node-01 is in barrier.", conclusive=True)
SUSPICION = finding(confirmed=False)


class Watch:
    """An alert manager on one state file, evaluated once a second, that can be restarted."""

    def __init__(self, directory: Path, hook: FakeReceiver) -> None:
        self.directory, self.hook = directory, hook
        self.clock = ManualClock()
        self.receivers: tuple[ReceiverSection, ...] = (receiver(directory, hook.port),)
        self.routes: tuple[RouteSection, ...] = ()
        self.jobs: Collection[str] | None = None
        self.reminder_seconds: float | None = None
        self.store: StateStore | None = None
        self.start()

    def start(self) -> None:
        self.store = StateStore(self.directory / "state.db")
        self.manager = AlertManager(
            self.store,
            self.receivers,
            self.routes,
            self.clock,
            jobs=self.jobs,
            reminder_seconds=self.reminder_seconds,
        )
        self.manager.start()

    def stop(self) -> None:
        if self.store is not None:
            wait_until(lambda: self.manager.stats().waiting == 0)
            self.manager.stop()
            self.store.close()
            self.store = None

    def restart(self, away_seconds: float = 60.0) -> None:
        """Its monotonic clock starts over, as after a reboot."""
        self.stop()
        self.clock.advance(away_seconds)
        self.clock.seconds = 5.0
        self.start()

    def evaluate(
        self,
        *findings: Finding,
        times: int = 1,
        judged: Collection[str] = ("", "llama"),
        recovered: RecoveryEvidence | None = None,
    ) -> None:
        recoveries = {} if recovered is None else {recovered.job: recovered}
        for _ in range(times):
            self.clock.advance(1.0)
            self.manager.observe(findings, frozenset(judged), self.clock.monotonic(), self.clock.wall(), recoveries)

    def messages(self, path: str = "/webhook") -> list[tuple[str, str, str]]:
        """All that a receiver got so far: (status, alert, severity)."""
        wait_until(lambda: self.manager.stats().waiting == 0)
        return [
            (alert["status"], alert["labels"]["alertname"], alert["labels"]["severity"])
            for post in list(self.hook.posts)
            if post.path.startswith(path)
            for alert in post.content["alerts"]
        ]

    def last(self) -> Any:
        wait_until(lambda: self.manager.stats().waiting == 0)
        return self.hook.posts[-1].content["alerts"][0]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with fake_receiver() as hook:
        watch = Watch(tmp_path, hook)
        yield watch
        watch.stop()


def test_an_alert_sends_one_message_when_it_opens_and_one_when_it_closes(watch: Watch) -> None:
    watch.evaluate(HUNG, times=30)
    watch.evaluate(times=30)
    assert watch.messages() == [("firing", "JobHung", "critical"), ("resolved", "JobHung", "critical")]


def test_a_suspicion_is_reported_as_a_warning_and_raised_once_when_confirmed(watch: Watch) -> None:
    watch.evaluate(SUSPICION, times=5)
    watch.evaluate(HUNG, times=5)
    watch.evaluate(SUSPICION, times=5)
    watch.evaluate(HUNG, times=5)
    assert watch.messages() == [("firing", "JobHung", "warning"), ("firing", "JobHung", "critical")]
    assert len({post.content["alerts"][0]["fingerprint"] for post in watch.hook.posts}) == 1
    assert len({post.key for post in watch.hook.posts}) == 2


def test_a_diagnosis_is_one_more_message_of_the_same_alert_and_stays_in_the_last(watch: Watch) -> None:
    watch.evaluate(HUNG, times=3)
    (episode,) = watch.manager.episodes()
    watch.manager.add_diagnosis(episode.id, PROOF)
    watch.evaluate(HUNG, times=5)
    watch.manager.add_diagnosis(episode.id, replace(PROOF, summary="Rank 4 does.", advice="Compare the two lines."))
    watch.evaluate(HUNG, times=5)
    assert watch.manager.episodes()[0].diagnosis == "Rank 4 does (conclusive)"
    assert watch.manager.episodes()[0].advice == "Compare the two lines."
    watch.evaluate(times=5)
    messages = [post.content["alerts"][0] for post in watch.hook.wait_for(3)]
    assert [alert["status"] for alert in messages] == ["firing", "firing", "resolved"]
    assert len({alert["fingerprint"] for alert in messages}) == 1
    assert [alert["annotations"].get("diagnosis") for alert in messages] == [
        None,
        "Rank 3 on node-01 is in barrier (conclusive)",
        "Rank 4 does (conclusive)",
    ]
    assert "diagnosis is complete and conclusive" in messages[1]["annotations"]["reason"]


def test_a_restart_keeps_a_diagnosis_and_does_not_announce_it_again(watch: Watch) -> None:
    watch.evaluate(HUNG)
    watch.manager.add_diagnosis(watch.manager.episodes()[0].id, PROOF)
    watch.evaluate(HUNG)
    watch.restart()
    (episode,) = watch.manager.episodes()
    assert episode.diagnosis == str(PROOF)
    watch.manager.add_diagnosis(episode.id, PROOF)
    watch.evaluate(HUNG, times=5)
    assert len(watch.messages()) == 2


def test_a_diagnosis_of_a_closed_episode_is_dropped(watch: Watch) -> None:
    watch.manager.add_diagnosis("gone", PROOF)
    watch.evaluate(HUNG, times=3)
    assert len(watch.messages()) == 1
    assert watch.manager.episodes()[0].diagnosis == ""


def test_one_absent_evaluation_neither_closes_nor_reopens(watch: Watch) -> None:
    for _ in range(10):
        watch.evaluate(HUNG, times=2)
        watch.evaluate()
    assert watch.messages() == [("firing", "JobHung", "critical")]


def test_a_job_that_is_not_evaluated_keeps_its_alert_open(watch: Watch) -> None:
    watch.evaluate(HUNG)
    watch.evaluate(times=300, judged=("", "qwen"))
    assert watch.messages() == [("firing", "JobHung", "critical")]
    assert watch.manager.episodes()[0].closed_wall_seconds is None


def test_an_alert_that_fires_again_is_a_new_episode_that_says_so(watch: Watch) -> None:
    watch.evaluate(HUNG)
    watch.evaluate(times=5)
    watch.evaluate(HUNG)
    assert [status for status, _, _ in watch.messages()] == ["firing", "resolved", "firing"]
    assert "firing again" in watch.last()["annotations"]["reason"]
    assert len({episode.id for episode in watch.manager.episodes()}) == 2


def test_a_root_cause_is_reported_for_its_consequence_and_takes_its_severity(watch: Watch) -> None:
    watch.evaluate(NODE_DOWN, times=3)
    watch.evaluate(NODE_DOWN, HUNG, times=30)
    watch.evaluate(times=30)
    assert watch.messages() == [
        ("firing", "NodeUnreachable", "warning"),
        ("firing", "NodeUnreachable", "critical"),
        ("resolved", "NodeUnreachable", "critical"),
    ]


def test_a_job_stopped_by_a_gpu_fault_is_named_once_in_a_message_about_the_fault(watch: Watch) -> None:
    lost = finding(AlertName.GPU_FAULT, "node-02/0000:9b:00", since=100.0, gpus_idle=1)
    watch.evaluate(lost, times=60)
    assert "follows" not in watch.last()["annotations"]
    for _ in range(3):
        watch.evaluate(lost, finding(since=130.0), times=60)
        watch.evaluate(lost, times=20)
    assert watch.messages() == [("firing", "GpuFault", "critical")] * 2
    assert "caused another critical alert" in watch.last()["annotations"]["reason"]
    assert "JobHung: No step for 95 s" in watch.last()["annotations"]["reason"]


def test_a_gpu_that_has_only_its_index_after_a_restart_is_the_alert_that_named_its_pci_id(watch: Watch) -> None:
    suspect = (Suspect("node-02", 3, 11),)
    watch.evaluate(finding(AlertName.GPU_FAULT, "node-02/0000:9b:00", suspects=suspect), times=5)
    watch.restart()
    by_index = finding(AlertName.GPU_FAULT, "node-02/3", suspects=(Suspect("node-02", 3),))
    watch.evaluate(by_index, times=5)
    assert watch.messages() == [("firing", "GpuFault", "critical")]
    watch.evaluate(by_index, finding(AlertName.GPU_FAULT, "node-02/4", suspects=(Suspect("node-02", 4),)), times=5)
    assert watch.messages() == [("firing", "GpuFault", "critical")] * 2


def reasons_of(watch: Watch) -> list[str]:
    watch.messages()
    return [post.content["alerts"][0]["annotations"]["reason"] for post in watch.hook.posts]


def test_a_hang_that_people_know_of_is_not_reported_again_by_a_gpu_fault_that_comes_and_goes(watch: Watch) -> None:
    lost, hang = finding(AlertName.GPU_FAULT, "node-02/0000:9b:00", since=100.0), finding(since=110.0)
    watch.evaluate(lost, times=5)
    watch.evaluate(lost, hang, times=20)
    assert "JobHung: No step for 95 s" in watch.last()["annotations"]["reason"]
    for _ in range(2):
        watch.evaluate(hang, times=5)
        watch.evaluate(lost, hang, times=20)
    assert sum("JobHung" in reason for reason in reasons_of(watch)) == 1
    watch.evaluate(hang, times=120)
    assert watch.messages().count(("firing", "JobHung", "critical")) == 1
    assert any("but the problem persists" in reason for reason in reasons_of(watch))


def test_an_alert_lasted_until_its_condition_was_last_true(watch: Watch) -> None:
    starving = finding(AlertName.JOB_STARVING, since=watch.clock.monotonic())
    watch.evaluate(starving, times=60)
    last = watch.clock.monotonic()
    watch.evaluate(replace(starving, seen_seconds=last), times=30)
    (view,) = watch.manager.episodes()
    assert view.last_seen_wall_seconds == pytest.approx(watch.clock.wall() - 30)
    watch.evaluate(times=5)
    assert watch.last()["annotations"]["timing"].startswith("Lasted 1 min, until ")


def test_a_silent_node_whose_summary_says_the_job_stopped_is_not_reported_again_for_the_hang(watch: Watch) -> None:
    stopped = replace(NODE_DOWN, severity=Severity.CRITICAL, summary="node-02 does not answer, and llama has stopped.")
    watch.evaluate(NODE_DOWN, times=5)
    watch.evaluate(stopped, times=20)
    watch.evaluate(stopped, HUNG, times=60)
    watch.evaluate(NODE_DOWN, times=60)
    assert [severity for _, _, severity in watch.messages()] == ["warning", "critical"]
    watch.evaluate(NODE_DOWN, finding(AlertName.JOB_CRASHED, since=110.0), times=60)
    assert "JobCrashed" in watch.last()["annotations"]["reason"]
    assert len(watch.messages()) == 3


def test_a_job_that_stops_ten_minutes_after_a_gpu_fault_is_reported_each_time(watch: Watch) -> None:
    lost = finding(AlertName.GPU_FAULT, "node-02/0000:9b:00", since=100.0, gpus_idle=1)
    watch.evaluate(lost, times=600)
    for _ in range(2):
        watch.evaluate(lost, finding(since=watch.clock.monotonic()), times=60)
        watch.evaluate(lost, times=700)
    assert (
        watch.messages()
        == [("firing", "GpuFault", "critical")]
        + [
            ("firing", "JobHung", "critical"),
            ("resolved", "JobHung", "critical"),
        ]
        * 2
    )


def test_a_cause_that_began_long_before_a_restart_hides_no_new_hang(watch: Watch) -> None:
    watch.evaluate(replace(NODE_DOWN, since_seconds=100.0), times=300)
    watch.restart()
    dated_anew = replace(NODE_DOWN, since_seconds=5.0)
    watch.evaluate(dated_anew, times=60)
    watch.evaluate(dated_anew, finding(since=50.0), times=30)
    assert [alert for _, alert, _ in watch.messages()] == ["NodeUnreachable", "JobHung"]


def test_a_consequence_inhibited_before_a_restart_stays_inhibited_after_it(watch: Watch) -> None:
    watch.evaluate(replace(NODE_DOWN, since_seconds=100.0), finding(since=130.0), times=300)
    watch.restart(away_seconds=600.0)
    watch.evaluate(replace(NODE_DOWN, since_seconds=5.0), finding(since=6.0), times=60)
    assert [alert for _, alert, _ in watch.messages()] == ["NodeUnreachable"]


def test_an_inhibited_alert_stays_visible(watch: Watch) -> None:
    watch.evaluate(NODE_DOWN, HUNG)
    views = {view.alert: view for view in watch.manager.episodes()}
    assert views["JobHung"].suppressed_by == "NodeUnreachable node-02"
    assert views["NodeUnreachable"].suppressed_by is None
    assert views["NodeUnreachable"].severity is Severity.CRITICAL
    assert watch.last()["annotations"]["follows"] == "JobHung"


def test_an_alert_that_outlives_its_cause_is_reported_then(watch: Watch) -> None:
    watch.evaluate(NODE_DOWN, HUNG, times=5)
    watch.evaluate(HUNG, times=30)
    assert watch.messages() == [
        ("firing", "NodeUnreachable", "critical"),
        ("resolved", "NodeUnreachable", "critical"),
        ("firing", "JobHung", "critical"),
    ]


def test_an_alert_reported_before_its_cause_was_known_still_gets_a_closing_message(watch: Watch) -> None:
    watch.evaluate(HUNG, times=2)
    watch.evaluate(HUNG, NODE_DOWN, times=5)
    watch.evaluate(times=5)
    assert sorted(watch.messages()) == [
        ("firing", "JobHung", "critical"),
        ("firing", "NodeUnreachable", "critical"),
        ("resolved", "JobHung", "critical"),
        ("resolved", "NodeUnreachable", "critical"),
    ]


def test_a_completed_job_closes_all_its_alerts_and_sends_nothing_more(watch: Watch) -> None:
    watch.evaluate(finding(AlertName.JOB_STARVING))
    watch.evaluate(finding(AlertName.JOB_COMPLETED, gpus_idle=0))
    watch.evaluate(finding(AlertName.JOB_COMPLETED, gpus_idle=0), NODE_DOWN, HUNG, times=30)
    assert watch.messages() == [
        ("firing", "JobStarving", "warning"),
        ("firing", "JobCompleted", "info"),
        ("resolved", "JobStarving", "warning"),
    ]


def test_a_watcher_without_network_reports_only_that(watch: Watch) -> None:
    network_loss = finding(AlertName.WATCHER_DEGRADED, job="", gpus_idle=0)
    watch.evaluate(HUNG)
    watch.evaluate(network_loss, times=60, judged=("",))
    watch.evaluate(network_loss, HUNG, NODE_DOWN, times=5)
    assert watch.messages() == [("firing", "JobHung", "critical"), ("firing", "WatcherDegraded", "warning")]


def test_reminders_are_sent_at_the_configured_interval_only(watch: Watch) -> None:
    watch.stop()
    watch.reminder_seconds = 60.0
    watch.start()
    watch.evaluate(HUNG, times=130)
    assert [status for status, _, _ in watch.messages()] == ["firing"] * 3
    assert watch.last()["annotations"]["reason"] == "Reminder: this alert is still firing."


def test_cost_is_counted_and_reported(watch: Watch) -> None:
    began = watch.clock.monotonic() - 99.0
    watch.evaluate(finding(since=began))
    assert watch.last()["annotations"]["gpu_hours_lost"] == f"{16 * 100 / 3600:.3f}"
    watch.evaluate(finding(since=began), times=50)
    assert watch.manager.episodes()[0].gpu_hours_lost == pytest.approx(16 * 150 / 3600)


def test_routes_choose_by_severity_alert_and_job_and_every_notified_receiver_gets_the_end(watch: Watch) -> None:
    watch.stop()
    names = ("all", "pager", "checkpoints", "qwen")
    watch.receivers = tuple(receiver(watch.directory, watch.hook.port, name) for name in names)
    watch.routes = (
        RouteSection(receiver="all"),
        RouteSection(receiver="pager", severities=(Severity.CRITICAL,)),
        RouteSection(receiver="checkpoints", alerts=(AlertName.CHECKPOINT_STALLED,)),
        RouteSection(receiver="qwen", jobs=("qwen",)),
    )
    watch.start()
    watch.evaluate(SUSPICION)
    assert watch.messages("/pager") == []
    watch.evaluate(HUNG)
    watch.evaluate(times=5)
    assert watch.messages("/all") == [("firing", "JobHung", "warning"), *watch.messages("/pager")]
    assert watch.messages("/pager") == [("firing", "JobHung", "critical"), ("resolved", "JobHung", "critical")]
    assert watch.messages("/checkpoints") == watch.messages("/qwen") == []


def test_the_receiver_of_an_inhibited_alert_is_notified_of_its_cause(watch: Watch) -> None:
    watch.stop()
    watch.receivers = tuple(receiver(watch.directory, watch.hook.port, name) for name in ("nodes", "hangs"))
    watch.routes = (
        RouteSection(receiver="nodes", alerts=(AlertName.NODE_UNREACHABLE,)),
        RouteSection(receiver="hangs", alerts=(AlertName.JOB_HUNG,)),
    )
    watch.start()
    critical = replace(NODE_DOWN, severity=Severity.CRITICAL)
    watch.evaluate(critical)
    watch.evaluate(critical, HUNG, times=10)
    assert watch.messages("/nodes") == [("firing", "NodeUnreachable", "critical")]
    assert watch.messages("/hangs") == [("firing", "NodeUnreachable", "critical")]
    watch.evaluate(times=5)
    assert len(watch.messages("/nodes")) == len(watch.messages("/hangs")) == 2


def test_a_receiver_without_send_resolved_gets_no_closing_message(watch: Watch) -> None:
    watch.stop()
    watch.receivers = (receiver(watch.directory, watch.hook.port, send_resolved=False),)
    watch.start()
    watch.evaluate(HUNG)
    watch.evaluate(times=5)
    assert watch.messages() == [("firing", "JobHung", "critical")]


def test_a_restart_reports_nothing_again(watch: Watch) -> None:
    watch.evaluate(SUSPICION)
    watch.evaluate(HUNG, NODE_DOWN)
    before = watch.messages()
    identifiers = {view.id for view in watch.manager.episodes()}
    for _ in range(3):
        watch.restart()
        watch.evaluate(times=10)
        watch.evaluate(SUSPICION, NODE_DOWN, times=10)
        watch.evaluate(HUNG, NODE_DOWN, times=10)
    assert watch.messages() == before
    assert {view.id for view in watch.manager.episodes()} == identifiers


def test_an_alert_that_ended_while_the_watcher_was_stopped_closes_on_evidence_of_recovery(watch: Watch) -> None:
    watch.evaluate(finding(since=watch.clock.monotonic()))
    watch.restart(away_seconds=3600.0)
    watch.evaluate(times=300, judged=("",))
    watch.evaluate(times=300, recovered=recovery("node-01", "node-02"))
    assert len(watch.messages()) == 1, "there is no evidence that the job continues"
    watch.evaluate(times=4, recovered=recovery("node-01", "node-02", advancing=True))
    assert watch.messages()[1:] == [("resolved", "JobHung", "critical")]
    assert watch.last()["annotations"]["reason"] == "The condition has cleared."


def test_an_alert_never_seen_again_after_a_restart_closes_with_unknown_state(watch: Watch) -> None:
    watch.evaluate(HUNG, finding(AlertName.GPU_THROTTLED, "node-01/a"))
    watch.restart()
    watch.evaluate(times=int(RESTART_GRACE_MAX_SECONDS) - 1)
    assert len(watch.messages()) == 2
    watch.evaluate(times=4)
    assert sorted(alert for status, alert, _ in watch.messages() if status == "resolved") == ["GpuThrottled", "JobHung"]
    assert "State unknown" in watch.last()["annotations"]["reason"]


def test_a_completed_job_stays_completed_over_restarts_and_its_released_nodes_page_nobody(watch: Watch) -> None:
    watch.evaluate(finding(AlertName.JOB_COMPLETED, gpus_idle=0))
    watch.restart(away_seconds=3600.0)
    watch.evaluate(NODE_DOWN, times=2 * int(RESTART_GRACE_MAX_SECONDS))
    assert watch.messages() == [("firing", "JobCompleted", "info")]


def test_a_hang_that_ends_in_a_crash_says_so(watch: Watch) -> None:
    crashed = finding(AlertName.JOB_CRASHED, summary="llama crashed: rank 3.")
    watch.evaluate(HUNG, times=5)
    watch.evaluate(crashed, times=5)
    assert watch.messages()[1:] == [("firing", "JobCrashed", "critical"), ("resolved", "JobHung", "critical")]
    reason = watch.last()["annotations"]["reason"]
    assert "The job has not recovered" in reason
    assert "JobCrashed: llama crashed: rank 3." in reason


def test_a_hang_that_ends_with_the_job_says_so(watch: Watch) -> None:
    watch.evaluate(HUNG, times=5)
    watch.evaluate(finding(AlertName.JOB_COMPLETED, gpus_idle=0), times=5)
    assert watch.last()["annotations"]["reason"] == "The job has completed."


@pytest.mark.parametrize(("there", "away"), [(5, 12), (14, 16), (10, 5), (100, 100)])
def test_an_alert_that_flaps_for_an_hour_is_at_most_three_episodes(watch: Watch, there: int, away: int) -> None:
    for _ in range(3600 // (there + away)):
        watch.evaluate(NODE_DOWN, times=there)
        watch.evaluate(times=away)
    assert [status for status, _, _ in watch.messages()] in (
        ["firing", "resolved"] * 2,
        ["firing", "resolved"] * 2 + ["firing"],
        ["firing", "resolved", "firing"],
    )
    watch.evaluate(times=700)
    assert watch.messages()[-1][0] == "resolved"
    watch.evaluate(times=700)
    watch.evaluate(NODE_DOWN)
    watch.evaluate(times=5)
    assert watch.messages()[-2:] == [
        ("firing", "NodeUnreachable", "warning"),
        ("resolved", "NodeUnreachable", "warning"),
    ]


def test_a_flapping_cause_inhibits_nothing_while_it_is_absent(watch: Watch) -> None:
    for _ in range(5):
        watch.evaluate(NODE_DOWN, times=5)
        watch.evaluate(times=5)
    watch.evaluate(finding(since=watch.clock.monotonic()), times=5)
    assert watch.messages()[-1] == ("firing", "JobHung", "critical")


def test_an_alert_that_was_only_inhibited_before_is_new_when_first_reported(watch: Watch) -> None:
    watch.evaluate(NODE_DOWN, HUNG, times=5)
    watch.evaluate(NODE_DOWN, times=5)
    watch.evaluate(times=5)
    watch.evaluate(HUNG)
    assert watch.last()["annotations"]["reason"].startswith("New alert.")


def test_each_stop_of_a_job_that_ran_for_minutes_in_between_is_reported(watch: Watch) -> None:
    for _ in range(4):
        watch.evaluate(HUNG, times=60)
        watch.evaluate(times=300)
    assert [status for status, _, _ in watch.messages()] == ["firing", "resolved"] * 4


def test_a_flapping_alert_costs_nothing_while_it_is_absent(watch: Watch) -> None:
    began = watch.clock.monotonic()
    for _ in range(20):
        watch.evaluate(replace(NODE_DOWN, since_seconds=began), times=10)
        watch.evaluate(times=10)
    last = watch.manager.episodes()[0]
    assert last.gpu_hours_lost * 3600 <= 8 * 220


def test_what_began_while_the_watcher_was_stopped_is_reported(watch: Watch) -> None:
    watch.evaluate(finding(AlertName.JOB_STARVING))
    watch.restart()
    watch.evaluate(finding(AlertName.JOB_STARVING), finding(AlertName.LOSS_NOT_FINITE))
    assert [alert for _, alert, _ in watch.messages()] == ["JobStarving", "LossNotFinite"]


def test_an_old_cause_not_seen_after_a_restart_hides_nothing_new(watch: Watch) -> None:
    watch.evaluate(NODE_DOWN)
    watch.restart()
    watch.evaluate(HUNG)
    assert [alert for _, alert, _ in watch.messages()] == ["NodeUnreachable", "JobHung"]


def test_cost_continues_across_a_restart_if_the_finding_is_still_there(watch: Watch) -> None:
    watch.evaluate(finding(since=watch.clock.monotonic() + 1.0))
    watch.restart(away_seconds=3600.0)
    watch.evaluate(HUNG)
    assert watch.manager.episodes()[0].gpu_hours_lost == pytest.approx(16.0, rel=0.01)


def test_closed_episodes_are_shown_after_a_restart(watch: Watch) -> None:
    watch.evaluate(HUNG)
    watch.evaluate(times=5)
    before = watch.manager.episodes()
    watch.restart()
    assert watch.manager.episodes() == before
    assert before[0].closed_wall_seconds is not None


def test_the_alerts_of_a_job_removed_from_the_configuration_are_closed(watch: Watch) -> None:
    watch.evaluate(HUNG)
    watch.jobs = ("qwen",)
    watch.restart()
    assert watch.messages()[1:] == [("resolved", "JobHung", "critical")]
    assert "removed from the configuration" in watch.last()["annotations"]["reason"]


def test_if_the_disk_fails_messages_are_sent_all_the_same_and_saved_later(watch: Watch) -> None:
    blocker = sqlite3.connect(watch.directory / "state.db", isolation_level=None)
    assert watch.store is not None
    watch.store._connection.execute("PRAGMA busy_timeout = 10")
    blocker.execute("BEGIN IMMEDIATE")
    watch.evaluate(HUNG, times=3)
    assert watch.messages() == [("firing", "JobHung", "critical")]
    assert "locked" in str(watch.manager.save_error)
    blocker.execute("ROLLBACK")
    blocker.close()
    watch.evaluate(HUNG)
    assert str(watch.manager.save_error) == "None"
    watch.restart()
    watch.evaluate(HUNG, times=5)
    assert watch.messages() == [("firing", "JobHung", "critical")]


def test_an_unreadable_episode_is_an_error_and_is_not_discarded(watch: Watch) -> None:
    watch.evaluate(HUNG)
    watch.stop()
    other = sqlite3.connect(watch.directory / "state.db")
    other.execute("UPDATE episodes SET content = x'7b7d'")
    other.commit()
    other.close()
    watch.store = StateStore(watch.directory / "state.db")
    with pytest.raises(StateStoreError, match="JobHung of llama"):
        AlertManager(watch.store, (), (), watch.clock)
    watch.store.close()
    watch.store = None


STORED_BY_0_1 = (
    b'{"id":"0123456789abcdef","finding":{"job":"llama","alert":"JobHung","severity":"critical","scope":"",'
    b'"summary":"No step for 95 s.","evidence":["rank 3 at 0 %"],"advice":"Take stacks.","since_seconds":1800000000.0,'
    b'"confirmed":true,"suspects":[{"node":"node-01","gpu":3,"rank":3}],"gpus_idle":16,"idle_joules":7200000.0},'
    b'"began_seconds":1800000000.0,"opened_wall_seconds":1800000010.0,"detection_seconds":10.0,'
    b'"counted_seconds":1800000020.0,"gpu_seconds_lost":320.0,"joules_lost":7200000.0,"severity":"critical",'
    b'"confirmed":true,"suppressed_by":"NodeUnreachable node-02","released_seconds":1800000005.0,'
    b'"absent_seconds":1800000006.0,"absent_looks":3,"settling":true,"reopenings":2,"followers":["JobSlow"],'
    b'"diagnosis":{"words":"Rank 3 is in barrier.","conclusive":true,"advice":"Compare."},"told":{"notices":2,'
    b'"seconds":1800000015.0,"severity":"critical","confirmed":true,"receivers":["ops"],'
    b'"suspects":[{"node":"node-01","gpu":3,"rank":3}],"followers":["JobHung"],'
    b'"diagnosis":{"words":"Rank 3 is in barrier.","conclusive":true,"advice":"Compare."},"diagnosed":true},'
    b'"closed_wall_seconds":null}'
)


def test_an_episode_stored_by_the_first_release_is_read_and_stored_under_the_same_keys() -> None:
    row = EpisodeRow("0123456789abcdef", "llama", "JobHung", "", 1_800_000_010.0, None, STORED_BY_0_1)
    episode = episode_from_row(row)
    assert (episode.absent_evaluations, episode.unseen_since_restart, episode.inhibited) == (3, True, ("JobSlow",))
    assert episode.notified is not None
    assert (episode.notified.message_count, episode.notified.reported_consequences) == (2, ("JobHung",))
    assert episode.notified.diagnosis_announced
    stored = episode_to_row(episode, 0.0)
    assert replace(stored, content=row.content) == row
    assert_contains(json.loads(stored.content), json.loads(row.content))


def assert_contains(stored: object, of_first_release: object) -> None:
    """Every key of the first release has its value; keys that were added since are beside it."""
    if isinstance(of_first_release, dict):
        assert isinstance(stored, dict)
        for key, value in of_first_release.items():
            assert_contains(stored[key], value)
    else:
        assert stored == of_first_release


def seconds_between(alert: Any) -> float:
    """From startsAt to endsAt of an alert in a webhook payload."""
    began, ended = (datetime.fromisoformat(alert[key]) for key in ("startsAt", "endsAt"))
    return (ended - began).total_seconds()


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_an_alert_lasts_as_long_as_it_did_although_the_wall_clock_was_set(watch: Watch, step: float) -> None:
    watch.evaluate(HUNG, times=30)
    watch.clock.wall_seconds += step
    watch.evaluate(HUNG, times=30)
    (view,) = watch.manager.episodes()
    assert watch.clock.wall() - view.opened_wall_seconds == pytest.approx(59.0)
    watch.evaluate(times=3)
    assert seconds_between(watch.last()) == pytest.approx(62.0)


def test_the_wall_clock_is_set_in_the_moment_in_which_an_alert_is_already_absent(watch: Watch) -> None:
    watch.evaluate(HUNG, times=30)
    watch.evaluate()
    watch.clock.wall_seconds -= 3600.0
    watch.evaluate(times=3)
    assert seconds_between(watch.last()) == pytest.approx(32.0)
    (view,) = watch.manager.episodes()
    assert view.closed_wall_seconds is not None
    watch.clock.wall_seconds += 7200.0
    watch.evaluate()
    (again,) = watch.manager.episodes()
    assert again.closed_wall_seconds == pytest.approx(view.closed_wall_seconds + 7200.0)


def test_an_alert_of_an_earlier_process_never_ends_before_it_began(watch: Watch) -> None:
    """The host comes up with its clock an hour behind, and NTP corrects it while the watcher runs."""
    watch.evaluate(HUNG, times=30)
    opened = watch.manager.episodes()[0].opened_wall_seconds
    watch.restart(away_seconds=600.0)
    watch.stop()
    watch.clock.wall_seconds -= 3600.0
    watch.start()
    assert watch.manager.episodes()[0].opened_wall_seconds == watch.clock.wall()
    watch.evaluate(HUNG, times=5)
    watch.clock.wall_seconds += 3600.0
    watch.evaluate(HUNG, times=5)
    assert watch.manager.episodes()[0].opened_wall_seconds == opened
    watch.evaluate(times=5, recovered=recovery(advancing=True))
    assert seconds_between(watch.last()) > 600.0
    assert watch.last()["annotations"]["timing"].startswith("Lasted 1")


def test_an_alert_that_is_kept_open_says_that_the_problem_is_gone_and_since_when(watch: Watch) -> None:
    for _ in range(2):
        watch.evaluate(NODE_DOWN, times=20)
        watch.evaluate(times=5)
    watch.evaluate(NODE_DOWN, times=20)
    assert watch.manager.episodes()[0].kept_open == ""
    watch.evaluate(times=50)
    (view, *_) = watch.manager.episodes()
    assert view.closed_wall_seconds is None
    assert view.absent_since_wall_seconds == pytest.approx(watch.clock.wall() - 49.0)
    assert view.kept_open == (
        f"back to normal since {format_utc_time(watch.clock.wall() - 49.0)}; kept open because this problem comes and "
        "goes, until the problem has been absent for 1 min"
    )
    assert view.last_seen_wall_seconds == view.absent_since_wall_seconds


def test_an_alert_that_was_not_seen_again_after_a_restart_says_so(watch: Watch) -> None:
    watch.evaluate(NODE_DOWN, times=20)
    watch.restart()
    assert watch.manager.episodes()[0].kept_open == ""  # nothing was evaluated yet
    watch.evaluate(times=20)
    (view,) = watch.manager.episodes()
    assert view.kept_open.startswith("not seen since the watcher restarted (")
    assert view.kept_open.endswith("); kept open because there is no sign of recovery yet")
    assert view.last_seen_wall_seconds == pytest.approx(watch.clock.wall() - 80.0)


def blind(cause: str) -> Finding:
    return replace(finding(AlertName.PROBE_BLIND, "node-02", gpus_idle=0), causes=(cause,))


def test_a_changed_cause_within_an_episode_that_is_kept_open_is_reported_once(watch: Watch) -> None:
    for _ in range(2):
        watch.evaluate(blind("GPU query does not return"), times=20)
        watch.evaluate(times=5)
    assert len(watch.messages()) == 3  # the second episode is still open
    watch.evaluate(blind("nvidia-smi is not installed"), times=20)
    assert watch.messages()[3:] == [("firing", "ProbeBlind", "warning")]
    assert watch.last()["annotations"]["reason"] == "Since the last message, the cause has changed."
    for cause in ("GPU query does not return", "nvidia-smi is not installed") * 3:
        watch.evaluate(times=5)
        watch.evaluate(blind(cause), times=20)
    assert len(watch.messages()) == 4


def test_a_cause_that_replaces_the_first_one_is_reported_once_it_has_lasted(watch: Watch) -> None:
    watch.evaluate(blind("GPU query does not return"), times=60)
    watch.evaluate(blind("nvidia-smi is not installed"), times=29)
    assert len(watch.messages()) == 1
    watch.evaluate(blind("nvidia-smi is not installed"), times=10)
    assert len(watch.messages()) == 2


def test_a_second_symptom_of_the_same_fault_is_no_news(watch: Watch) -> None:
    lost = replace(finding(AlertName.GPU_FAULT, "node-02/a", gpus_idle=1), causes=("lost",))
    watch.evaluate(lost, times=2)
    watch.evaluate(replace(lost, causes=("Xid 79", "lost")), times=200)
    assert len(watch.messages()) == 1
