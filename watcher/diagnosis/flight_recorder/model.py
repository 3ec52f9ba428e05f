"""What one rank's flight recorder holds, whatever wrote it: one model for all formats. Data only.

torch's recorder is a ring of the collectives that a rank launched, with how far each came. Formats 1.4 to 2.10, pickle
and JSON, NCCL and gloo differ in names and in what is missing; `read.py` brings them to this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

DEFAULT_GROUP: Final = "default_pg"  # torch's description of the group of all ranks


class LaunchFrame(NamedTuple):
    """One line of the Python stack that launched a collective."""

    function: str
    file: str
    line: int


class Operation(NamedTuple):
    """What was launched. Two ranks agree at a slot when theirs are the same. Equal ones are one object."""

    backend: str  # "nccl", "gloo"; "" where the record does not say
    name: str  # "all_reduce", "_all_gather_base", "barrier", "send", "recv"
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_types: tuple[str, ...] = ()  # "Float", "BFloat16"
    output_types: tuple[str, ...] = ()
    source: int | None = None  # of send and recv: places within the group, not ranks
    destination: int | None = None

    @property
    def point_to_point(self) -> bool:
        return self.source is not None


class OperationLaunch(NamedTuple):
    """One entry of the ring."""

    record: int  # counts all launches of the process: its order in time within the rank
    slot: int  # counts the collectives of the group, the same on all ranks that agree; of send and recv its own count
    operation: Operation
    started: bool | None  # None: this recorder does not watch starts (gloo; NCCL without TORCH_NCCL_ENABLE_TIMING)
    completed: bool
    retired: bool  # taken off the watchdog's list: with `completed` false it timed out; gloo: it ended
    frames: tuple[LaunchFrame, ...] = ()  # innermost first; () where the form has none (JSON) or stacks are off
    created_ns: int | None = None  # wall clock of the node
    timeout_ms: int | None = None

    @property
    def open(self) -> bool:
        """The rank, or its board, is still in it. gloo never says `completed`: there `retired` is the end of it."""
        return not self.completed and not (self.retired and self.operation.backend == "gloo")


class ProcessGroup(NamedTuple):
    """A process group. Names repeat (split_group), so name and members together are its identity."""

    name: str
    members: tuple[int, ...]  # ranks of the job, in the order of their places in the group; () where unknown
    description: str = ""  # "default_pg", "TENSOR_MODEL_PARALLEL_GROUP"

    def __str__(self) -> str:
        nameless = self.description in ("", "undefined")  # torch's word for a group that nobody described
        return f"group {self.name}" if nameless else self.description


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One rank's part in one group. The counts are collectives; send and recv are not in them. None: not told."""

    group: ProcessGroup
    last_enqueued: int | None
    last_started: int | None
    last_completed: int | None
    launches: tuple[OperationLaunch, ...]  # oldest first; may hold only what is open
    unrecorded_point_to_point: bool = False  # sends and receives were counted and not written down: gloo


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's whole record."""

    rank: int
    source: str  # the file, or the socket, that it came from: the evidence
    version: str  # "2.10"
    library_version: str  # of NCCL; "" where not told
    groups: tuple[GroupRecord, ...]


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """A record that is there, or should be, and cannot be used."""

    source: str
    rank: int | None  # None: the name does not tell
    why: str  # a sentence: what was found, what to do
    incomplete: bool  # empty or cut off: asking again may help; False: it is no record, or a hostile one
