"""A generic webhook: Alertmanager's payload, version 4, so that whatever receives Alertmanager's receives ours.

Shape of prometheus/alertmanager notify/webhook, as captured from 0.25. One alert per message. The fingerprint is the
same for firing and resolved and over restarts, and does not change when the severity is raised.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Final

import orjson

from wattwatch.watcher.alerting.message import AlertMessage, join_suspects

GO_ZERO_TIME: Final = "0001-01-01T00:00:00Z"  # Go's zero time: still firing
# Receivers keep annotations in databases with small columns; the evidence comes first.
MAX_ANNOTATION_CHARACTERS: Final = 4000


def webhook_payload(message: AlertMessage, receiver: str) -> bytes:
    status = "resolved" if message.is_over else "firing"
    labels = alert_labels(message)
    annotations = alert_annotations(message)
    group = {name: labels[name] for name in ("alertname", "train_job") if name in labels}
    return orjson.dumps(
        {
            "version": "4",
            "groupKey": "{}:{" + ", ".join(f"{name}={orjson.dumps(group[name]).decode()}" for name in group) + "}",
            "truncatedAlerts": 0,
            "status": status,
            "receiver": replace_surrogates(receiver),
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
    """Never `job` or `instance`: Prometheus owns those. An empty label is an absent one."""
    node, _, board = message.scope.partition("/")
    labels = {
        "alertname": message.alert,
        "severity": message.severity.value,
        "train_job": message.job,
        "node": node,
        "gpu": board,
    }
    if len(message.suspects) == 1:
        suspect = message.suspects[0]
        labels["node"] = suspect.node
        labels["gpu"] = board if suspect.gpu is None else str(suspect.gpu)
        labels["rank"] = "" if suspect.rank is None else str(suspect.rank)
    return {name: replace_surrogates(value) for name, value in labels.items() if value}


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
        "follows": ", ".join(message.followers),
        "gpu_hours_lost": f"{message.gpu_hours_lost:.3f}",
        "kilowatt_hours_lost": f"{message.kilowatt_hours_lost:.3f}" if message.kilowatt_hours_lost else "",
        "confirmed": "true" if message.confirmed else "false",
        "episode": message.episode_id,
    }
    return {name: replace_surrogates(value)[:MAX_ANNOTATION_CHARACTERS] for name, value in annotations.items() if value}


def alert_fingerprint(message: AlertMessage) -> str:
    """16 hexadecimal digits of what identifies the alert: its name, job and scope."""
    identity = "\0".join((message.alert, message.job, message.scope))
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]


def rfc3339(wall_seconds: float) -> str:
    return datetime.fromtimestamp(wall_seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def replace_surrogates(text: str) -> str:
    """Valid UTF-8 whatever a node has sent."""
    return text.encode("utf-8", "replace").decode("utf-8")
