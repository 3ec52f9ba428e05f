"""Captures the evidence of a hung job from all of its nodes at once, over the connections that the fleet holds.

Three parts: the plan (what to ask of which node, from what the watcher knows of the job), the command line that starts
the node agent, and the capture itself. Every part of a capture may fail by itself: what has been received is on disk at
once, and every failure becomes a sentence in `missing`.
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
from wattwatch.watcher.common.formatting import format_count, single_line
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

# The plan

MIB: Final = 2**20
MAX_PROCESSES_PER_NODE: Final = 64
# The node answers, whatever state its GPUs are in.
ANSWERING_STATUSES: Final = frozenset(
    {HostStatus.OK, HostStatus.SAMPLER_TIMEOUT, HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES}
)


@dataclass(frozen=True, slots=True)
class NodeCapturePlan:
    node: str
    ranks: tuple[int, ...] = ()  # known to run there; heartbeats on the node may name more
    processes: tuple[tuple[int | None, int], ...] = ()  # rank and pid
    unreachable: str | None = None  # why it cannot be asked; None: it can
    ras: bool = False  # also ask NCCL RAS there
    # Ranks of unreachable nodes. In a shared directory, this node finds their exit reports and logs.
    stands_in_for: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturePlan:
    job: str
    nodes: tuple[NodeCapturePlan, ...]
    run_directory: str | None = None
    settings: CaptureSettings = CaptureSettings()
    saving: bool = False  # a checkpoint is being saved: no FIFO is written to, as the dump may wait behind the save
    py_spy: bool = True  # use it where it is installed, for ranks that gave no stacks themselves
    # The limits are chosen, not measured.
    deadline_seconds: float = 10.0
    rank_bytes: int = 16 * MIB  # for one file of a rank
    node_bytes: int = 128 * MIB
    total_bytes: int = 512 * MIB


def plan_capture(spec: JobSpec, sample: JobSample, settings: CaptureSettings) -> CapturePlan:
    """Asks every node that answers. NCCL RAS is asked on two of them."""
    phases = {source.phase for source in sample.progress.sources}
    reachable = [node.node for node in sample.nodes if node.status in ANSWERING_STATUSES]
    # Any process reports on the whole job after asking all others; the second node is in case the first has none.
    ras_nodes = {*reachable[:1], *reachable[-1:]}
    plans = [_plan_node(node, sample, node.node in ras_nodes) for node in sample.nodes]
    lost = tuple(sorted(rank for plan in plans if plan.unreachable is not None for rank in plan.ranks))
    return CapturePlan(
        job=spec.name,
        nodes=tuple(replace(plan, stands_in_for=lost) if plan.node in reachable[:1] else plan for plan in plans),
        run_directory=spec.run_directory,
        settings=settings,
        saving="save" in phases,
    )


def _plan_node(node: NodeState, sample: JobSample, ras: bool) -> NodeCapturePlan:
    rank_of_gpu = {
        each.gpu.index: each.rank for each in sample.gpus if each.node == node.node and each.rank is not None
    }
    processes: list[tuple[int | None, int]] = []
    for process in node.processes or ():
        rank = process.rank
        # A process without a heartbeat has the rank of the GPU that it uses, if it uses exactly one.
        if rank is None and len(process.gpu_indexes) == 1:
            rank = rank_of_gpu.get(process.gpu_indexes[0])
        processes.append((rank, process.pid))
    ranks = {*rank_of_gpu.values(), *(rank for rank, _ in processes if rank is not None)}
    return NodeCapturePlan(
        node.node,
        tuple(sorted(ranks)),
        tuple(processes[:MAX_PROCESSES_PER_NODE]),
        None if node.status in ANSWERING_STATUSES else node.detail or str(node.status),
        ras,
    )


# Starting the node agent

NO_PYTHON_EXIT_STATUS: Final = 127  # of the command, where there is no Python 3.8 or later
ROUND_TRIP_SECONDS: Final = 1.5  # kept for sending and receiving, within the deadline of the capture


def command_and_stdin(plan: CapturePlan, node: NodeCapturePlan, seconds: float) -> tuple[str, bytes]:
    """The command line, which works in any login shell, and the agent with its request for stdin.

    `seconds`: time until the output must have been received.
    """
    request = {
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
    stdin = _compressed_node_agent() + json.dumps(request).encode("ascii")
    size = len(stdin)
    check = "import sys,zlib,json;sys.exit(sys.version_info<(3,8))"
    # `python3 -` would wait for the end of stdin, so a one-line program reads exactly as many bytes as there are.
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
    # The request follows the compressed program: zlib keeps it as unused_data.
    return zlib.compress((program + "\nrun_agent(json.loads(bytes(z.unused_data)))\n").encode("utf-8"), 9)


# The capture

MAX_CONCURRENT_NODES: Final = 128
RAS_POLL_GAP_SHARE: Final = 0.4  # of the deadline, between the two RAS reports; the two requests share the rest
PROTOCOL_BYTES: Final = 2 * MIB  # headers and messages of one node, beyond its files
# A node is not trusted: these keep its output from filling the disk or the report.
MAX_MESSAGES_PER_NODE: Final = 200
MAX_MESSAGE_CHARACTERS: Final = 500
MAX_RANK: Final = 999_999
FILE_SUFFIXES: Final = {  # kind of file in the agent's protocol -> suffix of the captured file
    "recorder.json": "recorder.json",
    "recorder-cpu.json": "recorder-cpu.json",  # of the backends other than NCCL
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


def capture_evidence(plan: CapturePlan, channels: OpenChannels, directory: Path, clock: Clock) -> CaptureResult:
    """Returns when all nodes are done, at the latest after `plan.deadline_seconds` of real time.

    Raises OSError if the directory cannot be written.
    """
    began = time.monotonic()
    captured = CaptureDirectory(directory, plan.total_bytes)
    captured.create()
    # Assigned before any node answers: in a shared directory, another node may send a file of the rank.
    for node in plan.nodes:
        for rank in node.ranks:
            captured.assign_rank(rank, node.node)
    stop = threading.Event()
    unserved: dict[str, list[int]] = defaultdict(list)  # by node, ranks whose sockets nothing serves there
    # Two tasks for a node at most: the agent and RAS.
    pool = ThreadPoolExecutor(min(MAX_CONCURRENT_NODES, 2 * len(plan.nodes)) or 1, thread_name_prefix="capture")
    deadline = began + plan.deadline_seconds
    try:
        # RAS first: its second report is due seconds after the first, and everything else is done in between.
        tasks = {
            pool.submit(_poll_ras, node, plan, channels, captured, stop): f"{node.node}: NCCL RAS"
            for node in plan.nodes
            if node.ras and node.unreachable is None
        }
        tasks |= {
            pool.submit(_run_node_agent, node, plan, channels, captured, deadline, unserved): node.node
            for node in plan.nodes
        }
        for future, what in tasks.items():
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                captured.add_missing(f"{what}: not finished within {plan.deadline_seconds:g} s")
            except Exception as error:  # noqa: BLE001 - a failure on one node must not end the capture of the others
                captured.add_missing(f"{what}: {type(error).__name__}: {error}")
    finally:
        stop.set()
        # Threads that are still blocked are left behind; the sealed directory drops what they send.
        pool.shutdown(wait=False, cancel_futures=True)
    for sentence in _unserved_sockets(unserved, captured.node_of_rank):
        captured.add_missing(sentence)
    captured.seal(plan.job, clock.wall())
    return CaptureResult(
        directory,
        dict(captured.files),
        tuple(captured.missing),
        dict(captured.node_of_rank),
        time.monotonic() - began,
    )


def _unserved_sockets(unserved: dict[str, list[int]], node_of_rank: dict[int, str]) -> Iterable[str]:
    """Ranks whose worker socket no node serves. In a shared directory, each node sees the sockets of all ranks."""
    ranks = {rank for of_node in unserved.values() for rank in of_node} - set(node_of_rank)
    for rank in sorted(ranks):
        nodes = ", ".join(sorted(node for node, of_node in unserved.items() if rank in of_node))
        yield f"rank {rank}: no process on {nodes} listens on its worker socket"


def _run_node_agent(
    node: NodeCapturePlan,
    plan: CapturePlan,
    channels: OpenChannels,
    captured: CaptureDirectory,
    deadline: float,
    unserved: dict[str, list[int]],
) -> None:
    if node.unreachable is not None:
        captured.add_missing(f"{node.node}: not queried: {node.unreachable}")
        return
    left = deadline - time.monotonic()
    if left <= 0.5:
        captured.add_missing(f"{node.node}: not queried, because no time was left")
        return
    command, stdin = command_and_stdin(plan, node, left)
    reader = AgentFrameReader(plan.rank_bytes + PROTOCOL_BYTES)
    output = _NodeOutput(node.node, captured, unserved)

    def receive(chunk: bytes) -> None:
        for frame in reader.feed(chunk):
            output.receive(frame)

    result = channels(node.node).run(
        command, stdin, receive, deadline_seconds=left, byte_limit=plan.node_bytes + PROTOCOL_BYTES
    )
    failure = _failure_reason(result, reader)
    if failure:
        captured.add_missing(f"{node.node}: {failure}")


def _failure_reason(result: CommandResult, reader: AgentFrameReader) -> str | None:
    """Why the agent's output is incomplete; None if it is complete."""
    stderr = f'; its last message: "{result.stderr_tail.splitlines()[-1]}"' if result.stderr_tail else ""
    if reader.complete:
        return None
    if result.error is not None:
        cut = (
            f" (the last file was cut off after {format_count(reader.cut_off_bytes, 'byte')})"
            if reader.cut_off_bytes
            else ""
        )
        return f"{result.error}{cut}{stderr}"
    # A forced command in authorized_keys ignores our command line and runs its own program.
    if reader.garbage:
        return (
            f"unexpected output {reader.garbage!r}: check whether a forced command in authorized_keys on the node runs "
            "another program"
        )
    if result.exit_status == NO_PYTHON_EXIT_STATUS:
        return "no Python 3.8 or later was found on the node; the capture needs it"
    return f"the capture program exited early with status {result.exit_status}{stderr}"


