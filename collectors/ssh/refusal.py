"""Why a node could not be reached, as a value with a sentence: it ends in NodeLink, in `check` and in alerts."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from collectors.samples import HostStatus

PATIENT: Final = frozenset({HostStatus.AUTH_FAILED, HostStatus.HOST_KEY_CHANGED})
"""Trying again soon cannot help and may lock an account or trip an intrusion alarm."""


class Refusal(Exception):
    """One attempt that ended without a stream. `advice` says what a person can do about it, where that is known."""

    def __init__(self, status: HostStatus, detail: str, advice: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.advice = advice

    @property
    def sentence(self) -> str:
        return f"{self.detail}; {self.advice}" if self.advice else self.detail


def unreachable(detail: str, advice: str = "") -> Refusal:
    return Refusal(HostStatus.UNREACHABLE, detail, advice)


def refused_tcp(error: OSError, place: str, limit_seconds: float) -> Refusal:
    """A TCP connection that did not come about, in words that keep the causes apart."""
    if isinstance(error, socket.timeout):
        return unreachable(f"no answer from {place} within {limit_seconds:.0f} s", "host down, or a firewall drops it")
    if error.errno == errno.ECONNREFUSED:
        return unreachable(f"connection refused by {place}", "the host is up, nothing listens there: is sshd running?")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return unreachable(f"no route to {place}", "host down, or a network between is")
    return unreachable(f"cannot connect to {place}: {words_of(error)}")


def words_of(error: BaseException) -> str:
    """The system's words for an error number, else the exception's own, else its name. Never empty."""
    if isinstance(error, OSError) and error.errno:
        return error.strerror or os.strerror(error.errno)
    return str(error) or type(error).__name__
