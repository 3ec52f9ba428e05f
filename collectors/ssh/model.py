"""Data of this folder: how nodes are reached, the state of each connection, and why one failed."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from wattwatch.collectors.samples import HostStatus

SLOW_RETRY_STATUSES: Final = frozenset({HostStatus.AUTH_FAILED, HostStatus.HOST_KEY_CHANGED})
"""After one of these failures, an early retry cannot help. It may lock an account or trigger an intrusion alarm."""


class UnreachableCause(StrEnum):
    """Why a node is UNREACHABLE. Only a silent one does not answer: the others need a different next step."""

    SILENT = "silent"  # nothing came back: the host or its sshd is down or frozen, or packets are dropped
    ROUTE = "route"  # the network reports that it cannot deliver; a host that is down on our own network looks the same
    REFUSED = "refused"  # the node's own network stack refused the connection: the node is up, its sshd is not
    NAME = "name"  # its name cannot be resolved, so nothing was sent to it
    HANDSHAKE = "handshake"  # it answers, and ends the connection or speaks another protocol before the login is done
    SESSION = "session"  # logged in, and the probe does not start or sends nothing
    GATEWAY = "gateway"  # the gateway on the way to it opens no connection to it
    CONFIGURATION = "configuration"  # ssh_config on the control host is wrong, so nothing was sent to it
    NOT_TRIED = "not_tried"  # logins are limited in number, and its turn has not come


_CAUSE_OF_DETAIL: Final = {
    "connection refused by": UnreachableCause.REFUSED,
    "cannot resolve the name": UnreachableCause.NAME,
    "no route to": UnreachableCause.ROUTE,
    "not connected yet": UnreachableCause.NOT_TRIED,
}


def cause_of_detail(detail: str) -> UnreachableCause | None:
    """The cause of an unreachable node in a recording made before release 0.3.0, which holds its detail only."""
    return next((cause for start, cause in _CAUSE_OF_DETAIL.items() if detail.startswith(start)), None)


@dataclass(frozen=True, slots=True)
class SshSettings:
    """The [ssh] table of the configuration. `passphrase` is the secret itself, so it is never printed."""

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
    """State of the connection to one node. Liveness is the age of the last line, on the control host's clock."""

    node: str
    status: HostStatus
    detail: str  # "" when OK; else what was tried and what happened, with the next attempt
    last_line_age_seconds: float | None = None  # None: no line yet
    logins: int = 0  # successful ones, renewals included
    failures: int = 0
    lines: int = 0
    garbage_bytes: int = 0  # bytes that were not a line of the probe
    clock_skew_seconds: float | None = None  # the node's wall clock minus ours; None while the node does not answer
    cause: UnreachableCause | None = None  # of UNREACHABLE; None: unknown


class ConnectionFailure(Exception):
    """A login that failed or a connection that ended. `advice` says what a person can do about it, where known.

    It is a value as well as an exception: it reaches `NodeLink.detail`, `wattwatch check` and alerts.
    """

    def __init__(
        self, status: HostStatus, detail: str, advice: str = "", cause: UnreachableCause | None = None
    ) -> None:
        super().__init__(detail)
        self.cause = cause
        self.status = status
        self.detail = detail
        self.advice = advice

    @property
    def sentence(self) -> str:
        return f"{self.detail}; {self.advice}" if self.advice else self.detail


def unreachable(detail: str, advice: str = "", cause: UnreachableCause = UnreachableCause.SILENT) -> ConnectionFailure:
    return ConnectionFailure(HostStatus.UNREACHABLE, detail, advice, cause)


def tcp_failure(error: OSError, place: str, limit_seconds: float) -> ConnectionFailure:
    """Why a TCP connection to `place` ("host:port") failed. The wording separates causes that need different action."""
    if isinstance(error, socket.timeout):
        return unreachable(
            f"no answer from {place} within {limit_seconds:.0f} s", "the host is down, or a firewall drops the packets"
        )
    if error.errno == errno.ECONNREFUSED:
        return unreachable(
            f"connection refused by {place}",
            "the host is up but nothing listens on that port: is sshd running?",
            UnreachableCause.REFUSED,
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return unreachable(
            f"no route to {place}", "the host is down, or the network has a problem", UnreachableCause.ROUTE
        )
    return unreachable(f"cannot connect to {place}: {error_text(error)}")


def error_text(error: BaseException) -> str:
    """The system's text for an error number, else the exception's own, else its class name. Never empty."""
    if isinstance(error, OSError) and error.errno:
        return error.strerror or os.strerror(error.errno)
    return str(error) or type(error).__name__
