"""`wattwatch serve -c FILE`: runs the watcher as a daemon. Whatever prevents the start is reported at once, and nothing
is started."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from wattwatch.watcher.cli.shared import CRITICAL, config_option, print_error
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service, ServiceStartError
from wattwatch.watcher.daemon.systemd import SystemdNotifier
from wattwatch.watcher.recordings.format import unused_recording_path


@click.command()
@config_option()
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write all data from the nodes to this file (gzip), for `wattwatch replay` and bug reports. An existing "
    "file is never overwritten: the recording is then written to NAME-2, NAME-3 and so on.",
)
def serve_command(path: Path, record: Path | None) -> int:
    """Watch the configured jobs: send alerts, and serve the web page, the API and /metrics.

    Runs until SIGTERM or SIGINT and then stops within 5 s.

    Exit code: 0 stopped, 1 failed, 2 could not start.
    """
    config = load_config(path)
    # Without a time stamp: systemd's journal adds its own to every line.
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("apscheduler", "httpx", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The status of each SSH link already says what is wrong; paramiko would add tracebacks about sockets and threads.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    if record is not None and (unused := unused_recording_path(record)) != record:
        print_error(f"{record} already exists and is kept. The recording is written to {unused}")
        record = unused
    try:
        return Service(config, record=record).run(SystemdNotifier())
    except ServiceStartError as error:
        for problem in error.problems:
            print_error(f"{path}: {problem}")
        return CRITICAL
