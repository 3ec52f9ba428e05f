"""Why a node's boards cannot be seen, in words; and what is read there all the same."""

from __future__ import annotations

from typing import Final

from collectors.samples import HostStatus
from watcher.judge.job_sample import NodeState

HEARTBEAT: Final = "heartbeat"  # as ProgressSample.format
WHY: Final = {
    HostStatus.UNREACHABLE: "it does not answer",
    HostStatus.AUTH_FAILED: "the login is refused",
    HostStatus.HOST_KEY_CHANGED: "the host key is not the known one",
    HostStatus.DRIVER_DOWN: "the driver cannot be asked",
    HostStatus.SAMPLER_TIMEOUT: "the GPU query does not return",
    HostStatus.NO_DEVICES: "the driver sees no board",
    HostStatus.PARSE_ERROR: "the output cannot be read",
}


def why_in_short(node: NodeState) -> str:
    """The same words from look to look: a detail that counts seconds is left to the evidence."""
    first, *_ = node.detail.split("; ")
    return first if node.status is HostStatus.DRIVER_DOWN and first else WHY.get(node.status, node.status.value)


def why_in_full(node: NodeState) -> str:
    """With the node's own words, once: what is said of a driver names what is missing itself."""
    if node.status is HostStatus.DRIVER_DOWN and node.detail:
        return node.detail
    return f"{WHY.get(node.status, node.status.value)} ({node.detail})" if node.detail else why_in_short(node)


def still_read(node: NodeState) -> str:
    """Which steps of the job are read there; "" for none."""
    if not node.step_formats:
        return ""
    return "its heartbeats are read" if HEARTBEAT in node.step_formats else "its log is read"
