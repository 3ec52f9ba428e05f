"""`wattwatch status [JOB]`: one look at a running watcher, through its API. For people, scripts and monitoring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import httpx
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattwatch.watcher.cli.api_client import DEFAULT_URL, UNKNOWN, exit_unknown, get_json, open_api_client
from wattwatch.watcher.detection.model import Severity

EXIT_CODE: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


@click.command()
@click.argument("job", required=False)
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Address of the watcher.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with a bearer token.")
@click.option("--json", "as_json", is_flag=True, help="The API's own answer.")
def status_command(job: str | None, url: str, token_file: Path | None, as_json: bool) -> None:
    """What a running watcher says of its jobs, once.

    Exit code: 0 nothing is wrong, 1 a warning is open, 2 a critical alert is open, 3 the watcher cannot be asked.
    """
    with open_api_client(url, token_file) as client:
        jobs = get_json(client, f"/api/v1/jobs/{quote(job, safe='/')}" if job else "/api/v1/jobs")
        alerts = get_json(client, "/api/v1/alerts")
        old = _staleness_warning(client)
    try:
        jobs = jobs if job is None else [jobs]
        if not (isinstance(jobs, list) and isinstance(alerts, list)):
            raise TypeError("not lists")
        # An alert without a job is about the watcher itself: what it says of any job depends on it.
        open_alerts = [a for a in alerts if a["closed"] is None and (job is None or a["job"] in ("", job))]
        worst = max((EXIT_CODE[Severity(a["severity"])] for a in open_alerts if not a["suppressed_by"]), default=0)
        if as_json:
            click.echo(orjson.dumps({"jobs": jobs, "alerts": open_alerts}, option=orjson.OPT_INDENT_2).decode())
        else:
            _print(jobs, open_alerts)
    except (KeyError, TypeError, ValueError, AttributeError):
        exit_unknown(f"{url}: not a wattwatch API, or one of another version")
    if old:
        click.echo(old, err=True)
    sys.exit(UNKNOWN if old else worst)


def _staleness_warning(client: httpx.Client) -> str | None:
    """A sentence where the watcher answers and no longer looks: its last words are history, not news."""
    try:
        response = client.get("/-/ready")
        return None if response.is_success else str(response.json()["detail"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return f"{client.base_url}: cannot be asked whether it still watches"


def _print(jobs: list[dict[str, Any]], alerts: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("JOB", "STATE", "STEP", "TOK/S", "WHY"):
        table.add_column(title)
    for job in jobs:
        progress = job["progress"]
        step = "-" if progress["step"] is None else f"{progress['step']:,}"
        if progress["total_steps"] is not None:
            step += f"/{progress['total_steps']:,}"
        rate = progress["tokens_per_second"]
        cells = (job["name"], job["state"], step, "-" if rate is None else f"{rate:,.0f}", job["reason"])
        table.add_row(*map(escape, cells))
    console.print(table)
    for alert in alerts:
        quiet = f" (quiet: {alert['suppressed_by']})" if alert["suppressed_by"] else ""
        who = alert["job"] or "the watcher"
        console.print(escape(f"{alert['severity'].upper()} {alert['alert']} {who}: {alert['summary']}{quiet}"))
    if not alerts:
        console.print("no open alerts")
    for job in jobs:
        if job.get("incident"):
            console.print(escape(f"newest incident of {job['name']}: wattwatch replay {job['incident']}"))
