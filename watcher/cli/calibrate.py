"""`wattwatch calibrate [SOURCE ...]`: measures what GPUs draw, idle and computing, as a profile for wattwatch.toml."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click
from rich.markup import escape

from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.cli.shared import (
    OK,
    UNKNOWN,
    WARNING,
    json_option,
    print_error,
    print_json,
    ssh_config_option,
    text_console,
)
from wattwatch.watcher.cli.triage import UNKNOWN_HOST, is_file_source, neither_file_nor_host
from wattwatch.watcher.common.formatting import format_count
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

MIN_SAMPLES: Final = 10  # fewer cannot show whether the power is steady


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--samples", type=click.IntRange(MIN_SAMPLES, 3600), default=30, show_default=True,
              help="Number of samples to take from each host, one per second.")  # fmt: skip
@click.option("--progress", type=click.Choice([StepProgress.ADVANCING.value]),
              help="For a log without a step counter, if steps advanced during the whole log.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the [[profiles]] tables to this file, which must not exist yet.")  # fmt: skip
@ssh_config_option()
@json_option("Print one JSON object: what was learned, what could not be learned, and the profiles.")
def calibrate_command(
    sources: tuple[str, ...],
    samples: int,
    progress: str | None,
    out: Path | None,
    ssh_config: Path | None,
    as_json: bool,
) -> None:
    """Measure the power of your GPUs, and print it as [[profiles]] tables for wattwatch.toml.

    SOURCE is a host whose GPUs are idle now (sampled over SSH), a recording, or a log of nvidia-smi. From a host,
    idle power is learned. From a recording or log, the power with a CUDA context (from the start-up of a job) and the
    power while computing (from its steps) are learned too.

    Writes nothing on a node.

    Exit code: 0 something was learned from each source, 1 from some of them only, 2 wrong usage, 3 nothing was learned.
    """
    if out is not None and out.exists():
        raise click.BadParameter(
            f"{out} already exists. Choose another file name, or move that file away", param_hint="--out"
        )
    calibrations: list[Calibration] = []
    hosts: list[str] = []
    for source in sources:
        try:
            if is_file_source(source):
                step_progress = None if progress is None else StepProgress(progress)
                calibrations.append(calibrate_source(source, read_input_file(Path(source)), step_progress))
            else:
                hosts.append(source)
        except (InputError, RecordingError) as error:
            calibrations.append(Calibration(source, {}, (), (str(error).removeprefix(f"{source}: "),)))
    if hosts:
        settings = SshSettings(config_file=ssh_config, use_agent=True)
        calibrations += map(explain_unknown_name, calibrate_hosts(hosts, settings, samples))
    profiles, unmade = build_profiles(calibrations)
    if as_json:
        print_json(calibration_object(calibrations, profiles, unmade))
    else:
        for calibration in calibrations:
            print_calibration(calibration)
    for sentence in unmade:
        print_error(sentence)
    write_profiles(profiles, out, as_json=as_json)
    learned = [bool(calibration.values) for calibration in calibrations]
    sys.exit(OK if all(learned) else WARNING if any(learned) else UNKNOWN)


def explain_unknown_name(calibration: Calibration) -> Calibration:
    """A name that no host has is most often a file name with a typing error."""
    if not any(UNKNOWN_HOST in sentence for sentence in calibration.not_learned):
        return calibration
    return replace(
        calibration, not_learned=(*calibration.not_learned, neither_file_nor_host(calibration.source).removesuffix("."))
    )


def write_profiles(profiles: Sequence[LearnedProfile], out: Path | None, *, as_json: bool) -> None:
    """Writes the profiles to the file of --out, or prints them."""
    if not profiles:
        if out is not None:
            print_error(f"{out}: the file was not written, because no profile could be made")
        return
    text = format_profiles_toml(profiles)
    if out is None:
        if not as_json:
            click.echo(f"\nAdd to wattwatch.toml:\n\n{text}", nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.BadParameter(f"{out}: cannot write the file: {error.strerror}", param_hint="--out") from None
    print_error(f"{out}: the profiles were written. Copy the tables from this file to wattwatch.toml")


def calibration_object(
    calibrations: Sequence[Calibration], profiles: Sequence[LearnedProfile], unmade: Sequence[str]
) -> dict[str, Any]:
    return {
        "sources": [
            {
                "source": each.source,
                "boards": len(each.boards),
                "learned": [asdict(value) for value in each.values],
                "not_learned": list(each.not_learned),
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
    console = text_console()
    models = ", ".join(sorted({gpu.name or "unknown model" for gpu in calibration.boards.values()}))
    gpus = f"{format_count(len(calibration.boards), 'GPU')}, {models}" if calibration.boards else "no GPU"
    console.print(f"[bold]{escape(calibration.source)}[/]: {escape(gpus)}")
    for kind in BaselineKind:
        values = [value for value in calibration.values if value.kind is kind]
        if values:
            console.print(f"  [green]{KIND_LABELS[kind]}[/]: {escape(describe_learned(values))}")
    for sentence in calibration.not_learned:
        console.print(f"  [yellow]{escape(sentence)}[/]")