class _NodeOutput:
    """Writes what one node sends into files. Nothing in it is trusted: names are made here, numbers are checked."""

    def __init__(self, node: str, captured: CaptureDirectory, unserved: dict[str, list[int]]) -> None:
        self.node = node
        self.captured = captured
        self.unserved = unserved
        self.messages = 0

    def receive(self, frame: AgentFrame) -> None:
        header = frame.header
        if isinstance(header.get("missing"), str):
            # A broken run directory of a thousand ranks may produce thousands of messages.
            self.messages += 1
            if self.messages <= MAX_MESSAGES_PER_NODE:
                self.captured.add_missing(f"{self.node}: {_cleaned_text(header['missing'])}")
        elif header.get("file") == "processes":
            self.captured.save(f"node-{node_file_name(self.node)}.processes.json", frame.data, self.node)
        elif header.get("file") in FILE_SUFFIXES and _is_rank(header.get("rank")):
            rank = header["rank"]
            self.captured.assign_rank(rank, self.node)
            self.captured.save(
                rank_file_name(rank, FILE_SUFFIXES[header["file"]]),
                frame.data,
                self.node,
                source=_cleaned_text(header["source"]) if isinstance(header.get("source"), str) else None,
                owner_uid=_number(header.get("owner_uid"), int),
                age_seconds=_number(header.get("age_seconds"), float),
            )
        elif isinstance(header.get("elsewhere"), list):
            self.unserved[self.node] += [rank for rank in header["elsewhere"] if _is_rank(rank)]


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_RANK


