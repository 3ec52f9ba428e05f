"""Most nodes silent at once is our own network; one node silent is that node."""

from __future__ import annotations

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import AlertName
from wattwatch.watcher.engine.self_monitoring import NetworkLossDetector

NODES = [f"node-{i:02d}" for i in range(8)]


def links(silent: int = 0, status: HostStatus = HostStatus.UNREACHABLE) -> dict[str, NodeLink]:
    return {
        node: NodeLink(node, status, "no line for 6 s") if i < silent else NodeLink(node, HostStatus.OK, "")
        for i, node in enumerate(NODES)
    }


def looked(*rounds: dict[str, NodeLink]) -> NetworkLossDetector:
    sight = NetworkLossDetector(interval_seconds=1.0)
    for second, each in enumerate(rounds):
        sight.look(each, float(second))
    return sight


def test_most_nodes_silent_within_seconds_is_blindness() -> None:
    sight = looked(links(), links(silent=3), links(silent=6))
    assert sight.since == 2.0
    finding = sight.finding(links(silent=6))
    assert finding is not None
    assert finding.alert is AlertName.WATCHER_DEGRADED
    assert "6 of 8 nodes went silent together" in finding.summary
    assert "node-00: no line for 6 s" in finding.evidence


def test_one_silent_node_is_that_nodes_affair() -> None:
    assert looked(links(), links(silent=1), links(silent=1)).since is None


def test_nodes_lost_one_by_one_over_minutes_are_not_blindness() -> None:
    sight = NetworkLossDetector(interval_seconds=1.0)
    for second in range(120):
        sight.look(links(silent=min(7, second // 15)), float(second))
    assert sight.since is None


def test_refused_logins_are_the_nodes_answer_not_blindness() -> None:
    assert looked(links(), links(silent=8, status=HostStatus.AUTH_FAILED)).since is None


def test_sight_comes_back_and_settles_before_anything_is_concluded() -> None:
    sight = looked(links(), links(silent=8), links(silent=8), links())
    assert sight.since is None
    assert sight.settling(3.5)
    assert not sight.settling(10.0)


def test_a_starved_watcher_concludes_nothing_until_it_has_settled() -> None:
    sight = looked(links(), links())
    sight.look(links(), 60.0)  # the process was stopped for a minute
    assert sight.starved_looks == 1
    assert sight.settling(61.0)
    assert not sight.settling(64.0)
    assert sight.since is None


def test_nodes_that_stay_away_for_ten_minutes_are_gone_and_sight_goes_on_without_them() -> None:
    sight = looked(links(), links(silent=6))
    for second in range(2, 620):
        sight.look(links(silent=6), float(second))
    assert sight.since is None
    assert not sight.settling(620.0)
