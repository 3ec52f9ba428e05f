"""What is asked of which node when a job hangs. Data, and how it follows from what the watcher knows of the job. Pure.

A plan rests on what was seen before: which ranks and processes are on which node, and whether the job saves.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.payload import PYTHON_CANDIDATES
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.channels import CommandResult, NodeChannels
from wattwatch.watcher.common.formatting import single_line
from wattwatch.watcher.config.settings import CaptureSettings
from wattwatch.watcher.detection.model import JobSample, JobSpec, NodeState
from wattwatch.watcher.diagnosis.capture.files import (
    AgentFrame,
    AgentFrameReader,
    CapturedFile,
    CaptureDirectory,
    node_file_name,
    rank_file_name,
)
from wattwatch.watcher.diagnosis.nccl_ras.client import RasChannel, poll_twice

MAX_PROCESSES_PER_NODE: Final = 64  # of a node
MIB: Final = 2**20
ANSWERING_STATUSES: Final = frozenset(
    {HostStatus.OK, HostStatus.SAMPLER_TIMEOUT, HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES}
)
"""The node answers, whatever its boards do."""


@dataclass(frozen=True, slots=True)
class NodeCapturePlan:
    """One node. `unreachable`: why it cannot be asked; None: it can."""

    node: str
    ranks: tuple[int, ...] = ()  # known to be there; heartbeats on the node tell more
    processes: tuple[tuple[int | None, int], ...] = ()  # rank and pid
    unreachable: str | None = None
    ras: bool = False
    stands_in_for: tuple[int, ...] = ()  # ranks of nodes that cannot be asked: a shared directory has their last words


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """One capture. The limits hold for a rank's file, for a node, and in all."""

    job: str
    nodes: tuple[NodeCapturePlan, ...]
    run_directory: str | None = None
    settings: CaptureSettings = CaptureSettings()
    saving: bool = False  # then no FIFO is touched: a dump may wait behind the save
    py_spy: bool = True  # where it is installed, and for ranks that gave no stacks themselves
    deadline_seconds: float = 10.0
    rank_bytes: int = 16 * MIB
    node_bytes: int = 128 * MIB
    total_bytes: int = 512 * MIB


def plan_capture(spec: JobSpec, sample: JobSample, settings: CaptureSettings) -> CapturePlan:
    phases = {source.phase for source in sample.progress.sources}
    reachable = [node.node for node in sample.nodes if node.status in ANSWERING_STATUSES]
    # Any process answers for the whole job, and asks all others for it: a second node only in case the first has none.
    asked = {*reachable[:1], *reachable[-1:]}
    plans = [_node_plan(node, sample, node.node in asked) for node in sample.nodes]
    lost = tuple(sorted(rank for plan in plans if plan.unreachable is not None for rank in plan.ranks))
    return CapturePlan(
        job=spec.name,
        nodes=tuple(replace(plan, stands_in_for=lost) if plan.node in reachable[:1] else plan for plan in plans),
        run_directory=spec.run_directory,
        settings=settings,
        saving="save" in phases,
    )


def _node_plan(node: NodeState, sample: JobSample, ras: bool) -> NodeCapturePlan:
    rank_of_board = {
        board.gpu.index: board.rank for board in sample.gpus if board.node == node.node and board.rank is not None
    }
    processes: list[tuple[int | None, int]] = []
    for process in node.processes or ():
        rank = process.rank
        if rank is None and len(process.gpu_indexes) == 1:
            rank = rank_of_board.get(process.gpu_indexes[0])
        processes.append((rank, process.pid))
    ranks = {*rank_of_board.values(), *(rank for rank, _ in processes if rank is not None)}
    return NodeCapturePlan(
        node.node,
        tuple(sorted(ranks)),
        tuple(processes[:MAX_PROCESSES_PER_NODE]),
        None if node.status in ANSWERING_STATUSES else node.detail or str(node.status),
        ras,
    )


# How the program for a node travels: one command line without program in it, and the program on its stdin.

NO_PYTHON_EXIT_STATUS = 127  # exit status of the command where there is no Python 3.8 or later
ROUND_TRIP_SECONDS = 1.5  # for the way there and back, within the capture's deadline


