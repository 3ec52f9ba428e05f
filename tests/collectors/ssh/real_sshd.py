"""Real OpenSSH servers on loopback ports: keys, configuration, start and stop."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.tools import DEADLINE_SECONDS, require_tool
from wattwatch.collectors.ssh.model import SshSettings

MARK: Final = "WATTWATCH_TEST_MARK"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def new_key(path: Path, *options: str) -> Path:
    """A private key in `path`, its public half beside it."""
    subprocess.run(
        [require_tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", *options, "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


class RealSshd:
    """Starts at once; `options` are lines of its sshd_config. What it starts carries MARK=`mark` and has an empty home:
    bash under sshd reads ~/.bashrc, and what that starts here is neither ours to wait for nor to count."""

    def __init__(self, directory: Path, name: str = "node", *options: str) -> None:
        self.sshd = require_tool("sshd")
        self.directory = directory
        self.name = name
        self.port = free_port()
        self.mark = f"{directory}:{name}"
        self.options = options
        self.host_key = new_key(directory / f"{name}_host_key")
        self.authorized_keys = directory / f"{name}_authorized_keys"
        self.authorized_keys.touch()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def public_host_key(self) -> str:
        return " ".join(Path(f"{self.host_key}.pub").read_text().split()[:2])

    def authorize(self, key: Path) -> None:
        with self.authorized_keys.open("a") as file:
            file.write(Path(f"{key}.pub").read_text())

    def start(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        config = self.directory / f"{self.name}_sshd_config"
        home = self.directory / f"{self.name}_home"
        home.mkdir(exist_ok=True)
        # sshd takes its first SetEnv line and no other.
        environment = [option.removeprefix("SetEnv ") for option in self.options if option.startswith("SetEnv ")]
        lines = [
            " ".join(["SetEnv", f"{MARK}={self.mark}", f"HOME={home}", *environment]),
            *(option for option in self.options if not option.startswith("SetEnv ")),  # the first value counts
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.authorized_keys}",
            f"PidFile {self.directory}/{self.name}.pid",
            "UsePAM no",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "MaxStartups 100",
            "PrintMotd no",
        ]
        config.write_text("\n".join(lines) + "\n")
        self.log = self.directory / f"{self.name}.log"
        self.process = subprocess.Popen([self.sshd, "-D", "-f", str(config), "-E", str(self.log)])
        self._await_listening()

    def _await_listening(self) -> None:
        ends = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < ends:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError(f"sshd does not listen: {self.log.read_text()}")

    def sessions(self) -> list[int]:
        """Pids of the processes that sshd made for connections, from /proc."""
        assert self.process is not None
        return descendants(self.process.pid, "sshd")

    def kill_sessions(self) -> None:
        for pid in self.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal_all(self, number: int) -> None:
        """To the listener and every session."""
        assert self.process is not None
        for pid in (self.process.pid, *self.sessions()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End the listener and its sessions, by pid."""
        if self.process is None:
            return
        self.signal_all(signal.SIGCONT)
        sessions = self.sessions()
        self.process.terminate()
        self.process.wait(DEADLINE_SECONDS)
        for pid in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process = None

    def left_behind(self) -> list[str]:
        """Command lines of processes that carry our mark: whatever a session started."""
        return [f"{pid} {command[:60]!r}" for pid, command in self._marked()]

    def kill_left_behind(self) -> None:
        for pid, _ in self._marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _marked(self) -> list[tuple[int, bytes]]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append((int(entry.name), (entry / "cmdline").read_bytes()))
        return found


def descendants(pid: int, name: str) -> list[int]:
    """Processes below `pid` with this comm."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                text = (entry / "stat").read_text()
                comm, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
                parents[int(entry.name)] = (int(rest[1]), comm)
    found, frontier = [], {pid}
    while frontier:
        children = {child for child, (parent, _) in parents.items() if parent in frontier}
        found += [child for child in children if parents[child][1] == name]
        frontier = children
    return found


class Site:
    """A directory with our key, known_hosts, an ssh_config, and the servers in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = new_key(directory / "client_key")
        self.known_hosts = directory / "known_hosts"
        self.config = directory / "ssh_config"
        self.known_hosts.touch()
        self.config.touch()
        self.servers: list[RealSshd] = []

    def server(self, name: str = "node", *options: str) -> RealSshd:
        """A node that is reachable by its name and known."""
        server = RealSshd(self.directory, name, *options)
        self.servers.append(server)
        server.authorize(self.key)
        self.know(server)
        self.configure(server)
        return server

    def know(self, server: RealSshd) -> None:
        with self.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{server.port} {server.public_host_key()}\n")

    def configure(self, server: RealSshd, *lines: str) -> None:
        with self.config.open("a") as file:
            file.write(
                f"Host {server.name}\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
                f"  IdentityFile {self.key}\n  UserKnownHostsFile {self.known_hosts}\n"
                + "".join(f"  {line}\n" for line in lines)
            )

    def settings(self, **changes: object) -> SshSettings:
        values: dict[str, object] = {"config_file": self.config, "connect_timeout_seconds": DEADLINE_SECONDS, **changes}
        return SshSettings(**values)  # type: ignore[arg-type]  # tests pass keyword sets

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
            server.kill_left_behind()


@contextlib.contextmanager
def site(directory: Path) -> Iterator[Site]:
    made = Site(directory)
    try:
        yield made
    finally:
        made.stop()
