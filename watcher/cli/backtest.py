"""`wattwatch backtest DIR`: how often the watcher is right, on cases, logs and recordings whose truth is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
import orjson

from wattwatch.watcher.backtest.cases import LabelError
from wattwatch.watcher.backtest.report import backtest_object, backtest_text
from wattwatch.watcher.backtest.run import run_backtest
from wattwatch.watcher.backtest.score import ProgressKnowledge

UNREADABLE: Final = 3


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--progress",
    type=click.Choice([k.value for k in ProgressKnowledge]),
    help="Judge the pictures without a word on the steps, or with the reporter's  [default: both]",
)
@click.option("--json", "as_json", is_flag=True, help="All figures as one object.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the object to this file as well.")
def backtest_command(directory: Path, progress: str | None, as_json: bool, out: Path | None) -> None:
    """Score the verdicts on everything labelled below DIR: JSON samples with a `reported_state`, and logs or
    recordings that have a label beside them (run.csv.label.json: {"state": "compute"}, or {"intervals": [{"state":
    "hang", "from_seconds": 600, "to_seconds": 900}]}).

    Exit code: 0 scored, 3 nothing could be.
    """
    try:
        test = run_backtest(directory, tuple(ProgressKnowledge) if progress is None else (ProgressKnowledge(progress),))
        result = orjson.dumps(backtest_object(test), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        if out is not None:
            out.write_bytes(result)
    except LabelError as error:
        click.echo(str(error), err=True)
        sys.exit(UNREADABLE)
    except OSError as error:
        click.echo(f"{error.filename or out}: {error.strerror}", err=True)
        sys.exit(UNREADABLE)
    click.echo(result.decode() if as_json else backtest_text(test), nl=not as_json)
    if not test.scored and not test.series:
        click.echo(f"{directory}: no case in it could be scored", err=True)
        sys.exit(UNREADABLE)
