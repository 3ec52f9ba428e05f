"""`wattwatch check -c FILE`: everything that must be right before `serve` can see and tell, and what to fix."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.markup import escape

from wattwatch.collectors.ssh.check import CaptureTarget, HostCheck, check_host
from wattwatch.watcher.alerting.delivery_queue import check_receiver_reachable
from wattwatch.watcher.config.settings import Config, ConfigError, load_config, probe_request_for
from wattwatch.watcher.daemon.preflight import preflight_problems, ssh_settings

OK, WARNING, CRITICAL = 0, 1, 2
MARK = {True: "[green]ok[/]     ", False: "[red]FAILED[/] ", None: "[yellow]missing[/]"}

NOTE = "[dim]note[/]   "


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing looked at. `ok` is None where it is missing and not needed."""

    part: str  # "configuration", "node gpu-01", "receiver ops"
    name: str
    ok: bool | None
    detail: str
    note: bool = False  # good to know; neither right nor wrong


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), required=True, help="wattwatch.toml")
@click.option("--json", "as_json", is_flag=True, help="A list of objects, one for each thing looked at.")
def check_command(path: Path, as_json: bool) -> None:
    """Configuration, credentials, SSH, tools and paths on each node, receivers: names what to fix.

    Writes nothing on a node and sends no message. Exit code: 0 all is well, 1 something that helps is missing,
    2 something that is needed fails.
    """
    try:
        config = load_config(path)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(results_as_json(CheckResult("configuration", "", False, problem) for problem in error.problems))
        sys.exit(CRITICAL)
    lines = [
        *(CheckResult("configuration", "", False, problem) for problem in preflight_problems(config)),
        *check_state_directory(config),
        *check_receivers(config),
    ]
    if not any(line.part == "configuration" for line in lines):
        lines = [CheckResult("configuration", str(path), True, describe_jobs(config)), *lines, *check_nodes(config)]
    if as_json:
        click.echo(results_as_json(lines))
    else:
        print_results(lines)
    sys.exit(check_exit_code(lines))


def results_as_json(lines: Iterable[CheckResult]) -> str:
    return orjson.dumps([asdict(line) for line in lines], option=orjson.OPT_INDENT_2).decode()


def check_exit_code(lines: Sequence[CheckResult]) -> int:
    if any(line.ok is False for line in lines):
        return CRITICAL
    return WARNING if any(line.ok is None for line in lines) else OK


def describe_jobs(config: Config) -> str:
    return ", ".join(f"{job.name}: {len(job.node_names)} nodes" for job in config.jobs)


def check_nodes(config: Config) -> list[CheckResult]:
    """All nodes, as many at once as logins are allowed at once."""
    specs = [job.spec(config.watcher.interval) for job in config.jobs]
    settings = ssh_settings(config.ssh)
    nodes = list(dict.fromkeys(node for spec in specs for node in spec.nodes))

    def look(node: str) -> HostCheck:
        return check_host(node, settings, probe_request_for(specs, node), targets=capture_requests(config, node))

    with ThreadPoolExecutor(config.ssh.max_simultaneous_logins) as pool:
        checks = list(pool.map(look, nodes))
    lines = []
    for c in checks:
        lines += [CheckResult(f"node {c.node}", step.name, step.ok, step.sentence) for step in c.steps]
        lines += [
            CheckResult(f"node {c.node}", f"capture of {job}", True, words, note=True) for job, words in c.capture
        ]
    # The same directive stands in the way of every node: say it once.
    notes = dict.fromkeys(note for check in checks for note in check.notes)
    return [*lines, *(CheckResult("ssh", "not honoured", None, note) for note in notes)]


def capture_requests(config: Config, node: str) -> list[CaptureTarget]:
    """Of the jobs that may be asked when they hang."""
    return [
        CaptureTarget(job.name, None if job.run_directory is None else str(job.run_directory), job.nccl_ras_port)
        for job in config.jobs
        if job.capture and node in job.node_names
    ]


def check_state_directory(config: Config) -> list[CheckResult]:
    """Whether episodes and messages can be kept over a restart; nothing is made, a writable parent will do."""
    directory = config.watcher.state_directory.expanduser()
    there = next(place for place in (directory, *directory.parents) if place.exists())
    ok = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    words = f"{directory} can be written" if ok else f"{there} cannot be written: set watcher.state_directory"
    return [CheckResult("state directory", "", ok, words)]


def check_receivers(config: Config) -> list[CheckResult]:
    lines = []
    for receiver in config.receivers:
        trouble = check_receiver_reachable(receiver)
        words = trouble or "reachable; nothing was sent"
        lines.append(CheckResult(f"receiver {receiver.name}", "reach", trouble is None, words))
    if not config.receivers:
        lines.append(CheckResult("receivers", "none", None, "nobody is told of alerts: add a [[receivers]] table"))
    return lines


def print_results(lines: Sequence[CheckResult]) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    part = None
    for line in lines:
        if line.part != part:
            part = line.part
            console.print(f"[bold]{escape(part)}[/]")
        mark = NOTE if line.note else MARK[line.ok]
        console.print(f"  {mark} {escape(line.name + ': ' if line.name else '')}{escape(line.detail)}")
    failed = sum(line.ok is False for line in lines)
    console.print(
        f"\n{failed} of {len(lines)} checks failed" if failed else f"\nall {len(lines)} checks passed or can wait"
    )
