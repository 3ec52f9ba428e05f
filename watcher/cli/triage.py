"""`wattwatch triage [SOURCE ...]`: one verdict now, from hosts, pasted output, logs, recordings."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from typing import Any, Final

import click
import orjson
from rich.console import Console
from rich.markup import escape

from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.config.profiles_file import read_profiles
from wattwatch.watcher.config.settings import ConfigError
from wattwatch.watcher.detection.baselines.profiles import shipped_profiles
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState, RankGpu
from wattwatch.watcher.recordings.format import RecordingError
from wattwatch.watcher.recordings.inputs import InputError, read_input, read_input_file
from wattwatch.watcher.recordings.triage import ProfileChoice, TriageResult, select_profile, triage_hosts, triage_source

OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
EXIT_CODE: Final = {
    PowerState.STARVATION: WARNING,
    PowerState.STRAGGLER: WARNING,
    PowerState.THROTTLE: WARNING,
    PowerState.HANG: CRITICAL,
    PowerState.GPU_FAULT: CRITICAL,
    PowerState.UNKNOWN: UNKNOWN,
}
FILE_SUFFIXES: Final = frozenset({".csv", ".txt", ".log", ".xml", ".json", ".gz"})
HOST_PATTERN: Final = re.compile(r"([^@\s]+@)?[\w.:\[\]%-]{1,253}")
UNSURE_CONFIDENCE: Final = 0.5  # a hang said with less is a warning: look, do not act
# Worst first: what is known to be wrong outweighs what is not known.
EXIT_CODES_BY_SEVERITY: Final = (OK, UNKNOWN, WARNING, CRITICAL)
COLORS: Final = {OK: "green", WARNING: "yellow", CRITICAL: "red", UNKNOWN: "magenta"}


@click.command()
@click.argument("sources", nargs=-1)
@click.option("--job", "as_one_job", is_flag=True, help="All hosts are one job.")
@click.option("--progress", type=click.Choice([w.value for w in StepProgress]), help="What you know of the steps.")
@click.option(
    "--profile",
    "profile_name",
    metavar="FILE|NAME",
    help="What boards draw: a file with [[profiles]] (as calibrate writes), for the boards that they match; or the "
    "name of a shipped profile, for any board.",
)
@click.option("-F", "--ssh-config", type=click.Path(path_type=Path), help="SSH configuration  [default: ~/.ssh/config]")
@click.option("--json", "as_json", is_flag=True, help="A list of objects, one a source.")
def triage_command(
    sources: tuple[str, ...],
    as_one_job: bool,
    progress: str | None,
    profile_name: str | None,
    ssh_config: Path | None,
    as_json: bool,
) -> None:
    """One verdict now. SOURCE is a host or user@host (asked twice over SSH), a file, or - for standard input:
    nvidia-smi CSV in any column order, the nvidia-smi table, -q -x XML, a log of many samples, JSON samples (one job,
    or a collection of named ones), or a recording.

    Exit code: 0 nothing is wrong, 1 warning, 2 critical, 3 it cannot be told.
    """
    if not sources:
        if sys.stdin.isatty():
            raise click.UsageError("no SOURCE: name a host or a file, or pipe nvidia-smi into `wattwatch triage -`")
        sources = ("-",)
    word = None if progress is None else StepProgress(progress)
    profile = None if profile_name is None else load_profiles(profile_name)
    triages: list[TriageResult] = []
    hosts: list[str] = []
    failed = False
    for source in sources:
        try:
            if source == "-":
                triages += triage_source("-", read_input("-", sys.stdin.buffer.read()), word, profile)
            elif is_file_source(source):
                triages += triage_source(source, read_input_file(Path(source), only_the_end=True), word, profile)
            else:
                hosts.append(source)
        except (InputError, RecordingError) as error:
            click.echo(str(error), err=True)
            failed = True
    if hosts:
        settings = SshSettings(config_file=ssh_config, use_agent=True)
        triages += triage_hosts(hosts, settings, as_one_job=as_one_job, progress=word, profile=profile)
    for triage in triages:
        if isinstance(profile, tuple) and triage.sample.gpus and select_profile(profile, triage.sample) is None:
            name = next((each.gpu.name for each in triage.sample.gpus if each.gpu.name), "a board without a name")
            click.echo(f"{triage.source}: no profile in {profile_name} matches {name}: judged as shipped", err=True)
    if as_json:
        click.echo(orjson.dumps([triage_object(t) for t in triages], option=orjson.OPT_INDENT_2).decode())
    else:
        for triage in triages:
            print_triage(triage)
    codes = [triage_exit_code(t) for t in triages] + [UNKNOWN] * failed
    sys.exit(max(codes, key=EXIT_CODES_BY_SEVERITY.index, default=UNKNOWN))


def is_file_source(source: str) -> bool:
    """Whether the source is a file or a pipe, and not a host. Raises SourceError where it is neither."""
    path = Path(source or "\0")  # an empty name is no file, and not the directory that pathlib makes of it
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if "/" in source or path.suffix in FILE_SUFFIXES:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(f"{source}: cannot be read: {reason}") from None
        if not HOST_PATTERN.fullmatch(source):
            raise InputError(f"{source!r}: neither a file nor the name of a host") from None
        return False
    if stat.S_ISDIR(mode):
        raise InputError(f"{source}: is a directory: name the files in it")
    return True


def load_profiles(name: str) -> ProfileChoice:
    known = {profile.name: profile for profile in shipped_profiles()}
    if name.lower() in known:
        return known[name.lower()]
    if "/" not in name and not name.endswith(".toml") and not Path(name).exists():
        raise click.BadParameter(
            f"no profile {name!r}; known: {', '.join(known)}; or a file with [[profiles]]", param_hint="--profile"
        )
    try:
        return read_profiles(Path(name))
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from None


def triage_exit_code(triage: TriageResult) -> int:
    code = EXIT_CODE.get(triage.verdict.state, OK)
    unsure = triage.verdict.state is PowerState.HANG and triage.verdict.confidence < UNSURE_CONFIDENCE
    return WARNING if unsure else code


def triage_object(triage: TriageResult) -> dict[str, Any]:
    """The object of the contract; what could not be read is null, with its reason under `reasons`."""
    verdict = triage.verdict
    alternative = verdict.alternative
    return {
        "source": triage.source,
        "state": verdict.state.value,
        "confidence": verdict.confidence,
        "shape": verdict.pattern.value,
        "suspects": [{"node": s.node, "gpu": s.gpu, "rank": s.rank} for s in verdict.suspects],
        "power_fraction": verdict.power_fraction,
        "alternative": None
        if alternative is None
        else {"state": alternative.state.value, "confidence": alternative.confidence},
        "settle": verdict.deciding_check,
        "why": verdict.why,
        "advice": verdict.advice,
        "gpus": [gpu_object(ranked) for ranked in triage.sample.gpus],
    }


def gpu_object(ranked: RankGpu) -> dict[str, Any]:
    gpu = ranked.gpu
    return {
        "node": ranked.node,
        "index": gpu.index,
        "rank": ranked.rank,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "name": gpu.name,
        "power_watts": gpu.power_watts,
        "power_source": gpu.power_source,
        "power_limit_watts": gpu.power_limit_watts,
        "utilization_percent": gpu.utilization_percent,
        "memory_utilization_percent": gpu.memory_utilization_percent,
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "temperature_celsius": gpu.temperature_celsius,
        "reasons": {name: reason.value for name, reason in gpu.reasons.items()},
    }


def print_triage(triage: TriageResult) -> None:
    verdict = triage.verdict
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    colour = COLORS[triage_exit_code(triage)]
    state = verdict.state.value.replace("_", " ").upper()
    console.print(f"[bold]{escape(triage.source)}[/]: [bold {colour}]{state}[/] (confidence {verdict.confidence:.2f})")
    console.print(f"  why       {escape(verdict.why)}")
    if verdict.suspects:
        console.print(f"  suspect   {escape(', '.join(str(s) for s in verdict.suspects))}")
    if verdict.alternative is not None:
        other = verdict.alternative
        console.print(f"  or else   {other.state.value.replace('_', ' ')} ({other.confidence:.2f})")
    if verdict.deciding_check is not None:
        console.print(f"  settle    {escape(verdict.deciding_check)}.")
    console.print(f"  next      {escape(verdict.advice)}")
