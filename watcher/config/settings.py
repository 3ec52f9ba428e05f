"""The settings of wattwatch.toml, as a tree of pydantic models.

The description of a field is its documentation: `wattwatch config --reference` and docs/configuration.md are generated
from it. Durations are written "90s", "2m", "8h", lists of nodes "gpu-[01-16]" (ClusterShell syntax). Secrets are never
in the file itself: a setting names the file that holds the secret. `load_config` raises ConfigError with every problem:
its location, what was expected, and the nearest valid key.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.watcher.common.formatting import describe_invalid_value
from wattwatch.watcher.detection.model import AlertName, JobSpec, Severity

UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION_PATTERN: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
DURATION_PART_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
NCCL_RAS_PORT: Final = (
    28028  # NCCL's default: docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
)


class ConfigError(Exception):
    """The configuration cannot be used. Each of `problems` is one line: location, what is wrong, what was expected."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))


def parse_duration(value: object) -> float:
    """The seconds in "90s", "2m", "1h30m" or "500ms". Raises ValueError, also for a number without a unit."""
    if not isinstance(value, str) or not DURATION_PATTERN.fullmatch(value):
        raise ValueError(f'expected a duration like "30s", "2m" or "8h", got {value!r}')
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in DURATION_PART_PATTERN.findall(value))


Duration = Annotated[float, BeforeValidator(parse_duration)]


class Section(BaseModel):
    """One table of the file. Unknown keys are errors, and values are not converted: `port = "22"` is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What a capture of a hung job may use, as configured for the job."""

    recorder_files: str | None = None  # the job's TORCH_FR_DUMP_TEMP_FILE: prefix of the dumps; the rank follows
    recorder_pipe: str | None = None  # its TORCH_NCCL_DEBUG_INFO_PIPE_FILE: prefix of the FIFOs that request a dump
    ras_port: int = NCCL_RAS_PORT


class WatcherSection(Section):
    """The watcher itself."""

    listen: str = Field("127.0.0.1:9560", description="address and port of the web page, the API and /metrics")
    state_directory: Path = Field(
        Path("/var/lib/wattwatch"),
        strict=False,
        description="directory for everything that survives a restart: alert episodes, the delivery queue, learned "
        "power values, incident recordings and captures",
    )
    interval: Duration = Field(1.0, description='time between two samples of a node, from "200ms" to "60s"')
    token_file: Path | None = Field(
        None,
        strict=False,
        description="file with the bearer token of the API; required if listen is not a loopback address, "
        "unless allow_unauthenticated is true",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="allow `listen` to be a non-loopback address without a token; anyone who can reach the port can "
        "then read everything",
    )
    external_url: str | None = Field(None, description="URL at which people open the web page; alerts link to it")
    reminder: Duration | None = Field(
        None, description="repeat the message of an open alert at this interval; if not set, it is sent once"
    )

    @field_validator("interval")
    @classmethod
    def interval_is_sane(cls, value: float) -> float:
        if not 0.2 <= value <= 60:
            raise ValueError('expected between "200ms" and "60s"')
        return value

    @field_validator("listen")
    @classmethod
    def listen_is_host_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f'expected "host:port", got {value!r}')
        return value

    @property
    def listen_host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def listen_port(self) -> int:
        return int(self.listen.rpartition(":")[2])


