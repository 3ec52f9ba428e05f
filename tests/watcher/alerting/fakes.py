"""Shared by the alerting tests: findings, a clock moved by the test, and an HTTP receiver with scripted replies."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.config.settings import ReceiverSection
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, Suspect
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence

WALL = 1_800_000_000.0


def finding(
    alert: AlertName = AlertName.JOB_HUNG,
    scope: str = "",
    job: str = "llama",
    since: float = 0.0,
    confirmed: bool = True,
    gpus_idle: int = 16,
    suspects: tuple[Suspect, ...] = (),
    summary: str = "No step for 95 s; the usual pace is one in 9 s.",
) -> Finding:
    return Finding(
        job=job,
        alert=alert,
        severity=ALERT_KINDS[alert].severity,
        scope=scope,
        summary=summary,
        evidence=("15 GPUs at 190 W and 100 %", "rank 3 at 0 %"),
        advice="Take stacks of rank 3 before you end the job.",
        since_seconds=since,
        confirmed=confirmed,
        suspects=suspects,
        gpus_idle=gpus_idle,
    )


def recovery(*nodes: str, advancing: bool = False, job: str = "llama") -> RecoveryEvidence:
    return RecoveryEvidence(job, advancing, frozenset(nodes))


class ManualClock(Clock):
    """Stands still until the test advances it. Code that waits on it polls every few milliseconds."""

    def __init__(self, seconds: float = 100.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.wall_seconds = WALL

    def monotonic(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.wall_seconds

    def real_seconds(self, seconds: float) -> float:
        return 0.005 if seconds > 0 else 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall_seconds += seconds


@dataclass(frozen=True)
class ReceivedPost:
    path: str
    key: str
    body: bytes
    clock_seconds: float

    @property
    def content(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class ScriptedReply:
    """How the receiver replies to one post. `cut`: close the connection without a response."""

    status: int = 200
    body: str = "ok"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    before: Callable[[], None] | None = None  # runs when the post has arrived and no reply is sent yet
    after: Callable[[], None] | None = None  # runs when the reply is sent


OK = ScriptedReply()


class FakeReceiver:
    """A real HTTP server on loopback: sends the scripted replies in order, then "ok" forever."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.posts: list[ReceivedPost] = []
        self.replies: list[ScriptedReply] = []
        self._changed = threading.Condition()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                seconds = 0.0 if clock is None else clock.monotonic()
                with hook._changed:
                    hook.posts.append(ReceivedPost(self.path, self.headers["Idempotency-Key"], body, seconds))
                    reply = hook.replies.pop(0) if hook.replies else OK
                    hook._changed.notify_all()
                if reply.before is not None:
                    reply.before()
                if reply.cut:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body.encode())
                self.wfile.flush()
                if reply.after is not None:
                    reply.after()

            def log_message(self, format: str, *args: object) -> None:
                """Keep the request log out of pytest's output."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore broken connections: some tests kill the client during a request."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="hook", daemon=True
        )
        self._thread.start()

    def wait_for(self, count: int) -> list[ReceivedPost]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.posts) >= count, DEADLINE_SECONDS), (
                f"only {len(self.posts)} of {count} posts arrived"
            )
            return list(self.posts)

    def arrives_soon(self, count: int) -> bool:
        """Whether they arrive within a moment: for tests that advance the clock while they wait."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.posts) >= count, 0.03)

    def use_tls(self, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def keys(self) -> list[str]:
        return [post.key for post in self.posts]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def fake_receiver(clock: Clock | None = None) -> Iterator[FakeReceiver]:
    hook = FakeReceiver(clock)
    try:
        yield hook
    finally:
        hook.stop()


def receiver(
    directory: Path,
    port: int,
    name: str = "webhook",
    type: str = "webhook",
    send_resolved: bool = True,
) -> ReceiverSection:
    path = directory / f"{name}_url"
    path.write_text(f"http://127.0.0.1:{port}/{name}/SECRET\n", "utf-8")
    return ReceiverSection(name=name, type=type, url_file=path, send_resolved=send_resolved)


def wait_until(condition: Callable[[], bool]) -> None:
    """For what happens after a reply was sent, which no event in the test marks."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_SECONDS / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("the condition did not become true in time")
