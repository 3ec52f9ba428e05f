"""`wattwatch progress FILE` and `wattwatch checkpoints DIR`: what the watcher reads from the files of a job.

For setting up a job (is its log format known?) and for bug reports.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from errno import EISDIR, ETIMEDOUT
from pathlib import Path
from typing import Final

import click

from wattwatch.collectors.checkpoints import LAYOUTS, CheckpointListing, list_checkpoint_directory, read_checkpoints
from wattwatch.collectors.progress import read_heartbeat, read_progress
from wattwatch.collectors.samples import CheckpointEntry, ProgressSample
from wattwatch.watcher.cli.shared import exit_unknown, json_option
from wattwatch.watcher.recordings.inputs import MAX_PIPE_SECONDS, nothing_written, open_pipe, read_pipe

READ_BYTES: Final = 4 * 1024 * 1024  # from the end of the file: more than any format needs for its last steps
COMPLETENESS: Final = {True: "complete", False: "incomplete", None: "not known"}


def print_ascii_json(value: object) -> None:
    """On one line and in ASCII: names of files need not be valid Unicode, and orjson rejects those that are not."""
    click.echo(json.dumps(value))


# wattwatch progress


@click.command("progress")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--pattern",
    metavar="REGEX",
    help=r"Parse lines with this regular expression, not with the known formats. It needs a group like (?P<step>\d+).",
)
@json_option("Print one JSON object.")
def progress_command(file: Path, pattern: str | None, as_json: bool) -> None:
    """Print what the watcher reads about a job's progress from FILE.

    FILE is a training log, a heartbeat file, a run directory of wattwatch-train (its latest log is read, or its latest
    heartbeat), or - for standard input.

    Exit code: 0 read, 3 the file cannot be read, or nothing in it is recognized.
    """
    try:
        sample = read_run_directory(file, pattern) if file.is_dir() else read_progress_file(file, pattern)
    except OSError as error:
        exit_unknown(f"{error.filename or file}: cannot read the file: {error.strerror or error}")
    if as_json:
        print_ascii_json(progress_object(sample))
    if sample.step is None:
        exit_unknown(f"{sample.source}: {sample.why}. {NO_STEP_ADVICE}")
    if not as_json:
        if sample.source != str(file):
            click.echo(f"{'file':22} {sample.source}")
        for name, value in progress_object(sample).items():
            click.echo(f"{name:22} {'-' if value is None else value}")


NO_STEP_ADVICE: Final = (
    "Give a training log that has reached its first step, or a regular expression for its lines with --pattern"
)


def read_progress_file(file: Path, pattern: str | None) -> ProgressSample:
    """One log or heartbeat. Raises OSError."""
    data, cut = read_tail(file)
    text = data.decode("utf-8", "replace")
    if file.name.startswith("rank-") and file.suffix == ".json" and pattern is None:
        sample = read_heartbeat(text, str(file))
    else:
        sample = read_progress(text, str(file), pattern, cut=cut)
    # A pipe has no age: what it holds was written by a program that is still running.
    return replace(sample, age_seconds=max(0.0, time.time() - file.stat().st_mtime)) if file.is_file() else sample


def read_run_directory(run: Path, pattern: str | None) -> ProgressSample:
    """The latest log of a run directory, or the latest heartbeat if that log has no step. Raises OSError."""
    logs = sorted(run.glob("logs/attempt-*/rank-*.log"), key=lambda log: (-attempt_number(log), log.name))
    heartbeats = sorted(run.glob("heartbeat/rank-*.json"), key=lambda path: -path.stat().st_mtime)
    if not logs and (pattern or not heartbeats):
        wanted = "logs/attempt-*/rank-*.log" + ("" if pattern else " or heartbeat/rank-*.json")
        raise IsADirectoryError(EISDIR, f"the directory contains no {wanted}. Give a log, or a run directory", str(run))
    samples = [read_progress_file(file, pattern) for file in (*logs[:1], *([] if pattern else heartbeats[:1]))]
    return next((sample for sample in samples if sample.step is not None), samples[0])


def attempt_number(log: Path) -> int:
    number = log.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def read_tail(file: Path) -> tuple[bytes, bool]:
    """The last READ_BYTES of a file or pipe, and whether they begin within a line. Raises OSError."""
    if str(file) == "-" or not file.is_file():
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else open_pipe(file) as pipe:
            data, ended = read_pipe(pipe, MAX_PIPE_SECONDS, until_silent=True)
        if not data and not ended:
            raise TimeoutError(ETIMEDOUT, nothing_written(MAX_PIPE_SECONDS), str(file))
        return data[-READ_BYTES:], len(data) > READ_BYTES
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - READ_BYTES))
        return opened.read(READ_BYTES), size > READ_BYTES


def progress_object(sample: ProgressSample) -> dict[str, object]:
    """The JSON object. `age_seconds`: since the file last changed, so that an old rate is seen to be old. A loss that
    is not finite becomes a string: JSON has no such numbers."""
    loss: float | str | None = sample.loss
    if loss is not None and (loss != loss or loss in (float("inf"), float("-inf"))):
        loss = str(loss)
    return {
        "format": sample.format or None,
        "step": sample.step,
        "total_steps": sample.total_steps,
        "loss": loss,
        "tokens_per_second": sample.tokens_per_second,
        "line_interval_seconds": sample.line_interval_seconds,
        "age_seconds": None if sample.age_seconds is None else round(sample.age_seconds, 1),
        "why": sample.why,
        "epoch": sample.epoch,
        "epochs": sample.epochs,
        "epoch_step": sample.epoch_step,
        "epoch_steps": sample.epoch_steps,
        "samples_per_second": sample.samples_per_second,
        "seconds_per_step": sample.seconds_per_step,
        "eta_seconds": sample.eta_seconds,
        "phase": sample.phase,
        "guessed": sample.guessed,
    }


# wattwatch checkpoints


@click.command("checkpoints")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@json_option("Print a JSON list with one object for each checkpoint.")
def checkpoints_command(directory: Path, as_json: bool) -> None:
    """Print the checkpoints in DIR, oldest first, and which of them are complete.

    DIR is a directory of checkpoints, or a run directory of wattwatch-train.

    Exit code: 0 read, 3 the directory cannot be read, or no checkpoint in it is recognized.
    """
    directory = find_checkpoint_directory(directory)
    listing, ages = list_checkpoint_directory(str(directory))
    sample = read_checkpoints(str(directory), listing, ages)
    if sample.error is not None:
        exit_unknown(f"{directory}: cannot read the directory: {sample.error}{ADVICE_OF_A_FILE * directory.is_file()}")
    if as_json:
        print_ascii_json([checkpoint_object(entry) for entry in sample.entries])
    if not sample.entries:
        exit_unknown(f"{directory}: {explain_no_checkpoints(directory, listing)}")
    if not as_json:
        for entry in sample.entries:
            step = "-" if entry.step is None else entry.step
            status = COMPLETENESS[entry.complete]
            click.echo(f"{entry.name:30} step {step:>8}  {status:10} {entry.bytes:>15} bytes  {entry.why}")


ADVICE_OF_A_FILE: Final = ". Give the directory that contains the checkpoints"


def find_checkpoint_directory(directory: Path) -> Path:
    """The checkpoints of a run directory of wattwatch-train; any other directory itself."""
    below = directory / "checkpoints"
    try:
        return below if (directory / "run.json").is_file() and below.is_dir() else directory
    except OSError:
        return directory  # reading it will fail with the reason


def explain_no_checkpoints(directory: Path, listing: CheckpointListing) -> str:
    name = directory.resolve().name
    if any(layout.name.search(name) for layout in LAYOUTS):
        return "it contains no checkpoints. By its name, it is a checkpoint itself: give its parent directory"
    found = len(listing.folders) + len(listing.root)
    if not found:
        return "the directory is empty; there is no checkpoint yet"
    known = ", ".join(sorted({layout.framework for layout in LAYOUTS}))
    return f"the names of its entries ({found}) are not those of checkpoints of a known framework ({known})"


def checkpoint_object(entry: CheckpointEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "step": entry.step,
        "complete": entry.complete,
        "bytes": entry.bytes,
        "why": entry.why,
    }
