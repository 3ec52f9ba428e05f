"""What a receiver's answer means for a delivery: done, again later, or never. Data and the rules of HTTP."""

from __future__ import annotations

import email.utils
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_RETRY_AFTER_SECONDS: Final = 3600.0


class DeliveryFailure(StrEnum):
    """Why an attempt failed: the label `reason` of the failure counter."""

    UNREACHABLE = "unreachable"
    TLS = "tls"
    TIMEOUT = "timeout"
    CUT = "cut"
    RATE_LIMITED = "rate_limited"
    SERVER_ERROR = "server_error"
    UNEXPECTED_ANSWER = "unexpected_answer"
    UNAUTHORISED = "unauthorised"
    GONE = "gone"
    REDIRECTED = "redirected"
    REFUSED = "refused"
    NO_URL = "no_url"
    TOO_OLD = "too_old"
    NOT_CONFIGURED = "not_configured"


@dataclass(frozen=True, slots=True)
class Delivered:
    pass


@dataclass(frozen=True, slots=True)
class RetryLater:
    """`after_seconds`: what the receiver asked for; None leaves it to us."""

    failure: DeliveryFailure
    detail: str
    after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No later attempt can succeed."""

    failure: DeliveryFailure
    detail: str


DeliveryOutcome = Delivered | RetryLater | GiveUp


def classify_status(status: int, headers: Mapping[str, str], wall_seconds: float) -> DeliveryOutcome:
    """HTTP's own meaning. Alertmanager retries 5xx only, and so loses what Slack throttles (alertmanager#2205)."""
    if 200 <= status < 300:
        return Delivered()
    if status in (429, 503):
        after = parse_retry_after(headers.get("retry-after"), wall_seconds)
        return RetryLater(
            DeliveryFailure.RATE_LIMITED if status == 429 else DeliveryFailure.SERVER_ERROR, f"HTTP {status}", after
        )
    if status >= 500 or status in (408, 425):
        return RetryLater(DeliveryFailure.SERVER_ERROR, f"HTTP {status}")
    if 300 <= status < 400:
        return GiveUp(
            DeliveryFailure.REDIRECTED, f"HTTP {status}: redirects are not followed: put the final URL in url_file"
        )
    if status in (401, 403):
        return GiveUp(DeliveryFailure.UNAUTHORISED, f"HTTP {status}: the URL's secret is not accepted (any more)")
    if status in (404, 410):
        return GiveUp(DeliveryFailure.GONE, f"HTTP {status}: there is no receiver at this URL (any more)")
    return GiveUp(DeliveryFailure.REFUSED, f"HTTP {status}")


def parse_retry_after(value: str | None, wall_seconds: float) -> float | None:
    """Seconds of "12" or of an HTTP date (RFC 9110, 10.2.3), within an hour; None where it says neither."""
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