class SshSection(Section):
    """How the watcher logs in to the nodes. Host keys are always verified."""

    user: str | None = Field(
        None, description="login name; if not set, the one in config_file is used, or else the name of the current user"
    )
    port: int | None = Field(
        None, description="TCP port; if not set, the one in config_file is used, or else 22", ge=1, le=65535
    )
    config_file: Path = Field(
        Path("~/.ssh/config"),
        strict=False,
        description="OpenSSH client configuration file; the watcher uses HostName, Port, User, IdentityFile, "
        "CertificateFile, ProxyJump and UserKnownHostsFile from it",
    )
    known_hosts_file: Path | None = Field(
        None,
        strict=False,
        description="file with known host keys; if not set, the one in config_file is used, or else ~/.ssh/known_hosts",
    )
    identity_files: tuple[Annotated[Path, Field(strict=False)], ...] = Field(
        (),
        strict=False,
        description="private keys; if empty, those named in config_file are used, or else the default names in ~/.ssh",
    )
    certificate_file: Path | None = Field(
        None, strict=False, description="SSH user certificate for the first key in identity_files"
    )
    passphrase_file: Path | None = Field(None, strict=False, description="file with the passphrase of the private keys")
    use_agent: bool = Field(False, description="also use the keys of a running SSH agent")
    connect_timeout: Duration = Field(
        10.0, description="time limit for each step: TCP connection, SSH banner, authentication, opening a channel"
    )
    max_simultaneous_logins: int = Field(
        8, description="how many nodes may be logging in at the same time", ge=1, le=64
    )
    renew_after: Duration = Field(
        8 * 3600.0,
        description="age at which a connection is replaced; the new connection is opened before the old one is closed",
    )


class JobSection(Section):
    """One training job to watch. At least one table is needed."""

    name: str = Field(
        description="name of the job, as shown in alerts, on the web page and in the metric label train_job",
        min_length=1,
        max_length=100,
    )
    nodes: str = Field(description='nodes of the job, such as "gpu-[01-16]"')
    run_directory: Path | None = Field(
        None, strict=False, description="run directory of wattwatch-train; progress is read from its heartbeats"
    )
    logs: tuple[str, ...] = Field(
        (),
        strict=False,
        description="training logs that show progress, as paths on the nodes; shell patterns such as * are allowed",
    )
    log_pattern: str | None = Field(
        None,
        description="regular expression for a log line, with the group (?P<step>...) and optionally total, loss and "
        "tokens_per_second; if not set, the built-in formats are recognized",
    )
    checkpoint_directory: Path | None = Field(
        None,
        strict=False,
        description="directory of the checkpoints; if not set, checkpoints/ in run_directory is used",
    )
    processes: str | None = Field(
        None,
        description="regular expression for the names of the job's processes; if not set, every process on a GPU "
        "counts",
    )
    gpus_per_node: int | None = Field(
        None,
        description="number of GPUs that each node should have; if not set, the highest number seen on that node so "
        "far",
        ge=1,
    )
    floor_tokens_per_second: float | None = Field(
        None, strict=False, description="JobSlow is raised when throughput is below this value", gt=0
    )
    tokens_per_step: int | None = Field(
        None,
        description="number of tokens in one optimizer step of the whole job; if the log does not print the "
        "throughput, the watcher calculates it from this number and the step rate",
        ge=1,
    )
    checkpoint_every: Duration | None = Field(
        None,
        description="time between checkpoints; CheckpointOverdue is raised when no checkpoint has been completed for "
        "twice this time",
    )
    stall_limit: Duration | None = Field(
        None,
        description="JobHung is raised after this time without a new step; if not set, the limit is learned from the "
        "job's steps",
    )
    capture: bool = Field(
        True,
        description="when the job hangs, collect evidence once: flight-recorder dumps, stacks and NCCL RAS reports "
        "from its ranks and nodes",
    )
    flight_recorder_files: str | None = Field(
        None,
        description="path prefix of torch's flight-recorder dumps, as in the job's TORCH_FR_DUMP_TEMP_FILE; if not "
        "set, only dumps in run_directory are found",
    )
    flight_recorder_pipe: str | None = Field(
        None,
        description="path prefix of torch's dump pipes, as in the job's TORCH_NCCL_DEBUG_INFO_PIPE_FILE; if "
        "set, a capture requests dumps through these pipes, and the job writes the dumps to flight_recorder_files. "
        "No dumps are requested if this key is not set, or during a checkpoint.",
    )
    nccl_ras_port: int = Field(
        NCCL_RAS_PORT, description="port of NCCL RAS on the nodes, as in the job's NCCL_RAS_ADDR", ge=1, le=65535
    )

    @field_validator("name")
    @classmethod
    def name_fits_a_url(cls, value: str) -> str:
        if not value.isprintable() or "/" in value or value != value.strip():
            raise ValueError(
                f"expected a name without slashes, control characters or surrounding spaces, got {value!r}"
            )
        return value

    @field_validator("nodes")
    @classmethod
    def nodes_parse(cls, value: str) -> str:
        if not expand_nodes(value):
            raise ValueError('no nodes; expected a list like "gpu-[01-16]"')
        return value

    @field_validator("log_pattern")
    @classmethod
    def pattern_has_step(cls, value: str | None) -> str | None:
        if value is not None and "step" not in compile_pattern(value).groupindex:
            raise ValueError("expected a group named step, such as (?P<step>\\d+)")
        return value

    @field_validator("processes")
    @classmethod
    def processes_compile(cls, value: str | None) -> str | None:
        if value is not None:
            compile_pattern(value)
        return value

    @field_validator("flight_recorder_files", "flight_recorder_pipe")
    @classmethod
    def prefix_is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(
                f'expected an absolute path prefix (torch appends the rank), like "/nfs/fr/dump_", got {value!r}'
            )
        return value

    @model_validator(mode="after")
    def dumps_can_be_found(self) -> JobSection:
        if self.flight_recorder_pipe is not None and self.flight_recorder_files is None:
            raise ValueError(
                "flight_recorder_pipe is set, so flight_recorder_files (the path prefix of the dumps) must be set too"
            )
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        return expand_nodes(self.nodes)

    @property
    def capture_settings(self) -> CaptureSettings:
        return CaptureSettings(self.flight_recorder_files, self.flight_recorder_pipe, self.nccl_ras_port)

    @property
    def effective_checkpoint_directory(self) -> Path | None:
        if self.checkpoint_directory is None and self.run_directory is not None:
            return self.run_directory / "checkpoints"
        return self.checkpoint_directory

    def spec(self, interval_seconds: float) -> JobSpec:
        """The job as detection takes it, with the default of the checkpoint directory filled in."""
        checkpoints = self.effective_checkpoint_directory
        return JobSpec(
            name=self.name,
            nodes=self.node_names,
            run_directory=None if self.run_directory is None else str(self.run_directory),
            logs=self.logs,
            log_pattern=self.log_pattern,
            checkpoint_directory=None if checkpoints is None else str(checkpoints),
            processes=self.processes,
            gpus_per_node=self.gpus_per_node,
            floor_tokens_per_second=self.floor_tokens_per_second,
            tokens_per_step=self.tokens_per_step,
            checkpoint_every_seconds=self.checkpoint_every,
            stall_limit_seconds=self.stall_limit,
            interval_seconds=interval_seconds,
        )


