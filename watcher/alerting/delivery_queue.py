"""Messages on their way to receivers: at least once, in the order of each episode, never dropped for their number.

Everything that `enqueue` takes is already on disk, and leaves the disk only when a receiver has accepted it or no later
attempt can succeed. Each receiver has its own queue and thread, so that one that hangs delays no other. A message stays
in its queue until the outcome is recorded: if the process is killed at any point before that, the next process sends
the same bytes with the same Idempotency-Key again.

The URL is the secret. It is read from its file at each attempt, so that it can be rotated without a restart, and
appears in no log, error or database: the error texts here are our own, never those of a library.
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
    RateLimit,
    Receiver,
    RetryLater,
    find_receiver,
)
from wattwatch.watcher.common.state_store import Delivery, StateStore, StateStoreError
from wattwatch.watcher.config.settings import ReceiverSection, read_secret
from wattwatch.watcher.engine.snapshot import DeliveryStats

log = logging.getLogger("wattwatch.alerting")
# httpx logs every request with its URL at INFO, httpcore at DEBUG: a Slack URL in a log is a leaked credential.
for name in ("httpx", "httpcore"):
    logging.getLogger(name).setLevel(logging.WARNING)

TIMEOUT: Final = httpx.Timeout(connect=5.0, read=10.0, write=5.0, pool=5.0)
REACHABILITY_TIMEOUT_SECONDS: Final = 5.0
# Enough for any error text of a receiver; a receiver cannot make us read forever.
MAX_RESPONSE_BYTES: Final = 4096
KEEPALIVE_SECONDS: Final = 30.0
# A DNS name (IDNA-encoded) or an address. httpx itself accepts "[" as a host.
HOST_PATTERN: Final = re.compile(rb"[A-Za-z0-9._:-]+")

BACKOFF_BASE_SECONDS: Final = 1.0
BACKOFF_MAX_SECONDS: Final = 60.0
# After this many failed attempts, messages of other episodes overtake a message: one that a receiver cannot digest
# (a 500 for this payload only) must not block every later alert.
ATTEMPTS_BEFORE_OTHERS_PASS: Final = 5
# After three days nobody can act on an alert any more. It is counted and logged, not silently dropped.
MAX_MESSAGE_AGE_SECONDS: Final = 3 * 86400.0


class ReceiverUrlError(Exception):
    """The receiver's URL cannot be read. The text names the file, never its content."""


@dataclass(slots=True)
class QueuedMessage:
    """A message that waits for its receiver.

    `queued_seconds`: when it was enqueued, on the monotonic clock, so that a corrected wall clock ages no message.
    """

    delivery: Delivery
    queued_seconds: float
    attempts: int = 0


class TokenBucket:
    """Applies a rate limit. `wait_seconds` says how long until the next message may be sent."""

    def __init__(self, limit: RateLimit, now: float) -> None:
        self._limit = limit
        self._tokens = limit.burst
        self._updated_seconds = now

    def wait_seconds(self, now: float) -> float:
        earned = (now - self._updated_seconds) * self._limit.messages_per_second
        self._tokens = min(self._limit.burst, self._tokens + earned)
        self._updated_seconds = now
        return max(0.0, (1.0 - self._tokens) / self._limit.messages_per_second)

    def take(self) -> None:
        self._tokens -= 1.0


