"""`wattwatch replay FILE ...`: what the watcher would have reported about a recording or a GPU log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from wattwatch.watcher.cli.shared import (
    SEVERITY_COLORS,
    SEVERITY_EXIT_CODES,
    UNKNOWN,
    exit_unknown,
    json_option,
    print_error,
    print_json,
    text_console,
)
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.config.profiles_file import read_profiles
from wattwatch.watcher.recordings.anonymize import write_anonymized
from wattwatch.watcher.recordings.format import RecordingError, open_recording
from wattwatch.watcher.recordings.inputs import GpuLog, InputError, read_input_file
from wattwatch.watcher.recordings.replay import AlertChange, AlertTransition, ReplayResult, replay


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with power profiles ([[profiles]] tables): written by `wattwatch calibrate`, or a wattwatch.toml.",
)
@click.option(
    "--anonymous",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a copy of the recording to this file, with hosts, users, paths and names replaced by pseudonyms.",
)
@json_option("Print a JSON list with one object for each file.")
def replay_command(files: tuple[Path, ...], profile_file: Path | None, anonymous: Path | None, as_json: bool) -> None:
    """Run the detector on recordings or GPU logs, at their own times, and print every change of a state or an alert.

    With --anonymous, the copy is replayed. No copy is made if it would not give the same verdicts as the recording.
    Look through the copy before you share it.

    Exit code: 0 nothing to report, 1 a warning, 2 a critical alert, 3 a file could not be read.
    """
    profiles = () if profile_file is None else read_profiles(profile_file)
    if anonymous is not None:
        files = (_anonymous_copy(files, anonymous),)
    worst = 0
    objects: list[dict[str, Any]] = []
    for path in files:
        try:
            source = read_input_file(path)
            if isinstance(source, GpuLog) and all(e.sample is None or e.sample.gpus is None for e in source.events):
                advice = f". {source.advice.removesuffix('.')}" if source.advice else ""
                raise InputError(f"{path}: there are no GPU readings in this file: {source.detail}{advice}")
            result = replay(str(path), source, profiles)
        except (InputError, RecordingError) as error:
            objects.append({"source": str(path), "error": str(error)})
            print_error(str(error))
            worst = max(worst, UNKNOWN)
            continue
        worst = max([worst, *(SEVERITY_EXIT_CODES[e.severity] for e in result.episodes if e.suppressed_by is None)])
        if not result.samples:
            print_error(f"{path}: {result.problem}")
            worst = max(worst, UNKNOWN)
        objects.append(replay_object(result))
        if not as_json:
            print_replay(result)
    if as_json:
        print_json(objects)
    sys.exit(worst)


def _anonymous_copy(files: tuple[Path, ...], target: Path) -> Path:
    """The path of the copy. Ends the command, and leaves no copy, if it would not give the same verdicts."""
    if len(files) != 1:
        raise click.UsageError("with --anonymous, give exactly one FILE")
    if target.exists():
        raise click.UsageError(f"{target} already exists. Choose another file name")
    try:
        write_anonymized(files[0], target)
        before, after = (replay("", open_recording(path)) for path in (files[0], target))
    except RecordingError as error:
        target.unlink(missing_ok=True)
        exit_unknown(str(error))
    if verdicts_without_names(before) != verdicts_without_names(after):
        target.unlink(missing_ok=True)
        exit_unknown(
            f"{files[0]}: no copy was made, because its verdicts would differ: they depend on a name that the copy "
            "would replace"
        )
    print_error(f"{target}: the anonymous copy of {files[0]} was written. Look through it before you share it")
    return target


def verdicts_without_names(result: ReplayResult) -> list[tuple[Any, ...]]:
    """All states and alerts with their times, without the names that a copy replaces."""
    alerts = [
        (
            e.alert,
            e.severity,
            e.confirmed,
            e.opened_wall_seconds,
            e.closed_wall_seconds,
            [(s.gpu, s.rank) for s in e.suspects],
        )
        for e in result.episodes
    ]
    return [*alerts, *((change.at_seconds, change.state) for change in result.changes)]


def replay_object(result: ReplayResult) -> dict[str, Any]:
    return {
        "source": result.source,
        "seconds": result.seconds,
        "rounds": result.rounds,
        "samples": result.samples,
        "states": [
            {"at_seconds": c.at_seconds, "job": c.job, "state": c.state, "reason": c.reason} for c in result.changes
        ],
        "alerts": [
            {
                "job": e.job,
                "alert": e.alert,
                "severity": e.severity,
                "confirmed": e.confirmed,
                "scope": e.scope,
                "opened_seconds": e.opened_wall_seconds,
                "closed_seconds": e.closed_wall_seconds,
                "summary": e.summary,
                "evidence": e.evidence,
                "suspects": [{"node": s.node, "gpu": s.gpu, "rank": s.rank} for s in e.suspects],
                "suppressed_by": e.suppressed_by,
                "changes": [
                    {
                        "at_seconds": change.at_seconds,
                        "change": change.step,
                        "severity": change.episode.severity,
                        "confirmed": change.episode.confirmed,
                        "summary": change.episode.summary,
                        "over_seconds": change.over_seconds,
                    }
                    for change in result.alerts
                    if change.episode.id == e.id
                ],
            }
            for e in result.episodes
        ],
        "problem": result.problem or None,
        "beginnings": [{"at_seconds": b.at_seconds, "job": b.job, "reason": b.reason} for b in result.beginnings],
        "assumptions": list(result.assumptions),
    }


def print_replay(result: ReplayResult) -> None:
    console = text_console()
    samples = format_count(result.samples, "sample")
    console.print(f"[bold]{escape(result.source)}[/]: {samples} over {format_elapsed(result.seconds)}")
    for assumption in result.assumptions:
        console.print(f"  assumed: {escape(assumption)}")
    # Logs that follow each other in one file are told apart by the lines that begin them.
    several = len({change.job for change in result.changes}) > 1 + len(result.beginnings)
    lines = [
        (
            each.at_seconds,
            f"[bold]{'new log':<14}[/] (another host, job or logger, or the clock was changed): {escape(each.reason)}",
        )
        for each in result.beginnings
    ]
    lines += [
        (c.at_seconds, f"{escape(c.job) + ': ' if several else ''}{c.state.value:<14} {escape(c.reason)}")
        for c in result.changes
    ]
    lines += [(change.at_seconds, describe_alert_change(change, several=several)) for change in result.alerts]
    for at_seconds, text in sorted(lines, key=lambda line: line[0]):
        console.print(f"  {format_elapsed(at_seconds):>9}  {text}")
    if not result.episodes and result.samples:
        console.print("  no alerts")
    if result.problem and result.samples:
        console.print(f"  {result.problem}")


def describe_alert_change(change: AlertChange, *, several: bool) -> str:
    """One line in rich markup: the change, with the text of the alert at that time."""
    episode = change.episode
    job = escape(episode.job) + ": " if several and episode.job else ""
    if change.step is AlertTransition.RESOLVED:
        scope = f" {escape(episode.scope)}" if episode.scope else ""
        # An alert that comes and goes is kept open for a while after its problem is gone.
        over = "" if change.over_seconds is None else f" (not seen since {format_elapsed(change.over_seconds)})"
        return f"{job}[green]resolved[/] {episode.alert}{scope}{over}"
    certainty = "" if episode.confirmed else " (not confirmed)"
    if change.step is AlertTransition.ESCALATED:
        certainty = f"{certainty} (escalated)"
    elif change.step is AlertTransition.CONFIRMED:
        certainty = " (now confirmed)"
    elif change.step is AlertTransition.CAUSE_CHANGED:
        certainty = f"{certainty} (the cause has changed)"
    suppressed = (
        "" if episode.suppressed_by is None else escape(f" [not sent, because {episode.suppressed_by} explains it]")
    )
    return (
        f"{job}[{SEVERITY_COLORS[episode.severity]}]{episode.severity.value.upper()} {episode.alert}[/]{certainty} "
        f"{escape(episode.summary)}{suppressed}"
    )


def format_elapsed(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
