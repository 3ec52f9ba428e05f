"""One login, from a name to an authenticated transport: TCP or gateway, banner, host key, authentication.

Every stage has its own deadline, recorded in the `LoginAttempt`, so that the fleet can end a stage that overruns by
closing its socket: paramiko waits without limit in places (`Channel.exec_command`), and a name server can take longer
than any timeout that was asked for.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.host_keys import known_host_keys, prefer_known_types, verify_host_key
from wattwatch.collectors.ssh.keys import KeyRing
from wattwatch.collectors.ssh.model import ConnectionFailure, UnreachableCause, error_text, tcp_failure, unreachable
from wattwatch.collectors.ssh.ssh_config import HostRoute

STACK_BYTES: Final = 512 * 1024
"""Stack size of the thread of one SSH connection. Only pages in use cost memory, but the default of 8 MB would reserve
8 GB of address space for 1,000 nodes."""
POLL_SECONDS: Final = 5.0
"""The thread of an idle SSH connection wakes up at this interval. With paramiko's default of 0.1 s, waking up took two
thirds of the CPU time of watching a node."""
LOOKING_UP: Final = "looking up"
"""The name of a stage begins with this while the host name is looked up: nothing has been sent to the node yet."""
REKEY_WAIT_SECONDS: Final = 5.0
"""A message may wait for this long while SSH exchanges new keys. Chosen, not measured: far longer than a round trip."""

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it logs tracebacks; what matters is in our ConnectionFailure


@dataclass(slots=True, eq=False)
class LoginAttempt:
    """A login in progress: its stage, the stage's deadline, and the way to abort it. Shared between threads."""

    node: str
    clock: Clock
    timeout_seconds: float  # for each stage
    stage: str = "waiting"
    deadline_seconds: float = 0.0  # of the current stage, on `clock`
    aborted: bool = False
    notes: tuple[str, ...] = ()
    _socket: socket.socket | paramiko.Channel | None = field(default=None, repr=False)

    def enter(self, stage: str, allowance_seconds: float | None = None) -> None:
        """Begin a stage. Raises ConnectionFailure if the attempt was aborted in the meantime."""
        if self.aborted:
            raise unreachable(f"gave up while {self.stage}", cause=self.overrun_cause)
        self.stage = stage
        allowed = self.timeout_seconds if allowance_seconds is None else allowance_seconds
        self.deadline_seconds = self.clock.monotonic() + allowed

    def hold(self, sock: socket.socket | paramiko.Channel) -> None:
        """Remember the socket to close if this attempt has to be aborted."""
        self._socket = sock

    @property
    def overrun_cause(self) -> UnreachableCause:
        """Of a stage that does not end: a name server that hangs says nothing about the node."""
        return UnreachableCause.NAME if self.stage.startswith(LOOKING_UP) else UnreachableCause.SILENT

    def abort(self) -> None:
        self.aborted = True
        if self._socket is not None:
            shut_down_socket(self._socket)

    @property
    def real_timeout_seconds(self) -> float:
        return self.clock.real_seconds(self.timeout_seconds)


def shut_down_socket(sock: socket.socket | paramiko.Channel) -> None:
    """End a connection so that its reader wakes up.

    Never close the socket here: that would not wake a thread that polls it, and the kernel could give its descriptor to
    a new connection from which the old thread would then read.
    """
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if isinstance(sock, socket.socket):
            sock.shutdown(socket.SHUT_RDWR)
        else:
            sock.close()


