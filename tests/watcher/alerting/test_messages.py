"""What people read about an alert, and how Slack and webhooks lay it out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watcher.alerting.fakes import WALL, finding
from wattwatch.watcher.alerting.episode import (
    Episode,
    EpisodeDiagnosis,
    EpisodeUpdate,
    NoticeKind,
    NotifyDecision,
    NotifyReason,
    advance_episode,
    open_episode,
)
from wattwatch.watcher.alerting.message import AlertMessage, compose_message
from wattwatch.watcher.alerting.notify_policy import decide_notification
from wattwatch.watcher.alerting.receivers.base import (
    Delivered,
    DeliveryFailure,
    GiveUp,
    RetryLater,
    classify_status,
    parse_retry_after,
)
from wattwatch.watcher.alerting.receivers.slack import (
    MAX_CHARACTERS,
    MAX_HEADER_CHARACTERS,
    MAX_SECTION_CHARACTERS,
    classify_slack_response,
    is_layout_error,
    plain_text_payload,
    slack_payload,
)
from wattwatch.watcher.alerting.receivers.webhook import webhook_payload
from wattwatch.watcher.common.formatting import format_duration, format_hours
from wattwatch.watcher.detection.model import AlertName, Finding, Suspect

CAPTURED = Path(__file__).parents[2] / "data" / "tell" / "alertmanager_0_25_webhook.json"
RANK_3 = (Suspect("node-01", gpu=3, rank=3),)


def opened_episode(found: Finding | None = None) -> Episode:
    """The episode of a finding that began 95 s ago, just opened and notified."""
    found = finding(suspects=RANK_3) if found is None else found
    update = EpisodeUpdate(found, now=95.0, wall=WALL)
    return advance_episode(open_episode("e1", update, found), update, decide_notification(None, update), ("webhook",))


def message(found: Finding | None = None, link: str | None = "http://watcher.example:9560") -> AlertMessage:
    """The opening message of a finding that began 95 s ago."""
    return compose_message(opened_episode(found), NoticeKind.OPENED, NotifyReason.OPENED, 95.0, WALL, link)


def closing_message() -> AlertMessage:
    update = EpisodeUpdate(finding(suspects=RANK_3), now=95.0, wall=WALL)
    episode = advance_episode(
        open_episode("e1", update, finding(suspects=RANK_3)), update, decide_notification(None, update), ("webhook",)
    )
    gone = EpisodeUpdate(None, now=120.0, wall=WALL + 25)
    closed = advance_episode(
        episode, gone, NotifyDecision(NotifyReason.CLEARED, NoticeKind.CLOSED, closes=True), ("webhook",)
    )
    return compose_message(closed, NoticeKind.CLOSED, NotifyReason.CLEARED, 120.0, WALL + 25, None)


@pytest.mark.parametrize(
    ("reason", "title"),
    [
        (NotifyReason.OPENED, "CRITICAL JobHung llama"),
        (NotifyReason.REOPENED, "CRITICAL AGAIN JobHung llama"),
        (NotifyReason.OUTLIVED_CAUSE, "STILL CRITICAL JobHung llama"),
    ],
)
def test_the_title_says_whether_an_alert_is_new(reason: NotifyReason, title: str) -> None:
    update = EpisodeUpdate(finding(), now=95.0, wall=WALL)
    decision = NotifyDecision(reason, NoticeKind.OPENED)
    episode = advance_episode(open_episode("e1", update, finding()), update, decision, ("webhook",))
    assert compose_message(episode, NoticeKind.OPENED, reason, 95.0, WALL, None).title == title


def test_a_closing_message_no_longer_names_what_the_alert_explained() -> None:
    lost, hang = finding(AlertName.GPU_FAULT, "node-02/3"), finding()
    update = EpisodeUpdate(lost, now=95.0, wall=WALL, consequences=(hang,))
    episode = advance_episode(
        open_episode("e1", update, lost), update, NotifyDecision(NotifyReason.OPENED, NoticeKind.OPENED), ("webhook",)
    )
    opened = compose_message(episode, NoticeKind.OPENED, NotifyReason.OPENED, 95.0, WALL, None)
    closed = compose_message(episode, NoticeKind.CLOSED, NotifyReason.CLEARED, 120.0, WALL, None)
    assert "also explains JobHung" in opened.text
    assert "JobHung" not in closed.text


def test_a_message_has_verdict_suspect_evidence_cost_start_and_next_step() -> None:
    assert message().text.splitlines() == [
        "CRITICAL JobHung llama",
        "No step for 95 s; the usual pace is one in 9 s.",
        "Suspect: rank 3 on node-01 GPU 3",
        "- 15 GPUs at 190 W and 100 %",
        "- rank 3 at 0 %",
        "0.42 GPU-hours lost so far (16 GPUs doing no useful work).",
        "Started 1 min 35 s ago, as of 2027-01-15 08:00:00 UTC.",
        "New alert.",
        "What to do: Take stacks of rank 3 before you end the job.",
        "http://watcher.example:9560",
    ]


def test_a_suspicion_is_a_warning_marked_as_unconfirmed() -> None:
    suspicion = message(finding(confirmed=False))
    assert suspicion.title == "WARNING JobHung llama"
    assert suspicion.summary.endswith("(unconfirmed)")


def test_the_closing_message_says_how_long_it_lasted_and_what_it_cost() -> None:
    closed = closing_message()
    assert closed.title == "RESOLVED JobHung llama"
    assert "Lasted 2 min, until 2027-01-15 08:00:25 UTC." in closed.text
    assert "0.42 GPU-hours lost." in closed.text
    assert "What to do" not in closed.text


def test_an_alert_without_a_job_is_about_the_watcher() -> None:
    assert message(finding(AlertName.WATCHER_DEGRADED, job="")).title == "WARNING WatcherDegraded the watcher"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.6, "1 min"), (95, "1 min 35 s"), (7200, "2 h"), (12_000, "3 h 20 min"), (187_000, "2 d 3 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_amounts_have_three_digits() -> None:
    assert [format_hours(hours) for hours in (0.4222, 42.22, 4222.2)] == ["0.42", "42.2", "4222"]


def shape_of(value: object) -> object:
    """Keys and types; the keys inside labels and annotations are free."""
    if isinstance(value, dict):
        free = all(isinstance(inner, str) for inner in value.values())
        return "strings" if free else {key: shape_of(inner) for key, inner in value.items()}
    return [shape_of(inner) for inner in value] if isinstance(value, list) else type(value).__name__


def test_webhook_messages_have_the_shape_of_alertmanagers() -> None:
    firing, resolved = json.loads(CAPTURED.read_text("utf-8"))
    assert shape_of(json.loads(webhook_payload(message(), "all"))) == shape_of(firing)
    assert shape_of(json.loads(webhook_payload(closing_message(), "all"))) == shape_of(resolved)


def test_webhook_firing_and_resolved_are_the_same_alert() -> None:
    (firing,) = content_of(message())["alerts"]
    (resolved,) = content_of(closing_message())["alerts"]
    assert firing["endsAt"] == "0001-01-01T00:00:00Z"
    assert (firing["status"], resolved["status"]) == ("firing", "resolved")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", resolved["endsAt"])
    for same in ("labels", "fingerprint", "startsAt"):
        assert firing[same] == resolved[same]
    assert re.fullmatch("[0-9a-f]{16}", firing["fingerprint"])
    assert firing["labels"] == {
        "alertname": "JobHung",
        "severity": "critical",
        "train_job": "llama",
        "node": "node-01",
        "gpu": "3",
        "rank": "3",
    }


def test_webhook_group_key_is_alertmanagers() -> None:
    content = content_of(message(finding(job='a"b')))
    assert content["groupKey"] == '{}:{alertname="JobHung", train_job="a\\"b"}'
    assert content["groupLabels"] == {"alertname": "JobHung", "train_job": 'a"b'}


def test_webhook_labels_are_never_empty_and_name_no_rank_if_there_are_several_suspects() -> None:
    labels = content_of(message(finding(suspects=(*RANK_3, Suspect("node-02", 1, 9)))))["commonLabels"]
    assert labels == {"alertname": "JobHung", "severity": "critical", "train_job": "llama"}
    labels = content_of(message(finding(AlertName.NODE_UNREACHABLE, "node-02")))["commonLabels"]
    assert labels["node"] == "node-02"


def content_of(sent: AlertMessage) -> Any:
    return json.loads(webhook_payload(sent, "all"))


def texts_of(block: dict[str, Any]) -> list[str]:
    return [block["text"]["text"]] if "text" in block else [element["text"] for element in block["elements"]]


def check_slack(payload: bytes) -> dict[str, Any]:
    """Assert every known limit of Slack; returns the decoded payload."""
    assert len(payload.decode()) <= MAX_CHARACTERS
    content: dict[str, Any] = orjson.loads(payload)
    assert content["text"]
    assert len(content["blocks"]) <= 50
    for block in content["blocks"]:
        for text in texts_of(block):
            assert 0 < len(text) <= (MAX_HEADER_CHARACTERS if block["type"] == "header" else MAX_SECTION_CHARACTERS)
            assert not re.search(r"&(?!amp;|lt;|gt;)|[<>]", text), "something is not escaped, or cut inside an entity"
            assert text.count("```") % 2 == 0
    return content


def test_a_slack_message_has_the_same_content() -> None:
    content = check_slack(slack_payload(message()))
    blocks = "\n".join(text for block in content["blocks"] for text in texts_of(block))
    for words in ("CRITICAL JobHung llama", "rank 3 on node-01 GPU 3", "• rank 3 at 0 %", "0.42 GPU-hours", "stacks"):
        assert words in blocks
    assert content["text"].startswith("CRITICAL JobHung llama\n")


def test_a_log_line_cannot_make_slack_page_the_whole_channel() -> None:
    payload = slack_payload(message(finding(summary="<!channel> a & b")))
    check_slack(payload)
    assert b"<!channel>" not in payload
    assert b"&lt;!channel&gt; a &amp; b" in payload


def test_slack_many_suspects_are_a_table_cut_between_rows() -> None:
    suspects = tuple(Suspect(f"node-{rank // 8:03}", rank % 8, rank) for rank in range(512))
    content = check_slack(slack_payload(message(finding(suspects=suspects))))
    (table,) = [text for block in content["blocks"] for text in texts_of(block) if text.startswith("```")]
    *rows, last = table.strip("`").splitlines()
    assert rows[0] == " rank  GPU node"
    assert all(re.fullmatch(r" +\d+ +\d node-\d{3}", row) for row in rows[1:])
    assert last == f"… and {512 - (len(rows) - 1)} more"


@given(
    text=st.text(max_size=300),
    lines=st.lists(st.text(max_size=3000), max_size=60),
    multiple=st.sampled_from((1, 50)),
    count=st.integers(0, 40),
)
def test_slack_limits_hold_for_any_text(text: str, lines: list[str], multiple: int, count: int) -> None:
    suspects = tuple(Suspect(text or "n", None, rank) for rank in range(count))
    odd = replace(
        finding(suspects=suspects, job=text, scope=text, summary=text * multiple),
        evidence=tuple(lines),
        advice=text * multiple,
    )
    payload = slack_payload(message(odd))
    assert orjson.loads(plain_text_payload(payload)) == {"text": check_slack(payload)["text"]}
    webhook_payload(message(odd), "all")


def test_slack_worst_case_of_json_escapes_still_fits() -> None:
    nasty = replace(finding(summary='"\\' * 5000), evidence=('"' * 4000,) * 100, advice="\\" * 9000)
    check_slack(slack_payload(message(nasty)))


def test_text_that_is_not_valid_unicode_is_still_sent() -> None:
    broken = finding(summary="log says \udcff\x00\x1b[31m", job="\udcff")
    check_slack(slack_payload(message(broken)))
    assert content_of(message(broken))["status"] == "firing"


@pytest.mark.parametrize(
    ("status", "headers", "meaning"),
    [
        (200, {}, Delivered()),
        (202, {}, Delivered()),
        (429, {"retry-after": "7"}, RetryLater(DeliveryFailure.RATE_LIMITED, "HTTP 429", 7.0)),
        (503, {"retry-after": "120"}, RetryLater(DeliveryFailure.SERVER_ERROR, "HTTP 503", 120.0)),
        (500, {"retry-after": "120"}, RetryLater(DeliveryFailure.SERVER_ERROR, "HTTP 500")),
        (408, {}, RetryLater(DeliveryFailure.SERVER_ERROR, "HTTP 408")),
    ],
)
def test_a_status_is_delivered_or_retried(status: int, headers: dict[str, str], meaning: object) -> None:
    assert classify_status(status, headers, WALL) == meaning


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (301, DeliveryFailure.REDIRECTED),
        (400, DeliveryFailure.REJECTED),
        (401, DeliveryFailure.UNAUTHORIZED),
        (403, DeliveryFailure.UNAUTHORIZED),
        (404, DeliveryFailure.GONE),
        (410, DeliveryFailure.GONE),
        (413, DeliveryFailure.REJECTED),
    ],
)
def test_a_status_that_no_retry_can_change_gives_up(status: int, failure: DeliveryFailure) -> None:
    outcome = classify_status(status, {}, WALL)
    assert isinstance(outcome, GiveUp)
    assert outcome.failure is failure


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("soon", None),
        ("nan", None),
        ("", None),
        ("-5", 0.0),
        ("1.5", 1.5),
        ("inf", 3600.0),
        ("999999999", 3600.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Fri, 15 Jan 1999 08:00:30 GMT", 0.0),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, WALL) == seconds


def test_slack_responses_are_classified_by_their_body() -> None:
    assert classify_slack_response(200, {}, "ok", WALL) == Delivered()
    assert isinstance(classify_slack_response(200, {}, "<html>please log in</html>", WALL), RetryLater)
    assert classify_slack_response(400, {}, "invalid_token", WALL) == GiveUp(
        DeliveryFailure.UNAUTHORIZED, "Slack: invalid_token"
    )
    assert classify_slack_response(404, {}, "no_service", WALL) == GiveUp(DeliveryFailure.GONE, "Slack: no_service")
    throttled = classify_slack_response(429, {}, '{"retry_after":3,"ok":false,"error":"rate_limited"}', WALL)
    assert throttled == RetryLater(DeliveryFailure.RATE_LIMITED, "HTTP 429", 3.0)
    assert is_layout_error(400, "invalid_blocks")
    assert not is_layout_error(400, "invalid_token")


def test_wasted_energy_is_reported_beside_the_gpu_hours() -> None:
    found = finding(suspects=RANK_3)
    update = EpisodeUpdate(replace(found, idle_joules=7.2e6), now=95.0, wall=WALL)
    decision = decide_notification(None, update)
    episode = advance_episode(open_episode("e1", update, found), update, decision, ("webhook",))
    sent = compose_message(episode, NoticeKind.OPENED, decision.reason, 95.0, WALL, None)
    assert sent.cost == "0.42 GPU-hours and 2.00 kWh lost so far (16 GPUs doing no useful work)."
    (alert,) = orjson.loads(webhook_payload(sent, "webhook"))["alerts"]
    assert alert["annotations"]["kilowatt_hours_lost"] == "2.000"
    after_a_gap = advance_episode(
        episode, replace(update, finding=found, now=400.0), NotifyDecision(NotifyReason.UNCHANGED)
    )
    assert after_a_gap.joules_lost == 7.2e6


def test_a_diagnosis_follows_directly_after_the_summary() -> None:
    found = finding(suspects=RANK_3)
    proof = EpisodeDiagnosis("Rank 3 on node-01 is in barrier, 15 ranks wait in all_reduce.", conclusive=True)
    at = EpisodeUpdate(found, now=95.0, wall=WALL)
    episode = advance_episode(open_episode("e1", at, found), at, decide_notification(None, at), ("webhook",))
    later = replace(at, now=99.0, diagnosis=proof)
    decision = decide_notification(episode, later)
    assert decision.notice is NoticeKind.DIAGNOSED
    sent = compose_message(
        advance_episode(episode, later, decision, ("webhook",)), NoticeKind.DIAGNOSED, decision.reason, 99.0, WALL, None
    )
    words = "Rank 3 on node-01 is in barrier, 15 ranks wait in all_reduce (conclusive)"
    assert sent.title == "DIAGNOSED JobHung llama"
    assert sent.text.splitlines()[2] == f"Diagnosis: {words}"
    slack = orjson.loads(slack_payload(sent))
    assert slack["blocks"][2]["text"]["text"] == f"*Diagnosis:* {words}"
    (alert,) = orjson.loads(webhook_payload(sent, "webhook"))["alerts"]
    assert alert["annotations"]["diagnosis"] == words


def test_the_next_step_comes_from_the_diagnosis_once_there_is_one() -> None:
    found = finding(suspects=RANK_3)
    at = EpisodeUpdate(found, now=95.0, wall=WALL)
    episode = advance_episode(open_episode("e1", at, found), at, decide_notification(None, at), ("webhook",))
    before = compose_message(episode, NoticeKind.OPENED, NotifyReason.OPENED, 95.0, WALL, None)
    assert before.advice == found.advice
    later = replace(
        at, now=99.0, diagnosis=EpisodeDiagnosis("Rank 3 is in barrier.", True, "Compare the two lines of code.")
    )
    after = advance_episode(episode, later, decide_notification(episode, later), ("webhook",))
    sent = compose_message(after, NoticeKind.DIAGNOSED, NotifyReason.DIAGNOSED, 99.0, WALL, None)
    assert after.advice == sent.advice == "Compare the two lines of code."
    assert "*What to do:* Compare the two lines of code." in slack_payload(sent).decode()
    (alert,) = orjson.loads(webhook_payload(sent, "webhook"))["alerts"]
    assert alert["annotations"]["advice"] == "Compare the two lines of code."
