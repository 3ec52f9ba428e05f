"""`wattwatch triage [SOURCE ...]`: one verdict now, from hosts, pasted output, logs or recordings."""

from __future__ import annotations

import difflib
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from rich.markup import escape

from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.cli.shared import (
    CRITICAL,
    EXIT_CODE_COLORS,
    OK,
    UNKNOWN,
    WARNING,
    json_option,
    print_error,
    print_json,
    ssh_config_option,
    text_console,
    worst_exit_code,
)
from wattwatch.watcher.config.profiles_file import read_profiles
from wattwatch.watcher.config.settings import ConfigError
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, shipped_profiles, unknown_model_text
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.detection.model import PowerState, RankGpu
from wattwatch.watcher.recordings.format import Recording, RecordingError
from wattwatch.watcher.recordings.inputs import GpuLog, InputError, read_input_file, read_stream
from wattwatch.watcher.recordings.triage import (
    AssumedModel,
    ProfileChoice,
    TriageResult,
    assume_model,
    select_profile,
    triage_hosts,
    triage_job,
    triage_source,
)

STATE_EXIT_CODES: Final = {
    PowerState.STARVATION: WARNING,
    PowerState.STRAGGLER: WARNING,
    PowerState.THROTTLE: WARNING,
    PowerState.HANG: CRITICAL,
    PowerState.GPU_FAULT: CRITICAL,
    PowerState.UNKNOWN: UNKNOWN,
}
# A hang with less confidence than this is a warning: check the job, but do not kill it.
UNSURE_CONFIDENCE: Final = 0.5
# A source with one of these suffixes is a file, and an error if it does not exist; host names do not end like that.
FILE_SUFFIXES: Final = frozenset(
    {".csv", ".tsv", ".txt", ".log", ".out", ".xml", ".html", ".json", ".jsonl", ".gz", ".bz2", ".xz", ".zst", ".zip"}
)
# What the status of a host says if no host of that name exists: see collectors/ssh/login.py.
UNKNOWN_HOST: Final = "cannot resolve the name"
HOST_PATTERN: Final = re.compile(r"([^@\s]+@)?[\w.:\[\]%-]{1,253}")


@click.command()
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
@click.option(
    "--job",
    "as_one_job",
    is_flag=True,
    help="Treat all hosts, or all hosts in the files, as nodes of one job in the given order, and give one verdict for "
    "the job.",
)
@click.option(
    "--progress",
    type=click.Choice([progress.value for progress in StepProgress]),
    help="Whether the job's steps are advancing, if you know.",
)
@click.option(
    "--profile",
    "profile_name",
    metavar="FILE|NAME",
    help="Power profiles: a file with [[profiles]] tables, such as `wattwatch calibrate` writes; each is used for the "
    "GPUs that it matches. Or the name of a shipped profile, which is then used for every GPU.",
)
@click.option(
    "--board",
    "model",
    metavar="MODEL",
    help="GPU model, such as B300, for inputs that do not name it. `wattwatch profiles` lists the models.",
)
@ssh_config_option()
@json_option("Print a JSON list with one object for each verdict.")
def triage_command(
    sources: tuple[str, ...],
    as_one_job: bool,
    progress: str | None,
    profile_name: str | None,
    model: str | None,
    ssh_config: Path | None,
    as_json: bool,
) -> None:
    """One verdict now: computing, communicating, starving for data, checkpointing, hung, faulty or idle.

    SOURCE is a host or user@host (sampled twice over SSH), a file, or - for standard input. A file may hold what
    nvidia-smi prints (the table, CSV with any columns, -q as text or XML, dmon) or rocm-smi, amd-smi or xpu-smi dump,
    of one host or of several, a log of it, JSON samples of one or more jobs, or a recording. A pipe is read for at most
    60 s.

    Exit code: 0 nothing is wrong, 1 warning, 2 critical, 3 unknown.
    """
    if not sources:
        if sys.stdin.isatty():
            raise click.UsageError(
                "no SOURCE was given: give a host or a file, or run `nvidia-smi | wattwatch triage -`"
            )
        sources = ("-",)
    step_progress = None if progress is None else StepProgress(progress)
    profile = choose_profiles(profile_name, model)
    inputs, hosts, failed = read_sources(sources, as_one_job=as_one_job)
    if as_one_job and inputs and hosts:
        raise click.UsageError(
            f"with --job, give either hosts or files: {hosts[0]!r} was read as a host, and {inputs[0][0]!r} as a file"
        )
    results: list[TriageResult] = []
    try:
        if as_one_job and failed:
            print_error(
                "no verdict: with --job, every file must be readable, because a missing node changes the verdict"
            )
        elif as_one_job and inputs:
            results += triage_job(inputs, step_progress, profile)
        elif not as_one_job:
            for source, content in inputs:
                results += triage_source(source, content, step_progress, profile)
    except (InputError, RecordingError) as error:
        print_error(str(error))
        failed = True
    if hosts:
        settings = SshSettings(config_file=ssh_config, use_agent=True)
        of_hosts = triage_hosts(hosts, settings, as_one_job=as_one_job, progress=step_progress, profile=profile)
        results += [explain_unknown_host(without_next_login(result)) for result in of_hosts]
    for result in results:
        if (note := unused_profile_note(result, profile, profile_name)) is not None:
            print_error(note)
    if as_json:
        print_json([triage_object(result) for result in results])
    else:
        for result in results:
            print_triage(result)
        if not as_one_job:
            print_one_job_note(inputs)
    sys.exit(worst_exit_code([triage_exit_code(result) for result in results] + [UNKNOWN] * failed))


