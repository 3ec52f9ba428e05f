"""`wattwatch checkpoints DIR`: what the watcher reads of such a directory. For setting up, and for bug reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import click

from collectors.checkpoints import LAYOUTS, Listing, list_directory, read_checkpoints
from collectors.samples import CheckpointEntry

UNKNOWN: Final = 3
WORDS: Final = {True: "complete", False: "incomplete", None: "not known"}


@click.command("checkpoints")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def checkpoints_command(directory: Path, as_json: bool) -> None:
    """Which checkpoints DIRECTORY (or a run directory's checkpoints/) holds, oldest first, and which are complete.

    Exit code 0: read. 3: the directory cannot be read, or nothing in it is recognised.
    """
    directory = checkpoints_of(directory)
    listing, ages = list_directory(str(directory))
    sample = read_checkpoints(str(directory), listing, ages)
    if sample.error is not None:
        click.echo(f"{directory}: {sample.error}", err=True)
        sys.exit(UNKNOWN)
    if as_json:
        click.echo(json.dumps([as_object(entry) for entry in sample.entries]))
    if not sample.entries:
        click.echo(f"{directory}: {why_nothing(directory, listing)}", err=True)
        sys.exit(UNKNOWN)
    if not as_json:
        for entry in sample.entries:
            step = "-" if entry.step is None else entry.step
            click.echo(
                f"{entry.name:30} step {step:>8}  {WORDS[entry.complete]:10} {entry.bytes:>15} bytes  {entry.why}"
            )


def checkpoints_of(directory: Path) -> Path:
    """Of a run directory of wattwatch-train its checkpoints, else the directory itself."""
    below = directory / "checkpoints"
    try:
        return below if (directory / "run.json").is_file() and below.is_dir() else directory
    except OSError:
        return directory  # the listing says why


def why_nothing(directory: Path, listing: Listing) -> str:
    name = directory.resolve().name
    if any(layout.name.search(name) for layout in LAYOUTS):
        return "no checkpoint below it, but its own name is that of one: give the directory above it"
    found = len(listing.folders) + len(listing.root)
    if not found:
        return "the directory is empty: no checkpoint yet"
    known = ", ".join(sorted({layout.framework for layout in LAYOUTS}))
    return f"none of its {found} entries is named as a checkpoint of a known layout ({known})"


def as_object(entry: CheckpointEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "step": entry.step,
        "complete": entry.complete,
        "bytes": entry.bytes,
        "why": entry.why,
    }
