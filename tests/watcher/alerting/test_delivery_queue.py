"""Deliveries to real HTTP servers on loopback that respond, throttle, fail, disconnect, hang and disappear."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.tools import DEADLINE_SECONDS
from tests.watcher.alerting.fakes import (
    WALL,
    FakeReceiver,
    ManualClock,
    ScriptedReply,
    fake_receiver,
    receiver,
    wait_until,
)
from wattwatch.watcher.alerting.delivery_queue import (
    ATTEMPTS_BEFORE_OTHERS_PASS,
    MAX_MESSAGE_AGE_SECONDS,
    DeliveryQueue,
    check_receiver_reachable,
)
from wattwatch.watcher.common.state_store import Delivery, StateStore
from wattwatch.watcher.config.settings import ReceiverSection


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hook(clock: ManualClock) -> Iterator[FakeReceiver]:
    with fake_receiver(clock) as hook:
        yield hook


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    store = StateStore(tmp_path / "state" / "state.db")
    yield store
    store.close()


def delivery(key: str, receiver: str = "webhook", episode: str = "e1") -> Delivery:
    payload = json.dumps({"text": key, "blocks": [{"type": "divider"}]}).encode()
    return Delivery(receiver, key, episode, payload, WALL)


class RunningQueue:
    """A running queue; deliveries are saved first, as the alert manager does."""

    def __init__(self, store: StateStore, clock: ManualClock, *receivers: ReceiverSection) -> None:
        self.store, self.clock = store, clock
        self.queue = DeliveryQueue(store, receivers, clock)

    def send(self, *deliveries: Delivery) -> None:
        self.store.record([], deliveries)
        self.queue.enqueue(deliveries)

    def __enter__(self) -> RunningQueue:
        self.queue.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.stop(timeout_seconds=0.0)

    def pass_time_until(self, hook: FakeReceiver, count: int, step_seconds: float = 0.5) -> None:
        for _ in range(int(DEADLINE_SECONDS / 0.03)):
            if hook.arrives_soon(count):
                return
            self.clock.advance(step_seconds)
        raise AssertionError(f"only {len(hook.posts)} of {count} posts arrived")


def test_a_message_is_posted_with_its_key_and_leaves_the_disk(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    with RunningQueue(store, clock, receiver(tmp_path, hook.port)) as running:
        running.send(delivery("e1-1"))
        (post,) = hook.wait_for(1)
        assert (post.path, post.key, post.content["text"]) == ("/webhook/SECRET", "e1-1", "e1-1")
        wait_until(lambda: store.waiting_deliveries() == [])
        assert running.queue.stats().sent == {"webhook": 1}


def test_a_throttled_message_is_sent_after_the_delay_that_the_receiver_asked_for(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [
        ScriptedReply(429, "slow down", {"Retry-After": "7"}),
        ScriptedReply(503, "", {"Retry-After": "30"}),
    ]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port)) as running:
        running.send(delivery("e1-1"))
        running.pass_time_until(hook, 3)
        first, second, third = hook.posts
        assert second.clock_seconds - first.clock_seconds >= 7.0
        assert third.clock_seconds - second.clock_seconds >= 30.0
        assert hook.keys() == ["e1-1"] * 3
        wait_until(lambda: running.queue.stats().sent == {"webhook": 1})
        failed = running.queue.stats().failed
        assert failed == {("webhook", "rate_limited"): 1, ("webhook", "server_error"): 1}


def test_failures_are_retried_until_delivered_and_firing_stays_before_resolved(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(500)] * 4 + [ScriptedReply(cut=True)] * 4
    with RunningQueue(store, clock, receiver(tmp_path, hook.port)) as running:
        running.send(delivery("e1-1"), delivery("e1-2"))
        running.pass_time_until(hook, 10, step_seconds=30)
    assert hook.keys() == ["e1-1"] * 9 + ["e1-2"]


def test_a_message_that_always_fails_is_overtaken_by_other_episodes_but_not_by_its_own(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(500)] * ATTEMPTS_BEFORE_OTHERS_PASS
    with RunningQueue(store, clock, receiver(tmp_path, hook.port)) as running:
        running.send(delivery("a-1", episode="a"), delivery("a-2", episode="a"), delivery("b-1", episode="b"))
        running.pass_time_until(hook, ATTEMPTS_BEFORE_OTHERS_PASS + 3, step_seconds=30)
    assert hook.keys() == ["a-1"] * ATTEMPTS_BEFORE_OTHERS_PASS + ["b-1", "a-1", "a-2"]


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (ScriptedReply(404, "no_service"), "gone"),
        (ScriptedReply(403, "invalid_token"), "unauthorised"),
        (ScriptedReply(400, "invalid_token"), "unauthorised"),
        (ScriptedReply(302, "", {"Location": "http://127.0.0.1:1/elsewhere"}), "redirected"),
    ],
)
def test_a_permanent_failure_is_counted_and_does_not_block_the_next_message(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path, reply: ScriptedReply, failure: str
) -> None:
    hook.replies = [reply]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as running:
        running.send(delivery("e1-1", "slack"), delivery("e2-1", "slack", "e2"))
        hook.wait_for(2)
        wait_until(lambda: running.queue.stats().sent == {"slack": 1})
        assert running.queue.stats().failed == {("slack", failure): 1}
    assert hook.keys() == ["e1-1", "e2-1"]
    assert store.waiting_deliveries() == []


def test_if_slack_rejects_the_layout_it_gets_plain_text(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(400, "invalid_blocks")]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as running:
        running.send(delivery("e1-1", "slack"))
        first, second = hook.wait_for(2)
        wait_until(lambda: running.queue.stats().sent == {"slack": 1})
    assert "blocks" in first.content
    assert second.content == {"text": "e1-1"}
    assert first.key == second.key


def test_if_slack_rejects_the_plain_text_as_well_the_message_is_given_up(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(400, "invalid_blocks"), ScriptedReply(400, "invalid_payload")]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as running:
        running.send(delivery("e1-1", "slack"))
        wait_until(lambda: running.queue.stats().failed == {("slack", "refused"): 1})
    assert len(hook.posts) == 2


def test_a_200_without_slacks_ok_is_no_delivery(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(200, "<html>please log in</html>")]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as running:
        running.send(delivery("e1-1", "slack"))
        running.pass_time_until(hook, 2)
        assert running.queue.stats().failed == {("slack", "unexpected_answer"): 1}


def test_slack_gets_a_short_burst_then_one_message_a_second_and_nothing_is_dropped(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    keys = [f"e{number}-1" for number in range(12)]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as running:
        running.send(*(delivery(key, "slack", key) for key in keys))
        hook.wait_for(4)
        running.pass_time_until(hook, 12, step_seconds=0.25)
    assert hook.keys() == keys
    seconds = [post.clock_seconds for post in hook.posts]
    assert all(later - earlier >= 8 - 4 for earlier, later in zip(seconds, seconds[8:], strict=False))


def test_a_receiver_that_hangs_delays_no_other(store: StateStore, clock: ManualClock, tmp_path: Path) -> None:
    answer = threading.Event()
    with fake_receiver() as slow, fake_receiver() as quick:
        slow.replies = [ScriptedReply(before=lambda: assert_set(answer))]
        both = (receiver(tmp_path, slow.port, "slow"), receiver(tmp_path, quick.port, "quick"))
        with RunningQueue(store, clock, *both) as running:
            running.send(delivery("e1-1", "slow"), delivery("e1-1", "quick"))
            slow.wait_for(1)
            quick.wait_for(1)
            wait_until(lambda: running.queue.stats().sent["quick"] == 1)
            assert running.queue.stats().sent["slow"] == 0
            assert running.queue.stats().waiting == 1
            answer.set()
            wait_until(lambda: running.queue.stats().sent["slow"] == 1)


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_SECONDS)


def test_a_receiver_that_was_down_gets_its_messages_when_it_is_back(
    store: StateStore, clock: ManualClock, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    section = receiver(tmp_path, port)
    with RunningQueue(store, clock, section) as running:
        running.send(delivery("e1-1"))
        wait_until(lambda: running.queue.stats().failed == {("webhook", "unreachable"): 1})
        assert running.queue.stats().waiting == 1
        clock.advance(10)
        assert running.queue.stats().oldest_waiting_seconds >= 10
        with fake_receiver() as hook:
            section.url_file.write_text(f"http://127.0.0.1:{hook.port}/moved\n")
            running.pass_time_until(hook, 1, step_seconds=30)
            assert hook.posts[0].path == "/moved"
            wait_until(lambda: running.queue.stats().waiting == 0)


def test_a_message_three_days_old_is_given_up_counted_and_logged(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.record([], [delivery("old-1")])
    clock.advance(MAX_MESSAGE_AGE_SECONDS + 1)
    with RunningQueue(store, clock, receiver(tmp_path, hook.port)) as running:
        wait_until(lambda: running.queue.stats().failed == {("webhook", "too_old"): 1})
    assert hook.posts == []
    assert "message old-1 was not delivered and will not be retried" in caplog.text
    assert store.waiting_deliveries() == []


def test_a_corrected_wall_clock_ages_no_message(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(500)]
    with RunningQueue(store, clock, receiver(tmp_path, hook.port)) as running:
        running.send(delivery("e1-1"))
        hook.wait_for(1)
        clock.wall_seconds += 10 * MAX_MESSAGE_AGE_SECONDS
        running.pass_time_until(hook, 2)
        wait_until(lambda: running.queue.stats().sent == {"webhook": 1})


def test_messages_for_a_removed_receiver_are_counted_as_lost(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    store.record([], [delivery("e1-1", "removed")])
    queue = DeliveryQueue(store, [receiver(tmp_path, hook.port)], clock)
    assert queue.stats().failed == {("removed", "not_configured"): 1}
    assert store.waiting_deliveries() == []
    queue.stop()


def test_stopping_sends_what_is_due_and_keeps_the_rest(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    queue = DeliveryQueue(store, [receiver(tmp_path, hook.port, "slack", "slack")], clock)
    deliveries = [delivery(f"e{number}-1", "slack", f"e{number}") for number in range(6)]
    store.record([], deliveries)
    queue.enqueue(deliveries)
    queue.start()
    queue.stop(timeout_seconds=5.0)
    wait_until(lambda: [waiting.key for waiting in store.waiting_deliveries()] == ["e4-1", "e5-1"])
    assert hook.keys() == ["e0-1", "e1-1", "e2-1", "e3-1"]


@pytest.mark.parametrize("content", ["", "not a url", "ftp://127.0.0.1/SECRET", "http://[SECRET", None])
def test_an_unusable_url_is_named_by_its_file_and_never_shown(
    store: StateStore, clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    section = receiver(tmp_path, 1)
    if content is None:
        section.url_file.unlink()
    else:
        section.url_file.write_text(content)
    with RunningQueue(store, clock, section) as running:
        running.send(delivery("e1-1"))
        wait_until(lambda: running.queue.stats().failed == {("webhook", "no_url"): 1})
    problem = check_receiver_reachable(section)
    assert problem is not None
    assert problem.startswith("receiver webhook: url_file")
    assert str(section.url_file) in caplog.text
    assert "SECRET" not in caplog.text + problem


def test_the_secret_in_the_url_is_in_no_log_and_not_on_disk(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger().setLevel(logging.DEBUG)
    caplog.set_level(logging.DEBUG)
    hook.replies = [ScriptedReply(500, "SECRET"), ScriptedReply(cut=True), ScriptedReply(404, "SECRET")]
    section = receiver(tmp_path, hook.port)
    with RunningQueue(store, clock, section) as running:
        running.send(delivery("e1-1"))
        running.pass_time_until(hook, 3, step_seconds=30)
        wait_until(lambda: running.queue.stats().failed.get(("webhook", "gone")) == 1)
        assert "SECRET" not in caplog.text + repr(section) + repr(running.queue.stats())
    for path in (tmp_path / "state").iterdir():
        assert b"SECRET" not in path.read_bytes()


def test_a_self_signed_certificate_is_not_accepted(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.use_tls(*self_signed(tmp_path))
    section = receiver(tmp_path, hook.port)
    section.url_file.write_text(f"https://127.0.0.1:{hook.port}/SECRET")
    with RunningQueue(store, clock, section) as running:
        running.send(delivery("e1-1"))
        wait_until(lambda: running.queue.stats().failed == {("webhook", "tls"): 1})
    problem = check_receiver_reachable(section)
    assert problem is not None
    assert "certificate is not accepted" in problem
    assert hook.posts == []


def self_signed(directory: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = directory / "certificate.pem", directory / "key.pem"
    certificate_path.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate_path, key_path


def test_the_reachability_check_names_a_closed_port_missing_tls_and_an_unknown_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    assert (
        check_receiver_reachable(receiver(tmp_path, port)) == f"receiver webhook: 127.0.0.1:{port}: Connection refused"
    )
    with fake_receiver() as hook:
        section = receiver(tmp_path, hook.port)
        assert check_receiver_reachable(section) is None
        section.url_file.write_text(f"https://127.0.0.1:{hook.port}/SECRET")
        problem = check_receiver_reachable(section)
        assert problem is not None
        assert "TLS" in problem
        assert hook.posts == []
    section.url_file.write_text("https://no-such-host.invalid/SECRET")
    assert (
        check_receiver_reachable(section)
        == "receiver webhook: no-such-host.invalid:443: the host name cannot be resolved"
    )