# The receiver types, and what each one sends. A type is implemented by the module of the same name in
# watcher/alerting/receivers/: to add one, write that module and add a line here.
RECEIVER_TYPES: Final = {
    "slack": "Slack incoming webhook",
    "webhook": "any URL that accepts Alertmanager's webhook payload, version 4",
}


class ReceiverSection(Section):
    """A receiver of alerts. It gets the alerts that `[[routes]]` send to it, or all alerts if there are no routes."""

    name: str = Field(description="name of the receiver, used in routes", min_length=1)
    type: str = Field(description="; ".join(f"{name}: {text}" for name, text in RECEIVER_TYPES.items()))
    url_file: Path = Field(
        strict=False, description="file whose first line is the URL that messages are sent to (a secret)"
    )
    send_resolved: bool = Field(True, description="also send a message when an alert is resolved")

    @field_validator("type")
    @classmethod
    def type_is_known(cls, value: str) -> str:
        if value not in RECEIVER_TYPES:
            raise ValueError(f"expected {' or '.join(map(repr, RECEIVER_TYPES))}, got {value!r}")
        return value


class RouteSection(Section):
    """Which alerts a receiver gets. An alert must meet all conditions; a condition that is not set matches every
    alert."""

    receiver: str = Field(description="name of a receiver")
    severities: tuple[Annotated[Severity, Field(strict=False)], ...] = Field(
        (), strict=False, description="send only alerts of these severities; if empty, alerts of all severities"
    )
    alerts: tuple[Annotated[AlertName, Field(strict=False)], ...] = Field(
        (), strict=False, description="send only these alerts; if empty, all alerts"
    )
    jobs: tuple[str, ...] = Field(
        (), strict=False, description="send only alerts about these jobs; if empty, alerts about all jobs"
    )


