"""The launcher's side of the node programs: orders out, words back, and an end for all of them."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Final

from wattwatch.trainer.launch.node import KILL_SECONDS, TERMINATE_SECONDS
from wattwatch.trainer.launch.placement import NodeTransport
from wattwatch.trainer.launch.processes import signal_name
from wattwatch.trainer.launch.protocol import MessageKind, NodeMessage, StartRequest, encode_request, parse_message

SHUTDOWN_SECONDS: Final = TERMINATE_SECONDS + 2 * KILL_SECONDS + 5.0  # a node program keeps within the first three
MAX_STDERR_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node whose program ended without telling how, or was never reached."""

    index: int
    why: str


@dataclass(slots=True)
class _Link:
    connection: NodeTransport
    process: subprocess.Popen[bytes]
    waiting: set[int]  # nodes that have not told of their end
    buffer: bytes = b""
    complaint: bytes = b""  # the end of standard error, of ssh or srun
    open_streams: int = 2
    told: list[NodeMessage | LostNode] = field(default_factory=list)


class NodeLinks:
    """One process a connection, each in a session of its own: Ctrl-C reaches only us, and we decide."""

    def __init__(self, connections: Sequence[NodeTransport], order: StartRequest) -> None:
        self._selector = selectors.DefaultSelector()
        self._links: list[_Link] = []
        self._ending = False
        for connection in connections:
            own = replace(order, index=None if connection.spread else connection.indices[0])
            self._links.append(self._started(connection, own))

    def _started(self, connection: NodeTransport, order: StartRequest) -> _Link:
        try:
            process = subprocess.Popen(
                connection.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self.close()
            raise NodeStartError(f"{connection.command[0]}: {error.strerror or error}") from None
        link = _Link(connection, process, set(connection.indices))
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (link, is_error))
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # gone already: its end is noticed below
            process.stdin.write(encode_request(order))
        return link

    @property
    def waiting(self) -> set[int]:
        """Nodes whose end nobody has told yet."""
        return set().union(*(link.waiting for link in self._links))

    def hear(self, timeout_seconds: float) -> list[NodeMessage | LostNode]:
        """What has come, waiting for the first of it at most so long. Sleeps even where nothing is left to hear."""
        if not self._selector.get_map():
            time.sleep(timeout_seconds)
            return []
        told: list[NodeMessage | LostNode] = []
        for key, _ in self._selector.select(timeout_seconds):
            link, is_error = key.data
            assert not isinstance(key.fileobj, int)
            told += self._read(link, key.fileobj, is_error)  # type: ignore[arg-type]  # registered above: a pipe
        return told

    def _read(self, link: _Link, stream: IO[bytes], is_error: bool) -> list[NodeMessage | LostNode]:
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(stream)
            link.open_streams -= 1
            return [] if link.open_streams else self._over(link)
        if is_error:
            link.complaint = (link.complaint + data)[-MAX_STDERR_BYTES:]
            return []
        *lines, link.buffer = (link.buffer + data).split(b"\n")
        words = [word for line in lines if (word := parse_message(line)) is not None]
        told: list[NodeMessage | LostNode] = []
        for word in words:
            if word.kind == MessageKind.TROUBLE:
                indices = {word.index} if word.index >= 0 else set(link.waiting)
                told += [LostNode(index, word.text) for index in sorted(indices)]
                link.waiting -= indices
            else:
                told.append(word)
                link.waiting -= {word.index} if word.kind in (MessageKind.ENDED, MessageKind.REFUSED) else set()
        return told

    def _over(self, link: _Link) -> list[NodeMessage | LostNode]:
        """Both streams have ended: whoever has not told its end never will."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(KILL_SECONDS)
        why = describe_program_exit(
            link.connection.command[0], link.process.poll(), link.complaint.decode("utf-8", "replace")
        )
        lost: list[NodeMessage | LostNode] = [LostNode(index, why) for index in sorted(link.waiting)]
        link.waiting.clear()
        return lost

    def end(self) -> None:
        """Cuts the lifelines. The nodes' words are still to be heard."""
        for link in self._links:
            assert link.process.stdin is not None
            with contextlib.suppress(OSError):
                link.process.stdin.close()

    def close(self, patience_seconds: float = SHUTDOWN_SECONDS) -> None:
        """Ends everything and waits for it; what is left then is killed, here: a node then has its lifeline only."""
        self.end()
        until = time.monotonic() + patience_seconds
        while self._selector.get_map() and (left := until - time.monotonic()) > 0:
            self.hear(left)
        for link in self._links:
            try:
                link.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()
            for stream in (link.process.stdout, link.process.stderr):
                assert stream is not None
                stream.close()
        self._selector.close()


def describe_program_exit(program: str, code: int | None, complaint: str) -> str:
    """`ssh ended with exit code 255: Connection refused`; what it complained of before a signal came is no reason."""
    if code is not None and code < 0:
        return f"{program} was killed by {signal_name(-code)}"
    lines = complaint.strip().splitlines()
    return f"{program} ended with exit code {code}" + (f": {lines[-1].strip()}" if lines else "")


class NodeStartError(Exception):
    """The program that reaches a node cannot be started here."""
