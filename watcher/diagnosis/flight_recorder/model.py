"""What one rank's flight recorder holds: one data model for all formats. Data only.

PyTorch's flight recorder is a ring buffer of the collectives that a rank launched, with how far each one got
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). Formats 1.4 to 2.10, pickle and JSON, NCCL
and Gloo use different names and leave out different fields; `schema.py` and `loader.py` bring them all to this model.

A *slot* is PyTorch's sequence number of a collective within its process group (`collective_seq_id`): ranks that agree
launch the same operation at the same slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

DEFAULT_GROUP: Final = "default_pg"  # PyTorch's description of the group of all ranks


class LaunchFrame(NamedTuple):
    """One line of the Python stack that launched a collective."""

    function: str
    file: str
    line: int


class Operation(NamedTuple):
    """What was launched. Two ranks agree at a slot if their operations agree. Equal operations are one object."""

    backend: str  # "nccl", "gloo"; "" if the record does not say
    name: str  # "all_reduce", "_all_gather_base", "barrier", "send", "recv"
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_types: tuple[str, ...] = ()  # "Float", "BFloat16"
    output_types: tuple[str, ...] = ()
    source: int | None = None  # send and recv only: indices into the members of the group, not ranks of the job
    destination: int | None = None

    @property
    def point_to_point(self) -> bool:
        """True for send and recv."""
        return self.source is not None


class OperationLaunch(NamedTuple):
    """One entry of the ring buffer: one operation that the rank launched."""

    record_id: int  # counts all launches of the process: the order in time within the rank
    slot: int  # sequence number within the group; send and recv have a sequence of their own
    operation: Operation
    started: bool | None  # None: this recorder does not see starts (Gloo; NCCL without TORCH_NCCL_ENABLE_TIMING)
    completed: bool
    retired: bool  # the watchdog no longer tracks it. NCCL: if not `completed`, it timed out. Gloo: it ended
    frames: tuple[LaunchFrame, ...] = ()  # innermost first; () in JSON dumps, or if stack recording is off
    created_ns: int | None = None  # wall clock of the node
    timeout_ms: int | None = None

    @property
    def pending(self) -> bool:
        """Launched and not finished. Gloo never sets `completed`; there, `retired` marks the end."""
        return not self.completed and not (self.retired and self.operation.backend == "gloo")


class ProcessGroup(NamedTuple):
    """A process group. `split_group` repeats names, so the name and the members together identify a group."""

    name: str
    members: tuple[int, ...]  # ranks of the job, in group order; () if unknown
    description: str = ""  # "default_pg", "TENSOR_MODEL_PARALLEL_GROUP"

    def __str__(self) -> str:
        # "undefined" is what PyTorch writes for a group that was created without a description.
        undescribed = self.description in ("", "undefined")
        return f"group {self.name}" if undescribed else self.description


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What one rank recorded about one group. The three counts cover collectives only, not send and recv.

    A count of None means that the record does not say; 0 means none yet.
    """

    group: ProcessGroup
    last_enqueued: int | None
    last_started: int | None
    last_completed: int | None
    launches: tuple[OperationLaunch, ...]  # oldest first; some dumps hold only pending launches
    unrecorded_point_to_point: bool = False  # Gloo: sends and receives were counted but not recorded


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The whole flight record of one rank."""

    rank: int
    source: str  # the file or socket that it came from, shown as evidence
    version: str  # of the dump format: "2.10"
    library_version: str  # of NCCL; "" if the record does not say
    groups: tuple[GroupRecord, ...]


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """A record that exists, or should, but cannot be used."""

    source: str
    rank: int | None  # None: the file name contains no rank
    why: str  # a sentence: what was found, what to do
    incomplete: bool  # True: empty or cut off, requesting it again may help. False: not a record, or a hostile one


def position_text(group: ProcessGroup, slot: int) -> str:
    """`sequence number 7 of default_pg`: a slot as PyTorch's logs call it (SeqNum)."""
    return f"sequence number {slot} of {group}"
