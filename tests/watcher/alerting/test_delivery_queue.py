"""Deliveries against real HTTP servers on loopback that answer, throttle, fail, break off, hang and vanish."""

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


class Sending:
    """An outbox at work on deliveries that were recorded first, as the teller does it."""

    def __init__(self, store: StateStore, clock: ManualClock, *receivers: ReceiverSection) -> None:
        self.store, self.clock = store, clock
        self.outbox = DeliveryQueue(store, receivers, clock)

    def send(self, *deliveries: Delivery) -> None:
        self.store.record([], deliveries)
        self.outbox.enqueue(deliveries)

    def __enter__(self) -> Sending:
        self.outbox.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.outbox.stop(timeout_seconds=0.0)

    def pass_time_until(self, hook: FakeReceiver, count: int, step_seconds: float = 0.5) -> None:
        for _ in range(2000):
            if hook.arrives_soon(count):
                return
            self.clock.advance(step_seconds)
        raise AssertionError(f"{len(hook.posts)} of {count} posts came")


def test_a_message_is_posted_with_its_key_and_leaves_the_disk(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    with Sending(store, clock, receiver(tmp_path, hook.port)) as sending:
        sending.send(delivery("e1-1"))
        (post,) = hook.wait_for(1)
        assert (post.path, post.key, post.content["text"]) == ("/webhook/SECRET", "e1-1", "e1-1")
        wait_until(lambda: store.waiting_deliveries() == [])
        assert sending.outbox.stats().sent == {"webhook": 1}


def test_a_throttled_message_is_sent_when_the_receiver_said(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [
        ScriptedReply(429, "slow down", {"Retry-After": "7"}),
        ScriptedReply(503, "", {"Retry-After": "30"}),
    ]
    with Sending(store, clock, receiver(tmp_path, hook.port)) as sending:
        sending.send(delivery("e1-1"))
        sending.pass_time_until(hook, 3)
        first, second, third = hook.posts
        assert second.clock_seconds - first.clock_seconds >= 7.0
        assert third.clock_seconds - second.clock_seconds >= 30.0
        assert hook.keys() == ["e1-1"] * 3
        wait_until(lambda: sending.outbox.stats().sent == {"webhook": 1})
        failed = sending.outbox.stats().failed
        assert failed == {("webhook", "rate_limited"): 1, ("webhook", "server_error"): 1}


def test_failures_are_repeated_until_it_works_and_firing_stays_before_resolved(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(500)] * 4 + [ScriptedReply(cut=True)] * 4
    with Sending(store, clock, receiver(tmp_path, hook.port)) as sending:
        sending.send(delivery("e1-1"), delivery("e1-2"))
        sending.pass_time_until(hook, 10, step_seconds=30)
    assert hook.keys() == ["e1-1"] * 9 + ["e1-2"]


def test_a_message_that_a_receiver_chokes_on_lets_other_episodes_pass_but_not_its_own(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(500)] * ATTEMPTS_BEFORE_OTHERS_PASS
    with Sending(store, clock, receiver(tmp_path, hook.port)) as sending:
        sending.send(delivery("a-1", episode="a"), delivery("a-2", episode="a"), delivery("b-1", episode="b"))
        sending.pass_time_until(hook, ATTEMPTS_BEFORE_OTHERS_PASS + 3, step_seconds=30)
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
def test_what_cannot_work_later_is_counted_and_does_not_hold_up_the_next(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path, reply: ScriptedReply, failure: str
) -> None:
    hook.replies = [reply]
    with Sending(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as sending:
        sending.send(delivery("e1-1", "slack"), delivery("e2-1", "slack", "e2"))
        hook.wait_for(2)
        wait_until(lambda: sending.outbox.stats().sent == {"slack": 1})
        assert sending.outbox.stats().failed == {("slack", failure): 1}
    assert hook.keys() == ["e1-1", "e2-1"]
    assert store.waiting_deliveries() == []


def test_slack_that_refuses_the_layout_gets_the_words(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(400, "invalid_blocks")]
    with Sending(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as sending:
        sending.send(delivery("e1-1", "slack"))
        first, second = hook.wait_for(2)
        wait_until(lambda: sending.outbox.stats().sent == {"slack": 1})
    assert "blocks" in first.content
    assert second.content == {"text": "e1-1"}
    assert first.key == second.key


def test_slack_that_refuses_the_words_as_well_is_not_asked_for_ever(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(400, "invalid_blocks"), ScriptedReply(400, "invalid_payload")]
    with Sending(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as sending:
        sending.send(delivery("e1-1", "slack"))
        wait_until(lambda: sending.outbox.stats().failed == {("slack", "refused"): 1})
    assert len(hook.posts) == 2


def test_a_200_that_is_not_slacks_is_no_delivery(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(200, "<html>please log in</html>")]
    with Sending(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as sending:
        sending.send(delivery("e1-1", "slack"))
        sending.pass_time_until(hook, 2)
        assert sending.outbox.stats().failed == {("slack", "unexpected_answer"): 1}


def test_slack_gets_a_short_burst_and_then_one_a_second_and_nothing_is_dropped(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    keys = [f"e{number}-1" for number in range(12)]
    with Sending(store, clock, receiver(tmp_path, hook.port, "slack", "slack")) as sending:
        sending.send(*(delivery(key, "slack", key) for key in keys))
        hook.wait_for(4)
        sending.pass_time_until(hook, 12, step_seconds=0.25)
    assert hook.keys() == keys
    seconds = [post.clock_seconds for post in hook.posts]
    assert all(later - earlier >= 8 - 4 for earlier, later in zip(seconds, seconds[8:], strict=False))


def test_a_receiver_that_hangs_delays_nobody_else(store: StateStore, clock: ManualClock, tmp_path: Path) -> None:
    answer = threading.Event()
    with fake_receiver() as slow, fake_receiver() as quick:
        slow.replies = [ScriptedReply(before=lambda: assert_set(answer))]
        both = (receiver(tmp_path, slow.port, "slow"), receiver(tmp_path, quick.port, "quick"))
        with Sending(store, clock, *both) as sending:
            sending.send(delivery("e1-1", "slow"), delivery("e1-1", "quick"))
            slow.wait_for(1)
            quick.wait_for(1)
            wait_until(lambda: sending.outbox.stats().sent["quick"] == 1)
            assert sending.outbox.stats().sent["slow"] == 0
            assert sending.outbox.stats().waiting == 1
            answer.set()
            wait_until(lambda: sending.outbox.stats().sent["slow"] == 1)


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_receiver_that_is_down_gets_it_when_it_is_back(store: StateStore, clock: ManualClock, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    place = receiver(tmp_path, port)
    with Sending(store, clock, place) as sending:
        sending.send(delivery("e1-1"))
        wait_until(lambda: sending.outbox.stats().failed == {("webhook", "unreachable"): 1})
        assert sending.outbox.stats().waiting == 1
        clock.advance(10)
        assert sending.outbox.stats().oldest_waiting_seconds >= 10
        with fake_receiver() as hook:
            place.url_file.write_text(f"http://127.0.0.1:{hook.port}/moved\n")
            sending.pass_time_until(hook, 1, step_seconds=30)
            assert hook.posts[0].path == "/moved"
            wait_until(lambda: sending.outbox.stats().waiting == 0)


def test_what_is_three_days_old_is_given_up_aloud(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.record([], [delivery("old-1")])
    clock.advance(MAX_MESSAGE_AGE_SECONDS + 1)
    with Sending(store, clock, receiver(tmp_path, hook.port)) as sending:
        wait_until(lambda: sending.outbox.stats().failed == {("webhook", "too_old"): 1})
    assert hook.posts == []
    assert "message old-1 is lost" in caplog.text
    assert store.waiting_deliveries() == []


def test_a_corrected_wall_clock_makes_no_message_old(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.replies = [ScriptedReply(500)]
    with Sending(store, clock, receiver(tmp_path, hook.port)) as sending:
        sending.send(delivery("e1-1"))
        hook.wait_for(1)
        clock.wall_seconds += 10 * MAX_MESSAGE_AGE_SECONDS
        sending.pass_time_until(hook, 2)
        wait_until(lambda: sending.outbox.stats().sent == {"webhook": 1})


def test_messages_for_a_receiver_that_was_removed_are_counted_as_lost(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    store.record([], [delivery("e1-1", "removed")])
    outbox = DeliveryQueue(store, [receiver(tmp_path, hook.port)], clock)
    assert outbox.stats().failed == {("removed", "not_configured"): 1}
    assert store.waiting_deliveries() == []
    outbox.stop()


def test_stopping_sends_what_can_go_and_keeps_the_rest(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    outbox = DeliveryQueue(store, [receiver(tmp_path, hook.port, "slack", "slack")], clock)
    deliveries = [delivery(f"e{number}-1", "slack", f"e{number}") for number in range(6)]
    store.record([], deliveries)
    outbox.enqueue(deliveries)
    outbox.start()
    outbox.stop(timeout_seconds=5.0)
    wait_until(lambda: [waiting.key for waiting in store.waiting_deliveries()] == ["e4-1", "e5-1"])
    assert hook.keys() == ["e0-1", "e1-1", "e2-1", "e3-1"]


@pytest.mark.parametrize("content", ["", "not a url", "ftp://127.0.0.1/SECRET", "http://[SECRET", None])
def test_a_url_that_cannot_be_used_is_named_by_its_file_and_never_shown(
    store: StateStore, clock: ManualClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    place = receiver(tmp_path, 1)
    if content is None:
        place.url_file.unlink()
    else:
        place.url_file.write_text(content)
    with Sending(store, clock, place) as sending:
        sending.send(delivery("e1-1"))
        wait_until(lambda: sending.outbox.stats().failed == {("webhook", "no_url"): 1})
    problem = check_receiver_reachable(place)
    assert problem is not None
    assert problem.startswith("receiver webhook: url_file")
    assert str(place.url_file) in caplog.text
    assert "SECRET" not in caplog.text + problem


def test_the_secret_in_the_url_is_in_no_log_and_not_on_the_disk(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger().setLevel(logging.DEBUG)
    caplog.set_level(logging.DEBUG)
    hook.replies = [ScriptedReply(500, "SECRET"), ScriptedReply(cut=True), ScriptedReply(404, "SECRET")]
    place = receiver(tmp_path, hook.port)
    with Sending(store, clock, place) as sending:
        sending.send(delivery("e1-1"))
        sending.pass_time_until(hook, 3, step_seconds=30)
        wait_until(lambda: sending.outbox.stats().failed.get(("webhook", "gone")) == 1)
        assert "SECRET" not in caplog.text + repr(place) + repr(sending.outbox.stats())
    for path in (tmp_path / "state").iterdir():
        assert b"SECRET" not in path.read_bytes()


def test_a_certificate_that_nobody_vouches_for_is_not_accepted(
    store: StateStore, clock: ManualClock, hook: FakeReceiver, tmp_path: Path
) -> None:
    hook.use_tls(*self_signed(tmp_path))
    place = receiver(tmp_path, hook.port)
    place.url_file.write_text(f"https://127.0.0.1:{hook.port}/SECRET")
    with Sending(store, clock, place) as sending:
        sending.send(delivery("e1-1"))
        wait_until(lambda: sending.outbox.stats().failed == {("webhook", "tls"): 1})
    problem = check_receiver_reachable(place)
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


def test_reach_says_where_nobody_listens_and_where_there_is_no_tls(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    assert (
        check_receiver_reachable(receiver(tmp_path, port)) == f"receiver webhook: 127.0.0.1:{port}: Connection refused"
    )
    with fake_receiver() as hook:
        place = receiver(tmp_path, hook.port)
        assert check_receiver_reachable(place) is None
        place.url_file.write_text(f"https://127.0.0.1:{hook.port}/SECRET")
        problem = check_receiver_reachable(place)
        assert problem is not None
        assert "TLS" in problem
        assert hook.posts == []
    place.url_file.write_text("https://no-such-host.invalid/SECRET")
    assert check_receiver_reachable(place) == "receiver webhook: no-such-host.invalid:443: the name cannot be resolved"
