"""wattwatch.toml: one tree of settings. A field's description is its documentation; a wrong key says what was meant.

Durations are written "90s", "2m", "8h"; node lists "gpu-[01-16]" (parsed by ClusterShell). Secrets are only ever
named by file. `load_config` raises ConfigError with the place, what was expected and the nearest valid key.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
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
from wattwatch.watcher.detection.model import AlertName, JobSpec, Severity
from wattwatch.watcher.diagnosis.capture.collector import CaptureSettings
from wattwatch.watcher.diagnosis.nccl_ras.client import RAS_PORT

UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION_PATTERN: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
DURATION_PART_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


class ConfigError(Exception):
    """The configuration cannot be used. Each problem is one line: place, what is wrong, what was expected."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        super().__init__("\n".join(f"{path}: {problem}" for problem in problems))


def parse_duration(value: object) -> float:
    """Seconds of "90s", "2m", "1h30m", "500ms". A bare number has no unit and is refused."""
    if not isinstance(value, str) or not DURATION_PATTERN.fullmatch(value):
        raise ValueError(f'expected a duration like "30s", "2m" or "8h", got {value!r}')
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in DURATION_PART_PATTERN.findall(value))


Duration = Annotated[float, BeforeValidator(parse_duration)]


class Section(BaseModel):
    """A table of the file: unknown keys are errors, values are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WatcherSection(Section):
    listen: str = Field("127.0.0.1:9560", description="address and port of the page, API and metrics")
    state_directory: Path = Field(
        Path("/var/lib/wattwatch"), strict=False, description="episodes and outbox over a restart (SQLite)"
    )
    interval: Duration = Field(1.0, description="one sample of each node per interval")
    token_file: Path | None = Field(None, strict=False, description="bearer token; required to listen beyond loopback")
    allow_unauthenticated: bool = Field(
        False, description="listen beyond loopback without a token: anyone who reaches the port can read"
    )
    external_url: str | None = Field(None, description="how people reach the page; linked from messages")
    reminder: Duration | None = Field(None, description="repeat a message while its episode is open; never if absent")

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
    user: str | None = Field(None, description="login name; else ssh_config, else the current user")
    port: int | None = Field(None, description="TCP port; else ssh_config, else 22", ge=1, le=65535)
    config_file: Path = Field(
        Path("~/.ssh/config"),
        strict=False,
        description="HostName Port User IdentityFile CertificateFile ProxyJump UserKnownHostsFile are honoured",
    )
    known_hosts_file: Path | None = Field(
        None, strict=False, description="host keys; else ssh_config, else ~/.ssh/known_hosts"
    )
    identity_files: tuple[Annotated[Path, Field(strict=False)], ...] = Field(
        (), strict=False, description="private keys; else ssh_config, else the usual names in ~/.ssh"
    )
    certificate_file: Path | None = Field(None, strict=False, description="user certificate of the first key")
    passphrase_file: Path | None = Field(None, strict=False, description="file with the keys' passphrase")
    use_agent: bool = Field(False, description="ask the SSH agent as well")
    connect_timeout: Duration = Field(10.0, description="limit on each of TCP, banner, authentication, channel")
    max_simultaneous_logins: int = Field(8, description="logins under way at once over all nodes", ge=1, le=64)
    renew_after: Duration = Field(8 * 3600.0, description="each connection is replaced this often, make before break")


class JobSection(Section):
    name: str = Field(description="job name: label train_job in metrics", min_length=1, max_length=100)
    nodes: str = Field(description='node list, e.g. "gpu-[01-16]"')
    run_directory: Path | None = Field(None, strict=False, description="run directory of wattwatch-train")
    logs: tuple[str, ...] = Field((), strict=False, description="log files (shell patterns) to read progress from")
    log_pattern: str | None = Field(
        None, description="regex with (?P<step>) and optionally total, loss, tokens_per_second; else built-in ones"
    )
    checkpoint_directory: Path | None = Field(None, strict=False, description="else checkpoints/ of the run directory")
    processes: str | None = Field(None, description="regex on process names; else any process on a GPU")
    gpus_per_node: int | None = Field(None, description="boards a node should have; else the most ever seen", ge=1)
    floor_tokens_per_second: float | None = Field(None, strict=False, description="JobSlow below this", gt=0)
    checkpoint_every: Duration | None = Field(None, description="CheckpointOverdue after twice this without one")
    stall_limit: Duration | None = Field(
        None, description="JobHung after this long without a step; else learned from the job's own pace"
    )
    capture: bool = Field(
        True, description="when the job hangs, ask its ranks and nodes once for flight records, stacks and NCCL RAS"
    )
    flight_recorder_files: str | None = Field(
        None, description="prefix of torch's dumps, as in TORCH_FR_DUMP_TEMP_FILE; else only those of run_directory"
    )
    flight_recorder_pipe: str | None = Field(
        None,
        description="prefix of torch's FIFOs, as in TORCH_NCCL_DEBUG_INFO_PIPE_FILE: a capture asks through them for "
        "dumps, which writes flight_recorder_files on the nodes; never if absent, nor in a save",
    )
    nccl_ras_port: int = Field(
        RAS_PORT, description="port of NCCL RAS on the nodes, as in NCCL_RAS_ADDR", ge=1, le=65535
    )

    @field_validator("name")
    @classmethod
    def name_fits_a_url(cls, value: str) -> str:
        if not value.isprintable() or "/" in value or value != value.strip():
            raise ValueError(f"expected a name without slashes, control characters or outer blanks, got {value!r}")
        return value

    @field_validator("nodes")
    @classmethod
    def nodes_parse(cls, value: str) -> str:
        if not expand_nodes(value):
            raise ValueError('no nodes: expected a list like "gpu-[01-16]"')
        return value

    @field_validator("log_pattern")
    @classmethod
    def pattern_has_step(cls, value: str | None) -> str | None:
        if value is not None and "step" not in compile_pattern(value).groupindex:
            raise ValueError("expected a group named step: (?P<step>\\d+)")
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
                f'expected an absolute path to which the rank is added, like "/nfs/fr/dump_", got {value!r}'
            )
        return value

    @model_validator(mode="after")
    def dumps_can_be_found(self) -> JobSection:
        if self.flight_recorder_pipe is not None and self.flight_recorder_files is None:
            raise ValueError(
                "flight_recorder_pipe needs flight_recorder_files: where the dumps that it asks for appear"
            )
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        return expand_nodes(self.nodes)

    @property
    def capture_settings(self) -> CaptureSettings:
        return CaptureSettings(self.flight_recorder_files, self.flight_recorder_pipe, self.nccl_ras_port)

    def spec(self, interval_seconds: float) -> JobSpec:
        """The same as the judge reads it. Checkpoints: checkpoints/ of the run directory by default."""
        checkpoints = self.checkpoint_directory
        if checkpoints is None and self.run_directory is not None:
            checkpoints = self.run_directory / "checkpoints"
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
    name: str = Field(description="named by routes", min_length=1)
    type: str = Field(description="; ".join(f"{name}: {text}" for name, text in RECEIVER_TYPES.items()))
    url_file: Path = Field(strict=False, description="file whose first line is the URL")
    send_resolved: bool = Field(True, description="also tell when an episode closes")

    @field_validator("type")
    @classmethod
    def type_is_known(cls, value: str) -> str:
        if value not in RECEIVER_TYPES:
            raise ValueError(f"expected {' or '.join(map(repr, RECEIVER_TYPES))}, got {value!r}")
        return value


class RouteSection(Section):
    receiver: str = Field(description="name of a receiver")
    severities: tuple[Annotated[Severity, Field(strict=False)], ...] = Field(
        (), strict=False, description="only these; all if absent"
    )
    alerts: tuple[Annotated[AlertName, Field(strict=False)], ...] = Field(
        (), strict=False, description="only these; all if absent"
    )
    jobs: tuple[str, ...] = Field((), strict=False, description="only these; all if absent")


class ProfileSection(Section):
    """What a board draws here, in watts: `wattwatch calibrate` writes it, `wattwatch triage --profile` takes its file.
    What is left out is as shipped for a board of this name."""

    name: str = Field(min_length=1)
    match: str = Field(description="regex on the board's name")
    limit_watts: float = Field(strict=False, gt=0, description="enforced power limit")
    idle_watts: float = Field(strict=False, gt=0, description="no process")
    floor_watts: float = Field(strict=False, gt=0, description="spinning in a collective, or waiting with a context")
    communication_watts: float | None = Field(None, strict=False, gt=0)
    compute_watts: float | None = Field(None, strict=False, gt=0, description="lower end of the compute plateau")

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
            problems.append("jobs: no [[jobs]] table: expected at least one with name, nodes and run_directory or logs")
        known = [receiver.name for receiver in self.receivers]
        problems += [
            f"routes[{i}].receiver: no receiver is named {route.receiver!r}{suggest(route.receiver, known)}"
            for i, route in enumerate(self.routes)
            if route.receiver not in known
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None


def expand_nodes(text: str) -> tuple[str, ...]:
    """Node names of "gpu-[01-16],login"; ValueError where the list cannot be read."""
    try:
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ValueError(f'not a node list: {error}; expected something like "gpu-[01-16]"') from None


def find_duplicates(table: str, names: list[str]) -> Iterator[str]:
    for i, name in enumerate(names):
        first = names.index(name)
        if first != i:
            yield f"{table}[{i}].name: {name!r} is already the name of {table}[{first}]; names must differ"


def suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def load_config(path: Path) -> Config:
    """Read and check the file. Raises ConfigError with every problem found, each naming its place."""
    data = read_toml(path)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(path, [line for item in error.errors() for line in describe_validation_error(item)]) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"is not UTF-8 text (byte {error.start})"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path, [f"is not TOML: {error}"]) from None


def describe_validation_error(item: Any) -> list[str]:
    """One validation error of pydantic as lines "place: what; expected ...; did you mean ...?"."""
    location = list(item["loc"])
    place = format_location(location)
    if item["type"] == "extra_forbidden":
        known = sorted(known_keys(location[:-1]))
        hint = suggest(str(location[-1]), known) or f"; expected one of {', '.join(known)}"
        return [f"{place}: unknown key{hint}"]
    if item["type"] == "missing":
        return [f"{place}: missing; {expected_value(location)}"]
    message = str(item["msg"]).removeprefix("Value error, ")
    if not place:
        return message.splitlines()
    if item["type"] == "value_error":
        return [f"{place}: {message}"]
    return [f"{place}: {message}, got {item['input']!r}"]


def format_location(location: list[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def find_section(location: list[str | int]) -> type[Section]:
    """The model that holds the keys below `location`."""
    section: type[Section] = Config
    tables: dict[str, type[Section]] = {
        "watcher": WatcherSection,
        "ssh": SshSection,
        "jobs": JobSection,
        "receivers": ReceiverSection,
        "routes": RouteSection,
        "profiles": ProfileSection,
    }
    if location:
        section = tables.get(str(location[0]), Config)
    return section


def known_keys(location: list[str | int]) -> set[str]:
    return set(find_section(location).model_fields)


def expected_value(location: list[str | int]) -> str:
    field = find_section(location[:-1]).model_fields.get(str(location[-1]))
    return f"expected {field.description}" if field is not None and field.description else "expected a value"


def read_secret(path: Path) -> str:
    """First line of a secret's file; relative names are looked for in $CREDENTIALS_DIRECTORY first (systemd)."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if directory and not path.is_absolute() and (Path(directory) / path).exists():
        path = Path(directory) / path
    lines = path.expanduser().read_text("utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ValueError(f"{path} is empty: expected the secret on its first line")
    return lines[0].strip()


# What each node is asked to report: everything that any of its jobs needs.

LEADING_FLAGS: Final = re.compile(r"\(\?([aimsux]+)\)")


def probe_request_for(specs: Sequence[JobSpec], node: str) -> ProbeRequest:
    """One request for one node; the shortest interval of its jobs serves them all."""
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
    """A pattern that may stand beside others. Flags at its start hold for it alone: elsewhere they are an error."""
    flags = LEADING_FLAGS.match(pattern)
    return f"(?:{pattern})" if flags is None else f"(?{flags[1]}:{pattern[flags.end() :]})"
