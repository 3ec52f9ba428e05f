"""Everything that would keep the service from starting, found before anything is started; and settings in the form
that the components take."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.alerting.delivery_queue import ReceiverUrlError, read_receiver_url
from wattwatch.watcher.config.settings import Config, ProfileSection, SshSection, WatcherSection, read_secret
from wattwatch.watcher.detection.baselines.profiles import UserProfile


def ssh_settings(section: SshSection) -> SshSettings:
    """Raises OSError or ValueError if the passphrase cannot be read."""
    return SshSettings(
        user=section.user,
        port=section.port,
        config_file=section.config_file.expanduser(),
        known_hosts_file=None if section.known_hosts_file is None else section.known_hosts_file.expanduser(),
        identity_files=tuple(path.expanduser() for path in section.identity_files),
        certificate_file=None if section.certificate_file is None else section.certificate_file.expanduser(),
        passphrase=None if section.passphrase_file is None else read_secret(section.passphrase_file),
        use_agent=section.use_agent,
        connect_timeout_seconds=section.connect_timeout,
        max_simultaneous_logins=section.max_simultaneous_logins,
        renew_after_seconds=section.renew_after,
    )


def to_user_profile(section: ProfileSection) -> UserProfile:
    return UserProfile(**section.model_dump())


def read_token(section: WatcherSection) -> str | None:
    """The API's bearer token. Raises OSError or ValueError if its file cannot be read or is empty."""
    return None if section.token_file is None else read_secret(section.token_file)


def preflight_problems(config: Config) -> list[str]:
    """Why the service must not start, each with its key. The configuration itself is already valid."""
    return [*listen_problems(config.watcher), *file_problems(config), *profile_problems(config)]


def listen_problems(section: WatcherSection) -> Iterator[str]:
    if section.token_file is None and not section.allow_unauthenticated and not is_loopback(section.listen_host):
        yield (
            f"watcher.listen: other machines can reach {section.listen}, but no token is configured: set "
            "watcher.token_file; or, to let anyone who can reach this address read everything, set "
            "watcher.allow_unauthenticated = true"
        )


def file_problems(config: Config) -> Iterator[str]:
    """Files that the configuration names but that cannot be read."""
    for key, secret in (
        ("watcher.token_file", config.watcher.token_file),
        ("ssh.passphrase_file", config.ssh.passphrase_file),
    ):
        if secret is not None:
            try:
                read_secret(secret)
            except OSError as error:
                yield f"{key}: {secret} cannot be read: {error.strerror}"
            except ValueError as error:  # also text that is not UTF-8
                yield f"{key}: {error}"
    files = [
        ("ssh.known_hosts_file", config.ssh.known_hosts_file),
        ("ssh.certificate_file", config.ssh.certificate_file),
    ]
    files += [(f"ssh.identity_files[{i}]", path) for i, path in enumerate(config.ssh.identity_files)]
    for key, path in files:
        if path is not None and (reason := read_error(path.expanduser())):
            yield f"{key}: {path} cannot be read: {reason}"
    for i, receiver in enumerate(config.receivers):
        try:
            read_receiver_url(receiver)
        except ReceiverUrlError as error:
            yield f"receivers[{i}].{error}"


def read_error(path: Path) -> str | None:
    """Why the file cannot be read; None if it can."""
    try:
        with path.open("rb"):
            return None
    except OSError as error:
        return error.strerror


def profile_problems(config: Config) -> Iterator[str]:
    for i, profile in enumerate(config.profiles):
        try:
            re.compile(profile.match)
        except re.error as error:
            yield f"profiles[{i}].match: not a regular expression: {error}"


def is_loopback(host: str) -> bool:
    """True if only this machine can connect. A name other than localhost may resolve to anything: False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
