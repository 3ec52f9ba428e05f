"""`wattwatch status [JOB]`: jobs and open alerts of a running watcher, through its API. For people and for scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.markup import escape
from rich.table import Table

from wattwatch.watcher.cli.api_client import get_json, open_api_client
from wattwatch.watcher.cli.shared import (
    OK,
    SEVERITY_EXIT_CODES,
    UNKNOWN,
    api_options,
    exit_unknown,
    json_option,
    print_error,
    print_json,
    text_console,
)
from wattwatch.watcher.common.formatting import describe_unseen
from wattwatch.watcher.detection.model import Severity


@click.command()
@click.argument("job", required=False)
@api_options()
@json_option("Print the jobs and open alerts as JSON, as the API returns them.")
def status_command(job: str | None, url: str, token_file: Path | None, as_json: bool) -> None:
    """Print the jobs and open alerts of a running watcher, and exit. With JOB, print only that job.

    Exit code: 0 nothing is wrong, 1 a warning is open, 2 a critical alert is open, 3 the watcher does not answer or no
    longer updates.
    """
    with open_api_client(url, token_file) as client:
        jobs = get_json(client, f"/api/v1/jobs/{quote(job, safe='/')}" if job else "/api/v1/jobs")
        alerts = get_json(client, "/api/v1/alerts")
        warning = _staleness_warning(client)
    try:
        jobs = jobs if job is None else [jobs]
        if not (isinstance(jobs, list) and isinstance(alerts, list)):
            raise TypeError("not lists")
        # An alert without a job is about the watcher itself, and puts what it says about every job in doubt.
        open_alerts = [a for a in alerts if a["closed"] is None and (job is None or a["job"] in ("", job))]
        severities = [Severity(a["severity"]) for a in open_alerts if not a["suppressed_by"]]
        worst = max((SEVERITY_EXIT_CODES[severity] for severity in severities), default=OK)
        if as_json:
            print_json({"jobs": jobs, "alerts": open_alerts})
        else:
            _print(jobs, open_alerts)
    except (KeyError, TypeError, ValueError, AttributeError):
        exit_unknown(f"{url}: the answer cannot be read. This is not a wattwatch API, or it has another version")
    if warning:
        print_error(warning)
    sys.exit(UNKNOWN if warning else worst)


def _staleness_warning(client: httpx.Client) -> str | None:
    """A sentence if the watcher still answers but no longer updates: what it reports is then out of date."""
    try:
        response = client.get("/-/ready")
        return None if response.is_success else str(response.json()["detail"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return f"{client.base_url}: it is not known whether the watcher still updates its data"


def _print(jobs: list[dict[str, Any]], alerts: list[dict[str, Any]]) -> None:
    console = text_console()
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
    for job in jobs:
        unseen = describe_unseen((gpu["node"], gpu["rank"], gpu["why"]) for gpu in job.get("unseen", ()))
        if unseen:
            total = job["gpus"] + len(job["unseen"])
            console.print(escape(f"{job['name']}: {job['gpus']} of {total} GPUs seen; not seen: {'; '.join(unseen)}"))
    for alert in alerts:
        cause = f" (not sent, because {alert['suppressed_by']} explains it)" if alert["suppressed_by"] else ""
        subject = alert["job"] or "the watcher"
        console.print(escape(f"{alert['severity'].upper()} {alert['alert']} {subject}: {alert['summary']}{cause}"))
    if not alerts:
        console.print("no open alerts")
    for job in jobs:
        if job.get("incident"):
            console.print(escape(f"to replay the latest incident of {job['name']}: wattwatch replay {job['incident']}"))
