"""A generic webhook with Alertmanager's payload, version 4, so that existing Alertmanager receivers can take ours.

The shape follows prometheus/alertmanager notify/webhook as captured from version 0.25. Each message holds one alert.
Its fingerprint is the same for firing and resolved and across restarts, and does not change when the severity rises.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Final

import orjson

from wattwatch.watcher.alerting.message import AlertMessage, join_suspects
from wattwatch.watcher.alerting.receivers.base import Receiver

GO_ZERO_TIME: Final = "0001-01-01T00:00:00Z"  # how Alertmanager writes the end of an alert that still fires
# Receivers store annotations in database columns of limited size. The most important evidence comes first.
MAX_ANNOTATION_CHARACTERS: Final = 4000


class WebhookReceiver(Receiver):
    """Any HTTP endpoint that accepts Alertmanager's webhook payload; success is any 2xx."""

    def render(self, message: AlertMessage, receiver_name: str) -> bytes:
        return webhook_payload(message, receiver_name)


RECEIVER: Final = WebhookReceiver()


def webhook_payload(message: AlertMessage, receiver_name: str) -> bytes:
    status = "resolved" if message.is_closed else "firing"
    labels = alert_labels(message)
    annotations = alert_annotations(message)
    group = {name: labels[name] for name in ("alertname", "train_job") if name in labels}
    return orjson.dumps(
        {
            "version": "4",
            "groupKey": "{}:{" + ", ".join(f"{name}={orjson.dumps(group[name]).decode()}" for name in group) + "}",
            "truncatedAlerts": 0,
            "status": status,
            "receiver": to_valid_utf8(receiver_name),
            "groupLabels": group,
            "commonLabels": labels,
            "commonAnnotations": annotations,
            "externalURL": message.link or "",
            "alerts": [
                {
                    "status": status,
                    "labels": labels,
                    "annotations": annotations,
                    "startsAt": rfc3339(message.opened_wall_seconds),
                    "endsAt": GO_ZERO_TIME
                    if message.closed_wall_seconds is None
                    else rfc3339(message.closed_wall_seconds),
                    "generatorURL": message.link or "",
                    "fingerprint": alert_fingerprint(message),
                }
            ],
        }
    )


def alert_labels(message: AlertMessage) -> dict[str, str]:
    """Labels with a value. Never `job` or `instance`: Prometheus assigns those itself and would rename ours."""
    node, _, gpu = message.scope.partition("/")
    labels = {
        "alertname": message.alert,
        "severity": message.severity.value,
        "train_job": message.job,
        "node": node,
        "gpu": gpu,
    }
    if len(message.suspects) == 1:
        suspect = message.suspects[0]
        labels["node"] = suspect.node
        labels["gpu"] = gpu if suspect.gpu is None else str(suspect.gpu)
        labels["rank"] = "" if suspect.rank is None else str(suspect.rank)
    return {name: to_valid_utf8(value) for name, value in labels.items() if value}


def alert_annotations(message: AlertMessage) -> dict[str, str]:
    annotations = {
        "summary": message.summary,
        "description": "\n".join(message.evidence),
        "diagnosis": message.diagnosis,
        "suspects": join_suspects(message.suspects),
        "advice": message.advice,
        "cost": message.cost,
        "timing": message.timing,
        "reason": message.reason,
        "follows": ", ".join(message.inhibited),
        "gpu_hours_lost": f"{message.gpu_hours_lost:.3f}",
        "kilowatt_hours_lost": f"{message.kilowatt_hours_lost:.3f}" if message.kilowatt_hours_lost else "",
        "confirmed": "true" if message.confirmed else "false",
        "episode": message.episode_id,
    }
    return {name: to_valid_utf8(value)[:MAX_ANNOTATION_CHARACTERS] for name, value in annotations.items() if value}


def alert_fingerprint(message: AlertMessage) -> str:
    """16 hexadecimal digits derived from what identifies the alert: its name, job and scope."""
    identity = "\0".join((message.alert, message.job, message.scope))
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]


def rfc3339(wall_seconds: float) -> str:
    return datetime.fromtimestamp(wall_seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_valid_utf8(text: str) -> str:
    """The text without what cannot be encoded: log lines of a node may contain arbitrary bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")
