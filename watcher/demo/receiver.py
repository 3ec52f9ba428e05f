"""Receives the messages of the demo: an HTTP server on loopback that accepts what a webhook and Slack would accept.

Alertmanager's webhook payload, version 4: prometheus.io/docs/alerting/latest/configuration/#webhook_config.
Slack's incoming webhook: any JSON with `text` or `blocks`, answered with "ok".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from wattwatch.collectors.clock import Clock

WEBHOOK_PATH: Final = "/webhook"
SLACK_PATH: Final = "/slack"


@dataclass(frozen=True, slots=True)
class ReceivedAlert:
    """One alert of one message, as it was received. `received_seconds` is the wall time of the demo's clock."""

    status: str  # "firing" or "resolved"
    alert: str
    job: str
    severity: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    received_seconds: float

    @property
    def text(self) -> str:
        """All text that a person would read."""
        return "\n".join([*self.labels.values(), *self.annotations.values()])


class DemoReceiver:
    """Listens from construction until `stop`; `notices` and `slack_messages` grow as messages arrive."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._notices: list[ReceivedAlert] = []
        self._slack_messages = 0
        self._unreadable = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received = clock.wall()
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                known = receiver.take(self.path, body, received)
                answer = b"ok" if known else b"unknown receiver, or not a payload for it"
                self.send_response(200 if known else 400)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the terminal belongs to the demo."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="demo receiver", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, body: bytes, received_seconds: float) -> bool:
        """Takes one message. False if it is not a payload for this path."""
        try:
            content = json.loads(body)
            notices = parse_webhook_payload(content, received_seconds) if path == WEBHOOK_PATH else ()
            known = path == WEBHOOK_PATH or (path == SLACK_PATH and bool(content.get("text") or content.get("blocks")))
        except (ValueError, KeyError, AttributeError, TypeError):
            notices, known = (), False
        with self._lock:
            self._notices += notices
            self._slack_messages += known and path == SLACK_PATH
            self._unreadable += not known
        return known

    def notices(self) -> tuple[ReceivedAlert, ...]:
        with self._lock:
            return tuple(self._notices)

    @property
    def slack_messages(self) -> int:
        with self._lock:
            return self._slack_messages

    @property
    def unreadable(self) -> int:
        """The number of messages that were not a payload for their path."""
        with self._lock:
            return self._unreadable

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def parse_webhook_payload(content: Mapping[str, Any], received_seconds: float) -> tuple[ReceivedAlert, ...]:
    """The alerts in a payload of Alertmanager's webhook. Raises KeyError or TypeError if it is not one."""
    return tuple(
        ReceivedAlert(
            status=alert["status"],
            alert=alert["labels"]["alertname"],
            job=alert["labels"].get("train_job", ""),
            severity=alert["labels"].get("severity", ""),
            labels=alert["labels"],
            annotations=alert["annotations"],
            received_seconds=received_seconds,
        )
        for alert in content["alerts"]
    )
