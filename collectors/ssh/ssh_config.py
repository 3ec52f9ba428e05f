"""~/.ssh/config as paramiko reads it, with what paramiko lacks: Include, and Match lines that it would get wrong."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import paramiko

from collectors.ssh.refusal import unreachable, words_of

DEEPEST_INCLUDE: Final = 16  # as in OpenSSH
DIRECTIVE: Final = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.+?)\s*$")
KNOWN_CRITERIA: Final = frozenset({"all", "canonical", "final", "host", "originalhost", "user", "localuser"})
NEVER: Final = 'Host "!*"'  # matches no host: the block below it is read and never applied
UNSUPPORTED: Final = {
    "proxycommand": "use ProxyJump",
    "pkcs11provider": "use a key file or the agent",
    "securitykeyprovider": "use a key file or the agent",
    "identityagent": "set SSH_AUTH_SOCK and [ssh] use_agent",
    "knownhostscommand": "use UserKnownHostsFile",
    "revokedhostkeys": "use @revoked lines in known_hosts",
    "bindaddress": "",
    "bindinterface": "",
}


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The file with its includes in place, the files it was made of, and what in it is not honoured."""

    text: str
    stamps: tuple[tuple[Path, int], ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Reading:
    stamps: list[tuple[Path, int]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # ordered, each once


def read_ssh_config(path: Path) -> tuple[paramiko.SSHConfig, tuple[str, ...]]:
    """The parsed file and its notes. Read anew only when it or an included file changed; Refusal if unreadable."""
    known = _CACHE.get(path)
    if known is None or any(_stamp(file) != stamp for file, stamp in known.stamps):
        reading = _Reading()
        lines = list(_lines(path, reading, 0))
        known = _CACHE[path] = ConfigText("\n".join(lines), tuple(reading.stamps), tuple(reading.notes))
    return _parse(known.text, path), known.notes


_CACHE: dict[Path, ConfigText] = {}


@lru_cache(maxsize=16)
def _parse(text: str, path: Path) -> paramiko.SSHConfig:
    try:
        return paramiko.SSHConfig.from_text(text)
    except (paramiko.ConfigParseError, ValueError) as error:
        raise unreachable(f"{path} cannot be read as an ssh_config: {words_of(error)}") from None


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _lines(path: Path, reading: _Reading, depth: int) -> Iterator[str]:
    reading.stamps.append((path, _stamp(path)))
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise unreachable(f"{path} cannot be read: {words_of(error)}") from None
    block = 'Host "*"'
    for line in text.splitlines():
        found = DIRECTIVE.match(line)
        if found is None or line.lstrip().startswith("#"):
            continue
        key, value = found[1].lower(), found[2]
        if key == "include":
            if depth >= DEEPEST_INCLUDE:
                raise unreachable(f"{path}: Include is nested deeper than {DEEPEST_INCLUDE} files")
            for file in _included(value):
                yield from _lines(file, reading, depth + 1)
            yield block  # what follows belongs to the block that the Include stood in
            continue
        if key == "host":
            block = line
        elif key == "match":
            line = block = _supported_match(line, value, path, reading)
        elif key in UNSUPPORTED and value.lower() != "none":
            advice = UNSUPPORTED[key]
            reading.notes[f"{path}: {found[1]} is not supported{'; ' if advice else ''}{advice}"] = None
        elif key == "stricthostkeychecking" and value.lower() in ("no", "off", "accept-new"):
            reading.notes[f"{path}: {found[1]} {value} is ignored: host keys are always verified"] = None
        yield line


def _included(value: str) -> list[Path]:
    """Files of an Include line: several patterns, relative ones below ~/.ssh."""
    files: list[Path] = []
    for pattern in shlex.split(value):
        full = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern))
        files += [Path(name) for name in sorted(glob.glob(full))]
    return files


def _supported_match(line: str, value: str, path: Path, reading: _Reading) -> str:
    """The line itself, or one that never matches: paramiko takes a criterion that it does not know for met."""
    words = shlex.split(value)
    while words:
        criterion = words.pop(0).lstrip("!").lower()
        if criterion not in KNOWN_CRITERIA:
            reading.notes[f"{path}: Match {criterion} is not supported: that block is not applied"] = None
            return NEVER
        if criterion not in ("all", "canonical", "final") and words:
            words.pop(0)
    return line
