"""The launcher's side of the node programs: starts them, receives their messages, terminates them all."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Final

from wattwatch.trainer.launch.node import KILL_SECONDS, TERMINATE_SECONDS
from wattwatch.trainer.launch.placement import NodeTransport
from wattwatch.trainer.launch.processes import signal_name
from wattwatch.trainer.launch.protocol import MessageKind, NodeMessage, StartRequest, encode_request, parse_message

# A node program needs at most the first three terms to terminate its command; 5 s are for the network.
SHUTDOWN_SECONDS: Final = TERMINATE_SECONDS + 2 * KILL_SECONDS + 5.0
MAX_STDERR_BYTES: Final = 4096  # the end of it, of which the last line is shown


class NodeStartError(Exception):
    """The program that reaches a node (ssh, srun, python) cannot be started on this host."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that was never reached, or whose node program ended without reporting how its command ended."""

    index: int
    why: str


@dataclass(slots=True)
class _Link:
    transport: NodeTransport
    process: subprocess.Popen[bytes]
    running: set[int]  # nodes that have not reported their end
    buffer: bytes = b""
    stderr: bytes = b""  # the end of standard error, of ssh or srun
    open_streams: int = 2


class NodeLinks:
    """One process per transport, each in a session of its own: Ctrl-C then reaches only the launcher."""

    def __init__(self, transports: Sequence[NodeTransport], request: StartRequest) -> None:
        """Starts all of them. Raises NodeStartError."""
        self._selector = selectors.DefaultSelector()
        self._links: list[_Link] = []
        for transport in transports:
            own = replace(request, index=None if transport.spread else transport.indices[0])
            self._links.append(self._start(transport, own))

    def _start(self, transport: NodeTransport, request: StartRequest) -> _Link:
        try:
            process = subprocess.Popen(
                transport.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self.close()
            raise NodeStartError(f"{transport.command[0]}: {error.strerror or error}") from None
        link = _Link(transport, process, set(transport.indices))
        for stream, is_stderr in ((process.stdout, False), (process.stderr, True)):
            assert stream is not None
            # Standard error too: ssh blocks, and with it the node's messages, once an unread pipe is full.
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (link, is_stderr))
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has exited already, which is noticed when its streams end
            process.stdin.write(encode_request(request))
        return link

    @property
    def running(self) -> set[int]:
        """Indices of the nodes that have neither reported their end nor been lost."""
        return set().union(*(link.running for link in self._links))

    def receive(self, timeout_seconds: float) -> list[NodeMessage | LostNode]:
        """Messages that have arrived; waits up to `timeout_seconds` for the first.

        Also sleeps if no stream is open any more, so that a caller's loop does not spin.
        """
        if not self._selector.get_map():
            time.sleep(timeout_seconds)
            return []
        received: list[NodeMessage | LostNode] = []
        for key, _ in self._selector.select(timeout_seconds):
            link, is_stderr = key.data
            assert not isinstance(key.fileobj, int)
            received += self._read(link, key.fileobj, is_stderr)  # type: ignore[arg-type]  # registered above: a pipe
        return received

    def _read(self, link: _Link, stream: IO[bytes], is_stderr: bool) -> list[NodeMessage | LostNode]:
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(stream)
            link.open_streams -= 1
            return [] if link.open_streams else self._streams_ended(link)
        if is_stderr:
            link.stderr = (link.stderr + data)[-MAX_STDERR_BYTES:]
            return []
        *lines, link.buffer = (link.buffer + data).split(b"\n")
        received: list[NodeMessage | LostNode] = []
        for message in (parsed for line in lines if (parsed := parse_message(line)) is not None):
            if message.kind == MessageKind.TROUBLE:
                # A node that could not read the request does not know its index: then all of this link are lost.
                indices = {message.index} if message.index >= 0 else set(link.running)
                received += [LostNode(index, message.text) for index in sorted(indices)]
                link.running -= indices
            else:
                received.append(message)
                if message.kind in (MessageKind.ENDED, MessageKind.REFUSED):
                    link.running.discard(message.index)
        return received

    def _streams_ended(self, link: _Link) -> list[NodeMessage | LostNode]:
        """Nodes of this link that have not reported their end never will."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(KILL_SECONDS)
        stderr = link.stderr.decode("utf-8", "replace")
        why = describe_program_exit(link.transport.command[0], link.process.poll(), stderr)
        lost: list[NodeMessage | LostNode] = [LostNode(index, why) for index in sorted(link.running)]
        link.running.clear()
        return lost

    def terminate(self) -> None:
        """Closes the node programs' standard input, on which they terminate their commands. Does not wait."""
        for link in self._links:
            assert link.process.stdin is not None
            with contextlib.suppress(OSError):
                link.process.stdin.close()

    def close(self, wait_seconds: float = SHUTDOWN_SECONDS) -> None:
        """Terminates everything and waits for it, up to `wait_seconds`; then kills the local ssh or srun.

        The node program of a connection that is killed here still sees its standard input end.
        """
        self.terminate()
        until = time.monotonic() + wait_seconds
        while self._selector.get_map() and (left := until - time.monotonic()) > 0:
            self.receive(left)
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


def describe_program_exit(program: str, code: int | None, stderr: str) -> str:
    """`ssh exited with code 255: Connection refused`: the last line of standard error is the reason.

    Not after a signal: what it printed before that is not why it ended.
    """
    if code is not None and code < 0:
        return f"{program} was killed by {signal_name(-code)}"
    lines = stderr.strip().splitlines()
    return f"{program} exited with code {code}" + (f": {lines[-1].strip()}" if lines else "")
