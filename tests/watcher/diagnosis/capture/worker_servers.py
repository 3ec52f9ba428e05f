"""Servers on worker sockets that answer like torch's, or in ways that no server should."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.tools import DEADLINE_SECONDS

CAPTURES = Path(__file__).parents[3] / "data" / "captures"
RECORD = (CAPTURES / "early_end" / "rank-00000.recorder.json").read_bytes()
STACKS = b'Thread 0x1 (most recent call first):\n  File "train.py", line 3 in step\n'

Talk = Callable[[socket.socket, threading.Event], None]


def request(connection: socket.socket) -> str:
    """The handler that is asked for."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = connection.recv(4096)
        if not part:
            return ""
        head += part
    return head.split()[1].decode().rpartition("/")[2]


def respond(connection: socket.socket, body: bytes, status: str = "200 OK") -> None:
    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def answers(connection: socket.socket, _: threading.Event) -> None:
    """On a machine without NCCL."""
    body = {"fr_trace_json": RECORD, "dump_traceback": STACKS}.get(request(connection))
    respond(connection, body or b"Handler not found", "200 OK" if body else "404 Not Found")


def of_nccl(connection: socket.socket, _: threading.Event) -> None:
    """NCCL has a recorder of its own; the general one exists and is empty."""
    bodies = {"fr_trace_json": b'{"version": "2.10"}', "dump_nccl_trace_json": RECORD, "dump_traceback": STACKS}
    respond(connection, bodies[request(connection)])


def of_nccl_and_gloo(connection: socket.socket, _: threading.Event) -> None:
    bodies = {"fr_trace_json": RECORD + b" ", "dump_nccl_trace_json": RECORD, "dump_traceback": STACKS}
    respond(connection, bodies[request(connection)])


def without_recorder(connection: socket.socket, _: threading.Event) -> None:
    if request(connection) == "dump_traceback":
        respond(connection, STACKS)
    else:
        respond(connection, b"Handler not found", "404 Not Found")


def stalls(connection: socket.socket, ended: threading.Event) -> None:
    request(connection)
    ended.wait(DEADLINE_SECONDS)


def drips(connection: socket.socket, ended: threading.Event) -> None:
    """Never silent, never done."""
    request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not ended.wait(0.05):
        connection.sendall(b"x")


def floods(connection: socket.socket, ended: threading.Event) -> None:
    request(connection)
    while not ended.is_set():
        connection.sendall(b"x" * 65536)


def is_no_torch(connection: socket.socket, _: threading.Event) -> None:
    request(connection)
    connection.sendall(b"220 mail.example.org ESMTP\r\n")


@contextlib.contextmanager
def serving(path: Path, talk: Talk) -> Iterator[None]:
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while not ended.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                talk(connection, ended)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_SECONDS)