def command_and_stdin(plan: CapturePlan, node: NodeCapturePlan, seconds: float) -> tuple[str, bytes]:
    """`seconds`: until the answer must be here. The command passes any login shell, as the probe's does."""
    asked = {
        "run_directory": plan.run_directory,
        "ranks": node.ranks,
        "stands_in_for": node.stands_in_for,
        "processes": node.processes,
        "recorder_files": plan.settings.recorder_files,
        "recorder_pipe": plan.settings.recorder_pipe,
        "saving": plan.saving,
        "py_spy": plan.py_spy,
        "deadline_seconds": max(1.0, seconds - ROUND_TRIP_SECONDS),
        "rank_bytes": plan.rank_bytes,
        "node_bytes": plan.node_bytes,
    }
    stdin = _compressed_node_agent() + json.dumps(asked).encode("ascii")
    size = len(stdin)
    check = "import sys,zlib,json;sys.exit(sys.version_info<(3,8))"
    start = (
        f"import os,zlib;b=bytearray();"
        f"[b.extend(os.read(0,{size}-len(b)) or os._exit(0)) for _ in iter(lambda:len(b)<{size},False)];"
        f"z=zlib.decompressobj();exec(z.decompress(bytes(b)));"
    )
    command = (
        f"exec /bin/sh -c 'for p in {PYTHON_CANDIDATES}; do "
        f'"$p" -I -S -c "{check}" </dev/null >/dev/null 2>&1 && exec "$p" -I -S -u -c "{start}"; '
        f"done; exit {NO_PYTHON_EXIT_STATUS}'"
    )
    return command, stdin


@lru_cache(maxsize=1)
def _compressed_node_agent() -> bytes:
    program = resources.files(__package__).joinpath("node_agent.py").read_text("utf-8")
    # The plan follows the compressed program: zlib keeps it as unused_data.
    return zlib.compress((program + "\nrun_agent(json.loads(bytes(z.unused_data)))\n").encode("utf-8"), 9)


# A hung job's nodes are asked for their evidence, all at once, over the connections that the fleet holds. Rim.
#
# Every part may fail for itself: what was had is in the directory the moment it came, and each failure is a sentence.

MAX_CONCURRENT_NODES: Final = 128
RAS_POLL_GAP_SHARE: Final = 0.4  # of the deadline; the two answers share the rest
PROTOCOL_BYTES: Final = 2 * MIB  # heads and sentences of one node
MAX_MESSAGES_PER_NODE: Final = 200  # of one node
MAX_MESSAGE_CHARACTERS: Final = 500  # characters
MAX_RANK: Final = 999_999
FILE_SUFFIXES: Final = {
    "recorder.json": "recorder.json",
    "recorder-cpu.json": "recorder-cpu.json",  # of the backends beside NCCL
    "recorder": "recorder",  # a pickle
    "stacks": "stacks.txt",
    "ending.json": "ending.json",
    "log": "log.txt",
}

OpenChannels = Callable[[str], NodeChannels]


@dataclass(frozen=True, slots=True)
class CaptureResult:
    directory: Path
    files: dict[str, CapturedFile]
    missing: tuple[str, ...]
    node_of_rank: dict[int, str]
    took_seconds: float


def capture_evidence(plan: CapturePlan, access: OpenChannels, directory: Path, clock: Clock) -> CaptureResult:
    """Returns when all have answered, at the latest after `plan.deadline_seconds` of the machine's clock.

    Raises OSError where the directory cannot be written.
    """
    began = time.monotonic()
    kept = CaptureDirectory(directory, plan.total_bytes)
    kept.make()
    for node in plan.nodes:  # first of all: another node may tell of a rank that it is not the node of
        for rank in node.ranks:
            kept.place(rank, node.node)
    stop = threading.Event()
    elsewhere: dict[str, list[int]] = defaultdict(list)
    pool = ThreadPoolExecutor(min(MAX_CONCURRENT_NODES, 2 * len(plan.nodes)) or 1, thread_name_prefix="capture")
    ends = began + plan.deadline_seconds
    try:
        # RAS first: its second poll comes some seconds after its first, and the rest is done between.
        asked = {
            pool.submit(_poll_ras, node, plan, access, kept, stop): f"{node.node}: NCCL RAS"
            for node in plan.nodes
            if node.ras and node.unreachable is None
        }
        asked |= {
            pool.submit(_run_node_agent, node, plan, access, kept, ends, elsewhere): node.node for node in plan.nodes
        }
        for future, what in asked.items():
            try:
                future.result(max(0.0, ends - time.monotonic()))
            except TimeoutError:
                kept.lack(f"{what}: not done within {plan.deadline_seconds:g} s")
            except Exception as error:  # noqa: BLE001 - one node's oddity costs one node
                kept.lack(f"{what}: {type(error).__name__}: {error}")
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
    for sentence in _unserved_sockets(elsewhere, kept.node_of_rank):
        kept.lack(sentence)
    kept.seal(plan.job, clock.wall())
    return CaptureResult(
        directory, dict(kept.files), tuple(kept.missing), dict(kept.node_of_rank), time.monotonic() - began
    )


def _unserved_sockets(elsewhere: dict[str, list[int]], node_of_rank: dict[int, str]) -> Iterable[str]:
    """Ranks whose sockets no node serves. In a shared directory each node sees the sockets of all."""
    refused = {rank for ranks in elsewhere.values() for rank in ranks} - set(node_of_rank)
    for rank in sorted(refused):
        nodes = ", ".join(sorted(node for node, ranks in elsewhere.items() if rank in ranks))
        yield f"rank {rank}: nobody serves its worker socket on {nodes}"