def _number(value: object, kind: type[int] | type[float]) -> Any:
    return kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _cleaned_text(text: str) -> str:
    """Without control characters, and of bounded length."""
    return single_line(text[:MAX_MESSAGE_CHARACTERS])


def _poll_ras(
    node: NodeCapturePlan,
    plan: CapturePlan,
    channels: OpenChannels,
    captured: CaptureDirectory,
    stop: threading.Event,
) -> None:
    """Deadlines are in real time, also where the watcher's clock runs faster: NCCL knows no other."""
    port, gap = plan.settings.ras_port, RAS_POLL_GAP_SHARE * plan.deadline_seconds
    # Two requests share what is left of the deadline, with a tenth to spare.
    request_seconds = (plan.deadline_seconds - gap) / 2.2
    node_channels = channels(node.node)

    def connect() -> RasChannel:
        return node_channels.connect(port, request_seconds)

    address = f"127.0.0.1:{port}"
    polls = poll_twice(connect, Clock(), gap, address=address, deadline_seconds=request_seconds, stop=stop)
    name = f"node-{node_file_name(node.node)}"
    for number, answer in enumerate(polls.answers, 1):
        captured.save(f"{name}.ras-{number}{answer.suffix}", answer.raw, node.node, source=address)
    if polls.answers:
        metadata = {"apart_seconds": polls.interval_seconds, "trouble": polls.problem}
        captured.save(f"{name}.ras.json", json.dumps(metadata).encode(), node.node)
    if polls.problem:
        captured.add_missing(f"{node.node}: NCCL RAS: {polls.problem}")
