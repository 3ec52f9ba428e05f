"""The simulated cluster as a separate process: `python -m wattwatch.collectors.simulated`, started by cluster.py.

A separate process makes the watcher's CPU cost measurable and does not share its interpreter lock. Standard input: the
setup (one JSON line), then one command per line: `begin`, `freeze NODE`, `thaw NODE`, `drop NODE`; when it is closed,
the cluster ends. Standard output: one JSON line each for `ready`, every phase that starts, and `ended`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.driver import Driver, PhaseStarted, set_up_scenarios
from wattwatch.collectors.simulated.real_job import FollowedJob, Follower, set_up_nodes
from wattwatch.collectors.simulated.scenario import parse_scenario
from wattwatch.collectors.simulated.ssh_server import (
    NodeServer,
    new_private_key,
    public_line,
    read_key,
    read_public_line,
)

# Real seconds that commands have to exit by themselves after their connection is closed.
EXIT_WAIT_SECONDS: Final = 30.0


def send_event(kind: str, content: Any) -> None:
    with SEND_LOCK:
        sys.stdout.buffer.write(orjson.dumps({kind: content}) + b"\n")
        sys.stdout.buffer.flush()


SEND_LOCK: Final = threading.Lock()


def main() -> None:
    setup = orjson.loads(sys.stdin.buffer.readline())
    clock = Clock(setup["speed"], setup["monotonic_origin"], setup["wall_origin"])
    scenarios = [parse_scenario(row.pop("name"), row) for row in setup["scenarios"]]
    client_key = read_public_line(setup["client_key"])
    place = (Path(setup["live_directory"]), Path(setup["directory"]) / "tools", clock, setup["preload_pynvml"])
    scenarios_running, nodes = set_up_scenarios(scenarios, *place)
    jobs = [FollowedJob(**{**row, "node_names": tuple(row["node_names"])}) for row in setup["followed"]]
    followed = set_up_nodes(jobs, *place)
    follower = Follower(jobs, followed, clock)
    nodes = {**nodes, **followed}
    servers = {
        name: NodeServer(name, read_key(new_private_key()), client_key, node.directory / "home", node.environment())
        for name, node in nodes.items()
    }
    driver = Driver(scenarios_running, clock, lambda name: servers[name].freeze(), report)
    driver.start()
    follower.start()
    for server in servers.values():
        server.start()
    send_event(
        "ready", {name: {"port": one.port, "host_key": public_line(one.host_key)} for name, one in servers.items()}
    )
    try:
        run_commands(driver, servers)
    finally:
        for server in servers.values():
            server.stop()
        left = wait_for_children([child for server in servers.values() for child in server.running()])
        driver.stop()
        follower.stop()
        for directory in (setup["live_directory"], setup["directory"]):
            shutil.rmtree(directory, ignore_errors=True)  # the parent may have been killed before it could
        send_event(
            "ended", {"latest_seconds": max(driver.latest_seconds, follower.latest_seconds), "left_behind": left}
        )
        sys.stdout.flush()
        os._exit(0)  # without waiting for threads of connections that are closing


def report(started: PhaseStarted) -> None:
    send_event("phase", dataclasses.asdict(started))


def run_commands(driver: Driver, servers: Mapping[str, NodeServer]) -> None:
    """Run the commands on standard input until it ends."""
    for line in sys.stdin.buffer:
        verb, _, node = line.decode().strip().partition(" ")
        if verb == "begin":
            driver.begin()
        elif verb in ("freeze", "thaw", "drop") and node in servers:
            getattr(servers[node], verb)()


def wait_for_children(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Pids of commands that outlived their connection, so that they can be terminated at exit."""
    deadline = time.monotonic() + EXIT_WAIT_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [child.pid for child in children if child.poll() is None]
    for pid in left:
        os.killpg(pid, signal.SIGTERM)
    return left


if __name__ == "__main__":
    main()