class ProfileSection(Section):
    """The power of one GPU model at your site, in watts. `wattwatch calibrate` writes such a table, and `wattwatch
    triage --profile` reads it. A value that is left out is taken from the shipped profile of the model."""

    name: str = Field(description="name of the profile", min_length=1)
    match: str = Field(description="regular expression for the name of the GPU, as nvidia-smi prints it")
    limit_watts: float = Field(strict=False, gt=0, description="enforced power limit")
    idle_watts: float = Field(strict=False, gt=0, description="power of a GPU that no process uses")
    floor_watts: float = Field(
        strict=False, gt=0, description="power of a GPU that spins in a collective, or that waits with a CUDA context"
    )
    communication_watts: float | None = Field(
        None, strict=False, gt=0, description="power while all ranks are busy with communication"
    )
    compute_watts: float | None = Field(
        None, strict=False, gt=0, description="lowest power that still counts as computing"
    )

    @model_validator(mode="after")
    def watts_rise(self) -> ProfileSection:
        for lower, higher, watts in (
            ("idle_watts", "limit_watts", self.limit_watts),
            ("floor_watts", "limit_watts", self.limit_watts),
            ("floor_watts", "compute_watts", self.compute_watts),
            ("floor_watts", "communication_watts", self.communication_watts),
        ):
            if watts is not None and watts <= getattr(self, lower):
                raise ValueError(f"{higher} {watts:g} is not above {lower} {getattr(self, lower):g}")
        return self


