"""The demo's webhook takes what a receiver takes, and counts what it does not understand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.demo.receiver import DemoReceiver

PAYLOAD: dict[str, Any] = {
    "version": "4",
    "status": "firing",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "JobHung", "train_job": "deadlock", "severity": "critical"},
            "annotations": {"summary": "The job is hung.", "suspects": "rank 3"},
        },
        {"status": "resolved", "labels": {"alertname": "NodeUnreachable", "train_job": "a"}, "annotations": {}},
    ],
}


@pytest.fixture
def receiver() -> Iterator[DemoReceiver]:
    started = DemoReceiver(Clock())
    yield started
    started.stop()


def test_each_alert_of_a_message_is_received(receiver: DemoReceiver) -> None:
    assert httpx.post(f"{receiver.address}/webhook", json=PAYLOAD).status_code == 200
    hung, lost = receiver.notices()
    assert (hung.status, hung.alert, hung.job, hung.severity) == ("firing", "JobHung", "deadlock", "critical")
    assert "rank 3" in hung.text
    assert (lost.status, lost.alert, lost.severity) == ("resolved", "NodeUnreachable", "")


def test_a_slack_message_is_counted_and_answered_with_ok(receiver: DemoReceiver) -> None:
    answer = httpx.post(f"{receiver.address}/slack", json={"text": "hung", "blocks": []})
    assert (answer.status_code, answer.text) == (200, "ok")
    assert receiver.slack_messages == 1
    assert receiver.notices() == ()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/webhook", b"not json"),
        ("/webhook", b"[]"),
        ("/webhook", b'{"alerts": [{"status": "firing"}]}'),
        ("/slack", b"{}"),
        ("/elsewhere", b"{}"),
    ],
)
def test_an_invalid_payload_is_rejected_and_counted(receiver: DemoReceiver, path: str, body: bytes) -> None:
    assert httpx.post(f"{receiver.address}{path}", content=body).status_code == 400
    assert receiver.unreadable == 1
