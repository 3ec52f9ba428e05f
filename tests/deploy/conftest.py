"""A simulated cluster with a deadlock and a checkpoint in it, the real service that watches it, and Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.prometheus_server import PrometheusServer, scraping
from tests.tools import require_tool
from wattwatch.collectors.simulated.cluster import SimulatedCluster
from wattwatch.collectors.simulated.scenario import get_scenario
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service
from wattwatch.watcher.demo.configuration import table, write_configuration
from wattwatch.watcher.demo.receiver import DemoReceiver

SPEED = 5.0


@pytest.fixture(scope="package")
def exporter_address() -> Iterator[str]:
    """http://host:port of a wattwatch with alerts, GPU readings and failed deliveries: every query finds data."""
    with SimulatedCluster([get_scenario("deadlock"), get_scenario("checkpoint")], SPEED) as cluster:
        receiver = DemoReceiver(cluster.clock)
        try:
            service = Service(load_config(with_a_broken_receiver(cluster, receiver.address)), cluster.clock)
            service.start()
            try:
                cluster.begin()
                yield service.address
            finally:
                service.stop()
        finally:
            receiver.stop()


def with_a_broken_receiver(cluster: SimulatedCluster, receiver_address: str) -> Path:
    """The demo's configuration with one more receiver that accepts nothing, so that there are failed deliveries."""
    path = write_configuration(cluster, receiver_address, "127.0.0.1:0")
    url = path.with_name("broken_url")
    url.write_text(f"{receiver_address}/nowhere\n", "utf-8")
    tables = (
        table("[[receivers]]", name="broken", type="webhook", url_file=str(url)),
        table("[[routes]]", receiver="broken"),
    )
    path.write_text("\n".join([path.read_text("utf-8"), *tables]), "utf-8")
    return path


@pytest.fixture(scope="package")
def prometheus(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[PrometheusServer]:
    require_tool("prometheus")  # before a cluster is started for nothing
    address = request.getfixturevalue("exporter_address")
    with scraping(address, tmp_path_factory.mktemp("prometheus")) as server:
        yield server
