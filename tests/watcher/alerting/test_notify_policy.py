"""The notify policy, branch by branch: from what was last reported and what is true now to a decision with reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.watcher.alerting.fakes import WALL, finding, recovery
from wattwatch.watcher.alerting.episode import (
    Episode,
    EpisodeDiagnosis,
    EpisodeUpdate,
    NoticeKind,
    NotifiedState,
    NotifyReason,
    PreviousEpisode,
    advance_episode,
    open_episode,
)
from wattwatch.watcher.alerting.notify_policy import (
    CAUSE_CLEARED_GRACE_SECONDS,
    CLEAR_SECONDS,
    RESTART_GRACE_MAX_SECONDS,
    RESTART_GRACE_MIN_SECONDS,
    XID_HOLD_SECONDS,
    clear_seconds,
    decide_notification,
    has_recovered,
    restart_grace_seconds,
)
from wattwatch.watcher.detection.model import AlertName, Finding, Severity
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

HUNG = finding()
SUSPICION = finding(confirmed=False)
NOTIFIED = NotifiedState(1, 100.0, Severity.CRITICAL, True, ("webhook",), ())
OPEN = replace(
    open_episode("e1", EpisodeUpdate(HUNG, 100.0, WALL), HUNG),
    severity=Severity.CRITICAL,
    confirmed=True,
    notified=NOTIFIED,
    cost_counted_until_seconds=100.0,
)
SUSPECTED = replace(OPEN, finding=SUSPICION, notified=replace(NOTIFIED, severity=Severity.WARNING, confirmed=False))
INHIBITED_EPISODE = replace(OPEN, notified=None, suppressed_by="NodeUnreachable node-02")
GONE = replace(OPEN, absent_seconds=200.0, absent_evaluations=1)
PROOF = EpisodeDiagnosis("Rank 3 on node-01 is in barrier, 15 wait in all_reduce.", conclusive=True)
HINT = EpisodeDiagnosis("All ranks wait in the same all_reduce.", conclusive=False)
ANNOUNCED_PROOF = replace(OPEN, diagnosis=PROOF, notified=replace(NOTIFIED, diagnosis=PROOF, diagnosis_announced=True))
AFTER_RESTART = replace(GONE, unseen_since_restart=True, absent_evaluations=9)


def update(found: Finding | None = HUNG, now: float = 200.0, **facts: Any) -> EpisodeUpdate:
    return EpisodeUpdate(finding=found, now=now, wall=WALL + now, **facts)


@pytest.mark.parametrize(
    ("given", "episode", "at", "reason", "notice"),
    [
        ("absent before and now", None, update(None), NotifyReason.NEVER_FIRED, None),
        ("a first finding", None, update(), NotifyReason.OPENED, NoticeKind.OPENED),
        ("a finding with a root cause", None, update(cause="NodeUnreachable n2"), NotifyReason.INHIBITED, None),
        ("back after 40 s", None, update(previous=PreviousEpisode(160.0, 0)), NotifyReason.REOPENED, NoticeKind.OPENED),
        (
            "back after an hour",
            None,
            update(now=3760.0, previous=PreviousEpisode(160.0, 0)),
            NotifyReason.OPENED,
            NoticeKind.OPENED,
        ),
        ("found after the job's end", None, update(job_completed=True), NotifyReason.JOB_ALREADY_COMPLETED, None),
        ("reported and unchanged", OPEN, update(), NotifyReason.UNCHANGED, None),
        ("reported, and now a cause is known", OPEN, update(cause="NodeUnreachable n2"), NotifyReason.INHIBITED, None),
        ("a suspicion that stays one", SUSPECTED, update(SUSPICION), NotifyReason.UNCHANGED, None),
        ("a suspicion that progress confirms", SUSPECTED, update(), NotifyReason.CONFIRMED, NoticeKind.RAISED),
        ("confirmed, then only suspected again", OPEN, update(SUSPICION), NotifyReason.UNCHANGED, None),
        (
            "a warning that causes a critical alert",
            replace(OPEN, notified=replace(NOTIFIED, severity=Severity.WARNING)),
            update(finding(AlertName.NODE_UNREACHABLE), consequences=(HUNG,)),
            NotifyReason.MORE_SEVERE,
            NoticeKind.RAISED,
        ),
        (
            "a warning that causes a suspicion",
            replace(OPEN, notified=replace(NOTIFIED, severity=Severity.WARNING)),
            update(finding(AlertName.NODE_UNREACHABLE), consequences=(SUSPICION,)),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "a critical alert causes another one",
            OPEN,
            update(finding(AlertName.GPU_FAULT, "n2/a"), consequences=(HUNG,)),
            NotifyReason.STOPPED_JOB,
            NoticeKind.RAISED,
        ),
        (
            "the consequence was already reported",
            replace(OPEN, notified=replace(NOTIFIED, reported_consequences=("JobHung",))),
            update(finding(AlertName.GPU_FAULT, "n2/a"), consequences=(HUNG,)),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "a critical alert causes a suspicion",
            OPEN,
            update(finding(AlertName.GPU_FAULT, "n2/a"), consequences=(SUSPICION,)),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "its consequence is routed to another receiver",
            OPEN,
            update(new_receivers=("pager",)),
            NotifyReason.NEW_RECEIVERS,
            NoticeKind.RAISED,
        ),
        ("a diagnosis has arrived", OPEN, update(diagnosis=PROOF), NotifyReason.DIAGNOSED, NoticeKind.DIAGNOSED),
        (
            "an inconclusive diagnosis",
            OPEN,
            update(diagnosis=HINT),
            NotifyReason.DIAGNOSIS_INCONCLUSIVE,
            NoticeKind.DIAGNOSED,
        ),
        ("the same diagnosis still", ANNOUNCED_PROOF, update(diagnosis=PROOF), NotifyReason.UNCHANGED, None),
        ("a second diagnosis", ANNOUNCED_PROOF, update(diagnosis=HINT), NotifyReason.UNCHANGED, None),
        (
            "a conclusive diagnosis of a suspicion",
            SUSPECTED,
            update(SUSPICION, diagnosis=PROOF),
            NotifyReason.DIAGNOSED,
            NoticeKind.DIAGNOSED,
        ),
        (
            "an inconclusive diagnosis of a suspicion",
            SUSPECTED,
            update(SUSPICION, diagnosis=HINT),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "confirmed as its diagnosis comes",
            SUSPECTED,
            update(diagnosis=PROOF),
            NotifyReason.CONFIRMED,
            NoticeKind.RAISED,
        ),
        (
            "the diagnosis of the last message",
            replace(OPEN, notified=replace(NOTIFIED, diagnosis=HINT)),
            update(diagnosis=HINT),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "a conclusive diagnosis after an inconclusive one",
            replace(OPEN, notified=replace(NOTIFIED, diagnosis=HINT)),
            update(diagnosis=PROOF),
            NotifyReason.DIAGNOSED,
            NoticeKind.DIAGNOSED,
        ),
        (
            "diagnosed while inhibited",
            INHIBITED_EPISODE,
            update(diagnosis=PROOF, cause="GpuFault n2"),
            NotifyReason.INHIBITED,
            None,
        ),
        ("diagnosed as it clears", GONE, update(None, diagnosis=PROOF), NotifyReason.CLEAR_PENDING, None),
        (
            "inhibited, its cause cleared a moment ago",
            INHIBITED_EPISODE,
            update(),
            NotifyReason.CAUSE_JUST_CLEARED,
            None,
        ),
        (
            "inhibited, and it outlived its cause",
            replace(INHIBITED_EPISODE, cause_cleared_seconds=200 - CAUSE_CLEARED_GRACE_SECONDS),
            update(),
            NotifyReason.OUTLIVED_CAUSE,
            NoticeKind.OPENED,
        ),
        ("absent once", OPEN, update(None), NotifyReason.CLEAR_PENDING, None),
        (
            "absent twice within a moment",
            GONE,
            update(None, now=200.0 + CLEAR_SECONDS / 2),
            NotifyReason.CLEAR_PENDING,
            None,
        ),
        ("absent once, long after", OPEN, update(None, now=900.0), NotifyReason.CLEAR_PENDING, None),
        (
            "absent for long enough",
            GONE,
            update(None, now=200.0 + CLEAR_SECONDS),
            NotifyReason.CLEARED,
            NoticeKind.CLOSED,
        ),
        ("present again after one absence", GONE, update(), NotifyReason.UNCHANGED, None),
        (
            "absent, and never reported",
            replace(INHIBITED_EPISODE, absent_seconds=100.0, absent_evaluations=5),
            update(None),
            NotifyReason.CLEARED_UNREPORTED,
            None,
        ),
        ("the job completes", OPEN, update(None, job_completed=True), NotifyReason.JOB_COMPLETED, NoticeKind.CLOSED),
        (
            "the job completes while it is firing",
            OPEN,
            update(job_completed=True),
            NotifyReason.JOB_COMPLETED,
            NoticeKind.CLOSED,
        ),
        (
            "the job completes, never reported",
            INHIBITED_EPISODE,
            update(job_completed=True),
            NotifyReason.CLEARED_UNREPORTED,
            None,
        ),
        (
            "the completion itself",
            None,
            update(finding(AlertName.JOB_COMPLETED), job_completed=True),
            NotifyReason.OPENED,
            NoticeKind.OPENED,
        ),
        (
            "absent after a restart, no evidence of recovery",
            AFTER_RESTART,
            update(None, now=199.0 + RESTART_GRACE_MAX_SECONDS, recovery=recovery("node-01", "node-02")),
            NotifyReason.UNVERIFIED_AFTER_RESTART,
            None,
        ),
        (
            "absent after a restart for half an hour",
            AFTER_RESTART,
            update(None, now=200.0 + RESTART_GRACE_MAX_SECONDS, recovery=recovery("node-01", "node-02")),
            NotifyReason.STATE_UNKNOWN,
            NoticeKind.CLOSED,
        ),
        (
            "absent after a restart, and steps advance",
            AFTER_RESTART,
            update(None, now=203.0, recovery=recovery(advancing=True)),
            NotifyReason.CLEARED,
            NoticeKind.CLOSED,
        ),
        (
            "a hang that has become a crash",
            GONE,
            update(None, now=203.0, successors=(finding(AlertName.JOB_CRASHED),)),
            NotifyReason.REPLACED,
            NoticeKind.CLOSED,
        ),
        (
            "a hang that became a crash while the watcher was stopped",
            AFTER_RESTART,
            update(None, now=203.0, successors=(finding(AlertName.JOB_CRASHED),)),
            NotifyReason.REPLACED,
            NoticeKind.CLOSED,
        ),
    ],
)
def test_each_case_is_decided_with_its_reason(
    given: str, episode: Episode | None, at: EpisodeUpdate, reason: NotifyReason, notice: NoticeKind | None
) -> None:
    decision = decide_notification(episode, at)
    assert (decision.reason, decision.notice) == (reason, notice), given


def test_every_reason_is_a_sentence() -> None:
    assert all(reason.value.endswith(".") and reason.value[0].isupper() for reason in NotifyReason)


def test_a_reminder_is_sent_only_if_configured_and_due() -> None:
    assert decide_notification(OPEN, update(now=100.0 + 7200), None).notice is None
    assert decide_notification(OPEN, update(now=100.0 + 7199), 7200).notice is None
    assert decide_notification(OPEN, update(now=100.0 + 7200), 7200).notice is NoticeKind.REMINDER
    assert decide_notification(OPEN, update(now=100.0 + 7200, cause="NodeUnreachable n2"), 7200).notice is None


def test_a_restarted_watcher_waits_for_twice_the_detection_time() -> None:
    assert restart_grace_seconds(replace(OPEN, detection_seconds=1.0)) == RESTART_GRACE_MIN_SECONDS
    assert restart_grace_seconds(replace(OPEN, detection_seconds=120.0)) == 240.0
    assert restart_grace_seconds(replace(OPEN, detection_seconds=86400.0)) == RESTART_GRACE_MAX_SECONDS


STOPPED = recovery("node-01", "node-02")
RUNNING = recovery("node-01", "node-02", advancing=True)
RUNNING_UNSEEN = recovery("node-01", advancing=True)
XID = replace(finding(AlertName.GPU_FAULT, "node-02/0000:9b:00"), evidence=("Xid 79 (fallen off the bus): ...",))


@pytest.mark.parametrize(
    ("given", "earlier", "evidence", "absent_seconds", "recovered"),
    [
        ("a hang, all nodes answer, no step", HUNG, STOPPED, 1800.0, False),
        ("a hang, and steps advance", HUNG, RUNNING_UNSEEN, 0.0, True),
        ("a crash, all nodes answer", finding(AlertName.JOB_CRASHED), STOPPED, 1800.0, False),
        ("a crash, and the job runs again", finding(AlertName.JOB_CRASHED), RUNNING, 0.0, True),
        ("a stalled save, all nodes answer", finding(AlertName.CHECKPOINT_STALLED), STOPPED, 1800.0, False),
        ("a completed job", finding(AlertName.JOB_COMPLETED), STOPPED, 1800.0, False),
        ("a completed job that runs again", finding(AlertName.JOB_COMPLETED), RUNNING, 0.0, True),
        (
            "a silent node that stays silent",
            finding(AlertName.NODE_UNREACHABLE, "node-02"),
            RUNNING_UNSEEN,
            99.0,
            False,
        ),
        ("a silent node that answers", finding(AlertName.NODE_UNREACHABLE, "node-02"), STOPPED, 0.0, True),
        (
            "an unreadable node that stays unreadable",
            finding(AlertName.PROBE_BLIND, "node-02"),
            RUNNING_UNSEEN,
            99.0,
            False,
        ),
        (
            "a lost GPU of a node that does not answer",
            finding(AlertName.GPU_FAULT, "node-02/b"),
            RUNNING_UNSEEN,
            99.0,
            False,
        ),
        ("a lost GPU whose node is complete", finding(AlertName.GPU_FAULT, "node-02/b"), STOPPED, 0.0, True),
        ("a GPU with a recent Xid", XID, RUNNING, 99.0, False),
        ("a slow job watched for a moment", finding(AlertName.JOB_SLOW), RUNNING, 9.0, False),
        ("a slow job that makes no steps", finding(AlertName.JOB_SLOW), STOPPED, 900.0, False),
        ("a slow job that runs", finding(AlertName.JOB_SLOW), RUNNING, 900.0, True),
        (
            "a throttled GPU of a node that does not answer",
            finding(AlertName.GPU_THROTTLED, "node-02/b"),
            RUNNING_UNSEEN,
            900.0,
            False,
        ),
        ("a job without any data", HUNG, None, 1800.0, False),
        ("a problem of the watcher itself", finding(AlertName.WATCHER_DEGRADED, job=""), None, 900.0, True),
    ],
)
def test_what_an_earlier_process_found_ends_only_on_evidence_of_recovery(
    given: str, earlier: Finding, evidence: RecoveryEvidence | None, absent_seconds: float, recovered: bool
) -> None:
    episode = replace(AFTER_RESTART, finding=earlier, began_seconds=100.0)
    assert has_recovered(episode, update(None, now=200.0, recovery=evidence), absent_seconds) is recovered, given


def test_a_gpu_with_an_xid_counts_as_recovered_after_15_minutes() -> None:
    episode = replace(AFTER_RESTART, finding=XID, began_seconds=100.0)
    assert has_recovered(episode, update(None, now=100.0 + XID_HOLD_SECONDS, recovery=STOPPED), 30.0)


def test_a_flapping_alert_must_stay_absent_longer_each_time_but_a_stop_of_the_job_at_most_a_minute() -> None:
    silent = finding(AlertName.NODE_UNREACHABLE, "node-02")
    assert [clear_seconds(replace(OPEN, finding=silent, reopenings=n)) for n in range(5)] == [2, 60, 600, 600, 600]
    assert [clear_seconds(replace(OPEN, finding=HUNG, reopenings=n)) for n in range(5)] == [2, 60, 60, 60, 60]


def test_reopenings_count_only_if_they_follow_within_ten_minutes() -> None:
    assert open_episode("e", update(now=200.0), HUNG).reopenings == 0
    assert open_episode("e", update(now=200.0, previous=PreviousEpisode(100.0, 3)), HUNG).reopenings == 4
    assert open_episode("e", update(now=900.0, previous=PreviousEpisode(100.0, 3)), HUNG).reopenings == 0


def test_a_finding_detected_again_after_a_restart_clears_as_usual() -> None:
    evidence = advance_episode(
        replace(OPEN, unseen_since_restart=True), update(now=200.0), decide_notification(OPEN, update(now=200.0))
    )
    assert not evidence.unseen_since_restart
    missing = advance_episode(evidence, update(None, now=201.0), decide_notification(evidence, update(None, now=201.0)))
    assert decide_notification(missing, update(None, now=201.0 + CLEAR_SECONDS)).reason is NotifyReason.CLEARED


def test_cost_counts_from_the_beginning_and_across_gaps_but_not_while_absent() -> None:
    first = update(finding(since=40.0), now=100.0)
    episode = advance_episode(
        open_episode("e1", first, finding(since=40.0)), first, decide_notification(None, first), ("webhook",)
    )
    assert episode.gpu_seconds_lost == 16 * 60.0
    after_a_gap = update(finding(since=40.0, gpus_idle=8), now=400.0)
    episode = advance_episode(episode, after_a_gap, decide_notification(episode, after_a_gap))
    assert episode.gpu_seconds_lost == 16 * 60.0 + 8 * 300.0
    for now in (401.0, 410.0):
        episode = advance_episode(episode, update(None, now=now), decide_notification(episode, update(None, now=now)))
    assert episode.closed_wall_seconds == WALL + 410.0
    assert episode.gpu_seconds_lost == 16 * 60.0 + 8 * 300.0


def test_a_condition_cannot_have_begun_in_the_future() -> None:
    first = update(finding(since=1e9), now=100.0)
    assert (
        advance_episode(
            open_episode("e1", first, finding(since=1e9)), first, decide_notification(None, first)
        ).gpu_seconds_lost
        == 0.0
    )


def test_the_closing_message_keeps_the_reported_severity() -> None:
    closed = advance_episode(
        GONE, update(None, now=300.0), decide_notification(GONE, update(None, now=300.0)), ("webhook",)
    )
    assert closed.notified is not None
    assert (closed.notified.message_count, closed.notified.severity) == (2, Severity.CRITICAL)


def test_shifted_to_wall_time_and_back_is_the_same_episode() -> None:
    episode = replace(GONE, cause_cleared_seconds=150.0)
    assert episode.shifted(WALL - 200).shifted(200 - WALL) == episode


def test_a_wall_clock_set_back_puts_nothing_into_the_future() -> None:
    restored = OPEN.shifted(1000.0, now=50.0)
    assert restored.began_seconds == restored.cost_counted_until_seconds == 50.0


def test_a_diagnosis_is_in_every_later_message_including_the_last() -> None:
    at = update(diagnosis=PROOF)
    diagnosed = advance_episode(OPEN, at, decide_notification(OPEN, at), ("webhook",))
    assert diagnosed.notified is not None
    assert (diagnosed.diagnosis, diagnosed.notified.diagnosis, diagnosed.notified.diagnosis_announced) == (
        PROOF,
        PROOF,
        True,
    )
    missing = advance_episode(
        diagnosed, update(None, now=201.0), decide_notification(diagnosed, update(None, now=201.0))
    )
    over = update(None, now=300.0)
    closed = advance_episode(missing, over, decide_notification(missing, over), ("webhook",))
    assert closed.notified is not None
    assert (closed.notified.message_count, closed.notified.diagnosis) == (3, PROOF)


def test_a_diagnosis_that_arrives_while_inhibited_is_in_the_first_message() -> None:
    at = update(diagnosis=PROOF, cause="NodeUnreachable n2")
    quiet = advance_episode(INHIBITED_EPISODE, at, decide_notification(INHIBITED_EPISODE, at))
    alone = update(now=300.0)
    assert (quiet.notified, quiet.diagnosis) == (None, PROOF)
    released = replace(quiet, cause_cleared_seconds=200.0)
    assert decide_notification(released, alone).notice is NoticeKind.OPENED
    reported = advance_episode(released, alone, decide_notification(released, alone), ("webhook",))
    assert reported.notified is not None
    assert reported.notified.diagnosis == PROOF