class Config(Section):
    """The whole file."""

    watcher: WatcherSection = WatcherSection()
    ssh: SshSection = SshSection()
    jobs: tuple[JobSection, ...] = Field((), strict=False)
    receivers: tuple[ReceiverSection, ...] = Field((), strict=False)
    routes: tuple[RouteSection, ...] = Field((), strict=False)
    profiles: tuple[ProfileSection, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def names_agree(self, _: ValidationInfo) -> Config:
        problems = [
            *find_duplicates("jobs", [job.name for job in self.jobs]),
            *find_duplicates("receivers", [receiver.name for receiver in self.receivers]),
            *find_duplicates("profiles", [profile.name for profile in self.profiles]),
        ]
        if not self.jobs:
            problems.append(
                "jobs: there is no [[jobs]] table; expected at least one, with name, nodes, and either run_directory "
                "or logs"
            )
        known = [receiver.name for receiver in self.receivers]
        problems += [
            f"routes[{i}].receiver: there is no receiver {route.receiver!r}{suggest(route.receiver, known)}"
            for i, route in enumerate(self.routes)
            if route.receiver not in known
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


# The tables of the file, by name.
TABLES: Final[dict[str, type[Section]]] = {
    "watcher": WatcherSection,
    "ssh": SshSection,
    "jobs": JobSection,
    "receivers": ReceiverSection,
    "routes": RouteSection,
    "profiles": ProfileSection,
}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raises ValueError, which pydantic turns into a problem of the configuration."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None


def expand_nodes(text: str) -> tuple[str, ...]:
    """The node names in "gpu-[01-16],login". Raises ValueError if the list cannot be parsed."""
    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(f'not a node list: {error}; expected something like "gpu-[01-16]"') from None


def find_duplicates(table: str, names: list[str]) -> Iterator[str]:
    for i, name in enumerate(names):
        first = names.index(name)
        if first != i:
            yield f"{table}[{i}].name: {name!r} is also the name of {table}[{first}]; names must differ"


def suggest(word: str, known: list[str]) -> str:
    """ "; did you mean 'x'?", or nothing if no known word is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def load_config(path: Path) -> Config:
    """Reads and validates the file. Raises ConfigError with every problem found, each with its location."""
    data = read_toml(path)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(path, [line for item in error.errors() for line in describe_validation_error(item)]) from None


OWN_DESCRIPTOR: Final = re.compile(r"(?:/dev/fd|/proc/self/fd)/(\d+)|/dev/stdin")


def read_file(path: Path) -> bytes:
    """The content of a regular file, or of a pipe that this process was started with (`-c <(generate)`, /dev/stdin).

    Raises OSError for anything else: to open a FIFO would wait for a writer, and a device may never end.
    """
    if (own := OWN_DESCRIPTOR.fullmatch(str(path))) is not None:
        # Opened anew, a pipe whose writer has finished would wait for the next one.
        descriptor = os.dup(int(own[1] or 0))
    else:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory; give the path of a file in it")
        if not (stat.S_ISREG(mode) or (own is not None and stat.S_ISFIFO(mode))):
            kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(read_file(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(path, [f"cannot read the file: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"not UTF-8 text (byte {error.start}); expected a configuration in TOML"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [f"not valid TOML: {error}"]) from None


def describe_validation_error(item: Any) -> list[str]:
    """One validation error of pydantic as lines "location: what is wrong; what was expected"."""
    location = list(item["loc"])
    place = format_location(location)
    if item["type"] == "extra_forbidden":
        known = sorted(known_keys(location[:-1]))
        hint = suggest(str(location[-1]), known) or f"; expected one of {', '.join(known)}"
        return [f"{place}: unknown key{hint}"]
    if item["type"] == "missing":
        return [f"{place}: missing{expected_value(location)}"]
    problem = describe_invalid_value(item)
    if not place:
        return problem.splitlines()
    if item["type"] == "tuple_type" and place in TABLES:
        problem = problem.replace("expected a list", f"expected [[{place}]] tables")
    return [f"{place}: {problem}"]


def format_location(location: list[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def find_section(location: list[str | int]) -> type[Section]:
    """The model whose keys are valid below `location`."""
    return TABLES.get(str(location[0]), Config) if location else Config


def known_keys(location: list[str | int]) -> set[str]:
    return set(find_section(location).model_fields)


def expected_value(location: list[str | int]) -> str:
    """What a missing key is for, after a semicolon; empty if there is no description."""
    field = find_section(location[:-1]).model_fields.get(str(location[-1]))
    return f"; expected: {field.description}" if field is not None and field.description else ""


def read_secret(path: Path) -> str:
    """The first line of a file that holds a secret. Raises OSError or ValueError.

    A relative path is looked up in $CREDENTIALS_DIRECTORY first, where systemd puts the credentials of a service.
    """
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if directory and not path.is_absolute() and (Path(directory) / path).exists():
        path = Path(directory) / path
    lines = read_file(path.expanduser()).decode("utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ValueError(f"{path} is empty; expected the secret on its first line")
    return lines[0].strip()


# The request to the probe of a node

LEADING_FLAGS: Final = re.compile(r"\(\?([aimsux]+)\)")


def probe_request_for(specs: Sequence[JobSpec], node: str) -> ProbeRequest:
    """Everything that any job on this node needs, in one request. The shortest interval of its jobs applies."""
    mine = [spec for spec in specs if node in spec.nodes]
    patterns = [spec.processes for spec in mine if spec.processes]
    return ProbeRequest(
        interval_seconds=min((spec.interval_seconds for spec in mine), default=1.0),
        run_directories=tuple(dict.fromkeys(s.run_directory for s in mine if s.run_directory)),
        logs=tuple(dict.fromkeys(LogSource(path, s.log_pattern) for s in mine for path in s.logs)),
        checkpoint_directories=tuple(dict.fromkeys(s.checkpoint_directory for s in mine if s.checkpoint_directory)),
        process_pattern="|".join(dict.fromkeys(map(_as_alternative, patterns))) or None,
    )


def _as_alternative(pattern: str) -> str:
    """The pattern as one alternative of a larger one. Python accepts global flags such as (?i) only at the very start
    of an expression, so flags at the start of a pattern become flags of its group."""
    flags = LEADING_FLAGS.match(pattern)
    return f"(?:{pattern})" if flags is None else f"(?{flags[1]}:{pattern[flags.end() :]})"
