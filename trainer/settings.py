"""A job as its owner writes it, in TOML: what is trained on what, how, where to. The field's metadata is its help.

Read by the launcher, the gate and every rank from one file, whose hash the gate records: no torch here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, get_type_hints

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError


class Evenness(StrEnum):
    """What becomes of ranks with unequal block counts (PAPER: "evenfix")."""

    MIN = "min"  # all stop at the shortest rank's count
    PAD = "pad"  # shorter ranks repeat their first blocks, up to the longest rank's count
    OFF = "off"  # each its own count: deadlocks at the end of the epoch; to reproduce the failure, for nothing else


class Precision(StrEnum):
    BF16 = "bf16"  # computed in bfloat16, reduced and kept in float32
    FP32 = "fp32"


class GatherMode(StrEnum):
    """How long a rank holds whole weights and gradients."""

    LAYER = "layer"  # of a layer, while it computes; reduced at every micro-step (FULL_SHARD)
    STEP = "step"  # of the model, for a step: gathered once, reduced once


class LaunchMethod(StrEnum):
    """How the launcher reaches a node."""

    LOCAL = "local"
    SSH = "ssh"
    SRUN = "srun"


def setting(default: Any, text: str) -> Any:
    """A dataclass field with its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """[train]"""

    epochs: int = setting(1, "times over the data")
    micro_batch: int = setting(1, "blocks in a micro-step, on each rank")
    accumulation: int = setting(8, "micro-steps in an optimizer step")
    learning_rate: float = setting(1e-5, "at the top of the schedule")
    final_learning_rate_share: float = setting(0.1, "of learning_rate, where the cosine ends")
    warmup_steps: int = setting(100, "steps from 0 to learning_rate; again after a weights-only resume")
    weight_decay: float = setting(0.1, "of matrices; vectors have none")
    beta1: float = setting(0.9, "AdamW")
    beta2: float = setting(0.95, "AdamW")
    epsilon: float = setting(1e-8, "AdamW")
    clip_norm: float = setting(1.0, "largest norm of the gradient over all ranks; 0: not clipped")
    seed: int = setting(0, "of random weights")
    random_weights: bool = setting(False, "start from the model's config.json only")
    evenness: str = setting("min", "min: stop at the shortest rank; pad: repeat blocks to the longest; off: deadlock")
    precision: str = setting("bf16", "bf16: computed in bfloat16, reduced and kept in float32; fp32")
    gather: str = setting("layer", "layer: least memory; step: whole model for a step, up to 8 bytes a parameter more")
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, about 1.6x slower (PAPER)")
    compile: bool = setting(False, "torch.compile each layer")
    document_mask: bool = setting(False, "no attention across records; packed with --document-mask")
    log_every: int = setting(10, "steps between two lines")
    step_timeout_seconds: float = setting(1800.0, "a collective of a step that takes longer ends the job")


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """[checkpoint]"""

    save_every: int = setting(500, "steps between two checkpoints; one more at the end of each epoch")
    keep: int = setting(2, "complete checkpoints that stay")
    optimizer: bool = setting(False, "also what an exact resume needs: masters and moments, 12 bytes a parameter")
    file_gigabytes: float = setting(5.0, "size of a weights file; each rank writes whole files")
    timeout_seconds: float = setting(3600.0, "a collective of a save that takes longer ends the job")


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """[launch]"""

    nodes: str = setting("localhost", "such as gpu-[01-16]; rank 0 is on the first")
    ranks_per_node: int = setting(1, "processes on each node: one a GPU")
    via: str = setting("local", "local: this host only; ssh; srun: inside a Slurm allocation")
    address: str = setting("", "of the first node for the others; else its name")
    port: int = setting(29500, "of the first node: torch's store; the gate meets on the next one")
    retries: int = setting(3, "new attempts from the last complete checkpoint")
    retry_wait_seconds: float = setting(10.0, "before the first new attempt, doubled for each next")
    gate_wait_seconds: float = setting(60.0, "for all nodes to come to the gate")
    strict: bool = setting(False, "warnings of the gate refuse too")
    python: str = setting("", "interpreter on the nodes; else this one's path")
    ssh_options: tuple[str, ...] = setting((), 'for ssh, such as "-F", "/nfs/ssh_config"')
    environment: dict[str, str] = field(
        default_factory=dict, metadata={"help": "variables for the ranks, such as NCCL_SOCKET_IFNAME"}
    )


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The file. Paths are as the nodes see them."""

    run: str = field(metadata={"help": "run directory, shared by all nodes"})
    data: str = field(metadata={"help": "packed blocks, on each node's own disk"})
    model: str = field(metadata={"help": "Hugging Face directory: config.json, tokenizer, weights"})
    name: str = setting("", "of the run in heartbeats and records; else the run directory's")
    train: TrainSettings = TrainSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    launch: LaunchSettings = LaunchSettings()

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one rank consumes between two optimizer steps."""
        return self.train.micro_batch * self.train.accumulation


