"""One attempt to deliver one message over HTTP, and a look whether a receiver can be reached at all.

The URL is the secret. It is read from its file at each attempt (so it can be changed under a running watcher) and
appears in no log, error or database: errors here are our own words, never a library's.
"""

from __future__ import annotations

import logging
import random
import re
import socket
import ssl
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.alerting.receivers.base import (
    Delivered,
    DeliveryFailure,
    DeliveryOutcome,
    GiveUp,
    RetryLater,
    classify_status,
)
from wattwatch.watcher.alerting.receivers.slack import classify_slack_response, is_layout_error, plain_text_payload
from wattwatch.watcher.common.state_store import Delivery, StateStore, StateStoreError
from wattwatch.watcher.config.settings import ReceiverSection, read_secret
from wattwatch.watcher.engine.snapshot import DeliveryStats

# httpx logs every request with its URL at INFO, httpcore at DEBUG: a Slack URL in a log is a leaked credential.
for name in ("httpx", "httpcore"):
    logging.getLogger(name).setLevel(logging.WARNING)

TIMEOUT: Final = httpx.Timeout(connect=5.0, read=10.0, write=5.0, pool=5.0)
REACHABILITY_TIMEOUT_SECONDS: Final = 5.0
MAX_RESPONSE_BYTES: Final = 4096
KEEPALIVE_SECONDS: Final = 30.0
HOST_PATTERN: Final = re.compile(rb"[A-Za-z0-9._:-]+")  # a name (IDNA-encoded) or an address; httpx takes "[" for one


class ReceiverUrlError(Exception):
    """The receiver's URL cannot be had. Says which file, never what is in it."""


def open_client() -> httpx.Client:
    """A lane's client: TLS verified, redirects not followed, HTTPS_PROXY and SSL_CERT_FILE honoured."""
    return httpx.Client(
        timeout=TIMEOUT,
        follow_redirects=False,
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_SECONDS),
        headers={"User-Agent": "wattwatch", "Content-Type": "application/json"},
    )


def post_message(client: httpx.Client, receiver: ReceiverSection, delivery: Delivery, clock: Clock) -> DeliveryOutcome:
    """Never raises. Slack gets one more attempt in plain text where it refuses the layout."""
    try:
        url = read_receiver_url(receiver)
    except ReceiverUrlError as problem:
        return RetryLater(DeliveryFailure.NO_URL, str(problem))
    try:
        status, headers, body = post_payload(client, url, delivery.key, delivery.payload)
        if receiver.type == "slack" and is_layout_error(status, body):
            status, headers, body = post_payload(client, url, delivery.key, plain_text_payload(delivery.payload))
    except httpx.TimeoutException:
        return RetryLater(DeliveryFailure.TIMEOUT, "no answer in time")
    except httpx.ConnectError as error:
        if is_tls_error(error):
            return RetryLater(
                DeliveryFailure.TLS, "the TLS handshake failed: certificate not trusted, expired or of another host"
            )
        return RetryLater(DeliveryFailure.UNREACHABLE, "no connection")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        return RetryLater(DeliveryFailure.CUT, f"the exchange broke off ({type(error).__name__})")
    if receiver.type == "slack":
        return classify_slack_response(status, headers, body, clock.wall())
    return classify_status(status, headers, clock.wall())


def post_payload(client: httpx.Client, url: httpx.URL, key: str, payload: bytes) -> tuple[int, httpx.Headers, str]:
    """Post and read the beginning of the answer; a receiver cannot make us read for ever."""
    with client.stream("POST", url, content=payload, headers={"Idempotency-Key": key}) as response:
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) >= MAX_RESPONSE_BYTES:
                break
        return response.status_code, response.headers, body[:MAX_RESPONSE_BYTES].decode("utf-8", "replace")


