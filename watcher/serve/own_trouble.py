"""The watcher's own trouble as findings: an engine that fails, a disk that is full. Told like any other alert."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from watcher.engine import Telling
from watcher.judge.finding import DEFAULT_SEVERITY, AlertName, Finding
from watcher.snapshot import DeliveryStats, EpisodeView
from watcher.witness import Witness


@dataclass(frozen=True, slots=True)
class Trouble:
    finding: Finding
    until_seconds: float  # it counts as over when nothing has renewed it by then


class OwnTrouble:
    """What ails this process now. Any thread may note or ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._troubles: dict[str, Trouble] = {}

    def note(self, scope: str, summary: str, evidence: str, advice: str, now: float, hold_seconds: float) -> None:
        """Something is wrong now. It stays for `hold_seconds`, so that what comes and goes is one episode."""
        finding = Finding(
            job="",
            alert=AlertName.WATCHER_DEGRADED,
            severity=DEFAULT_SEVERITY[AlertName.WATCHER_DEGRADED],
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
            self._troubles[scope] = Trouble(finding, now + hold_seconds)

    def findings(self, now: float) -> list[Finding]:
        with self._lock:
            self._troubles = {scope: each for scope, each in self._troubles.items() if now < each.until_seconds}
            return [each.finding for each in self._troubles.values()]


class TellingOwnTrouble:
    """Stands where the engine tells: what it finds and what ails the watcher are told in one look."""

    def __init__(self, teller: Telling, trouble: OwnTrouble) -> None:
        self._teller = teller
        self._trouble = trouble

    def observe(
        self,
        findings: Sequence[Finding],
        judged_jobs: frozenset[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, Witness],
    ) -> None:
        self._teller.observe([*findings, *self._trouble.findings(now)], judged_jobs, now, wall, witnesses)

    def episodes(self) -> tuple[EpisodeView, ...]:
        return self._teller.episodes()

    def stats(self) -> DeliveryStats:
        return self._teller.stats()
