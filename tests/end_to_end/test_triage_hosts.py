"""`wattwatch triage HOST` against simulated nodes behind real SSH."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.test_watch_simulated import shortened
from tests.tools import DEADLINE_SECONDS
from tests.watcher.command_shell import Shell
from wattwatch.collectors.simulated.cluster import SimulatedCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    """A job of two nodes that has just gone into its deadlock."""
    with SimulatedCluster([shortened("deadlock", 6.0, 600.0)], speed=2.0) as cluster:
        cluster.begin()
        cluster.wait_for_phase("deadlock", 1, DEADLINE_SECONDS)
        yield cluster


def test_two_hosts_of_one_job_show_who_is_missing(cluster: SimulatedCluster, shell: Shell) -> None:
    answer = shell.run("triage", "--json", "-F", cluster.ssh_config, "--job", "deadlock-1", "deadlock-2")
    (said,) = answer.json
    assert (said["source"], said["state"], said["shape"]) == ("job", "hang", "one_low_rest_busy")
    assert said["suspects"] == [{"node": "deadlock-1", "gpu": 3, "rank": 3}]
    assert len(said["gpus"]) == 16
    assert answer.exit_code == 2


def test_without_job_each_host_has_its_own_verdict(cluster: SimulatedCluster, shell: Shell) -> None:
    answer = shell.run("triage", "--json", "-F", cluster.ssh_config, "deadlock-1", "deadlock-2", "deadlock-1")
    assert [(said["source"], said["state"]) for said in answer.json] == [("deadlock-1", "hang"), ("deadlock-2", "hang")]
    assert {len(said["gpus"]) for said in answer.json} == {8}


def test_an_unreachable_host_of_the_job_is_named_and_lowers_the_confidence(
    cluster: SimulatedCluster, shell: Shell
) -> None:
    config = cluster.directory / "with_a_dead_one"
    config.write_text(cluster.ssh_config.read_text() + "Host deadlock-3\n HostName 127.0.0.1\n Port 1\n")
    whole, part = (
        shell.run("triage", "--json", "-F", config, "--job", *hosts).json[0]
        for hosts in (("deadlock-1", "deadlock-2"), ("deadlock-1", "deadlock-2", "deadlock-3"))
    )
    assert part["state"] == whole["state"] == "hang"
    assert part["confidence"] < whole["confidence"]
    assert "Not seen: deadlock-3: node is up but refuses SSH connections" in part["why"]


def test_nothing_stays_behind_on_the_hosts(cluster: SimulatedCluster, shell: Shell) -> None:
    shell.run("triage", "-F", cluster.ssh_config, "deadlock-1")
    cluster.stop()
    assert cluster.left_behind == ()
