"""A node name -> how to reach it, from ssh_config, the [ssh] table and the defaults.

~/.ssh/config is parsed by paramiko, with what paramiko lacks added here: Include, and the Match criteria that it would
get wrong.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import paramiko

from wattwatch.collectors.ssh.model import ConnectionFailure, SshSettings, UnreachableCause, error_text, unreachable

SSH_PORT: Final = 22
DEFAULT_CONFIG: Final = Path("~/.ssh/config")
DEFAULT_IDENTITIES: Final = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
DEFAULT_KNOWN_HOSTS: Final = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
GLOBAL_KNOWN_HOSTS: Final = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
MAX_GATEWAYS: Final = 8


@dataclass(frozen=True, slots=True)
class HostRoute:
    """Everything needed to log in to one host. Hashable: nodes behind the same gateway have equal `via`."""

    name: str  # as the user wrote it
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_named: bool  # False: the default key files, any of which may be missing
    certificate_files: tuple[Path, ...]
    known_hosts_files: tuple[Path, ...]
    host_key_name: str  # name to find in known_hosts: HostKeyAlias, else the host name, "[name]:port" off port 22
    use_agent: bool
    only_named_agent_keys: bool  # IdentitiesOnly: of the agent's keys, only those of the identity files
    via: HostRoute | None = None  # gateway, which may itself be behind another

    @property
    def place(self) -> str:
        address = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{address}:{self.port}"

    @property
    def first_gateway(self) -> HostRoute | None:
        """The gateway to which the TCP connection is opened; None if it goes to the node itself."""
        return None if self.via is None else self.via.first_gateway or self.via


@dataclass(frozen=True, slots=True)
class Resolution:
    route: HostRoute
    notes: tuple[str, ...]  # directives that are not supported


def resolve_host(node: str, settings: SshSettings) -> Resolution:
    """How to reach `node` ("name" or "user@name"). Raises ConnectionFailure for an unsupported configuration."""
    config, notes = _load_config(settings)
    user, _, name = node.rpartition("@")
    return Resolution(_route(name, user or settings.user, settings.port, settings, config, ()), notes)


def _misconfigured(detail: str) -> ConnectionFailure:
    return unreachable(detail, cause=UnreachableCause.CONFIGURATION)


def _load_config(settings: SshSettings) -> tuple[paramiko.SSHConfig, tuple[str, ...]]:
    path = (settings.config_file or DEFAULT_CONFIG).expanduser()
    if path == DEFAULT_CONFIG.expanduser() and not path.exists():
        return paramiko.SSHConfig(), ()
    return read_ssh_config(path)


def _route(
    name: str,
    user: str | None,
    port: int | None,
    settings: SshSettings,
    config: paramiko.SSHConfig,
    seen: tuple[str, ...],
    jump: str | None = None,
) -> HostRoute:
    """`user`, `port` and `jump` override ssh_config; `seen`: the names that led here, to detect a loop."""
    chain = " -> ".join((*seen, name))
    if name in seen:
        raise _misconfigured(f"ProxyJump forms a loop: {chain}")
    if len(seen) > MAX_GATEWAYS:
        raise _misconfigured(f"ProxyJump uses more than {MAX_GATEWAYS} gateways: {chain}")
    asked = config.lookup(name)
    hostname = asked.get("hostname", name).lower()
    # The [ssh] table and the name itself take precedence over ssh_config, as ssh's own command line does.
    user = user or asked.get("user") or getpass.getuser()
    port = port or _port(asked.get("port", str(SSH_PORT)), f"Port of {name}")
    jump = jump if jump is not None else asked.get("proxyjump")
    if asked.get("proxycommand") and not jump:
        raise _misconfigured(
            f"ssh_config reaches {name} through a ProxyCommand, but ProxyCommand is not supported; use ProxyJump"
        )
    identities = [str(path) for path in settings.identity_files] or asked.get("identityfile") or []
    certificates = asked.get("certificatefile")
    named = [settings.certificate_file] if settings.certificate_file else [certificates] if certificates else []
    # Tokens of ssh_config(5) that may occur in file names.
    tokens = {"%h": hostname, "%n": name, "%p": str(port), "%r": user, "%d": str(Path.home()), "%u": getpass.getuser()}
    if settings.known_hosts_file is not None:
        known_hosts = [str(settings.known_hosts_file)]
    else:
        known_hosts = shlex.split(asked.get("userknownhostsfile", DEFAULT_KNOWN_HOSTS))
        known_hosts += shlex.split(asked.get("globalknownhostsfile", GLOBAL_KNOWN_HOSTS))
    return HostRoute(
        name=name,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=_paths(identities or DEFAULT_IDENTITIES, tokens),
        identities_named=bool(identities),
        certificate_files=_paths(map(str, named), tokens),
        known_hosts_files=_paths(known_hosts, tokens),
        host_key_name=asked.get("hostkeyalias", hostname if port == SSH_PORT else f"[{hostname}]:{port}").lower(),
        use_agent=settings.use_agent,
        only_named_agent_keys=asked.get("identitiesonly", "no").lower() == "yes",
        via=None if not jump or jump.lower() == "none" else _gateway(jump, settings, config, (*seen, name)),
    )


def _gateway(jump: str, settings: SshSettings, config: paramiko.SSHConfig, seen: tuple[str, ...]) -> HostRoute:
    """The last gateway of "a,user@b:2222": b, reached through a. The first follows its own ssh_config."""
    before, _, last = jump.strip().removeprefix("ssh://").rpartition(",")
    user, _, place = last.strip().rpartition("@")
    name, port = _host_and_port(place)
    if not name:
        raise _misconfigured(
            f"ProxyJump {jump!r} of {seen[-1]} contains no host; expected host or user@host:port, or several of them "
            "separated by commas"
        )
    return _route(name, user or None, port, settings, config, seen, before or None)


def _host_and_port(place: str) -> tuple[str, int | None]:
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":")
    elif place.count(":") == 1:
        host, port = place.split(":")
    else:
        host, port = place, ""
    return host, _port(port, f"ProxyJump {place!r}") if port else None


def _port(text: str, place: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise _misconfigured(f"{place} is {text!r}; expected a number from 1 to 65535")
    return int(text)


def _paths(names: Iterable[str], tokens: dict[str, str]) -> tuple[Path, ...]:
    paths = []
    for name in names:
        for token, value in tokens.items():
            name = name.replace(token, value)
        if name.lower() != "none":
            paths.append(Path(os.path.expanduser(name)))
    return tuple(paths)


# The file -----------------------------------------------------------------------------------------------------------

MAX_INCLUDE_DEPTH: Final = 16  # as in OpenSSH
DIRECTIVE: Final = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.+?)\s*$")
KNOWN_CRITERIA: Final = frozenset({"all", "canonical", "final", "host", "originalhost", "user", "localuser"})
MATCHES_NO_HOST: Final = 'Host "!*"'  # matches no host: the block below it is parsed and never applied
UNSUPPORTED: Final = {
    "proxycommand": "use ProxyJump",
    "pkcs11provider": "use a key file or the SSH agent",
    "securitykeyprovider": "use a key file or the SSH agent",
    "identityagent": "set SSH_AUTH_SOCK and [ssh] use_agent",
    "knownhostscommand": "use UserKnownHostsFile",
    "revokedhostkeys": "use @revoked lines in known_hosts",
    "bindaddress": "",
    "bindinterface": "",
}


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The file with its includes inserted, the files it consists of, and notes on what is not supported."""

    text: str
    stamps: tuple[tuple[Path, int], ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _ConfigFiles:
    stamps: list[tuple[Path, int]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)  # ordered, each once


def read_ssh_config(path: Path) -> tuple[paramiko.SSHConfig, tuple[str, ...]]:
    """The parsed file and its notes. Read again only when it or an included file changed.

    Raises ConnectionFailure if it cannot be read.
    """
    known = _CACHE.get(path)
    if known is None or any(_stamp(file) != stamp for file, stamp in known.stamps):
        reading = _ConfigFiles()
        lines = list(_lines(path, reading, 0))
        known = _CACHE[path] = ConfigText("\n".join(lines), tuple(reading.stamps), tuple(reading.notes))
    return _parse(known.text, path), known.notes


# The file is read for every login of every node, but rarely changes.
_CACHE: dict[Path, ConfigText] = {}


@lru_cache(maxsize=16)
def _parse(text: str, path: Path) -> paramiko.SSHConfig:
    try:
        return paramiko.SSHConfig.from_text(text)
    except (paramiko.ConfigParseError, ValueError) as error:
        raise _misconfigured(f"{path} is not a valid ssh_config: {error_text(error)}") from None


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _lines(path: Path, reading: _ConfigFiles, depth: int) -> Iterator[str]:
    reading.stamps.append((path, _stamp(path)))
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise _misconfigured(f"{path} cannot be read: {error_text(error)}") from None
    block = 'Host "*"'
    for line in text.splitlines():
        found = DIRECTIVE.match(line)
        if found is None or line.lstrip().startswith("#"):
            continue
        key, value = found[1].lower(), found[2]
        if key == "include":
            if depth >= MAX_INCLUDE_DEPTH:
                raise _misconfigured(f"{path}: Include is nested more than {MAX_INCLUDE_DEPTH} levels deep")
            for file in _included(value):
                yield from _lines(file, reading, depth + 1)
            yield block  # what follows belongs to the block that contains the Include
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


def _supported_match(line: str, value: str, path: Path, reading: _ConfigFiles) -> str:
    """The line itself, or one that never matches: paramiko treats an unknown criterion as met."""
    criteria = shlex.split(value)
    while criteria:
        criterion = criteria.pop(0).lstrip("!").lower()
        if criterion not in KNOWN_CRITERIA:
            reading.notes[f"{path}: Match {criterion} is not supported, so its block is ignored"] = None
            return MATCHES_NO_HOST
        if criterion not in ("all", "canonical", "final") and criteria:
            criteria.pop(0)
    return line
