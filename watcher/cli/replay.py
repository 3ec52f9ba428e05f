"""`wattwatch replay FILE ...`: what the watcher would have said of a recording or a GPU log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click
import orjson
from rich.console import Console
from rich.markup import escape

from wattwatch.watcher.config.profiles_file import read_profiles
from wattwatch.watcher.detection.model import Severity
from wattwatch.watcher.recordings.anonymize import write_anonymized
from wattwatch.watcher.recordings.format import RecordingError, open_recording
from wattwatch.watcher.recordings.inputs import GpuLog, InputError, read_input_file
from wattwatch.watcher.recordings.replay import AlertChange, AlertTransition, ReplayResult, replay

COLORS: Final = {Severity.INFO: "blue", Severity.WARNING: "yellow", Severity.CRITICAL: "red"}
EXIT_CODE: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
UNREADABLE: Final = 3


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="A list of objects, one a file.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What boards draw: a file with [[profiles]], as calibrate writes it; wattwatch.toml too.",
)
@click.option(
    "--anonymous",
    type=click.Path(path_type=Path),
    help="Write a copy of the one recording here, with hosts, users, paths and names replaced.",
)
def replay_command(files: tuple[Path, ...], as_json: bool, profile_file: Path | None, anonymous: Path | None) -> None:
    """Recordings or GPU logs through the detector, at their own times.

    With --anonymous the copy is replayed, after it was checked against the recording: look at it before you share it.

    Exit code: 0 nothing would have been said, 1 a warning, 2 a critical alert, 3 a file could not be read.
    """
    profiles = () if profile_file is None else read_profiles(profile_file)
    if anonymous is not None:
        files = (_anonymous_copy(files, anonymous),)
    worst = 0
    answers: list[dict[str, Any]] = []
    for path in files:
        try:
            source = read_input_file(path)
            if isinstance(source, GpuLog) and all(m.sample is None or m.sample.gpus is None for m in source.moments):
                advice = f". {source.advice.removesuffix('.')}" if source.advice else ""
                raise InputError(f"{path}: no GPU reading in it: {source.detail}{advice}")
            result = replay(str(path), source, profiles)
        except (InputError, RecordingError) as error:
            answers.append({"source": str(path), "error": str(error)})
            click.echo(str(error), err=True)
            worst = max(worst, UNREADABLE)
            continue
        worst = max([worst, *(EXIT_CODE[e.severity] for e in result.episodes if e.suppressed_by is None)])
        answers.append(replay_object(result))
        if not as_json:
            print_replay(result)
    if as_json:
        click.echo(orjson.dumps(answers, option=orjson.OPT_INDENT_2).decode())
    sys.exit(worst)


def _anonymous_copy(files: tuple[Path, ...], target: Path) -> Path:
    """The copy; or one error, and no file, where it would not give the same verdicts."""
    if len(files) != 1:
        raise click.UsageError("--anonymous makes a copy of one recording; give one file")
    if target.exists():
        raise click.UsageError(f"{target} exists; give a new file")
    try:
        write_anonymized(files[0], target)
        before, after = (replay("", open_recording(path)) for path in (files[0], target))
    except RecordingError as error:
        target.unlink(missing_ok=True)
        click.echo(str(error), err=True)
        sys.exit(UNREADABLE)
    if verdicts_without_names(before) != verdicts_without_names(after):
        target.unlink(missing_ok=True)
        click.echo(
            f"{files[0]}: the copy would not give the same verdicts, so none was made: what decides is a name", err=True
        )
        sys.exit(UNREADABLE)
    click.echo(f"{target}: written: an anonymous copy of {files[0]}; look at it before you share it", err=True)
    return target


def verdicts_without_names(result: ReplayResult) -> list[tuple[Any, ...]]:
    """What was said and when, without names."""
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
                    }
                    for change in result.alerts
                    if change.episode.id == e.id
                ],
            }
            for e in result.episodes
        ],
    }


def print_replay(result: ReplayResult) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.print(f"[bold]{escape(result.source)}[/]: {result.rounds} rounds over {format_elapsed(result.seconds)}")
    several = len({change.job for change in result.changes}) > 1
    lines = [
        (c.at_seconds, f"{escape(c.job) + ': ' if several else ''}{c.state.value:<14} {escape(c.reason)}")
        for c in result.changes
    ]
    lines += [(change.at_seconds, describe_alert_change(change, several=several)) for change in result.alerts]
    for at_seconds, words in sorted(lines, key=lambda line: line[0]):
        console.print(f"  {format_elapsed(at_seconds):>9}  {words}")
    if not result.episodes:
        console.print("  no alert")


def describe_alert_change(change: AlertChange, *, several: bool) -> str:
    """One line, in markup: what was said at that moment."""
    episode = change.episode
    job = escape(episode.job) + ": " if several and episode.job else ""
    if change.step is AlertTransition.RESOLVED:
        return f"{job}[green]resolved[/] {episode.alert}"
    sure = "" if episode.confirmed else " (not confirmed)"
    if change.step is AlertTransition.ESCALATED:
        sure = f"{sure} (escalated)"
    elif change.step is AlertTransition.CONFIRMED:
        sure = " (now confirmed)"
    quiet = "" if episode.suppressed_by is None else escape(f" [not sent: it follows from {episode.suppressed_by}]")
    return (
        f"{job}[{COLORS[episode.severity]}]{episode.severity.value.upper()} {episode.alert}[/]{sure} "
        f"{escape(episode.summary)}{quiet}"
    )


def format_elapsed(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
