"""The command `wattwatch-train`: a table of commands, each loaded when it is called, so that the gate stays quick."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from trainer.refusal import Refusal

# name -> (module, object, one line of help)
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "pack": ("trainer.pack_command", "pack_command", "Tokenise records once, into fixed blocks per rank."),
    "gate": ("trainer.gate_command", "gate_command", "Six checks over all ranks: may this job start?"),
    "launch": ("trainer.launch_command", "launch_command", "A job over its nodes, from gate to last checkpoint."),
    "run": ("trainer.run_command", "run_command", "One rank of a job; the launcher starts it."),
}


class LazyGroup(click.Group):
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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattwatch", prog_name="wattwatch-train", message="%(prog)s %(version)s")
def wattwatch_train() -> None:
    """Full fine-tuning whose ranks cannot run out of step: what it reads is packed, and checked before it starts."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. Exit codes: 0 OK, 1 warning, 2 refused or wrong use, 3 unknown, 130 interrupted.

    A traceback is for developers: set WATTWATCH_DEBUG=1 to see it.
    """
    try:
        code = wattwatch_train.main(args=arguments, prog_name="wattwatch-train", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        return sys.exit(error.exit_code)
    except Refusal as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name not in ("datasets", "transformers", "tokenizers", "numpy", "safetensors", "torch"):
            raise
        return _fail(f"{error.name} is not installed: pip install 'wattwatch[trainer]'", 2)
    except Exception as error:
        if os.environ.get("WATTWATCH_DEBUG") == "1":
            raise
        return _fail(
            f"wattwatch-train: an internal error, please report it: {type(error).__name__}: {error}\n"
            "Run again with WATTWATCH_DEBUG=1 for the place in the code.",
            3,
        )
    return sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> Any:
    click.echo(message, err=True)
    return sys.exit(code)


if __name__ == "__main__":
    main()
