"""Host key verification: known_hosts read as OpenSSH reads it.

paramiko's HostKeys supports no wildcards, markers or certificates, hence this reader. The rules are those of sshd(8),
"SSH_KNOWN_HOSTS FILE FORMAT": patterns with * ? and !, hashed names, [host]:port, several files, `@revoked`,
`@cert-authority`. An unknown key is never accepted and never added.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import paramiko
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import (
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import ConnectionFailure
from wattwatch.collectors.ssh.ssh_config import HostRoute

CERTIFICATE: Final = "-cert-v01@openssh.com"
RSA_SIGNATURES: Final = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line of a known_hosts file that names the host."""

    marker: str  # "", "@revoked", "@cert-authority"
    type: str  # "ssh-ed25519"
    blob: bytes
    place: str  # "FILE:LINE"

    @property
    def fingerprint(self) -> str:
        return key_fingerprint(self.blob)


def key_fingerprint(blob: bytes) -> str:
    """Fingerprint of a public key, as ssh-keygen -l prints it."""
    return paramiko.PKey.from_type_string(_key_type(blob), blob).fingerprint


def _key_type(blob: bytes) -> str:
    return paramiko.Message(blob).get_text()


def known_host_keys(route: HostRoute) -> tuple[KnownKey, ...]:
    """Every line about this host. As in OpenSSH, lines without the port count if no line names it with the port."""
    found = _keys_named(route.host_key_name, route.known_hosts_files)
    if not any(key.marker != "@revoked" for key in found) and route.host_key_name.startswith("["):
        found += _keys_named(route.hostname, route.known_hosts_files)
    return found


def _keys_named(name: str, files: Sequence[Path]) -> tuple[KnownKey, ...]:
    found = []
    for file in files:
        try:
            text = file.read_text("utf-8", "replace")
        except OSError:  # one of several default files; a missing key is reported with the files searched
            continue
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#") or not _matches_host(fields[0], name):
                continue
            try:
                blob = base64.b64decode(fields[2])
            except binascii.Error:
                continue
            found.append(KnownKey(marker, fields[1], blob, f"{file}:{number}"))
    return tuple(found)


def _matches_host(patterns: str, name: str) -> bool:
    """Whether the first field of a line matches this host. A negated pattern that matches excludes the line."""
    if patterns.startswith("|1|"):
        try:
            return paramiko.HostKeys.hash_host(name, patterns) == patterns
        except (binascii.Error, AssertionError, IndexError):  # not a hash
            return False
    matched = False
    for pattern in patterns.lower().split(","):
        # fnmatch takes [ for a character class; OpenSSH does not
        if fnmatch.fnmatchcase(name, pattern.lstrip("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def prefer_known_types(transport: paramiko.Transport, known: Iterable[KnownKey]) -> None:
    """Ask the host for a key type that we can verify: a host may have several keys."""
    options = transport.get_security_options()
    ours: tuple[str, ...] = tuple(options.key_types)
    wanted: list[str] = []
    for key in known:
        if key.marker == "@cert-authority":
            wanted += [kind + CERTIFICATE for kind in ours]
        elif not key.marker:
            wanted += RSA_SIGNATURES if key.type == "ssh-rsa" else [key.type]
    supported = set(ours) | {kind + CERTIFICATE for kind in ours}
    options.key_types = tuple(dict.fromkeys([kind for kind in wanted if kind in supported] + list(ours)))


def verify_host_key(route: HostRoute, key: paramiko.PKey, known: Sequence[KnownKey]) -> None:
    """Return if the host presented a key known for it; raises ConnectionFailure (HOST_KEY_CHANGED) otherwise."""
    blob = key.asbytes()
    shown = f"{route.place} presented {key.get_name()} {key_fingerprint(blob)}"
    for entry in known:
        if entry.marker == "@revoked" and entry.blob == blob:
            raise _host_key_failure(f"host key is revoked: {shown}; {entry.place} marks this key as @revoked")
    # A certificate is checked first: a host with a valid one needs no line of its own.
    authorities = [entry for entry in known if entry.marker == "@cert-authority"]
    problem = ""
    if key.public_blob is not None and authorities:
        problem = certificate_problem(key.public_blob.key_blob, route, known)
        if not problem:
            return
    plain = [entry for entry in known if not entry.marker]
    if any(entry.blob == blob for entry in plain):
        return
    command = f"ssh-keyscan -p {route.port} {route.hostname} | ssh-keygen -lf -"
    if problem:
        raise _host_key_failure(f"host certificate not accepted: {problem}; {shown}")
    if not plain and authorities:
        raise _host_key_failure(
            f"host key is not certified: {shown} without a certificate, but {authorities[0].place} requires one",
            "renew the host certificate on the node (HostCertificate in its sshd_config)",
        )
    if not plain:
        files = ", ".join(map(str, route.known_hosts_files))
        raise _host_key_failure(
            f"host key is unknown: {shown}; there is no line for {route.host_key_name} in {files}",
            f"compare this key with the key on the node ({command}), then add it to known_hosts",
        )
    expected = " or ".join(f"{entry.type} {entry.fingerprint} ({entry.place})" for entry in plain)
    raise _host_key_failure(
        f"host key has CHANGED: {shown}, but the expected key is {expected}",
        f"if the node was reinstalled, compare the keys ({command}), run ssh-keygen -R '{route.host_key_name}' and "
        "add the new key; if it was not reinstalled, somebody may be intercepting the connection",
    )


def _host_key_failure(detail: str, advice: str = "") -> ConnectionFailure:
    return ConnectionFailure(HostStatus.HOST_KEY_CHANGED, detail, advice)


def certificate_problem(blob: bytes, route: HostRoute, known: Sequence[KnownKey]) -> str:
    """Why a host certificate is not valid for this host; "" if it is (PROTOCOL.certkeys of OpenSSH)."""
    kind = _key_type(blob).encode("ascii")
    try:
        certificate = load_ssh_public_identity(kind + b" " + base64.b64encode(blob))
        if not isinstance(certificate, SSHCertificate):
            return "the presented key is not a certificate"
        certificate.verify_cert_signature()
        authority = certificate.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        return f"the certificate cannot be verified: {str(error) or 'wrong signature'}"
    signer = base64.b64decode(authority.split()[1])
    if any(entry.marker == "@revoked" and entry.blob == signer for entry in known):
        return "the authority that signed the certificate is revoked"
    if not any(entry.marker == "@cert-authority" and entry.blob == signer for entry in known):
        return f"the authority that signed the certificate ({key_fingerprint(signer)}) is not in known_hosts"
    if certificate.type is not SSHCertificateType.HOST:
        return "the certificate is a user certificate, not a host certificate"
    if certificate.critical_options:
        return "the certificate has critical options that are not supported"
    if not certificate.valid_after <= time.time() < certificate.valid_before:
        return "the certificate has expired or is not valid yet"
    names = [principal.decode("utf-8", "replace") for principal in certificate.valid_principals]
    # Principals contain no port: "[name]:2222" is compared as "name".
    own = route.host_key_name.split("]")[0].removeprefix("[")
    if names and not any(fnmatch.fnmatchcase(own, name.lower()) for name in names):
        return f"the certificate is valid for {', '.join(names)}, not for {own}"
    return ""
