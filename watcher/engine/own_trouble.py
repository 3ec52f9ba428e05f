"""The watcher's own trouble as findings: an engine that fails, a disk that is full. Told like any other alert."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
from wattwatch.watcher.engine.engine import FindingSink
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView


@dataclass(frozen=True, slots=True)
class SelfProblem:
    finding: Finding
    until_seconds: float  # it counts as over when nothing has renewed it by then


class SelfProblems:
    """What ails this process now. Any thread may note or ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._troubles: dict[str, SelfProblem] = {}

    def note(self, scope: str, summary: str, evidence: str, advice: str, now: float, hold_seconds: float) -> None:
        """Something is wrong now. It stays for `hold_seconds`, so that what comes and goes is one episode."""
        finding = Finding(
            job="",
            alert=AlertName.WATCHER_DEGRADED,
            severity=ALERT_KINDS[AlertName.WATCHER_DEGRADED].severity,
            scope=scope,
            summary=summary,
            evidence=(evidence,),
            advice=advice,
            since_seconds=now,
        )
        with self._lock:
            known = self._troubles.get(scope)
            if known is not None:
                finding = replace(finding, since_seconds=known.finding.since_seconds)
            self._troubles[scope] = SelfProblem(finding, now + hold_seconds)

    def findings(self, now: float) -> list[Finding]:
        with self._lock:
            self._troubles = {scope: each for scope, each in self._troubles.items() if now < each.until_seconds}
            return [each.finding for each in self._troubles.values()]


class SelfProblemSink:
    """Stands where the engine tells: what it finds and what ails the watcher are told in one look."""

    def __init__(self, teller: FindingSink, trouble: SelfProblems) -> None:
        self._teller = teller
        self._trouble = trouble

    def observe(
        self,
        findings: Sequence[Finding],
        judged_jobs: frozenset[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, RecoveryEvidence],
    ) -> None:
        self._teller.observe([*findings, *self._trouble.findings(now)], judged_jobs, now, wall, witnesses)

    def episodes(self) -> tuple[EpisodeView, ...]:
        return self._teller.episodes()

    def stats(self) -> DeliveryStats:
        return self._teller.stats()
