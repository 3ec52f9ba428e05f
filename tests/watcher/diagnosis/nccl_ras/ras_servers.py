"""Servers on the loopback interface that answer like NCCL's RAS, or that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.tools import DEADLINE_SECONDS

Script = Callable[[socket.socket], None]


class RasServer:
    """Runs `script` for each connection, one at a time, in a separate thread."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.commands: list[str] = []
        self.ended = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=DEADLINE_SECONDS)

    def close(self) -> None:
        self.ended.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self.listener.close()
        self.thread.join(DEADLINE_SECONDS)

    def _serve(self) -> None:
        while not self.ended.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(DEADLINE_SECONDS)
                self.script(connection)


@contextmanager
def serving(script: Callable[[RasServer], Script]) -> Iterator[RasServer]:
    server = RasServer(lambda connection: script(server)(connection))
    try:
        yield server
    finally:
        server.close()


def commands(server: RasServer, connection: socket.socket) -> Iterator[str]:
    for line in connection.makefile("rb"):
        server.commands.append(line.decode().strip())
        yield server.commands[-1]


def speaks_ras(
    report: Callable[[], bytes], *, knows_json: bool = True, line_end: bytes = b"\n"
) -> Callable[[RasServer], Script]:
    """Like NCCL: one reply per line, then the report, then the end of the connection."""

    def script(server: RasServer) -> Script:
        def talk(connection: socket.socket) -> None:
            for command in commands(server, connection):
                if command.startswith("CLIENT PROTOCOL"):
                    connection.sendall(b"SERVER PROTOCOL 2" + line_end)
                elif command.startswith("TIMEOUT") or (command.startswith("SET FORMAT") and knows_json):
                    connection.sendall(b"OK" + line_end)
                elif command == "VERBOSE STATUS":
                    connection.sendall(report())
                    return
                else:
                    connection.sendall(b"ERROR: Unknown command " + command.encode() + line_end)

        return talk

    return script


def sends(data: bytes) -> Callable[[RasServer], Script]:
    """Ignores the request: sends these bytes, then closes."""
    return lambda server: lambda connection: connection.sendall(data)


def sends_and_stalls(data: bytes) -> Callable[[RasServer], Script]:
    """Sends these bytes, then nothing more, and does not close."""

    def script(server: RasServer) -> Script:
        def talk(connection: socket.socket) -> None:
            connection.sendall(data)
            server.ended.wait(DEADLINE_SECONDS)

        return talk

    return script


def floods(server: RasServer) -> Script:
    """Never stops sending."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
        while not server.ended.is_set():
            connection.sendall(b"x" * 65536)

    return talk
