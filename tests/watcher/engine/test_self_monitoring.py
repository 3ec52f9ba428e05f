"""If most nodes go silent at once, the watcher's network has failed; if one does, that node has."""

from __future__ import annotations

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import AlertName
from wattwatch.watcher.engine.self_monitoring import NetworkLossDetector, SelfProblems

NODES = [f"node-{i:02d}" for i in range(8)]


def links(silent: int = 0, status: HostStatus = HostStatus.UNREACHABLE) -> dict[str, NodeLink]:
    return {
        node: NodeLink(node, status, "no line for 6 s") if i < silent else NodeLink(node, HostStatus.OK, "")
        for i, node in enumerate(NODES)
    }


def after(*rounds: dict[str, NodeLink]) -> NetworkLossDetector:
    detector = NetworkLossDetector(interval_seconds=1.0)
    for second, each in enumerate(rounds):
        detector.update(each, float(second))
    return detector


def test_most_nodes_silent_within_seconds_is_a_network_loss() -> None:
    detector = after(links(), links(silent=3), links(silent=6))
    assert detector.since == 2.0
    finding = detector.finding(links(silent=6))
    assert finding is not None
    assert finding.alert is AlertName.WATCHER_DEGRADED
    assert "lost contact with 6 of 8 nodes at the same time" in finding.summary
    assert "node-00: no line for 6 s" in finding.evidence


def test_one_silent_node_is_no_network_loss() -> None:
    assert after(links(), links(silent=1), links(silent=1)).since is None


def test_nodes_lost_one_by_one_over_minutes_are_no_network_loss() -> None:
    detector = NetworkLossDetector(interval_seconds=1.0)
    for second in range(120):
        detector.update(links(silent=min(7, second // 15)), float(second))
    assert detector.since is None


def test_refused_logins_are_no_network_loss() -> None:
    assert after(links(), links(silent=8, status=HostStatus.AUTH_FAILED)).since is None


def test_evaluation_pauses_for_fresh_samples_after_the_network_returns() -> None:
    detector = after(links(), links(silent=8), links(silent=8), links())
    assert detector.since is None
    assert detector.is_paused(3.5)
    assert not detector.is_paused(10.0)


def test_evaluation_pauses_after_the_process_was_stalled() -> None:
    detector = after(links(), links())
    detector.update(links(), 60.0)  # the process was stopped for a minute
    assert detector.stalled_ticks == 1
    assert detector.is_paused(61.0)
    assert not detector.is_paused(64.0)
    assert detector.since is None


def test_after_ten_minutes_the_silent_nodes_count_as_down_and_evaluation_continues() -> None:
    detector = after(links(), links(silent=6))
    for second in range(2, 620):
        detector.update(links(silent=6), float(second))
    assert detector.since is None
    assert not detector.is_paused(620.0)


def test_a_problem_that_is_held_says_when_it_was_last_noticed() -> None:
    problems = SelfProblems()
    problems.report("disk", "The disk is nearly full.", "/var: 90 MB free", "Free disk space.", 100.0, 180.0)
    problems.report("disk", "The disk is nearly full.", "/var: 80 MB free", "Free disk space.", 160.0, 180.0)
    (finding,) = problems.findings(250.0)
    assert finding.since_seconds == 100.0
    assert finding.evidence == ("/var: 80 MB free", "last noticed 1 min 30 s ago")
    assert problems.findings(341.0) == []
