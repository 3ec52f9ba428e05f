"""Writes the demo's wattwatch.toml as a user would, for the simulated cluster and the demo's own receivers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

from wattwatch.collectors.simulated.cluster import SimulatedCluster, SimulatedJob
from wattwatch.collectors.simulated.real_job import FollowedJob
from wattwatch.watcher.demo.receiver import SLACK_PATH, WEBHOOK_PATH

INTERVAL_SECONDS: Final = 1.0


def write_configuration(cluster: SimulatedCluster, receiver_address: str, listen: str) -> Path:
    """Writes wattwatch.toml and the URL files of the receivers into the cluster's directory. Returns its path."""
    directory = cluster.directory
    for name, url_path in (("webhook", WEBHOOK_PATH), ("slack", SLACK_PATH)):
        (directory / f"{name}_url").write_text(f"{receiver_address}{url_path}\n", "utf-8")
    (directory / "state").mkdir()
    tables = [
        table("[watcher]", listen=listen, state_directory=str(directory / "state"), interval=f"{INTERVAL_SECONDS:g}s"),
        table("[ssh]", config_file=str(cluster.ssh_config)),
        *(job_table(job) for job in cluster.jobs),
        *(followed_table(job) for job in cluster.followed),
    ]
    for name in ("webhook", "slack"):
        tables.append(table("[[receivers]]", name=name, type=name, url_file=str(directory / f"{name}_url")))
        tables.append(table("[[routes]]", receiver=name))
    path = directory / "wattwatch.toml"
    path.write_text("\n".join(tables), "utf-8")
    return path


def followed_table(job: FollowedJob) -> str:
    """With half of the shortest stall limit that would be learned, so that the demo is short."""
    nodes = node_list(job.node_names)
    return table("[[jobs]]", name=job.name, nodes=nodes, run_directory=job.run_directory, stall_limit="15s")


def node_list(names: Sequence[str]) -> str:
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))


def job_table(job: SimulatedJob) -> str:
    scenario = job.scenario
    nodes = node_list(scenario.node_names)
    if job.run_directory is not None:
        return table("[[jobs]]", name=scenario.name, nodes=nodes, run_directory=str(job.run_directory))
    return table(
        "[[jobs]]",
        name=scenario.name,
        nodes=nodes,
        logs=[str(path) for path in job.logs],
        checkpoint_directory=str(job.checkpoint_directory),
    )


def table(head: str, **values: str | Sequence[str]) -> str:
    """One TOML table. Strings and lists of strings are written as in JSON."""
    return "\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in values.items())]) + "\n"