class ReceiverQueue:
    """One receiver's messages, oldest first, and the thread that delivers them."""

    def __init__(self, section: ReceiverSection, store: StateStore, clock: Clock) -> None:
        self._section = section
        self._receiver = find_receiver(section.type)
        self._store = store
        self._clock = clock
        self._changed = threading.Condition()
        self._messages: dict[str, QueuedMessage] = {}  # by key, oldest first
        self._consecutive_failures = 0
        self._paused_until = float("-inf")
        limit = self._receiver.rate_limit
        self._bucket = None if limit is None else TokenBucket(limit, clock.monotonic())
        self._stop_at: float | None = None
        self.sent = 0
        self.given_up = ""  # why the last message was given up; "" once one was accepted after that
        self.failed: Counter[DeliveryFailure] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"receiver {section.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        now, wall = self._clock.monotonic(), self._clock.wall()
        with self._changed:
            for delivery in deliveries:
                age = max(0.0, wall - delivery.enqueued_wall_seconds)
                self._messages[delivery.key] = QueuedMessage(delivery, queued_seconds=now - age)
            self._changed.notify()

    def pending(self) -> tuple[QueuedMessage, ...]:
        with self._changed:
            return tuple(self._messages.values())

    def stop(self, deadline: float) -> None:
        """Deliver what is due until the deadline (in seconds of the clock), then end."""
        with self._changed:
            self._stop_at = deadline
            self._changed.notify()

    def join(self, real_seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(real_seconds)

    def _run(self) -> None:
        """1. Wait for a message that may be sent. 2. Post it without holding the lock. 3. Record the outcome."""
        with open_client() as client:
            while (message := self._next_message()) is not None:
                outcome = self._attempt(client, message.delivery)
                with self._changed:
                    if isinstance(outcome, RetryLater):
                        self._postpone(message, outcome)
                    else:
                        self._consecutive_failures = 0
                        self._finish(message.delivery, outcome)

    def _attempt(self, client: httpx.Client, delivery: Delivery) -> DeliveryOutcome:
        try:
            return post_message(client, self._receiver, self._section, delivery, self._clock)
        except Exception as error:  # noqa: BLE001 - a thread that dies of an unexpected error would deliver nothing again
            return RetryLater(DeliveryFailure.CONNECTION_LOST, f"unexpected {type(error).__name__}")

    def _next_message(self) -> QueuedMessage | None:
        """The next message to attempt, as soon as it may be sent; None when the thread must end."""
        with self._changed:
            while True:
                now = self._clock.monotonic()
                wait = self._seconds_until_next(now)
                if self._stop_at is not None and (now >= self._stop_at or wait is None or wait > 0):
                    return None
                if wait is None or wait > 0:
                    self._changed.wait(None if wait is None else self._clock.real_seconds(wait))
                    continue
                message = self._choose()
                if now - message.queued_seconds > MAX_MESSAGE_AGE_SECONDS:
                    self._finish(message.delivery, GiveUp(DeliveryFailure.TOO_OLD, "not delivered within three days"))
                    continue
                if self._bucket is not None:
                    self._bucket.take()
                return message

    def _seconds_until_next(self, now: float) -> float | None:
        """Seconds until a message may be sent; None if the queue is empty."""
        if not self._messages:
            return None
        rate_limit_wait = 0.0 if self._bucket is None else self._bucket.wait_seconds(now)
        return max(rate_limit_wait, self._paused_until - now)

    def _choose(self) -> QueuedMessage:
        """The oldest message, unless it has failed often. The order within an episode never changes: a "resolved" that
        arrives before its "firing" would leave the alert open at the receiver."""
        first_of_episode: dict[str, QueuedMessage] = {}
        for message in self._messages.values():
            if message.delivery.episode_id not in first_of_episode:
                first_of_episode[message.delivery.episode_id] = message
                if message.attempts < ATTEMPTS_BEFORE_OTHERS_PASS:
                    return message
        return min(first_of_episode.values(), key=lambda message: message.attempts)

    def _postpone(self, message: QueuedMessage, outcome: RetryLater) -> None:
        """Pause the receiver, not only this message: whatever fails for one usually fails for the next.

        Exponential backoff with full jitter, or the delay that the receiver asked for.
        """
        self._consecutive_failures += 1
        message.attempts += 1
        self.failed[outcome.failure] += 1
        longest = min(BACKOFF_MAX_SECONDS, BACKOFF_BASE_SECONDS * 2.0 ** min(self._consecutive_failures - 1, 16))
        wait = random.uniform(0.0, longest) if outcome.after_seconds is None else outcome.after_seconds
        self._paused_until = self._clock.monotonic() + wait
        log.warning(
            "receiver %s: delivery attempt %d failed: %s (%s); retrying in %.1f s",
            self._section.name,
            message.attempts,
            outcome.detail,
            outcome.failure.value,
            wait,
        )

    def _finish(self, delivery: Delivery, outcome: Delivered | GiveUp) -> None:
        """Remove it from the queue, then from the disk. If the disk fails, a restart sends it again under the same
        key."""
        self._messages.pop(delivery.key, None)
        recorded = "delivered"
        if isinstance(outcome, GiveUp):
            self.failed[outcome.failure] += 1
            self.given_up = recorded = f"{outcome.failure.value}: {outcome.detail}"
            log.error(
                "receiver %s: message %s was not delivered and will not be retried: %s",
                self._section.name,
                delivery.key,
                recorded,
            )
        else:
            self.sent += 1
            self.given_up = ""
        try:
            self._store.record_outcome(delivery, recorded, self._clock.wall())
        except StateStoreError as error:
            log.error(
                "receiver %s: cannot save the delivery result of message %s, so a restart may send it again: %s",
                self._section.name,
                delivery.key,
                error,
            )


class DeliveryQueue:
    """The queues of all receivers. Starts with what an earlier process left undelivered."""

    def __init__(self, store: StateStore, sections: Sequence[ReceiverSection], clock: Clock) -> None:
        self._clock = clock
        self._queues = {section.name: ReceiverQueue(section, store, clock) for section in sections}
        self._lost: Counter[tuple[str, str]] = Counter()
        for delivery in store.waiting_deliveries():
            if delivery.receiver in self._queues:
                self._queues[delivery.receiver].add([delivery])
                continue
            self._lost[delivery.receiver, DeliveryFailure.NOT_CONFIGURED.value] += 1
            log.error("receiver %s is no longer configured: message %s was dropped", delivery.receiver, delivery.key)
            store.record_outcome(delivery, DeliveryFailure.NOT_CONFIGURED.value, clock.wall())

    def start(self) -> None:
        for queue in self._queues.values():
            queue.start()

    def enqueue(self, deliveries: Sequence[Delivery]) -> None:
        """Hand messages over; each receiver's thread starts on them at once."""
        for name, queue in self._queues.items():
            own = [delivery for delivery in deliveries if delivery.receiver == name]
            if own:
                queue.add(own)

    def pending(self) -> tuple[Delivery, ...]:
        return tuple(message.delivery for queue in self._queues.values() for message in queue.pending())

    def stats(self) -> DeliveryStats:
        now = self._clock.monotonic()
        ages = [max(0.0, now - each.queued_seconds) for queue in self._queues.values() for each in queue.pending()]
        failed = dict(self._lost)
        for name, queue in self._queues.items():
            for failure, count in dict(queue.failed).items():
                failed[name, failure.value] = failed.get((name, failure.value), 0) + count
        return DeliveryStats(
            sent={name: queue.sent for name, queue in self._queues.items()},
            failed=failed,
            waiting=len(ages),
            oldest_waiting_seconds=max(ages, default=0.0),
            given_up={name: queue.given_up for name, queue in self._queues.items() if queue.given_up},
        )

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Deliver what is due and fits into the time; the rest stays on disk for the next start."""
        deadline = self._clock.monotonic() + timeout_seconds
        for queue in self._queues.values():
            queue.stop(deadline)
        for queue in self._queues.values():
            queue.join(self._clock.real_seconds(max(0.0, deadline - self._clock.monotonic())) + 0.1)


def open_client() -> httpx.Client:
    """The HTTP client of one receiver: verifies TLS, follows no redirects, uses HTTPS_PROXY and SSL_CERT_FILE."""
    return httpx.Client(
        timeout=TIMEOUT,
        follow_redirects=False,
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_SECONDS),
        headers={"User-Agent": "wattwatch", "Content-Type": "application/json"},
    )


def post_message(
    client: httpx.Client, receiver: Receiver, section: ReceiverSection, delivery: Delivery, clock: Clock
) -> DeliveryOutcome:
    """One attempt, or two if the receiver rejects the payload and has a simpler one. Raises nothing of httpx's."""
    try:
        url = read_receiver_url(section)
    except ReceiverUrlError as error:
        return RetryLater(DeliveryFailure.NO_URL, str(error))
    try:
        status, headers, body = post_payload(client, url, delivery.key, delivery.payload)
        simpler = receiver.fallback_payload(status, body, delivery.payload)
        if simpler is not None:
            status, headers, body = post_payload(client, url, delivery.key, simpler)
    except httpx.TimeoutException:
        return RetryLater(DeliveryFailure.TIMEOUT, "no response before the timeout")
    except httpx.ConnectError as error:
        if is_tls_error(error):
            return RetryLater(
                DeliveryFailure.TLS,
                "TLS handshake failed: the certificate may be untrusted, expired, or for another host",
            )
        return RetryLater(DeliveryFailure.UNREACHABLE, "cannot connect")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        return RetryLater(DeliveryFailure.CONNECTION_LOST, f"connection lost ({type(error).__name__})")
    return receiver.classify_response(status, headers, body, clock.wall())


def post_payload(client: httpx.Client, url: httpx.URL, key: str, payload: bytes) -> tuple[int, httpx.Headers, str]:
    """POST, and read the beginning of the response: status, headers, text of at most MAX_RESPONSE_BYTES."""
    with client.stream("POST", url, content=payload, headers={"Idempotency-Key": key}) as response:
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) >= MAX_RESPONSE_BYTES:
                break
        return response.status_code, response.headers, body[:MAX_RESPONSE_BYTES].decode("utf-8", "replace")


