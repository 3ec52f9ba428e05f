"""Keys, passphrases, certificates, agents and gateways, against real OpenSSH servers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from pathlib import Path

import paramiko
import pytest
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED

from tests.collectors.ssh.real_sshd import Site, new_key
from tests.collectors.ssh.running_fleet import running_fleet
from tests.collectors.ssh.test_lost_connections import until_nothing_is_left
from tests.tools import DEADLINE_SECONDS, require_tool
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import UnreachableCause
from wattwatch.collectors.ssh.ssh_config import resolve_host


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_keys_with_a_passphrase(here: Site, kind: str) -> None:
    node = here.server()
    key = new_key(here.directory / "locked", "-t", kind, "-N", "open sesame", "-a", "1")
    node.authorize(key)
    with running_fleet(here.settings(identity_files=(key,), passphrase="open sesame")) as watch:
        watch.until_lines(1)
    with running_fleet(here.settings(identity_files=(key,))) as watch:
        assert "needs a passphrase: set [ssh] passphrase_file" in watch.until_status(HostStatus.AUTH_FAILED).detail
    with running_fleet(here.settings(identity_files=(key,), passphrase="wrong")) as watch:
        assert "cannot be decrypted with this passphrase" in watch.until_status(HostStatus.AUTH_FAILED).detail


@pytest.mark.parametrize("beside", [True, False], ids=["beside the key", "named"])
def test_a_user_certificate_is_sufficient(here: Site, beside: bool) -> None:
    authority, key = new_key(here.directory / "authority"), new_key(here.directory / "certified")
    node = here.server("node", f"TrustedUserCAKeys {authority}.pub")
    node.authorized_keys.write_text("")
    user = resolve_host("node", here.settings()).route.user
    command = [require_tool("ssh-keygen"), "-q", "-s", str(authority), "-I", "us", "-n", user, f"{key}.pub"]
    subprocess.run(command, check=True, capture_output=True)
    certificate = here.directory / "certified-cert.pub"
    if not beside:
        certificate = certificate.rename(here.directory / "elsewhere.pub")
    with running_fleet(here.settings(identity_files=(key,), certificate_file=None if beside else certificate)) as watch:
        watch.until_lines(1)


def test_a_key_that_only_the_agent_has(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    node = here.server()
    key = new_key(here.directory / "agents")
    node.authorized_keys.write_text(Path(f"{key}.pub").read_text())
    place = str(here.directory / "agent.sock")
    agent = subprocess.Popen([require_tool("ssh-agent"), "-D", "-a", place], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", place)
        add = [require_tool("ssh-add"), "-q", str(key)]
        while subprocess.run(add, capture_output=True, check=False).returncode == 2:  # it does not listen yet
            assert agent.poll() is None
        with running_fleet(here.settings()) as watch:
            assert watch.until_status(HostStatus.AUTH_FAILED)
        with running_fleet(here.settings(use_agent=True)) as watch:
            watch.until_lines(1)
    finally:
        agent.terminate()
        agent.wait(DEADLINE_SECONDS)


def test_missing_and_broken_keys_are_listed(here: Site) -> None:
    here.server()
    broken = here.directory / "broken"
    broken.write_text("not a key\n")
    absent = here.directory / "absent"
    with running_fleet(here.settings(identity_files=(absent, broken))) as watch:
        detail = watch.until_status(HostStatus.AUTH_FAILED).detail
    assert f"{absent} does not exist" in detail
    assert f"{broken}: the file is not a private key" in detail


def test_two_gateways_in_a_row_and_nodes_that_share_them(here: Site) -> None:
    outer, inner = here.server("outer"), here.server("inner")
    nodes = [here.server(f"node{number}") for number in range(3)]
    text = here.config.read_text()
    here.config.write_text("".join(f"Host {node.name}\n  ProxyJump outer,inner\n" for node in nodes) + text)
    names = tuple(node.name for node in nodes)
    with running_fleet(here.settings(), nodes=names, clock=Clock(2)) as watch:
        for name in names:
            watch.until_lines(2, name)
        assert len(outer.sessions()) == 1, "one connection to each gateway, whatever is behind it"
        assert len(inner.sessions()) == 1
        inner.kill_sessions()
        for name in names:
            watch.until(lambda name=name: watch.link(name).logins == 2, f"{name} is back")  # type: ignore[misc]  # a default argument binds the loop's value
            watch.until_lines(1, name)
    for node in nodes:
        until_nothing_is_left(node)


def test_failures_at_a_gateway_are_attributed_to_the_gateway(here: Site) -> None:
    gate = here.server("gate", "AllowTcpForwarding no")
    here.server("node")
    text = here.config.read_text()
    here.config.write_text("Host node\n  ProxyJump gate\n" + text)
    with running_fleet(here.settings()) as watch:
        watch.until(lambda: "gateway gate does not allow forwarding" in watch.link().detail, "forbidden forwarding")
        assert watch.link().cause is UnreachableCause.GATEWAY
    gate.authorized_keys.write_text("")
    with running_fleet(here.settings()) as watch:
        detail = watch.until_status(HostStatus.AUTH_FAILED).detail
    assert detail.startswith("gateway gate: ")


def test_a_port_without_ssh_is_distinguished_from_a_silent_one(here: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            while True:
                connection, _ = web.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x\r\n" * 200)
                    if b"stop" in connection.recv(100):
                        return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        ports = {"silent": silent.getsockname()[1], "web": web.getsockname()[1]}
        here.config.write_text(
            "".join(f"Host {name}\n HostName 127.0.0.1\n Port {port}\n" for name, port in ports.items())
        )
        with running_fleet(here.settings(connect_timeout_seconds=1.0), nodes=("silent", "web")) as watch:
            watch.until(lambda: "sent no SSH banner" in watch.link("silent").detail, "no banner")
            watch.until(lambda: "not an SSH server" in watch.link("web").detail, "not SSH")
            causes = watch.link("silent").cause, watch.link("web").cause
            assert causes == (UnreachableCause.SILENT, UnreachableCause.HANDSHAKE)
        with socket.create_connection(web.getsockname()) as end:
            end.sendall(b"stop")
        thread.join(DEADLINE_SECONDS)


def test_a_name_that_does_not_resolve_and_a_wrong_ssh_config_say_nothing_about_the_node(here: Site) -> None:
    here.config.write_text("Host typo\n HostName gpu-0l.invalid\nHost proxied\n ProxyCommand nc %h %p\n")
    with running_fleet(here.settings(), nodes=("typo", "proxied")) as watch:
        watch.until(lambda: "cannot resolve the name" in watch.link("typo").detail, "no such name")
        watch.until(lambda: "ProxyCommand is not supported" in watch.link("proxied").detail, "not supported")
        causes = watch.link("typo").cause, watch.link("proxied").cause
        assert causes == (UnreachableCause.NAME, UnreachableCause.CONFIGURATION)


def test_logins_are_limited_and_every_node_gets_its_turn(here: Site) -> None:
    node = here.server("node", "MaxStartups 2:100:2")
    here.config.write_text(here.config.read_text().replace("Host node\n", "Host node*\n"))
    names = tuple(f"node{number}" for number in range(8))
    with running_fleet(here.settings(max_simultaneous_logins=2), nodes=names) as watch:
        for name in names:
            watch.until(lambda name=name: watch.link(name).lines > 0, f"a line of {name}")  # type: ignore[misc]  # a default argument binds the loop's value
    until_nothing_is_left(node)


class NeverStarts(paramiko.ServerInterface):
    """Takes any key and any session, and never answers what is to be run."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.over = threading.Event()

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.asked.set()
        self.over.wait()
        return False


