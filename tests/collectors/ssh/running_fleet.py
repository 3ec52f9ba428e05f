"""A fleet that runs during a test, with helpers that wait for a state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.fleet import Fleet, OnLine
from wattwatch.collectors.ssh.model import NodeLink, SshSettings


class RunningFleet:
    """A started fleet with all samples so far."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.samples: list[NodeSample] = []

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it. The limit is generous: it only ends a test that has failed."""
        ends = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < ends, f"never came to: {what}; links: {self.fleet.links()}"
            self.fleet.wait(0.05)
            self.samples += self.fleet.drain()

    def link(self, node: str = "node") -> NodeLink:
        return self.fleet.links()[node]

    def until_status(self, status: HostStatus, node: str = "node") -> NodeLink:
        self.until(lambda: self.link(node).status is status, f"{node} {status}")
        return self.link(node)

    def until_lines(self, more: int = 1, node: str = "node") -> None:
        """That many further lines."""
        wanted = self.link(node).lines + more
        self.until(lambda: self.link(node).lines >= wanted, f"{more} more lines of {node}")


@contextlib.contextmanager
def running_fleet(
    settings: SshSettings,
    nodes: tuple[str, ...] = ("node",),
    clock: Clock | None = None,
    on_line: OnLine | None = None,
    interval_seconds: float = 1.0,
) -> Iterator[RunningFleet]:
    request = ProbeRequest(interval_seconds=interval_seconds)
    fleet = Fleet(dict.fromkeys(nodes, request), settings, clock or Clock(), on_line)
    fleet.start()
    try:
        yield RunningFleet(fleet)
    finally:
        fleet.stop()
