"""Blind is not broken: most nodes silent at once means our own network, or our own process, not theirs.

Prometheus and Healthchecks turn a monitor's outage into a flood about everyone (healthchecks#664, uptime-kuma#774).
Here it is one state of its own, in which nothing is concluded about any job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding

# Fewer nodes than this going silent together may well be one rack, or one job's nodes.
MIN_NODES: Final = 4
LOST_NODES_SHARE: Final = 0.5
# Nodes that vanish together do not vanish within one look: compare with those that answered this long ago.
LOSS_WINDOW_INTERVALS: Final = 8.0
# A look this late means that this process was stopped or starved: what it knows is old.
STALLED_INTERVALS: Final = 5.0
PAUSE_INTERVALS: Final = 3.0
# A network that is cut comes back or is noticed; nodes that stay away for this long are gone, and each says so.
MAX_BLIND_SECONDS: Final = 600.0


class NetworkLossDetector:
    """Watches the watcher's own sight. Pure: links and time come in."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._history: deque[tuple[float, frozenset[str]]] = deque()
        self._before: frozenset[str] = frozenset()
        self._settle_until = float("-inf")
        self.since: float | None = None
        self.starved_looks = 0

    def look(self, links: Mapping[str, NodeLink], now: float) -> None:
        """Take note of who answers. Call at each tick."""
        answering = frozenset(node for node, link in links.items() if link.status is HostStatus.OK)
        if self._history and now - self._history[-1][0] > STALLED_INTERVALS * self._interval:
            self.starved_looks += 1
            self._settle(now)
        if self.since is None:
            self._look_for_loss(answering, links, now)
        elif (
            len(self._before & answering) >= LOST_NODES_SHARE * len(self._before)
            or now - self.since > MAX_BLIND_SECONDS
        ):
            self.since = None
            self._settle(now)
        self._history.append((now, answering))
        while now - self._history[0][0] > LOSS_WINDOW_INTERVALS * self._interval:
            self._history.popleft()

    def settling(self, now: float) -> bool:
        """True while what is known may be stale: nothing may be concluded yet."""
        return now < self._settle_until

    def finding(self, links: Mapping[str, NodeLink]) -> Finding | None:
        """The one alert of a blind watcher; None while it sees."""
        if self.since is None:
            return None
        silent = sorted(n for n in self._before if n not in links or links[n].status is not HostStatus.OK)
        return Finding(
            job="",
            alert=AlertName.WATCHER_DEGRADED,
            severity=ALERT_KINDS[AlertName.WATCHER_DEGRADED].severity,
            scope="",
            summary=f"The watcher is blind: {len(silent)} of {len(self._before)} nodes went silent together.",
            evidence=tuple(f"{node}: {links[node].detail}" for node in silent[:5] if node in links),
            advice="Look at this control host's own network first. Nothing is concluded about jobs on these nodes "
            f"until they answer again, for {MAX_BLIND_SECONDS / 60:.0f} min at most.",
            since_seconds=self.since,
        )

    def _look_for_loss(self, answering: frozenset[str], links: Mapping[str, NodeLink], now: float) -> None:
        before = max((nodes for _, nodes in self._history), key=len, default=frozenset())
        lost = {n for n in before - answering if n in links and links[n].status is HostStatus.UNREACHABLE}
        if len(before) >= MIN_NODES and len(lost) > LOST_NODES_SHARE * len(before):
            self.since = now
            self._before = before

    def _settle(self, now: float) -> None:
        self._history.clear()
        self._settle_until = now + PAUSE_INTERVALS * self._interval
