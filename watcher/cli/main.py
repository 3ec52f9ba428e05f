"""The command `wattwatch`: the table of its commands, and how errors reach people.

The module of a command is imported when the command is called, so that `wattwatch --help` is instant.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from wattwatch.watcher.cli.shared import CRITICAL, OK, UNKNOWN, print_error
from wattwatch.watcher.config.settings import ConfigError

INTERRUPTED: Final = 130  # 128 + SIGINT, as a shell reports it

# name -> (module, object, one line of help)
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "demo": ("wattwatch.watcher.cli.demo", "demo_command", "Watch a simulated cluster and see every fault detected."),
    "triage": (
        "wattwatch.watcher.cli.triage",
        "triage_command",
        "Give one verdict now, from hosts, nvidia-smi output, logs or recordings.",
    ),
    "profiles": (
        "wattwatch.watcher.cli.profiles",
        "profiles_command",
        "Print the power range of each job state for a GPU model, with sources.",
    ),
    "calibrate": (
        "wattwatch.watcher.cli.calibrate",
        "calibrate_command",
        "Measure the power of your GPUs and write it as a profile.",
    ),
    "check": (
        "wattwatch.watcher.cli.check",
        "check_command",
        "Test the configuration, SSH, nodes and receivers, and say what to fix.",
    ),
    "config": (
        "wattwatch.watcher.cli.config",
        "config_command",
        "Print a configuration with all defaults, or a reference of all keys.",
    ),
    "serve": ("wattwatch.watcher.cli.serve", "serve_command", "Run the watcher: alerts, web page, API, metrics."),
    "status": (
        "wattwatch.watcher.cli.status",
        "status_command",
        "Print the jobs and open alerts of a running watcher, then exit.",
    ),
    "diagnose": (
        "wattwatch.watcher.cli.diagnose",
        "diagnose_command",
        "Find the rank that blocks a hung job, from dumps or from a running watcher.",
    ),
    "replay": ("wattwatch.watcher.cli.replay", "replay_command", "Run the detector on recordings or GPU logs."),
    "backtest": (
        "wattwatch.watcher.cli.backtest",
        "backtest_command",
        "Score the verdicts against labeled data.",
    ),
    "progress": (
        "wattwatch.watcher.cli.inspect",
        "progress_command",
        "Show what the watcher reads from a training log.",
    ),
    "checkpoints": (
        "wattwatch.watcher.cli.inspect",
        "checkpoints_command",
        "Show what the watcher reads from a checkpoint directory.",
    ),
}


class LazyCommandGroup(click.Group):
    """A group that imports the module of a command only when the command is called."""

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
        # click would import every command to ask for its help line.
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyCommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattwatch", message="wattwatch %(version)s")
def wattwatch() -> None:
    """Watches multi-node GPU training from outside the job: uses GPU power draw, not utilization, to tell computing
    from hanging.

    To begin: `wattwatch demo`, or `nvidia-smi | wattwatch triage -`.
    """


def main(arguments: list[str] | None = None) -> Any:
    """Runs a command and ends the process.

    Exit codes: 0 OK, 1 warning, 2 critical or wrong usage, 3 unknown, 130 interrupted. An error is one sentence on
    standard error; WATTWATCH_DEBUG=1 shows the traceback of an internal error.
    """
    try:
        code = wattwatch.main(args=arguments, standalone_mode=False)
    except click.exceptions.Abort:
        return _exit_with("interrupted", INTERRUPTED)
    except click.ClickException as error:
        error.show()
        return sys.exit(error.exit_code)
    except ConfigError as error:
        return _exit_with(str(error), CRITICAL)
    except BrokenPipeError:
        # The reader of our output is gone (`wattwatch status | head`), which is no error. Python would complain when
        # it flushes standard output at exit, so give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return sys.exit(OK)
    except Exception as error:
        if os.environ.get("WATTWATCH_DEBUG") == "1":
            raise
        return _exit_with(
            f"wattwatch: internal error, please report it: {type(error).__name__}: {error}\n"
            "Run the command again with WATTWATCH_DEBUG=1 for the traceback.",
            UNKNOWN,
        )
    return sys.exit(code if isinstance(code, int) else OK)


def _exit_with(message: str, code: int) -> Any:
    print_error(message)
    return sys.exit(code)
