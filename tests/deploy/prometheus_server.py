"""A real Prometheus on loopback, with its own directory, that scrapes one exporter and runs the shipped rules."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.tools import DEADLINE_SECONDS, require_tool

DEPLOY = Path(__file__).parents[2] / "deploy"
PAUSE_SECONDS = 0.25


class PrometheusServer:
    """A client of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address, trust_env=False, timeout=DEADLINE_SECONDS)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector now. Raises AssertionError if the expression is not valid PromQL."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def label_values(self, metric: str, label: str) -> list[str]:
        answer = self._client.get(f"/api/v1/label/{label}/values", params={"match[]": metric}).json()
        values: list[str] = answer["data"]
        return values

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.close()

    def without_data(self, expressions: list[str], deadline_seconds: float = DEADLINE_SECONDS) -> list[str]:
        """The expressions that returned nothing until the deadline. Returns early once each has returned data."""
        pause = threading.Event()
        missing = list(dict.fromkeys(expressions))
        for _ in range(int(deadline_seconds / PAUSE_SECONDS)):
            missing = [expression for expression in missing if not self.query(expression)]
            if not missing:
                break
            pause.wait(PAUSE_SECONDS)
        return missing


def configuration(exporter_address: str) -> str:
    """deploy/prometheus/prometheus.yml with the exporter of the test, scraped each second."""
    shipped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    shipped["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    shipped["rule_files"] = [str(DEPLOY / "prometheus" / "rules.yml")]
    (scrape,) = shipped["scrape_configs"]
    scrape["static_configs"] = [{"targets": [exporter_address.removeprefix("http://")]}]
    return yaml.safe_dump(shipped)


@contextmanager
def scraping(exporter_address: str, directory: Path) -> Iterator[PrometheusServer]:
    """A Prometheus that scrapes http://host:port; it is stopped at the end."""
    program = require_tool("prometheus")
    (directory / "prometheus.yml").write_text(configuration(exporter_address), "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            cwd=directory,
            stdout=log,
            stderr=log,
        )
    server = PrometheusServer(f"http://127.0.0.1:{port}")
    pause = threading.Event()
    try:
        for _ in range(int(DEADLINE_SECONDS / PAUSE_SECONDS)):
            if server.ready():
                break
            assert process.poll() is None, (directory / "log").read_text("utf-8")
            pause.wait(PAUSE_SECONDS)
        yield server
    finally:
        server.close()
        process.terminate()
        try:
            process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
