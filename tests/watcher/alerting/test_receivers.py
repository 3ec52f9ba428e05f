"""The receiver types: each has a module, and a new one needs only a module and a line in the settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.watcher.alerting.fakes import ManualClock, ScriptedReply, fake_receiver, finding, receiver, wait_until
from wattwatch.watcher.alerting import receivers
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.alerting.receivers.base import Receiver, find_receiver
from wattwatch.watcher.common.state_store import StateStore
from wattwatch.watcher.config.settings import RECEIVER_TYPES, ReceiverSection

NEW_RECEIVER = """
from wattwatch.watcher.alerting.receivers.base import Delivered, DeliveryFailure, RateLimit, Receiver, RetryLater


class PagerReceiver(Receiver):
    rate_limit = RateLimit(messages_per_second=0.5, burst=1.0)

    def render(self, message, receiver_name):
        return b'{"page": "' + message.title.encode() + b'"}'

    def classify_response(self, status, headers, body, wall_seconds):
        return Delivered() if body == "paged" else RetryLater(DeliveryFailure.UNEXPECTED_RESPONSE, body, 3.0)


RECEIVER = PagerReceiver()
"""


@pytest.mark.parametrize("type_name", RECEIVER_TYPES)
def test_each_registered_type_has_a_module(type_name: str) -> None:
    assert isinstance(find_receiver(type_name), Receiver)


def test_an_unregistered_type_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=f"expected {' or '.join(map(repr, RECEIVER_TYPES))}, got 'pager'"):
        ReceiverSection(name="ops", type="pager", url_file=tmp_path / "url")


def test_a_new_receiver_is_one_module_and_one_line_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pager.py").write_text(NEW_RECEIVER, "utf-8")
    monkeypatch.setattr(receivers, "__path__", [*receivers.__path__, str(tmp_path)])
    monkeypatch.setitem(RECEIVER_TYPES, "pager", "a pager")
    clock = ManualClock()
    with fake_receiver(clock) as server:
        server.replies = [ScriptedReply(200, "busy"), ScriptedReply(200, "paged")]
        store = StateStore(tmp_path / "state.db")
        manager = AlertManager(store, [receiver(tmp_path, server.port, "ops", "pager")], (), clock)
        manager.start()
        manager.observe([finding(since=clock.monotonic())], frozenset({"llama"}), clock.monotonic(), clock.wall())
        server.wait_for(1)
        wait_until(lambda: manager.stats().failed == {("ops", "unexpected_answer"): 1})
        clock.advance(3.0)
        (first, second) = server.wait_for(2)
        wait_until(lambda: manager.stats().sent == {"ops": 1})
        manager.stop()
        store.close()
    assert json.loads(first.body) == {"page": "CRITICAL JobHung llama"}
    assert first.key == second.key
