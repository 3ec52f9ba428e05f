"""`wattwatch demo`: a simulated cluster behind real SSH, the real watcher on it, what was injected and what was said.

Exit code 0 only if every injected fault was named and nothing else was said; 1 otherwise, with what was missing or
one too many. With --real the fault is not injected: a real job really deadlocks; 2 where its packages are missing.
"""

from __future__ import annotations

from typing import Final

import click
import orjson
from rich.console import Console
from rich.table import Table

from wattwatch.collectors.simulated.cluster import SimulationError
from wattwatch.collectors.simulated.scenario import SCENARIOS
from wattwatch.watcher.config.settings import ConfigError
from wattwatch.watcher.demo.real.data import RANKS_PER_NODE, JobSize
from wattwatch.watcher.demo.real.job import missing_packages
from wattwatch.watcher.demo.real.runner import JOB_NAME as REAL_SCENARIO
from wattwatch.watcher.demo.real.runner import RealTerminalScreen, run_real_demo
from wattwatch.watcher.demo.real.runner import real_demo_summary as real_summary
from wattwatch.watcher.demo.runner import DemoError, run_demo
from wattwatch.watcher.demo.terminal import TerminalScreen, demo_summary

DEFAULT_SPEED: Final = 5.0
PLAIN_WIDTH: Final = 140  # where there is no terminal to ask
INSTALL: Final = "pip install 'wattwatch[trainer]'"


@click.command("demo")
@click.option("--scenario", "names", metavar="NAME", multiple=True, help="Only this one; may be repeated.")
@click.option("--list", "listing", is_flag=True, help="Say what can be played.")
@click.option(
    "--speed",
    default=DEFAULT_SPEED,
    show_default=True,
    type=click.FloatRange(0.5, 20.0),
    help="Seconds of the scenarios in one second.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:0",
    show_default=True,
    help="Where the page is served; 0: any port.",
)
@click.option("--real", is_flag=True, help=f"Only with --scenario {REAL_SCENARIO}: a real job on CPU that deadlocks.")
@click.option(
    "--ranks-per-node",
    default=RANKS_PER_NODE,
    show_default=True,
    type=click.IntRange(2, 8),
    help="Of the real job's two nodes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON and nothing else.")
def demo_command(
    names: tuple[str, ...], listing: bool, speed: float, listen: str, real: bool, ranks_per_node: int, as_json: bool
) -> int:
    """A simulated cluster, the real watcher, and what it says.

    Plays the usual scenarios side by side in compressed time, or only those that are named. With --real, a real
    training job on CPU: its ranks part at the end of the epoch and hang; then the same data with the gate and evenfix.
    """
    if listing:
        list_scenarios(as_json)
        return 0
    if real or REAL_SCENARIO in names:
        if not real or names not in ((), (REAL_SCENARIO,)):
            raise click.UsageError(f"{REAL_SCENARIO} is played alone and for real: --scenario {REAL_SCENARIO} --real")
        return run_real_demo_command(JobSize(ranks_per_node=ranks_per_node), listen, as_json)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise click.BadParameter(
            f"no scenario is named {unknown[0]!r}; there are {', '.join(SCENARIOS)}", param_hint="--scenario"
        )
    usual = [scenario for scenario in SCENARIOS.values() if not scenario.by_name]
    scenarios = [SCENARIOS[name] for name in dict.fromkeys(names)] or usual
    screen = TerminalScreen(demo_console(quiet=as_json), speed)
    try:
        outcome = run_demo(scenarios, speed, listen, screen)
    except (DemoError, SimulationError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(orjson.dumps(demo_summary(outcome, speed), option=orjson.OPT_INDENT_2))
    else:
        screen.sum_up(outcome, scenarios)
    return 0 if outcome.good else 1


def run_real_demo_command(shape: JobSize, listen: str, as_json: bool) -> int:
    missing = missing_packages()
    if missing:
        raise click.UsageError(f"{', '.join(missing)} not installed, which a real job needs: {INSTALL}")
    screen = RealTerminalScreen(demo_console(quiet=as_json))
    try:
        outcome = run_real_demo(shape, listen, screen)
    except (DemoError, SimulationError, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(orjson.dumps(real_summary(outcome), option=orjson.OPT_INDENT_2))
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
        click.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "what happens", "nodes x GPUs", "must be said"):
        table.add_column(heading)
    for scenario in SCENARIOS.values():
        said = ", ".join(expected.alert for expected in scenario.expected) or "nothing"
        title = scenario.title + (" (only where named)" if scenario.by_name else "")
        table.add_row(scenario.name, title, f"{scenario.nodes} x {scenario.gpus_per_node}", said)
    demo_console().print(table)
