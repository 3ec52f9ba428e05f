"""Can the job's nodes be seen? Blind is not broken: a silent node and a silent sampler are findings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.detection.model import (
    DEFAULT_SEVERITY,
    AlertName,
    Finding,
    NodeState,
    Severity,
    Suspect,
    readable_progress_text,
    unreadable_reason,
)
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

UNREACHABLE_SECONDS: Final = 10.0
# A node that never spoke may still wait its turn: logins are bounded, and a thousand nodes take a while.
NEVER_SEEN_SECONDS: Final = 60.0
UNREADABLE_SECONDS: Final = 10.0
# The job counts as standing with its node when its counter stands this many of its usual intervals.
STALLED_INTERVALS: Final = 3.0
ALL_SILENT_SECONDS: Final = 60.0

UNREADABLE_ADVICE: Final = {
    HostStatus.SAMPLER_TIMEOUT: "The driver's query hangs; the job may be well. Look at the kernel log for Xid 119, "
    "and never kill a stuck GPU reader with SIGKILL.",
    HostStatus.DRIVER_DOWN: "The driver cannot be asked: it was upgraded under the job or unloaded, or the container "
    "lost its devices. The job may be well.",
    HostStatus.PARSE_ERROR: "What the node sends cannot be read: look at what its login shell prints.",
    HostStatus.AUTH_FAILED: "The login is refused: look at key, user and certificate with `wattwatch check`.",
    HostStatus.HOST_KEY_CHANGED: "The host key is not the known one. Find out why before you accept a new one.",
    HostStatus.NO_DEVICES: "The driver sees no board although the job needs them: look at the kernel log.",
}


@dataclass(slots=True)
class UnreadableNode:
    """A node that does not tell of its boards: since when, in which way now, and what has been said of it."""

    since: float
    status: HostStatus
    status_since: float
    told: dict[AlertName, float] = field(default_factory=dict)  # alert -> since


class ReachabilityTracker:
    """Follows how long each node has been out of sight, on the look's clock.

    What was said of a node stays said until it is seen again: a rebooting node alternates between silent and refusing,
    and a blind one may fall silent, without being any better for it.
    """

    def __init__(self) -> None:
        self._out: dict[str, UnreadableNode] = {}
        self._all_silent = False

    def look(self, look: Observation, pace: StepRateTracker) -> tuple[Finding, ...]:
        """The findings of each node that has been out of sight for long enough."""
        self._all_silent = all(n.status is HostStatus.UNREACHABLE for n in look.sample.nodes)
        return tuple(finding for node in look.sample.nodes for finding in self._look_at(look, pace, node))

    def _look_at(self, look: Observation, pace: StepRateTracker, node: NodeState) -> Iterator[Finding]:
        if node.status is HostStatus.OK:
            self._out.pop(node.node, None)
            return
        out = self._out.setdefault(node.node, UnreadableNode(look.now, node.status, look.now))
        if node.status is not out.status:
            out.status, out.status_since = node.status, look.now
        since, limit = out.status_since, UNREADABLE_SECONDS
        if node.status is HostStatus.UNREACHABLE:
            # Silence began with the last line, not when it was noticed.
            since = out.since if node.age_seconds is None else min(out.since, look.now - node.age_seconds)
            limit = NEVER_SEEN_SECONDS if node.age_seconds is None else UNREACHABLE_SECONDS
        if look.now - since >= limit:
            out.told.setdefault(alert_for_status(node.status), since)
        for alert, told_since in out.told.items():
            if alert is AlertName.NODE_UNREACHABLE:
                yield self._unreachable(look, pace, node, told_since)
            else:
                yield self._blind(look, node, alert, told_since)

    def _unreachable(self, look: Observation, pace: StepRateTracker, node: NodeState, since: float) -> Finding:
        usual, stalled = pace.usual_seconds, pace.stalled_seconds
        readable = stalled is not None and pace.advances > 0
        standing = readable and stalled is not None and stalled > STALLED_INTERVALS * (usual or UNREACHABLE_SECONDS)
        # Nobody is left who could say how the job is: that is as grave.
        gone = self._all_silent and look.now - since >= ALL_SILENT_SECONDS
        silence = f"last line {look.now - since:.0f} s ago" if node.age_seconds is not None else "never a line"
        evidence = [f"{node.node}: {node.detail}", silence]
        if readable and stalled is not None:
            evidence.append(f"the job's step counter last moved {stalled:.0f} s ago")
        elif stalled is None:
            evidence.append("the job's progress cannot be read from any other node")
        return Finding(
            job=look.spec.name,
            alert=AlertName.NODE_UNREACHABLE,
            severity=Severity.CRITICAL if standing or gone else DEFAULT_SEVERITY[AlertName.NODE_UNREACHABLE],
            scope=node.node,
            summary=f"{node.node} does not answer"
            + (
                f", and {look.spec.name} stands."
                if standing
                else f", nor does any node of {look.spec.name}."
                if gone
                else "."
            ),
            evidence=tuple(evidence),
            advice="Look at the node's console or BMC: it may be down, rebooting, or cut off. "
            + ("The job waits for it; restart without the node." if standing else "The job itself may be well."),
            since_seconds=since,
            suspects=(Suspect(node.node),),
            gpus_idle=(look.sample.expected_gpus or 0) if standing else 0,
        )

    def _blind(self, look: Observation, node: NodeState, alert: AlertName, since: float) -> Finding:
        fault = alert is AlertName.GPU_FAULT
        unseen = "; ".join(
            filter(
                None, (f"GPUs of {node.node} cannot be seen: {unreadable_reason(node)}", readable_progress_text(node))
            )
        )
        return Finding(
            job=look.spec.name,
            alert=alert,
            severity=DEFAULT_SEVERITY[alert],
            scope=node.node,
            summary=f"{node.node} sees no GPU." if fault else f"{unseen}.",
            evidence=(f"{node.status.value.replace('_', ' ')} for {look.now - since:.0f} s: {node.detail}",),
            advice=UNREADABLE_ADVICE.get(node.status, "Look at the node by hand."),
            since_seconds=since,
            suspects=(Suspect(node.node),),
        )


def alert_for_status(status: HostStatus) -> AlertName:
    """What is said of a node that is out of sight in this way."""
    if status is HostStatus.UNREACHABLE:
        return AlertName.NODE_UNREACHABLE
    return AlertName.GPU_FAULT if status is HostStatus.NO_DEVICES else AlertName.PROBE_BLIND
