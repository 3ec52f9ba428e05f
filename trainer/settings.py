"""JOB.toml: what to train, on what, how, and where the output goes. Each field's metadata is its help text.

The launcher, the gate and every rank read the same file, and the gate records its hash. No torch here.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, get_type_hints

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError


class Evenness(StrEnum):
    """What to do when ranks have unequal numbers of blocks (called "evenfix" in arXiv 2608.05944, section 5)."""

    MIN = "min"  # all ranks stop at the count of the rank with the fewest blocks
    PAD = "pad"  # ranks with fewer blocks repeat their first ones, up to the largest count
    OFF = "off"  # every rank uses its own count: deadlocks at the end of the epoch. Only to reproduce that failure


class Precision(StrEnum):
    BF16 = "bf16"  # computed in bfloat16; gradients reduced, and parameters kept, in float32
    FP32 = "fp32"


class GatherMode(StrEnum):
    """How long a rank holds unsharded weights and gradients."""

    LAYER = "layer"  # those of one layer, while it is computed; gradients reduced at every micro-step (FULL_SHARD)
    STEP = "step"  # those of the whole model, for one step: gathered once, reduced once


class LaunchMethod(StrEnum):
    """How the launcher starts processes on a node."""

    LOCAL = "local"
    SSH = "ssh"
    SRUN = "srun"


def setting(default: Any, text: str) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """[train]"""

    epochs: int = setting(1, "number of passes over the data")
    micro_batch: int = setting(1, "number of blocks per micro-step, on each rank")
    accumulation: int = setting(8, "number of micro-steps per optimizer step")
    learning_rate: float = setting(1e-5, "peak learning rate, reached at the end of the warm-up")
    final_learning_rate_share: float = setting(0.1, "fraction of learning_rate at which the cosine schedule ends")
    warmup_steps: int = setting(
        100,
        "number of warm-up steps, during which the learning rate rises from 0 to learning_rate; a resume without "
        "optimizer state repeats the warm-up",
    )
    weight_decay: float = setting(0.1, "weight decay of matrices; norms and biases have none")
    beta1: float = setting(0.9, "AdamW")
    beta2: float = setting(0.95, "AdamW")
    epsilon: float = setting(1e-8, "AdamW")
    clip_norm: float = setting(1.0, "maximum gradient norm over all ranks; 0 turns clipping off")
    seed: int = setting(0, "random seed for initial weights and dropout")
    random_weights: bool = setting(False, "start from config.json alone, with randomly initialized weights")
    evenness: str = setting(
        "min",
        "min: all ranks stop at the smallest block count; pad: ranks with fewer blocks repeat some; off: each rank "
        "uses its own count, so the job hangs if the counts differ",
    )
    precision: str = setting(
        "bf16", "bf16: compute in bfloat16, but reduce gradients and keep parameters in float32; fp32: use only float32"
    )
    gather: str = setting(
        "layer",
        "layer: gather one layer at a time, which needs the least memory; step: gather the whole model once per step, "
        "which needs up to 8 bytes more per parameter",
    )
    gradient_checkpointing: bool = setting(False, "recompute activations to save memory; about 1.6x slower")
    compile: bool = setting(False, "compile each layer with torch.compile")
    document_mask: bool = setting(False, "prevent attention across records; needs blocks packed with --document-mask")
    log_every: int = setting(10, "number of steps between two log lines")
    step_timeout_seconds: float = setting(
        1800.0, "the job is ended if a collective during a step takes longer than this"
    )


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """[checkpoint]"""

    save_every: int = setting(
        500, "number of steps between two checkpoints; one is also saved at the end of each epoch"
    )
    keep: int = setting(2, "number of complete checkpoints to keep")
    optimizer: bool = setting(
        False, "also save optimizer state, so that a resume is exact; adds 12 bytes per parameter"
    )
    file_gigabytes: float = setting(
        5.0, "approximate maximum size of a weights file in GB; each file is written by one rank"
    )
    timeout_seconds: float = setting(3600.0, "the job is ended if a collective during a save takes longer than this")


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """[launch]"""

    nodes: str = setting("localhost", "node names, such as gpu-[01-16]; rank 0 runs on the first node")
    ranks_per_node: int = setting(1, "number of processes on each node, one per GPU")
    via: str = setting(
        "local", "how to start processes: local (this host only), ssh, or srun (inside a Slurm allocation)"
    )
    address: str = setting("", "address at which the other nodes reach the first node. Default: the first node's name")
    port: int = setting(29500, "port of torch's key-value store on the first node; the gate uses the next higher port")
    retries: int = setting(3, "maximum number of new attempts after failures, each from the last complete checkpoint")
    retry_wait_seconds: float = setting(10.0, "delay before the first retry; the delay doubles with each further retry")
    gate_wait_seconds: float = setting(60.0, "how long the gate waits for all nodes")
    strict: bool = setting(False, "refuse the job also if the gate has only warnings")
    python: str = setting("", "path of the Python interpreter on the nodes. Default: the one that runs the launcher")
    ssh_options: tuple[str, ...] = setting((), 'options for ssh, such as "-F", "/nfs/ssh_config"')
    environment: dict[str, str] = field(
        default_factory=dict, metadata={"help": "environment variables for the ranks, such as NCCL_SOCKET_IFNAME"}
    )


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The whole file. Paths are as the nodes see them."""

    run: str = field(metadata={"help": "run directory, shared by all nodes"})
    data: str = field(metadata={"help": "directory of the packed blocks, on each node's local disk"})
    model: str = field(metadata={"help": "Hugging Face model directory: config.json, tokenizer, weights"})
    name: str = setting("", "name of the run in heartbeats and records. Default: the name of the run directory")
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    launch: LaunchSettings = LaunchSettings()

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one rank consumes per optimizer step."""
        return self.train.micro_batch * self.train.accumulation


@dataclass(frozen=True, slots=True)
class JobFile:
    """The settings and the file that they were read from."""

    path: str
    sha256: str  # of the file: the gate compares it across nodes, each rank compares its own with the gate's
    settings: JobSettings


VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# torchrun sets these for each rank; a value from the job file would give all ranks the same identity.
RESERVED_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CHOICES: Final[dict[str, type[StrEnum]]] = {
    "train.evenness": Evenness,
    "train.precision": Precision,
    "train.gather": GatherMode,
    "launch.via": LaunchMethod,
}
AT_LEAST_ONE: Final = (
    *("train.epochs", "train.micro_batch", "train.accumulation", "train.log_every"),
    *("checkpoint.save_every", "checkpoint.keep", "launch.ranks_per_node"),
)
ABOVE_ZERO: Final = (*("checkpoint.file_gigabytes", "launch.gate_wait_seconds"),)
NOT_NEGATIVE: Final = (
    *("train.warmup_steps", "train.weight_decay", "train.clip_norm", "train.seed"),
    *("launch.retries", "launch.retry_wait_seconds"),
)
FRACTIONS: Final = ("train.final_learning_rate_share",)
TIMEOUTS: Final = ("train.step_timeout_seconds", "checkpoint.timeout_seconds")
MAX_TIMEOUT_SECONDS: Final = 30 * 86400  # chosen: torch takes milliseconds in an int64, and 1e15 s overflows it
MIN_EPSILON: Final = 1e-30  # AdamW divides in float32, whose smallest normal number is about 1e-38
RANGES: Final[tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...]] = (
    (AT_LEAST_ONE, lambda number: number >= 1, "at least 1"),
    (ABOVE_ZERO, lambda number: 0 < number < math.inf, "more than 0"),
    (NOT_NEGATIVE, lambda number: 0 <= number < math.inf, "0 or more"),
    (FRACTIONS, lambda number: 0 <= number <= 1, "from 0 to 1"),
    (("train.beta1", "train.beta2"), lambda number: 0 <= number < 1, "from 0 to less than 1"),
    (("train.learning_rate",), lambda number: 0 < number <= 1, "more than 0 and at most 1"),
    (("train.epsilon",), lambda number: MIN_EPSILON <= number <= 1, "from 1e-30 to 1"),
    (TIMEOUTS, lambda number: 0 < number <= MAX_TIMEOUT_SECONDS, "more than 0 s and at most 30 days"),
    # below 65535, not at it: the gate uses the next port
    (("launch.port",), lambda number: 0 < number < 65535, "a port below 65535"),
)


OWN_DESCRIPTOR: Final = re.compile(r"(?:/dev/fd|/proc/self/fd)/(\d+)|/dev/stdin")


def _read_file(path: Path) -> bytes:
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
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(mode) or (own is not None and stat.S_ISFIFO(mode))):
            kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_job_file(path: str) -> JobFile:
    """The job in a TOML file. Raises UserError that names the file, the key, and what was expected."""
    try:
        data = _read_file(Path(path))
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    return JobFile(path, hashlib.sha256(data).hexdigest(), parse_job_settings(table, path))


def parse_job_settings(table: dict[str, Any], where: str) -> JobSettings:
    """The settings in a decoded TOML table.

    Raises UserError that lists all unknown keys, or all values out of range, at once: a user who fixes a file one
    error at a time queues for the cluster once per error.
    """
    problems = _unknown_keys(JobSettings, table)
    if not problems:
        try:
            settings = parse_dataclass(JobSettings, table)
        except InvalidDataError as error:
            problems = [str(error)]
        else:
            problems = _bad_values(settings)
    if problems:
        raise UserError(f"{where}: " + "; ".join(problems))
    return settings


def _unknown_keys(kind: type, table: dict[str, Any], prefix: str = "") -> list[str]:
    hints, problems = get_type_hints(kind), []
    for key, value in table.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            problems.append(f"{prefix}{key}: unknown key" + (f", did you mean {near[0]}?" if near else ""))
        elif is_dataclass(hints[key]) and isinstance(value, dict):
            problems += _unknown_keys(hints[key], value, f"{prefix}{key}.")
    return problems


def _bad_values(settings: JobSettings) -> list[str]:
    problems = []
    for name, choices in CHOICES.items():
        if (value := _setting_value(settings, name)) not in list(choices):
            problems.append(f"{name}: expected one of {', '.join(choices)}, found {value!r}")
    for names, is_valid, expected in RANGES:
        invalid = [name for name in names if not is_valid(_setting_value(settings, name))]  # NaN is never valid
        problems += [f"{name}: expected {expected}, found {_setting_value(settings, name)}" for name in invalid]
    for name, value in settings.launch.environment.items():
        if not VARIABLE_NAME.fullmatch(name) or "\0" in value:
            problems.append(f"launch.environment.{name!r}: not a valid environment variable")
        elif name in RESERVED_VARIABLES:
            problems.append(f"launch.environment.{name}: the launcher sets this variable itself; remove it")
    problems += [f"{name}: empty" for name in ("run", "data", "model") if not getattr(settings, name)]
    return problems


def _setting_value(settings: JobSettings, name: str) -> Any:
    table, _, key = name.partition(".")
    return getattr(getattr(settings, table), key)


def settings_help() -> str:
    """All keys with their defaults and help texts, as a TOML file to start from."""
    lines = []
    for top in fields(JobSettings):
        kind = get_type_hints(JobSettings)[top.name]
        if not is_dataclass(kind):
            lines.append(_help_line(top.name, "" if top.default is MISSING else top.default, top.metadata["help"]))
            continue
        lines.append(f"\n[{top.name}]")
        for item in fields(kind):
            default = {} if item.default is MISSING else item.default
            lines.append(_help_line(item.name, default, item.metadata["help"]))
    return "\n".join(lines) + "\n"


def _help_line(name: str, default: Any, text: str) -> str:
    return f"{name} = {json.dumps(default)}  # {text}"  # all our defaults look the same in JSON and TOML


def smoke_test_job(job: JobFile) -> JobFile:
    """The same job reduced to its last two steps and the save at the end of the epoch, in RUN/smoke.

    What hangs or breaks at the end of an epoch then does so at once, on the real shards, instead of hours later. A test
    of the first steps finds nothing of it.
    """
    settings = job.settings
    return replace(
        job,
        settings=replace(
            settings,
            run=f"{settings.run}/smoke",
            train=replace(settings.train, epochs=1),
            checkpoint=replace(settings.checkpoint, keep=1),
            launch=replace(settings.launch, retries=0),
        ),
    )
