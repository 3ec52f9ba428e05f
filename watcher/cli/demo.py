"""`wattwatch demo`: a simulated cluster behind real SSH, the real watcher on it, and a score: what was injected, what
was reported, and how fast. With --real, a real training job really deadlocks instead."""

from __future__ import annotations

from typing import Final

import click
from rich.console import Console
from rich.table import Table

from wattwatch.collectors.simulated.cluster import SimulationError
from wattwatch.collectors.simulated.scenario import SCENARIOS
from wattwatch.watcher.cli.shared import json_option, print_json
from wattwatch.watcher.config.settings import ConfigError
from wattwatch.watcher.demo.real.job import RANKS_PER_NODE, JobSize, missing_packages
from wattwatch.watcher.demo.real.runner import JOB_NAME as REAL_SCENARIO
from wattwatch.watcher.demo.real.runner import RealTerminalScreen, run_real_demo
from wattwatch.watcher.demo.real.runner import real_demo_summary as real_summary
from wattwatch.watcher.demo.runner import DemoError, run_demo
from wattwatch.watcher.demo.terminal import TerminalScreen, demo_summary

DEFAULT_SPEED: Final = 5.0  # 40 s for all scenarios, on two slow cores
PLAIN_WIDTH: Final = 140  # if the output is not a terminal
INSTALL: Final = "pip install 'wattwatch[trainer]'"


@click.command("demo")
@click.option(
    "--scenario",
    "names",
    metavar="NAME",
    multiple=True,
    help="Play only this scenario. You can give the option several times.",
)
@click.option("--list", "listing", is_flag=True, help="List the scenarios.")
@click.option(
    "--speed",
    default=DEFAULT_SPEED,
    show_default=True,
    type=click.FloatRange(0.5, 20.0),
    help="Speed of the scenarios, as a multiple of real time.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:0",
    show_default=True,
    help="Address of the web page. With port 0, any free port is used.",
)
@click.option(
    "--real", is_flag=True, help=f"Run a real training job, on CPUs, and let it deadlock (scenario {REAL_SCENARIO})."
)
@click.option(
    "--ranks-per-node",
    default=RANKS_PER_NODE,
    show_default=True,
    type=click.IntRange(2, 8),
    help="With --real: number of ranks on each of the two nodes.",
)
@json_option("Print only the summary, as JSON.")
def demo_command(
    names: tuple[str, ...], listing: bool, speed: float, listen: str, real: bool, ranks_per_node: int, as_json: bool
) -> int:
    """Watch a simulated cluster with the real watcher, and see every injected fault detected.

    Plays the standard scenarios side by side, faster than real time, or only the named ones. With --real, runs a real
    training job twice, on CPUs and with the same data: first, its ranks deadlock at the end of the epoch; then,
    evenness = "min" prevents the deadlock.

    Exit code: 0 every fault was reported and nothing else was, 1 otherwise, 2 wrong usage or missing packages.
    """
    if listing:
        list_scenarios(as_json)
        return 0
    if real or REAL_SCENARIO in names:
        if not real or names not in ((), (REAL_SCENARIO,)):
            raise click.UsageError(
                f"the scenario {REAL_SCENARIO} needs --real and runs alone: use --scenario {REAL_SCENARIO} --real"
            )
        return run_real_demo_command(JobSize(ranks_per_node=ranks_per_node), listen, as_json)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise click.BadParameter(
            f"there is no scenario {unknown[0]!r}; choose from {', '.join(SCENARIOS)}", param_hint="--scenario"
        )
    usual = [scenario for scenario in SCENARIOS.values() if not scenario.by_name]
    scenarios = [SCENARIOS[name] for name in dict.fromkeys(names)] or usual
    screen = TerminalScreen(demo_console(quiet=as_json), speed)
    try:
        outcome = run_demo(scenarios, speed, listen, screen)
    except (DemoError, SimulationError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json(demo_summary(outcome, speed))
    else:
        screen.sum_up(outcome, scenarios)
    return 0 if outcome.good else 1


def run_real_demo_command(shape: JobSize, listen: str, as_json: bool) -> int:
    missing = missing_packages()
    if missing:
        raise click.UsageError(
            f"a real job needs packages that are not installed: {', '.join(missing)}. Install them: {INSTALL}"
        )
    screen = RealTerminalScreen(demo_console(quiet=as_json))
    try:
        outcome = run_real_demo(shape, listen, screen)
    except (DemoError, SimulationError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json(real_summary(outcome))
    else:
        screen.sum_up(outcome)
    return 0 if outcome.good else 1


def demo_console(quiet: bool = False) -> Console:
    terminal = Console(quiet=quiet, highlight=False)
    return terminal if terminal.is_terminal else Console(quiet=quiet, highlight=False, width=PLAIN_WIDTH)


def list_scenarios(as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "name": scenario.name,
                "title": scenario.title,
                "nodes": scenario.nodes,
                "gpus": scenario.world,
                "seconds": scenario.duration_seconds,
                "alerts": [expected.alert for expected in scenario.expected],
            }
            for scenario in SCENARIOS.values()
        ]
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "what happens", "nodes x GPUs", "expected alerts"):
        table.add_column(heading)
    for scenario in SCENARIOS.values():
        expected_alerts = ", ".join(expected.alert for expected in scenario.expected) or "none"
        title = scenario.title + (" (only with --scenario)" if scenario.by_name else "")
        table.add_row(scenario.name, title, f"{scenario.nodes} x {scenario.gpus_per_node}", expected_alerts)
    demo_console().print(table)
