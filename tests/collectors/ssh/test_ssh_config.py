"""How a node's name is resolved from ssh_config, the [ssh] table and the defaults."""

from __future__ import annotations

import getpass
import itertools
from pathlib import Path

import pytest

from wattwatch.collectors.ssh.model import ConnectionFailure, SshSettings
from wattwatch.collectors.ssh.ssh_config import MAX_GATEWAYS, HostRoute, Resolution, resolve_host


def resolution(tmp_path: Path, text: str, node: str = "gpu-01", settings: SshSettings | None = None) -> Resolution:
    config = tmp_path / "config"
    config.write_text(text)
    changes = settings or SshSettings()
    return resolve_host(
        node,
        SshSettings(
            user=changes.user,
            port=changes.port,
            config_file=config,
            known_hosts_file=changes.known_hosts_file,
            identity_files=changes.identity_files,
            certificate_file=changes.certificate_file,
        ),
    )


def route(tmp_path: Path, text: str, node: str = "gpu-01", settings: SshSettings | None = None) -> HostRoute:
    return resolution(tmp_path, text, node, settings).route


def test_a_name_without_any_configuration_is_itself(tmp_path: Path) -> None:
    found = route(tmp_path, "")
    assert (found.hostname, found.port, found.user) == ("gpu-01", 22, getpass.getuser())
    assert found.host_key_name == "gpu-01"
    assert found.identity_files[0] == Path.home() / ".ssh/id_ed25519"
    assert not found.identities_named


def test_supported_directives_and_their_tokens_are_applied(tmp_path: Path) -> None:
    found = route(
        tmp_path,
        """
        Host gpu-*
            HostName %h.cluster.example
            Port=2222
            User trainer
            IdentityFile ~/.ssh/%h-%r
            IdentityFile "/keys/with space"
            IdentitiesOnly yes
            CertificateFile /keys/%n-cert.pub
            UserKnownHostsFile ~/.ssh/a /etc/%h/b
            GlobalKnownHostsFile none
        """,
    )
    assert found.hostname == "gpu-01.cluster.example"
    assert (found.port, found.user, found.only_named_agent_keys) == (2222, "trainer", True)
    assert found.identity_files == (
        Path.home() / ".ssh/gpu-01.cluster.example-trainer",
        Path("/keys/with space"),
    )
    assert found.certificate_files == (Path("/keys/gpu-01-cert.pub"),)
    assert found.known_hosts_files == (Path.home() / ".ssh/a", Path("/etc/gpu-01.cluster.example/b"))
    assert found.host_key_name == "[gpu-01.cluster.example]:2222"


def test_the_ssh_table_and_the_name_itself_override_ssh_config(tmp_path: Path) -> None:
    text = "Host *\n User a\n Port 1\n IdentityFile /a\n UserKnownHostsFile /a\n"
    settings = SshSettings(user="b", port=2, identity_files=(Path("/b"),), known_hosts_file=Path("/b"))
    found = route(tmp_path, text, "gpu-01", settings)
    assert (found.user, found.port, found.identity_files) == ("b", 2, (Path("/b"),))
    assert found.known_hosts_files == (Path("/b"),)
    assert route(tmp_path, text, "c@gpu-01", settings).user == "c"


def test_a_chain_of_gateways_is_followed_each_with_its_own_configuration(tmp_path: Path) -> None:
    found = route(
        tmp_path,
        """
        Host gpu-01
            ProxyJump ops@outer:2201,inner
        Host outer
            HostName 10.0.0.1
        Host inner
            HostName 10.0.0.2
            User nobody
        """,
        settings=SshSettings(port=7),
    )
    assert found.port == 7
    assert found.via is not None
    assert (found.via.hostname, found.via.user, found.via.port) == ("10.0.0.2", "nobody", 22)
    assert found.via.via is not None
    assert (found.via.via.hostname, found.via.via.user, found.via.via.port) == ("10.0.0.1", "ops", 2201)
    assert found.first_gateway == found.via.via


def test_proxyjump_none_ends_the_chain_and_a_loop_is_an_error(tmp_path: Path) -> None:
    assert route(tmp_path, "Host gpu-01\n ProxyJump none\nHost *\n ProxyJump gate\n").via is None
    with pytest.raises(ConnectionFailure, match=r"loop: gpu-01 -> gate -> gate"):
        route(tmp_path, "Host *\n ProxyJump gate\n")


def test_a_long_chain_of_gateways_is_not_called_a_loop(tmp_path: Path) -> None:
    def chain(gateways: int) -> str:
        names = ["gpu-01", *(f"gate-{number}" for number in range(gateways))]
        return "".join(f"Host {name}\n ProxyJump {via}\n" for name, via in itertools.pairwise(names))

    assert route(tmp_path, chain(MAX_GATEWAYS)).via is not None
    with pytest.raises(ConnectionFailure, match=r"uses more than 8 gateways: gpu-01 -> gate-0 -> .* -> gate-8$"):
        route(tmp_path, chain(MAX_GATEWAYS + 1))


def test_includes_are_read_in_place_and_what_follows_stays_in_its_block(tmp_path: Path) -> None:
    (tmp_path / "one.conf").write_text("Host other\n  User wrong\nHost gpu-*\n  User right\n")
    text = f"Include {tmp_path}/*.conf\nHost gpu-01\n  Include {tmp_path}/one.conf\n  Port 99\n"
    found = route(tmp_path, text)
    assert (found.user, found.port) == ("right", 99)
    assert route(tmp_path, text, "gpu-02").port == 22


def test_an_included_file_that_changes_is_read_again(tmp_path: Path) -> None:
    included = tmp_path / "one.conf"
    included.write_text("Host *\n  User before\n")
    assert route(tmp_path, f"Include {included}\n").user == "before"
    included.write_text("Host *\n  User after_\n")
    assert route(tmp_path, f"Include {included}\n").user == "after_"


def test_unsupported_directives_are_noted_once_and_never_misapplied(tmp_path: Path) -> None:
    text = """
    Match exec "test -e /vpn"
        HostName wrong
    Match localnetwork 10.0.0.0/8
        HostName wrong
    Host *
        StrictHostKeyChecking no
        KnownHostsCommand /bin/x
    Match host gpu-01 user x
        Port 3
    Match originalhost gpu-01
        Port 4
    """
    found = resolution(tmp_path, text)
    assert (found.route.hostname, found.route.port) == ("gpu-01", 4)
    notes = "\n".join(found.notes)
    assert "Match exec is not supported" in notes
    assert "Match localnetwork is not supported" in notes
    assert "StrictHostKeyChecking no is ignored" in notes
    assert "KnownHostsCommand is not supported; use UserKnownHostsFile" in notes
    assert len(found.notes) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Host *\n ProxyCommand nc %h %p\n", "ProxyCommand"),
        ("Host *\n Port many\n", "expected a number from 1 to 65535"),
        ("Host *\n ProxyJump gate:x\n", "ProxyJump 'gate:x'"),
        ("Host *\n ProxyJump ,\n", "contains no host"),
        ("Host 'open\n", "is not a valid ssh_config"),
    ],
)
def test_an_unsupported_configuration_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConnectionFailure, match=says):
        route(tmp_path, text)


def test_a_configured_file_that_is_missing_is_an_error_and_the_default_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailure, match="cannot be read: No such file"):
        resolve_host("gpu-01", SshSettings(config_file=tmp_path / "absent"))
    assert resolve_host("gpu-01", SshSettings()).route.name == "gpu-01"
