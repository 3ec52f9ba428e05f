"""The command `wattwatch`: a table of commands, each loaded when it is called. Errors reach people as one sentence."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from wattwatch.watcher.config.settings import ConfigError

# name -> (module, object, one line of help): the modules are loaded when called, so `--help` is instant.
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "demo": ("wattwatch.watcher.cli.demo", "demo_command", "A simulated cluster, the real watcher, and what it says."),
    "triage": (
        "wattwatch.watcher.cli.triage",
        "triage_command",
        "One verdict now: hosts, pasted nvidia-smi output, logs.",
    ),
    "calibrate": (
        "wattwatch.watcher.cli.calibrate",
        "calibrate_command",
        "Learn what boards draw here; write a profile.",
    ),
    "check": (
        "wattwatch.watcher.cli.check",
        "check_command",
        "Configuration, SSH, tools, paths, receivers: what to fix.",
    ),
    "serve": ("wattwatch.watcher.cli.serve", "serve_command", "Watch the configured jobs: alerts, page, API, metrics."),
    "status": ("wattwatch.watcher.cli.status", "status_command", "What a running watcher says of its jobs, once."),
    "diagnose": (
        "wattwatch.watcher.cli.diagnose",
        "diagnose_command",
        "Flight-recorder dumps, RAS, stacks: who holds a hung job up.",
    ),
    "replay": ("wattwatch.watcher.cli.replay", "replay_command", "Recordings or GPU logs through the detector."),
    "backtest": (
        "wattwatch.watcher.cli.backtest",
        "backtest_command",
        "How often the verdicts are right, on labelled data.",
    ),
    "progress": ("wattwatch.watcher.cli.inspect", "progress_command", "What the watcher reads from a training log."),
    "checkpoints": (
        "wattwatch.watcher.cli.inspect",
        "checkpoints_command",
        "What the watcher reads from a checkpoint directory.",
    ),
}


class LazyCommandGroup(click.Group):
    """A group that imports a command's module only when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyCommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattwatch", message="wattwatch %(version)s")
def wattwatch() -> None:
    """Watch power, not utilisation: an out-of-band watcher for multi-node GPU training."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 OK, 1 warning, 2 critical or wrong use, 3 unknown, 130 interrupted.

    A traceback is for developers: set WATTWATCH_DEBUG=1 to see it.
    """
    try:
        code = wattwatch.main(args=arguments, standalone_mode=False)
    except click.exceptions.Abort:
        return _fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        return sys.exit(error.exit_code)
    except ConfigError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        # The reader of our output left (`wattwatch status | head`): nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return sys.exit(0)
    except Exception as error:
        # The last net: people get a sentence, developers ask for the rest.
        if os.environ.get("WATTWATCH_DEBUG") == "1":
            raise
        return _fail(
            f"wattwatch: an internal error, please report it: {type(error).__name__}: {error}\n"
            "Run again with WATTWATCH_DEBUG=1 for the place in the code.",
            3,
        )
    return sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> Any:
    click.echo(message, err=True)
    return sys.exit(code)
