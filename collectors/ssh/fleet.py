"""All nodes at once: one reader thread, a thread for each login under way, and paramiko's thread per connection."""

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
GATEWAY_LOGINS: Final = 4  # at once through one gateway: its sshd starts refusing at ten (MaxStartups)
OVERRUN_SECONDS: Final = 2.0  # past a stage's deadline: its socket is shut
ABANDON_SECONDS: Final = 10.0  # past it: the login no longer counts
MAX_ABANDONED: Final = 64
KEPT_SAMPLES: Final = 64  # for each node, if nobody drains

OnLine = Callable[[str, float, bytes], None]


class Fleet:
    """Keeps a probe running on every node and hands out what they say. `drain`, `links`, `wait`, `channels`: from any
    thread."""

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
        self._inbox: deque[Callable[[float], None]] = deque()  # what other threads have to say to ours
        self._samples: deque[NodeSample] = deque(maxlen=max(1, KEPT_SAMPLES * len(self._nodes)))
        self._skews: dict[str, float] = {}
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._attempts: dict[str, LoginAttempt] = {}
        self._abandoned: set[LoginAttempt] = set()
        self._gateway_of: dict[str, HostRoute | None] = {}
        self._closing: set[threading.Thread] = set()
        self._next_tick = now
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self.notes: tuple[str, ...] = ()  # directives of ssh_config that are not honoured, each once

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_seconds: float) -> bool:
        """Until something new has come, at most this long on the clock; True if something has."""
        came = self._clock.wait(self._news, timeout_seconds)
        self._news.clear()
        return came

    def drain(self) -> list[NodeSample]:
        """Samples since the last call, in the order of their arrival."""
        samples = []
        with contextlib.suppress(IndexError):
            while True:
                samples.append(self._samples.popleft())
        return samples

    def links(self) -> dict[str, NodeLink]:
        """How each node's connection stands now. A node in trouble is seen here and nowhere else."""
        now = self._clock.monotonic()
        return {node: watch.link(now, self._skews.get(node)) for node, watch in self._nodes.items()}

    def channels(self, node: str) -> NodeChannels:
        """For other business with the node on the connection that is held to it. Raises KeyError for a node unknown."""
        watch = self._nodes[node]
        return NodeChannels(node, lambda: watch.transport(self._clock.monotonic()))

    def abandoned_logins(self) -> int:
        """Threads of logins that did not end when told to: a name server, most likely."""
        return len(self._abandoned)

    def stop(self, timeout_seconds: float = 3.0) -> None:
        """End every probe and connection. Returns when they have ended or the time is over."""
        self._stopping.set()
        self._ready.wake.set()
        ends = self._clock.monotonic() + timeout_seconds
        if self._thread.is_alive():
            self._thread.join(self._clock.real_seconds(timeout_seconds))
        for attempt in list(self._attempts.values()):
            attempt.abort()
        while self._inbox:
            self._inbox.popleft()(ends)
        for watch in self._nodes.values():
            for stream in (watch.stream, watch.successor):
                if stream is not None:
                    self._close(watch, stream)
        for thread in list(self._closing):
            thread.join(max(0.0, self._clock.real_seconds(ends - self._clock.monotonic())))

    # The fleet's own thread

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
        """One turn for each stream that has something."""
        for _ in range(len(self._ready.streams)):
            stream = self._ready.streams.popleft()
            watch = self._nodes[stream.node]
            if stream is watch.successor and watch.stream is not None:
                self._read_stream(watch, watch.stream, now)  # what the old one has said comes first
            if stream is watch.stream or stream is watch.successor:
                self._read_stream(watch, stream, now)
            self._close_leaving(watch)

    def _read_stream(self, watch: NodeConnection, stream: ProbeStream, now: float) -> None:
        for line in stream.read():
            sample = watch.take(stream, line, now)
            if sample is None:
                continue
            if self._on_line is not None:
                self._on_line(watch.node, now, line)
            self._samples.append(sample)
            self._skews[watch.node] = sample.wall_seconds - self._clock.wall()
            self._news.set()
        watch.garbage_bytes += stream.new_garbage_bytes()
        if stream.ended or stream.unread_garbage > MAX_GARBAGE_BYTES:
            watch.tick(now)

    def _tick(self, now: float) -> None:
        for node, attempt in list(self._attempts.items()):
            self._nodes[node].logging_in = attempt.stage
            late = now - attempt.deadline_seconds
            if late > OVERRUN_SECONDS:
                attempt.abort()
            if late > ABANDON_SECONDS and len(self._abandoned) < MAX_ABANDONED:
                self._abandoned.add(attempt)
                self._refused(
                    attempt, unreachable(f"still {attempt.stage} after {late + attempt.timeout_seconds:.0f} s")
                )
        for watch in self._nodes.values():
            watch.tick(now)
            self._close_leaving(watch)
        self._start_logins(now)

    def _close_leaving(self, watch: NodeConnection) -> None:
        while watch.leaving:
            self._close(watch, watch.leaving.pop())

    def _close(self, watch: NodeConnection, stream: ProbeStream) -> None:
        """In a thread of its own: the farewell waits for the node."""

        def ended(seen: bool) -> None:
            self._closing.discard(threading.current_thread())
            self._inbox.append(lambda _: watch.ended(stream, seen))

        thread = threading.Thread(target=stream.close, args=(ended,), name=f"close {stream.node}", daemon=True)
        self._closing.add(thread)
        thread.start()

    # Logins

    def _start_logins(self, now: float) -> None:
        """As many as may be under way at once, those that waited longest first."""
        free = self._settings.max_simultaneous_logins - len(self._attempts)
        if free <= 0:
            return
        through = Counter(self._gateway_of.get(node) for node in self._attempts)
        waiting = [watch for watch in self._nodes.values() if watch.wants_login(now)]
        for watch in sorted(waiting, key=lambda watch: (watch.stream is not None, watch.next_login_seconds)):
            gateway = self._first_gateway(watch.node)
            if free <= 0:
                return
            if gateway is not None and through[gateway] >= GATEWAY_LOGINS:
                continue
            through[gateway] += 1
            free -= 1
            attempt = LoginAttempt(watch.node, self._clock, self._settings.connect_timeout_seconds)
            attempt.enter("logging in")
            watch.logging_in = attempt.stage
            self._attempts[watch.node] = attempt
            threading.Thread(
                target=self._log_in, args=(attempt, watch.request), name=f"login {watch.node}", daemon=True
            ).start()

    def _first_gateway(self, node: str) -> HostRoute | None:
        """Known before the first login, so that the first wave is bounded too; renewed by each login."""
        if node not in self._gateway_of:
            try:
                self._gateway_of[node] = resolve_host(node, self._settings).route.first_gateway
            except ConnectionFailure:  # the login will say it
                self._gateway_of[node] = None
        return self._gateway_of[node]

    def _log_in(self, attempt: LoginAttempt, request: ProbeRequest) -> None:
        """The thread of one login: ends with a message to the fleet, whatever happens."""
        refusal, stream = None, None
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
            refusal = error.with_traceback(None)  # its frames would keep sockets and channels
        except Exception as error:  # noqa: BLE001 - a thread's last defence: one node's oddity is a sentence, not a trace
            refusal = unreachable(f"login failed while {attempt.stage}: {type(error).__name__}: {error}")
        if self._stopping.is_set() and stream is not None:
            stream.close()
        self._inbox.append(lambda now: self._finished(attempt, stream, refusal, now))
        self._ready.wake.set()

    def _finished(
        self, attempt: LoginAttempt, stream: ProbeStream | None, refusal: ConnectionFailure | None, now: float
    ) -> None:
        self._abandoned.discard(attempt)
        self.notes = tuple(dict.fromkeys((*self.notes, *attempt.notes)))
        watch = self._nodes[attempt.node]
        if self._attempts.get(attempt.node) is not attempt or self._stopping.is_set():
            if stream is not None:
                self._close(watch, stream)
            return
        if refusal is not None:
            self._refused(attempt, refusal)
        elif stream is not None:
            del self._attempts[attempt.node]
            watch.logged_in(stream, now)
            stream.watch(self._ready)
        self._start_logins(now)

    def _refused(self, attempt: LoginAttempt, refusal: ConnectionFailure) -> None:
        del self._attempts[attempt.node]
        self._nodes[attempt.node].refused(refusal, self._clock.monotonic())
        self._news.set()