def read_receiver_url(receiver: ReceiverSection) -> httpx.URL:
    try:
        text = read_secret(receiver.url_file)
    except OSError as error:
        raise ReceiverUrlError(f"url_file {receiver.url_file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ReceiverUrlError(f"url_file {receiver.url_file} is not text") from None
    except ValueError as error:
        raise ReceiverUrlError(f"url_file {error}") from None
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        url = None
    if url is None or url.scheme not in ("http", "https") or not HOST_PATTERN.fullmatch(url.raw_host):
        raise ReceiverUrlError(f"url_file {receiver.url_file} does not hold an http or https URL on its first line")
    return url


def is_tls_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_receiver_reachable(receiver: ReceiverSection) -> str | None:
    """None if a connection to the receiver's host, with TLS where its URL says so, comes about; else one sentence.

    Nothing is sent: whether the secret in the URL is good shows with the first message only. Behind a proxy, the
    proxy is what is tried.
    """
    try:
        url = read_receiver_url(receiver)
    except ReceiverUrlError as problem:
        return f"receiver {receiver.name}: {problem}"
    host, port = url.host, url.port or (443 if url.scheme == "https" else 80)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        address = httpx.URL(proxy if "://" in proxy else f"http://{proxy}")
        host, port = address.host, address.port or 80
    place = f"receiver {receiver.name}: {host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=REACHABILITY_TIMEOUT_SECONDS) as connection:
            if url.scheme == "https" and host == url.host:
                httpx.create_ssl_context().wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"{place}: its certificate is not accepted: {error.verify_message}"
    except ssl.SSLError as error:
        return f"{place}: no TLS: {error.reason or 'the handshake failed'}"
    except TimeoutError:
        return f"{place}: no answer within {REACHABILITY_TIMEOUT_SECONDS:g} s"
    except socket.gaierror:
        return f"{place}: the name cannot be resolved"
    except (OSError, UnicodeError) as error:
        return f"{place}: {getattr(error, 'strerror', None) or 'no connection'}"
    return None


# Messages on their way. What `enqueue` takes is already on disk and leaves it only when a receiver has taken it.
#
# Each receiver has its own lane: a queue and a thread, so that a hanging one delays nobody else. A lane holds the
# message it works on until the answer; killed at any point before the answer is recorded, the next process sends the
# same bytes with the same Idempotency-Key again. At least once, in the order of each episode, never dropped for number.

log = logging.getLogger("wattwatch.tell")

BACKOFF_BASE_SECONDS: Final = 1.0
BACKOFF_MAX_SECONDS: Final = 60.0
# A message that failed this often lets those of other episodes pass: one that a receiver chokes on blocks nobody.
ATTEMPTS_BEFORE_OTHERS_PASS: Final = 5
# After this long nobody can act on it. It is counted and logged, never silently gone.
MAX_MESSAGE_AGE_SECONDS: Final = 3 * 86400.0
# Slack allows one message a second and short bursts; more, and it may switch the webhook off.
SLACK_PER_SECOND: Final = 1.0
SLACK_BURST: Final = 4.0


class TokenBucket:
    """A token bucket: `wait` says how long until one more may go."""

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._seconds = now

    def wait(self, now: float) -> float:
        self._tokens = min(self._burst, self._tokens + (now - self._seconds) * self._per_second)
        self._seconds = now
        return max(0.0, (1.0 - self._tokens) / self._per_second)

    def take(self) -> None:
        self._tokens -= 1.0


@dataclass(slots=True)
class QueuedMessage:
    """`since_seconds`: when it was enqueued, on the monotonic clock: a corrected wall clock ages no message."""

    delivery: Delivery
    since_seconds: float
    attempts: int = 0


class ReceiverQueue:
    """One receiver's messages, oldest first, and the thread that delivers them."""

    def __init__(self, receiver: ReceiverSection, store: StateStore, clock: Clock) -> None:
        self.receiver = receiver
        self._store = store
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, QueuedMessage] = {}  # by key, in order
        self._failures_in_a_row = 0
        self._paused_until = float("-inf")
        self._pace = TokenBucket(SLACK_PER_SECOND, SLACK_BURST, clock.monotonic()) if receiver.type == "slack" else None
        self._stop_at: float | None = None
        self.sent = 0
        self.failed: Counter[DeliveryFailure] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"tell {receiver.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        now, wall = self._clock.monotonic(), self._clock.wall()
        with self._changed:
            for delivery in deliveries:
                age = max(0.0, wall - delivery.enqueued_wall_seconds)
                self._waiting[delivery.key] = QueuedMessage(delivery, since_seconds=now - age)
            self._changed.notify()

    def waiting(self) -> tuple[QueuedMessage, ...]:
        with self._changed:
            return tuple(self._waiting.values())

    def stop(self, deadline: float) -> None:
        """Deliver what is due until the deadline (of the clock), then end."""
        with self._changed:
            self._stop_at = deadline
            self._changed.notify()

    def join(self, real_seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(real_seconds)

    def _run(self) -> None:
        """1. Wait for a message that may go. 2. Post it without holding the lock. 3. Record what came of it."""
        with open_client() as client:
            while (waiting := self._next()) is not None:
                answer = self._attempt(client, waiting.delivery)
                with self._changed:
                    if isinstance(answer, RetryLater):
                        self._postpone(waiting, answer)
                    else:
                        self._failures_in_a_row = 0
                        self._settle(waiting.delivery, answer)

    def _attempt(self, client: httpx.Client, delivery: Delivery) -> DeliveryOutcome:
        try:
            return post_message(client, self.receiver, delivery, self._clock)
        except Exception as error:  # noqa: BLE001 - a lane that dies of a surprise would deliver nothing for ever
            return RetryLater(DeliveryFailure.CUT, f"unexpected {type(error).__name__}")

    def _next(self) -> QueuedMessage | None:
        """The next message to attempt, as soon as it may go; None when the lane ends."""
        with self._changed:
            while True:
                now = self._clock.monotonic()
                wait = self._wait(now)
                if self._stop_at is not None and (now >= self._stop_at or wait is None or wait > 0):
                    return None
                if wait is None or wait > 0:
                    self._changed.wait(None if wait is None else self._clock.real_seconds(wait))
                    continue
                waiting = self._first()
                if now - waiting.since_seconds > MAX_MESSAGE_AGE_SECONDS:
                    self._settle(
                        waiting.delivery, GiveUp(DeliveryFailure.TOO_OLD, "three days were not enough to deliver it")
                    )
                    continue
                if self._pace is not None:
                    self._pace.take()
                return waiting

    def _wait(self, now: float) -> float | None:
        """Seconds until a message may go; None while there is none."""
        if not self._waiting:
            return None
        pace = 0.0 if self._pace is None else self._pace.wait(now)
        return max(pace, self._paused_until - now)

    def _first(self) -> QueuedMessage:
        """The oldest, unless it has failed often. Within an episode the order is never changed: firing, then over."""
        heads: dict[str, QueuedMessage] = {}
        for waiting in self._waiting.values():
            if waiting.delivery.episode_id not in heads:
                heads[waiting.delivery.episode_id] = waiting
                if waiting.attempts < ATTEMPTS_BEFORE_OTHERS_PASS:
                    return waiting
        return min(heads.values(), key=lambda waiting: waiting.attempts)

    def _postpone(self, waiting: QueuedMessage, answer: RetryLater) -> None:
        """Pause the receiver, not the message: what fails for one fails for the next. Full jitter, or as it asked."""
        self._failures_in_a_row += 1
        waiting.attempts += 1
        self.failed[answer.failure] += 1
        most = min(BACKOFF_MAX_SECONDS, BACKOFF_BASE_SECONDS * 2.0 ** min(self._failures_in_a_row - 1, 16))
        wait = random.uniform(0.0, most) if answer.after_seconds is None else answer.after_seconds
        self._paused_until = self._clock.monotonic() + wait
        log.warning(
            "receiver %s: %s (%s); attempt %d, next in %.1f s",
            self.receiver.name,
            answer.detail,
            answer.failure.value,
            waiting.attempts,
            wait,
        )

    def _settle(self, delivery: Delivery, answer: Delivered | GiveUp) -> None:
        """Off the queue, then off the disk. If the disk fails, a restart sends it once more under the same key."""
        self._waiting.pop(delivery.key, None)
        outcome = "delivered"
        if isinstance(answer, GiveUp):
            self.failed[answer.failure] += 1
            outcome = f"{answer.failure.value}: {answer.detail}"
            log.error("receiver %s: message %s is lost: %s", self.receiver.name, delivery.key, outcome)
        else:
            self.sent += 1
        try:
            self._store.record_outcome(delivery, outcome, self._clock.wall())
        except StateStoreError as error:
            log.error("receiver %s: message %s: %s", self.receiver.name, delivery.key, error)


class DeliveryQueue:
    """The lanes together. Starts with what an earlier process left undelivered."""

    def __init__(self, store: StateStore, receivers: Sequence[ReceiverSection], clock: Clock) -> None:
        self._clock = clock
        self._lanes = {receiver.name: ReceiverQueue(receiver, store, clock) for receiver in receivers}
        self._lost: Counter[tuple[str, str]] = Counter()
        for delivery in store.waiting_deliveries():
            if delivery.receiver in self._lanes:
                self._lanes[delivery.receiver].add([delivery])
                continue
            self._lost[delivery.receiver, DeliveryFailure.NOT_CONFIGURED.value] += 1
            log.error("receiver %s is no longer configured: message %s is lost", delivery.receiver, delivery.key)
            store.record_outcome(delivery, DeliveryFailure.NOT_CONFIGURED.value, clock.wall())

    def start(self) -> None:
        for lane in self._lanes.values():
            lane.start()

    def enqueue(self, deliveries: Sequence[Delivery]) -> None:
        """Hand over; each lane begins at once."""
        for name, lane in self._lanes.items():
            mine = [delivery for delivery in deliveries if delivery.receiver == name]
            if mine:
                lane.add(mine)

    def waiting(self) -> tuple[Delivery, ...]:
        return tuple(waiting.delivery for lane in self._lanes.values() for waiting in lane.waiting())

    def stats(self) -> DeliveryStats:
        now = self._clock.monotonic()
        ages = [max(0.0, now - waiting.since_seconds) for lane in self._lanes.values() for waiting in lane.waiting()]
        failed = dict(self._lost)
        for name, lane in self._lanes.items():
            for failure, count in dict(lane.failed).items():
                failed[name, failure.value] = failed.get((name, failure.value), 0) + count
        return DeliveryStats(
            sent={name: lane.sent for name, lane in self._lanes.items()},
            failed=failed,
            waiting=len(ages),
            oldest_waiting_seconds=max(ages, default=0.0),
        )

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """What is due and can be delivered in time is; the rest stays on disk for the next start."""
        deadline = self._clock.monotonic() + timeout_seconds
        for lane in self._lanes.values():
            lane.stop(deadline)
        for lane in self._lanes.values():
            lane.join(self._clock.real_seconds(max(0.0, deadline - self._clock.monotonic())) + 0.1)