def read_sources(
    sources: Sequence[str], *, as_one_job: bool
) -> tuple[list[tuple[str, GpuLog | Recording]], list[str], bool]:
    """The files that could be read, the hosts, and whether a file could not be read. Errors are printed."""
    inputs: list[tuple[str, GpuLog | Recording]] = []
    hosts: list[str] = []
    failed = False
    several_hosts = as_one_job and len(sources) == 1
    for source in sources:
        try:
            if source == "-":
                content = read_stream("-", sys.stdin.buffer, only_the_end=True, several_hosts=several_hosts)
                inputs.append((source, content))
            elif is_file_source(source):
                content = read_input_file(Path(source), only_the_end=True, several_hosts=several_hosts)
                inputs.append((source, content))
            else:
                hosts.append(source)
        except (InputError, RecordingError) as error:
            print_error(str(error))
            failed = True
    return inputs, hosts, failed


def print_one_job_note(inputs: Sequence[tuple[str, GpuLog | Recording]]) -> None:
    """Hosts are judged one by one unless the user says that they run one job, in which a missing rank shows."""
    several = [name for name, source in inputs if isinstance(source, GpuLog) and source.host_order is not None]
    if several:
        verb = "contains" if len(several) == 1 else "contain"
        click.echo(
            f"{', '.join(several)} {verb} the output of several hosts, and each host was judged separately. If the "
            "hosts run one job, add --job."
        )


NEXT_LOGIN: Final = re.compile(r"; (?:next login in [\d.]+ s|the next login is waiting for a free login slot)")


def without_next_login(result: TriageResult) -> TriageResult:
    """This command looks once: what a running watcher would do next does not apply."""
    return replace(result, verdict=replace(result.verdict, why=NEXT_LOGIN.sub("", result.verdict.why)))


def explain_unknown_host(result: TriageResult) -> TriageResult:
    """A name that no host has is most often a file name with a typing error."""
    unknown = [node for node in result.sample.nodes if UNKNOWN_HOST in node.detail]
    if not unknown:
        return result
    name, detail = unknown[0].node, NEXT_LOGIN.sub("", unknown[0].detail)
    why = f"{result.verdict.why.removesuffix('.')}. There is no file named {name} either."
    if len(unknown) == len(result.sample.nodes) == 1:
        why = f"{name!r} is neither a file nor a host name that can be resolved ({detail})."
    advice = neither_file_nor_host(name)
    return replace(result, verdict=replace(result.verdict, why=why, advice=advice, deciding_check=None))


def neither_file_nor_host(name: str) -> str:
    close = difflib.get_close_matches(name, [path.name for path in Path().iterdir()], n=1, cutoff=0.7)
    hint = f" Did you mean the file {close[0]}?" if close else ""
    return f"Check the name {name}: it is neither a file nor a known host.{hint}"


