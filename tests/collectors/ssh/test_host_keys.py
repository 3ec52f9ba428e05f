"""known_hosts as OpenSSH reads it: who is accepted, who is not, and in which words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import paramiko
import pytest

from tests.collectors.ssh.real_sshd import Site, new_key
from tests.collectors.ssh.running_fleet import running_fleet
from tests.tools import require_tool
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.host_keys import known_host_keys, verify_host_key
from wattwatch.collectors.ssh.model import ConnectionFailure, SshSettings
from wattwatch.collectors.ssh.ssh_config import HostRoute, resolve_host


def route_to(tmp_path: Path, lines: str, hostname: str = "gpu-01", port: int = 22) -> HostRoute:
    known, config = tmp_path / "known_hosts", tmp_path / "config"
    known.write_text(lines)
    config.write_text("")
    return resolve_host(hostname, SshSettings(config_file=config, known_hosts_file=known, port=port)).route


@pytest.fixture
def key(tmp_path: Path) -> paramiko.PKey:
    return paramiko.Ed25519Key(filename=str(new_key(tmp_path / "host")))


@pytest.fixture
def stranger(tmp_path: Path) -> paramiko.PKey:
    return paramiko.Ed25519Key(filename=str(new_key(tmp_path / "stranger")))


def accepts(route: HostRoute, key: paramiko.PKey) -> bool:
    try:
        verify_host_key(route, key, known_host_keys(route))
    except ConnectionFailure as refusal:
        return refusal.status is not HostStatus.HOST_KEY_CHANGED
    return True


@pytest.mark.parametrize(
    ("names", "hostname", "port", "accepted"),
    [
        ("gpu-01", "gpu-01", 22, True),
        ("other,gpu-01,10.0.0.1", "gpu-01", 22, True),
        ("GPU-01", "gpu-01", 22, True),
        ("gpu-0?", "gpu-01", 22, True),
        ("gpu-*,!gpu-01", "gpu-01", 22, False),
        ("[gpu-01]:2222", "gpu-01", 2222, True),
        ("[gpu-01]:2222", "gpu-01", 22, False),
        ("[gpu-01]:2222", "gpu-01", 2223, False),
        ("gpu-01", "gpu-01", 2222, True),  # as OpenSSH: known without its port
        ("gpu-010", "gpu-01", 22, False),
    ],
)
def test_names_of_a_line(
    tmp_path: Path, key: paramiko.PKey, names: str, hostname: str, port: int, accepted: bool
) -> None:
    route = route_to(tmp_path, f"{names} ssh-ed25519 {key.get_base64()} comment\n", hostname, port)
    assert accepts(route, key) is accepted


def test_hashed_names_are_found(tmp_path: Path, key: paramiko.PKey) -> None:
    route = route_to(tmp_path, f"[gpu-01]:2222 ssh-ed25519 {key.get_base64()}\n", port=2222)
    subprocess.run(
        [require_tool("ssh-keygen"), "-q", "-H", "-f", str(route.known_hosts_files[0])], check=True, capture_output=True
    )
    assert "gpu-01" not in route.known_hosts_files[0].read_text()
    assert accepts(route, key)


def test_an_unknown_key_lists_the_files_searched_and_the_command_to_run(tmp_path: Path, key: paramiko.PKey) -> None:
    route = route_to(tmp_path, "")
    with pytest.raises(ConnectionFailure) as found:
        verify_host_key(route, key, known_host_keys(route))
    assert "unknown" in found.value.detail
    assert key.fingerprint in found.value.detail
    assert str(route.known_hosts_files[0]) in found.value.detail
    assert "ssh-keyscan -p 22 gpu-01 | ssh-keygen -lf -" in found.value.advice


def test_a_changed_key_shows_both_fingerprints_and_the_line(
    tmp_path: Path, key: paramiko.PKey, stranger: paramiko.PKey
) -> None:
    route = route_to(tmp_path, f"# a comment\n\ngpu-01 ssh-ed25519 {key.get_base64()}\n")
    with pytest.raises(ConnectionFailure) as found:
        verify_host_key(route, stranger, known_host_keys(route))
    assert "CHANGED" in found.value.detail
    assert stranger.fingerprint in found.value.detail
    assert f"{key.fingerprint} ({route.known_hosts_files[0]}:3)" in found.value.detail


def test_a_revoked_key_is_rejected_even_if_another_line_has_it(tmp_path: Path, key: paramiko.PKey) -> None:
    line = f"ssh-ed25519 {key.get_base64()}"
    assert not accepts(route_to(tmp_path, f"gpu-01 {line}\n@revoked * {line}\n"), key)


def test_damaged_lines_are_ignored(tmp_path: Path, key: paramiko.PKey) -> None:
    damaged = "gpu-01\ngpu-01 ssh-ed25519\n|1|x ssh-ed25519 y\ngpu-01 ssh-ed25519 %%%\n\xff\n@revoked\n"
    assert accepts(route_to(tmp_path, f"{damaged}gpu-01 ssh-ed25519 {key.get_base64()}\n"), key)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        (["-h", "-n", "127.0.0.1"], True),
        (["-h"], True),  # without names: any
        (["-h", "-n", "elsewhere"], False),
        (["-n", "127.0.0.1"], False),  # a user certificate
        (["-h", "-n", "127.0.0.1", "-V", "20200101:20200102"], False),  # expired
    ],
    ids=["for this host", "for any host", "for another host", "user certificate", "expired"],
)
def test_a_host_certificate_is_accepted_for_a_host_without_a_line(
    here: Site, options: list[str], accepted: bool
) -> None:
    authority = new_key(here.directory / "authority")
    node = here.server("node", f"HostCertificate {here.directory}/node_host_key-cert.pub")
    here.known_hosts.write_text(f"@cert-authority 127.0.* {Path(f'{authority}.pub').read_text()}")
    subprocess.run(
        [require_tool("ssh-keygen"), "-q", "-s", str(authority), "-I", "node", *options, f"{node.host_key}.pub"],
        check=True,
        capture_output=True,
    )
    node.stop()
    node.start()
    with running_fleet(here.settings()) as watch:
        if accepted:
            watch.until_lines(1)
        else:
            assert "certificate" in watch.until_status(HostStatus.HOST_KEY_CHANGED).detail


def test_a_certificate_of_an_unknown_authority_is_rejected(here: Site) -> None:
    ours, theirs = new_key(here.directory / "ours"), new_key(here.directory / "theirs")
    node = here.server("node", f"HostCertificate {here.directory}/node_host_key-cert.pub")
    here.known_hosts.write_text(f"@cert-authority * {Path(f'{ours}.pub').read_text()}")
    subprocess.run(
        [require_tool("ssh-keygen"), "-q", "-s", str(theirs), "-I", "x", "-h", f"{node.host_key}.pub"],
        check=True,
        capture_output=True,
    )
    node.stop()
    node.start()
    with running_fleet(here.settings()) as watch:
        assert "the authority that signed the certificate" in watch.until_status(HostStatus.HOST_KEY_CHANGED).detail
