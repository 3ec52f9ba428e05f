"""Findings in, posts out: what people hear of an episode, over root causes, routes, restarts and a full disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.alerting.fakes import (
    FakeReceiver,
    ManualClock,
    fake_receiver,
    finding,
    receiver,
    wait_until,
    witness,
)
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.alerting.episode import EpisodeDiagnosis
from wattwatch.watcher.alerting.notify_policy import RESTART_GRACE_MAX_SECONDS
from wattwatch.watcher.common.state_store import StateStore, StateStoreError
from wattwatch.watcher.config.settings import ReceiverSection, RouteSection
from wattwatch.watcher.detection.model import AlertName, Finding, Severity
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

NODE_DOWN = finding(AlertName.NODE_UNREACHABLE, "node-02", gpus_idle=8)
HUNG = finding()
PROOF = EpisodeDiagnosis("Rank 3 on node-01 is in barrier.", conclusive=True)
SUSPICION = finding(confirmed=False)


class Watch:
    """A teller over one state file, looked at once a second, that can be restarted."""

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
        self.teller = AlertManager(
            self.store,
            self.receivers,
            self.routes,
            self.clock,
            jobs=self.jobs,
            reminder_seconds=self.reminder_seconds,
        )
        self.teller.start()

    def stop(self) -> None:
        if self.store is not None:
            wait_until(lambda: self.teller.stats().waiting == 0)
            self.teller.stop()
            self.store.close()
            self.store = None

    def restart(self, away_seconds: float = 60.0) -> None:
        """Its monotonic clock begins anew, as after a reboot."""
        self.stop()
        self.clock.advance(away_seconds)
        self.clock.seconds = 5.0
        self.start()

    def look(
        self,
        *findings: Finding,
        times: int = 1,
        judged: Collection[str] = ("", "llama"),
        seen: RecoveryEvidence | None = None,
    ) -> None:
        witnesses = {} if seen is None else {seen.job: seen}
        for _ in range(times):
            self.clock.advance(1.0)
            self.teller.observe(findings, frozenset(judged), self.clock.monotonic(), self.clock.wall(), witnesses)

    def said(self, path: str = "/webhook") -> list[tuple[str, str, str]]:
        """All that a receiver got so far: status, alert, severity."""
        wait_until(lambda: self.teller.stats().waiting == 0)
        return [
            (alert["status"], alert["labels"]["alertname"], alert["labels"]["severity"])
            for post in list(self.hook.posts)
            if post.path.startswith(path)
            for alert in post.content["alerts"]
        ]

    def last(self) -> Any:
        wait_until(lambda: self.teller.stats().waiting == 0)
        return self.hook.posts[-1].content["alerts"][0]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with fake_receiver() as hook:
        watch = Watch(tmp_path, hook)
        yield watch
        watch.stop()


def test_one_message_when_it_opens_and_one_when_it_closes(watch: Watch) -> None:
    watch.look(HUNG, times=30)
    watch.look(times=30)
    assert watch.said() == [("firing", "JobHung", "critical"), ("resolved", "JobHung", "critical")]


def test_a_suspicion_is_told_as_a_warning_and_raised_once_when_confirmed(watch: Watch) -> None:
    watch.look(SUSPICION, times=5)
    watch.look(HUNG, times=5)
    watch.look(SUSPICION, times=5)
    watch.look(HUNG, times=5)
    assert watch.said() == [("firing", "JobHung", "warning"), ("firing", "JobHung", "critical")]
    assert len({post.content["alerts"][0]["fingerprint"] for post in watch.hook.posts}) == 1
    assert len({post.key for post in watch.hook.posts}) == 2


def test_a_diagnosis_is_one_more_message_of_the_same_alert_and_stays_in_the_last(watch: Watch) -> None:
    watch.look(HUNG, times=3)
    (episode,) = watch.teller.episodes()
    watch.teller.diagnosed(episode.id, PROOF)
    watch.look(HUNG, times=5)
    watch.teller.diagnosed(episode.id, replace(PROOF, words="Rank 4 does.", advice="Compare the two lines."))
    watch.look(HUNG, times=5)
    assert watch.teller.episodes()[0].diagnosis == "Rank 4 does (conclusive)"
    assert watch.teller.episodes()[0].advice == "Compare the two lines."
    watch.look(times=5)
    said = [post.content["alerts"][0] for post in watch.hook.wait_for(3)]
    assert [alert["status"] for alert in said] == ["firing", "firing", "resolved"]
    assert len({alert["fingerprint"] for alert in said}) == 1
    assert [alert["annotations"].get("diagnosis") for alert in said] == [
        None,
        "Rank 3 on node-01 is in barrier (conclusive)",
        "Rank 4 does (conclusive)",
    ]
    assert "known now" in said[1]["annotations"]["reason"]


def test_a_restart_forgets_no_diagnosis_and_tells_it_no_second_time(watch: Watch) -> None:
    watch.look(HUNG)
    watch.teller.diagnosed(watch.teller.episodes()[0].id, PROOF)
    watch.look(HUNG)
    watch.restart()
    (episode,) = watch.teller.episodes()
    assert episode.diagnosis == str(PROOF)
    watch.teller.diagnosed(episode.id, PROOF)
    watch.look(HUNG, times=5)
    assert len(watch.said()) == 2


def test_what_is_said_of_an_episode_that_is_over_is_dropped(watch: Watch) -> None:
    watch.teller.diagnosed("gone", PROOF)
    watch.look(HUNG, times=3)
    assert len(watch.said()) == 1
    assert watch.teller.episodes()[0].diagnosis == ""


def test_a_flicker_of_one_look_neither_closes_nor_opens(watch: Watch) -> None:
    for _ in range(10):
        watch.look(HUNG, times=2)
        watch.look()
    assert watch.said() == [("firing", "JobHung", "critical")]


def test_no_news_is_not_good_news(watch: Watch) -> None:
    watch.look(HUNG)
    watch.look(times=300, judged=("", "qwen"))
    assert watch.said() == [("firing", "JobHung", "critical")]
    assert watch.teller.episodes()[0].closed_wall_seconds is None


def test_it_comes_back_as_a_new_episode_that_says_so(watch: Watch) -> None:
    watch.look(HUNG)
    watch.look(times=5)
    watch.look(HUNG)
    assert [status for status, _, _ in watch.said()] == ["firing", "resolved", "firing"]
    assert "It is back" in watch.last()["annotations"]["reason"]
    assert len({episode.id for episode in watch.teller.episodes()}) == 2


def test_a_root_cause_speaks_for_what_follows_and_takes_over_its_severity(watch: Watch) -> None:
    watch.look(NODE_DOWN, times=3)
    watch.look(NODE_DOWN, HUNG, times=30)
    watch.look(times=30)
    assert watch.said() == [
        ("firing", "NodeUnreachable", "warning"),
        ("firing", "NodeUnreachable", "critical"),
        ("resolved", "NodeUnreachable", "critical"),
    ]


def test_a_job_that_stops_for_its_broken_board_is_told_in_words_and_once(watch: Watch) -> None:
    lost = finding(AlertName.GPU_FAULT, "node-02/0000:9b:00", since=100.0, gpus_idle=1)
    watch.look(lost, times=60)
    assert "follows" not in watch.last()["annotations"]
    for _ in range(3):
        watch.look(lost, finding(since=130.0), times=60)
        watch.look(lost, times=20)
    assert watch.said() == [("firing", "GpuFault", "critical")] * 2
    assert "critical follows from it" in watch.last()["annotations"]["reason"]
    assert "JobHung: No step for 95 s" in watch.last()["annotations"]["reason"]


def test_a_silent_node_that_says_itself_that_the_job_stands_is_not_told_again_for_the_hang(watch: Watch) -> None:
    stands = replace(NODE_DOWN, severity=Severity.CRITICAL, summary="node-02 does not answer, and llama stands.")
    watch.look(NODE_DOWN, times=5)
    watch.look(stands, times=20)
    watch.look(stands, HUNG, times=60)
    watch.look(NODE_DOWN, times=60)
    assert [severity for _, _, severity in watch.said()] == ["warning", "critical"]
    watch.look(NODE_DOWN, finding(AlertName.JOB_CRASHED, since=110.0), times=60)
    assert "JobCrashed" in watch.last()["annotations"]["reason"]
    assert len(watch.said()) == 3


def test_a_job_that_went_on_without_the_board_and_stops_ten_minutes_later_is_told_each_time(watch: Watch) -> None:
    lost = finding(AlertName.GPU_FAULT, "node-02/0000:9b:00", since=100.0, gpus_idle=1)
    watch.look(lost, times=600)
    for _ in range(2):
        watch.look(lost, finding(since=watch.clock.monotonic()), times=60)
        watch.look(lost, times=700)
    assert (
        watch.said()
        == [("firing", "GpuFault", "critical")]
        + [
            ("firing", "JobHung", "critical"),
            ("resolved", "JobHung", "critical"),
        ]
        * 2
    )


def test_a_cause_that_began_long_before_a_restart_hides_no_new_hang(watch: Watch) -> None:
    watch.look(replace(NODE_DOWN, since_seconds=100.0), times=300)
    watch.restart()
    dated_anew = replace(NODE_DOWN, since_seconds=5.0)
    watch.look(dated_anew, times=60)
    watch.look(dated_anew, finding(since=50.0), times=30)
    assert [alert for _, alert, _ in watch.said()] == ["NodeUnreachable", "JobHung"]


def test_what_followed_before_a_restart_is_told_no_more_after_it(watch: Watch) -> None:
    watch.look(replace(NODE_DOWN, since_seconds=100.0), finding(since=130.0), times=300)
    watch.restart(away_seconds=600.0)
    watch.look(replace(NODE_DOWN, since_seconds=5.0), finding(since=6.0), times=60)
    assert [alert for _, alert, _ in watch.said()] == ["NodeUnreachable"]


def test_what_is_kept_quiet_stays_visible(watch: Watch) -> None:
    watch.look(NODE_DOWN, HUNG)
    views = {view.alert: view for view in watch.teller.episodes()}
    assert views["JobHung"].suppressed_by == "NodeUnreachable node-02"
    assert views["NodeUnreachable"].suppressed_by is None
    assert views["NodeUnreachable"].severity is Severity.CRITICAL
    assert watch.last()["annotations"]["follows"] == "JobHung"


def test_what_outlives_its_cause_is_told_then(watch: Watch) -> None:
    watch.look(NODE_DOWN, HUNG, times=5)
    watch.look(HUNG, times=30)
    assert watch.said() == [
        ("firing", "NodeUnreachable", "critical"),
        ("resolved", "NodeUnreachable", "critical"),
        ("firing", "JobHung", "critical"),
    ]


def test_what_was_told_before_its_cause_was_known_is_closed_like_anything_told(watch: Watch) -> None:
    watch.look(HUNG, times=2)
    watch.look(HUNG, NODE_DOWN, times=5)
    watch.look(times=5)
    assert sorted(watch.said()) == [
        ("firing", "JobHung", "critical"),
        ("firing", "NodeUnreachable", "critical"),
        ("resolved", "JobHung", "critical"),
        ("resolved", "NodeUnreachable", "critical"),
    ]


def test_the_end_of_a_job_closes_all_and_nothing_more_is_said_of_it(watch: Watch) -> None:
    watch.look(finding(AlertName.JOB_STARVING))
    watch.look(finding(AlertName.JOB_COMPLETED, gpus_idle=0))
    watch.look(finding(AlertName.JOB_COMPLETED, gpus_idle=0), NODE_DOWN, HUNG, times=30)
    assert watch.said() == [
        ("firing", "JobStarving", "warning"),
        ("firing", "JobCompleted", "info"),
        ("resolved", "JobStarving", "warning"),
    ]


def test_a_blind_watcher_says_only_that_it_is_blind(watch: Watch) -> None:
    blind = finding(AlertName.WATCHER_DEGRADED, job="", gpus_idle=0)
    watch.look(HUNG)
    watch.look(blind, times=60, judged=("",))
    watch.look(blind, HUNG, NODE_DOWN, times=5)
    assert watch.said() == [("firing", "JobHung", "critical"), ("firing", "WatcherDegraded", "warning")]


def test_reminders_come_at_the_configured_interval_only(watch: Watch) -> None:
    watch.stop()
    watch.reminder_seconds = 60.0
    watch.start()
    watch.look(HUNG, times=130)
    assert [status for status, _, _ in watch.said()] == ["firing"] * 3
    assert watch.last()["annotations"]["reason"] == "It is still open."


def test_cost_is_counted_and_told(watch: Watch) -> None:
    began = watch.clock.monotonic() - 99.0
    watch.look(finding(since=began))
    assert watch.last()["annotations"]["gpu_hours_lost"] == f"{16 * 100 / 3600:.3f}"
    watch.look(finding(since=began), times=50)
    assert watch.teller.episodes()[0].gpu_hours_lost == pytest.approx(16 * 150 / 3600)


def test_routes_choose_by_severity_alert_and_job_and_whoever_was_told_hears_the_end(watch: Watch) -> None:
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
    watch.look(SUSPICION)
    assert watch.said("/pager") == []
    watch.look(HUNG)
    watch.look(times=5)
    assert watch.said("/all") == [("firing", "JobHung", "warning"), *watch.said("/pager")]
    assert watch.said("/pager") == [("firing", "JobHung", "critical"), ("resolved", "JobHung", "critical")]
    assert watch.said("/checkpoints") == watch.said("/qwen") == []


def test_whoever_waits_for_a_consequence_is_told_of_its_cause(watch: Watch) -> None:
    watch.stop()
    watch.receivers = tuple(receiver(watch.directory, watch.hook.port, name) for name in ("nodes", "hangs"))
    watch.routes = (
        RouteSection(receiver="nodes", alerts=(AlertName.NODE_UNREACHABLE,)),
        RouteSection(receiver="hangs", alerts=(AlertName.JOB_HUNG,)),
    )
    watch.start()
    critical = replace(NODE_DOWN, severity=Severity.CRITICAL)
    watch.look(critical)
    watch.look(critical, HUNG, times=10)
    assert watch.said("/nodes") == [("firing", "NodeUnreachable", "critical")]
    assert watch.said("/hangs") == [("firing", "NodeUnreachable", "critical")]
    watch.look(times=5)
    assert len(watch.said("/nodes")) == len(watch.said("/hangs")) == 2


def test_a_receiver_that_wants_no_ends_gets_none(watch: Watch) -> None:
    watch.stop()
    watch.receivers = (receiver(watch.directory, watch.hook.port, send_resolved=False),)
    watch.start()
    watch.look(HUNG)
    watch.look(times=5)
    assert watch.said() == [("firing", "JobHung", "critical")]


def test_a_restart_tells_nothing_again(watch: Watch) -> None:
    watch.look(SUSPICION)
    watch.look(HUNG, NODE_DOWN)
    before = watch.said()
    identifiers = {view.id for view in watch.teller.episodes()}
    for _ in range(3):
        watch.restart()
        watch.look(times=10)
        watch.look(SUSPICION, NODE_DOWN, times=10)
        watch.look(HUNG, NODE_DOWN, times=10)
    assert watch.said() == before
    assert {view.id for view in watch.teller.episodes()} == identifiers


def test_what_ended_while_the_watcher_was_away_is_closed_once_its_end_is_seen(watch: Watch) -> None:
    watch.look(finding(since=watch.clock.monotonic()))
    watch.restart(away_seconds=3600.0)
    watch.look(times=300, judged=("",))
    watch.look(times=300, seen=witness("node-01", "node-02"))
    assert len(watch.said()) == 1, "nothing said that the job goes on"
    watch.look(times=4, seen=witness("node-01", "node-02", advancing=True))
    assert watch.said()[1:] == [("resolved", "JobHung", "critical")]
    assert watch.last()["annotations"]["reason"] == "The condition is no longer there."


def test_what_is_never_seen_again_after_a_restart_is_closed_as_not_known(watch: Watch) -> None:
    watch.look(HUNG, finding(AlertName.GPU_THROTTLED, "node-01/a"))
    watch.restart()
    watch.look(times=int(RESTART_GRACE_MAX_SECONDS) - 1)
    assert len(watch.said()) == 2
    watch.look(times=4)
    assert sorted(alert for status, alert, _ in watch.said() if status == "resolved") == ["GpuThrottled", "JobHung"]
    assert "not known any more" in watch.last()["annotations"]["reason"]


def test_a_completed_job_stays_completed_over_restarts_and_its_released_nodes_are_nobodys_page(watch: Watch) -> None:
    watch.look(finding(AlertName.JOB_COMPLETED, gpus_idle=0))
    watch.restart(away_seconds=3600.0)
    watch.look(NODE_DOWN, times=2 * int(RESTART_GRACE_MAX_SECONDS))
    assert watch.said() == [("firing", "JobCompleted", "info")]


def test_a_hang_that_ends_in_a_crash_says_so(watch: Watch) -> None:
    crashed = finding(AlertName.JOB_CRASHED, summary="llama crashed: rank 3.")
    watch.look(HUNG, times=5)
    watch.look(crashed, times=5)
    assert watch.said()[1:] == [("firing", "JobCrashed", "critical"), ("resolved", "JobHung", "critical")]
    reason = watch.last()["annotations"]["reason"]
    assert "did not get better" in reason
    assert "JobCrashed: llama crashed: rank 3." in reason


def test_a_hang_that_ends_with_the_job_says_so(watch: Watch) -> None:
    watch.look(HUNG, times=5)
    watch.look(finding(AlertName.JOB_COMPLETED, gpus_idle=0), times=5)
    assert watch.last()["annotations"]["reason"] == "The job has completed."


@pytest.mark.parametrize(("there", "away"), [(5, 12), (14, 16), (10, 5), (100, 100)])
def test_what_comes_and_goes_for_an_hour_is_three_episodes(watch: Watch, there: int, away: int) -> None:
    for _ in range(3600 // (there + away)):
        watch.look(NODE_DOWN, times=there)
        watch.look(times=away)
    assert [status for status, _, _ in watch.said()] in (
        ["firing", "resolved"] * 2,
        ["firing", "resolved"] * 2 + ["firing"],
        ["firing", "resolved", "firing"],
    )
    watch.look(times=700)
    assert watch.said()[-1][0] == "resolved"
    watch.look(times=700)
    watch.look(NODE_DOWN)
    watch.look(times=5)
    assert watch.said()[-2:] == [("firing", "NodeUnreachable", "warning"), ("resolved", "NodeUnreachable", "warning")]


def test_a_cause_that_is_kept_open_because_it_flaps_hides_nothing_while_it_is_away(watch: Watch) -> None:
    for _ in range(5):
        watch.look(NODE_DOWN, times=5)
        watch.look(times=5)
    watch.look(finding(since=watch.clock.monotonic()), times=5)
    assert watch.said()[-1] == ("firing", "JobHung", "critical")


def test_what_was_kept_quiet_before_is_new_when_it_is_told_first(watch: Watch) -> None:
    watch.look(NODE_DOWN, HUNG, times=5)
    watch.look(NODE_DOWN, times=5)
    watch.look(times=5)
    watch.look(HUNG)
    assert watch.last()["annotations"]["reason"].startswith("It is new.")


def test_each_stop_of_a_job_that_ran_for_minutes_in_between_is_told(watch: Watch) -> None:
    for _ in range(4):
        watch.look(HUNG, times=60)
        watch.look(times=300)
    assert [status for status, _, _ in watch.said()] == ["firing", "resolved"] * 4


def test_what_flaps_costs_nothing_while_it_is_away(watch: Watch) -> None:
    began = watch.clock.monotonic()
    for _ in range(20):
        watch.look(replace(NODE_DOWN, since_seconds=began), times=10)
        watch.look(times=10)
    last = watch.teller.episodes()[0]
    assert last.gpu_hours_lost * 3600 <= 8 * 220


def test_what_began_while_the_watcher_was_away_is_told(watch: Watch) -> None:
    watch.look(finding(AlertName.JOB_STARVING))
    watch.restart()
    watch.look(finding(AlertName.JOB_STARVING), finding(AlertName.LOSS_NOT_FINITE))
    assert [alert for _, alert, _ in watch.said()] == ["JobStarving", "LossNotFinite"]


def test_an_old_cause_that_is_not_seen_after_a_restart_hides_nothing_new(watch: Watch) -> None:
    watch.look(NODE_DOWN)
    watch.restart()
    watch.look(HUNG)
    assert [alert for _, alert, _ in watch.said()] == ["NodeUnreachable", "JobHung"]


def test_cost_goes_on_over_a_restart_for_what_is_still_true(watch: Watch) -> None:
    watch.look(finding(since=watch.clock.monotonic() + 1.0))
    watch.restart(away_seconds=3600.0)
    watch.look(HUNG)
    assert watch.teller.episodes()[0].gpu_hours_lost == pytest.approx(16.0, rel=0.01)


def test_closed_episodes_are_shown_after_a_restart(watch: Watch) -> None:
    watch.look(HUNG)
    watch.look(times=5)
    before = watch.teller.episodes()
    watch.restart()
    assert watch.teller.episodes() == before
    assert before[0].closed_wall_seconds is not None


def test_a_job_that_was_taken_out_of_the_configuration_is_closed(watch: Watch) -> None:
    watch.look(HUNG)
    watch.jobs = ("qwen",)
    watch.restart()
    assert watch.said()[1:] == [("resolved", "JobHung", "critical")]
    assert "no longer in the configuration" in watch.last()["annotations"]["reason"]


def test_where_the_disk_refuses_people_are_told_all_the_same_and_it_is_saved_later(watch: Watch) -> None:
    blocker = sqlite3.connect(watch.directory / "state.db", isolation_level=None)
    assert watch.store is not None
    watch.store._connection.execute("PRAGMA busy_timeout = 10")
    blocker.execute("BEGIN IMMEDIATE")
    watch.look(HUNG, times=3)
    assert watch.said() == [("firing", "JobHung", "critical")]
    assert "locked" in str(watch.teller.trouble)
    blocker.execute("ROLLBACK")
    blocker.close()
    watch.look(HUNG)
    assert str(watch.teller.trouble) == "None"
    watch.restart()
    watch.look(HUNG, times=5)
    assert watch.said() == [("firing", "JobHung", "critical")]


def test_an_episode_that_cannot_be_read_is_an_error_and_not_forgotten(watch: Watch) -> None:
    watch.look(HUNG)
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