def is_file_source(source: str) -> bool:
    """Whether a SOURCE is a file or a pipe rather than a host. Raises InputError if it can be neither."""
    path = Path(source or "\0")  # pathlib would take an empty name for the current directory
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if "/" in source or path.suffix in FILE_SUFFIXES:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(f"{source}: cannot read the file: {reason}") from None
        if not HOST_PATTERN.fullmatch(source):
            raise InputError(f"{source!r}: there is no such file, and this is not a valid host name") from None
        return False
    if stat.S_ISDIR(mode):
        raise InputError(f"{source}: this is a directory. Give the files in it instead")
    return True


def choose_profiles(profile_name: str | None, model: str | None) -> ProfileChoice:
    """The value of --profile and --board together. Raises click.BadParameter or click.UsageError."""
    profiles = None if profile_name is None else load_profiles(profile_name)
    if model is None:
        return profiles
    if isinstance(profiles, PowerProfile):
        raise click.UsageError(
            "--board and --profile NAME both choose the power profile: give one, or a file with --profile"
        )
    assumed = assume_model(model, profiles if isinstance(profiles, tuple) else ())
    if assumed is None:
        raise click.BadParameter(unknown_model_text(model), param_hint="--board")
    return assumed


def unused_profile_note(result: TriageResult, profile: ProfileChoice, profile_name: str | None) -> str | None:
    """That a profile of the user's was not used, and why; None if it was."""
    name = next((each.gpu.name for each in result.sample.gpus if each.gpu.name), None)
    if not result.sample.gpus or select_profile(profile, result.sample) is not None:
        return None
    if isinstance(profile, tuple):
        matched = name or "a GPU without a name"
        return f"{result.source}: no profile in {profile_name} matches {matched}; the shipped profile is used"
    if isinstance(profile, AssumedModel):
        return f"{result.source}: the input names its GPU model, {name}; --board {profile.model} is not used"
    return None


def load_profiles(name: str) -> ProfileChoice:
    """The value of --profile: a shipped profile by its name, or the profiles of a file."""
    known = {profile.name: profile for profile in shipped_profiles()}
    if name.lower() in known:
        return known[name.lower()]
    if "/" not in name and not name.endswith(".toml") and not Path(name).exists():
        raise click.BadParameter(
            f"{unknown_model_text(name)}, or a file with [[profiles]] tables", param_hint="--profile"
        )
    try:
        return read_profiles(Path(name))
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from None


def triage_exit_code(result: TriageResult) -> int:
    verdict = result.verdict
    if verdict.state is PowerState.HANG and verdict.confidence < UNSURE_CONFIDENCE:
        return WARNING
    damaged = any(ranked.gpu.uncorrected_ecc_errors for ranked in result.sample.gpus)
    return STATE_EXIT_CODES.get(verdict.state, WARNING if damaged else OK)


def triage_object(result: TriageResult) -> dict[str, Any]:
    """The JSON object of a verdict. A value that could not be read is null, with its reason under `reasons`."""
    verdict = result.verdict
    alternative = verdict.alternative
    return {
        "source": result.source,
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
        "gpus": [gpu_object(ranked) for ranked in result.sample.gpus],
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
        "uncorrected_ecc_errors": gpu.uncorrected_ecc_errors,
        "reasons": {name: reason.value for name, reason in gpu.reasons.items()},
    }


def print_triage(result: TriageResult) -> None:
    verdict = result.verdict
    console = text_console()
    color = EXIT_CODE_COLORS[triage_exit_code(result)]
    state = verdict.state.value.replace("_", " ").upper()
    # A confidence beside "UNKNOWN" would be read as that of a finding.
    unknown = verdict.state is PowerState.UNKNOWN
    confidence = "" if unknown else f" (confidence {verdict.confidence:.2f})"
    console.print(f"[bold]{escape(result.source)}[/]: [bold {color}]{state}[/]{confidence}")
    console.print(f"  why           {escape(verdict.why)}")
    if verdict.suspects:
        console.print(f"  suspect       {escape(', '.join(str(s) for s in verdict.suspects))}")
    if verdict.alternative is not None:
        other = verdict.alternative
        label = "could be" if unknown else "otherwise"
        console.print(f"  {label:<12}  {other.state.value.replace('_', ' ')} (confidence {other.confidence:.2f})")
    if verdict.deciding_check is not None:
        label = "to find out" if verdict.alternative is None else "to decide"
        console.print(f"  {label:<12}  {escape(verdict.deciding_check)}.")
    console.print(f"  do next       {escape(verdict.advice)}")
