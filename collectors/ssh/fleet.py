"""All nodes at once: one reader thread, one thread per login in progress, and paramiko's thread per connection."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import NodeSample
from wattwatch.collectors.ssh.channels import NodeChannels
from wattwatch.collectors.ssh.connections import Connector
from wattwatch.collectors.ssh.keys import KeyRing
from wattwatch.collectors.ssh.login import LoginAttempt
from wattwatch.collectors.ssh.model import ConnectionFailure, NodeLink, SshSettings, unreachable
from wattwatch.collectors.ssh.node_connection import MAX_GARBAGE_BYTES, NodeConnection
from wattwatch.collectors.ssh.ssh_config import HostRoute, resolve_host
from wattwatch.collectors.ssh.stream import ProbeStream, ReadyStreams, start_probe

TICK_SECONDS: Final = 0.5
GATEWAY_LOGINS: Final = 4  # at once through one gateway: its sshd starts dropping connections at ten (MaxStartups)
OVERRUN_SECONDS: Final = 2.0  # past a stage's deadline: its socket is shut down
ABANDON_SECONDS: Final = 10.0  # past it: the login is abandoned and no longer counted as in progress
MAX_ABANDONED: Final = 64
KEPT_SAMPLES: Final = 64  # per node, if `drain` is not called

OnLine = Callable[[str, float, bytes], None]


class Fleet:
    """Keeps a probe running on every node and collects the samples.

    `drain`, `links`, `wait` and `channels` may be called from any thread.
    """

    def __init__(
        self,
        requests: Mapping[str, ProbeRequest],
        settings: SshSettings,
        clock: Clock,
        on_line: OnLine | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_line = on_line
        self._connector = Connector(KeyRing(settings.passphrase))
        now = clock.monotonic()
        self._nodes = {
            node: NodeConnection(node, request, settings.renew_after_seconds, now) for node, request in requests.items()
        }
        self._ready = ReadyStreams()
        self._inbox: deque[Callable[[float], None]] = deque()  # calls from other threads, to run in ours
        self._samples: deque[NodeSample] = deque(maxlen=max(1, KEPT_SAMPLES * len(self._nodes)))
        self._skews: dict[str, float] = {}
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._attempts: dict[str, LoginAttempt] = {}
        self._abandoned: set[LoginAttempt] = set()
        self._gateway_of: dict[str, HostRoute | None] = {}
        self._closing: set[threading.Thread] = set()
        self._next_tick = now
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self.notes: tuple[str, ...] = ()  # ssh_config directives that are not supported, each once

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for a new sample or link state, at most this long on the clock; True if there is one."""
        arrived = self._clock.wait(self._changed, timeout_seconds)
        self._changed.clear()
        return arrived

    def drain(self) -> list[NodeSample]:
        """Samples since the last call, in order of arrival."""
        samples = []
        with contextlib.suppress(IndexError):
            while True:
                samples.append(self._samples.popleft())
        return samples

    def links(self) -> dict[str, NodeLink]:
        """State of each node's connection now. A node that cannot be reached appears here and nowhere else."""
        now = self._clock.monotonic()
        return {node: connection.link(now, self._skews.get(node)) for node, connection in self._nodes.items()}

    def channels(self, node: str) -> NodeChannels:
        """More channels on the connection to this node. Raises KeyError for an unknown node."""
        connection = self._nodes[node]
        return NodeChannels(node, lambda: connection.transport(self._clock.monotonic()))

    def abandoned_logins(self) -> int:
        """Logins whose thread did not end when aborted; most often it waits for a name server."""
        return len(self._abandoned)

    def stop(self, timeout_seconds: float = 3.0) -> None:
        """End every probe and connection. Returns when they have ended or the timeout has passed."""
        self._stopping.set()
        self._ready.wake.set()
        ends = self._clock.monotonic() + timeout_seconds
        if self._thread.is_alive():
            self._thread.join(self._clock.real_seconds(timeout_seconds))
        for attempt in list(self._attempts.values()):
            attempt.abort()
        # Our thread has ended, so its messages are handled here: a login may have delivered a stream to close.
        while self._inbox:
            self._inbox.popleft()(ends)
        for connection in self._nodes.values():
            for stream in (connection.stream, connection.successor):
                if stream is not None:
                    self._close(connection, stream)
        for thread in list(self._closing):
            thread.join(max(0.0, self._clock.real_seconds(ends - self._clock.monotonic())))

    # The fleet's thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._clock.wait(self._ready.wake, self._next_tick - self._clock.monotonic())
            self._ready.wake.clear()
            now = self._clock.monotonic()
            self._read(now)
            while self._inbox:
                self._inbox.popleft()(now)
            if now >= self._next_tick:
                self._tick(now)
                self._next_tick = self._clock.monotonic() + TICK_SECONDS

    def _read(self, now: float) -> None:
        """One turn for each stream that has data."""
        # Only as many turns as streams are queued now: streams that queue themselves again wait for the next round, so
        # that logins and ticks are not delayed.
        for _ in range(len(self._ready.streams)):
            stream = self._ready.streams.popleft()
            connection = self._nodes[stream.node]
            if stream is connection.successor and connection.stream is not None:
                self._read_stream(connection, connection.stream, now)  # lines of the old one come first
            if stream is connection.stream or stream is connection.successor:
                self._read_stream(connection, stream, now)
            self._close_leaving(connection)

    def _read_stream(self, connection: NodeConnection, stream: ProbeStream, now: float) -> None:
        for line in stream.read():
            sample = connection.receive(stream, line, now)
            if sample is None:
                continue
            if self._on_line is not None:
                self._on_line(connection.node, now, line)
            self._samples.append(sample)
            self._skews[connection.node] = sample.wall_seconds - self._clock.wall()
            self._changed.set()
        connection.garbage_bytes += stream.new_garbage_bytes()
        if stream.ended or stream.unread_garbage > MAX_GARBAGE_BYTES:
            connection.tick(now)

    def _tick(self, now: float) -> None:
        for node, attempt in list(self._attempts.items()):
            self._nodes[node].logging_in = attempt.stage
            overrun = now - attempt.deadline_seconds
            if overrun > OVERRUN_SECONDS:
                attempt.abort()
            if overrun > ABANDON_SECONDS and len(self._abandoned) < MAX_ABANDONED:
                self._abandoned.add(attempt)
                seconds = overrun + attempt.timeout_seconds
                self._failed(
                    attempt, unreachable(f"still {attempt.stage} after {seconds:.0f} s", cause=attempt.overrun_cause)
                )
        for connection in self._nodes.values():
            connection.tick(now)
            self._close_leaving(connection)
        self._start_logins(now)

    def _close_leaving(self, connection: NodeConnection) -> None:
        while connection.leaving:
            self._close(connection, connection.leaving.pop())

    def _close(self, connection: NodeConnection, stream: ProbeStream) -> None:
        """In a separate thread: closing waits for the node's answer."""

        def ended(confirmed: bool) -> None:
            self._closing.discard(threading.current_thread())
            self._inbox.append(lambda _: connection.closed(stream, confirmed))

        thread = threading.Thread(target=stream.close, args=(ended,), name=f"close {stream.node}", daemon=True)
        self._closing.add(thread)
        thread.start()

    # Logins

    def _start_logins(self, now: float) -> None:
        """As many as may be in progress at once; unconnected nodes first, then those that have waited longest."""
        free = self._settings.max_simultaneous_logins - len(self._attempts)
        if free <= 0:
            return
        through = Counter(self._gateway_of.get(node) for node in self._attempts)
        waiting = [connection for connection in self._nodes.values() if connection.wants_login(now)]
        for connection in sorted(
            waiting, key=lambda connection: (connection.stream is not None, connection.next_login_seconds)
        ):
            gateway = self._first_gateway(connection.node)
            if free <= 0:
                return
            if gateway is not None and through[gateway] >= GATEWAY_LOGINS:
                continue
            through[gateway] += 1
            free -= 1
            attempt = LoginAttempt(connection.node, self._clock, self._settings.connect_timeout_seconds)
            attempt.enter("logging in")
            connection.logging_in = attempt.stage
            self._attempts[connection.node] = attempt
            threading.Thread(
                target=self._log_in, args=(attempt, connection.request), name=f"login {connection.node}", daemon=True
            ).start()

    def _first_gateway(self, node: str) -> HostRoute | None:
        """Resolved before the first login, so that the first wave is limited too; updated by each login."""
        if node not in self._gateway_of:
            try:
                self._gateway_of[node] = resolve_host(node, self._settings).route.first_gateway
            except ConnectionFailure:  # the login will report it
                self._gateway_of[node] = None
        return self._gateway_of[node]

    def _log_in(self, attempt: LoginAttempt, request: ProbeRequest) -> None:
        """The thread of one login: always ends with a message to the fleet, whatever happens."""
        failure, stream = None, None
        try:
            resolution = resolve_host(attempt.node, self._settings)
            attempt.notes = resolution.notes
            self._gateway_of[attempt.node] = resolution.route.first_gateway
            connection = self._connector.connect(resolution.route, attempt)
            try:
                stream = start_probe(attempt.node, request, connection, attempt)
            except BaseException:
                connection.close()
                raise
        except ConnectionFailure as error:
            failure = error.with_traceback(None)  # its frames would keep sockets and channels alive
        except Exception as error:  # noqa: BLE001 - one odd node must not end the fleet: report a sentence
            failure = unreachable(f"login failed while {attempt.stage}: {type(error).__name__}: {error}")
        if self._stopping.is_set() and stream is not None:
            stream.close()
        self._inbox.append(lambda now: self._finished(attempt, stream, failure, now))
        self._ready.wake.set()

    def _finished(
        self, attempt: LoginAttempt, stream: ProbeStream | None, failure: ConnectionFailure | None, now: float
    ) -> None:
        self._abandoned.discard(attempt)
        self.notes = tuple(dict.fromkeys((*self.notes, *attempt.notes)))
        connection = self._nodes[attempt.node]
        # An abandoned login may still succeed later: its stream is not wanted any more.
        if self._attempts.get(attempt.node) is not attempt or self._stopping.is_set():
            if stream is not None:
                self._close(connection, stream)
            return
        if failure is not None:
            self._failed(attempt, failure)
        elif stream is not None:
            del self._attempts[attempt.node]
            connection.logged_in(stream, now)
            stream.queue_in(self._ready)
        self._start_logins(now)

    def _failed(self, attempt: LoginAttempt, failure: ConnectionFailure) -> None:
        del self._attempts[attempt.node]
        self._nodes[attempt.node].failed(failure, self._clock.monotonic())
        self._changed.set()
