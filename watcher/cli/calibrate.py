"""`wattwatch calibrate [SOURCE ...]`: what boards draw at rest and at work here, as a profile for wattwatch.toml."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
import orjson
from rich.console import Console
from rich.markup import escape

from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.cli.triage import is_file_source
from wattwatch.watcher.detection.baselines.baseline import BaselineKind
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.recordings.calibration import (
    KIND_LABELS,
    Calibration,
    LearnedProfile,
    build_profiles,
    calibrate_hosts,
    calibrate_source,
    describe_learned,
    format_profiles_toml,
)
from wattwatch.watcher.recordings.format import RecordingError
from wattwatch.watcher.recordings.inputs import InputError, read_input_file

OK, WARNING, UNKNOWN = 0, 1, 3
MIN_SAMPLES: Final = 10


@click.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("--samples", type=click.IntRange(MIN_SAMPLES, 3600), default=30, show_default=True,
              help="Samples of each host, one a second.")  # fmt: skip
@click.option("--progress", type=click.Choice([StepProgress.ADVANCING.value]),
              help="You know that steps advanced throughout a log that does not count them.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Write the [[profiles]] tables to this new file.")
@click.option("-F", "--ssh-config", type=click.Path(path_type=Path), help="SSH configuration  [default: ~/.ssh/config]")
@click.option("--json", "as_json", is_flag=True, help="One object: what was learned, what was not, the profiles.")
def calibrate_command(
    sources: tuple[str, ...],
    samples: int,
    progress: str | None,
    out: Path | None,
    ssh_config: Path | None,
    as_json: bool,
) -> None:
    """Learn what boards draw. SOURCE is a host whose boards are idle now (asked over SSH), a recording, or a log of
    nvidia-smi. A recording teaches the floor with a context from a start-up, and the plateau from its steps.

    Writes nothing on a node. Exit code: 0 something was learned from each source, 1 from some of them only, 2 wrong
    use, 3 nothing was learned.
    """
    if out is not None and out.exists():
        raise click.BadParameter(f"{out} exists: name a new file, or move it away", param_hint="--out")
    calibrations: list[Calibration] = []
    hosts: list[str] = []
    for source in sources:
        try:
            if is_file_source(source):
                word = None if progress is None else StepProgress(progress)
                calibrations.append(calibrate_source(source, read_input_file(Path(source)), word))
            else:
                hosts.append(source)
        except (InputError, RecordingError) as error:
            calibrations.append(Calibration(source, {}, (), (str(error).removeprefix(f"{source}: "),)))
    if hosts:
        settings = SshSettings(config_file=ssh_config, use_agent=True)
        calibrations += calibrate_hosts(hosts, settings, samples)
    profiles, unmade = build_profiles(calibrations)
    if as_json:
        click.echo(
            orjson.dumps(calibration_object(calibrations, profiles, unmade), option=orjson.OPT_INDENT_2).decode()
        )
    else:
        for calibration in calibrations:
            print_calibration(calibration)
    for sentence in unmade:
        click.echo(sentence, err=True)
    finish(profiles, out, as_json=as_json)
    learned = [bool(calibration.values) for calibration in calibrations]
    sys.exit(OK if all(learned) else WARNING if any(learned) else UNKNOWN)


def finish(profiles: Sequence[LearnedProfile], out: Path | None, *, as_json: bool) -> None:
    """The profiles to the file that was asked for, else to people."""
    if not profiles:
        if out is not None:
            click.echo(f"{out}: not written: nothing was learned that makes a profile", err=True)
        return
    text = format_profiles_toml(profiles)
    if out is None:
        if not as_json:
            click.echo(f"\nFor wattwatch.toml:\n\n{text}", nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.BadParameter(f"{out}: cannot be written: {error.strerror}", param_hint="--out") from None
    click.echo(f"{out}: written; add it to wattwatch.toml", err=True)


def calibration_object(
    calibrations: Sequence[Calibration], profiles: Sequence[LearnedProfile], unmade: Sequence[str]
) -> dict[str, Any]:
    return {
        "sources": [
            {
                "source": each.source,
                "boards": len(each.boards),
                "learned": [asdict(value) for value in each.values],
                "not_learned": list(each.refusals),
            }
            for each in calibrations
        ],
        "profiles": [
            {
                "model": each.model,
                "boards": each.boards,
                "name": each.profile.name,
                "match": each.profile.match,
                "limit_watts": each.profile.limit_watts,
                "idle_watts": each.profile.idle_watts,
                "floor_watts": each.profile.floor_watts,
                "compute_watts": each.profile.compute_watts,
                "grounds": dict(each.grounds),
            }
            for each in profiles
        ],
        "not_made": list(unmade),
    }


def print_calibration(calibration: Calibration) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    models = ", ".join(sorted({gpu.name or "unknown board" for gpu in calibration.boards.values()}))
    boards = (
        f"{len(calibration.boards)} board{'s' * (len(calibration.boards) > 1)}, {models}"
        if calibration.boards
        else "no board"
    )
    console.print(f"[bold]{escape(calibration.source)}[/]: {escape(boards)}")
    for kind in BaselineKind:
        values = [value for value in calibration.values if value.kind is kind]
        if values:
            console.print(f"  [green]{KIND_LABELS[kind]}[/]: {escape(describe_learned(values))}")
    for sentence in calibration.refusals:
        console.print(f"  [yellow]{escape(sentence)}[/]")
