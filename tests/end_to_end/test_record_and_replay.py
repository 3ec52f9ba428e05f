"""A live simulated job, recorded; judged again from the recording it gets the same alerts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.test_watch_simulated import all_seen, eventually, shortened
from tests.watcher.command_shell import Shell
from wattwatch.collectors.simulated.cluster import SimulatedCluster
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service
from wattwatch.watcher.demo.configuration import write_configuration
from wattwatch.watcher.demo.receiver import DemoReceiver
from wattwatch.watcher.engine.snapshot import EpisodeView


def test_a_recorded_deadlock_is_reported_again_by_replay(tmp_path: Path, shell: Shell) -> None:
    scenario = shortened("deadlock", 15.0, 60.0)
    path = tmp_path / "deadlock.recording"
    with SimulatedCluster([scenario], speed=5.0) as cluster:
        receiver = DemoReceiver(cluster.clock)
        config = load_config(write_configuration(cluster, receiver.address, "127.0.0.1:0"))
        service = Service(config, cluster.clock, record=path)
        service.start()
        try:
            assert eventually(lambda: all_seen(service.snapshot, scenario))
            cluster.begin()
            assert eventually(lambda: any(episode.confirmed for episode in service.snapshot.episodes))
            told_at = service.snapshot.tick
            assert eventually(lambda: service.snapshot.tick >= told_at + 3)
            live = {named(episode) for episode in service.snapshot.episodes}
        finally:
            service.stop()
            receiver.stop()
    answer = shell.run("replay", "--json", path)
    (said,) = answer.json
    again = {
        (e["job"], e["alert"], e["severity"], e["confirmed"], json.dumps(e["suspects"])) for e in said["alerts"]
    }  # fmt: skip
    assert again == live
    assert answer.exit_code == 2
    states = [change["state"] for change in said["states"]]
    assert states[-1] == "hung"
    assert "computing" in states
    (picture,) = shell.run("triage", "--json", path).json
    assert (picture["state"], [s["rank"] for s in picture["suspects"]]) == ("hang", [3])


def named(episode: EpisodeView) -> tuple[str, str, str, bool, str]:
    suspects = [{"node": s.node, "gpu": s.gpu, "rank": s.rank} for s in episode.suspects]
    return (episode.job, episode.alert, episode.severity.value, episode.confirmed, json.dumps(suspects))
