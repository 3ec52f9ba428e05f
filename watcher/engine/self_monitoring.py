"""What the watcher knows about its own problems, so that it does not report them as problems of the jobs.

If most nodes go silent at once, the watcher's own network or process has failed, not theirs. A monitor that turns its
own outage into alerts about everyone loses its users' trust (https://github.com/healthchecks/healthchecks/issues/664,
https://github.com/louislam/uptime-kuma/issues/774). Here it is one alert, and nothing is concluded about any job whose
nodes are affected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.common.formatting import format_count, format_duration
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding

# The figures below were chosen, not measured.
# Fewer nodes than this that go silent together may well be one rack, or the nodes of one job.
MIN_NODES: Final = 4
LOST_NODES_SHARE: Final = 0.5
# Nodes that are lost together are not lost within one tick: compare with those that answered up to this long ago.
LOSS_WINDOW_INTERVALS: Final = 8.0
# A tick that comes this late means that this process was stopped or starved of CPU: what it knows is old.
STALLED_INTERVALS: Final = 5.0
# After an outage of its own, the watcher needs fresh samples before it concludes anything.
PAUSE_INTERVALS: Final = 3.0
# A network outage ends or is noticed by then. Nodes that stay silent for longer are down, and each is reported.
MAX_BLIND_SECONDS: Final = 600.0


class NetworkLossDetector:
    """Detects that the watcher itself has lost most nodes, or was stalled. Pure: links and time are arguments."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._history: deque[tuple[float, frozenset[str]]] = deque()  # (seconds, nodes that answered)
        self._nodes_before: frozenset[str] = frozenset()
        self._paused_until = float("-inf")
        self.since: float | None = None  # when most nodes were lost; None while they answer
        self.stalled_ticks = 0

    def update(self, links: Mapping[str, NodeLink], now: float) -> None:
        """Take note of which nodes answer. Call it at each tick."""
        answering = frozenset(node for node, link in links.items() if link.status is HostStatus.OK)
        if self._history and now - self._history[-1][0] > STALLED_INTERVALS * self._interval:
            self.stalled_ticks += 1
            self._pause(now)
        if self.since is None:
            self._check_for_loss(answering, links, now)
        else:
            recovered = len(self._nodes_before & answering) >= LOST_NODES_SHARE * len(self._nodes_before)
            if recovered or now - self.since > MAX_BLIND_SECONDS:
                self.since = None
                self._pause(now)
        self._history.append((now, answering))
        while now - self._history[0][0] > LOSS_WINDOW_INTERVALS * self._interval:
            self._history.popleft()

    def is_paused(self, now: float) -> bool:
        """True while the samples may still be stale: no job may be evaluated yet."""
        return now < self._paused_until

    def finding(self, links: Mapping[str, NodeLink]) -> Finding | None:
        """The alert about a watcher that has lost most nodes; None while it reaches them."""
        if self.since is None:
            return None
        silent = sorted(n for n in self._nodes_before if n not in links or links[n].status is not HostStatus.OK)
        return Finding(
            job="",
            alert=AlertName.WATCHER_DEGRADED,
            severity=ALERT_KINDS[AlertName.WATCHER_DEGRADED].severity,
            scope="",
            summary=f"The watcher lost contact with {len(silent)} of {format_count(len(self._nodes_before), 'node')} "
            "at the same time; "
            "its own network is the likely cause.",
            evidence=tuple(f"{node}: {links[node].detail}" for node in silent[:5] if node in links),
            advice="First check the network of the host that runs the watcher: interface, VPN, bastion, DNS. Jobs on "
            f"these nodes are not evaluated until the nodes answer again or {MAX_BLIND_SECONDS / 60:.0f} min "
            "have passed.",
            since_seconds=self.since,
        )

    def _check_for_loss(self, answering: frozenset[str], links: Mapping[str, NodeLink], now: float) -> None:
        before = max((nodes for _, nodes in self._history), key=len, default=frozenset())
        # Only silence counts: a refused login is an answer from the node.
        lost = {n for n in before - answering if n in links and links[n].status is HostStatus.UNREACHABLE}
        if len(before) >= MIN_NODES and len(lost) > LOST_NODES_SHARE * len(before):
            self.since = now
            self._nodes_before = before

    def _pause(self, now: float) -> None:
        self._history.clear()
        self._paused_until = now + PAUSE_INTERVALS * self._interval


@dataclass(frozen=True, slots=True)
class SelfProblem:
    """One problem of this process, such as a full disk or an error in the engine."""

    finding: Finding
    reported_seconds: float  # when it was last reported
    until_seconds: float  # it counts as resolved unless reported again before


class SelfProblems:
    """The current problems of this process, as WatcherDegraded findings. Any thread may report or ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, SelfProblem] = {}  # by scope

    def report(self, scope: str, summary: str, evidence: str, advice: str, now: float, hold_seconds: float) -> None:
        """Something is wrong now. It is held for `hold_seconds`, so that an intermittent problem is one episode."""
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
            known = self._problems.get(scope)
            if known is not None:
                finding = replace(finding, since_seconds=known.finding.since_seconds)
            self._problems[scope] = SelfProblem(finding, now, now + hold_seconds)

    def findings(self, now: float) -> list[Finding]:
        """The problems that have not expired by `now`, each with the time since it was last noticed."""
        with self._lock:
            self._problems = {scope: each for scope, each in self._problems.items() if now < each.until_seconds}
            return [
                replace(
                    each.finding,
                    evidence=(
                        *each.finding.evidence,
                        f"last noticed {format_duration(now - each.reported_seconds)} ago",
                    ),
                )
                for each in self._problems.values()
            ]
