"""A hung job's nodes are asked for their evidence, all at once, over the connections that the fleet holds. Rim.

Every part may fail for itself: what was had is in the directory the moment it came, and each failure is a sentence.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from collectors.clock import Clock
from collectors.ssh.channels import NodeChannels, Ran
from watcher.diagnose.capture.frames import Frame, FrameReader
from watcher.diagnose.capture.keeping import CaptureDirectory, KeptFile, name_of_node, name_of_rank
from watcher.diagnose.capture.plan import MIB, CapturePlan, NodePlan
from watcher.diagnose.capture.sending import NO_PYTHON, command_and_stdin
from watcher.diagnose.ras.client import Channel
from watcher.diagnose.ras.poll import poll_twice
from watcher.diagnose.words import one_line

NODES_AT_ONCE: Final = 128
RAS_APART_SHARE: Final = 0.4  # of the deadline; the two answers share the rest
PROTOCOL_BYTES: Final = 2 * MIB  # heads and sentences of one node
MOST_SENTENCES: Final = 200  # of one node
SENTENCE_MOST: Final = 500  # characters
MOST_RANK: Final = 999_999
SUFFIXES: Final = {
    "recorder.json": "recorder.json",
    "recorder-cpu.json": "recorder-cpu.json",  # of the backends beside NCCL
    "recorder": "recorder",  # a pickle
    "stacks": "stacks.txt",
    "ending.json": "ending.json",
    "log": "log.txt",
}

Access = Callable[[str], NodeChannels]


@dataclass(frozen=True, slots=True)
class CaptureResult:
    directory: Path
    files: dict[str, KeptFile]
    missing: tuple[str, ...]
    node_of_rank: dict[int, str]
    took_seconds: float


def capture(plan: CapturePlan, access: Access, directory: Path, clock: Clock) -> CaptureResult:
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
    pool = ThreadPoolExecutor(min(NODES_AT_ONCE, 2 * len(plan.nodes)) or 1, thread_name_prefix="capture")
    ends = began + plan.deadline_seconds
    try:
        # RAS first: its second poll comes some seconds after its first, and the rest is done between.
        asked = {
            pool.submit(_ask_ras, node, plan, access, kept, stop): f"{node.node}: NCCL RAS"
            for node in plan.nodes
            if node.ras and node.unreachable is None
        }
        asked |= {pool.submit(_ask_node, node, plan, access, kept, ends, elsewhere): node.node for node in plan.nodes}
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
    for sentence in _nowhere(elsewhere, kept.node_of_rank):
        kept.lack(sentence)
    kept.seal(plan.job, clock.wall())
    return CaptureResult(
        directory, dict(kept.files), tuple(kept.missing), dict(kept.node_of_rank), time.monotonic() - began
    )


def _nowhere(elsewhere: dict[str, list[int]], node_of_rank: dict[int, str]) -> Iterable[str]:
    """Ranks whose sockets no node serves. In a shared directory each node sees the sockets of all."""
    refused = {rank for ranks in elsewhere.values() for rank in ranks} - set(node_of_rank)
    for rank in sorted(refused):
        nodes = ", ".join(sorted(node for node, ranks in elsewhere.items() if rank in ranks))
        yield f"rank {rank}: nobody serves its worker socket on {nodes}"


# The program on the node


def _ask_node(
    node: NodePlan,
    plan: CapturePlan,
    access: Access,
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
    reader = FrameReader(plan.rank_bytes + PROTOCOL_BYTES)
    told = _Told(node.node, kept, elsewhere)

    def take(chunk: bytes) -> None:
        for frame in reader.feed(chunk):
            told.take(frame)

    ran = access(node.node).run(
        command, stdin, take, deadline_seconds=left, byte_limit=plan.node_bytes + PROTOCOL_BYTES
    )
    trouble = _trouble(ran, reader)
    if trouble:
        kept.lack(f"{node.node}: {trouble}")


def _trouble(ran: Ran, reader: FrameReader) -> str | None:
    said = f'; it says "{ran.complaint.splitlines()[-1]}"' if ran.complaint else ""
    if reader.complete:
        return None
    if ran.trouble is not None:
        torn = f", within a file of which {reader.torn:,} bytes had come" if reader.torn else ""
        return f"{ran.trouble}{torn}{said}"
    if reader.garbage:
        return (
            f"another program answered than the one we sent: {reader.garbage!r}: a forced command in authorized_keys?"
        )
    if ran.exit_status == NO_PYTHON:
        return "no Python 3.8 or later there, which asking the ranks takes"
    return f"the program there ended with exit status {ran.exit_status} before it was done{said}"


class _Told:
    """What one node tells, put into files. Nothing of it is believed to be of our making."""

    def __init__(self, node: str, kept: CaptureDirectory, elsewhere: dict[str, list[int]]) -> None:
        self.node = node
        self.kept = kept
        self.elsewhere = elsewhere
        self.sentences = 0

    def take(self, frame: Frame) -> None:
        head = frame.head
        if isinstance(head.get("missing"), str):
            self.sentences += 1
            if self.sentences <= MOST_SENTENCES:
                self.kept.lack(f"{self.node}: {_said(head['missing'])}")
        elif head.get("file") == "processes":
            self.kept.keep(f"node-{name_of_node(self.node)}.processes.json", frame.data, self.node)
        elif head.get("file") in SUFFIXES and _is_rank(head.get("rank")):
            rank = head["rank"]
            self.kept.place(rank, self.node)
            self.kept.keep(
                name_of_rank(rank, SUFFIXES[head["file"]]),
                frame.data,
                self.node,
                source=_said(head["source"]) if isinstance(head.get("source"), str) else None,
                owner_uid=_number(head.get("owner_uid"), int),
                age_seconds=_number(head.get("age_seconds"), float),
            )
        elif isinstance(head.get("elsewhere"), list):
            self.elsewhere[self.node] += [rank for rank in head["elsewhere"] if _is_rank(rank)]


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_RANK


def _number(value: object, kind: type[int] | type[float]) -> Any:
    return kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _said(text: str) -> str:
    """Nothing that a terminal obeys, and not endless."""
    return one_line(text[:SENTENCE_MOST])


# NCCL RAS


def _ask_ras(node: NodePlan, plan: CapturePlan, access: Access, kept: CaptureDirectory, stop: threading.Event) -> None:
    """Deadlines are of the machine's clock, as the process that answers knows no other."""
    port, apart = plan.settings.ras_port, RAS_APART_SHARE * plan.deadline_seconds
    each = (plan.deadline_seconds - apart) / 2.2
    channels = access(node.node)

    def connect() -> Channel:
        return channels.connect(port, each)

    polls = poll_twice(connect, Clock(), apart, place=f"127.0.0.1:{port}", deadline_seconds=each, stop=stop)
    name = f"node-{name_of_node(node.node)}"
    for number, answer in enumerate(polls.answers, 1):
        kept.keep(f"{name}.ras-{number}{answer.suffix}", answer.raw, node.node, source=f"127.0.0.1:{port}")
    if polls.answers:
        meta = {"apart_seconds": polls.apart_seconds, "trouble": polls.trouble}
        kept.keep(f"{name}.ras.json", json.dumps(meta).encode(), node.node)
    if polls.trouble:
        kept.lack(f"{node.node}: NCCL RAS: {polls.trouble}")
