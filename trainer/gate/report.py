"""What the gate looks at, node by node: plain data that travels as JSON and is kept whole in gate.json.

None is "not looked at" or "could not be read", never zero; where something went wrong, `trouble` is the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.manifest import Manifest


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What the job is told to be. The same on every node, or the gate refuses."""

    world: int
    micro_batch: int
    accumulation: int
    keep: int  # checkpoints that stay
    seq_len: int | None = None  # None: what the manifests say
    vocab_size: int | None = None  # None: the model's, else the tokenizer's
    checkpoint_bytes: int | None = None  # None: the model's weights, else unknown

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one rank consumes between two optimizer steps."""
        return self.micro_batch * self.accumulation


@dataclass(frozen=True, slots=True)
class ShardLook:
    """A rank's token file as its own node sees it. Ids are those of the hashed pieces, not of the whole file."""

    rank: int
    path: str
    trouble: str | None = None
    manifest: Manifest | None = None
    size_bytes: int | None = None
    differing_offsets: tuple[int, ...] = ()  # pieces that are not what was packed
    min_id: int | None = None
    max_id: int | None = None
    starts_bytes: int | None = None
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointLook:
    """The shared directory: can this node write there, and is it the one that rank 0 writes to?"""

    directory: str
    trouble: str | None = None
    sees_rank_0: bool | None = None  # None: this is rank 0's node, or rank 0 wrote nothing
    free_bytes: int | None = None
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class ModelLook:
    """The files that the job starts from."""

    trouble: str | None = None
    vocab_size: int | None = None
    tokenizer_file_sha256: str | None = None
    tokenizer_meaning_sha256: str | None = None
    weights_bytes: int | None = None
    config_sha256: str | None = None  # of the job's configuration file
    resume_trouble: str | None = None
    resume: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    name: str
    driver: str
    memory_total_mib: float
    memory_used_mib: float


@dataclass(frozen=True, slots=True)
class DevicesLook:
    """Boards of the node that the job may use, and who computes on them already."""

    skipped: str | None = None  # why nobody looked
    trouble: str | None = None
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[str, ...] = ()  # "pid 123 on GPU 4"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Everything one gate process has seen, for the ranks it speaks for."""

    node: str
    ranks: tuple[int, ...]
    settings: GateSettings
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    code_sha256: str = ""
    shards: tuple[ShardLook, ...] = ()
    checkpoint: CheckpointLook | None = None
    model: ModelLook | None = None
    devices: DevicesLook | None = None
    troubles: tuple[str, ...] = ()  # what failed in the gate itself on this node
    seconds: dict[str, float] = field(default_factory=dict)  # of each part, since this process began
    wall: float = 0.0  # seconds since 1970 when it was sent
    skew_seconds: float | None = None  # this node's clock against rank 0's, transport included