def read_receiver_url(section: ReceiverSection) -> httpx.URL:
    """The URL in `url_file`. Raises ReceiverUrlError."""
    try:
        text = read_secret(section.url_file)
    except OSError as error:
        raise ReceiverUrlError(f"url_file {section.url_file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ReceiverUrlError(f"url_file {section.url_file} is not valid UTF-8 text") from None
    except ValueError as error:
        raise ReceiverUrlError(f"url_file {error}") from None
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        url = None
    if url is None or url.scheme not in ("http", "https") or not HOST_PATTERN.fullmatch(url.raw_host):
        raise ReceiverUrlError(f"url_file {section.url_file} has no http or https URL on its first line")
    return url


def is_tls_error(error: BaseException | None) -> bool:
    """httpx wraps ssl's errors in its own; the cause is somewhere down the chain."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_receiver_reachable(section: ReceiverSection) -> str | None:
    """None if the receiver's host accepts a connection, with TLS if its URL says so; otherwise one sentence.

    Sends nothing, so a wrong secret in the URL shows only with the first message. Behind a proxy, the proxy is tested.
    """
    try:
        url = read_receiver_url(section)
    except ReceiverUrlError as error:
        return f"receiver {section.name}: {error}"
    host, port = url.host, url.port or (443 if url.scheme == "https" else 80)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        address = httpx.URL(proxy if "://" in proxy else f"http://{proxy}")
        host, port = address.host, address.port or 80
    subject = f"receiver {section.name}: {host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=REACHABILITY_TIMEOUT_SECONDS) as connection:
            if url.scheme == "https" and host == url.host:
                httpx.create_ssl_context().wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"{subject}: the TLS certificate is not accepted: {error.verify_message}"
    except ssl.SSLError as error:
        return f"{subject}: TLS failed: {error.reason or 'the handshake failed'}"
    except TimeoutError:
        return f"{subject}: no response within {REACHABILITY_TIMEOUT_SECONDS:g} s"
    except socket.gaierror:
        return f"{subject}: the host name cannot be resolved"
    except (OSError, UnicodeError) as error:
        return f"{subject}: {getattr(error, 'strerror', None) or 'cannot connect'}"
    return None
