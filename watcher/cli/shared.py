"""What the commands of `wattwatch` have in common: exit codes, options, and how JSON and text are printed.

A command collects its results, prints them with `print_json` or on a `text_console`, and ends with `sys.exit` of one of
these codes. Errors that end a command are exceptions: main.py prints them as one sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click
import orjson

from wattwatch.watcher.detection.model import Severity

if TYPE_CHECKING:
    from rich.console import Console

# The convention of monitoring plugins, so that any of them can run a command: nagios-plugins.org/doc/guidelines.html
OK: Final = 0
WARNING: Final = 1
CRITICAL: Final = 2
UNKNOWN: Final = 3
# From best to worst. Something known to be wrong outweighs something unknown, although its code is lower.
SEVERITY_ORDER: Final = (OK, UNKNOWN, WARNING, CRITICAL)
EXIT_CODE_COLORS: Final = {OK: "green", WARNING: "yellow", CRITICAL: "red", UNKNOWN: "magenta"}
SEVERITY_EXIT_CODES: Final = {Severity.INFO: OK, Severity.WARNING: WARNING, Severity.CRITICAL: CRITICAL}
SEVERITY_COLORS: Final = {Severity.INFO: "blue", Severity.WARNING: "yellow", Severity.CRITICAL: "red"}

DEFAULT_API_URL: Final = "http://127.0.0.1:9560"
FilePath: Final = click.Path(path_type=Path)
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def json_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """--json, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def config_option() -> Callable[[Decorated], Decorated]:
    """-c FILE, as the parameter `path`."""
    return click.option(
        "-c", "--config", "path", type=FilePath, metavar="FILE", required=True, help="Path of wattwatch.toml."
    )


def ssh_config_option() -> Callable[[Decorated], Decorated]:
    """-F FILE as of ssh, as the parameter `ssh_config`."""
    return click.option(
        "-F", "--ssh-config", type=FilePath, metavar="FILE", help="SSH client configuration.  [default: ~/.ssh/config]"
    )


def api_options(subject: str = "") -> Callable[[Decorated], Decorated]:
    """--url and --token-file of a running watcher, as the parameters `url` and `token_file`."""

    def decorate(command: Decorated) -> Decorated:
        token = click.option(
            "--token-file",
            type=FilePath,
            metavar="FILE",
            help=_option_help(subject, "File with the bearer token of the API."),
        )
        url = click.option(
            "--url",
            default=DEFAULT_API_URL,
            show_default=True,
            help=_option_help(subject, "Address of the running watcher."),
        )
        return url(token(command))

    return decorate


def _option_help(subject: str, text: str) -> str:
    return f"{subject}{text[0].lower()}{text[1:]}" if subject else text


def print_json(value: Any) -> None:
    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def text_console() -> Console:
    """A console for text that may come from anywhere: nothing is highlighted, wrapped or turned into an emoji."""
    from rich.console import Console  # here: main.py imports this module, and `wattwatch --help` should not load rich

    return Console(highlight=False, soft_wrap=True, emoji=False)


def print_error(message: str) -> None:
    click.echo(message, err=True)


def exit_unknown(message: str) -> NoReturn:
    """Ends the command with one sentence on standard error and exit code 3."""
    print_error(message)
    sys.exit(UNKNOWN)


def worst_exit_code(codes: Iterable[int]) -> int:
    """UNKNOWN if there are none."""
    return max(codes, key=SEVERITY_ORDER.index, default=UNKNOWN)