# The program on the node


def _run_node_agent(
    node: NodeCapturePlan,
    plan: CapturePlan,
    access: OpenChannels,
    kept: CaptureDirectory,
    ends: float,
    elsewhere: dict[str, list[int]],
) -> None:
    if node.unreachable is not None:
        kept.lack(f"{node.node}: not asked: {node.unreachable}")
        return
    left = ends - time.monotonic()
    if left <= 0.5:
        kept.lack(f"{node.node}: not asked: its turn came too late")
        return
    command, stdin = command_and_stdin(plan, node, left)
    reader = AgentFrameReader(plan.rank_bytes + PROTOCOL_BYTES)
    told = _NodeOutput(node.node, kept, elsewhere)

    def take(chunk: bytes) -> None:
        for frame in reader.feed(chunk):
            told.take(frame)

    ran = access(node.node).run(
        command, stdin, take, deadline_seconds=left, byte_limit=plan.node_bytes + PROTOCOL_BYTES
    )
    trouble = _failure_reason(ran, reader)
    if trouble:
        kept.lack(f"{node.node}: {trouble}")


def _failure_reason(ran: CommandResult, reader: AgentFrameReader) -> str | None:
    said = f'; it says "{ran.stderr_tail.splitlines()[-1]}"' if ran.stderr_tail else ""
    if reader.complete:
        return None
    if ran.error is not None:
        torn = f", within a file of which {reader.torn:,} bytes had come" if reader.torn else ""
        return f"{ran.error}{torn}{said}"
    if reader.garbage:
        return (
            f"another program answered than the one we sent: {reader.garbage!r}: a forced command in authorized_keys?"
        )
    if ran.exit_status == NO_PYTHON_EXIT_STATUS:
        return "no Python 3.8 or later there, which asking the ranks takes"
    return f"the program there ended with exit status {ran.exit_status} before it was done{said}"


class _NodeOutput:
    """What one node tells, put into files. Nothing of it is believed to be of our making."""

    def __init__(self, node: str, kept: CaptureDirectory, elsewhere: dict[str, list[int]]) -> None:
        self.node = node
        self.kept = kept
        self.elsewhere = elsewhere
        self.sentences = 0

    def take(self, frame: AgentFrame) -> None:
        head = frame.head
        if isinstance(head.get("missing"), str):
            self.sentences += 1
            if self.sentences <= MAX_MESSAGES_PER_NODE:
                self.kept.lack(f"{self.node}: {_cleaned_text(head['missing'])}")
        elif head.get("file") == "processes":
            self.kept.keep(f"node-{node_file_name(self.node)}.processes.json", frame.data, self.node)
        elif head.get("file") in FILE_SUFFIXES and _is_rank(head.get("rank")):
            rank = head["rank"]
            self.kept.place(rank, self.node)
            self.kept.keep(
                rank_file_name(rank, FILE_SUFFIXES[head["file"]]),
                frame.data,
                self.node,
                source=_cleaned_text(head["source"]) if isinstance(head.get("source"), str) else None,
                owner_uid=_number(head.get("owner_uid"), int),
                age_seconds=_number(head.get("age_seconds"), float),
            )
        elif isinstance(head.get("elsewhere"), list):
            self.elsewhere[self.node] += [rank for rank in head["elsewhere"] if _is_rank(rank)]


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_RANK


def _number(value: object, kind: type[int] | type[float]) -> Any:
    return kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _cleaned_text(text: str) -> str:
    """Nothing that a terminal obeys, and not endless."""
    return single_line(text[:MAX_MESSAGE_CHARACTERS])


# NCCL RAS


def _poll_ras(
    node: NodeCapturePlan, plan: CapturePlan, access: OpenChannels, kept: CaptureDirectory, stop: threading.Event
) -> None:
    """Deadlines are of the machine's clock, as the process that answers knows no other."""
    port, apart = plan.settings.ras_port, RAS_POLL_GAP_SHARE * plan.deadline_seconds
    each = (plan.deadline_seconds - apart) / 2.2
    channels = access(node.node)

    def connect() -> RasChannel:
        return channels.connect(port, each)

    polls = poll_twice(connect, Clock(), apart, address=f"127.0.0.1:{port}", deadline_seconds=each, stop=stop)
    name = f"node-{node_file_name(node.node)}"
    for number, answer in enumerate(polls.answers, 1):
        kept.keep(f"{name}.ras-{number}{answer.suffix}", answer.raw, node.node, source=f"127.0.0.1:{port}")
    if polls.answers:
        meta = {"apart_seconds": polls.interval_seconds, "trouble": polls.problem}
        kept.keep(f"{name}.ras.json", json.dumps(meta).encode(), node.node)
    if polls.problem:
        kept.lack(f"{node.node}: NCCL RAS: {polls.problem}")
