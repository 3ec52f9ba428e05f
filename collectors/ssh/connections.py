"""Connections, and the gateways that they share: ProxyJump as channels over one transport to each gateway."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import paramiko

from wattwatch.collectors.ssh.keys import KeyRing
from wattwatch.collectors.ssh.login import (
    LoginAttempt,
    authenticate,
    end_transport,
    open_forwarded,
    open_tcp,
    shut_down_socket,
    ssh_handshake,
)
from wattwatch.collectors.ssh.model import ConnectionFailure, UnreachableCause, unreachable
from wattwatch.collectors.ssh.ssh_config import HostRoute

MAX_CHANNELS: Final = 32
"""Maximum number of nodes that one SSH connection to a gateway carries. These nodes share one thread and one TCP
window, and if the connection fails, all of them are lost. The limit keeps both effects small."""


@dataclass(slots=True, eq=False)
class SshConnection:
    """An authenticated transport. `close` may be called from any thread, and more than once."""

    transport: paramiko.Transport
    sock: socket.socket | paramiko.Channel
    gateway: SharedGateway | None = None

    def close(self) -> None:
        # The channel through the gateway is closed first, while its transport can still send the message.
        shut_down_socket(self.sock)
        end_transport(self.transport)
        gateway, self.gateway = self.gateway, None
        if gateway is not None:
            gateway.leave()

    def join(self, real_seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # never started
            self.transport.join(real_seconds)


@dataclass(slots=True, eq=False)
class SharedGateway:
    """A transport to a gateway, closed when the last connection through it is closed."""

    route: HostRoute
    connection: SshConnection
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> bool:
        """Reserve a channel; False if none is free or the transport has ended."""
        with self.lock:
            if self.users < 0 or self.users >= MAX_CHANNELS or not self.connection.transport.is_active():
                return False
            self.users += 1
            return True

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            last = self.users == 0
            if last:
                self.users = -1  # closed: `enter` fails from now on
        if last:
            self.connection.close()


class Connector:
    """Opens connections to nodes, directly or through gateways."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._logging_in: dict[HostRoute, threading.Lock] = {}  # one login at a time to each gateway
        self._shared: dict[HostRoute, list[SharedGateway]] = {}

    def connect(self, route: HostRoute, attempt: LoginAttempt) -> SshConnection:
        """An authenticated connection. Raises ConnectionFailure."""
        if route.via is None:
            return self._log_in(open_tcp(route, attempt), route, attempt, None)
        gateway = self._enter(route.via, attempt)
        try:
            return self._log_in(
                open_forwarded(gateway.connection.transport, route.via, route, attempt), route, attempt, gateway
            )
        except BaseException:
            gateway.leave()
            raise

    def _log_in(
        self,
        sock: socket.socket | paramiko.Channel,
        route: HostRoute,
        attempt: LoginAttempt,
        gateway: SharedGateway | None,
    ) -> SshConnection:
        try:
            transport = ssh_handshake(sock, route, attempt)
        except BaseException:  # an abort from another thread included: a socket must never leak
            shut_down_socket(sock)
            sock.close()
            raise
        try:
            authenticate(transport, route, attempt, self._keys)
        except BaseException:
            end_transport(transport)
            raise
        return SshConnection(transport, sock, gateway)

    def _enter(self, via: HostRoute, attempt: LoginAttempt) -> SharedGateway:
        """A gateway with a channel reserved on it; logs in to the gateway where no connection has one free."""
        attempt.enter(f"waiting for gateway {via.name}", 4 * attempt.timeout_seconds)
        # One login per gateway at a time: otherwise the first wave of nodes would each open a connection to it, and its
        # sshd would drop some of them (MaxStartups).
        with self._turn(via, attempt):
            shared = [gateway for gateway in self._shared.get(via, []) if gateway.connection.transport.is_active()]
            for gateway in shared:
                if gateway.enter():
                    return gateway
            try:
                gateway = SharedGateway(via, self.connect(via, attempt))
            except ConnectionFailure as failure:
                detail = f"gateway {via.name}: {failure.detail}"
                raise ConnectionFailure(failure.status, detail, failure.advice) from None
            gateway.enter()  # cannot fail: the connection is new and not yet visible to others
            self._shared[via] = [*shared, gateway]
            return gateway

    @contextlib.contextmanager
    def _turn(self, via: HostRoute, attempt: LoginAttempt) -> Iterator[None]:
        with self._lock:
            lock = self._logging_in.setdefault(via, threading.Lock())
        # Up to four stages of a login that is ahead of us, then report it instead of waiting for ever.
        if not lock.acquire(timeout=4 * attempt.real_timeout_seconds):
            raise unreachable(
                f"another login to gateway {via.name} is still in progress", cause=UnreachableCause.GATEWAY
            )
        try:
            yield
        finally:
            lock.release()