def test_a_login_that_overruns_is_ended_through_its_socket(here: Site) -> None:
    """paramiko waits for the answer to exec without limit; the fleet shuts the socket and goes on."""
    host_key = paramiko.Ed25519Key(filename=str(new_key(here.directory / "host")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        here.known_hosts.write_text(f"[127.0.0.1]:{port} ssh-ed25519 {host_key.get_base64()}\n")
        here.config.write_text(
            f"Host node\n HostName 127.0.0.1\n Port {port}\n IdentityFile {here.key}\n"
            f" UserKnownHostsFile {here.known_hosts}\n"
        )
        for seconds in (0.5, 5.0, 50.0):  # a slow machine needs more to come as far as the request
            server = NeverStarts()
            threading.Thread(target=serve_once, args=(listener, host_key, server), daemon=True).start()
            with running_fleet(here.settings(connect_timeout_seconds=seconds)) as watch:
                watch.until(lambda: watch.link().failures == 1, "the end of the login")
                detail = watch.link().detail
                assert watch.fleet.abandoned_logins() == 0
            server.over.set()
            if server.asked.is_set():
                break
    assert server.asked.is_set()
    assert "starting the probe" in detail or "start the probe" in detail


def serve_once(listener: socket.socket, host_key: paramiko.PKey, server: NeverStarts) -> None:
    transport = paramiko.Transport(listener.accept()[0])
    transport.add_server_key(host_key)
    with contextlib.suppress(paramiko.SSHException, EOFError):  # the login was ended before
        transport.start_server(server=server)
