"""`wattwatch backtest DIR`: how often the verdicts are right, on samples, logs and recordings whose truth is known."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import orjson

from wattwatch.watcher.backtest.cases import LabelError
from wattwatch.watcher.backtest.report import backtest_object, backtest_text
from wattwatch.watcher.backtest.run import run_backtest
from wattwatch.watcher.backtest.score import ProgressKnowledge
from wattwatch.watcher.cli.shared import UNKNOWN, exit_unknown, json_option, print_error


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--progress",
    type=click.Choice([knowledge.value for knowledge in ProgressKnowledge]),
    help="What the classifier knows about the steps of a job. none: nothing; word: the step progress that the label "
    "implies, such as stalled steps for a hang. Without this option, both are scored.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the JSON object to this file.")
@json_option("Print all figures as one JSON object.")
def backtest_command(directory: Path, progress: str | None, out: Path | None, as_json: bool) -> None:
    """Measure how often the verdicts are right, on all labeled data below DIR.

    Labeled data is: JSON samples with a `reported_state`, and logs or recordings with a label file beside them. The
    label of run.csv is run.csv.label.json, with {"state": "compute"} or {"intervals": [{"state": "hang",
    "from_seconds": 600, "to_seconds": 900}]}.

    Exit code: 0 scored, 3 nothing could be scored.
    """
    try:
        result = run_backtest(
            directory, tuple(ProgressKnowledge) if progress is None else (ProgressKnowledge(progress),)
        )
        content = orjson.dumps(backtest_object(result), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        if out is not None:
            out.write_bytes(content)
    except LabelError as error:
        exit_unknown(str(error))
    except OSError as error:
        exit_unknown(f"{error.filename or out}: {error.strerror}")
    click.echo(content.decode() if as_json else backtest_text(result), nl=not as_json)
    if not result.scored and not result.series:
        print_error(f"{directory}: none of the cases in it can be scored")
        sys.exit(UNKNOWN)
