"""How nodes are reached, and how each connection stands. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from collectors.samples import HostStatus


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
