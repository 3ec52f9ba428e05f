"""How nodes are reached, and how each connection stands. Data only."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wattwatch.collectors.samples import HostStatus


@dataclass(frozen=True, slots=True)
class SshSettings:
    """As in the [ssh] table; the passphrase is the secret itself, so never printed."""

    user: str | None = None
    port: int | None = None
    config_file: Path | None = None
    known_hosts_file: Path | None = None
    identity_files: tuple[Path, ...] = ()
    certificate_file: Path | None = None
    passphrase: str | None = None
    use_agent: bool = False
    connect_timeout_seconds: float = 10.0
    max_simultaneous_logins: int = 8
    renew_after_seconds: float = 8 * 3600.0

    def __repr__(self) -> str:
        return f"SshSettings(user={self.user!r}, port={self.port!r}, config_file={self.config_file!r})"


@dataclass(frozen=True, slots=True)
class NodeLink:
    """One node's connection at one moment. Liveness is the age of the last line, on the control host's clock."""

    node: str
    status: HostStatus
    detail: str  # "" when OK; else what was tried and seen, with the next attempt
    last_line_age_seconds: float | None = None  # None: never a line
    logins: int = 0  # successful ones, renewals included
    failures: int = 0
    lines: int = 0
    garbage_bytes: int = 0  # bytes that were no line of ours
    clock_skew_seconds: float | None = None  # node's wall clock minus ours


# Why a node could not be reached, as a value with a sentence: it ends in NodeLink, in `check` and in alerts.

SLOW_RETRY_STATUSES: Final = frozenset({HostStatus.AUTH_FAILED, HostStatus.HOST_KEY_CHANGED})
"""Trying again soon cannot help and may lock an account or trip an intrusion alarm."""


class ConnectionFailure(Exception):
    """One attempt that ended without a stream. `advice` says what a person can do about it, where that is known."""

    def __init__(self, status: HostStatus, detail: str, advice: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.advice = advice

    @property
    def sentence(self) -> str:
        return f"{self.detail}; {self.advice}" if self.advice else self.detail


def unreachable(detail: str, advice: str = "") -> ConnectionFailure:
    return ConnectionFailure(HostStatus.UNREACHABLE, detail, advice)


def tcp_failure(error: OSError, place: str, limit_seconds: float) -> ConnectionFailure:
    """A TCP connection that did not come about, in words that keep the causes apart."""
    if isinstance(error, socket.timeout):
        return unreachable(f"no answer from {place} within {limit_seconds:.0f} s", "host down, or a firewall drops it")
    if error.errno == errno.ECONNREFUSED:
        return unreachable(f"connection refused by {place}", "the host is up, nothing listens there: is sshd running?")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return unreachable(f"no route to {place}", "host down, or a network between is")
    return unreachable(f"cannot connect to {place}: {error_text(error)}")


def error_text(error: BaseException) -> str:
    """The system's words for an error number, else the exception's own, else its name. Never empty."""
    if isinstance(error, OSError) and error.errno:
        return error.strerror or os.strerror(error.errno)
    return str(error) or type(error).__name__
