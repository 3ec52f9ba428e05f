"""What we log in with: private keys, their certificates and the agent's keys, in the order in which they are tried."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import paramiko
from paramiko.pkey import PublicBlob

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import ConnectionFailure, error_text
from wattwatch.collectors.ssh.ssh_config import HostRoute

KINDS: Final = (paramiko.Ed25519Key, paramiko.RSAKey, paramiko.ECDSAKey)


@dataclass(frozen=True, slots=True)
class Identity:
    key: paramiko.PKey
    description: str  # "key /root/.ssh/id_ed25519"


class KeyRing:
    """Loads each key file once: decrypting one with a passphrase is slow by design (up to a second of CPU)."""

    def __init__(self, passphrase: str | None) -> None:
        self._passphrase = passphrase
        self._loaded: dict[tuple[Path, int], paramiko.PKey] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def identities(self, route: HostRoute) -> Iterator[list[Identity]]:
        """The keys to offer to this host. Raises ConnectionFailure (AUTH_FAILED) if there is none, with the reason for
        each file."""
        found: list[Identity] = []
        problems: list[str] = []
        for file in route.identity_files:
            try:
                key = self._load(file)
            except FileNotFoundError:
                if route.identities_named:
                    problems.append(f"{file} does not exist")
                continue
            except paramiko.PasswordRequiredException:
                problems.append(f"{file} needs a passphrase: set [ssh] passphrase_file")
                continue
            except (paramiko.SSHException, OSError, ValueError) as error:
                problems.append(f"{file}: {error_text(error)}")
                continue
            found += _certified(key, file, route)
            found.append(Identity(key, f"key {file}"))
        agent = paramiko.Agent() if route.use_agent else None
        try:
            if agent is not None:
                named = {identity.key.asbytes() for identity in found} | set(_public_halves(route))
                for agent_key in agent.get_keys():
                    if not route.only_named_agent_keys or agent_key.asbytes() in named:
                        found.append(Identity(agent_key, f"agent key {agent_key.comment or agent_key.fingerprint}"))
            if not found:
                raise ConnectionFailure(
                    HostStatus.AUTH_FAILED,
                    "there is no key to log in with: "
                    + ("; ".join(problems) or "none of the default key files in ~/.ssh exists"),
                    "set [ssh] identity_files, or IdentityFile in ssh_config",
                )
            yield found
        finally:
            if agent is not None:
                agent.close()

    def _load(self, file: Path) -> paramiko.PKey:
        with self._lock:
            stamp = (file, file.stat().st_mtime_ns)
            known = self._loaded.get(stamp)
            if known is None:  # new, or replaced since it was loaded: a rotated key needs no restart
                self._loaded = {at: key for at, key in self._loaded.items() if at[0] != file}
                known = self._loaded[stamp] = load_private_key(file, self._passphrase)
            return known


def load_private_key(file: Path, passphrase: str | None) -> paramiko.PKey:
    """A key of any supported type.

    Raises paramiko.PasswordRequiredException where a passphrase is needed, paramiko.SSHException with the problem
    otherwise.
    """
    problem: Exception | None = None
    for kind in KINDS:
        try:
            return kind.from_private_key_file(str(file), passphrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError) as error:
            problem = problem or error
    first_line = file.read_bytes()[:64].split(b"\n")[0]
    if b"PRIVATE KEY" not in first_line:
        raise paramiko.SSHException("the file is not a private key")
    if passphrase is not None:
        raise paramiko.SSHException("the key cannot be decrypted with this passphrase, or its type is not supported")
    raise paramiko.SSHException(f"the key cannot be read: {problem}")


def _certified(key: paramiko.PKey, file: Path, route: HostRoute) -> Iterator[Identity]:
    """The key with each certificate issued for it. The plain key is tried after them, as ssh does."""
    for certificate in (*route.certificate_files, Path(f"{file}-cert.pub")):
        if not certificate.exists():
            continue
        certified = copy.copy(key)
        try:
            certified.load_certificate(str(certificate))
            issued_for = _certified_key(certified)
        except (ValueError, paramiko.SSHException, OSError):
            continue  # issued for another key
        if issued_for == key.asbytes():
            yield Identity(certified, f"certificate {certificate}")


def _certified_key(key: paramiko.PKey) -> bytes:
    """The public key inside the certificate that `key` carries."""
    assert key.public_blob is not None
    blob = key.public_blob.key_blob
    return type(key)(msg=paramiko.Message(blob)).asbytes()


def _public_halves(route: HostRoute) -> Iterator[bytes]:
    """Public keys named by IdentityFile: the private half may be in the agent only."""
    for file in route.identity_files:
        for candidate in (file, Path(f"{file}.pub")):
            try:
                fields = candidate.read_text("utf-8").split()
                yield PublicBlob.from_string(" ".join(fields[:2])).key_blob
            except (OSError, ValueError, paramiko.SSHException):
                continue