def open_tcp(route: HostRoute, attempt: LoginAttempt) -> socket.socket:
    """A socket connected to the first of the host's addresses that answers, tried in the resolver's order."""
    attempt.enter(f"{LOOKING_UP} {route.hostname}")
    try:
        addresses = socket.getaddrinfo(route.hostname, route.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        text = error.strerror if isinstance(error, socket.gaierror) else error_text(error)
        raise unreachable(
            f"cannot resolve the name {route.hostname}: {text}",
            "check the node's name, HostName in ssh_config, and DNS",
            UnreachableCause.NAME,
        ) from None
    attempt.enter(f"connecting to {route.place}")
    ends = time.monotonic() + attempt.real_timeout_seconds
    problem: OSError = TimeoutError()
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            # All addresses share one deadline; 0 would mean a non-blocking connect.
            sock.settimeout(max(0.05, ends - time.monotonic()))
            attempt.hold(sock)
            sock.connect(address)
        except OSError as error:
            problem = error
            sock.close()
            continue
        _enable_keepalive(sock)
        return sock
    raise tcp_failure(problem, route.place, attempt.timeout_seconds)


def _enable_keepalive(sock: socket.socket) -> None:
    """Let the kernel end a connection whose peer is gone, even while we only read from it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A dead peer is detected after 15 + 4 * 5 s without an answer, or 30 s with unacknowledged data.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


class QuietPacketizer(paramiko.packet.Packetizer):
    """Ignores errors while closing.

    Behind a gateway the socket is a channel, and closing a channel sends a message. Where the gateway's connection has
    already ended, sending raises in paramiko's own thread, where nothing would catch it.
    """

    def close(self) -> None:
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            super().close()


def open_forwarded(
    gateway: paramiko.Transport, via: HostRoute, route: HostRoute, attempt: LoginAttempt
) -> paramiko.Channel:
    """A connection from the gateway to the node, as ProxyJump opens it."""
    attempt.enter(f"connecting to {route.place} through {via.name}")
    try:
        return gateway.open_channel(
            "direct-tcpip", (route.hostname, route.port), ("127.0.0.1", 0), timeout=attempt.real_timeout_seconds
        )
    except paramiko.ChannelException as error:
        if error.code == 1:
            raise unreachable(
                f"gateway {via.name} does not allow forwarding to {route.place}",
                "check AllowTcpForwarding and PermitOpen in the gateway's sshd_config",
                UnreachableCause.GATEWAY,
            ) from None
        raise unreachable(
            f"gateway {via.name} cannot connect to {route.place}: {error.text}", cause=UnreachableCause.GATEWAY
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise unreachable(
            f"gateway {via.name} did not open a connection to {route.place}: {error_text(error)}",
            cause=UnreachableCause.GATEWAY,
        ) from None


def ssh_handshake(
    sock: socket.socket | paramiko.Channel, route: HostRoute, attempt: LoginAttempt
) -> paramiko.Transport:
    """Banner, key exchange, host key verification. The transport's thread runs from here until its socket is shut."""
    attempt.hold(sock)
    attempt.enter(f"performing the SSH handshake with {route.place}", 2 * attempt.timeout_seconds)
    began, limit = time.monotonic(), attempt.real_timeout_seconds
    known = known_host_keys(route)
    transport = paramiko.Transport(sock, packetizer_class=QuietPacketizer)
    try:
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = limit
        transport.clear_to_send_timeout = REKEY_WAIT_SECONDS
        prefer_known_types(transport, known)
        with _small_stack():
            transport.start_client(timeout=2 * limit)  # banner and key exchange each have their own deadline
        # Only now: during the handshake paramiko needs its short poll to notice its own timeouts.
        transport.sock.settimeout(POLL_SECONDS)
        if not transport.initial_kex_done:
            raise unreachable(f"{route.place} did not finish the SSH handshake within {attempt.timeout_seconds:.0f} s")
        verify_host_key(route, transport.get_remote_server_key(), known)
    except ConnectionFailure:
        end_transport(transport)
        raise
    except (paramiko.SSHException, EOFError, OSError) as error:
        end_transport(transport)
        silent = time.monotonic() - began >= 0.95 * limit
        raise _handshake_failure(error, route, attempt, silent) from None
    return transport


def _handshake_failure(error: Exception, route: HostRoute, attempt: LoginAttempt, silent: bool) -> ConnectionFailure:
    text = error_text(error)
    if isinstance(error, IncompatiblePeer):
        return unreachable(
            f"this host and {route.place} have no SSH algorithm in common: {text}", cause=UnreachableCause.HANDSHAKE
        )
    if "Indecipherable protocol version" in text:
        return unreachable(
            f"{route.place} answers, but is not an SSH server",
            "check [ssh] port, or Port in ssh_config",
            UnreachableCause.HANDSHAKE,
        )
    # paramiko reports a timeout and a closed connection with the same text: the time that passed separates them.
    if "protocol banner" in text and silent:
        return unreachable(
            f"{route.place} accepted the connection but sent no SSH banner within {attempt.timeout_seconds:.0f} s",
            "sshd or the whole node may be hung",
        )
    if "protocol banner" in text or isinstance(error, EOFError):
        return unreachable(
            f"{route.place} closed the connection before the SSH handshake was complete",
            "possible causes: sshd reached MaxStartups, the process table is full, or the node has banned the address "
            "of this host",
            UnreachableCause.HANDSHAKE,
        )
    cause = UnreachableCause.SILENT if silent else UnreachableCause.HANDSHAKE
    return unreachable(f"SSH handshake with {route.place} failed: {text}", cause=cause)


_stack_lock = threading.Lock()


@contextlib.contextmanager
def _small_stack() -> Iterator[None]:
    """A small stack for the one thread started in the block: the setting is global, so it is restored at once."""
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def end_transport(transport: paramiko.Transport) -> None:
    """Wake the transport's thread: it sees the end of the stream and closes the socket itself."""
    transport.packetizer.complete_handshake()  # its timer thread would otherwise live until the deadline
    if transport.is_alive():
        shut_down_socket(transport.sock)
    else:
        transport.sock.close()


def authenticate(transport: paramiko.Transport, route: HostRoute, attempt: LoginAttempt, keys: KeyRing) -> None:
    """Offer our keys until one is accepted.

    Raises ConnectionFailure: AUTH_FAILED if the host rejected us, UNREACHABLE if it did not answer.
    """
    with keys.identities(route) as identities:
        tried = []
        for identity in identities:
            attempt.enter(f"authenticating at {route.place} with {identity.description}")
            try:
                more = transport.auth_publickey(route.user, identity.key)
            except paramiko.BadAuthenticationType as error:
                raise _auth_failure(
                    route,
                    f"the host does not accept keys; it accepts only {', '.join(error.allowed_types)}",
                    "check PubkeyAuthentication in sshd_config on that host",
                ) from None
            except (paramiko.SSHException, EOFError, OSError) as error:
                tried.append(identity.description)
                # Still connected and no timeout: the host only rejected this key. Try the next one.
                if transport.is_active() and "timeout" not in str(error).lower():
                    continue
                if transport.is_active():
                    raise unreachable(
                        f"{route.place} did not answer the login within {attempt.timeout_seconds:.0f} s"
                    ) from None
                if len(tried) > 1:
                    raise _auth_failure(
                        route,
                        f"the host disconnected after {len(tried)} keys ({', '.join(tried)}), perhaps because of "
                        "MaxAuthTries",
                        "list only the right key in [ssh] identity_files, or in IdentityFile in ssh_config",
                    ) from None
                raise unreachable(
                    f"{route.place} disconnected during authentication", cause=UnreachableCause.HANDSHAKE
                ) from None
            if more:
                raise _auth_failure(
                    route,
                    f"the host accepts {identity.description} but also requires {', '.join(more)}",
                    "check AuthenticationMethods in sshd_config on that host: a key alone must be sufficient",
                )
            return
        raise _auth_failure(
            route,
            f"tried {', '.join(tried)}",
            "check that the public key is in authorized_keys on that host, and that the user name is correct",
        )


def _auth_failure(route: HostRoute, detail: str, advice: str) -> ConnectionFailure:
    return ConnectionFailure(HostStatus.AUTH_FAILED, f"{route.user}@{route.place} rejected our login: {detail}", advice)
