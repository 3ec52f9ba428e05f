"""Servers on loopback that answer as NCCL's RAS does, or badly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Script = Callable[[socket.socket], None]


class RasServer:
    """Runs `script` for each connection, one after another, in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.commands: list[str] = []
        self.ended = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=10)

    def close(self) -> None:
        self.ended.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self.listener.close()
        self.thread.join(10)

    def _serve(self) -> None:
        while not self.ended.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(10)
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
    """As NCCL does: one reply a line, the report, then the end of the connection."""

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
    """Whatever is asked: these bytes, then the end."""
    return lambda server: lambda connection: connection.sendall(data)


def sends_and_stalls(data: bytes) -> Callable[[RasServer], Script]:
    """These bytes, then not a word more, and no end."""

    def script(server: RasServer) -> Script:
        def talk(connection: socket.socket) -> None:
            connection.sendall(data)
            server.ended.wait(30)

        return talk

    return script


def floods(server: RasServer) -> Script:
    """Never stops."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n")
        while not server.ended.is_set():
            connection.sendall(b"x" * 65536)

    return talk
