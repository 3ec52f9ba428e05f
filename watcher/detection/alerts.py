"""The alert kinds, from alerts.toml: severity, persistence, advice and inhibition of each in one row.

Detection reads severity, persistence and advice here; alerting reads inhibition and recovery; incidents, which kinds
start a capture. A kind that is missing on one side (table or `AlertName`) fails when this module is imported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from wattwatch.watcher.detection.model import AlertName, Severity

EVERY_KIND_BELOW: Final = ["*"]


class InhibitionScope(StrEnum):
    """Where the findings may be that an alert explains; alerts.toml defines each."""

    WATCHER = "watcher"
    JOB = "job"
    NODE = "node"
    OWN = "own"


class Recovery(StrEnum):
    """What must be seen to close an alert of an earlier watcher process; alerts.toml defines each."""

    STEPS = "steps"
    NODE = "node"
    GPU = "gpu"
    ABSENCE = "absence"


@dataclass(frozen=True, slots=True)
class AlertKind:
    """One row of alerts.toml, where each column is explained."""

    name: AlertName
    severity: Severity
    advice: str
    recovery: Recovery
    stops_job: bool = False
    captures_evidence: bool = False
    allows_learning: bool = False
    persistence_seconds: float = 0.0  # with a readable step counter
    persistence_seconds_without_steps: float = 0.0
    inhibits: frozenset[AlertName] = frozenset()
    inhibition_scope: InhibitionScope | None = None  # None exactly where `inhibits` is empty
    raises_severity: bool = False


def load_alert_kinds() -> Mapping[AlertName, AlertKind]:
    """alerts.toml in its order. Raises ValueError where the table and `AlertName` do not name the same kinds."""
    rows = tomllib.loads(resources.files(__package__).joinpath("alerts.toml").read_text("utf-8"))["alert"]
    names = [AlertName(row["name"]) for row in rows]
    if sorted(names) != sorted(AlertName):
        raise ValueError(
            f"alerts.toml and AlertName differ: {sorted(set(names) ^ set(AlertName)) or 'a name occurs twice'}"
        )
    kinds: dict[AlertName, AlertKind] = {}
    for place, row in enumerate(rows):
        kinds[names[place]] = _read_row(row, frozenset(names[place + 1 :]))
    return MappingProxyType(kinds)


def _read_row(row: Mapping[str, Any], below: frozenset[AlertName]) -> AlertKind:
    """`below`: the kinds of later rows, the only ones it may inhibit."""
    listed = row.get("inhibits", [])
    inhibits = below if listed == EVERY_KIND_BELOW else frozenset(map(AlertName, listed))
    if not inhibits <= below:
        raise ValueError(
            f"alerts.toml: {row['name']} may inhibit only rows below its own, not {sorted(inhibits - below)}"
        )
    persistence = row.get("persistence_seconds", {})
    return AlertKind(
        name=AlertName(row["name"]),
        severity=Severity(row["severity"]),
        advice=row["advice"],
        recovery=Recovery(row["recovery"]),
        stops_job=row.get("stops_job", False),
        captures_evidence=row.get("captures_evidence", False),
        allows_learning=row.get("allows_learning", False),
        persistence_seconds=persistence.get("with_steps", 0.0),
        persistence_seconds_without_steps=persistence.get("without_steps", 0.0),
        inhibits=inhibits,
        inhibition_scope=InhibitionScope(row["inhibition_scope"]) if inhibits else None,
        raises_severity=row.get("raises_severity", False),
    )


ALERT_KINDS: Final = load_alert_kinds()
