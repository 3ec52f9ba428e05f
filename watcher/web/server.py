"""uvicorn in a thread: the service owns the socket and the signals, and stops the server from outside."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from typing import Final

import uvicorn
from fastapi import FastAPI

from wattwatch.watcher.web.events import EventHub

# The whole service must stop within 5 s; requests take milliseconds.
GRACEFUL_SECONDS: Final = 2
# The service compares the counter about every 5 s, or four times within the watchdog's limit.
HEARTBEAT_SECONDS: Final = 0.5


class ListenError(Exception):
    """The server cannot listen on the address; the text is one sentence."""


def open_listener(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises ListenError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        endpoint = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise ListenError(
                f"{endpoint} is in use, perhaps by another wattwatch. Stop that process, or set another "
                "address in watcher.listen"
            ) from None
        raise ListenError(f"cannot listen on {endpoint}: {error.strerror or error}") from None


class WebServer:
    """Serves an application on a socket until `begin_stop`."""

    def __init__(self, app: FastAPI, listener: socket.socket, hub: EventHub) -> None:
        config = uvicorn.Config(
            app,
            # Logging belongs to the service; an access log would fill the journal with scrapes.
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACEFUL_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._hub = hub
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="web", daemon=True)
        self.heartbeats = 0  # increases while the event loop runs

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._server.started and self._thread.is_alive()

    def begin_stop(self) -> None:
        """End the event streams first: an open one would delay the server's exit until its graceful timeout."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop may close between the check and the call
                self._loop.call_soon_threadsafe(self._hub.stop)
        self._server.should_exit = True

    def join(self, timeout_seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        heartbeat = asyncio.create_task(self._count_heartbeats())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            heartbeat.cancel()

    async def _count_heartbeats(self) -> None:
        while True:
            self.heartbeats += 1
            await asyncio.sleep(HEARTBEAT_SECONDS)
