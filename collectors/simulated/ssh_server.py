"""A real SSH server on loopback for one node (paramiko's server side), and Ed25519 keys made for one run.

An exec request starts `/bin/sh -c command` with the node's environment, as sshd would, and connects its pipes to the
channel. When the channel closes, the command's stdin closes and nothing else is done to it: the probe must then exit by
itself, which is what the tests verify. Commands that have not exited are known by pid.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
)


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


BLOCK_BYTES: Final = 32_768


class SshServerInterface(paramiko.ServerInterface):
    """What the server accepts: one public key, sessions, exec requests."""

    def __init__(self, server: NodeServer) -> None:
        self._server = server

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = key == self._server.client_key
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED if kind == "session" else OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        # The reply must be sent before any output, so the command is started in another thread.
        threading.Thread(target=self._server.run, args=(channel, command), daemon=True).start()
        return True


class NodeServer:
    """Listens from construction; serves from `start` until `stop`."""

    def __init__(
        self, name: str, host_key: paramiko.PKey, client_key: paramiko.PKey, home: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.host_key = host_key
        self.client_key = client_key
        self._home = home
        self._environment = dict(environment)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=32)
        self.port: int = self._socket.getsockname()[1]
        self._answers = threading.Event()  # cleared while the node is frozen
        self._answers.set()
        self._stopping = False
        self._lock = threading.Lock()
        self._transports: list[paramiko.Transport] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        threading.Thread(target=self._accept, name=f"accept {self.name}", daemon=True).start()

    def freeze(self) -> None:
        """Go silent: connections stay open, new ones get no banner."""
        self._answers.clear()

    def thaw(self) -> None:
        self._answers.set()

    def drop(self) -> None:
        """Close every connection, as a crash of the node does (a restart of sshd would not)."""
        with self._lock:
            transports, self._transports = self._transports, []
        for transport in transports:
            transport.close()

    def stop(self) -> None:
        """Accept no new connection and close the open ones."""
        self._stopping = True
        self._answers.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.drop()

    def running(self) -> list[subprocess.Popen[bytes]]:
        """Commands that have not exited."""
        with self._lock:
            self._children = [child for child in self._children if child.poll() is None]
            return list(self._children)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._answers.wait()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        transport.add_server_key(self.host_key)
        with self._lock:
            self._transports = [known for known in self._transports if known.is_active()] + [transport]
        try:
            transport.start_server(server=SshServerInterface(self), event=threading.Event())
        except (paramiko.SSHException, OSError, EOFError):
            transport.close()

    def run(self, channel: paramiko.Channel, command: bytes) -> None:
        """Run one command, from its start to its exit status."""
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._home,
            env=self._environment,
            start_new_session=True,
            bufsize=0,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        with self._lock:
            self._children.append(child)
        stdin_thread = threading.Thread(
            target=self._copy_stdin, args=(channel, child.stdin.fileno(), child), daemon=True
        )
        stderr_thread = threading.Thread(
            target=self._copy_output, args=(child.stderr.fileno(), channel.sendall_stderr), daemon=True
        )
        stdin_thread.start()
        stderr_thread.start()
        self._copy_output(child.stdout.fileno(), channel.sendall)
        child.stdout.close()
        stderr_thread.join()
        child.stderr.close()
        status = child.wait()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            channel.send_exit_status(status if status >= 0 else 128 - status)
        channel.close()

    def _copy_stdin(self, channel: paramiko.Channel, stdin: int, child: subprocess.Popen[bytes]) -> None:
        """Copy the channel to stdin; stdin closes when the channel ends, by the client or by the network."""
        try:
            while data := channel.recv(BLOCK_BYTES):
                view = memoryview(data)
                while view:
                    view = view[os.write(stdin, view) :]
        except OSError:
            pass  # the command has exited or does not read: nothing more to copy
        finally:
            assert child.stdin is not None
            child.stdin.close()

    def _copy_output(self, descriptor: int, send: Callable[[bytes], object]) -> None:
        """Copy a pipe to the channel, pausing while the node is frozen; ends with either of them."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := os.read(descriptor, BLOCK_BYTES):
                self._answers.wait()
                send(data)
