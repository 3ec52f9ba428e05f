"""`wattwatch serve -c FILE`: the daemon. Whatever keeps it from starting is said at once, and nothing is started."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service, ServiceStartError
from wattwatch.watcher.daemon.systemd import SystemdNotifier


@click.command()
@click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), required=True, help="wattwatch.toml with the jobs."
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what the nodes say in this file (gzip), for replay and bug reports.",
)
def serve_command(path: Path, record: Path | None) -> int:
    """Watch the configured jobs: alerts, page, API, metrics.

    Runs until SIGTERM or SIGINT and then stops within 5 s. Exit code: 0 stopped, 1 failed, 2 refused to start.
    """
    config = load_config(path)
    # systemd's journal stamps every line itself.
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for chatty in ("apscheduler", "httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # What goes wrong on a connection is told in words by the link's own status; paramiko's are of sockets and threads.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    try:
        return Service(config, record=record).run(SystemdNotifier())
    except ServiceStartError as refusal:
        for problem in refusal.problems:
            click.echo(f"{path}: {problem}", err=True)
        return 2
