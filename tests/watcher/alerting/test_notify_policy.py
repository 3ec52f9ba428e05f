"""The decision, branch by branch: what was told last and what is true now -> tell or not, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.watcher.alerting.fakes import WALL, finding, witness
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
    CAUSE_GONE_GRACE_SECONDS,
    CLEAR_SECONDS,
    RESTART_GRACE_MAX_SECONDS,
    RESTART_GRACE_MIN_SECONDS,
    XID_HOLD_SECONDS,
    clear_seconds,
    decide_notification,
    is_refuted,
    restart_grace_seconds,
)
from wattwatch.watcher.detection.model import AlertName, Finding, Severity
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

HUNG = finding()
SUSPICION = finding(confirmed=False)
TOLD = NotifiedState(1, 100.0, Severity.CRITICAL, True, ("webhook",), ())
OPEN = replace(
    open_episode("e1", EpisodeUpdate(HUNG, 100.0, WALL), HUNG),
    severity=Severity.CRITICAL,
    confirmed=True,
    told=TOLD,
    counted_seconds=100.0,
)
SUSPECTED = replace(OPEN, finding=SUSPICION, told=replace(TOLD, severity=Severity.WARNING, confirmed=False))
QUIET = replace(OPEN, told=None, suppressed_by="NodeUnreachable node-02")
GONE = replace(OPEN, absent_seconds=200.0, absent_looks=1)
PROOF = EpisodeDiagnosis("Rank 3 on node-01 is in barrier, 15 wait in all_reduce.", conclusive=True)
HINT = EpisodeDiagnosis("All ranks wait in the same all_reduce.", conclusive=False)
TOLD_PROOF = replace(OPEN, diagnosis=PROOF, told=replace(TOLD, diagnosis=PROOF, diagnosed=True))
LOADED = replace(GONE, settling=True, absent_looks=9)


def look(found: Finding | None = HUNG, now: float = 200.0, **facts: Any) -> EpisodeUpdate:
    return EpisodeUpdate(finding=found, now=now, wall=WALL + now, **facts)


@pytest.mark.parametrize(
    ("given", "episode", "at", "reason", "notice"),
    [
        ("nothing, before or now", None, look(None), NotifyReason.NEVER_TRUE, None),
        ("a first finding", None, look(), NotifyReason.OPENED, NoticeKind.OPENED),
        ("a finding under a root cause", None, look(cause="NodeUnreachable n2"), NotifyReason.SUPPRESSED, None),
        ("back after 40 s", None, look(ending=PreviousEpisode(160.0, 0)), NotifyReason.OPENED_AGAIN, NoticeKind.OPENED),
        (
            "back after an hour",
            None,
            look(now=3760.0, ending=PreviousEpisode(160.0, 0)),
            NotifyReason.OPENED,
            NoticeKind.OPENED,
        ),
        ("found after the job's end", None, look(job_ended=True), NotifyReason.ENDED_BEFORE, None),
        ("told and unchanged", OPEN, look(), NotifyReason.UNCHANGED, None),
        ("told, and now a cause is known", OPEN, look(cause="NodeUnreachable n2"), NotifyReason.SUPPRESSED, None),
        ("a suspicion that stays one", SUSPECTED, look(SUSPICION), NotifyReason.UNCHANGED, None),
        ("a suspicion that progress confirms", SUSPECTED, look(), NotifyReason.CONFIRMED, NoticeKind.RAISED),
        ("confirmed, and only suspected again", OPEN, look(SUSPICION), NotifyReason.UNCHANGED, None),
        (
            "a warning from which something critical follows",
            replace(OPEN, told=replace(TOLD, severity=Severity.WARNING)),
            look(finding(AlertName.NODE_UNREACHABLE), followers=(HUNG,)),
            NotifyReason.GRAVER,
            NoticeKind.RAISED,
        ),
        (
            "a warning from which a suspicion follows",
            replace(OPEN, told=replace(TOLD, severity=Severity.WARNING)),
            look(finding(AlertName.NODE_UNREACHABLE), followers=(SUSPICION,)),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "something critical follows from what is critical",
            OPEN,
            look(finding(AlertName.GPU_FAULT, "n2/a"), followers=(HUNG,)),
            NotifyReason.FOLLOWED,
            NoticeKind.RAISED,
        ),
        (
            "the same follows still",
            replace(OPEN, told=replace(TOLD, followers=("JobHung",))),
            look(finding(AlertName.GPU_FAULT, "n2/a"), followers=(HUNG,)),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "a suspicion follows from what is critical",
            OPEN,
            look(finding(AlertName.GPU_FAULT, "n2/a"), followers=(SUSPICION,)),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "somebody else is concerned now",
            OPEN,
            look(newly_concerned=("pager",)),
            NotifyReason.CONCERNS_MORE,
            NoticeKind.RAISED,
        ),
        ("a diagnosis has come", OPEN, look(diagnosis=PROOF), NotifyReason.DIAGNOSED, NoticeKind.DIAGNOSED),
        ("a diagnosis that proves nothing", OPEN, look(diagnosis=HINT), NotifyReason.LOOKED_INTO, NoticeKind.DIAGNOSED),
        ("the same diagnosis still", TOLD_PROOF, look(diagnosis=PROOF), NotifyReason.UNCHANGED, None),
        ("a second diagnosis", TOLD_PROOF, look(diagnosis=HINT), NotifyReason.UNCHANGED, None),
        (
            "a proof of a suspicion",
            SUSPECTED,
            look(SUSPICION, diagnosis=PROOF),
            NotifyReason.DIAGNOSED,
            NoticeKind.DIAGNOSED,
        ),
        ("a suspicion, and nothing proved", SUSPECTED, look(SUSPICION, diagnosis=HINT), NotifyReason.UNCHANGED, None),
        (
            "confirmed as its diagnosis comes",
            SUSPECTED,
            look(diagnosis=PROOF),
            NotifyReason.CONFIRMED,
            NoticeKind.RAISED,
        ),
        (
            "the diagnosis that its last message has told",
            replace(OPEN, told=replace(TOLD, diagnosis=HINT)),
            look(diagnosis=HINT),
            NotifyReason.UNCHANGED,
            None,
        ),
        (
            "a proof after a message that told of none",
            replace(OPEN, told=replace(TOLD, diagnosis=HINT)),
            look(diagnosis=PROOF),
            NotifyReason.DIAGNOSED,
            NoticeKind.DIAGNOSED,
        ),
        (
            "diagnosed under a root cause",
            QUIET,
            look(diagnosis=PROOF, cause="GpuFault n2"),
            NotifyReason.SUPPRESSED,
            None,
        ),
        ("diagnosed as it goes", GONE, look(None, diagnosis=PROOF), NotifyReason.CLEAR_PENDING, None),
        ("quiet, its cause gone a moment ago", QUIET, look(), NotifyReason.CAUSE_JUST_OVER, None),
        (
            "quiet, and it outlived its cause",
            replace(QUIET, released_seconds=200 - CAUSE_GONE_GRACE_SECONDS),
            look(),
            NotifyReason.OUTLIVED_CAUSE,
            NoticeKind.OPENED,
        ),
        ("one look without it", OPEN, look(None), NotifyReason.CLEAR_PENDING, None),
        (
            "two looks within a moment",
            GONE,
            look(None, now=200.0 + CLEAR_SECONDS / 2),
            NotifyReason.CLEAR_PENDING,
            None,
        ),
        ("one look, long after", OPEN, look(None, now=900.0), NotifyReason.CLEAR_PENDING, None),
        ("missing long enough", GONE, look(None, now=200.0 + CLEAR_SECONDS), NotifyReason.CLEARED, NoticeKind.CLOSED),
        ("back after one look", GONE, look(), NotifyReason.UNCHANGED, None),
        (
            "missing, and nobody had been told",
            replace(QUIET, absent_seconds=100.0, absent_looks=5),
            look(None),
            NotifyReason.CLEARED_UNTOLD,
            None,
        ),
        ("the job completes", OPEN, look(None, job_ended=True), NotifyReason.JOB_ENDED, NoticeKind.CLOSED),
        ("the job completes while it is true", OPEN, look(job_ended=True), NotifyReason.JOB_ENDED, NoticeKind.CLOSED),
        ("the job completes, untold", QUIET, look(job_ended=True), NotifyReason.CLEARED_UNTOLD, None),
        (
            "the completion itself",
            None,
            look(finding(AlertName.JOB_COMPLETED), job_ended=True),
            NotifyReason.OPENED,
            NoticeKind.OPENED,
        ),
        (
            "missing after a restart, and nobody saw it end",
            LOADED,
            look(None, now=199.0 + RESTART_GRACE_MAX_SECONDS, witness=witness("node-01", "node-02")),
            NotifyReason.SETTLING,
            None,
        ),
        (
            "missing after a restart for half an hour",
            LOADED,
            look(None, now=200.0 + RESTART_GRACE_MAX_SECONDS, witness=witness("node-01", "node-02")),
            NotifyReason.NOT_KNOWN,
            NoticeKind.CLOSED,
        ),
        (
            "missing after a restart, and steps advance",
            LOADED,
            look(None, now=203.0, witness=witness(advancing=True)),
            NotifyReason.CLEARED,
            NoticeKind.CLOSED,
        ),
        (
            "a hang that has become a crash",
            GONE,
            look(None, now=203.0, successors=(finding(AlertName.JOB_CRASHED),)),
            NotifyReason.REPLACED,
            NoticeKind.CLOSED,
        ),
        (
            "a hang that has become a crash while the watcher was away",
            LOADED,
            look(None, now=203.0, successors=(finding(AlertName.JOB_CRASHED),)),
            NotifyReason.REPLACED,
            NoticeKind.CLOSED,
        ),
    ],
)
def test_decision(
    given: str, episode: Episode | None, at: EpisodeUpdate, reason: NotifyReason, notice: NoticeKind | None
) -> None:
    decision = decide_notification(episode, at)
    assert (decision.reason, decision.notice) == (reason, notice), given


def test_every_reason_is_a_sentence() -> None:
    assert all(reason.value.endswith(".") and reason.value[0].isupper() for reason in NotifyReason)


def test_a_reminder_comes_only_where_it_is_configured_and_when_it_is_due() -> None:
    assert decide_notification(OPEN, look(now=100.0 + 7200), None).notice is None
    assert decide_notification(OPEN, look(now=100.0 + 7199), 7200).notice is None
    assert decide_notification(OPEN, look(now=100.0 + 7200), 7200).notice is NoticeKind.REMINDER
    assert decide_notification(OPEN, look(now=100.0 + 7200, cause="NodeUnreachable n2"), 7200).notice is None


def test_a_restarted_watcher_waits_twice_as_long_as_the_detection_took() -> None:
    assert restart_grace_seconds(replace(OPEN, detection_seconds=1.0)) == RESTART_GRACE_MIN_SECONDS
    assert restart_grace_seconds(replace(OPEN, detection_seconds=120.0)) == 240.0
    assert restart_grace_seconds(replace(OPEN, detection_seconds=86400.0)) == RESTART_GRACE_MAX_SECONDS


STOPPED = witness("node-01", "node-02")
RUNNING = witness("node-01", "node-02", advancing=True)
RUNNING_UNSEEN = witness("node-01", advancing=True)
XID = replace(finding(AlertName.GPU_FAULT, "node-02/0000:9b:00"), evidence=("Xid 79 (fallen off the bus): ...",))


@pytest.mark.parametrize(
    ("given", "earlier", "seen", "missing_seconds", "refuted"),
    [
        ("a hang, all in sight, no step", HUNG, STOPPED, 1800.0, False),
        ("a hang, and steps advance", HUNG, RUNNING_UNSEEN, 0.0, True),
        ("a crash, all in sight", finding(AlertName.JOB_CRASHED), STOPPED, 1800.0, False),
        ("a crash, and the job runs again", finding(AlertName.JOB_CRASHED), RUNNING, 0.0, True),
        ("a stalled save, all in sight", finding(AlertName.CHECKPOINT_STALLED), STOPPED, 1800.0, False),
        ("a completed job", finding(AlertName.JOB_COMPLETED), STOPPED, 1800.0, False),
        ("a completed job that runs again", finding(AlertName.JOB_COMPLETED), RUNNING, 0.0, True),
        ("a silent node that is silent", finding(AlertName.NODE_UNREACHABLE, "node-02"), RUNNING_UNSEEN, 99.0, False),
        ("a silent node that answers", finding(AlertName.NODE_UNREACHABLE, "node-02"), STOPPED, 0.0, True),
        ("a blind node that is blind", finding(AlertName.PROBE_BLIND, "node-02"), RUNNING_UNSEEN, 99.0, False),
        ("a lost board of a node out of sight", finding(AlertName.GPU_FAULT, "node-02/b"), RUNNING_UNSEEN, 99.0, False),
        ("a lost board whose node is whole", finding(AlertName.GPU_FAULT, "node-02/b"), STOPPED, 0.0, True),
        ("a board that an Xid named just now", XID, RUNNING, 99.0, False),
        ("a slow job that is watched for a moment", finding(AlertName.JOB_SLOW), RUNNING, 9.0, False),
        ("a slow job that is watched and stands", finding(AlertName.JOB_SLOW), STOPPED, 900.0, False),
        ("a slow job that is watched and runs", finding(AlertName.JOB_SLOW), RUNNING, 900.0, True),
        ("a hot board out of sight", finding(AlertName.GPU_THROTTLED, "node-02/b"), RUNNING_UNSEEN, 900.0, False),
        ("a job of which nothing is seen", HUNG, None, 1800.0, False),
        ("the watcher's own trouble", finding(AlertName.WATCHER_DEGRADED, job=""), None, 900.0, True),
    ],
)
def test_what_an_earlier_process_found_ends_when_the_opposite_is_seen(
    given: str, earlier: Finding, seen: RecoveryEvidence | None, missing_seconds: float, refuted: bool
) -> None:
    episode = replace(LOADED, finding=earlier, began_seconds=100.0)
    assert is_refuted(episode, look(None, now=200.0, witness=seen), missing_seconds) is refuted, given


def test_a_board_that_an_xid_named_is_believed_again_after_a_quarter_of_an_hour() -> None:
    episode = replace(LOADED, finding=XID, began_seconds=100.0)
    assert is_refuted(episode, look(None, now=100.0 + XID_HOLD_SECONDS, witness=STOPPED), 30.0)


def test_what_comes_and_goes_must_be_gone_for_longer_each_time_but_what_stops_a_job_for_a_minute_at_most() -> None:
    silent = finding(AlertName.NODE_UNREACHABLE, "node-02")
    assert [clear_seconds(replace(OPEN, finding=silent, reopenings=n)) for n in range(5)] == [2, 60, 600, 600, 600]
    assert [clear_seconds(replace(OPEN, finding=HUNG, reopenings=n)) for n in range(5)] == [2, 60, 60, 60, 60]


def test_reopenings_count_in_a_row() -> None:
    assert open_episode("e", look(now=200.0), HUNG).reopenings == 0
    assert open_episode("e", look(now=200.0, ending=PreviousEpisode(100.0, 3)), HUNG).reopenings == 4
    assert open_episode("e", look(now=900.0, ending=PreviousEpisode(100.0, 3)), HUNG).reopenings == 0


def test_what_is_seen_again_after_a_restart_closes_at_the_usual_pace() -> None:
    seen = advance_episode(replace(OPEN, settling=True), look(now=200.0), decide_notification(OPEN, look(now=200.0)))
    assert not seen.settling
    missing = advance_episode(seen, look(None, now=201.0), decide_notification(seen, look(None, now=201.0)))
    assert decide_notification(missing, look(None, now=201.0 + CLEAR_SECONDS)).reason is NotifyReason.CLEARED


def test_cost_counts_from_the_beginning_and_over_gaps_but_not_while_it_is_missing() -> None:
    first = look(finding(since=40.0), now=100.0)
    episode = advance_episode(
        open_episode("e1", first, finding(since=40.0)), first, decide_notification(None, first), ("webhook",)
    )
    assert episode.gpu_seconds_lost == 16 * 60.0
    after_a_gap = look(finding(since=40.0, gpus_idle=8), now=400.0)
    episode = advance_episode(episode, after_a_gap, decide_notification(episode, after_a_gap))
    assert episode.gpu_seconds_lost == 16 * 60.0 + 8 * 300.0
    for now in (401.0, 410.0):
        episode = advance_episode(episode, look(None, now=now), decide_notification(episode, look(None, now=now)))
    assert episode.closed_wall_seconds == WALL + 410.0
    assert episode.gpu_seconds_lost == 16 * 60.0 + 8 * 300.0


def test_a_condition_cannot_have_begun_in_the_future() -> None:
    first = look(finding(since=1e9), now=100.0)
    assert (
        advance_episode(
            open_episode("e1", first, finding(since=1e9)), first, decide_notification(None, first)
        ).gpu_seconds_lost
        == 0.0
    )


def test_the_closing_message_keeps_the_severity_that_was_told() -> None:
    closed = advance_episode(
        GONE, look(None, now=300.0), decide_notification(GONE, look(None, now=300.0)), ("webhook",)
    )
    assert closed.told is not None
    assert (closed.told.notices, closed.told.severity) == (2, Severity.CRITICAL)


def test_shifted_to_wall_time_and_back_is_the_same_episode() -> None:
    episode = replace(GONE, released_seconds=150.0)
    assert episode.shifted(WALL - 200).shifted(200 - WALL) == episode


def test_a_wall_clock_that_was_set_back_makes_nothing_happen_in_the_future() -> None:
    restored = OPEN.shifted(1000.0, now=50.0)
    assert restored.began_seconds == restored.counted_seconds == 50.0


def test_a_diagnosis_is_in_every_message_from_then_on_and_in_the_last_one() -> None:
    at = look(diagnosis=PROOF)
    diagnosed = advance_episode(OPEN, at, decide_notification(OPEN, at), ("webhook",))
    assert diagnosed.told is not None
    assert (diagnosed.diagnosis, diagnosed.told.diagnosis, diagnosed.told.diagnosed) == (PROOF, PROOF, True)
    missing = advance_episode(diagnosed, look(None, now=201.0), decide_notification(diagnosed, look(None, now=201.0)))
    over = look(None, now=300.0)
    closed = advance_episode(missing, over, decide_notification(missing, over), ("webhook",))
    assert closed.told is not None
    assert (closed.told.notices, closed.told.diagnosis) == (3, PROOF)


def test_a_diagnosis_that_comes_while_it_is_quiet_is_in_its_first_message() -> None:
    at = look(diagnosis=PROOF, cause="NodeUnreachable n2")
    quiet = advance_episode(QUIET, at, decide_notification(QUIET, at))
    alone = look(now=300.0)
    assert (quiet.told, quiet.diagnosis) == (None, PROOF)
    released = replace(quiet, released_seconds=200.0)
    assert decide_notification(released, alone).notice is NoticeKind.OPENED
    told = advance_episode(released, alone, decide_notification(released, alone), ("webhook",))
    assert told.told is not None
    assert told.told.diagnosis == PROOF
