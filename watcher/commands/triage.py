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

from collectors.ssh.link import SshSettings
from watcher.config import ConfigError
from watcher.judge.classify import ProgressWord
from watcher.judge.job_sample import RankGpu
from watcher.judge.profiles import shipped_profiles
from watcher.judge.verdict import PowerState
from watcher.profile_files import read_profiles
from watcher.recordings import RecordingError
from watcher.sources import SourceError, read_file, read_source
from watcher.triage import Profiles, Triage, profile_among, triage_hosts, triage_source

OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
EXIT_CODE: Final = {
    PowerState.STARVATION: WARNING,
    PowerState.STRAGGLER: WARNING,
    PowerState.THROTTLE: WARNING,
    PowerState.HANG: CRITICAL,
    PowerState.GPU_FAULT: CRITICAL,
    PowerState.UNKNOWN: UNKNOWN,
}
FILE_ENDINGS: Final = frozenset({".csv", ".txt", ".log", ".xml", ".json", ".gz"})
HOST: Final = re.compile(r"([^@\s]+@)?[\w.:\[\]%-]{1,253}")
UNSURE: Final = 0.5  # a hang said with less is a warning: look, do not act
# Worst first: what is known to be wrong outweighs what is not known.
ORDER: Final = (OK, UNKNOWN, WARNING, CRITICAL)
COLOURS: Final = {OK: "green", WARNING: "yellow", CRITICAL: "red", UNKNOWN: "magenta"}


@click.command()
@click.argument("sources", nargs=-1)
@click.option("--job", "as_one_job", is_flag=True, help="All hosts are one job.")
@click.option("--progress", type=click.Choice([w.value for w in ProgressWord]), help="What you know of the steps.")
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
    word = None if progress is None else ProgressWord(progress)
    profile = None if profile_name is None else profiles_named(profile_name)
    triages: list[Triage] = []
    hosts: list[str] = []
    failed = False
    for source in sources:
        try:
            if source == "-":
                triages += triage_source("-", read_source("-", sys.stdin.buffer.read()), word, profile)
            elif is_file(source):
                triages += triage_source(source, read_file(Path(source), only_the_end=True), word, profile)
            else:
                hosts.append(source)
        except (SourceError, RecordingError) as error:
            click.echo(str(error), err=True)
            failed = True
    if hosts:
        settings = SshSettings(config_file=ssh_config, use_agent=True)
        triages += triage_hosts(hosts, settings, as_one_job=as_one_job, progress=word, profile=profile)
    for triage in triages:
        if isinstance(profile, tuple) and triage.sample.gpus and profile_among(profile, triage.sample) is None:
            name = next((each.gpu.name for each in triage.sample.gpus if each.gpu.name), "a board without a name")
            click.echo(f"{triage.source}: no profile in {profile_name} matches {name}: judged as shipped", err=True)
    if as_json:
        click.echo(orjson.dumps([as_object(t) for t in triages], option=orjson.OPT_INDENT_2).decode())
    else:
        for triage in triages:
            show(triage)
    codes = [exit_code(t) for t in triages] + [UNKNOWN] * failed
    sys.exit(max(codes, key=ORDER.index, default=UNKNOWN))


def is_file(source: str) -> bool:
    """Whether the source is a file or a pipe, and not a host. Raises SourceError where it is neither."""
    path = Path(source or "\0")  # an empty name is no file, and not the directory that pathlib makes of it
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if "/" in source or path.suffix in FILE_ENDINGS:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SourceError(f"{source}: cannot be read: {reason}") from None
        if not HOST.fullmatch(source):
            raise SourceError(f"{source!r}: neither a file nor the name of a host") from None
        return False
    if stat.S_ISDIR(mode):
        raise SourceError(f"{source}: is a directory: name the files in it")
    return True


def profiles_named(name: str) -> Profiles:
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


def exit_code(triage: Triage) -> int:
    code = EXIT_CODE.get(triage.verdict.state, OK)
    unsure = triage.verdict.state is PowerState.HANG and triage.verdict.confidence < UNSURE
    return WARNING if unsure else code


def as_object(triage: Triage) -> dict[str, Any]:
    """The object of the contract; what could not be read is null, with its reason under `reasons`."""
    verdict = triage.verdict
    alternative = verdict.alternative
    return {
        "source": triage.source,
        "state": verdict.state.value,
        "confidence": verdict.confidence,
        "shape": verdict.shape.value,
        "suspects": [{"node": s.node, "gpu": s.gpu, "rank": s.rank} for s in verdict.suspects],
        "power_fraction": verdict.power_fraction,
        "alternative": None
        if alternative is None
        else {"state": alternative.state.value, "confidence": alternative.confidence},
        "settle": verdict.settle,
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


def show(triage: Triage) -> None:
    verdict = triage.verdict
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    colour = COLOURS[exit_code(triage)]
    state = verdict.state.value.replace("_", " ").upper()
    console.print(f"[bold]{escape(triage.source)}[/]: [bold {colour}]{state}[/] (confidence {verdict.confidence:.2f})")
    console.print(f"  why       {escape(verdict.why)}")
    if verdict.suspects:
        console.print(f"  suspect   {escape(', '.join(str(s) for s in verdict.suspects))}")
    if verdict.alternative is not None:
        other = verdict.alternative
        console.print(f"  or else   {other.state.value.replace('_', ' ')} ({other.confidence:.2f})")
    if verdict.settle is not None:
        console.print(f"  settle    {escape(verdict.settle)}.")
    console.print(f"  next      {escape(verdict.advice)}")
