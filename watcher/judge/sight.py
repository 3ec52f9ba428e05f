"""Can the job's nodes be seen? Blind is not broken: a silent node and a silent sampler are findings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from collectors.samples import HostStatus
from watcher.judge.finding import DEFAULT_SEVERITY, AlertName, Finding, Severity
from watcher.judge.job_sample import NodeState
from watcher.judge.look import Look
from watcher.judge.pace import Pace
from watcher.judge.verdict import Suspect

UNREACHABLE_SECONDS: Final = 10.0
# A node that never spoke may still wait its turn: logins are bounded, and a thousand nodes take a while.
NEVER_SEEN_SECONDS: Final = 60.0
BLIND_SECONDS: Final = 10.0
# The job counts as standing with its node when its counter stands this many of its usual intervals.
STANDING_INTERVALS: Final = 3.0

BLIND_ADVICE: Final = {
    HostStatus.SAMPLER_TIMEOUT: "The driver's query hangs; the job may be well. Look at the kernel log for Xid 119, "
    "and never kill a stuck GPU reader with SIGKILL.",
    HostStatus.DRIVER_DOWN: "The driver cannot be asked: it was upgraded under the job or unloaded, or the container "
    "lost its devices. The job may be well.",
    HostStatus.PARSE_ERROR: "What the node sends cannot be read: look at what its login shell prints.",
    HostStatus.AUTH_FAILED: "The login is refused: look at key, user and certificate with `wattwatch check`.",
    HostStatus.HOST_KEY_CHANGED: "The host key is not the known one. Find out why before you accept a new one.",
    HostStatus.NO_DEVICES: "The driver sees no board although the job needs them: look at the kernel log.",
}


class Sight:
    """Follows how long each node has been out of sight, on the look's clock."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[HostStatus, float]] = {}

    def look(self, look: Look, pace: Pace) -> tuple[Finding, ...]:
        """One finding a node that has been out of sight for long enough."""
        return tuple(self._findings(look, pace))

    def _findings(self, look: Look, pace: Pace) -> Iterator[Finding]:
        for node in look.sample.nodes:
            if node.status is HostStatus.OK:
                self._since.pop(node.node, None)
                continue
            status, since = self._since.get(node.node, (node.status, look.now))
            if status is not node.status:
                since = look.now
            # Silence began with the last line, not when it was noticed.
            if node.status is HostStatus.UNREACHABLE and node.age_seconds is not None:
                since = look.now - node.age_seconds
            self._since[node.node] = (node.status, since)
            seconds = look.now - since
            if node.status is HostStatus.UNREACHABLE:
                if seconds >= (NEVER_SEEN_SECONDS if node.age_seconds is None else UNREACHABLE_SECONDS):
                    yield self._unreachable(look, pace, node, since)
            elif seconds >= BLIND_SECONDS:
                yield self._blind(look, node, since)

    def _unreachable(self, look: Look, pace: Pace, node: NodeState, since: float) -> Finding:
        usual, stalled = pace.usual_seconds, pace.stalled_seconds
        readable = stalled is not None and pace.advances > 0
        standing = readable and stalled is not None and stalled > STANDING_INTERVALS * (usual or UNREACHABLE_SECONDS)
        silence = f"last line {look.now - since:.0f} s ago" if node.age_seconds is not None else "never a line"
        evidence = [f"{node.node}: {node.detail}", silence]
        if readable and stalled is not None:
            evidence.append(f"the job's step counter last moved {stalled:.0f} s ago")
        elif stalled is None:
            evidence.append("the job's progress cannot be read from any other node")
        return Finding(
            job=look.spec.name,
            alert=AlertName.NODE_UNREACHABLE,
            severity=Severity.CRITICAL if standing else DEFAULT_SEVERITY[AlertName.NODE_UNREACHABLE],
            scope=node.node,
            summary=f"{node.node} does not answer" + (f", and {look.spec.name} stands." if standing else "."),
            evidence=tuple(evidence),
            advice="Look at the node's console or BMC: it may be down, rebooting, or cut off. "
            + ("The job waits for it; restart without the node." if standing else "The job itself may be well."),
            since_seconds=since,
            suspects=(Suspect(node.node),),
            gpus_idle=(look.sample.expected_gpus or 0) if standing else 0,
        )

    def _blind(self, look: Look, node: NodeState, since: float) -> Finding:
        fault = node.status is HostStatus.NO_DEVICES
        alert = AlertName.GPU_FAULT if fault else AlertName.PROBE_BLIND
        return Finding(
            job=look.spec.name,
            alert=alert,
            severity=DEFAULT_SEVERITY[alert],
            scope=node.node,
            summary=f"{node.node} sees no GPU." if fault else f"The watcher is blind on {node.node}.",
            evidence=(f"{node.status.value.replace('_', ' ')} for {look.now - since:.0f} s: {node.detail}",),
            advice=BLIND_ADVICE.get(node.status, "Look at the node by hand."),
            since_seconds=since,
            suspects=(Suspect(node.node),),
        )
