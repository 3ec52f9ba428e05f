"""Ed25519 keys for the simulated cluster: made for one run, in the formats of OpenSSH."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def new_private_key() -> str:
    """Text of an OpenSSH private key file."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()


def read_key(text: str) -> paramiko.Ed25519Key:
    return paramiko.Ed25519Key(file_obj=io.StringIO(text))


def public_line(key: paramiko.PKey) -> str:
    """As in authorized_keys: type and base64."""
    return f"{key.get_name()} {key.get_base64()}"


def read_public_line(line: str) -> paramiko.PKey:
    kind, blob = line.split()[:2]
    return paramiko.PKey.from_type_string(kind, base64.b64decode(blob))


def write_private_key(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, "utf-8")
