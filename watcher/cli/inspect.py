"""`wattwatch progress FILE`: what the watcher reads from a log or a run. For setting up a job, and for bug reports."""

from __future__ import annotations

import json
import sys
from errno import EISDIR
from pathlib import Path
from typing import Final

import click

from wattwatch.collectors.checkpoints import LAYOUTS, CheckpointListing, list_checkpoint_directory, read_checkpoints
from wattwatch.collectors.progress import read_heartbeat, read_progress
from wattwatch.collectors.samples import CheckpointEntry, ProgressSample

READ_BYTES: Final = 4 * 1024 * 1024
"""From the end of the file: more than any format needs for its last step and its pace."""
UNKNOWN: Final = 3


@click.command("progress")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--pattern", metavar="REGEX", help=r"Use this instead of the known formats; names its groups: (?P<step>\d+)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def progress_command(file: Path, pattern: str | None, as_json: bool) -> None:
    """What the watcher reads of a job's progress from FILE: a log, a heartbeat, a run directory of wattwatch-train
    (its newest log, else heartbeat), - for standard input.

    Exit code 0: read. 3: the file cannot be read, or nothing in it is recognised.
    """
    try:
        sample = read_run_directory(file, pattern) if file.is_dir() else read_progress_file(file, pattern)
    except OSError as error:
        click.echo(f"{error.filename or file}: {error.strerror or error}", err=True)
        sys.exit(UNKNOWN)
    if as_json:
        click.echo(json.dumps(progress_object(sample)))
    if sample.step is None:
        click.echo(f"{sample.source}: {sample.why}", err=True)
        sys.exit(UNKNOWN)
    if not as_json:
        if sample.source != str(file):
            click.echo(f"{'file':22} {sample.source}")
        for name, value in progress_object(sample).items():
            click.echo(f"{name:22} {'-' if value is None else value}")


def read_progress_file(file: Path, pattern: str | None) -> ProgressSample:
    """One log or heartbeat. Raises OSError."""
    data, cut = read_tail(file)
    text = data.decode("utf-8", "replace")
    if file.name.startswith("rank-") and file.suffix == ".json" and pattern is None:
        return read_heartbeat(text, str(file))
    return read_progress(text, str(file), pattern, cut=cut)


def read_run_directory(run: Path, pattern: str | None) -> ProgressSample:
    """Of a run directory: the newest attempt's log; where that tells no step, the newest heartbeat. Raises OSError."""
    logs = sorted(run.glob("logs/attempt-*/rank-*.log"), key=lambda log: (-attempt_number(log), log.name))
    beats = sorted(run.glob("heartbeat/rank-*.json"), key=lambda beat: -beat.stat().st_mtime)
    if not logs and (pattern or not beats):
        wanted = "logs/attempt-*/rank-*.log" + ("" if pattern else " and heartbeat/rank-*.json")
        raise IsADirectoryError(EISDIR, f"a directory without {wanted}: give a log, or a run directory", str(run))
    samples = [read_progress_file(file, pattern) for file in (*logs[:1], *([] if pattern else beats[:1]))]
    return next((sample for sample in samples if sample.step is not None), samples[0])


def attempt_number(log: Path) -> int:
    number = log.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def read_tail(file: Path) -> tuple[bytes, bool]:
    """The last READ_BYTES, and whether they begin within a line."""
    if str(file) == "-":
        return sys.stdin.buffer.read()[-READ_BYTES:], False
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - READ_BYTES))
        return opened.read(READ_BYTES), size > READ_BYTES


def progress_object(sample: ProgressSample) -> dict[str, object]:
    """The keys of the contract. A loss that is no number is a string: JSON has no word for it."""
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
        "why": sample.why,
    }


# `wattwatch checkpoints DIR`: what the watcher reads of such a directory. For setting up, and for bug reports.

EXIT_UNKNOWN: Final = 3
COMPLETENESS: Final = {True: "complete", False: "incomplete", None: "not known"}


@click.command("checkpoints")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def checkpoints_command(directory: Path, as_json: bool) -> None:
    """Which checkpoints DIRECTORY (or a run directory's checkpoints/) holds, oldest first, and which are complete.

    Exit code 0: read. 3: the directory cannot be read, or nothing in it is recognised.
    """
    directory = find_checkpoint_directory(directory)
    listing, ages = list_checkpoint_directory(str(directory))
    sample = read_checkpoints(str(directory), listing, ages)
    if sample.error is not None:
        click.echo(f"{directory}: {sample.error}", err=True)
        sys.exit(EXIT_UNKNOWN)
    if as_json:
        click.echo(json.dumps([checkpoint_object(entry) for entry in sample.entries]))
    if not sample.entries:
        click.echo(f"{directory}: {explain_no_checkpoints(directory, listing)}", err=True)
        sys.exit(EXIT_UNKNOWN)
    if not as_json:
        for entry in sample.entries:
            step = "-" if entry.step is None else entry.step
            click.echo(
                f"{entry.name:30} step {step:>8}  {COMPLETENESS[entry.complete]:10} {entry.bytes:>15} bytes  {entry.why}"
            )


def find_checkpoint_directory(directory: Path) -> Path:
    """Of a run directory of wattwatch-train its checkpoints, else the directory itself."""
    below = directory / "checkpoints"
    try:
        return below if (directory / "run.json").is_file() and below.is_dir() else directory
    except OSError:
        return directory  # the listing says why


def explain_no_checkpoints(directory: Path, listing: CheckpointListing) -> str:
    name = directory.resolve().name
    if any(layout.name.search(name) for layout in LAYOUTS):
        return "no checkpoint below it, but its own name is that of one: give the directory above it"
    found = len(listing.folders) + len(listing.root)
    if not found:
        return "the directory is empty: no checkpoint yet"
    known = ", ".join(sorted({layout.framework for layout in LAYOUTS}))
    return f"none of its {found} entries is named as a checkpoint of a known layout ({known})"


def checkpoint_object(entry: CheckpointEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "step": entry.step,
        "complete": entry.complete,
        "bytes": entry.bytes,
        "why": entry.why,
    }
