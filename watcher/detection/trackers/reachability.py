"""Which of the job's nodes cannot be observed, and for how long: NodeUnreachable, ProbeBlind, GpuFault ("no GPU").

"Cannot be read" is not "broken": a silent node or a hung GPU query says nothing about the job. These are findings of
their own, and never make a job hung, crashed or complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import UnreachableCause
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, NodeState, Severity, Suspect
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

# Ten missed lines at the default interval of 1 s; chosen, so that one TCP retransmission is no alert.
UNREACHABLE_SECONDS: Final = 10.0
# A node that has never answered may still be queued: SSH logins are limited in number, and 1,000 nodes take a while.
NEVER_SEEN_SECONDS: Final = 60.0
UNREADABLE_SECONDS: Final = 10.0
# The job counts as stopped together with its node once its step counter is this many usual intervals late.
STALLED_INTERVALS: Final = 3.0
# When every node is silent nobody is left to report the job's progress: critical after this time.
ALL_SILENT_SECONDS: Final = 60.0

MAY_BE_FINE: Final = "The job itself may be fine."
UNREACHABLE_ADVICE: Final = {
    UnreachableCause.REFUSED: "The node is up: from its console or BMC, check that sshd is running and which port it "
    "uses, or wait if the node is booting.",
    UnreachableCause.NAME: "Check the node's name in the configuration, HostName in ssh_config, and DNS on the "
    "watcher's host. Nothing was sent to the node.",
    UnreachableCause.HANDSHAKE: "The node is up: check the log of its sshd (MaxStartups, banned addresses, a full "
    "process table) and that the configured port belongs to sshd.",
    UnreachableCause.SESSION: "The node is up: log in to it and check its load, its file systems and Python 3.8 or "
    "later, or run `wattwatch check`.",
    UnreachableCause.GATEWAY: "Check the SSH gateway: its log, AllowTcpForwarding, and whether it reaches the node.",
    UnreachableCause.CONFIGURATION: "Correct ssh_config on the watcher's host, then run `wattwatch check`. Nothing was "
    "sent to the node.",
    UnreachableCause.NOT_TRIED: "Wait for the first login, or raise [ssh] max_simultaneous_logins.",
}
# Told anew within an episode when it changes. A dead host is silent and without a route in turn: one cause.
UNREACHABLE_CAUSES: Final = {
    UnreachableCause.REFUSED: "node up, sshd down",
    UnreachableCause.NAME: "host name does not resolve",
    UnreachableCause.HANDSHAKE: "SSH handshake fails",
    UnreachableCause.SESSION: "no data after the SSH login",
    UnreachableCause.GATEWAY: "SSH gateway does not connect",
    UnreachableCause.CONFIGURATION: "ssh_config is wrong",
}
UNREADABLE_ADVICE: Final = {
    HostStatus.SAMPLER_TIMEOUT: f"{MAY_BE_FINE} Check the kernel log for Xid 119 (GSP firmware error). "
    "Do not send SIGKILL to the hung nvidia-smi.",
    HostStatus.DRIVER_DOWN: f"{MAY_BE_FINE} The driver may have been upgraded or unloaded while the "
    "job was running, or the container may have lost its GPU devices.",
    HostStatus.PARSE_ERROR: "Check what the node's login shell prints: this text may be mixed into the output of the "
    "GPU query.",
    HostStatus.AUTH_FAILED: "Check the SSH key, user and certificate with `wattwatch check`.",
    HostStatus.HOST_KEY_CHANGED: "Find out why the host key changed before you accept the new one.",
    HostStatus.NO_DEVICES: "The driver finds no GPU although the job needs GPUs. Check the kernel log.",
}


@dataclass(slots=True)
class UnreadableNode:
    """A node whose GPUs cannot be read: since when, in which way now, and which alerts were raised for it."""

    since: float
    status: HostStatus
    status_since: float
    raised: dict[AlertName, float] = field(default_factory=dict)  # alert -> since when


class ReachabilityTracker:
    """Follows for how long each node has been unreadable.

    An alert that was raised for a node stays until the node is read again. A rebooting node alternates between silent
    and connection refused, and a node with a hung driver may fall silent: neither is an improvement.
    """

    def __init__(self) -> None:
        self._unreadable: dict[str, UnreadableNode] = {}
        self._all_silent = False

    def update(self, observation: Observation, step_rate: StepRateTracker) -> tuple[Finding, ...]:
        """The findings of all nodes that have been unreadable for long enough."""
        nodes = observation.sample.nodes
        self._all_silent = all(n.status is HostStatus.UNREACHABLE for n in nodes)
        return tuple(finding for node in nodes for finding in self._update_node(observation, step_rate, node))

    def _update_node(self, observation: Observation, step_rate: StepRateTracker, node: NodeState) -> Iterator[Finding]:
        if node.status is HostStatus.OK:
            self._unreadable.pop(node.node, None)
            return
        now = observation.now
        state = self._unreadable.setdefault(node.node, UnreadableNode(now, node.status, now))
        if node.status is not state.status:
            state.status, state.status_since = node.status, now
        since, limit = state.status_since, UNREADABLE_SECONDS
        if node.status is HostStatus.UNREACHABLE:
            # Silence began with the last line, not when the link was declared dead.
            since = state.since if node.age_seconds is None else min(state.since, now - node.age_seconds)
            limit = NEVER_SEEN_SECONDS if node.age_seconds is None else UNREACHABLE_SECONDS
        if now - since >= limit:
            state.raised.setdefault(alert_for_status(node.status), since)
        for alert, raised_since in state.raised.items():
            if alert is AlertName.NODE_UNREACHABLE:
                yield self._unreachable_finding(observation, step_rate, node, raised_since)
            else:
                yield self._unreadable_finding(observation, node, alert, raised_since, state.status_since)

    def _unreachable_finding(
        self, observation: Observation, step_rate: StepRateTracker, node: NodeState, since: float
    ) -> Finding:
        job = observation.spec.name
        usual, stalled = step_rate.usual_interval_seconds, step_rate.stalled_seconds
        readable = stalled is not None and step_rate.advances > 0
        job_stalled = readable and stalled is not None and stalled > STALLED_INTERVALS * (usual or UNREACHABLE_SECONDS)
        # No node is left that could report the job's progress: as serious as a stalled job.
        all_silent = self._all_silent and observation.now - since >= ALL_SILENT_SECONDS
        last_line = (
            f"last data received {node.age_seconds:.0f} s ago"
            if node.age_seconds is not None
            else "no data received since the watcher started"
        )
        evidence = [f"{node.node}: {node.detail}", last_line]
        if readable and stalled is not None:
            evidence.append(f"the job's step counter last changed {stalled:.0f} s ago")
        elif stalled is None:
            count = len(observation.sample.nodes) - 1
            elsewhere = f" from the {format_count(count, 'other node')} of the job either" if count else ""
            evidence.append(f"the job's progress cannot be read{elsewhere}")
        summary = f"{node.node} {node.unreachable_text}"
        if node.status is not HostStatus.UNREACHABLE:
            # Not recovered: a rebooting node answers before its driver is loaded.
            summary = f"{node.node} answers again, but its GPUs cannot be read: {node.unreadable_reason}"
        if job_stalled:
            summary += f", and {job} has stopped making steps."
        elif all_silent:
            others = len(observation.sample.nodes) - 1
            none = {0: "", 1: f", and the other node of {job} cannot be reached either"}
            summary += none.get(others, f", and none of the {others} other nodes of {job} can be reached") + "."
        else:
            summary += "."
        kind = ALERT_KINDS[AlertName.NODE_UNREACHABLE]
        cause = node.cause or UnreachableCause.SILENT
        advice = UNREACHABLE_ADVICE.get(cause, kind.advice)
        if node.status is not HostStatus.UNREACHABLE:
            advice = UNREADABLE_ADVICE.get(node.status, kind.advice)
        return Finding(
            job=job,
            alert=kind.name,
            severity=Severity.CRITICAL if job_stalled or all_silent else kind.severity,
            scope=node.node,
            summary=summary,
            evidence=tuple(evidence),
            advice=advice.removeprefix(MAY_BE_FINE).strip()
            + (" The job is waiting for this node: restart the job without it." if job_stalled else f" {MAY_BE_FINE}"),
            since_seconds=since,
            suspects=(Suspect(node.node),),
            gpus_idle=(observation.sample.expected_gpus or 0) if job_stalled else 0,
            causes=(UNREACHABLE_CAUSES.get(cause, "node silent"),),
        )

    def _unreadable_finding(
        self, observation: Observation, node: NodeState, alert: AlertName, since: float, status_since: float
    ) -> Finding:
        summary = f"GPUs of {node.node} cannot be read: {node.unreadable_reason}"
        if node.progress_text:
            summary += f" ({node.progress_text})"
        if alert is AlertName.GPU_FAULT:
            summary = f"The NVIDIA driver of {node.node} finds no GPU"
        kind = ALERT_KINDS[alert]
        return Finding(
            job=observation.spec.name,
            alert=alert,
            severity=kind.severity,
            scope=node.node,
            summary=f"{summary}.",
            evidence=(
                f"{node.status.value.replace('_', ' ')} for {observation.now - status_since:.0f} s: {node.detail}",
            ),
            advice=UNREADABLE_ADVICE.get(node.status, kind.advice),
            since_seconds=since,
            suspects=(Suspect(node.node),),
            causes=unreadable_causes(node),
        )


def unreadable_causes(node: NodeState) -> tuple[str, ...]:
    """Why its GPUs cannot be read. Silence is not among the causes: another alert reports it."""
    if node.status is HostStatus.UNREACHABLE:
        return ()
    return (node.unreadable_reason if node.status is HostStatus.DRIVER_DOWN else node.status.value,)


def alert_for_status(status: HostStatus) -> AlertName:
    """The alert for a node in this state."""
    if status is HostStatus.UNREACHABLE:
        return AlertName.NODE_UNREACHABLE
    return AlertName.GPU_FAULT if status is HostStatus.NO_DEVICES else AlertName.PROBE_BLIND
