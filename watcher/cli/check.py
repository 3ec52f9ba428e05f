"""`wattwatch check -c FILE`: tests everything that `wattwatch serve` needs, and says what to fix."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich.markup import escape

from wattwatch.collectors.ssh.check import CaptureTarget, HostCheck, check_host
from wattwatch.watcher.alerting.delivery_queue import check_receiver_reachable
from wattwatch.watcher.cli.shared import CRITICAL, OK, WARNING, config_option, json_option, print_json, text_console
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.config.settings import Config, ConfigError, load_config, probe_request_for
from wattwatch.watcher.daemon.preflight import preflight_problems, ssh_settings

MARKS: Final = {True: "[green]ok[/]     ", False: "[red]FAILED[/] ", None: "[yellow]missing[/]"}
NOTE_MARK: Final = "[dim]note[/]   "


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. The field names are keys of the JSON output."""

    part: str  # what was checked: "configuration", "node gpu-01", "receiver ops"
    name: str
    ok: bool | None  # None: missing, but not required
    detail: str
    note: bool = False  # information, neither right nor wrong


@click.command()
@config_option()
@json_option("Print a JSON list with one object for each check.")
def check_command(path: Path, as_json: bool) -> None:
    """Test the configuration, the SSH login, tools and paths on each node, and the receivers; say what to fix.

    Writes nothing on a node and sends no message.

    Exit code: 0 everything passed, 1 something useful is missing, 2 something required failed.
    """
    try:
        config = load_config(path)
    except ConfigError as error:
        if not as_json:
            raise
        print_json([asdict(CheckResult("configuration", "", False, problem)) for problem in error.problems])
        sys.exit(CRITICAL)
    results = [
        *(CheckResult("configuration", "", False, problem) for problem in preflight_problems(config)),
        *check_state_directory(config),
        *check_receivers(config),
    ]
    # Without a usable configuration (a missing key file, say) every node would fail for the same reason.
    if not any(result.part == "configuration" for result in results):
        results = [
            CheckResult("configuration", str(path), True, describe_jobs(config)),
            *results,
            *check_nodes(config),
        ]
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_results(results)
    sys.exit(check_exit_code(results))


def check_exit_code(results: Sequence[CheckResult]) -> int:
    if any(result.ok is False for result in results):
        return CRITICAL
    return WARNING if any(result.ok is None for result in results) else OK


def describe_jobs(config: Config) -> str:
    return ", ".join(f"{job.name}: {format_count(len(job.node_names), 'node')}" for job in config.jobs)


def check_nodes(config: Config) -> list[CheckResult]:
    """Checks all nodes, as many at the same time as may log in at the same time."""
    specs = [job.spec(config.watcher.interval) for job in config.jobs]
    settings = ssh_settings(config.ssh)
    nodes = list(dict.fromkeys(node for spec in specs for node in spec.nodes))

    def check_node(node: str) -> HostCheck:
        return check_host(node, settings, probe_request_for(specs, node), targets=capture_targets(config, node))

    with ThreadPoolExecutor(config.ssh.max_simultaneous_logins) as pool:
        checks = list(pool.map(check_node, nodes))
    results = []
    for check in checks:
        part = f"node {check.node}"
        results += [CheckResult(part, step.name, step.ok, step.sentence) for step in check.steps]
        results += [CheckResult(part, f"capture of {job}", True, text, note=True) for job, text in check.capture]
    # An ssh_config directive that is not supported affects every node: report it once.
    notes = dict.fromkeys(note for check in checks for note in check.notes)
    return [*results, *(CheckResult("ssh", "not honored", None, note) for note in notes)]


def capture_targets(config: Config, node: str) -> list[CaptureTarget]:
    """What a capture would ask on this node, for each of its jobs that allows captures."""
    return [
        CaptureTarget(job.name, None if job.run_directory is None else str(job.run_directory), job.nccl_ras_port)
        for job in config.jobs
        if job.capture and node in job.node_names
    ]


def check_state_directory(config: Config) -> list[CheckResult]:
    """Whether state can be kept. Creates nothing: a parent that can be written to is enough."""
    directory = config.watcher.state_directory.expanduser()
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    ok = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if not ok:
        detail = f"cannot write to {existing}: allow this user to write there, or change watcher.state_directory"
    elif existing == directory:
        detail = f"{directory} is writable"
    else:
        detail = f"{directory} does not exist yet; `wattwatch serve` can create it, because {existing} is writable"
    return [CheckResult("state directory", "", ok, detail)]


def check_receivers(config: Config) -> list[CheckResult]:
    if not config.receivers:
        return [CheckResult("receivers", "none", None, "no alert is sent to anyone: add a [[receivers]] table")]
    results = []
    for receiver in config.receivers:
        problem = check_receiver_reachable(receiver)
        detail = problem or "the receiver is reachable; no test message was sent"
        results.append(CheckResult(f"receiver {receiver.name}", "reach", problem is None, detail))
    return results


def print_results(results: Sequence[CheckResult]) -> None:
    console = text_console()
    part = None
    for result in results:
        if result.part != part:
            part = result.part
            console.print(f"[bold]{escape(part)}[/]")
        mark = NOTE_MARK if result.note else MARKS[result.ok]
        console.print(f"  {mark} {escape(result.name + ': ' if result.name else '')}{escape(result.detail)}")
    failed = sum(result.ok is False for result in results)
    missing = sum(result.ok is None for result in results)
    optional = f"; optional and missing: {missing}" if missing else ""
    if failed:
        console.print(f"\n{failed} of {format_count(len(results), 'check')} failed{optional}")
    else:
        console.print(f"\n{format_count(len(results) - missing, 'check')} passed{optional}")
