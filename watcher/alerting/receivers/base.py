"""What a receiver type implements, and what the response to a delivery means.

To add a receiver type: write a module in this package that defines `RECEIVER = YourReceiver()`, and add its name to
`RECEIVER_TYPES` in watcher/config/settings.py. The name is both the `type` in wattwatch.toml and the module's name.
"""

from __future__ import annotations

import email.utils
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Final

from wattwatch.watcher.alerting.message import AlertMessage

# A receiver that asks for a longer pause would silence its alerts for a whole shift; we ask again after an hour.
MAX_RETRY_AFTER_SECONDS: Final = 3600.0


class DeliveryFailure(StrEnum):
    """Why an attempt failed. The value is the label `reason` of wattwatch_notification_failures_total."""

    UNREACHABLE = "unreachable"
    TLS = "tls"
    TIMEOUT = "timeout"
    CONNECTION_LOST = "cut"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    UNEXPECTED_RESPONSE = "unexpected_answer"
    UNAUTHORIZED = "unauthorised"
    GONE = "gone"
    REDIRECTED = "redirected"
    REJECTED = "refused"
    NO_URL = "no_url"
    TOO_OLD = "too_old"
    NOT_CONFIGURED = "not_configured"


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has accepted the message."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """A later attempt may succeed. `after_seconds` is the delay the receiver asked for; None: use our own backoff."""

    failure: DeliveryFailure
    detail: str
    after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No later attempt can succeed: the message is dropped, counted and logged."""

    failure: DeliveryFailure
    detail: str


DeliveryOutcome = Delivered | RetryLater | GiveUp


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `burst` messages at once, then `messages_per_second`."""

    messages_per_second: float
    burst: float


class Receiver(ABC):
    """Lays out messages for one type of receiver, and interprets its responses. Has no state: one instance serves every
    configured receiver of its type."""

    rate_limit: RateLimit | None = None

    @abstractmethod
    def render(self, message: AlertMessage, receiver_name: str) -> bytes:
        """The body to post, valid UTF-8 without lone surrogates: a log line may contain any bytes."""

    def fallback_payload(self, status: int, body: str, payload: bytes) -> bytes | None:
        """A simpler body to post at once because the receiver rejected this one; None if there is none."""
        return None

    def classify_response(
        self, status: int, headers: Mapping[str, str], body: str, wall_seconds: float
    ) -> DeliveryOutcome:
        """What the HTTP response means. `headers` has lower-case names; `body` is cut after 4 KiB."""
        return classify_status(status, headers, wall_seconds)


def find_receiver(type_name: str) -> Receiver:
    """The implementation of a receiver type that the configuration has accepted."""
    module = import_module(f"wattwatch.watcher.alerting.receivers.{type_name}")
    receiver = module.RECEIVER
    assert isinstance(receiver, Receiver)
    return receiver


def classify_status(status: int, headers: Mapping[str, str], wall_seconds: float) -> DeliveryOutcome:
    """The plain HTTP meaning of a response.

    Alertmanager retries on 5xx only, and so loses messages that Slack throttles with 429
    (https://github.com/prometheus/alertmanager/issues/2205).
    """
    if 200 <= status < 300:
        return Delivered()
    if status in (429, 503):
        after = parse_retry_after(headers.get("retry-after"), wall_seconds)
        failure = DeliveryFailure.RATE_LIMITED if status == 429 else DeliveryFailure.SERVER_ERROR
        return RetryLater(failure, f"HTTP {status}", after)
    if status >= 500 or status in (408, 425):
        return RetryLater(DeliveryFailure.SERVER_ERROR, f"HTTP {status}")
    if 300 <= status < 400:
        # Following one would send the secret in the URL to a host that nobody configured.
        return GiveUp(
            DeliveryFailure.REDIRECTED,
            f"HTTP {status}: redirects are not followed; write the final URL to the file that `url_file` points to",
        )
    if status in (401, 403):
        return GiveUp(DeliveryFailure.UNAUTHORIZED, f"HTTP {status}: the receiver rejects the secret in the URL")
    if status in (404, 410):
        return GiveUp(DeliveryFailure.GONE, f"HTTP {status}: no receiver exists at this URL")
    return GiveUp(DeliveryFailure.REJECTED, f"HTTP {status}")


def parse_retry_after(value: str | None, wall_seconds: float) -> float | None:
    """Seconds from a Retry-After header: "12" or an HTTP date (RFC 9110, section 10.2.3), at most an hour.

    None if the header is missing or is neither.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - wall_seconds
        except (ValueError, TypeError, OverflowError, OSError):
            return None
    if math.isnan(seconds):
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)
