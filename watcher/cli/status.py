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
    SEVERITY_ORDER,
    UNKNOWN,
    WARNING,
    api_options,
    exit_unknown,
    json_option,
    print_error,
    print_json,
    text_console,
)
from wattwatch.watcher.common.formatting import capitalize_first, describe_unseen, format_count, format_duration
from wattwatch.watcher.detection.model import JobState, Severity


@click.command()
@click.argument("job", required=False)
@api_options()
@json_option("Print the jobs and open alerts as JSON, as the API returns them.")
def status_command(job: str | None, url: str, token_file: Path | None, as_json: bool) -> None:
    """Print the jobs and open alerts of a running watcher, and exit. With JOB, print only that job.

    Exit code: 0 nothing is wrong, 1 a warning is open or an alert message is not delivered, 2 a critical alert is open,
    3 the state of a job is unknown, no job has been evaluated yet, or the watcher does not answer or no longer updates.
    An open alert or an undelivered message outweighs a job in an unknown state: the code is then 1 or 2.
    """
    with open_api_client(url, token_file) as client:
        jobs = get_json(client, f"/api/v1/jobs/{quote(job, safe='/')}" if job else "/api/v1/jobs")
        alerts = get_json(client, "/api/v1/alerts")
        deliveries = get_json(client, "/api/v1/deliveries")
        warning = _staleness_warning(client)
    try:
        jobs = jobs if job is None else [jobs]
        if not (isinstance(jobs, list) and isinstance(alerts, list)):
            raise TypeError("not lists")
        # An alert without a job is about the watcher itself, and puts what it says about every job in doubt.
        open_alerts = [a for a in alerts if a["closed"] is None and (job is None or a["job"] in ("", job))]
        undelivered = _undelivered(deliveries)
        codes = [SEVERITY_EXIT_CODES[Severity(a["severity"])] for a in open_alerts if not a["suppressed_by"]]
        codes += [WARNING for _ in undelivered]
        codes += [UNKNOWN for each in jobs if each["stale"] or each["state"] == JobState.UNKNOWN.value]
        worst = max(codes, key=SEVERITY_ORDER.index, default=OK if jobs else UNKNOWN)
        if as_json:
            print_json({"jobs": jobs, "alerts": open_alerts, "deliveries": deliveries})
        else:
            _print(jobs, open_alerts, undelivered)
    except (KeyError, TypeError, ValueError, AttributeError):
        exit_unknown(
            f"{url}: the answer cannot be read. This is not a wattwatch API, or it is a different version of it"
        )
    if warning:
        print_error(warning)
    sys.exit(UNKNOWN if warning else worst)


def _undelivered(deliveries: dict[str, Any]) -> list[str]:
    """A sentence for each way in which alert messages do not reach their receivers."""
    found = []
    if deliveries["waiting"]:
        count, age = format_count(deliveries["waiting"], "alert message"), deliveries["oldest_waiting_seconds"]
        found.append(f"{count} not delivered yet; the oldest has been waiting for {format_duration(age)}")
    for receiver, reason in sorted(deliveries["given_up"].items()):
        found.append(
            f"the last alert message to receiver {receiver} was not delivered and will not be retried: {reason}"
        )
    return found


def _staleness_warning(client: httpx.Client) -> str | None:
    """A sentence if the watcher still answers but no longer updates: what it reports is then out of date."""
    try:
        response = client.get("/-/ready")
        return None if response.is_success else str(response.json()["detail"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return f"{client.base_url}: it is unknown whether the watcher still updates its data"


def _print(jobs: list[dict[str, Any]], alerts: list[dict[str, Any]], undelivered: list[str]) -> None:
    console = text_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("JOB", "STATE", "STEP", "TOK/S", "WHY"):
        table.add_column(title)
    for job in jobs:
        table.add_row(*map(escape, _table_row(job)))
    console.print(table if jobs else "no job has been evaluated yet")
    for job in jobs:
        unseen = describe_unseen((gpu["node"], gpu["rank"], gpu["why"]) for gpu in job.get("unseen", ()))
        if unseen:
            total = job["gpus"] + len(job["unseen"])
            console.print(
                escape(
                    f"{job['name']}: {job['gpus']} of {format_count(total, 'GPU')} seen; not seen: {'; '.join(unseen)}"
                )
            )
        reason = job["progress"].get("unreadable_reason")
        if reason:
            console.print(escape(f"{job['name']}: no step found in {reason}"))
    for alert in alerts:
        cause = f" (not sent, because {alert['suppressed_by']} explains it)" if alert["suppressed_by"] else ""
        subject = alert["job"] or "the watcher"
        absence = f"{capitalize_first(alert['kept_open'])}. Before: " if alert["kept_open"] else ""
        text = f"{alert['severity'].upper()} {alert['alert']} {subject}: {absence}{alert['summary']}{cause}"
        console.print(escape(text))
    if not alerts:
        console.print("no open alerts")
    for sentence in undelivered:
        console.print(escape(f"WARNING {sentence}"))
    for job in jobs:
        if job.get("incident"):
            console.print(escape(f"to replay the latest incident of {job['name']}: wattwatch replay {job['incident']}"))


def _table_row(job: dict[str, Any]) -> tuple[str, ...]:
    progress, state, why = job["progress"], job["state"], job["reason"]
    step = "-" if progress["step"] is None else f"{progress['step']:,}"
    if progress["total_steps"] is not None:
        step += f"/{progress['total_steps']:,}"
    # The job's last report is not shown where it no longer holds: a hung job has no throughput.
    rate = "-" if progress["tokens_per_second"] is None else f"{progress['tokens_per_second']:,.0f}"
    if job["stale"]:
        why = f"not evaluated for {format_duration(job['age_seconds'])}; its last known state is {state}: {why}"
        state = JobState.UNKNOWN.value
    return (job["name"], state, step, rate, why)
