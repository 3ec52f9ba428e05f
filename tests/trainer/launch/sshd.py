"""Two "nodes" on one machine: an OpenSSH server each, on loopback, with keys of its own.

A simpler one than that of the watcher's tests, which the trainer's tests do not import.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tools import DEADLINE_SECONDS, require_tool
from wattwatch.trainer.launch.processes import descendants

NAMES = ("node-a", "node-b")


@dataclass
class TwoNodes:
    config: Path  # ssh_config that knows both
    servers: dict[str, subprocess.Popen[bytes]]

    def break_connections(self, name: str) -> None:
        """Kills the server's processes for its connections, but not what these have started."""
        for pid in descendants(self.servers[name].pid):
            with contextlib.suppress(OSError):
                if "sshd" in Path(f"/proc/{pid}/comm").read_text():
                    os.kill(pid, signal.SIGKILL)

    def close(self, name: str) -> None:
        self.servers[name].terminate()
        self.servers[name].wait(DEADLINE_SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def new_key(path: Path) -> Path:
    keygen = require_tool("ssh-keygen")
    subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL)
    return path


@contextlib.contextmanager
def two_nodes(directory: Path) -> Iterator[TwoNodes]:
    require_tool("ssh")
    directory.mkdir(parents=True)
    made = TwoNodes(directory / "ssh_config", {})
    key = new_key(directory / "client_key")
    try:
        for name in NAMES:
            made.servers[name] = _server(directory, name, key, made.config)
        yield made
    finally:
        for name, server in made.servers.items():
            made.break_connections(name)
            server.terminate()
            server.wait(DEADLINE_SECONDS)


def _server(directory: Path, name: str, key: Path, config: Path) -> subprocess.Popen[bytes]:
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    port, host_key, home = free_port(), new_key(directory / f"{name}_host_key"), directory / f"{name}_home"
    home.mkdir()
    lines = [
        # bash under sshd reads ~/.bashrc: an empty home keeps this machine's out
        *(f"SetEnv HOME={home}", f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {host_key}"),
        *(f"AuthorizedKeysFile {key}.pub", f"PidFile {directory}/{name}.pid", "UsePAM no", "StrictModes no"),
        *("PasswordAuthentication no", "PermitRootLogin yes", "MaxStartups 100", "PrintMotd no"),
    ]
    server_config = directory / f"{name}_sshd_config"
    server_config.write_text("\n".join(lines) + "\n")
    with config.open("a") as file:
        file.write(
            f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {key}\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
    log = directory / f"{name}.log"
    process = subprocess.Popen([require_tool("sshd"), "-D", "-f", str(server_config), "-E", str(log)])
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process
        time.sleep(0.02)
    process.kill()
    process.wait()
    raise AssertionError(f"sshd does not listen: {log.read_text()}")