@dataclass(frozen=True, slots=True)
class JobFile:
    """Settings, and the file they come from."""

    path: str
    sha256: str  # what the gate compares over nodes, and the trainer with the gate's
    settings: JobSettings


VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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
MAX_TIMEOUT_SECONDS: Final = 30 * 86400
MIN_EPSILON: Final = 1e-30  # float32 knows no less that is worth a division
RANGES: Final[tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...]] = (
    (AT_LEAST_ONE, lambda number: number >= 1, "at least 1"),
    (ABOVE_ZERO, lambda number: 0 < number < math.inf, "more than 0"),
    (NOT_NEGATIVE, lambda number: 0 <= number < math.inf, "0 or more"),
    (FRACTIONS, lambda number: 0 <= number <= 1, "from 0 to 1"),
    (("train.beta1", "train.beta2"), lambda number: 0 <= number < 1, "from 0 to less than 1"),
    (("train.learning_rate",), lambda number: 0 < number <= 1, "more than 0, at most 1"),
    (("train.epsilon",), lambda number: MIN_EPSILON <= number <= 1, "from 1e-30 to 1"),
    (TIMEOUTS, lambda number: 0 < number <= MAX_TIMEOUT_SECONDS, "more than 0, at most 30 days"),
    (("launch.port",), lambda number: 0 < number < 65535, "a port below 65535"),
)


def read_job_file(path: str) -> JobFile:
    """The job in a TOML file. Raises Refusal that names the file, the key and what was expected."""
    try:
        data = Path(path).read_bytes()
        table = tomllib.loads(data.decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    return JobFile(path, hashlib.sha256(data).hexdigest(), parse_job_settings(table, path))


def parse_job_settings(table: dict[str, Any], where: str) -> JobSettings:
    """Raises Refusal; all that is wrong with a value or a name is said at once."""
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
    for names, fits, wanted in RANGES:
        off = [name for name in names if not fits(_setting_value(settings, name))]  # NaN fits nowhere
        problems += [f"{name}: expected {wanted}, found {_setting_value(settings, name)}" for name in off]
    for name, value in settings.launch.environment.items():
        if not VARIABLE_NAME.fullmatch(name) or "\0" in value:
            problems.append(f"launch.environment.{name!r}: not a variable that a process can be given")
        elif name in RESERVED_VARIABLES:
            problems.append(f"launch.environment.{name}: the launcher's own to set")
    problems += [f"{name}: empty" for name in ("run", "data", "model") if not getattr(settings, name)]
    return problems


def _setting_value(settings: JobSettings, name: str) -> Any:
    table, _, key = name.partition(".")
    return getattr(getattr(settings, table), key)


def settings_help() -> str:
    """All keys with their defaults and help, as the TOML that a user starts from."""
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
    return f"{name} = {json.dumps(default)}  # {text}"  # what we have as defaults reads the same in TOML


def smoke_test_job(job: JobFile) -> JobFile:
    """The last two steps and the save at the end of the epoch, on the real shards, in a directory of their own.

    Whatever hangs or breaks at that boundary breaks there, hours before the job would reach it; a run of the first
    steps says nothing of it.
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
